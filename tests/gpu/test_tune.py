"""Tuning on the device: it measures what is loaded, ``auto`` follows, and results stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import runtime_cases
import torch
from gpu_checks import Gpu
from ringfp4 import runtime
from ringfp4.runtime import devices, tuning
from runtime_cases import Case, same_bits


@pytest.fixture
def case(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield runtime_cases.make_case(gpu)
    devices.artifacts(torch.cuda.current_device()).preferences.clear()


def test_auto_follows_what_was_measured(case: Case) -> None:
    artifacts = devices.artifacts(torch.cuda.current_device())
    told: list[str] = []
    choices = runtime.tune(shapes=[(case.n, case.k)], rows=(3, 300), progress=told.append)
    assert [(choice.n, choice.k, choice.m) for choice in choices] == [(case.n, case.k, m) for m in (3, 300)]
    for choice in choices:
        ways = list(tuning.contestants(artifacts, case.n, case.k, choice.m))
        assert (choice.schedule, choice.kernel) in ways
        assert choice.milliseconds > 0
        plan = artifacts.plan("auto", case.n, case.k, choice.m, 2048)
        assert (plan.schedule, plan.kernels[-1].name) == (choice.schedule, choice.kernel)
    assert len(told) == len(choices) + 1
    assert tuning.remembered(artifacts) == choices
    x = case.x(300)
    assert same_bits(case.y(x), case.y(x, schedule="prepacked"))
