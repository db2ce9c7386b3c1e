"""The persistent ring's configurations, and the order of its fences in the code made from them."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace

import pytest
from ringfp4.build_cubins.checks import refusal
from ringfp4.build_cubins.compiler import Built, Compiler
from ringfp4.build_cubins.job import Job
from ringfp4.build_cubins.sass import count
from ringfp4.dsl.config import RING_GROUPS, Linear, hopper_rings, plan
from ringfp4.dsl.config.base import KernelConfig
from ringfp4.dsl.config.gemm import GemmConfig
from ringfp4.dsl.config.ring import HopperRingGemmConfig, RingFields, RingGemmConfig
from ringfp4.errors import ConfigError

H3 = [(21504, 5376), (5376, 7168), (28672, 5376), (5376, 14336)]  # N, K
JOBS = [
    Job(RingGemmConfig.for_linear(21504, 5376), "sm_121a"),
    Job(RingGemmConfig.for_linear(5376, 7168, group=1), "twin"),
    Job(HopperRingGemmConfig.for_linear(5376, 7168, *hopper_rings(5376)[0]), "sm_90a"),
]
UNFUSED = Job(GemmConfig.with_tile(21504, 5376), "sm_121a")
needs_dsl = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the build extra (the DSL)"
)


def rings(n: int, k: int, arch: str) -> list[KernelConfig]:
    return [config for config in plan(Linear("any", k, n), arch) if config.kind == "ring_gemm"]


@pytest.mark.parametrize("arch", ["sm_121a", "sm_120f", "twin"])
@pytest.mark.parametrize(("n", "k"), H3)
def test_every_role_has_its_variants(n: int, k: int, arch: str) -> None:
    configs = rings(n, k, arch)
    assert [config.group for config in configs] == list(RING_GROUPS)
    for config in configs:
        assert config.problems(arch) == []
        # A group in use and a whole one being packed.
        assert config.slots == 2 * config.group
        assert config.k_chunks == 7


def test_hopper_has_its_variants() -> None:
    for n, k in H3:
        configs = rings(n, k, "sm_90a")
        assert [(config.tile_m, config.group, config.slots) for config in configs] == list(hopper_rings(n))
        assert all(config.problems("sm_90a") == [] for config in configs)


def test_a_linear_that_no_ring_suits_has_none() -> None:
    assert rings(136, 96, "sm_121a") == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"slots": 15}, "ring of 15 tiles is smaller than a group of 16"),
        ({"first": 17}, "first group of 17 tiles is larger than a group of 16"),
        ({"k_chunks": 5}, "5 K chunks do not divide K = 5376"),
        ({"pieces": 5}, "5 pieces of 64 columns, 1 to 4 that divide a chunk of 768 are needed"),
        ({"prologue_pieces": 9}, "9 pieces of 64 columns, 1 to 8 that divide a chunk of 768 are needed"),
        ({"tile_m": 256, "warps_m": 8, "warps_n": 2}, "packing needs 128"),
        ({"producer_warps": 8}, "8 producer warps, a loader and 3 packers are needed"),
        ({"producer_registers": 120}, "warps ask for 70656 registers, the launch holds 64512: deadlock"),
    ],
)
def test_refused(change: dict[str, int], problem: str) -> None:
    config = replace(RingGemmConfig.for_linear(21504, 5376), **change)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        config.check("sm_121a")


def test_hopper_refuses_two_ctas_for_each_multiprocessor() -> None:
    config = replace(HopperRingGemmConfig.for_linear(5376, 7168), ctas_per_sm=2)
    with pytest.raises(ConfigError, match="one CTA for each SM"):
        config.check("sm_90a")


@pytest.fixture(scope="module")
def built() -> dict[Job, Built]:
    results, failures = Compiler(cache=None, threads=2).run([*JOBS, UNFUSED])
    assert not failures
    return results


@needs_dsl
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_the_builder_accepts_it(built: dict[Job, Built], job: Job) -> None:
    assert refusal(job, built[job]) == ""


@needs_dsl
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_the_ring_is_loaded_by_its_map(built: dict[Job, Built], job: Job) -> None:
    """No mode may be folded away, not even in a ring of two tiles."""
    config = job.config
    assert isinstance(config, RingFields)
    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::c\w+\.global", built[job].ptx)
    maps = {p.name: p for p in config.params() if p.kind == "tensor_map"}
    ranks = sorted(len(p.dims) for name, p in maps.items() if name != "y")
    assert sorted(map(int, loads)) == sorted(ranks * (len(loads) // len(ranks)))  # the loop may be unrolled
    assert maps["q"].dims[-1] == config.ring_rows


@needs_dsl
def test_a_k_step_costs_what_it_costs_unfused(built: dict[Job, Built]) -> None:
    fused, unfused = (built[job].sass.main_loop() for job in (JOBS[0], UNFUSED))
    assert fused.total() <= 1.1 * unfused.total()  # some moves between registers
    for opcode in (r"OMMA\b", r"LDSM\b", r"LDS\b", r"SYNCS\b"):
        assert count(fused, opcode) == count(unfused, opcode)


EVENTS = {
    "poll": r"^TRY:",
    "acquire": r"fence\.acq_rel\.gpu",
    "proxy": r"fence\.proxy\.async\.global",
    "load": r"cp\.async\.bulk\.tensor\.\dd\.shared",
    "store": r"\bst\.global\.(v2|v4)",
    "warp": r"bar\.warp\.sync",
    "release": r"red\.release\.gpu\.global\.add",
    "maximum": r"red\.relaxed\.gpu\.global\.max",
    "meet": r"\bbar\.sync\s+9, ",
    "finish": r"atom\.global\.acq_rel(\.gpu)?\.add",
}


def events(ptx: str) -> list[str]:
    """Memory operations of the protocol in the order of the text, each run of one kind once."""
    found = []
    for line in ptx.splitlines():
        for name, pattern in EVENTS.items():
            if re.search(pattern, line) and found[-1:] != [name]:
                found.append(name)
    return found


@needs_dsl
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.label)
def test_fences_stand_where_they_must(built: dict[Job, Built], job: Job) -> None:
    order = events(built[job].ptx)
    text = " ".join(order)
    # Every poll ends in an acquire; the loader's goes on with a proxy fence before its copies.
    for i, name in enumerate(order):
        if name == "poll":
            assert order[i + 1] == "acquire"
    assert re.search(r"poll acquire proxy load", text), text
    # A tile that is complete is acquired by several lanes for the one that issues the copies.
    assert re.search(r"(?<!poll )acquire warp proxy", text), text
    # Publishing: stores, each lane's proxy fence, the warp barrier, one lane's release.
    assert len(re.findall(r"store proxy warp release", text)) == 2, text  # prologue and steady state
    # A maximum is released by the arrival that follows it, after the barrier with the CTA's other warps,
    # and a second barrier hands the others what the arrival's warp, a packing warp, has acquired.
    assert len(re.findall(r"maximum meet release warp poll acquire meet", text)) == 1, text
    assert len(re.findall(r"maximum meet", text)) == 2, text
    assert text.count("finish") == 2, text
