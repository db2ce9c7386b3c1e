"""What only the native Hopper kernels have: the weight layout, 2^8 in alpha, tiles chosen by M.

Artefacts: ``python -m ringfp4.build_cubins --shapes h3 tests/gpu/hopper_shapes.toml --out DIR``.
"""

from __future__ import annotations

import gpu_checks as checks
import pytest
import torch
from gpu_checks import Gpu
from ringfp4 import runtime
from ringfp4.runtime import devices, lowlevel, reference
from ringfp4.runtime.hopper_layout import from_hopper, to_hopper
from ringfp4.validate import linear_cases as cases

SMALL = ((64, 128), (192, 128), (320, 384))  # N, K
# Tensor scales whose product is subnormal, 1, or so large that 2^8 times it overflows.
ALPHAS = (
    (2.0**-149, 2.0**12),
    (2.0**-130, 3.0),
    (1.0, 1.0),
    (2.0**100, 2.0**18),
    (2.0**100, 2.0**21),
    (2.0**119, 1.5),
)


def served(gpu: Gpu, shape: tuple[int, int]) -> tuple[int, int]:
    if shape not in gpu.linears or not lowlevel.variants("repack", *shape):
        pytest.skip(f"no sm_90a cubins for N = {shape[0]}, K = {shape[1]}")
    return shape


@pytest.mark.parametrize("shape", [*SMALL, (5376, 7168)])
def test_repack_is_the_layout_byte_for_byte(gpu: Gpu, shape: tuple[int, int]) -> None:
    n, k = served(gpu, shape)
    g = torch.Generator("cuda").manual_seed(n)
    qdata = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=g)
    scales = torch.randint(0, 256, (n, k // 16), dtype=torch.uint8, device="cuda", generator=g)
    w = runtime.Nvfp4Weight(qdata, reference.swizzle(scales), torch.ones((), device="cuda"))
    w.prepare()
    assert w.prepared is not None
    assert torch.equal(w.prepared, to_hopper(qdata, w.originals()[1]))
    back, back_sf = from_hopper(w.prepared, n, k)
    zeroed = (scales & 0x7F == 0).repeat_interleave(8, dim=1)
    assert torch.equal(back, torch.where(zeroed, 0, qdata))
    assert torch.equal(back_sf, reference.swizzle(scales & 0x7F))


# 12,007: more tiles than an H200 has multiprocessors, so that the last wave is divided.
@pytest.mark.parametrize("m", [1, 7, 33, 64, 129, 209, 417, 2048, 12_007])
@pytest.mark.parametrize("shape", SMALL)
def test_every_tile_at_small_shapes(gpu: Gpu, shape: tuple[int, int], m: int) -> None:
    n, k = served(gpu, shape)
    case = cases.exact(m, n, k, seed=m, device="cuda", bias=m % 2 == 1)
    assert case.mismatches(checks.all_ways(gpu, case)) == 0


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scales", ALPHAS)
@pytest.mark.parametrize("shape", SMALL)
def test_alpha_at_both_ends_of_fp32(
    gpu: Gpu, shape: tuple[int, int], scales: tuple[float, float], with_bias: bool
) -> None:
    """fl32(alpha * sum) to the bit although the kernels accumulate sum * 2^-8."""
    n, k = served(gpu, shape)
    case = cases.exact(33, n, k, device="cuda")
    slots = checks.GuardedSlots(33, k, 0x7F)
    assert checks.packed_equals(slots, case.x, case.scale)
    scale, w_scale = (torch.tensor(value, device="cuda") for value in scales)
    w = runtime.Nvfp4Weight(case.weight.qdata, case.weight.block_scale, w_scale)
    bias = (torch.randn(n, device="cuda") * float(scale * w_scale)).bfloat16() if with_bias else None
    values = reference.decode(*unswizzled(case.packed, k)).float()
    weights = reference.decode(case.weight.qdata, unswizzled_scales(case.weight, n, k)).float()
    total = (values.double() @ weights.double().T).float()
    expected = scale * w_scale * total
    expected = (expected if bias is None else expected + bias.float()).bfloat16()
    for kernel in lowlevel.variants("gemm", n, k):
        y = lowlevel.gemm(slots.slots, 33, w, scale, bias, kernel=kernel)
        checks.same_bits(y, expected, kernel)


def unswizzled(packed: tuple[torch.Tensor, torch.Tensor], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, sf = packed
    return q, reference.unswizzle(sf, len(q), k // reference.BLOCK)


def unswizzled_scales(weight: cases.Weight, n: int, k: int) -> torch.Tensor:
    return reference.unswizzle(weight.block_scale, n, k // reference.BLOCK)


def test_a_nan_block_scale_makes_its_row_nan(gpu: Gpu) -> None:
    n, k = served(gpu, SMALL[1])
    case = cases.exact(5, n, k, device="cuda")
    scales = unswizzled_scales(case.weight, n, k)
    scales[70, 3] = 0x7F
    w = runtime.Nvfp4Weight(case.weight.qdata, reference.swizzle(scales), case.weight.tensor_scale)
    y = runtime.ring_linear(case.x, w, scale=case.scale)
    assert bool(y[:, 70].isnan().all())
    assert int(y.isnan().sum()) == len(y)


def test_tiles_are_chosen_by_m(gpu: Gpu) -> None:
    n, k = served(gpu, (5376, 7168))
    artifacts = devices.artifacts(torch.cuda.current_device())
    chosen = {m: artifacts.plan("prepacked", n, k, m, 0).kernels[-1].tile[0] for m in (1, 128, 2048, 37_810)}
    assert chosen[1] < chosen[128] < chosen[2048]
    assert chosen[37_810] >= 128
