"""``ring_linear``: check, allocate the output, hand pointers to C++."""

from __future__ import annotations

import logging

import torch
from ringfp4.errors import UnservedError
from ringfp4.runtime import _core, checks, devices, reference, streams, trace
from ringfp4.runtime.lanes import PlanCache, Ring
from ringfp4.runtime.weight import Nvfp4Weight

log = logging.getLogger("ringfp4")

_RULES = {name: code for code, name in enumerate(reference.SCALE_RULES)}


def ring_linear(
    x: torch.Tensor,
    w: Nvfp4Weight,
    *,
    scale: torch.Tensor | None = None,
    scale_rule: str = "fp32",
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
    schedule: str = "auto",
    fallback: str | None = None,
) -> torch.Tensor:
    """y = x W^T with x quantised to NVFP4 on the way: BF16 [..., K] -> BF16 [..., N].

    The numbers are those of docs/numerics.md, the same for every schedule.

    x: BF16 [..., K], contiguous, or 2-D with rows any multiple of 8 elements apart.
    w: the weight, on the same device.
    scale: the activation's tensor scale, float32, one element, on the same device; default: from
        the largest |x| by ``scale_rule``, "fp32" or "bf16".
    bias: BF16 [N].
    out: BF16 [..., N], contiguous, filled and returned; default: a new tensor.
    ring: the Ring to use; default: the current stream's own.
    schedule: "prepacked" (all of x is packed, then multiplied), "ring" (chunks of the ring's
        capacity), "fused" (one persistent launch), "auto".
    fallback: what to do on a CUDA device that no artefact serves: "reference" (exact and slow) or
        "dequantise" (PyTorch's BF16 product, rounded twice); default: raise UnservedError.

    There is no gradient: while gradients are enabled, no argument may require one.

    The launches go to PyTorch's current stream of x's device and are not waited for. CPU tensors
    are computed by the reference implementation. Raises InputError, UnservedError, ArtifactError,
    RingError or DriverError (ringfp4.errors); nothing has been launched if it is one of the first
    three.
    """
    if torch.compiler.is_compiling():
        from ringfp4.runtime import ops

        return ops.traced_linear(x, w, scale, scale_rule, bias, schedule, fallback, (out, ring))
    if not isinstance(w, Nvfp4Weight):
        checks.weight(w, torch.device("cpu"))
    m, x_stride = checks.activation(x, w.k)
    device = x.device
    checks.options(schedule, scale_rule, fallback)
    if w.device != device:
        checks.weight(w, device)
    if scale is not None:
        checks.scale(scale, device)
    if bias is not None:
        checks.bias(bias, w.n, device)
    if ring is not None:
        checks.ring(ring, device)
    if out is None:
        out = x.new_empty((*x.shape[:-1], w.n))
    else:
        checks.output(out, x, m, x_stride, w.n)
    if m == 0:
        return out
    if x.is_cuda:
        try:
            launch(x, m, x_stride, w, scale, scale_rule, bias, out, ring, schedule)
        except UnservedError:
            if fallback is None:
                raise
            _fall_back(fallback, x, w, scale, scale_rule, bias, out)
    else:
        checks.weight_memory(w)
        out.copy_(reference.linear(x.reshape(m, w.k), _Originals(w), scale, scale_rule, bias).view(out.shape))
    return out


def launch(
    x: torch.Tensor,
    m: int,
    x_stride: int,
    w: Nvfp4Weight,
    scale: torch.Tensor | None,
    scale_rule: str,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    ring: Ring | None,
    schedule: str,
) -> None:
    """Launch one linear on checked CUDA tensors.

    Raises UnservedError, RingError, InputError (more rows than kernels can address), DriverError.
    """
    ordinal: int = x.device.index
    loaded = devices.artifacts(ordinal)
    stream = streams.current(ordinal)
    lane: PlanCache = loaded.lane(stream) if ring is None else ring
    plan = lane.plans.get((w.n, w.k, m, schedule)) or lane.plan(w.n, w.k, m, schedule)
    core = lane.ring_for(plan, loaded.context.capturing(stream))
    slots = state = None
    if core is None:  # in a capture: the graph's own memory lives as long as the graph
        state = torch.zeros(_core.STATE_BYTES, dtype=torch.uint8, device=x.device)
    if core is None or plan.capacity_rows == 0:
        slots = torch.empty(plan.slot_bytes(m), dtype=torch.uint8, device=x.device)
    data, block_scale = w.operands_for(plan)
    weight, tensor_scale = data.data_ptr(), w.tensor_scale.data_ptr()
    if not (weight and tensor_scale):
        checks.weight_memory(w)
    with trace.span("ringfp4.linear"):
        plan.sequence.run(
            core,
            stream,
            m,
            x_stride,
            _RULES[scale_rule],
            x.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            weight,
            0 if block_scale is None else block_scale.data_ptr(),
            tensor_scale,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            0,
            0 if slots is None else slots.data_ptr(),
            0 if state is None else state.data_ptr(),
        )


class _Originals:
    """The weight as the reference reads it."""

    def __init__(self, w: Nvfp4Weight) -> None:
        self.qdata, self.block_scale = w.originals()
        self.tensor_scale = w.tensor_scale


def _fall_back(
    fallback: str,
    x: torch.Tensor,
    w: Nvfp4Weight,
    scale: torch.Tensor | None,
    scale_rule: str,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    log.info("no artefact serves N = %d, K = %d on %s: falling back to %s", w.n, w.k, x.device, fallback)
    matrix = x.reshape(-1, w.k)
    if fallback == "reference":
        out.copy_(reference.linear(matrix, _Originals(w), scale, scale_rule, bias).view(out.shape))
        return
    blocks = w.k // reference.BLOCK
    scale = reference.tensor_scale(x, scale_rule) if scale is None else scale
    q, sf = reference.quantise(matrix.contiguous(), scale)
    qdata, block_scale = w.originals()
    a = reference.decode(q, reference.unswizzle(sf, q.shape[0], blocks)).bfloat16()  # exact
    b = reference.decode(qdata, reference.unswizzle(block_scale, w.n, blocks)).bfloat16()
    with torch.autocast(x.device.type, enabled=False):  # to float16 the sums would overflow
        acc = a @ b.T
    out.copy_(reference.finish(acc, scale, w.tensor_scale, bias).view(out.shape))
