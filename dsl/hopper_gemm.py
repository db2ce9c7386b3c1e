"""y = bf16(scale * w_scale * q @ W^T + bias) on Hopper, with W packed as NVFP4.

q is BF16 (m, K) and holds e2m1 * e4m3 products; W is in the Hopper layout (runtime/
hopper_layout.py); y is BF16 (m, N); scale, w_scale FP32 [1]; bias BF16 [N] or a null pointer.
m is a run-time value, N and K are constants.

Persistent: CTA c (cluster c with multicast) works on output tiles c, c + grid, ..., numbered by
ring_order.tile_coord. Warp roles:

    warpgroup 0          producer: one warp issues all loads, the others give up their registers
    warpgroups 1 ... n   consumers: a strip of 64 columns of y each; mainloop, then epilogue

One pipeline of ``stages`` K steps connects them; it runs on across tiles, so the next tile's
loads overlap the epilogue.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_ptr
from cutlass.pipeline import PipelineUserType, pipeline_init_arrive, pipeline_init_wait

from ringfp4.dsl.config.hopper import STRIP_ROWS, TILE_K, HopperGemmConfig
from ringfp4.dsl.epilogue import read_alpha
from ringfp4.dsl.hopper_epilogue import HopperEpilogue
from ringfp4.dsl.hopper_mainloop import BLOCK_WORDS, HopperMainloop
from ringfp4.dsl.ring_order import tile_coord

# The runtime encodes the tensor maps for the real m. A constant here keeps the DSL from adding
# an extent of its own to the kernel's parameters; nothing reads it.
ANY_ROWS = 1 << 20


class HopperGemm:
    def __init__(self, config: HopperGemmConfig):
        self.config = config
        self.mainloop = HopperMainloop(config)
        self.epilogue = HopperEpilogue(config)

    @cute.jit
    def __call__(
        self,
        mW: cute.Tensor,
        mQ: cute.Tensor,
        mYt: cute.Tensor,
        scale: cute.Pointer,
        w_scale: cute.Pointer,
        bias: cute.Pointer,
        m: Int32,
        stream,
    ):
        c = self.config
        sQ_layout = self.mainloop.activation_layout()
        sY_layout = self.epilogue.staging_layout()
        tma_q, gQ = self.mainloop.make_load_atom(mQ)
        tma_y, gYt = self.epilogue.make_store_atom(mYt)

        @cute.struct
        class Storage:
            sQ: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(sQ_layout)], 1024]
            sY: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(sY_layout)], 1024]
            sW: cute.struct.Align[cute.struct.MemRange[Int32, BLOCK_WORDS * c.consumers * c.stages], 128]
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]

        self.storage = Storage
        self.kernel.set_name_prefix(c.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mW, tma_q, gQ, tma_y, gYt, scale, w_scale, bias, m, sQ_layout, sY_layout).launch(
            grid=(1, 1, 1),  # the runtime launches what the manifest says
            block=(c.threads, 1, 1),
            cluster=c.cluster,
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,  # unused as well, but else the DSL asks a GPU for its limit
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mW: cute.Tensor,
        tma_q: cute.CopyAtom,
        gQ: cute.Tensor,
        tma_y: cute.CopyAtom,
        gYt: cute.Tensor,
        scale: cute.Pointer,
        w_scale: cute.Pointer,
        bias: cute.Pointer,
        m: Int32,
        sQ_layout: cute.ComposedLayout,
        sY_layout: cute.ComposedLayout,
    ):
        c = self.config
        multicast = c.cluster[0]
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(thread // 128)
        rank = cta % multicast

        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        pipe = self.mainloop.make_pipeline(storage.barriers.data_ptr())
        pipeline_init_arrive(cluster_shape_mn=(multicast, 1), is_relaxed=True)
        sQ = storage.sQ.get_tensor(sQ_layout.outer, swizzle=sQ_layout.inner)  # (tile_m, TILE_K, stage)
        sY = storage.sY.get_tensor(sY_layout.outer, swizzle=sY_layout.inner)  # (strip, tile_m, consumer)
        sW = storage.sW.get_tensor(cute.make_layout((BLOCK_WORDS, c.consumers, c.stages)))

        m_tiles = (m + (c.tile_m - 1)) // c.tile_m
        n_groups = c.n_tiles // multicast
        tiles = m_tiles * n_groups
        pipeline_init_wait(cluster_shape_mn=(multicast, 1))

        if warpgroup == 0:
            producer_registers, _ = c.registers
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                # (TMA, stage) and (TMA, m tile, K step)
                tQsQ, tQgQ = cpasync.tma_partition(
                    tma_q,
                    rank,
                    cute.make_layout(multicast),
                    cute.group_modes(sQ, 0, 2),
                    cute.group_modes(cute.local_tile(gQ, (c.tile_m, TILE_K), (None, None)), 0, 2),
                )
                state = self.mainloop.make_state(PipelineUserType.Producer)
                index = cta // multicast
                while index < tiles:
                    m_tile, n_group = tile_coord(index, m_tiles, n_groups, c.group)
                    strip = (n_group * multicast + rank) * c.consumers
                    state = self.mainloop.load(
                        pipe,
                        state,
                        0,
                        self.mainloop.k_steps,
                        tma_q,
                        tQgQ[(None, m_tile, None)],
                        tQsQ,
                        mW,
                        sW,
                        strip,
                    )
                    index += ctas // multicast
                pipe.producer_tail(state)
        if warpgroup != 0:
            _, consumer_registers = c.registers
            cute.arch.setmaxregister_increase(consumer_registers)
            consumer = warpgroup - 1
            thread_in_group = thread % 128
            warp_in_group = warp % 4
            tiled_mma = self.mainloop.make_tiled_mma()
            tBrQ = tiled_mma.make_fragment_B(tiled_mma.get_slice(thread_in_group).partition_B(sQ))
            acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((STRIP_ROWS, c.tile_m)), Float32)
            tArA = [
                cute.make_rmem_tensor(tiled_mma.partition_shape_A((STRIP_ROWS, TILE_K)), BFloat16)
                for _ in range(2)
            ]
            block = self.mainloop.block_address(storage.sW.data_ptr(), consumer, thread_in_group)
            staging = self.epilogue.staging_address(
                storage.sY.data_ptr(), consumer, warp_in_group, thread % 32
            )
            # (TMA, consumer) and (TMA, strip, m tile)
            tYsY, tYgY = cpasync.tma_partition(
                tma_y,
                0,
                cute.make_layout(1),
                cute.group_modes(sY, 0, 2),
                cute.group_modes(cute.local_tile(gYt, (STRIP_ROWS, c.tile_m), (None, None)), 0, 2),
            )
            alpha = read_alpha(scale, w_scale)
            row_in_strip = 16 * warp_in_group + thread % 32 // 4
            read = self.mainloop.make_state(PipelineUserType.Consumer)
            release = self.mainloop.make_state(PipelineUserType.Consumer)
            index = cta // multicast
            while index < tiles:
                m_tile, n_group = tile_coord(index, m_tiles, n_groups, c.group)
                strip = (n_group * multicast + rank) * c.consumers + consumer
                read, release = self.mainloop.accumulate(
                    pipe, read, release, tiled_mma, acc, tArA, tBrQ, block
                )
                factor = self.epilogue.scale(acc, alpha, bias, strip * STRIP_ROWS + row_in_strip)
                self.epilogue.store(
                    acc,
                    factor,
                    staging,
                    warpgroup,
                    warp_in_group,
                    tma_y,
                    tYsY[(None, consumer)],
                    tYgY[(None, strip, m_tile)],
                )
                index += ctas // multicast
            if warp_in_group == 0:
                self.epilogue.drain()


def compile_kernel(config: HopperGemmConfig):
    """The compiled kernel; its entry is config.name, its parameters are config.params()."""
    k, n = config.k, config.features
    strips = n // STRIP_ROWS
    blocks = make_fake_compact_tensor(
        Int32, (BLOCK_WORDS, k // TILE_K, strips), stride_order=(0, 1, 2), assumed_align=16
    )
    q = make_fake_compact_tensor(BFloat16, (ANY_ROWS, k), stride_order=(1, 0), assumed_align=16)
    y_transposed = make_fake_compact_tensor(
        BFloat16, (n, ANY_ROWS), stride_order=(0, 1), assumed_align=16
    )
    scale = make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=4)
    bias = make_ptr(BFloat16, 0, cute.AddressSpace.gmem, assumed_align=2)
    return cute.compile(
        HopperGemm(config), blocks, q, y_transposed, scale, scale, bias, Int32(1), make_fake_stream()
    )
