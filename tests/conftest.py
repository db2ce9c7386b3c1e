"""What every test module shares: nothing here imports torch, the DSL or a GPU library."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ringfp4")
    group.addoption("--cubins", action="append", metavar="DIR", help="folder of artefacts for the GPU tests")
    group.addoption("--mutants", metavar="DIR", help="what tests/gpu/mutants.py wrote")
    group.addoption("--arch", help="use only artefacts of this architecture, for instance twin")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY
