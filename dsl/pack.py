"""Quantise rows of a BF16 activation to NVFP4 with a tensor scale from device memory.

One kernel, two outputs: packed E2M1 and swizzled E4M3 block scales for sm_12x, or the same values
in BF16 for machines that multiply in BF16. The arithmetic is nvfp4.py's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from ringfp4.dsl import nvfp4
from ringfp4.dsl.config.quantise import BLOCK, GROUP_COLUMNS, ROW_GROUP, TILE_ROWS, PackConfig

LANES_PER_ROW = GROUP_COLUMNS // BLOCK  # in a piece: a row's block scales make one word
GROUPS = TILE_ROWS // ROW_GROUP
ANY = 1 << 20  # extent of a mode that is never used up


class Packer:
    """Packs ``pieces`` pieces that lie side by side; a whole warp executes it.

    ``packed``: E2M1 and block scales, otherwise BF16 values. ``whole``: no piece reaches beyond K.
    The output consists of tiles of ``tile_rows`` rows, 128 if ``packed``.
    """

    def __init__(self, k: int, pieces: int, packed: bool, whole: bool, tile_rows: int = TILE_ROWS):
        self.k, self.pieces, self.packed, self.whole, self.tile_rows = k, pieces, packed, whole, tile_rows

    @cute.jit
    def load(self, x: cute.Pointer, x_stride: Int64, m: Int32, row: Int32, first_piece: Int32) -> cute.Tensor:
        """(value, piece): this lane's blocks of row ``row`` of x."""
        k_blocks, pieces, lane = self.k // BLOCK, self.pieces, cute.arch.lane_idx()
        # (row, (value, block))
        mX = cute.make_tensor(
            x,
            cute.make_layout((m, (BLOCK, k_blocks)), stride=(cute.assume(x_stride, divby=8), (1, BLOCK))),
        )
        # (value, piece); beyond the last row or block that one is read again
        rX = cute.make_rmem_tensor((BLOCK, pieces), BFloat16)
        for i in range_constexpr(pieces):
            block = (first_piece + i) * LANES_PER_ROW + lane % LANES_PER_ROW
            if const_expr(not self.whole):
                block = cutlass.min(block, k_blocks - 1)
            cute.autovec_copy(mX[cutlass.min(row, m - 1), (None, block)], rX[None, i])
        return rX

    @cute.jit
    def store(
        self,
        rX: cute.Tensor,
        m: Int32,
        q: cute.Pointer,
        sf: cute.Pointer | None,
        row: Int32,
        tile: Int32,
        row_in_tile: Int32,
        first_piece: Int32,
        g: Float32,
    ):
        """What ``load`` read of row ``row`` to ``row_in_tile`` of tile ``tile``; ``g`` is the tensor scale.

        Of rows from m on only the block scales are written, as zeros.
        """
        k_blocks, pieces, lane = self.k // BLOCK, self.pieces, cute.arch.lane_idx()
        # (word, piece)
        words = cute.recast_tensor(rX, Uint32)
        g_rcp = nvfp4.rcp(g)

        for i in range_constexpr(pieces):
            piece = first_piece + i
            block = piece * LANES_PER_ROW + lane % LANES_PER_ROW
            inside = row < m and (const_expr(self.whole) or block < k_blocks)
            values = [words[w, i] for w in range(BLOCK // 2)]
            if const_expr(self.packed):
                *packed, scale_byte = nvfp4.quantise_block(values, g, g_rcp)
                self.store_scales(sf, tile, row_in_tile, piece, scale_byte if inside else Uint32(0))
            else:
                packed = nvfp4.quantise_block_to_bf16(values, g, g_rcp)
            if inside:
                self.store_values(q, tile * self.tile_rows + row_in_tile, block, packed)

    @cute.jit
    def store_values(self, q: cute.Pointer, row: Int32, block: Int32, words: list[Uint32]):
        """One thread's block: two words of E2M1, or eight of BF16 values."""
        k_blocks, count = self.k // BLOCK, len(words)
        # (row, (word, block))
        mQ = cute.make_tensor(
            q, cute.make_layout((ANY, (count, k_blocks)), stride=(count * k_blocks, (1, count)))
        )
        # (word)
        rQ = cute.make_rmem_tensor(count, Uint32)
        for w in range_constexpr(count):
            rQ[w] = words[w]
        cute.autovec_copy(rQ, mQ[row, (None, block)])

    @cute.jit
    def store_scales(
        self, sf: cute.Pointer, tile: Int32, row_in_tile: Int32, piece: Int32, scale_byte: Uint32
    ):
        """Whole warp: 8 words, one a row, which together are a sector."""
        k_pieces = -(-self.k // GROUP_COLUMNS)
        word = nvfp4.gather_scales(scale_byte)
        # ((row % 32, row / 32), word of four blocks, tile of 128 rows)
        mSF = cute.make_tensor(
            sf,
            cute.make_layout(((32, 4), k_pieces, ANY), stride=((4, 1), TILE_ROWS, TILE_ROWS * k_pieces)),
        )
        if cute.arch.lane_idx() % LANES_PER_ROW == 0 and piece < k_pieces:
            mSF[row_in_tile, piece, tile] = word


class Pack:
    def __init__(self, config: PackConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        x_stride: Int64,
        m: Int32,
        scale: cute.Pointer,
        q: cute.Pointer,
        sf: cute.Pointer | None,
        ctas: Int32,
    ):
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(x, x_stride, m, scale, q, sf).launch(grid=(ctas, 1, 1), block=(self.config.threads, 1, 1))

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        x_stride: Int64,
        m: Int32,
        scale: cute.Pointer,
        q: cute.Pointer,
        sf: cute.Pointer | None,
    ):
        config = self.config
        k_blocks, ctas_per_group = config.k // BLOCK, config.ctas_per_group
        whole = k_blocks == ctas_per_group * config.warps * config.pieces * LANES_PER_ROW
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        cta, _, _ = cute.arch.block_idx()
        group, tile = cta // ctas_per_group % GROUPS, cta // (ctas_per_group * GROUPS)
        row_in_tile = group * ROW_GROUP // 4 + nvfp4.piece_row(lane)
        row = tile * TILE_ROWS + row_in_tile
        first_piece = (cta % ctas_per_group * config.warps + warp) * config.pieces
        packer = Packer(config.k, config.pieces, config.output == "packed", whole)
        # No kernel of a sequence writes x, so it may be read before the kernel before this one has ended.
        rX = packer.load(x, x_stride, m, row, first_piece)
        # The next kernel is admitted when these CTAs have ended: where several of its CTAs fit on a
        # multiprocessor, they would otherwise crowd on the first that become free.
        cute.arch.griddepcontrol_wait()
        g = cute.make_tensor(scale, cute.make_layout(1))[0]
        packer.store(rX, m, q, sf, row, tile, row_in_tile, first_piece, g)


def compile_kernel(config: PackConfig):
    """Compile for the architecture in CUTE_DSL_ARCH; parameters as config.params()."""

    def pointer(dtype, align):
        return cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    return cute.compile(
        Pack(config),
        pointer(BFloat16, 16),
        Int64(config.k),
        Int32(1),
        pointer(Float32, 4),
        pointer(Uint32, 16),
        pointer(Uint32, 16) if config.output == "packed" else None,
        Int32(1),
    )
