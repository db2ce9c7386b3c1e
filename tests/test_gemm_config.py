"""GemmConfig: its arithmetic, and that every trap of the kernel is refused before compiling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ringfp4.dsl.config.base import ARCHS, SMEM_BYTES
from ringfp4.dsl.config.gemm import TILES, GemmConfig
from ringfp4.errors import ConfigError

QKV = GemmConfig.with_tile(21504, 5376)
ARCH = "sm_121a"


@pytest.mark.parametrize("tile", sorted(TILES))
@pytest.mark.parametrize("arch", ["sm_121a", "sm_120f", "twin"])
@pytest.mark.parametrize(("n", "k"), [(21504, 5376), (5376, 7168), (8, 32), (200, 96), (328, 160), (8, 192)])
def test_the_known_tiles_are_usable(tile: tuple[int, int], arch: str, n: int, k: int) -> None:
    config = GemmConfig.with_tile(n, k, *tile)
    config.check(arch)
    assert config.name == f"gemm_n{n}_k{k}_{tile[0]}x{tile[1]}x128"
    assert config.smem_bytes <= SMEM_BYTES[arch]
    assert config.n_tiles * config.tile_n >= n > (config.n_tiles - 1) * config.tile_n
    assert config.k_tiles * config.tile_k >= k > (config.k_tiles - 1) * config.tile_k


def test_sizes_of_the_default_tile() -> None:
    assert QKV.stage_bytes == 8192 + 8192 + 1024 + 1024
    assert QKV.smem_bytes == 4 * QKV.stage_bytes + 8 * 2 * 1024 + 1024  # barriers round up to 1 KiB
    assert (QKV.threads, QKV.launch_registers) == (384, 168)
    assert QKV.mma_count == 32  # of the 256 of a 128 x 128 x 128 step, by each of 8 warps


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"features": 12}, "N = 12"),
        ({"features": 0}, "N = 0"),
        ({"k": 48}, "K = 48"),
        ({"k": 0}, "K = 0"),
        ({"tile_k": 256}, "tile_k = 256"),
        ({"tile_n": 192}, "scale tiles"),
        ({"tile_m": 64}, "scale tiles"),
        ({"tile_m": 384}, "256 rows"),
        ({"warps_m": 3}, "3 warps cannot share 128 rows"),
        ({"warps_n": 4}, "4 warps cannot share 128 columns"),
        ({"stages": 1}, "1 stages"),
        ({"stages": 5}, "of shared memory"),
        ({"store_buffers": 3}, "3 store buffers"),
        ({"group": 0}, "group = 0"),
        # One loading warp does not free a warpgroup's registers: the MMA warps would wait for ever.
        ({"producer_warps": 1}, "whole warpgroups"),
        # More registers than the launch holds: likewise.
        ({"mma_registers": 240}, "deadlock"),
        ({"producer_registers": 56}, "deadlock"),
        ({"mma_registers": 230}, "multiples of 8"),
        ({"producer_registers": 16}, "multiples of 8"),
        ({"producer_registers": 176}, "does not bracket"),
        ({"tile_n": 256, "warps_m": 1, "warps_n": 4, "stages": 2}, "accumulators"),
    ],
)
def test_a_violated_constraint_is_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(QKV, **change).check(ARCH)


def test_all_violations_are_listed_at_once() -> None:
    problems = replace(QKV, features=12, k=48, stages=1).problems(ARCH)
    assert len(problems) == 3


def test_hopper_has_no_block_scaled_mma() -> None:
    assert any("sm_90a" in text for text in QKV.problems("sm_90a"))
    assert set(ARCHS) >= {"sm_121a", "sm_120f", "twin", "sm_90a"}


def test_parameters_describe_the_tensors() -> None:
    config = GemmConfig.with_tile(200, 96, 128, 256)
    params = {p.name: p for p in config.params()}
    assert list(params) == ["q", "w", "sf", "w_sf", "y", "scale", "w_scale", "bias", "m"]
    assert (params["q"].dims, params["q"].box) == ((48, "m"), (64, 128))
    assert (params["w"].dims, params["w"].box) == ((48, 200), (64, 256))
    assert (params["sf"].dims, params["sf"].box) == ((256, 2, "m_blocks"), (256, 2, 1))
    assert (params["w_sf"].dims, params["w_sf"].box) == ((256, 2, 2), (256, 2, 2))
    assert params["w_sf"].strides == (512, 1024)
    assert (params["y"].dims, params["y"].strides, params["y"].swizzle) == ((200, "m"), (400,), 128)
    for p in params.values():
        if p.kind == "tensor_map":
            assert len(p.strides) == len(p.dims) - 1
            assert all(stride % 16 == 0 for stride in p.strides)
            assert all(extent <= 256 for extent in p.box)


def test_the_loads_of_a_stage_fill_it() -> None:
    for tile in TILES:
        config = GemmConfig.with_tile(21504, 5376, *tile)
        size = {"u8": 1, "u16": 2}
        loaded = 0
        for p in config.params()[:4]:
            box = 1
            for extent in p.box:
                box *= extent
            loaded += box * size[p.dtype]
        assert loaded == config.stage_bytes
