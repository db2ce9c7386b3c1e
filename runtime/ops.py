"""``torch.ops.ringfp4.linear``: the operator that torch.compile and torch.export see.

Its arguments are those of ``ring_linear`` with the weight taken apart. ``w``, ``w_sf``:
``Nvfp4Weight.qdata`` and ``.block_scale``, or ``.prepared`` and None where the device's kernels want
a layout of their own (``Nvfp4Weight.operands``).
"""

from __future__ import annotations

from typing import Any

import torch
from ringfp4.runtime import api, checks
from ringfp4.runtime.lanes import Ring
from ringfp4.runtime.weight import Nvfp4Weight

_library: Any = torch.library.Library("ringfp4", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "linear(Tensor x, Tensor w, Tensor? w_sf, Tensor w_scale, SymInt n, Tensor? scale, "
    "str scale_rule, Tensor? bias, str schedule, str? fallback=None) -> Tensor"
)


def _linear(
    x: torch.Tensor,
    w: torch.Tensor,
    w_sf: torch.Tensor | None,
    w_scale: torch.Tensor,
    n: int,
    scale: torch.Tensor | None,
    scale_rule: str,
    bias: torch.Tensor | None,
    schedule: str,
    fallback: str | None = None,
) -> torch.Tensor:
    weight = Nvfp4Weight.from_operands(w, w_sf, w_scale, n, x.shape[-1])
    return api.ring_linear(
        x, weight, scale=scale, scale_rule=scale_rule, bias=bias, schedule=schedule, fallback=fallback
    )


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    w_sf: torch.Tensor | None,
    w_scale: torch.Tensor,
    n: int,
    scale: torch.Tensor | None,
    scale_rule: str,
    bias: torch.Tensor | None,
    schedule: str,
    fallback: str | None = None,
) -> torch.Tensor:
    checks.options(schedule, scale_rule, fallback)
    return x.new_empty((*x.shape[:-1], n))


_library.impl("linear", _linear, "CUDA")
_library.impl("linear", _linear, "CPU")
torch.library.register_fake("ringfp4::linear", _fake, lib=_library)


def traced_linear(
    x: torch.Tensor,
    w: Nvfp4Weight,
    scale: torch.Tensor | None,
    scale_rule: str,
    bias: torch.Tensor | None,
    schedule: str,
    fallback: str | None,
    eager_only: tuple[torch.Tensor | None, Ring | None],
) -> torch.Tensor:
    """``ring_linear`` inside torch.compile. ValueError for ``out``, ``ring`` and gradients.

    It is not one of ours, since Dynamo can only trace the built-in exceptions.
    """
    if any(option is not None for option in eager_only):
        raise ValueError("out and ring cannot be compiled; leave them out under torch.compile")
    recorded = any(tensor is not None and tensor.requires_grad for tensor in (x, scale, bias))
    if recorded and torch.is_grad_enabled():  # the graph's backward would leave the gradients out
        raise ValueError("x, scale and bias must not require a gradient; use torch.no_grad()")
    data, block_scale = w.operands()
    y: torch.Tensor = torch.ops.ringfp4.linear(
        x, data, block_scale, w.tensor_scale, w.n, scale, scale_rule, bias, schedule, fallback
    )
    return y
