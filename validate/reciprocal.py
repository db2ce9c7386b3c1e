"""Does this GPU's ``rcp.approx.ftz.f32`` equal the table the CPU reference uses?

The instruction is reached with a few lines of PTX that the driver assembles: nothing else
exposes it, and torch's own kernels divide exactly.
"""

from __future__ import annotations

import ctypes

import torch
from ringfp4.errors import DriverError
from ringfp4.runtime import reference

_PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry reciprocal(.param .u64 values, .param .u32 count)
{
    .reg .pred %p;
    .reg .b32 %block, %threads, %thread, %index, %n;
    .reg .b64 %base, %at;
    .reg .f32 %v;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %index, %block, %threads, %thread;
    ld.param.u32 %n, [count];
    setp.ge.u32 %p, %index, %n;
    @%p ret;
    ld.param.u64 %base, [values];
    cvta.to.global.u64 %base, %base;
    mad.wide.u32 %at, %index, 4, %base;
    ld.global.f32 %v, [%at];
    rcp.approx.ftz.f32 %v, %v;
    st.global.f32 [%at], %v;
    ret;
}
"""
_THREADS = 256


def _check(driver: ctypes.CDLL, call: str, *arguments: object) -> None:
    code = getattr(driver, call)(*arguments)
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        raise DriverError(call, code=code, name=(name.value or b"unknown").decode())


class DeviceReciprocal:
    """The instruction on the current CUDA device, applied to a tensor in place."""

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()  # makes torch's context current
        self._driver = ctypes.CDLL("libcuda.so.1")
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(self._driver, "cuModuleLoadData", ctypes.byref(module), _PTX)
        _check(self._driver, "cuModuleGetFunction", ctypes.byref(self._function), module, b"reciprocal")

    def __call__(self, values: torch.Tensor) -> None:
        """``values`` float32, contiguous, on the current device; replaced by their reciprocals."""
        address, count = ctypes.c_uint64(values.data_ptr()), ctypes.c_uint32(values.numel())
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(count))
        blocks = -(-values.numel() // _THREADS)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        shape = [ctypes.c_uint(v) for v in (blocks, 1, 1, _THREADS, 1, 1, 0)]
        _check(self._driver, "cuLaunchKernel", self._function, *shape, stream, arguments, None)


def count_differences() -> int:
    """Bit patterns of all 2^32 float32 values on which the device and the table disagree.

    All NaN results count as equal: their payload reaches no decision of the quantiser.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    reciprocal = DeviceReciprocal()
    mantissas = torch.arange(1 << 23, dtype=torch.int32, device=device)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for high in range(1 << 9):  # sign and exponent
        sign = -(1 << 31) if high >> 8 else 0
        values = (mantissas + (sign + ((high & 0xFF) << 23))).view(torch.float32)
        expected = reference.rcp_approx_ftz(values)
        reciprocal(values)
        same = (values.view(torch.int32) == expected.view(torch.int32)) | (values.isnan() & expected.isnan())
        differing += (~same).sum()
    return int(differing.item())
