"""One persistent launch for sm_12x that packs a BF16 activation into a ring and multiplies it.

y[m, N] = bf16(alpha * (SFA * A) @ (SFB * B)^T + bias), where A and SFA are x, quantised on the way
(docs/numerics.md); alpha = activation scale * weight scale.

  x     bf16 (m, K)                       rows x_stride elements apart
  q     u8   (slots * 128, K/2)           the ring: packed E2M1 ...
  sf    u16  (slots, K/64, 256)           ... and its E4M3 scales, 128 x 4 swizzle
  w, w_sf                                 the weight, as in blockscaled_gemm.py
  y     bf16 (m, N)

Warps, on top of the block-scaled GEMM's: the loading warpgroup's first warp issues every load, its
three others pack the rows of later groups. Order of work and protocol: ring_order.py, docs/ring.md.
"""

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor, make_ptr
from ringfp4.dsl.blockscaled_gemm import BlockScaledGemm, fake_tensors
from ringfp4.dsl.config.ring import PACKING_WARPS, RingGemmConfig
from ringfp4.dsl.epilogue import Epilogue
from ringfp4.dsl.mainloop import Consumer
from ringfp4.dsl.ring import Ring
from ringfp4.dsl.ring_packing import RingPacking

MMA_BARRIER = 1  # named barrier of the MMA warps


class RingGemm(BlockScaledGemm):
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mW: cute.Tensor,
        mSF: cute.Tensor,
        mWSF: cute.Tensor,
        mY: cute.Tensor,
        scale: cute.Pointer,
        mWScale: cute.Tensor,
        bias: cute.Pointer,
        m: Int32,
        x: cute.Pointer,
        q: cute.Pointer,
        sf: cute.Pointer,
        counters: cute.Pointer,
        status: cute.Pointer,
        x_stride: Int64,
        rule: Int32,
        grid: Int32,
        stream,
    ):
        copies = self.make_copies(mQ, mW, mSF, mWSF, mY)
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(copies, scale, mWScale, bias, m, x, q, sf, counters, status, x_stride, rule).launch(
            grid=(grid, 1, 1), block=(self.config.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        copies: tuple,
        scale: cute.Pointer,
        mWScale: cute.Tensor,
        bias: cute.Pointer,
        m: Int32,
        x: cute.Pointer,
        q: cute.Pointer,
        sf: cute.Pointer,
        counters: cute.Pointer,
        status: cute.Pointer,
        x_stride: Int64,
        rule: Int32,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        operands, sC, barriers = self.make_shared()
        ring = Ring(config.order, PACKING_WARPS, config.poll_limit, config.jitter, counters, status)
        packing = RingPacking(config, ring, x, x_stride, m, q, sf, scale, rule)
        if thread == 0:
            barriers.init()
        cute.arch.sync_threads()

        # Each branch works out its own tiles: ptxas spills what is live across setmaxnreg.
        if warp >= config.mma_warps:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            if warp == config.mma_warps:
                producer = self.make_producer(copies, operands, barriers)
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
                tile, step, m_tiles, tiles = self.walk(m)
                while tile < tiles:
                    m_tile, n_tile = config.order.tile_coord(tile, m_tiles)
                    complete = ring.acquire_tile(m_tile)

                    def acquire(k_tile, m_tile=m_tile, complete=complete):
                        self.acquire(ring, m_tile, k_tile, complete)

                    state = producer.load_tile(state, config.order.slot(m_tile), n_tile, acquire)
                    tile += step
            else:
                packing_warp = warp - config.mma_warps - 1
                packing.steady(packing_warp, packing.tensor_scale(packing_warp, packing_warp == 0))
            # All lanes have left their polls before one says so.
            cute.arch.sync_warp()
            if lane == 0:
                ring.finish(cute.arch.grid_dim()[0])
        else:
            cute.arch.setmaxregister_increase(config.mma_registers)
            g = packing.tensor_scale(PACKING_WARPS + warp, Boolean(False))
            packing.prologue(warp, g)
            consumer = Consumer.make(config, barriers, *operands, warp, lane)
            epilogue = Epilogue.make(config, *copies[4], sC, bias, warp, lane)
            alpha = g * mWScale[0]
            acc = consumer.make_accumulators()
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
            tile, step, m_tiles, tiles = self.walk(m)
            while tile < tiles:
                m_tile, n_tile = config.order.tile_coord(tile, m_tiles)
                state = consumer.multiply_tile(acc, state)
                ring.recycle(m_tile, thread == 0)
                epilogue.store_tile(acc, alpha, m_tile, n_tile)
                tile += step
            epilogue.finish()
            # All MMA warps have left their polls before their leader says so.
            cute.arch.barrier(barrier_id=MMA_BARRIER, number_of_threads=config.mma_threads)
            if thread == 0:
                ring.finish(step)

    @cute.jit
    def acquire(self, ring: Ring, m_tile: Int32, k_tile: Int32, complete: Boolean):
        """Loader: before a chunk's first K tile, wait for the chunk."""
        k_tiles = self.config.k_tiles // self.config.k_chunks
        if k_tile % k_tiles == 0:
            ring.acquire(m_tile, k_tile // k_tiles, complete)


def compile_kernel(config: RingGemmConfig):
    """Compile for the architecture in CUTE_DSL_ARCH; parameters as config.params()."""

    def pointer(dtype, align):
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    return cute.compile(
        RingGemm(config),
        *fake_tensors(config),
        pointer(Float32, 4),
        make_fake_compact_tensor(Float32, (1,), assumed_align=4),
        pointer(BFloat16, 4),
        Int32(1),
        pointer(BFloat16, 16),
        pointer(Uint32, 16),
        pointer(Uint32, 16),
        pointer(Int32, 16),
        pointer(Uint32, 16),
        Int64(config.k),
        Int32(0),
        Int32(1),
        cute.runtime.make_fake_stream(),
    )
