"""The reference against Comfy Kitchen's own CUDA quantiser, byte for byte, on a GPU.

Wherever Comfy and the reference agree here, a kernel that equals the reference equals Comfy.
"""

from __future__ import annotations

import pytest
import torch
from ringfp4.runtime import reference
from ringfp4.validate import comfy, reciprocal
from ringfp4.validate import quantiser_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(comfy.version() != comfy.VERSION, reason=f"needs comfy-kitchen {comfy.VERSION}"),
    pytest.mark.timeout(120),
]
K = 256


def differing_bytes(x: torch.Tensor, scale: torch.Tensor) -> int:
    """Of data and scales, padding included; rows are filled up to 16 with zeros before.

    (Where Comfy fills up rows itself and the tensor scale is 0 or subnormal, it stores scale
    bytes of 0x7E for the added rows, as for any zero block then: their data are 0.)
    """
    x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 16))
    q, sf = reference.quantise(x, scale)
    comfy_q, comfy_sf = comfy.quantise(x, scale)
    return int((q != comfy_q).sum() + (sf.flatten() != comfy_sf.flatten()).sum())


@pytest.mark.parametrize("group", cases.ADVERSARIAL)
def test_adversarial_cases_equal_comfy(group: str) -> None:
    wrong = {}
    for case in cases.ADVERSARIAL[group]():
        if count := differing_bytes(case.rows(K).cuda(), case.scale.cuda()):
            wrong[case.name] = count
    assert not wrong


@pytest.mark.parametrize("kind", cases.DISTRIBUTIONS)
def test_random_values_equal_comfy(kind: str) -> None:
    """6 distributions x 2 seeds x 2^23 values: 10^8 in all, each under both scale rules."""
    for seed in (1, 2):
        x = cases.random_values(kind, 1 << 23, seed, "cuda").reshape(-1, K)
        if kind == "bit patterns":  # a scale from NaN would be NaN for all of them
            scales = [torch.tensor(v, device="cuda") for v in (1.0, 0.0123)]
        else:
            scales = [reference.tensor_scale(x, rule) for rule in reference.SCALE_RULES]
        for scale in scales:
            assert differing_bytes(x, scale) == 0


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 16), (17, 48), (100, 100), (129, 200), (16, 1000), (255, 72)]
)
def test_padding_equals_comfy(rows: int, columns: int) -> None:
    """Comfy pads rows and columns to 16 with zeros; scale bytes of padding are 0."""
    x = cases.random_values("normal", 512 * 1024, 3).reshape(512, 1024)[:rows, :columns].contiguous()
    scale = reference.tensor_scale(x).cuda()
    comfy_q, comfy_sf = comfy.quantise(x.cuda(), scale)
    padded = torch.nn.functional.pad(x, (0, -columns % 16, 0, -rows % 16)).cuda()
    q, sf = reference.quantise(padded, scale)
    assert torch.equal(q, comfy_q)
    assert torch.equal(sf.flatten(), comfy_sf.flatten())


@pytest.mark.parametrize("rule", reference.SCALE_RULES)
def test_scale_rules_equal_pytorch_on_this_device(rule: str) -> None:
    """Every finite BF16 amax, and infinity."""
    for bits in torch.arange(0x7F81, dtype=torch.int16).split(4096):
        amax = bits.view(torch.bfloat16).cuda()
        theirs = amax.float() / 2688 if rule == "fp32" else (amax / 2688.0).float()
        ours = torch.stack([reference.tensor_scale(a.reshape(1), rule) for a in amax.cpu()]).cuda()
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_reciprocal_unit_equals_the_table() -> None:
    assert reciprocal.count_differences() == 0


@pytest.mark.parametrize("group", ["boundaries", "midpoints", "reciprocal", "scale_range", "own_scale"])
def test_reference_gives_the_same_bytes_on_cpu_and_gpu(group: str) -> None:
    for case in cases.ADVERSARIAL[group]():
        x = case.rows(K)
        for on_cpu, on_gpu in zip(
            reference.quantise(x, case.scale), reference.quantise(x.cuda(), case.scale.cuda()), strict=True
        ):
            assert torch.equal(on_cpu, on_gpu.cpu()), case.name
