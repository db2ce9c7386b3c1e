"""Persistent cooperative block-scaled GEMM for sm_12x.

y[m, N] = bf16(alpha * (SFA * A) @ (SFB * B)^T + bias), alpha = activation scale * weight scale.

  q  u8   (m, K/2)                       packed E2M1, even column in the high nibble
  sf u16  (ceil(m/128), ceil(K/64), 256) E4M3 scales per 16 columns, 128 x 4 swizzle
  w, w_sf                                the same with N rows
  y  bf16 (m, N)

Warps: the MMA warps first, then one warpgroup whose first warp issues every load. Registers
move from the loading warpgroup to the MMA warps (setmaxnreg), which needs all four of its warps.
Constraints are GemmConfig's.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint16
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_ptr

from . import ring_order
from .config.gemm import SF_ROWS, SF_TILE_BYTES, STORE_COLS, STORE_ROWS, GemmConfig
from .epilogue import Epilogue, read_alpha
from .mainloop import Barriers, Consumer, Producer, TmaLoad
from .ptx import hand_over


def operand_smem_layout(rows: int, config: GemmConfig):
    """(rows, bytes, stages) with the 64-byte swizzle."""
    row = config.row_bytes
    plain = cute.make_layout((rows, row, config.stages), stride=(row, 1, rows * row))
    return cute.make_composed_layout(cute.make_swizzle(2, 4, 3), 0, plain)


def scale_smem_layout(blocks: int, config: GemmConfig):
    """(row blocks, k blocks, u16, stages)."""
    words = SF_TILE_BYTES // 2
    shape = (blocks, config.k_blocks, words, config.stages)
    return cute.make_layout(
        shape, stride=(config.k_blocks * words, words, 1, blocks * config.k_blocks * words)
    )


def store_smem_layout(config: GemmConfig):
    """(8 rows, 64 columns, buffers of all warps) with the 128-byte swizzle."""
    shape = (STORE_ROWS, STORE_COLS, config.mma_warps * config.store_buffers)
    plain = cute.make_layout(shape, stride=(STORE_COLS, 1, STORE_ROWS * STORE_COLS))
    return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, plain)


def smem_layouts(config: GemmConfig):
    """Layouts of sA, sB, sSFA, sSFB, sC."""
    return (
        operand_smem_layout(config.tile_m, config),
        operand_smem_layout(config.tile_n, config),
        scale_smem_layout(config.tile_m // SF_ROWS, config),
        scale_smem_layout(config.tile_n // SF_ROWS, config),
        store_smem_layout(config),
    )


def coordinates(tensor):
    """A TMA tensor without its extents: they are in the tensor map, the kernel needs no parameter.

    Nor may an extent be a single tile: CuTe drops its mode, and every tile would have coordinate 0.
    """
    shape = (1 << 20,) * cute.rank(tensor)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=tensor.stride))


class BlockScaledGemm:
    """The GEMM for one configuration; the persistent ring (ring_gemm.py) is made of the same parts."""

    def __init__(self, config: GemmConfig):
        self.config = config
        self.sf_tiler_a = (config.tile_m // SF_ROWS, config.k_blocks, SF_TILE_BYTES // 2)
        self.sf_tiler_b = (config.tile_n // SF_ROWS, config.k_blocks, SF_TILE_BYTES // 2)

    # Host side

    def make_copies(self, mQ, mW, mSF, mWSF, mY):
        """TMA atoms and coordinates of A, B, SFA, SFB and y, as the kernel takes them; sets Storage."""
        config = self.config
        lA, lB, lSFA, lSFB, lC = smem_layouts(config)

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        a = cpasync.make_tiled_tma_atom(load, mQ, lA, (config.tile_m, config.row_bytes))
        b = cpasync.make_tiled_tma_atom(load, mW, lB, (config.tile_n, config.row_bytes))
        sfa = cpasync.make_tiled_tma_atom(load, mSF, lSFA, self.sf_tiler_a)
        sfb = cpasync.make_tiled_tma_atom(load, mWSF, lSFB, self.sf_tiler_b)
        y = cpasync.make_tiled_tma_atom(store, mY, lC, (STORE_ROWS, STORE_COLS))

        @cute.struct
        class Storage:
            sA: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(lA)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(lB)], 1024]
            sC: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(lC)], 1024]
            sSFA: cute.struct.Align[cute.struct.MemRange[Uint16, cute.cosize(lSFA)], 128]
            sSFB: cute.struct.Align[cute.struct.MemRange[Uint16, cute.cosize(lSFB)], 128]
            barriers: cute.struct.MemRange[Int64, 2 * config.stages]

        self.storage = Storage
        assert Storage.size_in_bytes() == config.smem_bytes, (Storage.size_in_bytes(), config.smem_bytes)
        return tuple((atom, coordinates(tensor)) for atom, tensor in (a, b, sfa, sfb, y))

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mW: cute.Tensor,
        mSF: cute.Tensor,
        mWSF: cute.Tensor,
        mY: cute.Tensor,
        mScale: cute.Tensor,
        mWScale: cute.Tensor,
        bias: cute.Pointer,
        m: Int32,
        grid: Int32,
        stream,
    ):
        copies = self.make_copies(mQ, mW, mSF, mWSF, mY)
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(copies, mScale, mWScale, bias, m).launch(
            grid=(grid, 1, 1), block=(self.config.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    # Device side

    def walk(self, m):
        """First output tile of this CTA, distance to its next one, m tiles and all tiles."""
        m_tiles = cute.ceil_div(m, self.config.tile_m)
        return cute.arch.block_idx()[0], cute.arch.grid_dim()[0], m_tiles, m_tiles * self.config.n_tiles

    def make_shared(self):
        """This CTA's (sA, sB, sSFA, sSFB), sC and barriers, not yet initialised."""
        lA, lB, lSFA, lSFB, lC = smem_layouts(self.config)
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        operands = (
            storage.sA.get_tensor(lA.outer, swizzle=lA.inner),
            storage.sB.get_tensor(lB.outer, swizzle=lB.inner),
            storage.sSFA.get_tensor(lSFA),
            storage.sSFB.get_tensor(lSFB),
        )
        sC = storage.sC.get_tensor(lC.outer, swizzle=lC.inner)
        return operands, sC, Barriers(self.config, storage.barriers.data_ptr())

    def make_producer(self, copies, operands, barriers) -> Producer:
        config, (a, b, sfa, sfb, _), (sA, sB, sSFA, sSFB) = self.config, copies, operands
        rows_a, rows_b = (config.tile_m, config.row_bytes), (config.tile_n, config.row_bytes)
        return Producer(
            config,
            barriers,
            (TmaLoad.make(*a, sA, rows_a), TmaLoad.make(*sfa, sSFA, self.sf_tiler_a)),
            (TmaLoad.make(*b, sB, rows_b), TmaLoad.make(*sfb, sSFB, self.sf_tiler_b)),
        )

    @cute.kernel
    def kernel(self, copies: tuple, mScale: cute.Tensor, mWScale: cute.Tensor, bias: cute.Pointer, m: Int32):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        operands, sC, barriers = self.make_shared()
        if thread == 0:
            barriers.init()
        cute.arch.sync_threads()
        hand_over()

        # Each branch works out its own tiles: ptxas spills what is live across setmaxnreg.
        if warp >= config.mma_warps:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            if warp == config.mma_warps:
                producer = self.make_producer(copies, operands, barriers)
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
                tile, step, m_tiles, tiles = self.walk(m)
                while tile < tiles:
                    m_tile, n_tile = ring_order.tile_coord(tile, m_tiles, config.n_tiles, config.group)
                    state = producer.load_tile(state, m_tile, n_tile)
                    tile += step
        else:
            cute.arch.setmaxregister_increase(config.mma_registers)
            consumer = Consumer.make(config, barriers, *operands, warp, lane)
            epilogue = Epilogue.make(config, *copies[4], sC, bias, warp, lane)
            alpha = read_alpha(mScale, mWScale)
            acc = consumer.make_accumulators()
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
            tile, step, m_tiles, tiles = self.walk(m)
            while tile < tiles:
                m_tile, n_tile = ring_order.tile_coord(tile, m_tiles, config.n_tiles, config.group)
                state = consumer.multiply_tile(acc, state)
                epilogue.store_tile(acc, alpha, m_tile, n_tile)
                tile += step
            epilogue.finish()


def fake_tensors(config: GemmConfig):
    """q, w, sf, w_sf and y for a compile. Outer extents are symbols: the DSL drops modes of extent 1."""

    def tensor(dtype, rank, inner):
        shape = (*(cute.sym_int() for _ in range(rank - 1)), inner)
        order = tuple(reversed(range(rank)))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return (
        tensor(Uint8, 2, config.k // 2),
        tensor(Uint8, 2, config.k // 2),
        tensor(Uint16, 3, SF_TILE_BYTES // 2),
        tensor(Uint16, 3, SF_TILE_BYTES // 2),
        tensor(BFloat16, 2, config.n),
    )


def compile_kernel(config: GemmConfig):
    """Compile for the architecture in CUTE_DSL_ARCH; returns the DSL's compiled object."""
    return cute.compile(
        BlockScaledGemm(config),
        *fake_tensors(config),
        make_fake_compact_tensor(Float32, (1,), assumed_align=4),
        make_fake_compact_tensor(Float32, (1,), assumed_align=4),
        make_ptr(BFloat16, 0, cute.AddressSpace.gmem, assumed_align=4),
        Int32(1),
        Int32(1),
        cute.runtime.make_fake_stream(),
    )
