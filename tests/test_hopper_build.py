"""The Hopper kernels' configurations and machine code: what is refused, and what a K step costs."""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import pytest
from ringfp4.build_cubins.checks import refusal
from ringfp4.build_cubins.compiler import Built, Compiler
from ringfp4.build_cubins.job import Job
from ringfp4.build_cubins.sass import count
from ringfp4.dsl.config import Linear, hopper_rings, plan
from ringfp4.dsl.config.base import SMEM_BYTES
from ringfp4.dsl.config.hopper import SMEM_PER_SM, HopperGemmConfig, HopperRepackConfig
from ringfp4.dsl.config.ring import HopperRingGemmConfig
from ringfp4.errors import ConfigError
from ringfp4.runtime.choose_tile import Tile, choose_tile, cycles
from ringfp4.validate.gates import ROLES

needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the build extra (the DSL)"
)

# Configurations


@pytest.mark.parametrize("shape", [*ROLES.values(), (64, 128), (192, 128)])
def test_every_variant_fits_the_device(shape: tuple[int, int]) -> None:
    for config in HopperGemmConfig.variants(*shape):
        assert config.problems("sm_90a") == []
        producer, consumer = config.registers
        at_launch = 65_536 // (config.threads * config.ctas_per_sm) // 8 * 8
        assert producer + config.consumers * consumer <= at_launch * (1 + config.consumers)
        assert config.ctas_per_sm * (config.smem_bytes + 1024) <= SMEM_PER_SM
        assert config.smem_bytes <= SMEM_BYTES["sm_90a"]
        assert config.load_bytes <= config.stage_bytes


def test_plan_has_what_a_linear_needs() -> None:
    kinds = [config.kind for config in plan(Linear("l", 5376, 21504), "sm_90a")]
    assert {"absmax", "pack", "repack", "gemm", "ring_gemm"} == set(kinds)
    assert kinds.count("gemm") == len(HopperGemmConfig.variants(21504, 5376))


@pytest.mark.parametrize(("n", "k"), [(96, 128), (64, 64), (64, 192), (0, 128)])
def test_other_shapes_are_refused_by_name(n: int, k: int) -> None:
    with pytest.raises(ConfigError, match="not a multiple of"):
        plan(Linear("odd", k, n), "sm_90a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tile_m": 12}, "multiple of 8"),
        ({"tile_m": 264}, "multiple of 8 in 8..256"),
        ({"tile_m": 256, "consumers": 3}, "registers a consumer thread"),
        ({"tile_m": 64, "consumers": 2, "ctas_per_sm": 2}, "registers a consumer thread"),
        ({"tile_m": 128, "consumers": 1, "ctas_per_sm": 4}, "room for"),
        ({"tile_m": 64, "consumers": 4}, "4 consumer warpgroups"),
    ],
)
def test_what_a_tile_cannot_be(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HopperGemmConfig(features=5376, k=7168, **fields).check("sm_90a")


def test_only_for_hopper() -> None:
    with pytest.raises(ConfigError, match="only for sm_90a"):
        HopperGemmConfig(features=64, k=128, tile_m=64).check("sm_121a")


# Choosing a tile


TILES = [Tile(c.tile_m, c.tile_n, c.ctas_per_sm, c.divides) for c in HopperGemmConfig.variants(5376, 7168)]
# Fastest, or within 5 % of it, among the variants on an H200 (docs/hopper.md).
MEASURED = {
    ("qkv", 1): (16, 64),
    ("qkv", 128): (128, 192),
    ("qkv", 2048): (256, 128),
    ("attn_out", 64): (64, 64),
    ("attn_out", 946): (256, 128),
    ("attn_out", 2048): (256, 128),
    ("fc1", 128): (128, 192),
    ("fc1", 2048): (256, 128),
    ("fc2", 256): (96, 128),
    ("fc2", 512): (176, 128),
}


@pytest.mark.parametrize(("role", "m"), MEASURED)
def test_the_model_chooses_what_was_measured(role: str, m: int) -> None:
    chosen = TILES[choose_tile(TILES, m, *ROLES[role], sms=132)]
    assert (chosen.tile_m, chosen.tile_n) == MEASURED[role, m]


@pytest.mark.parametrize("tile", TILES)
def test_the_model_never_gets_faster_with_more_rows(tile: Tile) -> None:
    durations = [cycles(tile, m, 5376, 7168, 132) for m in range(1, 4000, 7)]
    assert all(b > a * (1 - 1e-9) for a, b in pairwise(durations))


# Machine code


JOBS = [
    Job(HopperGemmConfig(features=5376, k=7168, tile_m=232), "sm_90a"),
    Job(HopperGemmConfig(features=5376, k=7168, tile_m=16, consumers=1, ctas_per_sm=4), "sm_90a"),
    Job(HopperGemmConfig(features=64, k=128, tile_m=128, consumers=3), "sm_90a"),
    Job(HopperRepackConfig(k=7168), "sm_90a"),
]
FUSED = [Job(HopperRingGemmConfig.for_linear(5376, 7168, *ring), "sm_90a") for ring in hopper_rings(5376)]


# Refused by its own check; compiled nevertheless, ptxas has too few registers and waits for each wgmma.
SERIALISED = Job(HopperGemmConfig(features=5376, k=7168, tile_m=96, ctas_per_sm=2), "sm_90a")


@pytest.fixture(scope="module")
def built() -> dict[Job, Built]:
    results, failures = Compiler(cache=None, threads=2).run([*JOBS, *FUSED, SERIALISED])
    assert not failures
    return results


def job_id(job: Job) -> str:
    return job.label


@needs_dsl
@pytest.mark.parametrize("job", [*JOBS, *FUSED], ids=job_id)
def test_the_builder_accepts_it(built: dict[Job, Built], job: Job) -> None:
    assert refusal(job, built[job]) == ""


@needs_dsl
def test_the_builder_refuses_serialised_wgmma(built: dict[Job, Built]) -> None:
    assert SERIALISED.config.problems("sm_90a")
    assert "serialised" in refusal(SERIALISED, built[SERIALISED])


@needs_dsl
@pytest.mark.parametrize("job", [*JOBS[:2], *FUSED], ids=job_id)
def test_a_k_step_waits_once_and_reads_its_weights_once(built: dict[Job, Built], job: Job) -> None:
    loop = built[job].sass.main_loop()  # two K steps
    assert count(loop, r"HGMMA\.64") == 8
    assert count(loop, r"WARPGROUP\.DEPBAR") == 2
    assert count(loop, r"LDS\.128") == 2
    assert count(loop, r"LDS\.64") == 2
    assert count(loop, r"HMUL2\.BF16") == 32  # two weights each
    assert count(loop, r"R2UR\b") == 0  # descriptors stay in uniform registers
    assert loop.total() <= 2 * 150
