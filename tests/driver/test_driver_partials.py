"""Accumulators that CTAs hand on: where a launch finds the memory and the flags for them, and how much."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_harness import (
    PREPARED,
    SCALE,
    SMS,
    W_SCALE,
    FakeDriver,
    M,
    N,
    Stand,
    W,
    X,
    Y,
    linear_configs,
    weight_of,
    write_folder,
)
from ringfp4.dsl.config.base import KernelConfig, Param
from ringfp4.dsl.config.gemm import GemmConfig
from ringfp4.dsl.config.hopper import FLAGS_PER_CTA, HopperGemmConfig, HopperRepackConfig
from ringfp4.dsl.config.quantise import AbsmaxConfig, PackConfig
from ringfp4.dsl.config.ring import HopperRingGemmConfig, RingGemmConfig
from ringfp4.errors import RingError, UnservedError
from ringfp4.runtime import Ring, _core, api, devices, lowlevel
from ringfp4.runtime.plan import FLAG_BYTES, MOST_FLAGGED_CTAS

K = 256  # long enough to be divided
GEMM = HopperGemmConfig(features=N, k=K, tile_m=208)
FUSED = HopperRingGemmConfig.for_linear(N, K, tile_m=176, group=1)
ROW = 2 * K  # of a slot, BF16
ROWS = {"prepacked": 384, "ring": 2048, "fused": FUSED.ring_rows}  # of slots, for M rows
KERNEL: dict[str, KernelConfig] = {"prepacked": GEMM, "ring": GEMM, "fused": FUSED}


def partial_bytes(config: KernelConfig, ctas: int = SMS) -> int:
    assert config.partial_bytes
    return ctas * config.partial_bytes


@pytest.fixture
def hopper(fake: FakeDriver, tmp_path: Path) -> devices.Artifacts:
    """Artefacts whose fused kernel hands on less than the unfused one."""
    fake.set_capability(9, 0)
    configs = [AbsmaxConfig(k=K), PackConfig(k=K, output="bf16"), HopperRepackConfig(k=K), GEMM, FUSED]
    devices.load(0, write_folder(tmp_path / "hopper", configs, "sm_90a"))
    assert 0 < FUSED.partial_bytes < GEMM.partial_bytes
    fake.log()
    return devices.artifacts(0)


class Torch:
    """PyTorch's allocator, as far as the runtime uses it: what was asked for, and stand-ins for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, int]] = []
        self.at: dict[str, int] = {}
        for name in ("empty", "zeros"):
            monkeypatch.setattr(torch, name, self._maker(name))

    def _maker(self, name: str) -> Any:
        def make(size: int, dtype: torch.dtype, device: object) -> Stand:
            assert (dtype, device) == (torch.uint8, Stand.device)
            self.made.append((name, size))
            self.at[name] = (0x50 + len(self.made)) << 40
            return Stand(self.at[name])

        return make


def addresses(launch: dict[str, str], config: KernelConfig) -> dict[str, int]:
    """Of partials, flags and status in a launch of ``config``."""
    assert launch["kernel"] == config.name
    values = dict(zip((p.name for p in config.params()), launch["params"].split(","), strict=True))
    return {name: int(values[name], 16) for name in ("partials", "flags", "status")}


def linear(schedule: str, ring: Ring | None = None) -> None:
    weight = weight_of(k=K, prepared=Stand(PREPARED))
    api.launch(Stand(X), M, K, weight, None, "fp32", None, Stand(Y), ring, schedule)


def launched(fake: FakeDriver, schedule: str) -> list[dict[str, int]]:
    """``addresses`` of the recorded launches of the schedule's last kernel."""
    config = KERNEL[schedule]
    return [addresses(each, config) for each in fake.launches() if each["kernel"] == config.name]


def test_flags_follow_the_counters_in_the_state() -> None:
    assert _core.COUNTERS_OFFSET + _core.COUNTER_BYTES == _core.FLAGS_OFFSET == 16_384
    assert _core.FLAGS_OFFSET + MOST_FLAGGED_CTAS * FLAG_BYTES == _core.STATE_BYTES == 32_768
    assert MOST_FLAGGED_CTAS == 256
    assert FLAGS_PER_CTA * 4 <= FLAG_BYTES


