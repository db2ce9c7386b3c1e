"""Every argument of a call, checked before anything is launched. Host work only: no value on a
device is read."""

from __future__ import annotations

import torch
from ringfp4.errors import InputError
from ringfp4.runtime.lanes import Ring
from ringfp4.runtime.plan import SCHEDULES
from ringfp4.runtime.reference import SCALE_RULES
from ringfp4.runtime.weight import Nvfp4Weight

SCHEDULE_NAMES = ("auto", *SCHEDULES)
FALLBACKS = (None, "reference", "dequantise")
_ALIGNMENT = 16  # bytes: the kernels load vectors of 16 bytes and TMA wants no less
_BF16 = 2  # bytes
_PLAIN = torch.Tensor.__torch_dispatch__


def plain(name: str, value: object, expected: str) -> None:
    """Raise InputError unless ``value`` is a tensor, and its memory holds what its dtype says.

    That of Comfy Kitchen's QuantizedTensor, which calls itself BF16, holds E2M1.
    """
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{name} is not a tensor", expected=expected, got=type(value).__name__)
    if type(value).__torch_dispatch__ is not _PLAIN:
        raise InputError(
            f"{name} is not a plain tensor",
            expected=expected,
            got=type(value).__name__,
            remedy=f"pass {name}.dequantize(), or whatever makes it plain",
        )


def activation(x: torch.Tensor, k: int) -> tuple[int, int]:
    """(rows, elements between rows) of ``x`` [..., K] seen as a matrix. Raises InputError."""
    plain("x", x, "torch.bfloat16 [..., K]")
    if not (x.is_cuda or x.is_cpu):
        raise InputError("x is on an unusable device", expected="cuda or cpu", got=str(x.device))
    if x.dtype is not torch.bfloat16:
        raise InputError("x has the wrong dtype", expected="torch.bfloat16", got=str(x.dtype))
    shape = x.shape
    if not shape or shape[-1] != k:
        raise InputError("x has the wrong shape", expected=f"[..., {k}]", got=str(list(shape)))
    no_gradient("x", x)
    if x.is_contiguous():
        rows, stride = x.numel() // k, k
    elif len(shape) == 2 and x.stride(1) == 1:
        rows, stride = shape[0], x.stride(0)
    else:
        raise InputError(
            "x cannot be seen as a matrix without a copy",
            expected="contiguous, or 2-D with unit stride along K",
            got=f"strides {list(x.stride())}",
            remedy="pass x.contiguous()",
        )
    if stride * _BF16 % _ALIGNMENT or (stride < k and rows > 1):
        raise InputError(
            "the rows of x are unusable",
            expected=f"a distance of at least {k} elements and a multiple of 8",
            got=str(stride),
            remedy="pass x.contiguous()",
        )
    if rows:
        address("x", x)
    return rows, stride


