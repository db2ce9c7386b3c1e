"""absmax against PyTorch's own expressions, and what test_linear.py leaves open about pack."""

from __future__ import annotations

import gpu_checks as checks
import pytest
import torch
from gpu_checks import Gpu
from ringfp4.runtime import lowlevel, reference
from ringfp4.validate import quantiser_cases

NAMES = ("tails", "small", "qkv", "attn_out", "fc2")  # K = 96, 512, 5376, 7168, 14336


def pytorch_scale(x: torch.Tensor, rule: str) -> torch.Tensor:
    """The two rules as the programs that they are taken from write them."""
    if rule == "fp32":
        return x.abs().amax().float() / 2688.0
    return (torch.amax(x.abs()) / 2688.0).float()


def bits(x: torch.Tensor) -> list[int]:
    """float32 patterns, every NaN as the same one."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32).tolist()


@pytest.mark.parametrize("m", [1, 7, 128, 2049])
@pytest.mark.parametrize("name", NAMES)
def test_absmax_equals_pytorch(gpu: Gpu, name: str, m: int) -> None:
    _, k = gpu.shape(name)
    x = quantiser_cases.random_values("heavy tails", m * k, m, "cuda").reshape(m, k)
    for rule in reference.SCALE_RULES:
        assert bits(lowlevel.absmax(x, rule)) == bits(pytorch_scale(x, rule))


@pytest.mark.parametrize("name", ["tails", "attn_out"])
def test_absmax_finds_the_maximum_wherever_it_is(gpu: Gpu, name: str) -> None:
    """One large value at a time, negative, in rows that are not neighbours in memory."""
    _, k = gpu.shape(name)
    wide = torch.full((4300, k + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    x = wide[:, :k]
    x.copy_(torch.rand(4300, k, device="cuda"))
    state = lowlevel.absmax_state(x.device)
    for row, column in [(0, 0), (0, k - 1), (4299, 0), (4299, k - 1), (4223, 31), (4224, 32), (1234, k // 2)]:
        before = x[row, column].clone()
        x[row, column] = -3.5
        assert lowlevel.absmax(x, state=state).item() == pytorch_scale(x, "fp32").item() > 1e-3
        x[row, column] = before


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("rule", reference.SCALE_RULES)
def test_every_maximum_gives_pytorchs_scale(gpu: Gpu, rule: str) -> None:
    """All 65,536 BF16 patterns, NaN and infinity among them."""
    _, k = gpu.shape("tails")
    patterns = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(patterns), k, dtype=torch.bfloat16, device="cuda")
    x[:, k - 1] = patterns
    state = lowlevel.absmax_state(x.device)
    scales = torch.stack([lowlevel.absmax(row, rule, state).clone() for row in x.split(1)])
    amax = patterns.abs()
    expected = amax.float() / 2688.0 if rule == "fp32" else (amax / 2688.0).float()
    assert bits(scales) == bits(expected)


def test_a_replayed_graph_starts_from_zero_each_time(gpu: Gpu) -> None:
    """No maximum and no arrival is left over from one launch to the next."""
    _, k = gpu.shape("small")
    x = torch.empty(3000, k, dtype=torch.bfloat16, device="cuda")
    state, slots = lowlevel.absmax_state(x.device), checks.GuardedSlots(len(x), k, 0xFF)
    x.fill_(1.0)
    lowlevel.pack(x, lowlevel.absmax(x, state=state), slots.slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale = lowlevel.absmax(x, state=state)
        lowlevel.pack(x, scale, slots.slots)
    for size in (64.0, 1.0, float("nan"), 0.125):
        x.copy_(size * torch.randn(x.shape, device="cuda"))
        graph.replay()
        packed = slots.slots.clone()
        assert bits(scale) == bits(pytorch_scale(x, "fp32"))
        assert checks.packed_equals(slots, x, scale)
        assert torch.equal(packed, slots.slots)


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-3, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["tails", "attn_out"])
def test_pack_of_strided_rows_with_every_pattern(gpu: Gpu, name: str, scale: float) -> None:
    """Scales at the ends of their range; rows that lie among NaN; blocks of nothing but NaN."""
    _, k = gpu.shape(name)
    values = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(torch.bfloat16)
    order = torch.randperm(len(values), device="cuda")
    blocks = torch.cat((values[order], torch.full((64,), float("nan"), device="cuda").bfloat16()))
    m = len(blocks) // k
    wide = torch.full((m, k + 40), float("nan"), dtype=torch.bfloat16, device="cuda")
    x = wide[:, 8 : 8 + k]
    x.copy_(blocks[-m * k :].view(m, k))
    slots = checks.GuardedSlots(m, k, 0x7F)
    assert checks.packed_equals(slots, x, torch.tensor(scale, device="cuda"))