def test_counters_end_where_the_flags_begin(fake: FakeDriver, tmp_path: Path) -> None:
    most = (_core.COUNTER_BYTES // 4 - 8) // 2  # slots of one K chunk
    configs = [replace(RingGemmConfig.for_linear(N, K, group=1), slots=slots) for slots in (most, most + 1)]
    assert configs[0].k_chunks == 1
    assert configs[0].order.counters * 4 <= _core.COUNTER_BYTES
    devices.load(0, write_folder(tmp_path, configs))
    loaded = devices.artifacts(0)
    assert loaded.plan("fused", N, K, 1, most * 128).capacity_rows == most * 128
    with pytest.raises(RingError, match=f"more counters.*at most {_core.COUNTER_BYTES} bytes"):
        loaded.plan("fused", N, K, 1, (most + 1) * 128)


@pytest.mark.parametrize("schedule", ["ring", "fused"])
def test_a_streams_ring_holds_them_behind_the_slots(
    fake: FakeDriver, hopper: devices.Artifacts, schedule: str
) -> None:
    linear(schedule)
    lane = hopper.lane(0)
    ring = lane.ring_for(lane.plan(N, K, M, schedule), False)
    assert ring is not None
    slots = ROWS[schedule] * ROW
    assert ring.data_bytes == slots + partial_bytes(KERNEL[schedule])
    (found,) = launched(fake, schedule)
    assert found["partials"] == ring.data + slots
    assert found["flags"] == ring.state + 16_384
    assert found["status"]


def test_prepacked_takes_memory_for_the_call_and_flags_of_the_ring(
    fake: FakeDriver, hopper: devices.Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Torch(monkeypatch)
    linear("prepacked")
    slots = ROWS["prepacked"] * ROW
    assert memory.made == [("empty", slots + partial_bytes(GEMM))]
    ring = hopper.lane(0).ring(0)
    assert ring.data_bytes == 0
    (found,) = launched(fake, "prepacked")
    assert found["partials"] == memory.at["empty"] + slots
    assert found["flags"] == ring.state + 16_384


@pytest.mark.parametrize("schedule", ["ring", "fused"])
def test_a_given_ring_has_room_for_every_kernel(
    fake: FakeDriver, hopper: devices.Artifacts, schedule: str
) -> None:
    ring = Ring(512, K, 0)
    assert ring.core.data_bytes == 512 * ROW + partial_bytes(GEMM)
    linear(schedule, ring)
    rows = 512 if schedule == "ring" else FUSED.ring_rows
    (found,) = launched(fake, schedule)
    assert found["partials"] == ring.core.data + rows * ROW
    assert found["flags"] == ring.core.state + 16_384


def test_chunks_use_the_same_memory(fake: FakeDriver, hopper: devices.Artifacts) -> None:
    ring = Ring(128, K, 0)
    linear("ring", ring)
    found = launched(fake, "ring")
    assert len(found) == 3
    assert {each["partials"] for each in found} == {ring.core.data + 128 * ROW}


def test_a_given_ring_is_too_small_with_what_lies_behind_the_slots(
    fake: FakeDriver, hopper: devices.Artifacts
) -> None:
    """Its room for accumulators would hold the slots alone."""
    ring = Ring(128, K // 2, 0)
    assert ring.core.data_bytes > 128 * ROW
    needed = 128 * ROW + partial_bytes(GEMM)
    with pytest.raises(RingError, match=f"128 rows of {ROW} bytes, {needed} in all"):
        linear("ring", ring)
    assert fake.launches() == []


@pytest.mark.parametrize("schedule", KERNEL)
def test_a_captured_call_has_all_of_it_to_itself(
    fake: FakeDriver, hopper: devices.Artifacts, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    memory = Torch(monkeypatch)
    fake.set_capture(0, 77)
    linear(schedule)
    fake.set_capture(0, 0)
    slots = ROWS[schedule] * ROW
    size = slots + partial_bytes(KERNEL[schedule])
    assert memory.made == [("zeros", _core.STATE_BYTES), ("empty", size)]
    (found,) = launched(fake, schedule)
    assert found["partials"] == memory.at["empty"] + slots
    assert found["flags"] == memory.at["zeros"] + 16_384


@pytest.mark.parametrize("given", [False, True])
def test_a_gemm_by_itself_brings_its_own(
    fake: FakeDriver, hopper: devices.Artifacts, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    memory = Torch(monkeypatch)
    state = Stand(0x90 << 40) if given else None
    weight = weight_of(k=K, prepared=Stand(PREPARED))
    lowlevel.gemm(Stand(0x80 << 40), M, weight, Stand(SCALE), out=Stand(Y), state=state)
    zeros = [] if given else [("zeros", _core.STATE_BYTES)]
    assert memory.made == [("empty", partial_bytes(GEMM)), *zeros]
    (launch,) = fake.launches()
    found = addresses(launch, GEMM)
    assert found["partials"] == memory.at["empty"]
    assert found["flags"] == (0x90 << 40 if given else memory.at["zeros"]) + 16_384
    assert f"map:{0x80 << 40:#x}" in launch["params"]


def test_what_packs_makes_no_room(fake: FakeDriver, hopper: devices.Artifacts) -> None:
    assert lowlevel.slot_bytes(M, K) == 384 * ROW


def test_kernels_that_hand_nothing_on_take_nothing(
    fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of sm_12x."""
    ring_gemm = RingGemmConfig.for_linear(N, K, group=1)
    devices.load(0, write_folder(tmp_path, [*linear_configs(N, K), ring_gemm]))
    loaded, row = devices.artifacts(0), K // 2 + K // 16
    lane = loaded.lane(0)
    plans = {schedule: lane.plan(N, K, M, schedule) for schedule in ("prepacked", "ring")}
    fused = lane.plan(N, K, M, "fused")
    assert [plan.partial_bytes for plan in (*plans.values(), fused)] == [0, 0, 0]
    assert plans["prepacked"].slot_bytes(M) == 384 * row
    assert [plan.ring_bytes for plan in (*plans.values(), fused)] == [
        0,
        2048 * row,
        ring_gemm.ring_rows * row,
    ]
    assert Ring(128, K, 0).core.data_bytes == 128 * row
    memory = Torch(monkeypatch)
    lowlevel.gemm(Stand(0x80 << 40), M, weight_of(k=K), Stand(SCALE), out=Stand(Y))
    assert memory.made == []
    (launch,) = [each for each in fake.launches() if each["kernel"] == linear_configs(N, K)[2].name]
    assert f"map:{W:#x}" in launch["params"]
    assert f"{W_SCALE:#x}" in launch["params"]


class Dividing(GemmConfig):
    """As if a GEMM whose slots hold block scales handed accumulators on."""

    @property
    def partial_bytes(self) -> int:
        return 128

    def params(self) -> tuple[Param, ...]:
        return (*super().params(), *(Param(name, "pointer") for name in ("partials", "flags", "status")))


def test_block_scales_come_before(fake: FakeDriver, tmp_path: Path) -> None:
    config = Dividing.with_tile(N, K)
    devices.load(0, write_folder(tmp_path, [*linear_configs(N, K)[:2], config]))
    ring = Ring(256, K, 0)
    slots = 256 * (K // 2 + K // 16)
    assert ring.core.data_bytes == slots + SMS * 128
    api.launch(Stand(X), 128, K, weight_of(k=K), None, "fp32", None, Stand(Y), ring, "ring")
    found = addresses(fake.launches()[-1], config)
    assert found["partials"] == ring.core.data + slots
    assert found["flags"] == ring.core.state + 16_384


def with_changes(fake: FakeDriver, folder: Path, **changes: Any) -> devices.Artifacts:
    """Artefacts of GEMM alone, its entry changed."""
    fake.set_capability(9, 0)
    write_folder(folder, [GEMM], "sm_90a")
    content = json.loads((folder / "manifest.json").read_text())
    content["kernels"][0].update(changes)
    (folder / "manifest.json").write_text(json.dumps(content))
    devices.load(0, folder)
    return devices.artifacts(0)


def grid(ctas_per_sm: int) -> dict[str, int]:
    return {"rows_per_item": GEMM.tile_m, "items": 1 << 24, "ctas_per_sm": ctas_per_sm}


def test_as_many_ctas_as_have_flags(fake: FakeDriver, tmp_path: Path) -> None:
    loaded = with_changes(fake, tmp_path, grid=grid(5))
    assert loaded.single("gemm", N, K).partial_bytes == partial_bytes(GEMM, 5 * SMS)
    assert Ring(128, K, 0).core.data_bytes == 128 * ROW + partial_bytes(GEMM, 5 * SMS)


@pytest.mark.parametrize(("ctas_per_sm", "got"), [(6, "288"), (0, "any number")])
def test_more_ctas_than_have_flags_are_refused(
    fake: FakeDriver, tmp_path: Path, ctas_per_sm: int, got: str
) -> None:
    loaded = with_changes(fake, tmp_path, grid=grid(ctas_per_sm))
    with pytest.raises(UnservedError, match=f"more CTAs .* expected at most 256; got {got}") as caught:
        loaded.single("gemm", N, K)
    assert GEMM.name in caught.value.what


def test_any_number_of_ctas_that_hand_nothing_on(fake: FakeDriver, tmp_path: Path) -> None:
    loaded = with_changes(fake, tmp_path, grid=grid(6), partial_bytes=0)
    assert loaded.single("gemm", N, K).partial_bytes == 0


def test_the_most_ctas_are_whole_clusters(fake: FakeDriver, tmp_path: Path) -> None:
    loaded = with_changes(fake, tmp_path, cluster=[5, 1, 1])
    (kernel,) = loaded.kernels.values()
    assert kernel.max_ctas == kernel.ctas(1 << 20) == 45
