"""What tuning remembers, and when that holds; measuring itself is tests/gpu/test_tune.py's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver_harness import FakeDriver, linear_configs, write_folder
from ringfp4.dsl.config.gemm import GemmConfig
from ringfp4.dsl.config.ring import HopperRingGemmConfig, RingGemmConfig
from ringfp4.errors import InputError, RingError, UnservedError
from ringfp4.runtime import Ring, devices, tuning
from ringfp4.runtime.tuning import Choice

N, K = 256, 256
RINGS = [RingGemmConfig.for_linear(N, K, group=group) for group in (2, 1)]
WIDE = GemmConfig.with_tile(N, K, 128, 256)
CHOICES = (
    Choice(N, K, 16, "prepacked", WIDE.name, 0.5),
    Choice(N, K, 4096, "fused", RINGS[1].name, 2.0),
)


@pytest.fixture
def artifacts(fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> devices.Artifacts:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "cubins", [*linear_configs(N, K), WIDE, *RINGS])
    devices.load(0, folder)
    return devices.artifacts(0)


def auto(artifacts: devices.Artifacts, m: int) -> tuple[str, str]:
    plan = artifacts.plan("auto", N, K, m, 2048)
    return plan.schedule, plan.kernels[-1].name


def test_auto_follows_the_choices(artifacts: devices.Artifacts) -> None:
    assert auto(artifacts, 3000) == ("fused", RINGS[0].name)  # untuned: the largest ring that fits
    tuning.apply(artifacts, CHOICES)
    assert auto(artifacts, 1) == auto(artifacts, 16) == ("prepacked", WIDE.name)
    assert auto(artifacts, 17) == auto(artifacts, 100_000) == ("fused", RINGS[1].name)
    # A schedule that is asked for stays.
    assert artifacts.plan("ring", N, K, 17, 2048).schedule == "ring"


def test_choices_are_taken_up_by_the_next_load(artifacts: devices.Artifacts) -> None:
    file = tuning.store(artifacts, CHOICES)
    assert file.parent == tuning.cache_folder()
    devices.load(0, artifacts.folders)
    assert auto(devices.artifacts(0), 1) == ("prepacked", WIDE.name)


def test_storing_one_linear_keeps_the_others(artifacts: devices.Artifacts) -> None:
    other = replace(CHOICES[0], n=8)
    tuning.store(artifacts, [*CHOICES, other])
    tuning.store(artifacts, CHOICES[:1])
    assert tuning.remembered(artifacts) == (other, CHOICES[0])
    assert [f.name for f in tuning.cache_folder().iterdir()] == [tuning.cache_file(artifacts).name]


@pytest.mark.parametrize("change", ["device_name", "driver_version", "sms"])
def test_choices_lapse_with_what_they_depend_on(artifacts: devices.Artifacts, change: str) -> None:
    tuning.store(artifacts, CHOICES)
    assert tuning.remembered(artifacts) == CHOICES
    setattr(artifacts, change, "other" if change == "device_name" else 1)
    assert tuning.remembered(artifacts) == ()


def test_choices_lapse_with_other_cubins(artifacts: devices.Artifacts, tmp_path: Path) -> None:
    tuning.store(artifacts, CHOICES)
    devices.load(0, write_folder(tmp_path / "fewer", [*linear_configs(N, K), *RINGS]))
    assert tuning.remembered(devices.artifacts(0)) == ()
    assert auto(devices.artifacts(0), 1)[0] == "ring"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"identity": 1}', '{"choices": []}'])
def test_a_damaged_file_is_ignored(artifacts: devices.Artifacts, content: str) -> None:
    file = tuning.store(artifacts, CHOICES)
    file.write_text(content)
    assert tuning.remembered(artifacts) == ()


def test_a_choice_of_unknown_names_is_ignored(artifacts: devices.Artifacts) -> None:
    file = tuning.store(artifacts, CHOICES)
    stored = json.loads(file.read_text())
    stored["choices"][0]["kernel"] = "gone"
    file.write_text(json.dumps(stored))
    assert tuning.remembered(artifacts) == CHOICES[1:]


def test_contestants_are_all_ways_once(artifacts: devices.Artifacts) -> None:
    gemms = [linear_configs(N, K)[-1].name, WIDE.name]
    fused = [("fused", ring.name) for ring in RINGS]
    few = list(tuning.contestants(artifacts, N, K, 100))
    assert few == [*(("prepacked", name) for name in gemms), *fused]
    many = list(tuning.contestants(artifacts, N, K, 5000))
    assert many == [*few[:2], *(("ring", name) for name in gemms), *fused]


def test_a_ring_follows_the_choices_too(artifacts: devices.Artifacts) -> None:
    ring = Ring(512, K, 0)
    assert ring.plan(N, K, 16, "auto").schedule == "ring"
    tuning.apply(artifacts, CHOICES)
    assert ring.plan(N, K, 16, "auto").schedule == "prepacked"


def test_an_interrupt_leaves_what_auto_took_before(
    artifacts: devices.Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = artifacts.lane(7)

    def interrupted(_artifacts: devices.Artifacts, n: int, k: int, m: int) -> Choice:
        artifacts.prefer(n, k, m, "fused", RINGS[1].name)
        assert lane.plan(n, k, m, "auto").schedule == "fused"
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "_fastest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(0, rows=[16])
    assert lane.plan(N, K, 16, "auto").schedule == "ring"


@pytest.mark.parametrize("rows", [[], [0], [1.5], 5])
def test_unusable_rows(artifacts: devices.Artifacts, rows: Any) -> None:
    with pytest.raises(InputError, match="positive integers"):
        tuning.tune(0, rows=rows)


@pytest.mark.parametrize("device", [0, "cuda:0", None])
def test_an_unserved_linear(artifacts: devices.Artifacts, device: devices.DeviceLike) -> None:
    with pytest.raises(UnservedError, match="nothing serves N = 8"):
        tuning.tune(device, shapes=[(8, K)])


def test_hopper_rings_are_chosen_by_rows(fake: FakeDriver, tmp_path: Path) -> None:
    """208 rows divide 2,048 better into waves, if the ring has room for it."""
    rings = [HopperRingGemmConfig.for_linear(21504, 5376, tile_m, 2) for tile_m in (176, 208)]
    fake.set_capability(9, 0)
    devices.load(0, write_folder(tmp_path / "hopper", rings, "sm_90a"))
    artifacts = devices.artifacts(0)
    artifacts.sms = 132
    assert artifacts.plan("fused", 21504, 5376, 2048, 4096).kernels[0].name == rings[1].name
    assert artifacts.plan("fused", 21504, 5376, 2048, 4 * 176).kernels[0].name == rings[0].name


def test_a_streams_own_ring_grows_to_the_fused_kernel_that_suits(fake: FakeDriver, tmp_path: Path) -> None:
    """208 rows suit 2,048 better, but there the ring has 3,328; a caller's Ring has what it has."""
    n, k, m = 21504, 5376, 2048
    rings = [HopperRingGemmConfig.for_linear(n, k, *ring) for ring in ((176, 2), (208, 8))]
    fake.set_capability(9, 0)
    devices.load(0, write_folder(tmp_path / "hopper", rings, "sm_90a"))
    artifacts = devices.artifacts(0)
    artifacts.sms = 132
    own, callers = artifacts.lane(7), Ring(2048, k, 0)
    assert own.plan(n, k, m, "fused").capacity_rows == 16 * 208
    assert callers.plan(n, k, m, "fused").capacity_rows == 4 * 176
    with pytest.raises(RingError, match=f"expected {4 * 176} rows"):
        Ring(512, k, 0).plan(n, k, m, "fused")
