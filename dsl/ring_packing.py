"""The packing side of a persistent ring: tensor scale, prologue, steady state.

One source for sm_12x, whose ring holds packed E2M1 and block scales, and for Hopper, whose ring
holds the same values in BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from ringfp4.dsl import nvfp4
from ringfp4.dsl.absmax import Absmax
from ringfp4.dsl.config.quantise import GROUP_COLUMNS, ROW_GROUP, AbsmaxConfig
from ringfp4.dsl.config.ring import PACKING_WARPS, RingFields
from ringfp4.dsl.pack import LANES_PER_ROW, Packer
from ringfp4.dsl.ring import Ring


@dataclass(frozen=True)
class RingPacking:
    """Quantises x (bf16 [m, K], rows x_stride elements apart) into a ring; whole warps execute it.

    ``q`` and ``sf`` are the ring, without ``sf`` it holds BF16 values. ``scale`` is the tensor scale
    if ``rule`` is negative; otherwise it is found by that rule and written there.
    """

    config: RingFields
    ring: Ring
    x: cute.Pointer
    x_stride: Int64
    m: Int32
    q: cute.Pointer
    sf: Any
    scale: cute.Pointer
    rule: Int32

    @cute.jit
    def tensor_scale(self, warp: Int32, leads: Boolean) -> Float32:
        """The activation's scale: given, or from the maximum over the rows of all warps that pack.

        ``warp`` counts a CTA's: packing warps first, then consumers. One of them ``leads``.
        """
        mScale = cute.make_tensor(self.scale, cute.make_layout(1))
        g = Float32(0.0)
        if self.rule < 0:
            g = mScale[0]
        else:
            in_cta = PACKING_WARPS + self.config.consumer_warps
            first, warps = self.deal(warp, in_cta)
            absmax = Absmax(AbsmaxConfig(k=self.config.k, loads=self.config.maximum_loads))
            amax = absmax.rows_amax(self.x, self.x_stride, self.m, first, warps)
            amax = self.ring.contribute_maximum(amax, leads, in_cta)
            g = absmax.tensor_scale(amax, self.rule)
            if first == 0 and cute.arch.lane_idx() == 0:
                mScale[0] = g
        return g

    @cute.jit
    def prologue(self, warp: Int32, g: Float32):
        """Consumer warp ``warp`` of its CTA: its share of the first group, whose slots are free."""
        order = self.config.order
        part, step = self.deal(warp, self.config.consumer_warps)
        m_tiles = order.m_tiles(self.m)
        while part < order.prologue_parts(m_tiles):
            unit, chunk = order.part_coord(part, m_tiles)
            self.pack(unit, chunk, g, self.config.prologue_pieces)
            part += step

    @cute.jit
    def steady(self, warp: Int32, g: Float32):
        """Packing warp ``warp`` of its CTA: its share of all other groups."""
        order = self.config.order
        first, step = self.deal(warp, PACKING_WARPS)
        m_tiles = order.m_tiles(self.m)
        part = order.prologue_parts(m_tiles) + first
        while part < order.parts(m_tiles):
            unit, chunk = order.part_coord(part, m_tiles)
            self.ring.wait_for_slot(order.tile_of(unit))
            self.pack(unit, chunk, g, self.config.pieces)
            part += step

    def packer(self, pieces: int) -> Packer:
        config = self.config
        return Packer(config.k, pieces, config.packed, whole=True, tile_rows=config.tile_m)

    def deal(self, warp: Int32, warps: int) -> tuple[Int32, Int32]:
        """Which of the grid's warps this is, and how many there are, ``warps`` in a CTA."""
        ctas = cute.arch.grid_dim()[0]
        return warp * ctas + cute.arch.block_idx()[0], warps * ctas

    @cute.jit
    def pack(self, unit: Int32, chunk: Int32, g: Float32, in_flight: int):
        """One K chunk of one unit, into its tile's slot; ``in_flight`` pieces of 64 columns at a time."""
        config, order, lane = self.config, self.config.order, cute.arch.lane_idx()
        tile = order.tile_of(unit)
        unit_in_tile = unit - tile * order.units
        if const_expr(config.packed):  # the rows whose block scales lie together
            row_in_tile = unit_in_tile * (ROW_GROUP // 4) + nvfp4.piece_row(lane)
        else:
            row_in_tile = unit_in_tile * ROW_GROUP + lane // LANES_PER_ROW
        row, slot = tile * config.tile_m + row_in_tile, order.slot(tile)
        pieces = config.chunk_columns // GROUP_COLUMNS
        for i in cutlass.range(pieces // in_flight, unroll=1):
            piece = chunk * pieces + i * in_flight
            packer = self.packer(in_flight)
            rX = packer.load(self.x, self.x_stride, self.m, row, piece)
            packer.store(rX, self.m, self.q, self.sf, row, slot, row_in_tile, piece, g)
        self.ring.publish(tile, chunk)
