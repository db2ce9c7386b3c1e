"""The CPU reference against values worked out by hand and against slower definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from ringfp4.errors import InputError
from ringfp4.runtime import reference
from ringfp4.validate import linear_cases as cases

INF, NAN = math.inf, math.nan


def quantise_block(values: list[float], scale: float) -> tuple[list[int], int]:
    """E2M1 codes and the scale byte of one block; missing values are 0."""
    x = torch.tensor([values + [0.0] * (16 - len(values))]).bfloat16()
    q, sf = reference.quantise(x, torch.tensor(scale))
    return reference.unpack(q)[0].tolist(), int(sf[0, 0])


def test_even_columns_sit_in_the_high_nibble() -> None:
    x = torch.zeros(1, 16).bfloat16()
    x[0, 0], x[0, 1] = 6.0, 1.0
    q, sf = reference.quantise(x, torch.tensor(1.0))
    assert q[0].tolist() == [0x72, 0, 0, 0, 0, 0, 0, 0]
    assert sf[0, 0] == 0x38  # amax 6 with scale 1: block scale 1


def test_midpoints_round_to_the_even_code() -> None:
    values = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]
    codes, scale_byte = quantise_block(values, 1.0)
    assert scale_byte == 0x38
    assert codes == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 15]


@pytest.mark.parametrize(
    ("values", "scale", "codes", "scale_byte"),
    [
        ([], 1.0, [0] * 16, 0x00),  # zero block
        ([-0.0] * 16, 1.0, [8] * 16, 0x00),  # signed zeros keep their sign
        ([], 0.0, [0] * 16, 0x7E),  # all-zero tensor: 0 * inf = NaN, min(NaN, 448) = 448
        ([1.0], 0.0, [7] + [0] * 15, 0x7E),  # reciprocal of 0 is limited to the largest float
        ([2689.0], 1.0, [7] + [0] * 15, 0x7E),  # block scale saturates at 448
        ([NAN, 6.0], 1.0, [7, 7], 0x38),  # NaN does not count for amax and encodes as +6
        ([NAN] * 16, 1.0, [7] * 16, 0x7E),
        ([INF, -INF, 1.0], 1.0, [7, 15, 0], 0x7E),
        # scale infinite: reciprocal 0, s = inf * 0 = NaN -> 448; then inf * rcp(inf) = NaN -> +6
        ([INF, -INF, 1.0, -1.0], INF, [7, 7, 0, 8], 0x7E),
        # scale NaN: s NaN -> 448, encoding factor NaN -> largest float
        ([1.0, -1.0], NAN, [7, 15], 0x7E),
        ([2.0**-130, -(2.0**-130)], 2.0**-20, [0, 8], 0x00),  # subnormal inputs are flushed
        ([6 * 2.0**-9], 1.0, [7], 0x01),  # smallest E4M3
        ([6 * 2.0**-10], 1.0, [7], 0x00),  # a tie to zero: factor is the largest float
    ],
)
def test_adversarial_blocks(values: list[float], scale: float, codes: list[int], scale_byte: int) -> None:
    found_codes, found_byte = quantise_block(values, scale)
    assert found_codes == codes + [0] * (16 - len(codes))
    assert found_byte == scale_byte


def test_reciprocal_table_counts_and_special_values() -> None:
    table = reference.rcp_ulp_table()
    assert [int((table == d).sum()) for d in (-1, 0, 1)] == [374_723, 7_280_086, 733_799]
    x = torch.tensor([0.0, -0.0, 2.0**-130, INF, -INF, 1.0, -2.0, 2.0**126, 2.0**127, 1.25 * 2.0**126])
    expected = torch.tensor([INF, -INF, INF, 0.0, -0.0, 1.0, -0.5, 2.0**-126, 0.0, 0.0])
    assert torch.equal(reference.rcp_approx_ftz(x).view(torch.int32), expected.view(torch.int32))
    assert reference.rcp_approx_ftz(torch.tensor(NAN)).isnan()


def test_reciprocal_is_within_an_ulp_and_not_always_correct() -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    off = reference.rcp_approx_ftz(x).view(torch.int32) - (1.0 / x).view(torch.int32)
    assert int(off.abs().max()) == 1
    assert 0.1 < float((off != 0).float().mean()) < 0.17


def test_scale_rules_differ_only_in_rounding() -> None:
    x = torch.tensor([[3.0, -5.03125]]).bfloat16()
    fp32, bf16 = (reference.tensor_scale(x, rule) for rule in ("fp32", "bf16"))
    assert fp32 == torch.tensor(5.03125) * torch.tensor(1 / 2688)
    assert bf16 == fp32.bfloat16().float() != fp32
    assert fp32.dtype is bf16.dtype is torch.float32


@pytest.mark.parametrize("rule", reference.SCALE_RULES)
def test_scale_of_special_tensors(rule: str) -> None:
    assert reference.tensor_scale(torch.tensor([1.0, NAN, INF]).bfloat16(), rule).isnan()
    assert reference.tensor_scale(torch.tensor([1.0, -INF]).bfloat16(), rule) == INF
    assert reference.tensor_scale(torch.zeros(0, 16).bfloat16(), rule) == 0


def test_swizzle_puts_each_scale_where_the_formula_says() -> None:
    rows, blocks = 300, 9
    scales = torch.randint(1, 256, (rows, blocks), dtype=torch.uint8)
    sf = reference.swizzle(scales)
    assert sf.shape == (384, 12)
    flat = torch.zeros(384 * 12, dtype=torch.uint8)
    for r in range(rows):
        for b in range(blocks):
            tile = (r // 128) * 3 + b // 4
            flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4] = scales[r, b]
    assert torch.equal(sf.flatten(), flat)
    assert torch.equal(reference.unswizzle(sf, rows, blocks), scales)


def test_quantise_in_chunks_of_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = reference.tensor_scale(x)
    whole = reference.quantise(x, scale)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 640)
    assert all(torch.equal(a, b) for a, b in zip(whole, reference.quantise(x, scale), strict=True))


def test_quantise_equals_comfys_eager_path_away_from_ties() -> None:
    """With the BF16 rule no decision of these tensors hangs on the last bit."""
    comfy_kitchen = pytest.importorskip("comfy_kitchen")
    x = torch.randn(144, 160, generator=torch.Generator().manual_seed(2)).bfloat16()
    scale = reference.tensor_scale(x, "bf16")
    q, sf = reference.quantise(x, scale)
    eager_q, eager_sf = comfy_kitchen.quantize_nvfp4(x, scale)
    assert torch.equal(q, eager_q)
    assert torch.equal(sf.flatten(), eager_sf.view(torch.uint8).flatten())


@pytest.mark.parametrize("x", [torch.zeros(2, 16), torch.zeros(16).bfloat16(), torch.zeros(2, 24).bfloat16()])
def test_quantise_refuses(x: torch.Tensor) -> None:
    with pytest.raises(InputError, match="cannot quantise"):
        reference.quantise(x, torch.tensor(1.0))


@dataclass
class Weight:
    qdata: torch.Tensor
    block_scale: torch.Tensor
    tensor_scale: torch.Tensor


def random_weight(n: int, k: int) -> Weight:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(3)).bfloat16()
    scale = reference.tensor_scale(w)
    return Weight(*reference.quantise(w, scale), scale)


def test_decode_inverts_quantise_where_nothing_is_lost() -> None:
    codes = torch.randint(0, 16, (5, 48), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    codes[:, ::16] = 7
    values = reference.E2M1_VALUES[codes.int()]
    scales = torch.tensor([0.5, 1.0, 448.0]).repeat_interleave(16)
    q, sf = reference.quantise((values * scales * 2).bfloat16(), torch.tensor(2.0))
    assert torch.equal(reference.unpack(q), codes)
    assert torch.equal(reference.decode(q, reference.unswizzle(sf, 5, 3)), values * scales)


def test_linear_equals_a_loop_over_scalars() -> None:
    weight = random_weight(8, 32)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    bias = torch.randn(8, generator=torch.Generator().manual_seed(6)).bfloat16()
    scale = reference.tensor_scale(x)
    q, sf = reference.quantise(x, scale)
    a = reference.decode(q, reference.unswizzle(sf, 3, 2)).tolist()
    b = reference.decode(weight.qdata, reference.unswizzle(weight.block_scale, 8, 2)).tolist()
    for with_bias in (None, bias):
        y = reference.linear(x, weight, bias=with_bias)
        for i in range(3):
            for j in range(8):
                acc = torch.tensor(math.fsum(p * w for p, w in zip(a[i], b[j], strict=True)))
                expected = acc * (scale * weight.tensor_scale)
                if with_bias is not None:
                    expected = expected + bias[j].float()
                assert y[i, j] == expected.bfloat16()


def test_linear_of_an_empty_activation_is_empty() -> None:
    assert reference.linear(torch.zeros(0, 32).bfloat16(), random_weight(8, 32)).shape == (0, 8)


def test_alpha_is_applied_before_the_only_rounding() -> None:
    acc, scale = torch.tensor([257.0]), torch.tensor(1.97)
    late = (acc.bfloat16().float() * scale).bfloat16()
    assert reference.finish(acc, scale, torch.tensor(1.0)) == (acc * scale).bfloat16() != late


@pytest.mark.parametrize("make", cases.EXACT)
def test_exact_cases_pack_to_what_they_were_built_from(make: Callable[..., cases.Linear]) -> None:
    case = make(131, 24, 160)
    for ours, wanted in zip(reference.quantise(case.x, case.scale), case.packed, strict=True):
        assert torch.equal(ours, wanted)
    assert case.mismatches(reference.linear(case.x, case.weight, scale=case.scale)) == 0


@pytest.mark.parametrize("make", cases.EXACT)
def test_exact_cases_do_not_depend_on_the_order_of_float32_sums(make: Callable[..., cases.Linear]) -> None:
    case = make(40, 16, 992)
    a, w = (reference.decode(cases.pack_codes(c), s) for c, s in ((case.a, case.a_sf), (case.w, case.w_sf)))
    for permutation in (torch.arange(992), torch.randperm(992, generator=torch.Generator().manual_seed(7))):
        acc = torch.zeros(40, 16)
        for k in permutation.tolist():
            acc += a[:, k : k + 1] * w[:, k]
        assert case.mismatches(reference.finish(acc, case.scale, case.weight.tensor_scale)) == 0


@pytest.mark.parametrize("make", cases.EXACT)
def test_exact_cases_notice_one_wrong_scale(make: Callable[..., cases.Linear]) -> None:
    case = make(33, 16, 64)
    y = reference.linear(case.x, case.weight, scale=case.scale)
    used = case.a_sf.flatten().nonzero()[0]
    case.a_sf.view(-1)[used] += 1
    assert case.mismatches(y) > 0


def test_random_case_is_within_its_bound_and_the_bound_can_fail() -> None:
    case = cases.random(9, 16, 512)
    y = reference.linear((case.x), case.weight, scale=case.scale)
    assert case.excess(y) <= cases.ACCUMULATED
    y[3, 5] *= 1.02
    assert case.excess(y) > cases.ACCUMULATED
