"""Reading cubins: our reader beside NVIDIA's cuobjdump, on cubins compiled here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from ringfp4.build_cubins.compiler import Built, Compiler
from ringfp4.build_cubins.elf import read_cubin
from ringfp4.build_cubins.job import Job, plan_jobs
from ringfp4.build_cubins.ptx import read_ptx
from ringfp4.dsl.config import AbsmaxConfig, Linear
from ringfp4.errors import BuildError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the build extra (the DSL)"
)


@pytest.fixture(scope="module")
def built() -> dict[Job, Built]:
    """Every kernel of a small linear for one architecture of each ELF ABI, and absmax for the others."""
    jobs = plan_jobs([Linear("small", 96, 64)], ["sm_120f"])
    jobs += [Job(AbsmaxConfig(k=96), arch) for arch in ("sm_121a", "sm_90a", "twin")]
    results, failures = Compiler(cache=None, threads=2).run(jobs)
    assert not failures
    return results


def cuobjdump(option: str, built: Built, folder: Path) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(built.image)
    (tool,) = (f for f in importlib.metadata.files("nvidia-cuda-cuobjdump") or () if f.name == "cuobjdump")
    command = [str(tool.locate()), option, str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_resources_are_cuobjdumps(built: dict[Job, Built], tmp_path: Path) -> None:
    for job, item in built.items():
        text = cuobjdump("-res-usage", item, tmp_path)
        registers, stack, shared = (
            int(re.search(rf"{n}:(\d+)", text)[1]) for n in ("REG", "STACK", "SHARED")
        )
        assert f"Function {item.elf.entry}:" in text, job.label
        assert (item.elf.registers, item.elf.stack_bytes) == (registers, stack), job.label
        assert item.elf.static_smem == max(0, shared - 1024), job.label


def test_parameters_are_cuobjdumps(built: dict[Job, Built], tmp_path: Path) -> None:
    for job, item in built.items():
        text = cuobjdump("-elf", item, tmp_path)
        text = text.split(f"\n.nv.info.{item.elf.entry}\n")[1].split("\n\n\n")[0]
        found = re.findall(r"Ordinal : (0x\w+)\s+Offset\s+: (0x\w+)\s+Size\s+: (0x\w+)", text)
        theirs = {int(o, 16): (int(offset, 16), int(size, 16)) for o, offset, size in found}
        assert item.elf.params == tuple(theirs[i] for i in range(len(theirs))), job.label
        assert item.elf.threads == int(
            re.search(r"EIATTR_REQNTID.*?Value:\s+(0x\w+)", text, re.DOTALL)[1], 16
        )


def test_architecture_and_assembler(built: dict[Job, Built]) -> None:
    archs = {job.arch: item.elf.arch for job, item in built.items()}
    assert archs == {"sm_120f": "sm_120f", "sm_121a": "sm_121a", "sm_90a": "sm_90a", "twin": "sm_90a"}
    for job, item in built.items():
        assert item.elf.ptxas.startswith("12.9.") == (job.arch in ("sm_120f", "sm_121a"))
        assert item.ptx_facts.isa == "8.8"
        assert item.ptx_facts.entry == item.elf.entry
        assert item.ptx_facts.params == tuple(size for _, size in item.elf.params)


def test_barriers(built: dict[Job, Built]) -> None:
    """absmax synchronises its CTA once, on barrier 0."""
    absmax = [item for job, item in built.items() if job.config.kind == "absmax"]
    assert {item.elf.barriers for item in absmax} == {1}


@pytest.mark.parametrize("damage", [0, 3, 40, 200, 1000])
def test_truncated_cubins_are_refused(built: dict[Job, Built], damage: int) -> None:
    image = next(iter(built.values())).image
    with pytest.raises(BuildError, match="unreadable cubin"):
        read_cubin(image[:damage])


def test_foreign_files_are_refused() -> None:
    with pytest.raises(BuildError, match="unreadable cubin"):
        read_cubin(b"\x7fELF\x02\x01\x01" + b"\0" * 64)
    with pytest.raises(BuildError, match="unexpected PTX"):
        read_ptx(".version 8.8\n.target sm_121a\n")
    with pytest.raises(BuildError, match="unexpected PTX parameter"):
        read_ptx(".version 8.8\n.target sm_121a\n.entry k(.param .texref t)\n")


def test_ptx_parameter_sizes() -> None:
    params = (
        ".param .align 64 .b8 k_param_0[128],\n.param .u64 .ptr .global .align 4 k_param_1,\n"
        ".param .b32 k_param_2,\n.param .align 8 .b8 k_param_3[8],\n.param .f32 k_param_4"
    )
    facts = read_ptx(f".version 8.8\n.target sm_120f, debug\n.visible .entry k(\n{params}\n)\n{{ ret; }}")
    assert facts.params == (128, 8, 4, 8, 4)
    assert facts.target == "sm_120f"