def no_gradient(name: str, tensor: torch.Tensor) -> None:
    """Raise InputError if autograd would record what is done with the tensor."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InputError(f"{name} requires a gradient", remedy="this linear has none: use torch.no_grad()")


def address(name: str, tensor: torch.Tensor) -> None:
    """Raise InputError unless the tensor has aligned memory."""
    pointer = tensor.data_ptr()
    if pointer == 0:
        raise InputError(f"{name} has no memory", expected="a tensor that holds data", got="address 0")
    if pointer % _ALIGNMENT:
        raise InputError(
            f"{name} is not aligned",
            expected=f"an address divisible by {_ALIGNMENT}",
            got=hex(pointer),
            remedy=f"pass {name}.clone()",
        )


def options(schedule: str, scale_rule: str, fallback: str | None) -> None:
    """Raise InputError for an unknown name."""
    if schedule not in SCHEDULE_NAMES:
        raise InputError("unknown schedule", expected=" or ".join(SCHEDULE_NAMES), got=repr(schedule))
    if scale_rule not in SCALE_RULES:
        raise InputError("unknown scale_rule", expected=" or ".join(SCALE_RULES), got=repr(scale_rule))
    if fallback not in FALLBACKS:
        raise InputError("unknown fallback", expected=" or ".join(map(repr, FALLBACKS)), got=repr(fallback))


def weight(w: Nvfp4Weight, device: torch.device) -> None:
    """Raise InputError unless ``w`` is a weight on ``device``."""
    if not isinstance(w, Nvfp4Weight):
        raise InputError(
            "w is not a weight",
            expected="runtime.Nvfp4Weight",
            got=type(w).__name__,
            remedy="use Nvfp4Weight.from_comfy or Nvfp4Weight.from_bf16",
        )
    if w.device != device:
        raise InputError(
            "x and w are on different devices",
            expected=str(device),
            got=str(w.device),
            remedy="use w.to(device)",
        )


def weight_memory(w: Nvfp4Weight) -> None:
    """Raise InputError if a tensor of the weight has lost its memory."""
    tensors = {"qdata": w.qdata, "block_scale": w.block_scale, "prepared": w.prepared}
    for name, tensor in {**tensors, "tensor_scale": w.tensor_scale}.items():
        if tensor is not None and tensor.data_ptr() == 0:
            raise InputError(f"the weight's {name} has no memory", expected="a tensor that holds data")


def scale(value: torch.Tensor, device: torch.device) -> None:
    """Raise InputError for a scale that is not one float32 on ``device``; on the CPU also by value.

    A value on a GPU is not read, since that would wait for the device: a negative or NaN scale
    there gives what the quantiser's contract gives.
    """
    plain("scale", value, "torch.float32, one element")
    if value.dtype is not torch.float32 or value.numel() != 1:
        got = f"{value.dtype} {list(value.shape)}"
        raise InputError("unusable scale", expected="torch.float32, one element", got=got)
    if value.device != device:
        raise InputError("scale is elsewhere", expected=str(device), got=str(value.device))
    no_gradient("scale", value)
    if value.data_ptr() == 0:
        raise InputError("scale has no memory", expected="a tensor that holds data", got="address 0")
    if device.type == "cpu" and not value.item() >= 0:
        raise InputError("unusable scale", expected="a number that is not negative", got=str(value.item()))


def bias(value: torch.Tensor, n: int, device: torch.device) -> None:
    """Raise InputError unless ``value`` is BF16 [N] on ``device``, contiguous and aligned."""
    plain("bias", value, f"torch.bfloat16 [{n}]")
    if value.dtype is not torch.bfloat16 or tuple(value.shape) != (n,):
        got = f"{value.dtype} {list(value.shape)}"
        raise InputError("unusable bias", expected=f"torch.bfloat16 [{n}]", got=got)
    if value.device != device:
        raise InputError("bias is elsewhere", expected=str(device), got=str(value.device))
    if value.stride(0) != 1:
        raise InputError("bias is not contiguous", expected="stride 1", got=str(value.stride(0)))
    no_gradient("bias", value)
    address("bias", value)


def output(out: torch.Tensor, x: torch.Tensor, rows: int, x_stride: int, n: int) -> None:
    """Raise InputError unless ``out`` can take the result and shares no memory with ``x``."""
    plain("out", out, "torch.bfloat16")
    shape = (*x.shape[:-1], n)
    if out.dtype is not torch.bfloat16 or tuple(out.shape) != shape:
        got = f"{out.dtype} {list(out.shape)}"
        raise InputError("unusable out", expected=f"torch.bfloat16 {list(shape)}", got=got)
    if out.device != x.device:
        raise InputError("out is elsewhere", expected=str(x.device), got=str(out.device))
    if not out.is_contiguous():
        raise InputError("out is not contiguous", got=f"strides {list(out.stride())}")
    no_gradient("out", out)
    if not rows:
        return
    address("out", out)
    first, last = x.data_ptr(), x.data_ptr() + ((rows - 1) * x_stride + x.shape[-1]) * _BF16
    if out.data_ptr() < last and first < out.data_ptr() + out.numel() * _BF16:
        raise InputError("out and x overlap", remedy="pass another out, or none")


def ring(value: Ring, device: torch.device) -> None:
    """Raise InputError unless ``value`` is a ring on ``device``."""
    if not isinstance(value, Ring):
        raise InputError("ring is not a ring", expected="runtime.Ring", got=type(value).__name__)
    if device.type != "cuda" or value.device != device.index:
        raise InputError("the ring is elsewhere", expected=str(device), got=f"cuda:{value.device}")
