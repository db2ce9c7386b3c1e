"""Which kernels a linear needs on an architecture; imports no DSL."""

from __future__ import annotations

from dataclasses import dataclass

from ringfp4.dsl.config.base import KernelConfig
from ringfp4.dsl.config.gemm import TILES, GemmConfig
from ringfp4.dsl.config.quantise import AbsmaxConfig, PackConfig
from ringfp4.errors import ConfigError

Tile = tuple[int, int, int]
DEFAULT_TILES: tuple[Tile, ...] = ((128, 128, 128),)


@dataclass(frozen=True)
class Linear:
    """y[m, n] = x[m, k] W[n, k]^T of a model, called ``name``; ``tiles`` are the GEMM variants built."""

    name: str
    k: int
    n: int
    tiles: tuple[Tile, ...] = DEFAULT_TILES


def plan(linear: Linear, arch: str) -> list[KernelConfig]:
    """Every kernel of ``linear`` on ``arch``. ConfigError for a tile that no kernel has."""
    gemms = [_gemm(linear, tile) for tile in linear.tiles]
    return [AbsmaxConfig(k=linear.k), PackConfig(k=linear.k), *gemms]


def _gemm(linear: Linear, tile: Tile) -> KernelConfig:
    if tile[:2] not in TILES or tile[2] != 128:
        known = ", ".join(f"{m}x{n}x128" for m, n in TILES)
        raise ConfigError(f"no kernel has tile {'x'.join(map(str, tile))}", remedy=f"use one of {known}")
    return GemmConfig.with_tile(linear.n, linear.k, *tile[:2])
