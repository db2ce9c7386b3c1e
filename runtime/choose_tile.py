"""Which of several Hopper GEMMs is fastest for M rows: a model of the time, no measurement.

Output tiles are worked off in waves of as many as the device holds at once. A wave takes as many
K steps as K has, of whichever is slowest, in cycles, for the CTAs that share a multiprocessor: the
tensor cores (tile_m / 2 cycles a wgmma and strip, and a fixed cost), unpacking the weights (issue
slots), or the latency of one step (barrier, shared memory, unpacking, issue). Filling the pipeline
and storing the tile follow, which nothing overlaps. A last wave that is divided evenly along k costs its
share of a wave and the handing over of accumulators. The constants are fitted to times measured on an
H200; only their ratios matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TILE_K = 64
STRIP_COLUMNS = 64  # of y: the weight rows of one warpgroup
WGMMAS = 4  # of k16, a strip and K step
WGMMA_CYCLES = 15  # of each, beyond its multiplications
UNPACK_CYCLES = 150  # a strip, one K step
STEP_CYCLES = 300
TILE_CYCLES = 6000
STORE_CYCLES = 0.05  # an output element
HAND_OVER_CYCLES = 11_000


@dataclass(frozen=True)
class Tile:
    """A GEMM's output tile in rows and columns of y, and how many CTAs share a multiprocessor.

    ``divides``: CTAs share the tiles of the last wave.
    """

    tile_m: int
    tile_n: int
    ctas_per_sm: int = 1
    divides: bool = False


def cycles(tile: Tile, m: int, n: int, k: int, sms: int) -> float:
    """Modelled duration of y[m, n] = x[m, k] W^T on ``sms`` multiprocessors."""
    tiles = -(-m // tile.tile_m) * -(-n // tile.tile_n)
    at_once = sms * tile.ctas_per_sm
    full_waves, rest = divmod(tiles, at_once)
    wave = _wave(tile, tile.ctas_per_sm, k)
    last_wave = _wave(tile, -(-rest // sms), k) if rest else 0.0
    if tile.divides and full_waves and rest:
        last_wave = min(last_wave, rest / at_once * wave + HAND_OVER_CYCLES)
    return full_waves * wave + last_wave


def choose_tile(tiles: Sequence[Tile], m: int, n: int, k: int, sms: int) -> int:
    """Index of the tile with the shortest modelled duration, the first of equals."""
    durations = [cycles(tile, m, n, k, sms) for tile in tiles]
    return durations.index(min(durations))


def _wave(tile: Tile, ctas: int, k: int) -> float:
    """Cycles in which a multiprocessor finishes one tile of each of ``ctas`` CTAs."""
    strips = ctas * tile.tile_n // STRIP_COLUMNS
    multiply = strips * WGMMAS * (tile.tile_m / 2 + WGMMA_CYCLES)
    step = max(multiply, strips * UNPACK_CYCLES, STEP_CYCLES)
    return k / TILE_K * step + TILE_CYCLES + STORE_CYCLES * ctas * tile.tile_m * tile.tile_n
