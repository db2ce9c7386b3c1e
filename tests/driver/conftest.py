"""Fixtures of the driver tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_harness import FakeDriver, K, N, compile_driver, linear_configs, write_folder
from ringfp4.dsl.config.ring import RingGemmConfig
from ringfp4.runtime import devices


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording driver, compiled."""
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The recording driver in place of libcuda.so.1, with nothing loaded yet."""
    driver = FakeDriver(library)
    monkeypatch.setenv(devices.DRIVER_VARIABLE, str(library))
    monkeypatch.setattr(devices, "_driver", None)
    monkeypatch.setattr(devices, "_loaded", {})
    yield driver
    devices.unload()
    driver.reset()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Artefacts of the small linear, unfused, and of a fused one with K = 256."""
    fused = RingGemmConfig.for_linear(N, 256, group=1)
    return write_folder(tmp_path / "cubins", [*linear_configs(N, K), fused])
