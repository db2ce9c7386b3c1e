"""The numeric checks notice every mutant: ``pytest -m gpu tests/gpu/test_mutants.py --mutants DIR``.

DIR is what mutants.py wrote. In a run of its own, since it replaces the loaded kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_checks as checks
import mutants
import pytest
from ringfp4 import runtime
from ringfp4.validate import linear_cases as cases

# Enough output tiles that every CTA of a large GPU works on several, one after the other.
ROWS = 20_000


@pytest.fixture
def load(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    folder = request.config.getoption("--mutants")
    if folder is None:
        pytest.skip("needs --mutants DIR, made by mutants.py")
    yield lambda name: runtime.load(path=Path(folder) / name, arch="twin")
    runtime.unload()


def wrong_elements() -> int:
    total = 0
    for make in cases.EXACT:
        case = make(ROWS, mutants.N, mutants.K, device="cuda")
        w, x = checks.weight_of(case), case.x
        total += case.mismatches(checks.run(case, w, x, "prepacked"))
    return total


def test_unchanged_kernel_passes(load: Callable[[str], None]) -> None:
    load(mutants.UNCHANGED)
    assert wrong_elements() == 0


@pytest.mark.parametrize("name", mutants.MUTATIONS)
def test_mutant_is_noticed(load: Callable[[str], None], name: str) -> None:
    load(name)
    found = wrong_elements()
    print(f"{name}: {found} wrong elements of {len(cases.EXACT) * ROWS * mutants.N}")
    assert found > 0
