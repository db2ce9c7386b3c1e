"""Which kernels a linear needs on an architecture; imports no DSL."""

from __future__ import annotations

from dataclasses import dataclass

from ringfp4.dsl.config.base import KernelConfig
from ringfp4.dsl.config.gemm import TILES, GemmConfig
from ringfp4.dsl.config.hopper import HopperGemmConfig, HopperRepackConfig
from ringfp4.dsl.config.quantise import AbsmaxConfig, PackConfig
from ringfp4.dsl.config.ring import HopperRingGemmConfig, RingGemmConfig
from ringfp4.errors import ConfigError

Tile = tuple[int, int, int]
DEFAULT_TILES: tuple[Tile, ...] = ((128, 128, 128),)
RING_GROUPS = (16, 8)  # variants of the fused kernels of sm_12x: m tiles of a group


@dataclass(frozen=True)
class Linear:
    """y[m, n] = x[m, k] W[n, k]^T of a model, called ``name``; ``tiles`` are the GEMM variants built."""

    name: str
    k: int
    n: int
    tiles: tuple[Tile, ...] = DEFAULT_TILES


def plan(linear: Linear, arch: str) -> list[KernelConfig]:
    """Every kernel of ``linear`` on ``arch``. ConfigError for a tile or a shape that no kernel has.

    ``tiles`` are those of sm_12x; sm_90a has a set of its own for every M (runtime/choose_tile.py).
    """
    if arch == "sm_90a":
        gemms = HopperGemmConfig.variants(linear.n, linear.k)
        gemms[0].check(arch)
        pack = PackConfig(k=linear.k, output="bf16")
        others = [AbsmaxConfig(k=linear.k), pack, HopperRepackConfig(k=linear.k)]
        return [*others, *gemms, *_rings(linear, arch)]
    tiles = [_gemm(linear, tile) for tile in linear.tiles]
    return [AbsmaxConfig(k=linear.k), PackConfig(k=linear.k), *tiles, *_rings(linear, arch)]


def _gemm(linear: Linear, tile: Tile) -> KernelConfig:
    if tile[:2] not in TILES or tile[2] != 128:
        known = ", ".join(f"{m}x{n}x128" for m, n in TILES)
        raise ConfigError(f"no kernel has tile {'x'.join(map(str, tile))}", remedy=f"use one of {known}")
    return GemmConfig.with_tile(linear.n, linear.k, *tile[:2])


def hopper_rings(n: int) -> tuple[tuple[int, int, int], ...]:
    """Variants of Hopper's fused kernels: tile_m, m tiles of a group, slots. runtime/devices.py chooses.

    The first is used untuned. Larger groups read the weight less often, which saves power; with few n tiles
    smaller ones wait less for rows, since each makes less than a wave.
    """
    return ((256, 2 if n <= 8192 else 4, 8), (256, 6, 12), (208, 4, 8))


def _rings(linear: Linear, arch: str) -> list[KernelConfig]:
    """The fused kernels; a linear that they do not suit has the other schedules only."""
    n, k = linear.n, linear.k
    rings: list[KernelConfig]
    if arch == "sm_90a":
        rings = [HopperRingGemmConfig.for_linear(n, k, *ring) for ring in hopper_rings(n)]
    else:
        rings = [RingGemmConfig.for_linear(n, k, group) for group in RING_GROUPS]
    return [config for config in rings if not config.problems(arch)]
