"""The Hopper epilogue: scale the accumulators, transpose them in shared memory, store by TMA.

An accumulator tile is 64 columns of y (wgmma's M) by tile_m rows. A consumer warpgroup writes it in a
few parts to its own staging buffers, as rows of 64 BF16, which a TMA store each clips to y's extent.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from ringfp4.dsl.config.hopper import STRIP_ROWS
from ringfp4.dsl.hopper_mainloop import WEIGHT_FACTOR, staged_rows
from ringfp4.dsl.ptx import asm

# Up to here alpha * WEIGHT_FACTOR is finite, so that one multiplication does for both.
LARGEST_ALPHA = 2.0**119


class HopperEpilogue:
    """The epilogue for one configuration, which has consumers, store_parts, store_rows and store_buffers."""

    def __init__(self, config):
        self.config = config

    # Host side

    def staging_layout(self) -> cute.ComposedLayout:
        """(STRIP_ROWS, store_rows, buffer of consumer), columns of y contiguous, 128-byte swizzle."""
        c = self.config
        buffers = c.store_buffers * c.consumers
        return staged_rows(_atom(), c.store_rows, c.rows_in_staging, buffers, rows_first=False)

    def make_store_atom(self, mYt: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """TMA store of one part of a strip of the tile; mYt is y transposed, (N, M)."""
        shape = (STRIP_ROWS, self.config.store_rows)
        layout = cute.tile_to_shape(_atom(), shape, order=(1, 0))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mYt, layout, shape)

    # Consumers: a warpgroup each

    @cute.jit
    def scale(self, acc, alpha, bias, column):
        """Returns the factor that makes acc the FP32 output; with a bias, acc becomes it: factor 1.

        Contract: fl32(alpha * sum), then fl32(+ bias). A sum is acc * 2^8 exactly, so
        fl32(alpha * sum) = fl32(fl32(alpha * 2^8) * acc) unless alpha * 2^8 overflows.
        ``column`` of y belongs to half of the thread's accumulators, column + 8 to the others.
        ``bias`` points to BF16 [N] or is null.
        """
        factor = alpha * Float32(WEIGHT_FACTOR)
        has_bias = bias.toint() != 0
        if has_bias or alpha > LARGEST_ALPHA:
            addends = cute.make_rmem_tensor((2,), Float32)
            addends.fill(-0.0)  # adding it changes nothing, not even a zero's sign
            if has_bias and column < self.config.features:
                for i in range_constexpr(2):
                    addends[i] = bias[column + 8 * i].to(Float32)
            for i in range_constexpr(cute.size(acc)):
                acc[i] = multiply_add(acc[i] * Float32(WEIGHT_FACTOR), alpha, addends[i // 2 % 2])
            factor = Float32(1.0)
        return factor

    @cute.jit
    def store(self, acc, factor, address, barrier, warp, tma_y, tYsY, tYgY, consumer, strip, m_tile):
        """Round to BF16 and start the stores; the staging buffers are busy until ``drain``.

        address: what ``staging_address`` gave; barrier: a named barrier of this warpgroup's own;
        warp: 0 to 3 in the warpgroup; tYsY: (TMA, staging buffer), tYgY: (TMA, strip, part of y).
        """
        c = self.config
        blocks = c.store_rows // 8
        for part in range_constexpr(c.store_parts):
            buffer = part % c.store_buffers
            if warp == 0:
                self.drain(c.store_buffers - 1)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
            for j in range_constexpr(0, blocks, 2):
                count = 8 if const_expr(j + 1 < blocks) else 4
                first = 4 * (part * blocks + j)
                values = [acc[first + i] for i in range(count)]
                offset = buffer * c.rows_in_staging * STRIP_ROWS * 2
                store_transposed(address, offset + j * 1024, values, factor)
            # The copy engine reads what this thread wrote: order the two proxies before the barrier.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
            if warp == 0:
                source = tYsY[(None, consumer * c.store_buffers + buffer)]
                cute.copy(tma_y, source, tYgY[(None, strip, m_tile * c.store_parts + part)])
                cute.arch.cp_async_bulk_commit_group()

    def drain(self, pending=0):
        """Wait until all but ``pending`` of the warp's last stores have read their staging buffers."""
        cute.arch.cp_async_bulk_wait_group(pending, read=True)

    def staging_address(self, staging: cute.Pointer, consumer, warp, lane):
        """Where a lane's 16 bytes go in stmatrix, for the first 16 rows of a consumer's first buffer.

        Lanes 0-7, 8-15, ... address four 8x8 matrices: columns g and g + 8 of rows 0-7, then
        of rows 8-15. Chunk i of 16 bytes of a row lies at i ^ (row % 8).
        """
        row = lane % 8 + 8 * (lane // 16)
        chunk = (2 * warp + lane // 8 % 2) ^ (lane % 8)
        c = self.config
        base = Int32(staging.toint()) + consumer * (c.store_buffers * c.rows_in_staging * STRIP_ROWS * 2)
        return base + row * (STRIP_ROWS * 2) + chunk * 16


def _atom():
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, BFloat16)


@dsl_user_op
def multiply_add(x, factor, addend, *, loc=None, ip=None):
    """fl32(fl32(x * factor) + addend): never fused."""
    return asm(
        "{ .reg .f32 p; mul.rn.f32 p, $1, $2; add.rn.f32 $0, p, $3; }",
        "=f,f,f,f",
        [x, factor, addend],
        [Float32],
        side_effects=False,
        loc=loc,
        ip=ip,
    )[0]


@dsl_user_op
def store_transposed(address, offset, values, factor, *, loc=None, ip=None):
    """Round values * factor to BF16 and store them as two (4 values) or four 8x8 matrices."""
    matrices = len(values) // 2
    registers = [f"r{i}" for i in range(matrices)]
    text = f"{{ .reg .f32 a, b; .reg .b32 {', '.join(registers)}; "
    for i, register in enumerate(registers):
        text += f"mul.rn.f32 a, ${2 + 2 * i}, $1; mul.rn.f32 b, ${3 + 2 * i}, $1; "
        text += f"cvt.rn.bf16x2.f32 {register}, b, a; "
    text += f"stmatrix.sync.aligned.m8n8.x{matrices}.trans.shared.b16 [$0+{offset}], "
    text += f"{{{', '.join(registers)}}}; }}"
    asm(
        text,
        "r,f" + ",f" * len(values),
        [address, factor, *values],
        side_effects=True,
        loc=loc,
        ip=ip,
    )
