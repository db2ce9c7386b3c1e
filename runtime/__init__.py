"""NVFP4 linears: kernels made at build time, launched through the CUDA driver.

    from ringfp4 import runtime
    w = runtime.Nvfp4Weight.from_bf16(weight)   # or .from_comfy(qt), or Nvfp4Weight(...)
    y = runtime.ring_linear(x, w)               # BF16 [..., K] -> BF16 [..., N]

Importing this needs PyTorch, but no GPU, no driver and no compiler. docs/runtime.md has the
rules for streams, threads, graphs and memory.
"""

from ringfp4.runtime.api import ring_linear
from ringfp4.runtime.devices import info, load, unload
from ringfp4.runtime.lanes import Ring
from ringfp4.runtime.ops import traced_linear as _register_operator  # noqa: F401
from ringfp4.runtime.trace import set_nvtx
from ringfp4.runtime.tuning import tune
from ringfp4.runtime.weight import Nvfp4Weight

__all__ = ["Nvfp4Weight", "Ring", "info", "load", "ring_linear", "set_nvtx", "tune", "unload"]
