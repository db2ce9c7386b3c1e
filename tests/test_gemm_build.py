"""The block-scaled GEMM's machine code: what the builder would refuse, and the cost of a K step."""

from __future__ import annotations

import importlib.util
import re

import pytest
from ringfp4.build_cubins.checks import refusal
from ringfp4.build_cubins.compiler import Built, Compiler
from ringfp4.build_cubins.job import Job
from ringfp4.build_cubins.sass import count
from ringfp4.dsl.config.gemm import GemmConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the build extra (the DSL)"
)

TILES = [(128, 128), (128, 256)]
JOBS = [
    *(Job(GemmConfig.with_tile(21504, 5376, *tile), "sm_121a") for tile in TILES),
    *(Job(GemmConfig.with_tile(21504, 5376, *tile), "sm_120f") for tile in TILES),
    *(Job(GemmConfig.with_tile(5376, 14336, *tile), "twin") for tile in TILES),
    # One tile in every dimension: nothing of a tensor map may be folded away.
    Job(GemmConfig.with_tile(8, 32, 128, 256), "sm_121a"),
]


@pytest.fixture(scope="module")
def built() -> dict[Job, Built]:
    results, failures = Compiler(cache=None, threads=2).run(JOBS)
    assert not failures
    return results


def job_id(job: Job) -> str:
    return job.label


@pytest.mark.parametrize("job", JOBS, ids=job_id)
def test_the_builder_accepts_it(built: dict[Job, Built], job: Job) -> None:
    assert refusal(job, built[job]) == ""
    assert built[job].elf.registers == job.config.sass_rules(job.arch).max_registers


@pytest.mark.parametrize("job", [job for job in JOBS if job.arch != "twin"], ids=job_id)
def test_a_k_step_loads_every_fragment_once(built: dict[Job, Built], job: Job) -> None:
    config = job.config
    assert isinstance(config, GemmConfig)
    if config.k_tiles == 1:
        pytest.skip("no loop over K")
    loop = built[job].sass.main_loop()
    fragments = config.k_blocks * (config.warp_m // 16 + config.warp_n // 16)
    assert count(loop, r"OMMA\.SF\..*\.4X$") == config.mma_count
    assert count(loop, "LDSM") == fragments
    assert count(loop, r"LDS\b") == 2 * config.k_blocks  # scales of A and of B
    assert loop.total() < 5 * config.mma_count


@pytest.mark.parametrize("job", JOBS, ids=job_id)
def test_tensor_maps_keep_their_ranks(built: dict[Job, Built], job: Job) -> None:
    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::cta\.global", built[job].ptx)
    stores = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.global\.shared::cta", built[job].ptx)
    assert sorted(loads) == ["2", "2", "3", "3"]
    assert set(stores) == {"2"}


@pytest.mark.parametrize("job", JOBS, ids=job_id)
def test_product_and_bias_are_rounded_apart(built: dict[Job, Built], job: Job) -> None:
    config = job.config
    assert isinstance(config, GemmConfig)
    outputs = config.warp_m * config.warp_n // 32
    # One more product: the two tensor scales.
    assert built[job].sass.count(r"U?FMUL\b") == outputs + 1
    assert built[job].sass.count(r"FADD\b") == outputs
    assert built[job].sass.count(r"FFMA\b") == 0
    # Without a bias -0.0 is added (a pair as one word): +0.0 would turn -0.0 into +0.0.
    assert re.search(rf"mov\.b32\s+%r\d+, {0x80008000 - (1 << 32)};", built[job].ptx)
