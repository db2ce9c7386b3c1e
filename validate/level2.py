"""Level 2: packed tiles and GEMMs of the four projections, 2048 rows and fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from ringfp4.runtime import Nvfp4Weight, ring_linear
from ringfp4.validate import comfy
from ringfp4.validate import linear_cases as cases
from ringfp4.validate.gates import ROLES, STREAM_K_ROLES, Context, Gate, Outcome, different, time_ms

_ROWS = (1, 129, 2048)


def weight_of(case: cases.Linear) -> Nvfp4Weight:
    w = case.weight
    return Nvfp4Weight(w.qdata, w.block_scale, w.tensor_scale)


def comfy_linear(
    x: torch.Tensor, w: cases.Weight, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Comfy's quantiser and cuBLAS, BF16 [M, N]."""
    q, sf = comfy.quantise(x, scale)
    b = (w.qdata, w.block_scale.view(torch.uint8), w.tensor_scale)
    return comfy.matmul((q, sf, scale), b, bias)[: len(x)]


def _exact(role: str, context: Context) -> Outcome:
    n, k = ROLES[role]
    schedules = context.schedules(n, k)
    if not schedules:
        return Outcome(None, f"no kernels for {role} are loaded")
    wrong, count = 0, 0
    for make in cases.EXACT:
        for m in _ROWS:
            case: cases.Linear = make(m, n, k, device="cuda")
            w, x = weight_of(case), case.x
            for schedule in schedules:
                wrong += case.mismatches(ring_linear(x, w, scale=case.scale, schedule=schedule))
                count += m * n
    return Outcome(wrong == 0, f"{wrong} of {count} elements differ from float64 ({', '.join(schedules)})")


def _random(role: str, context: Context) -> Outcome:
    n, k = ROLES[role]
    schedules = context.schedules(n, k)
    if not schedules:
        return Outcome(None, f"no kernels for {role} are loaded")
    case = cases.random(_ROWS[-1], n, k, device="cuda")
    w, x = weight_of(case), case.x
    results = [ring_linear(x, w, scale=case.scale, schedule=schedule) for schedule in schedules]
    wrong = sum(different(y, results[0]) for y in results)
    excess = case.excess(results[0])
    ok = wrong == 0 and excess <= cases.ACCUMULATED
    return Outcome(ok, f"schedules differ in {wrong} elements", {"error beyond rounding / sum |ab|": excess})


def _equals_comfy(role: str, context: Context) -> Outcome:
    n, k = ROLES[role]
    if not context.schedules(n, k):
        return Outcome(None, f"no kernels for {role} are loaded")
    case = cases.random(_ROWS[-1], n, k, seed=8, device="cuda")
    w, x = weight_of(case), case.x
    theirs = comfy_linear(x, case.weight, case.scale)
    wrong = different(ring_linear(x, w, scale=case.scale), theirs)
    measured = {
        "ours ms": time_ms(lambda: ring_linear(x, w, scale=case.scale)),
        "comfy ms": time_ms(lambda: comfy_linear(x, case.weight, case.scale)),
    }
    return judge_equality(role, wrong, theirs.numel(), measured)


def judge_equality(role: str, wrong: int, count: int, measured: dict[str, float]) -> Outcome:
    """Bit equality with cuBLAS is a gate, except for the role whose sums cuBLAS splits."""
    detail = f"{wrong} of {count} elements differ from cuBLAS"
    if wrong and role in STREAM_K_ROLES:
        return Outcome(None, f"{detail}, as known for this role: keep it on cuBLAS", measured)
    return Outcome(wrong == 0, detail, measured)


def _gates() -> Iterator[Gate]:
    kinds: tuple[tuple[str, tuple[str, ...], Callable[[str, Context], Outcome]], ...] = (
        ("exact cases equal float64 to the bit", ("kernels",), _exact),
        ("random values: schedules equal, error bounded", ("kernels",), _random),
        ("bit equality with scaled_mm_nvfp4", ("kernels", "comfy", "block-scaled"), _equals_comfy),
    )
    for role in ROLES:
        for name, needs, run in kinds:
            yield Gate(2, f"{role}: {name}", needs, partial(run, role))


GATES = tuple(_gates())
