"""Real bad artefacts, compiled here, and what the builder says of each."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
from bad_kernels.configs import CopyConfig
from ringfp4.build_cubins.checks import refusal
from ringfp4.build_cubins.compiler import Built, Compiler, raise_failed
from ringfp4.build_cubins.job import Job
from ringfp4.dsl.config.base import SassRules
from ringfp4.dsl.config.hopper import HopperGemmConfig
from ringfp4.errors import BuildError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the build extra (the DSL)"
)

GOOD = CopyConfig()
CONFIGS = [
    GOOD,
    CopyConfig(variant="live", setmaxnreg=(24, 40), threads_=384, min_blocks=1),
    CopyConfig(variant="spills", values=96, threads_=1024),
    CopyConfig(variant="dropped", setmaxnreg=(24, 40), threads_=384),
    CopyConfig(variant="ragged", setmaxnreg=(24, 40), threads_=288, min_blocks=1),
    CopyConfig(variant="greedy", setmaxnreg=(232, 240), threads_=384, min_blocks=1),
    CopyConfig(variant="renamed", entry="other_name"),
    CopyConfig(variant="param", extra_param=True),
    CopyConfig(variant="no_mma", tensor=r"^OMMA\.SF\..*\.4X$"),
    CopyConfig(variant="waits", early=True),
    CopyConfig(variant="waits_late", early=True),
    CopyConfig(variant="loads_words", early=True, early_loads=4),
    CopyConfig(variant="never_waits", early=True),
    CopyConfig(variant="raises"),
    CopyConfig(variant="aborts"),
]

Results = tuple[dict[str, Built], dict[str, str]]


@pytest.fixture(scope="module")
def built() -> Results:
    """Every variant for sm_121a, and why those that have no artefact have none."""
    with pytest.MonkeyPatch.context() as patch:
        here = str(Path(__file__).parent)
        patch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
        jobs = [Job(config, "sm_121a") for config in CONFIGS]
        results, failures = Compiler(cache=None, threads=2).run(jobs)
    return (
        {job.config.name.removeprefix("copy_"): built for job, built in results.items()},
        {job.config.name.removeprefix("copy_"): why for job, why in failures.items()},
    )


def of(variant: str, arch: str = "sm_121a") -> Job:
    return Job(next(c for c in CONFIGS if c.variant == variant), arch)


@pytest.mark.parametrize("variant", ["good", "live", "waits"])
def test_right_kernels_pass(built: Results, variant: str) -> None:
    assert refusal(of(variant), built[0][variant]) == ""


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("spills", "spills or local arrays: expected none, got"),
        (
            "dropped",
            "setmaxnreg: expected in effect (launch with min_blocks_per_mp=1), got present in the PTX",
        ),
        ("ragged", "threads of a CTA that uses setmaxnreg: expected a multiple of 128, got 288"),
        ("greedy", "registers after setmaxnreg: expected at most the"),
        ("renamed", "entry name: expected copy_renamed or copy_renamed_0, got other_name_0"),
        ("param", "bytes of each parameter in the PTX: expected x:8 y:8 m:4 bias:8, got 8 8 4"),
        ("never_waits", "wait for the kernel before (griddepcontrol.wait): expected present, got absent"),
        ("waits_late", "accesses of global memory before griddepcontrol.wait: expected none, got LDG"),
        ("loads_words", "expected at most 4 loads of 16 bytes, got LDG.E, LDG.E, LDG.E, LDG.E"),
        ("no_mma", r"tensor instructions: expected at least 1 ^OMMA\.SF\..*\.4X$, got 0"),
    ],
)
def test_wrong_kernels_are_refused(built: Results, variant: str, reason: str) -> None:
    assert reason in refusal(of(variant), built[0][variant])


def test_each_wrong_kernel_has_one_fault(built: Results) -> None:
    """So the reason above is the kernel's own, not a side effect of another rule."""
    resources = ("spills", "dropped", "ragged", "greedy")
    waits = ("never_waits", "waits_late", "loads_words")
    for variant in (*resources, "renamed", "param", "no_mma", *waits):
        assert ";" not in refusal(of(variant), built[0][variant]), variant


def test_wrong_architecture(built: Results) -> None:
    assert "ELF architecture: expected sm_120f, got sm_121a" in refusal(
        of("good", "sm_120f"), built[0]["good"]
    )


def test_wrong_thread_count(built: Results) -> None:
    job = Job(replace(GOOD, threads_=128), "sm_121a")
    assert "threads of a CTA: expected 128, got 256" in refusal(job, built[0]["good"])


def test_shared_memory_over_the_limit(built: Results) -> None:
    job = Job(replace(GOOD, smem=101_377), "sm_121a")
    assert "expected at most 101376, got 101377 dynamic + 0 static" in refusal(job, built[0]["good"])
    assert refusal(Job(replace(GOOD, smem=101_376), "sm_121a"), built[0]["good"]) == ""


def test_another_assembler(built: Results) -> None:
    found = refusal(of("good"), built[0]["good"], ptxas="13.4")
    assert "ptxas: expected 13.4" in found
    assert "got 12.9." in found


@dataclass(frozen=True)
class NoWaits(HopperGemmConfig):
    """A Hopper GEMM that would have to do without any wait for its wgmma."""

    def sass_rules(self, arch: str) -> SassRules:
        return replace(super().sass_rules(arch), max_wgmma_waits=0)


def test_too_many_waits_for_wgmma() -> None:
    config = HopperGemmConfig.variants(64, 128)[0]
    strict = NoWaits(**{field.name: getattr(config, field.name) for field in fields(config)})
    job = Job(config, "sm_90a")
    results, failures = Compiler(cache=None, threads=1).run([job])
    assert not failures
    assert refusal(job, results[job]) == ""
    assert "waits for wgmma (serialised): expected at most 0" in refusal(Job(strict, "sm_90a"), results[job])


def test_failed_compiles_say_why(built: Results) -> None:
    _, failures = built
    assert failures.keys() == {"raises", "aborts"}
    assert "exit status 1" in failures["raises"]
    assert "this kernel cannot be made" in failures["raises"]
    assert "exit status -6" in failures["aborts"]


def test_all_failures_are_named_once_a_reason() -> None:
    jobs = [Job(GOOD, arch) for arch in ("sm_121a", "sm_120f")]
    with pytest.raises(BuildError) as error:
        raise_failed({jobs[0]: "same reason", jobs[1]: "same reason"})
    text = str(error.value)
    assert text.startswith("2 kernel(s) failed")
    assert text.count("same reason") == 1
    assert "copy_good (sm_121a)" in text
    assert "copy_good (sm_120f)" in text
