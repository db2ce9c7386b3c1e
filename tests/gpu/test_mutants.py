"""The numeric checks notice every mutant: ``pytest -m gpu tests/gpu/test_mutants.py --mutants DIR``.

DIR is what mutants.py wrote. Each one runs in a process of its own with a time limit: wrong
numbers, an error of the driver and a hang all count as noticed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gpu_checks as checks
import mutants
import pytest
import torch
from ringfp4 import runtime
from ringfp4.validate import linear_cases as cases

# Enough output tiles that every CTA of a large GPU works on several, one after the other.
ROWS = 20_000
LIMIT_S = 60


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    option = request.config.getoption("--mutants")
    if option is None:
        pytest.skip("needs --mutants DIR, made by mutants.py")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Path(option)


def wrong_elements(folder: Path) -> int:
    """Of the exact cases with the kernels of ``folder``, in this process."""
    runtime.load(path=folder, arch="twin")
    total = 0
    for make in cases.EXACT:
        case = make(ROWS, mutants.N, mutants.K, device="cuda")
        w, x = checks.weight_of(case), case.x
        total += case.mismatches(checks.run(case, w, x, "prepacked"))
    return total


def outcome(folder: Path) -> str:
    """``0`` if the checks passed, else how many elements are wrong or what went wrong."""
    try:
        ran = subprocess.run(
            [sys.executable, __file__, folder], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "hang"
    if ran.returncode == 0:
        return ran.stdout.strip()
    # An interpreter that loses its device says more after the error: what it could not free.
    lines = ran.stderr.strip().splitlines()
    return next((line for line in lines if "CUDA_ERROR" in line or "CUDA error" in line), lines[-1])


@pytest.mark.timeout(2 * LIMIT_S)
def test_unchanged_kernel_passes(folder: Path) -> None:
    assert outcome(folder / mutants.UNCHANGED) == "0"


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("name", mutants.MUTATIONS)
def test_mutant_is_noticed(folder: Path, name: str) -> None:
    assert (folder / name / "manifest.json").exists()
    found = outcome(folder / name)
    print(f"{name}: {found}")
    of_the_kernel = found.isdecimal() or found == "hang" or "CUDA_ERROR" in found or "CUDA error" in found
    assert of_the_kernel, f"not the kernel's fault: {found}"
    assert found != "0"


if __name__ == "__main__":
    print(wrong_elements(Path(sys.argv[1])))
