"""y = bf16(scale * w_scale * q @ W^T + bias) on Hopper, with W packed as NVFP4.

q is BF16 (m, K) and holds e2m1 * e4m3 products; W is in the Hopper layout (runtime/
hopper_layout.py); y is BF16 (m, N); scale, w_scale FP32 [1]; bias BF16 [N] or a null pointer.
m is a run-time value, N and K are constants.

Persistent: CTA c works on output tiles c, c + grid, ..., numbered by ring_order.tile_coord, and on its
share of the last wave (tile_walk.py). ``partials``, ``flags``: see hopper_partials.py. Warp roles:

    warpgroup 0          producer: one warp issues all loads, the others give up their registers
    warpgroups 1 ... n   consumers: a strip of 64 columns of y each; mainloop, then epilogue

One pipeline of ``stages`` K steps connects them; it runs on across tiles, so the next tile's
loads overlap the epilogue.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_ptr
from cutlass.pipeline import PipelineUserType, pipeline_init_arrive, pipeline_init_wait
from ringfp4.dsl.config.hopper import STRIP_ROWS, TILE_K, HopperGemmConfig
from ringfp4.dsl.epilogue import read_alpha
from ringfp4.dsl.hopper_epilogue import HopperEpilogue
from ringfp4.dsl.hopper_mainloop import BLOCK_WORDS, HopperMainloop
from ringfp4.dsl.hopper_partials import Partials
from ringfp4.dsl.ptx import hand_over
from ringfp4.dsl.ring_order import tile_coord
from ringfp4.dsl.tile_walk import last_piece, walk

# The runtime encodes the tensor maps, for the real m and N, and they clip. What the DSL is told
# must only have room for every tile; a constant keeps it from adding an extent to the parameters.
ANY_ROWS = 1 << 20


class HopperGemm:
    """The GEMM for one configuration; the persistent ring's kernel is made of the same parts."""

    def __init__(self, config: HopperGemmConfig):
        self.config = config
        self.mainloop = HopperMainloop(config)
        self.epilogue = HopperEpilogue(config)

    # Host side

    def make_copies(self, mQ: cute.Tensor, mYt: cute.Tensor):
        """TMA atoms and tensors of q and y, layouts of their shared memory; sets Storage."""
        c = self.config
        sQ_layout = self.mainloop.activation_layout()
        sY_layout = self.epilogue.staging_layout()

        @cute.struct
        class Storage:
            sQ: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(sQ_layout)], 1024]
            sY: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(sY_layout)], 1024]
            sW: cute.struct.Align[cute.struct.MemRange[Int32, BLOCK_WORDS * c.consumers * c.stages], 128]
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]

        self.storage = Storage
        copies = (self.mainloop.make_load_atom(mQ), self.epilogue.make_store_atom(mYt))
        return copies, (sQ_layout, sY_layout)

    def launch(self, kernel, stream):
        c = self.config
        kernel.launch(
            grid=(1, 1, 1),  # the runtime launches what the manifest says
            block=(c.threads, 1, 1),
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,  # unused as well, but else the DSL asks a GPU for its limit
            stream=stream,
        )

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
        stream,
    ):
        copies, layouts = self.make_copies(mQ, mYt)
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(mW, copies, layouts, scale, w_scale, bias, partials, flags, status, m)
        self.launch(kernel, stream)

    # Device side

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
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(thread // 128)
        pipe, sQ, sY, sW = self.make_shared(layouts)
        hand_over()
        producer_registers, consumer_registers = self.config.registers
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                self.produce(pipe, copies[0], mW, sQ, sW, m)
        if warpgroup != 0:
            cute.arch.setmaxregister_increase(consumer_registers)
            handed = Partials(self.config, partials, flags, status)
            self.consume(pipe, copies[1], sQ, sW, sY, read_alpha(scale, w_scale), bias, m, handed)

    def make_shared(self, layouts):
        """The CTA's shared memory: the pipeline, ready for use, and

        sQ (tile_m, TILE_K, stage), sY (strip, store_rows, buffer of consumer), sW (word, consumer, stage).
        """
        c, (sQ_layout, sY_layout) = self.config, layouts
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        pipe = self.mainloop.make_pipeline(storage.barriers.data_ptr())
        pipeline_init_arrive(is_relaxed=True)
        sQ = storage.sQ.get_tensor(sQ_layout.outer, swizzle=sQ_layout.inner)
        sY = storage.sY.get_tensor(sY_layout.outer, swizzle=sY_layout.inner)
        sW = storage.sW.get_tensor(cute.make_layout((BLOCK_WORDS, c.consumers, c.stages)))
        pipeline_init_wait()
        return pipe, sQ, sY, sW

    def walk(self, m):
        """First output tile of this CTA, its own share of all (tile_walk.walk), and the m tiles."""
        m_tiles = (m + (self.config.tile_m - 1)) // self.config.tile_m
        tiles, cta = m_tiles * self.config.n_tiles, cute.arch.block_idx()[0]
        if const_expr(not self.config.divides):
            return cta, (tiles, Int32(0), Int32(0)), m_tiles
        return cta, walk(tiles, cute.arch.grid_dim()[0], cta, self.config.k_units), m_tiles

    @cute.jit
    def next_piece(self, index, share):
        """(tile, first and last K unit of it), and what is left: the arguments of the next call."""
        whole, begin, end = share
        tile, first, last = index, Int32(0), Int32(self.config.k_units)
        if const_expr(self.config.divides):
            if index < whole:
                index += cute.arch.grid_dim()[0]
            else:
                tile, first, last = last_piece(whole, begin, end, self.config.k_units)
                end -= last - first
        else:
            index += cute.arch.grid_dim()[0]
        return (tile, first, last), index, (whole, begin, end)

    def is_left(self, index, share):
        whole, begin, end = share
        return (index < whole) | (begin < end)

    def coord(self, index, m_tiles):
        """(m tile, first strip) of an output tile."""
        c = self.config
        m_tile, n_tile = tile_coord(index, m_tiles, c.n_tiles, c.group)
        return m_tile, n_tile * c.consumers

    @cute.jit
    def produce(self, pipe, load, mW, sQ, sW, m, ring: cutlass.Constexpr = None):
        """One warp: all loads of this CTA. With a ring they wait for it, a K chunk at a time."""
        c, (tma_q, gQ) = self.config, load
        # (TMA, stage) and (TMA, m tile, K step)
        tQsQ, tQgQ = cpasync.tma_partition(
            tma_q,
            0,
            cute.make_layout(1),
            cute.group_modes(sQ, 0, 2),
            cute.group_modes(cute.local_tile(gQ, (c.tile_m, TILE_K), (None, None)), 0, 2),
        )
        chunks = 1 if ring is None else ring.order.k_chunks
        steps = self.mainloop.k_steps // chunks
        state = self.mainloop.make_state(PipelineUserType.Producer)
        index, share, m_tiles = self.walk(m)
        while self.is_left(index, share):
            (tile, first, last), index, share = self.next_piece(index, share)
            m_tile, strip = self.coord(tile, m_tiles)
            slot, complete = m_tile, Boolean(True)
            if const_expr(ring is not None):
                slot, complete = ring.order.slot(m_tile), ring.acquire_tile(m_tile)
            tQgQ_tile = tQgQ[(None, slot, None)]
            for chunk in cutlass.range(chunks, unroll=1):
                k_begin = cutlass.max(chunk * steps, 2 * first)
                k_end = cutlass.min((chunk + 1) * steps, 2 * last)
                if k_begin < k_end:
                    if const_expr(ring is not None):
                        ring.acquire(m_tile, chunk, complete)
                    state = self.mainloop.load(
                        pipe, state, k_begin, k_end, tma_q, tQgQ_tile, tQsQ, mW, sW, strip
                    )
        pipe.producer_tail(state)

    @cute.jit
    def consume(self, pipe, store, sQ, sW, sY, alpha, bias, m, partials, ring: cutlass.Constexpr = None):
        """The consumer warpgroups: mainloop, then epilogue. With a ring the first hands slots back."""
        c, (tma_y, gYt) = self.config, store
        thread, _, _ = cute.arch.thread_idx()
        warpgroup = cute.arch.make_warp_uniform(thread // 128)
        warp_in_group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        consumer, thread_in_group = warpgroup - 1, thread % 128
        tiled_mma = self.mainloop.make_tiled_mma()
        tBrQ = tiled_mma.make_fragment_B(tiled_mma.get_slice(thread_in_group).partition_B(sQ))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((STRIP_ROWS, c.tile_m)), Float32)
        tArA = [
            cute.make_rmem_tensor(tiled_mma.partition_shape_A((STRIP_ROWS, TILE_K)), BFloat16)
            for _ in range(2)
        ]
        block = self.mainloop.block_address(sW.iterator, consumer, thread_in_group)
        staging = self.epilogue.staging_address(sY.iterator, consumer, warp_in_group, thread % 32)
        # (TMA, staging buffer) and (TMA, strip, part of y)
        tYsY, tYgY = cpasync.tma_partition(
            tma_y,
            0,
            cute.make_layout(1),
            cute.group_modes(sY, 0, 2),
            cute.group_modes(cute.local_tile(gYt, (STRIP_ROWS, c.store_rows), (None, None)), 0, 2),
        )
        row_in_strip = 16 * warp_in_group + thread % 32 // 4
        read = self.mainloop.make_state(PipelineUserType.Consumer)
        release = self.mainloop.make_state(PipelineUserType.Consumer)
        cta, consumer_warp = cute.arch.block_idx()[0], cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        index, share, m_tiles = self.walk(m)
        ready = Boolean(False)
        while self.is_left(index, share):
            (tile, first, last), index, share = self.next_piece(index, share)
            resumes = first > 0
            if const_expr(c.divides):  # noqa: SIM102 (decided while tracing)
                if resumes:
                    partials.take(acc, cta - 1, consumer_warp)
            self.mainloop.begin(pipe, read, tArA, block, ready)
            read, release = self.mainloop.accumulate(
                pipe, read, release, tiled_mma, acc, tArA, tBrQ, block, last - first, resumes
            )
            # This happens while the last K step is being multiplied.
            m_tile, first_strip = self.coord(tile, m_tiles)
            strip = first_strip + consumer
            ready = self.mainloop.look_ahead(pipe, read, tArA, block)
            release = self.mainloop.finish(pipe, release)
            if last < c.k_units:
                if const_expr(c.divides):
                    partials.put(acc, cta, consumer_warp)
            else:
                factor = self.epilogue.scale(acc, alpha, bias, strip * STRIP_ROWS + row_in_strip)
                self.epilogue.store(
                    acc,
                    factor,
                    staging,
                    warpgroup,
                    warp_in_group,
                    tma_y,
                    tYsY,
                    tYgY,
                    consumer,
                    strip,
                    m_tile,
                )
                # After the epilogue: before it, ptxas does not hold the mainloop's shared-memory descriptors
                # in uniform registers (tests/test_hopper_build.py counts the moves).
                if const_expr(ring is not None):
                    ring.recycle(m_tile, thread == 128)
        if warp_in_group == 0:
            self.epilogue.drain()


def fake_tensors(config: HopperGemmConfig):
    """w, q and y transposed for a compile."""
    k, strips = config.k, config.features // STRIP_ROWS

    def tensor(dtype, shape, order):
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return (
        tensor(Int32, (BLOCK_WORDS, k // TILE_K, strips), (0, 1, 2)),
        tensor(BFloat16, (ANY_ROWS, k), (1, 0)),
        tensor(BFloat16, (config.n_tiles * config.tile_n, ANY_ROWS), (0, 1)),
    )


def compile_kernel(config: HopperGemmConfig):
    """The compiled kernel; its entry is config.name, its parameters are config.params()."""
    scale = make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=4)
    bias = make_ptr(BFloat16, 0, cute.AddressSpace.gmem, assumed_align=2)
    return cute.compile(
        HopperGemm(config),
        *fake_tensors(config),
        scale,
        scale,
        bias,
        make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=16),
        make_ptr(Int32, 0, cute.AddressSpace.gmem, assumed_align=16),
        make_ptr(Uint32, 0, cute.AddressSpace.gmem, assumed_align=16),
        Int32(1),
        make_fake_stream(),
    )
