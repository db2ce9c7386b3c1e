"""Whole linears on the GPU against float64 references and against each other."""

from __future__ import annotations

from collections.abc import Callable

import gpu_checks as checks
import pytest
import torch
from gpu_checks import Gpu
from ringfp4 import runtime
from ringfp4.runtime import lowlevel, reference
from ringfp4.validate import linear_cases as cases
from ringfp4.validate import quantiser_cases
from ringfp4.validate.gates import FULL_ROWS, ROLES

REDUCED = ("small", "tails", "odd_k", "tiny", "long")


def assert_exact(gpu: Gpu, case: cases.Linear) -> None:
    y = checks.all_ways(gpu, case)
    wrong = case.mismatches(y)
    assert wrong == 0, f"{case.name}: {wrong} of {y.numel()} elements differ from the exact result"


@pytest.mark.parametrize("m", [1, 33, 129, 2048])
@pytest.mark.parametrize("name", REDUCED)
def test_reduced_exact(gpu: Gpu, name: str, m: int) -> None:
    n, k = gpu.shape(name)
    assert_exact(gpu, cases.exact(m, n, k, device="cuda", bias=m != 129))


@pytest.mark.parametrize("make", cases.EXACT)
@pytest.mark.parametrize("name", REDUCED)
def test_reduced_kinds(gpu: Gpu, name: str, make: Callable[..., cases.Linear]) -> None:
    n, k = gpu.shape(name)
    assert_exact(gpu, make(300, n, k, device="cuda"))


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("m", [1, 127, 128, 129, 2048, FULL_ROWS])
@pytest.mark.parametrize("role", ROLES)
def test_roles_exact(gpu: Gpu, role: str, m: int) -> None:
    n, k = gpu.shape(role)
    assert_exact(gpu, cases.exact(m, n, k, seed=m, device="cuda"))


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("make", cases.EXACT[1:])
@pytest.mark.parametrize("role", ROLES)
def test_roles_one_hot_and_all_scales(gpu: Gpu, role: str, make: Callable[..., cases.Linear]) -> None:
    n, k = gpu.shape(role)
    assert_exact(gpu, make(2049, n, k, device="cuda"))


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("m", [129, FULL_ROWS])
@pytest.mark.parametrize("role", ROLES)
def test_roles_random(gpu: Gpu, role: str, m: int) -> None:
    """Within the bound of cases.py, and the same bits every way."""
    n, k = gpu.shape(role)
    case = cases.random(m, n, k, device="cuda")
    excess = case.excess(checks.all_ways(gpu, case))
    print(f"{role}, {m} rows: {excess:.2e} of sum |a||b| beyond the rounding to BF16")
    assert excess <= cases.ACCUMULATED


@pytest.mark.parametrize("name", ["small", "tails", "attn_out"])
def test_every_odd_m(gpu: Gpu, name: str) -> None:
    n, k = gpu.shape(name)
    case = cases.exact(257, n, k, device="cuda")
    w, x = checks.weight_of(case), case.x
    whole = checks.run(case, w, x, "prepacked")
    assert case.mismatches(whole) == 0
    for m in range(1, 258, 2):
        assert checks.packed_equals(checks.GuardedSlots(m, k, 0xFF), x[:m], case.scale), m
        for schedule in gpu.schedules((n, k)):
            checks.same_bits(checks.run(case, w, x[:m], schedule), whole[:m], f"{schedule}, M = {m}")


@pytest.mark.parametrize("name", ["small", *ROLES])
def test_twenty_repeats_give_the_same_bits(gpu: Gpu, name: str) -> None:
    n, k = gpu.shape(name)
    case = cases.random(2048 + 77, n, k, device="cuda")
    w, x = checks.weight_of(case), case.x
    for schedule in gpu.schedules((n, k)):
        first = checks.run(case, w, x, schedule)
        for _ in range(20):
            checks.same_bits(checks.run(case, w, x, schedule), first, schedule)


@pytest.mark.parametrize("capacity", [128, 384, 2048, 4096])
@pytest.mark.parametrize("name", ["small", "attn_out"])
def test_ring_of_any_capacity_gives_the_same_bits(gpu: Gpu, name: str, capacity: int) -> None:
    n, k = gpu.shape(name)
    case = cases.random(2999, n, k, device="cuda")
    w, x = checks.weight_of(case), case.x
    prepacked = checks.run(case, w, x, "prepacked")
    ring = runtime.Ring(capacity, k)
    y = runtime.ring_linear(x, w, scale=case.scale, ring=ring, schedule="ring")
    checks.same_bits(y, prepacked, f"ring of {capacity} rows")


@pytest.mark.parametrize("rule", reference.SCALE_RULES)
@pytest.mark.parametrize("name", ["small", "odd_k", "attn_out"])
def test_own_scale_equals_the_reference_and_rows_may_be_strided(gpu: Gpu, name: str, rule: str) -> None:
    n, k = gpu.shape(name)
    case = cases.random(517, n, k, device="cuda")
    w = checks.weight_of(case)
    wide = torch.full((517, k + 24), float("nan"), dtype=torch.bfloat16, device="cuda")
    x = wide[:, 8 : 8 + k]
    x.copy_(case.x)
    scale = reference.tensor_scale(x, rule)
    assert torch.equal(lowlevel.absmax(x, rule).view(torch.int32), scale.view(torch.int32))
    given = runtime.ring_linear(x, w, scale=scale, schedule="prepacked")
    for schedule in gpu.schedules((n, k)):
        checks.same_bits(runtime.ring_linear(x, w, scale_rule=rule, schedule=schedule), given, schedule)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-40])
@pytest.mark.parametrize("rule", reference.SCALE_RULES)
def test_scale_of_special_activations(gpu: Gpu, rule: str, value: float) -> None:
    _, k = gpu.shape("small")
    x = torch.zeros(300, k, dtype=torch.bfloat16, device="cuda")
    x[211, 17] = value
    expected = reference.tensor_scale(x, rule)
    assert torch.equal(lowlevel.absmax(x, rule), expected) or (
        expected.isnan() and lowlevel.absmax(x, rule).isnan()
    )


@pytest.mark.parametrize("group", quantiser_cases.ADVERSARIAL)
def test_pack_equals_the_reference_on_adversarial_cases(gpu: Gpu, group: str) -> None:
    """Those the reference was compared with Comfy's kernel on (test_quantiser_vs_comfy.py)."""
    _, k = gpu.shape("small")
    wrong = []
    for case in quantiser_cases.ADVERSARIAL[group]():
        x = case.rows(k).cuda()
        if not checks.packed_equals(checks.GuardedSlots(len(x), k, 0x7F), x, case.scale.cuda()):
            wrong.append(case.name)
    assert not wrong


@pytest.mark.parametrize("kind", quantiser_cases.DISTRIBUTIONS)
def test_pack_equals_the_reference_on_random_values(gpu: Gpu, kind: str) -> None:
    """10^8 values in all."""
    _, k = gpu.shape("small")
    for seed in (1, 2):
        x = quantiser_cases.random_values(kind, 1 << 23, seed, "cuda").reshape(-1, k)
        for rule in reference.SCALE_RULES:
            scale = reference.tensor_scale(x[x.isfinite()], rule)
            assert checks.packed_equals(checks.GuardedSlots(len(x), k, 0xFF), x, scale)
