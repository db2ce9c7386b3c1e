"""GPU tests: ``pytest -m gpu tests/gpu --cubins DIR [--arch ARCH]``; by default the package's cubins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_checks import Gpu


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything here needs a GPU; a hung kernel must end its test, unless ``--timeout 0`` is given."""
    limited = config.getoption("timeout", None) != 0
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if limited and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(60, method="thread"))


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest, repository: Path) -> Iterator[Gpu]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from ringfp4 import runtime
    from ringfp4.errors import RingFP4Error

    paths = request.config.getoption("--cubins")
    try:
        runtime.load(path=paths or None, arch=request.config.getoption("--arch"))
    except RingFP4Error as error:
        if paths:
            raise
        pytest.skip(str(error))
    yield Gpu(repository)
    runtime.unload()


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """Full-size cases take tens of gigabytes each."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
