"""Which kernels a call gets: by schedule, variant, architecture, device and folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_harness import FakeDriver, K, M, N, linear_configs, write_folder
from ringfp4.dsl.config.gemm import GemmConfig
from ringfp4.dsl.config.ring import RingGemmConfig
from ringfp4.errors import InputError, UnservedError
from ringfp4.runtime import Ring, devices

STREAM = 0x77


def test_auto_prefers_chunks_where_the_ring_is_too_small_to_fuse(fake: FakeDriver, tmp_path: Path) -> None:
    fused = RingGemmConfig.for_linear(N, 256, group=2)
    devices.load(0, write_folder(tmp_path, [*linear_configs(N, 256), fused]))
    small = Ring(capacity_rows=128, k=256, device=0)
    for _ in range(2):
        assert small.plan(N, 256, 600, "auto").schedule == "ring"
    assert small.plans[N, 256, 600, "auto"].schedule == "ring"
    assert Ring(capacity_rows=512, k=256, device=0).plan(N, 256, 600, "auto").schedule == "fused"


def test_auto_fuses_what_is_more_than_one_chunk(fake: FakeDriver, folder: Path, tmp_path: Path) -> None:
    devices.load(0, [folder, write_folder(tmp_path / "more", linear_configs(N, 256))])
    lane = devices.artifacts(0).lane(STREAM)
    chosen = {m: lane.plan(N, 256, m, "auto").schedule for m in (1, 2048, 2049, 100_000)}
    assert chosen == {1: "ring", 2048: "ring", 2049: "fused", 100_000: "fused"}
    # Of several chunks of an own ring, too, the kernel that needs no more slots is taken.
    assert Ring(4096, 256, 0).plan(N, 256, 3000, "auto").schedule == "fused"


def test_the_largest_fused_kernel_that_fits_the_ring_is_taken(fake: FakeDriver, tmp_path: Path) -> None:
    configs = [RingGemmConfig.for_linear(N, 256, group=group) for group in (4, 1, 2)]
    devices.load(0, write_folder(tmp_path, configs))
    chosen = {
        rows: Ring(capacity_rows=rows, k=256, device=0).plan(N, 256, M, "fused").capacity_rows
        for rows in (256, 512, 640, 1024)
    }
    assert chosen == {256: 256, 512: 512, 640: 512, 1024: 1024}


def test_preferences_choose_schedule_and_variant_by_rows(fake: FakeDriver, tmp_path: Path) -> None:
    wide = GemmConfig.with_tile(N, K, 128, 256)
    devices.load(0, write_folder(tmp_path, [*linear_configs(N, K), wide]))
    loaded = devices.artifacts(0)
    lane = loaded.lane(0)
    first = linear_configs(N, K)[2].name
    assert lane.plan(N, K, 100, "auto").kernels[-1].name == first
    loaded.prefer(N, K, 512, "prepacked", wide.name)
    loaded.prefer(N, K, 128, "ring", first)
    assert lane.plan(N, K, 100, "auto").schedule == "ring"
    for m in (129, 512, 5000):
        plan = lane.plan(N, K, m, "auto")
        assert (plan.schedule, plan.kernels[-1].name) == ("prepacked", wide.name)


def test_unserved_shape_names_what_is_shipped(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    with pytest.raises(UnservedError) as caught:
        devices.artifacts(0).lane(0).plan(512, K, 1, "auto")
    assert "N = 512, K = 128" in caught.value.what
    assert f"N={N} K={K} (prepacked/ring)" in caught.value.expected
    assert "build_cubins" in caught.value.remedy


def test_kernels_of_two_architectures_are_never_mixed(fake: FakeDriver, tmp_path: Path) -> None:
    absmax, pack, gemm = linear_configs(N, K)
    half = write_folder(tmp_path / "a", [absmax, gemm], "sm_121a")
    whole = write_folder(tmp_path / "b", [absmax, pack, gemm], "sm_120f")
    devices.load(0, [half, whole])
    assert {entry.arch for entry in devices.artifacts(0).lane(0).plan(N, K, 1, "ring").kernels} == {"sm_120f"}


def test_an_architecture_that_adds_nothing_is_not_loaded(fake: FakeDriver, tmp_path: Path) -> None:
    whole = [write_folder(tmp_path / arch, linear_configs(N, K), arch) for arch in ("sm_121a", "sm_120f")]
    devices.load(0, whole)
    assert devices.artifacts(0).table.archs == ("sm_121a",)
    more = write_folder(tmp_path / "more", linear_configs(512, K)[2:], "sm_120f")
    devices.load(0, [*whole, more])
    loaded = devices.artifacts(0)
    assert loaded.table.archs == ("sm_121a", "sm_120f")
    assert {entry.arch for entry in loaded.lane(0).plan(N, K, 1, "ring").kernels} == {"sm_121a"}
    assert {entry.arch for entry in loaded.lane(0).plan(512, K, 1, "ring").kernels} == {"sm_120f"}


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)])
def test_ways_to_name_a_device(fake: FakeDriver, folder: Path, device: object) -> None:
    fake.set_devices(2)
    devices.load(device, folder)
    assert Ring(128, K, device).device == 1


@pytest.mark.parametrize("device", [-1, 1 << 40, True, "cpu", "nonsense", 1.0, torch.device("cpu")])
def test_what_is_no_device(fake: FakeDriver, folder: Path, device: object) -> None:
    with pytest.raises(InputError, match="not a CUDA device"):
        devices.load(device, folder)


@pytest.mark.parametrize("path", [5, [], [5]])
def test_what_is_no_folder(fake: FakeDriver, path: Any) -> None:
    with pytest.raises(InputError, match=r"unusable path|names no folder"):
        devices.load(0, path)


def test_kernels_of_two_folders_are_loaded_once(fake: FakeDriver, folder: Path, tmp_path: Path) -> None:
    devices.load(0, folder)
    alone = fake.live()["modules"]
    devices.load(0, [folder, shutil.copytree(folder, tmp_path / "copy")])
    assert fake.live()["modules"] == alone
