"""The Hopper mainloop: packed NVFP4 weights become wgmma's A operand in registers.

One K step is 64 columns of one output tile. The producer brings in activations (BF16, 128-byte
swizzle, B operand, read by wgmma from shared memory) and one 2,304-byte block of weights for each
consumer warpgroup (layout: runtime/hopper_layout.py). A consumer thread holds two A fragments:
while the tensor cores read one, it unpacks the weights of the next K step into the other.

Every product is exact: the unpacked weight is e2m1 * e4m3 * 2^-8 in BF16, because E2M1 bits put
into a BF16 pattern mean value * 2^-126 and the block scale becomes e4m3 * 2^118, which leaves room
for 448 and NaN. ``WEIGHT_FACTOR`` undoes it in the epilogue. It changes no rounding: all addends of
a sum, and the sum, are scaled by the same power of two, far from both ends of FP32.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from ringfp4.dsl.config.hopper import STRIP_BYTES, STRIP_ROWS, TILE_K
from ringfp4.dsl.ptx import asm, load_shared

WEIGHT_FACTOR = 256.0
BLOCK_WORDS = STRIP_BYTES // 4  # 512 words of E2M1, then 64 of scales
SCALES_OFFSET = 2048


class HopperMainloop:
    """The mainloop for one configuration; its methods are traced into a kernel.

    The configuration has tile_m, consumers, stages, rows_in_smem, load_bytes and k.
    """

    def __init__(self, config):
        self.config = config
        self.k_steps = config.k // TILE_K

    # Host side

    def make_tiled_mma(self) -> cute.TiledMma:
        """64 weight rows by tile_m activation rows, A in registers, for one warpgroup."""
        k_major = cute.nvgpu.OperandMajorMode.K
        return hopper.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            k_major,
            k_major,
            Float32,
            (1, 1, 1),
            (STRIP_ROWS, self.config.tile_m),
            warpgroup.OperandSource.RMEM,
        )

    def activation_layout(self) -> cute.ComposedLayout:
        """(tile_m, TILE_K, stages), rows of 128 swizzled bytes, stages rows_in_smem rows apart."""
        c = self.config
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        return staged_rows(atom, c.tile_m, c.rows_in_smem, c.stages, rows_first=True)

    def make_load_atom(self, mQ: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """TMA load of one stage of activations."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        shape = (self.config.tile_m, TILE_K)
        layout = cute.tile_to_shape(atom, shape, order=(0, 1))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mQ, layout, shape)

    # Shared

    def make_pipeline(self, barriers: cute.Pointer) -> pipeline.PipelineTmaAsync:
        """Full and empty mbarriers of the stages; every consumer thread arrives to release one."""
        arrivals = 128 * self.config.consumers
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals),
            tx_count=self.config.load_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    def make_state(self, user: pipeline.PipelineUserType) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(user, self.config.stages)

    # Producer: one warp

    @cute.jit
    def load(self, pipe, state, k_begin, k_end, tma_q, tQgQ, tQsQ, mW, sW, strip):
        """Bring in K steps [k_begin, k_end) of one output tile; returns the advanced state.

        tQgQ: (TMA, K step) of the tile's activations, tQsQ: (TMA, stage).
        mW: (word, K step, strip) in global memory, sW: (word, consumer, stage).
        ``strip`` is the tile's first strip; strips beyond N repeat the last one.
        """
        copy_block = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32)
        for k in range(k_begin, k_end):
            pipe.producer_acquire(state)
            full = pipe.producer_get_barrier(state)
            cute.copy(tma_q, tQgQ[(None, k)], tQsQ[(None, state.index)], tma_bar_ptr=full)
            with cute.arch.elect_one():
                for c in range_constexpr(self.config.consumers):
                    valid = cutlass.min(strip + c, mW.shape[2] - 1)
                    cute.copy(copy_block, mW[(None, k, valid)], sW[(None, c, state.index)], mbar_ptr=full)
            state.advance()
        return state

    # Consumers: a warpgroup each

    @cute.jit
    def look_ahead(self, pipe, read, tArA, block):
        """Unpack the first K step of the next output tile if it is there; returns whether it was.

        Called while the tile before is still being multiplied, so that this one can start at once. It must
        not wait: the next tile's rows may wait for the slot of this one.
        """
        full = pipe.sync_object_full.get_barrier(read.index)
        ready = cute.arch.vote_all_sync(cute.arch.mbarrier_test_wait(full, read.phase))
        if ready:
            unpack(self.read_block(read, block), tArA[0])
        return ready

    @cute.jit
    def begin(self, pipe, read, tArA, block, ready):
        """Have the first K step unpacked, unless ``look_ahead`` has done it."""
        if not ready:
            pipe.consumer_wait(read)
            unpack(self.read_block(read, block), tArA[0])

    @cute.jit
    def accumulate(self, pipe, read, release, tiled_mma, acc, tArA, tBrQ, block, pairs, resumes):
        """acc = weights @ activations^T over ``pairs`` pairs of K steps, in ascending order of k.

        acc: (MMA, 1, 1) FP32; tArA: two fragments (MMA, 1, k16) of A, the first one filled by ``begin``;
        tBrQ: (MMA, 1, k16, stage). ``block``: what ``block_address`` gave. ``resumes``: add to what acc
        holds. ``read`` and ``release`` are the pipeline states of the stage to read and of the oldest
        one that is still held; both are returned. The last K step is still being multiplied, and its
        stage held, until ``finish``.
        """
        self.multiply(tiled_mma, acc, tArA[0], tBrQ, read, resumes)
        read.advance()
        pipe.consumer_wait(read)
        unpack(self.read_block(read, block), tArA[1])
        # Two K steps an iteration, so that the fragments' indices are constants.
        for _ in cutlass.range(pairs - 1, unroll=1):
            for half in range_constexpr(2):
                self.multiply(tiled_mma, acc, tArA[1 - half], tBrQ, read)
                read.advance()
                pipe.consumer_wait(read)
                packed = self.read_block(read, block)
                warpgroup.wait_group(1)  # the step before has left its fragment and its stage
                self.release(pipe, release)
                release.advance()
                unpack(packed, tArA[half])
        self.multiply(tiled_mma, acc, tArA[1], tBrQ, read)
        read.advance()
        warpgroup.wait_group(1)
        self.release(pipe, release)
        release.advance()
        return read, release

    @cute.jit
    def finish(self, pipe, release):
        """Wait for the last K step; then acc is complete. Returns the advanced state."""
        warpgroup.wait_group(0)
        self.release(pipe, release)
        release.advance()
        return release

    def block_address(self, weights: cute.Pointer, consumer, thread):
        """Where thread 0..127 of a consumer finds its E2M1 and its scales, in stage 0."""
        base = Int32(weights.toint()) + consumer * STRIP_BYTES
        return base + thread * 16, base + SCALES_OFFSET + thread // 4 * 8

    def read_block(self, read, block):
        """The thread's 32 weights (4 words) and scales (2 words) of one K step."""
        data, scales = block
        stage = read.index * (self.config.consumers * STRIP_BYTES)
        return load_shared(data + stage, 0, 4), load_shared(scales + stage, 0, 2)

    def multiply(self, tiled_mma, acc, fragment, tBrQ, read, adds=None):
        """Issue one K step's wgmma as a group of its own.

        ``adds`` says whether to add to what acc holds; the others of the tile do, without saying so.
        """
        warpgroup.fence()
        for k16 in range(TILE_K // 16):
            if adds is not None and k16 < 2:
                tiled_mma.set(warpgroup.Field.ACCUMULATE, (adds, True)[k16])
            cute.gemm(tiled_mma, acc, fragment[(None, None, k16)], tBrQ[(None, None, k16, read.index)], acc)
        warpgroup.commit_group()

    def release(self, pipe, state):
        """Hand a stage back to the producer.

        Every thread arrives, not one for its warp: each has itself read weights from the stage, and
        its own arrival orders that read before the next load.
        """
        cute.arch.mbarrier_arrive(pipe.sync_object_empty.get_barrier(state.index))


def staged_rows(atom, rows, rows_in_smem, stages, rows_first):
    """Swizzled layout of ``stages`` tiles that start ``rows_in_smem`` 128-byte rows apart.

    Modes (row, column, stage), or (column, row, stage) if not ``rows_first``. Written out by hand
    because the DSL aborts when it slices a stage whose stride is an odd number of 8-row atoms.
    """
    row, column = (8, rows // 8), (TILE_K, 1)
    row_stride, column_stride = (TILE_K, 8 * TILE_K), (1, 0)
    stage, stage_stride = (1, stages), (0, rows_in_smem * TILE_K)
    if rows_first:
        layout = cute.make_layout((row, column, stage), stride=(row_stride, column_stride, stage_stride))
    else:
        layout = cute.make_layout((column, row, stage), stride=(column_stride, row_stride, stage_stride))
    return cute.make_composed_layout(atom.inner, 0, layout)


def unpack(packed, fragment):
    """Dequantise one K step of a thread's weights into its A fragment (MMA, 1, k16)."""
    data, scales = packed
    registers = cute.recast_tensor(fragment, Int32)
    for k16 in range(TILE_K // 16):
        factors = unpack_scales(scales[k16 // 2], k16 % 2)
        for i, pair in enumerate(unpack_word(data[k16], *factors)):
            registers[4 * k16 + i] = pair


@dsl_user_op
def unpack_scales(word, odd, *, loc=None, ip=None):
    """Scales of rows g and g + 8 for one k16, each twice in a bf16x2, from bytes odd and odd + 2.

    A scale byte is five bits of exponent and three of mantissa; 0x7000 completes BF16's exponent.
    """
    shift = "shr.b32 t, $2, 4" if odd else "shl.b32 t, $2, 4"
    return asm(
        f"{{ .reg .b32 t; {shift}; lop3.b32 t, t, 0x0FF00FF0, 0x70007000, 0xEA; "
        "prmt.b32 $0, t, t, 0x1010; prmt.b32 $1, t, t, 0x3232; }",
        "=&r,=&r,r",
        [word],
        [Int32, Int32],
        side_effects=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def unpack_word(word, low, high, *, loc=None, ip=None):
    """Eight weights of one k16 as four bf16x2, the registers of wgmma's A fragment, in order.

    Each half of the word packs one weight of each register so that a shift and a mask put sign,
    exponent and mantissa into BF16's sign bit and bits 6 to 8 (see runtime/hopper_layout.py).
    """
    return asm(
        "{ .reg .b32 a, b, c, d, e; "
        "and.b32 a, $4, 0x81C081C0; "
        "shl.b32 b, $4, 3; and.b32 b, b, 0x81C081C0; "
        "shl.b32 c, $4, 6; and.b32 c, c, 0x81C081C0; "
        "shr.b32 d, $4, 4; and.b32 d, d, 0x00C000C0; "
        "shr.b32 e, $4, 5; lop3.b32 d, e, 0x01000100, d, 0xEA; "
        "shl.b32 e, $4, 1; lop3.b32 d, e, 0x80008000, d, 0xEA; "
        "mul.rn.bf16x2 $0, a, $5; mul.rn.bf16x2 $1, b, $6; "
        "mul.rn.bf16x2 $2, c, $5; mul.rn.bf16x2 $3, d, $6; }",
        "=&r,=&r,=&r,=&r,r,r,r",
        [word, low, high],
        [Int32] * 4,
        side_effects=False,
        loc=loc,
        ip=ip,
    )
