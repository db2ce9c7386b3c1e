"""PyTorch's current stream as the integer that the driver knows it by."""

from __future__ import annotations

from collections.abc import Callable

import torch

# The public torch.cuda.current_stream() makes an object, which costs more than a launch's share.
_raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current(ordinal: int) -> int:
    """Handle of the current stream of a device; 0 is the legacy default stream."""
    if _raw is not None:
        return _raw(ordinal)
    return torch.cuda.current_stream(ordinal).cuda_stream if torch.cuda.is_available() else 0
