"""Comfy Kitchen's CUDA kernels as the oracle: always its CUDA backend, never a silent fallback."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

# The release whose machine code docs/numerics.md describes.
VERSION = "0.2.31"


def version() -> str | None:
    """Installed version of comfy-kitchen, None without it."""
    try:
        return importlib.metadata.version("comfy-kitchen")
    except importlib.metadata.PackageNotFoundError:
        return None


def quantise(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Comfy's ``quantize_nvfp4`` of contiguous BF16 CUDA ``x`` [M, K] with a float32 ``scale``.

    Returns uint8 q [M', K'/2] and sf [M' padded to 128, K'/16 padded to 4], swizzled; M' and K'
    are M and K padded to 16, as its tensor layout does.
    """
    import comfy_kitchen

    with comfy_kitchen.use_backend("cuda"):
        padded = x.shape[0] % 16 != 0 or x.shape[1] % 16 != 0
        q, sf = comfy_kitchen.quantize_nvfp4(x, scale, pad_16x=padded)
    return q, sf.view(torch.uint8)


def matmul(
    a: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Comfy's ``scaled_mm_nvfp4`` (cuBLAS): ``a`` and ``b`` are (q, sf, tensor scale) -> BF16.

    Raises what Comfy raises on hardware without block-scaled FP4 instructions.
    """
    import comfy_kitchen

    def scales(sf: torch.Tensor) -> torch.Tensor:
        return sf.view(torch.float8_e4m3fn)

    with comfy_kitchen.use_backend("cuda"):
        y: Any = comfy_kitchen.scaled_mm_nvfp4(
            a[0],
            b[0],
            tensor_scale_a=a[2],
            tensor_scale_b=b[2],
            block_scale_a=scales(a[1]),
            block_scale_b=scales(b[1]),
            bias=bias,
            out_dtype=torch.bfloat16,
        )
    return torch.as_tensor(y)
