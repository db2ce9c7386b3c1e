"""The GB10 model: what it is fitted to it must reproduce, and what it fails to reproduce it must say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def model(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gb10_model", repository / "bench" / "gb10_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_fit_passes_through_both_published_gemms(model: ModuleType) -> None:
    fitted = model.Model.fitted()
    for *shape, seconds in (model.SMALL, model.LARGE):
        assert fitted.gemm(*shape) == pytest.approx(seconds)


def test_steps_of_the_busiest_multiprocessor(model: ModuleType) -> None:
    assert model.steps(1024, 1024, 1024) == 2 * 8  # 64 tiles on 48 multiprocessors
    assert model.steps(1, 1, 129) == 2


def test_it_predicts_nothing_it_cannot_reproduce(
    model: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    worst = max(
        abs(modelled / published - 1) for _, published, modelled in model.comparison(model.Model.fitted())
    )
    assert worst > model.TOLERANCE
    assert model.main([]) == 1
    assert "No prediction is made" in capsys.readouterr().out
