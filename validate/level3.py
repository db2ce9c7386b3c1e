"""Level 3: the four projections at full size, from captured tensors or synthetic ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from ringfp4.runtime import Nvfp4Weight, reference, ring_linear
from ringfp4.validate import captures
from ringfp4.validate import linear_cases as cases
from ringfp4.validate.captures import Capture
from ringfp4.validate.gates import ROLES, Context, Gate, Outcome, different, time_ms
from ringfp4.validate.level2 import comfy_linear, judge_equality

_REFERENCE_ROWS = 64  # rows that are also multiplied in float64

Source = Callable[[], Capture]  # makes or reads a projection's tensors, on the GPU


def synthetic(name: str, n: int, k: int, rows: int) -> Capture:
    """A Gaussian activation with a few large columns, as transformers have them, and a Gaussian weight."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    x = torch.randn(rows, k, generator=generator, device="cuda")
    x[:, :: k // 16] *= 20
    w = torch.randn(n, k, generator=generator, device="cuda").bfloat16()
    scale = reference.tensor_scale(w)
    return Capture(name, x.bfloat16(), *reference.quantise(w, scale), scale)


def to_gpu(capture: Capture) -> Capture:
    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.cuda()

    return replace(
        capture,
        x=capture.x.cuda(),
        qdata=capture.qdata.cuda(),
        block_scale=capture.block_scale.cuda(),
        tensor_scale=capture.tensor_scale.cuda(),
        scale=moved(capture.scale),
        bias=moved(capture.bias),
        y=moved(capture.y),
    )


def weight_of(capture: Capture) -> Nvfp4Weight:
    return Nvfp4Weight(capture.qdata, capture.block_scale, capture.tensor_scale)


def scale_of(capture: Capture) -> torch.Tensor:
    """The calibrated scale, or the one that Comfy's layout takes when none is given."""
    return reference.tensor_scale(capture.x, "bf16") if capture.scale is None else capture.scale


def consistent(schedules: tuple[str, ...], source: Source, _: Context) -> Outcome:
    """Every schedule gives the same bits, and some rows are near float64's."""
    capture = source()
    scale = scale_of(capture)
    call = partial(ring_linear, capture.x, weight_of(capture), scale=scale, bias=capture.bias)
    results = {s: call(schedule=s) for s in schedules}
    y = next(iter(results.values()))
    wrong = sum(different(other, y) for other in results.values())
    excess = _excess(capture, scale, y)
    measured = {f"{s} ms": time_ms(partial(call, schedule=s)) for s in schedules}
    measured["error beyond rounding / sum |ab|"] = excess
    detail = f"{', '.join(schedules)} differ in {wrong} of {y.numel()} elements"
    return Outcome(wrong == 0 and excess <= cases.ACCUMULATED, detail, measured)


def equals_comfy(role: str, source: Source, _: Context) -> Outcome:
    """The same bits as Comfy's quantiser and cuBLAS, and as the capture's own y."""
    capture = source()
    scale = scale_of(capture)
    packed = cases.Weight(capture.qdata, capture.block_scale, capture.tensor_scale)
    ours = partial(ring_linear, capture.x, weight_of(capture), scale=scale, bias=capture.bias)
    comfys = partial(comfy_linear, capture.x, packed, scale, capture.bias)
    y, theirs = ours(), comfys()
    measured = {"ours ms": time_ms(ours), "comfy ms": time_ms(comfys)}
    outcome = judge_equality(role, different(y, theirs), y.numel(), measured)
    if capture.y is None or not outcome.ok:
        return outcome
    wrong = different(y, capture.y)
    return Outcome(wrong == 0, f"{wrong} of {y.numel()} elements differ from the captured y", measured)


def _excess(capture: Capture, scale: torch.Tensor, y: torch.Tensor) -> float:
    """:func:`linear_cases.excess` of some rows."""
    rows = torch.linspace(0, len(y) - 1, min(_REFERENCE_ROWS, len(y)), device=y.device).long()
    blocks = capture.x.shape[1] // reference.BLOCK
    q, sf = reference.quantise(capture.x[rows], scale)
    a = reference.decode(q, reference.unswizzle(sf, len(rows), blocks))
    w_sf = reference.unswizzle(capture.block_scale, len(capture.qdata), blocks)
    w = reference.decode(capture.qdata, w_sf)
    alpha = (scale * capture.tensor_scale).double()
    bias = 0.0 if capture.bias is None else capture.bias.double()
    return cases.excess(y[rows], a.double(), w.double(), alpha, bias)


def gates(context: Context) -> Iterator[Gate]:
    """Two gates a projection. Raises InputError for an unusable captures file."""
    if context.captures is None:
        for role, (n, k) in ROLES.items():
            source = partial(synthetic, role, n, k, context.full_rows)
            yield from _pair(context, f"{role}: {context.full_rows} rows, synthetic", role, (n, k), source)
        return
    roles = {shape: role for role, shape in ROLES.items()}
    for capture in captures.read(context.captures):
        shape = (capture.qdata.shape[0], capture.x.shape[1])
        name = f"{capture.name}: {capture.x.shape[0]} rows, captured"
        yield from _pair(context, name, roles.get(shape, ""), shape, partial(to_gpu, capture))


def _pair(context: Context, name: str, role: str, shape: tuple[int, int], source: Source) -> Iterator[Gate]:
    schedules = context.schedules(*shape)

    def unserved(_: Context) -> Outcome:
        return Outcome(None, "no kernels for N = {}, K = {} are loaded".format(*shape))

    ours = partial(consistent, schedules, source) if schedules else unserved
    theirs = partial(equals_comfy, role, source) if schedules else unserved
    yield Gate(3, f"{name}, schedules equal, error bounded", ("kernels",), ours)
    yield Gate(3, f"{name}, bit equality with Comfy", ("kernels", "comfy", "block-scaled"), theirs)
