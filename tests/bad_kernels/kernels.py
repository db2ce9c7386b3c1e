"""The kernels of configs.py; imported by a build worker only."""

import os

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor


class Copy:
    def __init__(self, config):
        self.config = config
        self.entry = config.entry or config.name
        self.launch = {"min_blocks_per_mp": config.min_blocks} if config.min_blocks else {}

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, m: Int32):
        self.kernel.set_name_prefix(self.entry, remove_cutlass_symbol=True, keep_mangled_name=False)
        block, smem = (self.config.threads, 1, 1), self.config.smem_bytes
        self.kernel(x, y, m).launch(grid=(1, 1, 1), block=block, smem=smem, **self.launch)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, m: Int32):
        # Numbers only: the DSL would carry a whole configuration through its branches.
        values, threads, variant = self.config.values, self.config.threads, self.config.variant
        low, high = self.config.setmaxnreg
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(low > 0):
            if thread < 128:
                cute.arch.setmaxregister_decrease(low)
            else:
                cute.arch.setmaxregister_increase(high)
        if cutlass.const_expr(variant == "waits"):
            cute.arch.griddepcontrol_wait()
        held = cute.make_rmem_tensor((values,), Float32)
        for i in cutlass.range_constexpr(values):
            held[i] = x[thread + i * threads]
        if cutlass.const_expr(variant in ("waits_late", "loads_words")):
            cute.arch.griddepcontrol_wait()
        cute.arch.sync_threads()
        if thread < m:
            for i in cutlass.range_constexpr(values):
                y[thread + i * threads] = held[i] * held[values - 1 - i]


def compile_kernel(config):
    if config.variant == "raises":
        raise RuntimeError("this kernel cannot be made")
    if config.variant == "aborts":
        os.abort()
    tensor = make_fake_compact_tensor(Float32, (config.values * config.threads,), assumed_align=16)
    return cute.compile(Copy(config), tensor, tensor, Int32(1))
