"""One persistent launch for Hopper that packs a BF16 activation into a ring and multiplies it.

As ring_gemm.py, but the ring holds e2m1 * e4m3 as BF16, which is what hopper_gemm.py multiplies:

  x  bf16 (m, K)               rows x_stride elements apart
  q  bf16 (slots * tile_m, K)  the ring

Warps, on top of the Hopper GEMM's: the three others of the producer warpgroup pack the rows of later
groups. Order of work and protocol: ring_order.py, docs/ring.md.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream, make_ptr
from ringfp4.dsl.config.ring import PACKING_WARPS, HopperRingGemmConfig
from ringfp4.dsl.hopper_gemm import HopperGemm, fake_tensors
from ringfp4.dsl.hopper_partials import Partials
from ringfp4.dsl.ring import Ring
from ringfp4.dsl.ring_packing import RingPacking

# Named barriers 1 ... consumers are the epilogue's.
CONSUMERS_BARRIER = 8


class HopperRingGemm(HopperGemm):
    def coord(self, index, m_tiles):
        m_tile, n_tile = self.config.order.tile_coord(index, m_tiles)
        return m_tile, n_tile * self.config.consumers

    @cute.jit
    def __call__(
        self,
        mW: cute.Tensor,
        mQ: cute.Tensor,
        mYt: cute.Tensor,
        scale: cute.Pointer,
        w_scale: cute.Pointer,
        bias: cute.Pointer,
        partials: cute.Pointer,
        flags: cute.Pointer,
        status: cute.Pointer,
        m: Int32,
        x: cute.Pointer,
        q: cute.Pointer,
        counters: cute.Pointer,
        x_stride: Int64,
        rule: Int32,
        stream,
    ):
        copies, layouts = self.make_copies(mQ, mYt)
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        pointers = (scale, w_scale, bias, partials, flags, status)
        kernel = self.kernel(mW, copies, layouts, *pointers, m, x, q, counters, x_stride, rule)
        self.launch(kernel, stream)

    @cute.kernel
    def kernel(
        self,
        mW: cute.Tensor,
        copies: tuple,
        layouts: tuple,
        scale: cute.Pointer,
        w_scale: cute.Pointer,
        bias: cute.Pointer,
        partials: cute.Pointer,
        flags: cute.Pointer,
        status: cute.Pointer,
        m: Int32,
        x: cute.Pointer,
        q: cute.Pointer,
        counters: cute.Pointer,
        x_stride: Int64,
        rule: Int32,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        pipe, sQ, sY, sW = self.make_shared(layouts)
        ring = Ring(config.order, PACKING_WARPS, config.poll_limit, config.jitter, counters, status)
        packing = RingPacking(config, ring, x, x_stride, m, q, None, scale, rule)
        producer_registers, consumer_registers = config.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                self.produce(pipe, copies[0], mW, sQ, sW, m, ring)
            else:
                packing.steady(warp - 1, packing.tensor_scale(warp - 1, warp == 1))
            # All lanes have left their polls before one says so.
            cute.arch.sync_warp()
            if thread % 32 == 0:
                ring.finish(cute.arch.grid_dim()[0])
        if warp >= 4:
            cute.arch.setmaxregister_increase(consumer_registers)
            g = packing.tensor_scale(PACKING_WARPS + warp - 4, Boolean(False))
            packing.prologue(warp - 4, g)
            alpha = g * cute.make_tensor(w_scale, cute.make_layout(1))[0]
            handed = Partials(config, partials, flags, status)
            self.consume(pipe, copies[1], sQ, sW, sY, alpha, bias, m, handed, ring)
            # All consumers have left their polls before their leader says so.
            cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=128 * config.consumers)
            if thread == 128:
                ring.finish(cute.arch.grid_dim()[0])


def compile_kernel(config: HopperRingGemmConfig):
    """The compiled kernel; its entry is config.name, its parameters are config.params()."""

    def pointer(dtype, align):
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    return cute.compile(
        HopperRingGemm(config),
        *fake_tensors(config),
        pointer(Float32, 4),
        pointer(Float32, 4),
        pointer(BFloat16, 2),
        pointer(Float32, 16),
        pointer(Int32, 16),
        pointer(Uint32, 16),
        Int32(1),
        pointer(BFloat16, 16),
        pointer(Uint32, 16),
        pointer(Int32, 16),
        Int64(config.k),
        Int32(0),
        make_fake_stream(),
    )
