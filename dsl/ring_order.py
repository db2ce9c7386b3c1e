"""The static order of work and the ring protocol, as plain arithmetic without the DSL.

The kernels call these functions while they are traced, the tests call them with integers
and simulate the protocol (tests/test_ring_order.py). Every function takes Python integers or
the DSL's Int32 alike; divisions are of non-negative numbers only.

Order of work. Output tiles (m tile, n tile) are numbered in groups of ``group`` m tiles:
inside a group the m tile runs fast and the n tile slowly, so that a weight tile is read once a
group and the group's activation tiles stay in L2. The first group may be smaller (``first``),
which shortens the time before the first tile is packed; the last one is what remains.
CTA c of a grid of G works on tiles c, c + G, c + 2 G, ...

Protocol. Activation tile t (``tile_m`` rows) lives in ring slot t mod S, as the slot's
generation t div S. A tile consists of ``units``, groups of rows, unit u being unit u mod ``units`` of tile
u div ``units``; a warp packs one K chunk of one unit at a time. Two kinds of counters, all zero when
a launch starts and when it ends:

- ``ready[slot][k chunk]`` counts units packed into the slot since the launch started. A loader
  may read chunk j of tile t once ready[slot][j] >= ready_target(t): *publish* and *acquire*.
- ``done[slot]`` counts output tiles that no longer need the slot. A packing warp may overwrite
  the slot with tile t once done[slot] >= done_target(t): *recycle*.

The last agent to arrive at ``fin`` sets every counter to zero: *reset*. See docs/ring.md for
why this cannot deadlock and why nothing is overwritten early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Number = Any  # int, or the DSL's Int32 while a kernel is traced

# Why a kernel gave up waiting: the first word of ``status``, which the runtime reports.
WAITS_FOR_ROWS, WAITS_FOR_SLOT, WAITS_FOR_MAXIMUM, WAITS_FOR_PARTIAL = 1, 2, 3, 4
REASONS = {
    WAITS_FOR_ROWS: "a loader waited for packed rows",
    WAITS_FOR_SLOT: "a packing warp waited for a free slot",
    WAITS_FOR_MAXIMUM: "a warp waited for the absolute maximum of the other CTAs",
    WAITS_FOR_PARTIAL: "a CTA waited for the accumulators of another one",
}


def minimum(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import cutlass

    return cutlass.min(a, b)


def maximum(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    import cutlass

    return cutlass.max(a, b)


def _in_group(
    index: Number, m_tiles: Number, per_tile: Number, group: int, first: int
) -> tuple[Number, Number, Number]:
    """First m tile and size of the group that item ``index`` is in, and its number inside the group.

    Items are numbered group after group, ``per_tile`` of them for each m tile.
    """
    # As if the first group were a full one whose leading tiles are missing.
    missing = group - first
    g = (index + missing * per_tile) // (group * per_tile)
    begin = maximum(g * group - missing, 0)
    size = minimum(g * group - missing + group, m_tiles) - begin
    return begin, size, index - begin * per_tile


def tile_coord(
    index: Number, m_tiles: Number, n_tiles: Number, group: int, first: int | None = None
) -> tuple[Number, Number]:
    """(m tile, n tile) of output tile ``index``, 0 <= index < m_tiles * n_tiles.

    ``group`` m tiles form a group, the first group has ``first`` of them (default ``group``).
    """
    begin, size, rest = _in_group(index, m_tiles, n_tiles, group, group if first is None else first)
    n_tile = rest // size
    return begin + rest - n_tile * size, n_tile


@dataclass(frozen=True)
class RingOrder:
    """The protocol's constants for one kernel; ``n_tiles`` output tiles need each m tile."""

    tile_m: int
    units: int
    n_tiles: int
    k_chunks: int
    slots: int
    group: int
    first: int

    def problems(self) -> list[str]:
        """Why the protocol would be wrong or would deadlock with these constants."""
        found = [f"{name} = {value}, must be at least 1" for name, value in vars(self).items() if value < 1]
        # All tiles of a group stay in use until its last n tile: a smaller ring waits for itself.
        if self.slots < self.group:
            found.append(f"ring of {self.slots} tiles is smaller than a group of {self.group}")
        if self.first > self.group:
            found.append(f"first group of {self.first} tiles is larger than a group of {self.group}")
        return found

    @property
    def may_divide(self) -> bool:
        """Whether the last wave may be divided (tile_walk.py) without waiting for itself.

        A section of it, at most three tiles, begins with the last of them, whose rows must have a place
        while the first is in use: these lie in two groups, or in three if a group is one output tile.
        """
        return self.slots >= (3 if self.group * self.n_tiles == 1 else 2) * self.group

    # Order of work

    def m_tiles(self, m: Number) -> Number:
        return (m + (self.tile_m - 1)) // self.tile_m

    def tile_coord(self, index: Number, m_tiles: Number) -> tuple[Number, Number]:
        return tile_coord(index, m_tiles, self.n_tiles, self.group, self.first)

    # Parts: what a warp packs at a time, one K chunk of one unit.

    def parts(self, m_tiles: Number) -> Number:
        return m_tiles * (self.units * self.k_chunks)

    def prologue_parts(self, m_tiles: Number) -> Number:
        """Parts of the first group: packed by the consumer warps before their first output tile."""
        return self.parts(minimum(m_tiles, self.first))

    def part_coord(self, index: Number, m_tiles: Number) -> tuple[Number, Number]:
        """(unit, K chunk) of part ``index``: group after group, inside a group chunk after chunk."""
        per_tile = self.units * self.k_chunks
        begin, size, rest = _in_group(index, m_tiles, per_tile, self.group, self.first)
        chunk = rest // (size * self.units)
        return begin * self.units + rest - chunk * size * self.units, chunk

    def tile_of(self, unit: Number) -> Number:
        return unit // self.units

    # Slots and counters. Indices are into the int32 array ``counters``.

    def slot(self, tile: Number) -> Number:
        return tile % self.slots

    def generation(self, tile: Number) -> Number:
        return tile // self.slots

    def ready_index(self, slot: Number, chunk: Number) -> Number:
        return slot * self.k_chunks + chunk

    def done_index(self, slot: Number) -> Number:
        return self.slots * self.k_chunks + slot

    @property
    def fin_index(self) -> int:
        """Agents that have finished with the counters."""
        return self.slots * (self.k_chunks + 1)

    @property
    def amax_index(self) -> int:
        """Bits of the absolute maximum so far."""
        return self.fin_index + 1

    @property
    def amax_count_index(self) -> int:
        """CTAs whose warps have contributed to the absolute maximum."""
        return self.fin_index + 2

    @property
    def counters(self) -> int:
        """Length of the int32 array ``counters``."""
        return self.fin_index + 3

    # Expected values

    def ready_target(self, tile: Number) -> Number:
        """Units that must have been packed into the tile's slot since the launch started.

        Units whose rows all lie beyond m count as well; there is nothing to pack in them.
        """
        return (self.generation(tile) + 1) * self.units

    def done_target(self, tile: Number) -> Number:
        """Output tiles of the slot's earlier generations: each must have been loaded."""
        return self.generation(tile) * self.n_tiles

    def agents(self, grid: int, packing_warps: int) -> int:
        """Arrivals at ``fin``: per CTA its packing warps, its loader and its consumers' leader."""
        return grid * (packing_warps + 2)
