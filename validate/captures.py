"""Reads tensors of real projections from a safetensors file.

For each projection NAME, say ``block24.qkv``, the file holds

    NAME.x             BF16 [M, K]     the activation as it reached the linear
    NAME.qdata         U8 [N, K/2]     the weight as Comfy Kitchen stores it
    NAME.block_scale   F8_E4M3 or U8   its swizzled block scales
    NAME.tensor_scale  F32, 1 element
    NAME.scale         F32, 1 element  optional: the activation's calibrated tensor scale
    NAME.bias          BF16 [N]        optional
    NAME.y             BF16 [M, N]     optional: what the model's own linear gave

The format is a few lines to read: 8 bytes of header length, a JSON header, the bytes.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ringfp4.errors import InputError

# The names of the format, and the types that occur in captures and in models that they come from.
DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
}
_REQUIRED = ("x", "qdata", "block_scale", "tensor_scale")
_OPTIONAL = ("scale", "bias", "y")
_LARGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Capture:
    """One projection, on the CPU."""

    name: str
    x: torch.Tensor
    qdata: torch.Tensor
    block_scale: torch.Tensor
    tensor_scale: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    y: torch.Tensor | None = None


def read(path: Path) -> list[Capture]:
    """All projections of the file, in order of their names. Raises InputError for an unusable file."""
    tensors = read_tensors(path)
    names = sorted({name.rpartition(".")[0] for name in tensors})
    captures = []
    for name in names:
        parts = {key: tensors.get(f"{name}.{key}") for key in (*_REQUIRED, *_OPTIONAL)}
        missing = [key for key in _REQUIRED if parts[key] is None]
        if missing:
            raise InputError(
                f"{path} lacks {', '.join(f'{name}.{key}' for key in missing)}",
                expected="NAME." + ", NAME.".join(_REQUIRED),
                got=", ".join(sorted(key for key in tensors if key.startswith(f"{name}."))),
            )
        captures.append(_checked(path, Capture(name=name, **parts)))  # type: ignore[arg-type]
    if not captures:
        raise InputError(f"{path} holds no tensors")
    return captures


def _checked(path: Path, capture: Capture) -> Capture:
    def require(key: str, dtypes: tuple[torch.dtype, ...], fits: bool) -> None:
        tensor: torch.Tensor = getattr(capture, key)
        if tensor.dtype not in dtypes or not fits:
            raise InputError(
                f"{path}: {capture.name}.{key} is unusable",
                expected="what ringfp4.validate.captures describes",
                got=f"{tensor.dtype} {list(tensor.shape)}",
            )

    require("x", (torch.bfloat16,), capture.x.dim() == 2)
    m, k = capture.x.shape
    require("qdata", (torch.uint8,), capture.qdata.dim() == 2 and capture.qdata.shape[1] * 2 == k)
    require("block_scale", (torch.uint8, torch.float8_e4m3fn), True)
    require("tensor_scale", (torch.float32,), capture.tensor_scale.numel() == 1)
    if capture.scale is not None:
        require("scale", (torch.float32,), capture.scale.numel() == 1)
    if capture.bias is not None:
        require("bias", (torch.bfloat16,), capture.bias.shape == (capture.qdata.shape[0],))
    if capture.y is not None:
        require("y", (torch.bfloat16,), capture.y.shape == (m, capture.qdata.shape[0]))
    return capture


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Name -> tensor, mapped from the file rather than read. Raises InputError."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read", got=str(error)) from error
    length = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or length > min(_LARGEST_HEADER, len(mapped) - 8):
        raise InputError(f"{path} is not a safetensors file", got=f"a header of {length} bytes")
    try:
        header: dict[str, Any] = json.loads(mapped[8 : 8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _tensor(mapped, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} has a damaged header", got=repr(error)[:200]) from error


def _tensor(mapped: mmap.mmap, start: int, entry: dict[str, Any]) -> torch.Tensor:
    dtype, shape = DTYPES[entry["dtype"]], [int(extent) for extent in entry["shape"]]
    first, last = entry["data_offsets"]
    size = torch.tensor(shape).prod().item() * dtype.itemsize
    if not 0 <= first <= last <= len(mapped) - start or last - first != size:
        raise ValueError(f"bytes {first} to {last} for {dtype} {shape}")
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=last - first, offset=start + first)
    aligned = raw if (start + first) % 16 == 0 else raw.clone()
    return aligned.view(dtype).reshape(shape)
