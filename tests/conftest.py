"""What every test module shares: nothing here imports torch, the DSL or a GPU library."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ringfp4")
    group.addoption("--cubins", action="append", metavar="DIR", help="folder of artefacts for the GPU tests")
    group.addoption("--mutants", metavar="DIR", help="what tests/gpu/mutants.py wrote")
    group.addoption("--captures", metavar="FILE", help="what tests/minilm.py wrote")
    group.addoption("--arch", help="use only artefacts of this architecture, for instance twin")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def built_h3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artefacts of shapes/h3.toml for both shipped architectures; unchanged kernels come from the cache."""
    from ringfp4.build_cubins.__main__ import main

    out = tmp_path_factory.mktemp("h3") / "cubins"
    assert main(["--out", str(out)]) == 0
    return out
