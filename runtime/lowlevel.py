"""The kernels one by one, for tests, benchmarks and tuning: CUDA tensors in, CUDA tensors out.

Each call allocates what it returns; nothing here uses a ring.
"""

from __future__ import annotations

import torch
from ringfp4.errors import InputError
from ringfp4.runtime import _core, checks, devices, reference, streams
from ringfp4.runtime.plan import TILE_ROWS, Plan, round_up, slot_row_bytes
from ringfp4.runtime.weight import Nvfp4Weight


def absmax_state(device: torch.device) -> torch.Tensor:
    """What ``absmax`` and ``gemm`` work in; they leave it ready for the next call."""
    return torch.zeros(_core.STATE_BYTES, dtype=torch.uint8, device=device)


def absmax(x: torch.Tensor, rule: str = "fp32", state: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor scale of BF16 ``x`` [M, K] on CUDA: float32, no dimensions. M is at least 1.

    ``state``: from ``absmax_state``, default a new one. The result is a view of it, so the next
    call with the same state overwrites it.
    """
    plan, m, stride, current = _prepare("absmax", x, 0)
    checks.options("auto", rule, None)
    state = absmax_state(x.device) if state is None else state
    plan.sequence.run(
        None,
        current,
        m,
        stride,
        rule=reference.SCALE_RULES.index(rule),
        x=x.data_ptr(),
        scale=0,
        state=state.data_ptr(),
    )
    offset = _core.SCALE_OFFSET
    return state[offset : offset + 4].view(torch.float32)[0]


def pack(
    x: torch.Tensor, scale: torch.Tensor, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise BF16 ``x`` [M, K] by ``scale`` (float32, one element) into ``slots``.

    ``slots``: uint8 of at least ``slot_bytes(M, K)``, default a new tensor. Returns views of it:
    q uint8 [M padded to 128, K/2] and sf uint8 [M padded to 128, K/16 padded to 4], swizzled;
    on sm_90a the decoded values, BF16 [M padded to 128, K], and None.
    """
    plan, m, stride, current = _prepare("pack", x, 0)
    plan.check_rows(m)
    checks.scale(scale, x.device)
    if slots is None:
        slots = torch.empty(plan.slot_bytes(m), dtype=torch.uint8, device=x.device)
    elif slots.numel() < plan.slot_bytes(m):
        raise InputError("slots is too small", expected=f"{plan.slot_bytes(m)} bytes", got=str(slots.numel()))
    plan.sequence.run(
        None, current, m, stride, x=x.data_ptr(), scale=scale.data_ptr(), slots=slots.data_ptr()
    )
    rows, k = round_up(m, TILE_ROWS), x.shape[1]
    q_row, sf_row = slot_row_bytes(plan.arch, k)
    if not sf_row:
        return slots[: rows * q_row].view(torch.bfloat16).view(rows, k), None
    q, sf = slots[: rows * q_row], slots[rows * q_row : rows * (q_row + sf_row)]
    return q.view(rows, q_row), sf.view(rows, sf_row)


def gemm(
    slots: torch.Tensor,
    m: int,
    w: Nvfp4Weight,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    kernel: str | None = None,
    state: torch.Tensor | None = None,
) -> torch.Tensor:
    """BF16 [M, N] from ``slots`` as ``pack`` filled them with M rows. ``kernel`` names a variant.

    ``state``: from ``absmax_state``, default a new one if the kernel needs it.
    """
    ordinal = w.device.index
    loaded, current = devices.artifacts(ordinal), streams.current(ordinal)
    plan = loaded.single("gemm", w.n, w.k, kernel)
    data, block_scale = w.operands_for(plan)
    out = torch.empty(m, w.n, dtype=torch.bfloat16, device=w.device) if out is None else out
    partials = None
    if plan.partial_bytes:  # for which pack made no room
        partials = torch.empty(plan.partial_bytes, dtype=torch.uint8, device=w.device)
        state = absmax_state(w.device) if state is None else state
    plan.sequence.run(
        None,
        current,
        m,
        scale=scale.data_ptr(),
        w=data.data_ptr(),
        w_sf=0 if block_scale is None else block_scale.data_ptr(),
        w_scale=w.tensor_scale.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        y=out.data_ptr(),
        slots=slots.data_ptr(),
        state=0 if state is None else state.data_ptr(),
        partials=0 if partials is None else partials.data_ptr(),
    )
    return out


def slot_bytes(m: int, k: int, device: int = 0) -> int:
    """Bytes of slots that ``pack`` needs for [M, K] on a device."""
    return devices.artifacts(device).single("pack", 0, k).slot_bytes(m)


def variants(kind: str, n: int, k: int, device: int = 0) -> tuple[str, ...]:
    """Names of the kernels of one kind that serve N, K on a device, the default first."""
    table = devices.artifacts(device).table
    arch = next((a for a in table.archs if table.find(a, kind, n, k)), None)
    return () if arch is None else tuple(entry.name for entry in table.find(arch, kind, n, k))


def _prepare(kind: str, x: torch.Tensor, n: int) -> tuple[Plan, int, int, int]:
    m, stride = checks.activation(x, x.shape[-1])
    if x.device.type != "cuda" or x.dim() != 2 or m == 0:
        got = f"{list(x.shape)} on {x.device}"
        raise InputError("unusable x", expected="[M, K] on a CUDA device, M at least 1", got=got)
    ordinal = x.device.index
    return devices.artifacts(ordinal).single(kind, n, x.shape[1]), m, stride, streams.current(ordinal)
