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

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor, make_ptr
from ringfp4.dsl import nvfp4
from ringfp4.dsl.absmax import Absmax
from ringfp4.dsl.blockscaled_gemm import BlockScaledGemm, fake_tensors
from ringfp4.dsl.config.quantise import GROUP_COLUMNS, ROW_GROUP, AbsmaxConfig
from ringfp4.dsl.config.ring import PACKING_WARPS, RingGemmConfig
from ringfp4.dsl.epilogue import Epilogue
from ringfp4.dsl.mainloop import Consumer
from ringfp4.dsl.pack import Packer
from ringfp4.dsl.ring import Ring

MMA_BARRIER = 1  # named barrier of the MMA warps


class RingGemm(BlockScaledGemm):
    def __init__(self, config: RingGemmConfig):
        super().__init__(config)
        self.ring = Ring(config.order, PACKING_WARPS, config.poll_limit, config.jitter)
        self.absmax = Absmax(AbsmaxConfig(k=config.k, loads=config.maximum_loads))
        self.packer = Packer(config.k, config.pieces, packed=True, whole=True)

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
        if thread == 0:
            barriers.init()
        cute.arch.sync_threads()

        # Each branch works out its own tiles: ptxas spills what is live across setmaxnreg.
        if warp >= config.mma_warps:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            tile, step, m_tiles, tiles = self.walk(m)
            if warp == config.mma_warps:
                producer = self.make_producer(copies, operands, barriers)
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
                while tile < tiles:
                    m_tile, n_tile = config.order.tile_coord(tile, m_tiles)
                    state = producer.load_tile(
                        state,
                        config.order.slot(m_tile),
                        n_tile,
                        lambda k_tile, m_tile=m_tile: self.acquire(counters, status, m_tile, k_tile),
                    )
                    tile += step
            else:
                warp_in_grid = (warp - config.mma_warps - 1) * step + tile
                g = self.tensor_scale(x, x_stride, m, rule, scale, counters, status, warp_in_grid, step, lane)
                unit = config.order.prologue_units(m_tiles) + warp_in_grid
                while unit < m_tiles * config.order.units:
                    self.ring.wait_for_slot(counters, status, config.order.tile_of(unit))
                    self.pack_chunks(x, x_stride, m, q, sf, unit, 0, config.k_chunks, g)
                    self.ring.publish_all(counters, config.order.tile_of(unit), lane)
                    unit += PACKING_WARPS * step
            if lane == 0:
                self.ring.finish(counters, step)
        else:
            cute.arch.setmaxregister_increase(config.mma_registers)
            tile, step, m_tiles, tiles = self.walk(m)
            warp_in_grid = (PACKING_WARPS + warp) * step + tile
            g = self.tensor_scale(x, x_stride, m, rule, scale, counters, status, warp_in_grid, step, lane)
            units = config.order.prologue_units(m_tiles)
            part = warp * step + tile
            while part < units * config.k_chunks:
                unit, chunk = config.order.prologue_part(part, units)
                self.pack_chunks(x, x_stride, m, q, sf, unit, chunk, chunk + 1, g)
                self.ring.publish(counters, config.order.tile_of(unit), chunk, lane)
                part += config.mma_warps * step

            consumer = Consumer.make(config, barriers, *operands, warp, lane)
            epilogue = Epilogue.make(config, *copies[4], sC, bias, warp, lane)
            alpha = g * mWScale[0]
            acc = consumer.make_accumulators()
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
            while tile < tiles:
                m_tile, n_tile = config.order.tile_coord(tile, m_tiles)
                state = consumer.multiply_tile(acc, state)
                if thread == 0:  # it has waited for every load of this output tile
                    self.ring.recycle(counters, m_tile)
                epilogue.store_tile(acc, alpha, m_tile, n_tile)
                tile += step
            epilogue.finish()
            # All MMA warps have left their polls before their leader says so.
            cute.arch.barrier(barrier_id=MMA_BARRIER, number_of_threads=config.mma_threads)
            if thread == 0:
                self.ring.finish(counters, step)

    @cute.jit
    def acquire(self, counters: cute.Pointer, status: cute.Pointer, m_tile: Int32, k_tile: Int32):
        """Loader: before a chunk's first K tile, wait until the chunk is packed."""
        k_tiles = self.config.k_tiles // self.config.k_chunks
        if k_tile % k_tiles == 0:
            self.ring.acquire(counters, status, m_tile, k_tile // k_tiles)

    @cute.jit
    def pack_chunks(
        self,
        x: cute.Pointer,
        x_stride: Int64,
        m: Int32,
        q: cute.Pointer,
        sf: cute.Pointer,
        unit: Int32,
        first: Int32,
        last: Int32,
        g: Float32,
    ):
        """Whole warp: pack K chunks [first, last) of one unit into its tile's slot."""
        order = self.config.order
        tile = order.tile_of(unit)
        row_in_tile = (unit - tile * order.units) * (ROW_GROUP // 4) + nvfp4.piece_row(cute.arch.lane_idx())
        row = tile * self.config.tile_m + row_in_tile
        pieces = self.config.chunk_columns // GROUP_COLUMNS
        for piece in cutlass.range(first * pieces, last * pieces, self.config.pieces, unroll=1):
            self.packer.pack(x, x_stride, m, q, sf, row, order.slot(tile), row_in_tile, piece, g)

    @cute.jit
    def tensor_scale(
        self,
        x: cute.Pointer,
        x_stride: Int64,
        m: Int32,
        rule: Int32,
        scale: cute.Pointer,
        counters: cute.Pointer,
        status: cute.Pointer,
        warp: Int32,
        ctas: Int32,
        lane: Int32,
    ) -> Float32:
        """The activation's scale: given, or from the maximum over all packing and MMA warps' rows."""
        mScale = cute.make_tensor(scale, cute.make_layout(1))
        g = Float32(0.0)
        if rule < 0:
            g = mScale[0]
        else:
            warps = (PACKING_WARPS + self.config.mma_warps) * ctas
            amax = self.absmax.rows_amax(x, x_stride, m, warp, warps)
            amax = self.ring.contribute_maximum(counters, status, amax, warps, lane)
            g = self.absmax.tensor_scale(amax, rule)
            if warp == 0 and lane == 0:
                mScale[0] = g
        return g


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
