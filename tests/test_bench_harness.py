"""How benchmarks time what they compare, on a device that is only a calendar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import fused, harness, quantise

HOST = 1e-4  # seconds that the host takes to hand one replay over
COST = {"a": 0.004, "b": 0.008, "c": 0.012}  # seconds of a replay


@dataclass
class Device:
    """Seconds on the host's clock, and until when the device has work."""

    now: float = 0.0
    busy_until: float = 0.0
    idle: float = 0.0
    ahead: float = 0.0  # the most work that was queued
    order: list[str] = field(default_factory=list)

    def replay(self, name: str, cost: Callable[[float], float]) -> Callable[[], None]:
        """``cost``: seconds of a replay that begins at that time."""

        def call() -> None:
            self.now += HOST
            begin = max(self.now, self.busy_until)
            if self.order:
                self.idle += begin - self.busy_until
            self.busy_until = begin + cost(begin)
            self.ahead = max(self.ahead, self.busy_until - self.now)
            self.order.append(name)

        return call


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(device.now, device.busy_until)

        def synchronize(self) -> None:
            device.now = max(device.now, self.at)

        def elapsed_time(self, end: Event) -> float:
            assert end.at <= device.now, "the event has not happened yet"
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: device.now))
    return device


def test_only_the_second_half_counts(device: Device) -> None:
    replay = device.replay("a", lambda begin: 0.002 if begin < 0.5 else 0.003)
    assert harness._sustained(replay, 1.0) == pytest.approx(3.0)
    assert device.now == pytest.approx(1.0, abs=0.02)
    assert len(device.order) == pytest.approx(0.5 / 0.002 + 0.5 / 0.003, abs=harness.QUEUED + 2)


def test_the_device_never_idles_and_little_is_queued(device: Device) -> None:
    harness._sustained(device.replay("a", lambda _: 0.002), 0.5)
    assert device.idle == 0
    assert device.ahead <= 0.002 * (harness.QUEUED + 1)


@pytest.mark.parametrize("seconds", [0.1, 1e-30])  # at 1e-30 each half is over before it begins
def test_a_replay_longer_than_the_turn_is_timed_all_the_same(device: Device, seconds: float) -> None:
    device.now = 1.0
    assert harness._sustained(device.replay("a", lambda _: 0.4), seconds) == pytest.approx(400.0)


def timed(device: Device, monkeypatch: pytest.MonkeyPatch, seconds: float) -> dict[str, harness.Timing]:
    """The contestants of COST, a replay being four calls, in five rounds."""
    replays = {name: (device.replay(name, lambda _, cost=cost: cost), 4) for name, cost in COST.items()}
    monkeypatch.setattr(harness, "_repeated", lambda run, inputs, eager: replays[run(0)])
    runs = {name: lambda _, name=name: name for name in replays}
    return harness.time_all(runs, inputs=1, rounds=5, seconds=seconds)


def test_each_runs_alone_in_an_order_that_changes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = timed(device, monkeypatch, 0.2)
    assert [timings[name].median for name in "abc"] == pytest.approx([1.0, 2.0, 3.0])
    # Where a round ends and the next begins with the same contestant, two turns look like one.
    turns = []
    for name, same in groupby(device.order):
        turns += [name] * round(len([*same]) * COST[name] / 0.2)
    rounds = [tuple(turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert len(rounds) == 5, "no rounds to warm up"
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert any(one != other for one, other in pairwise(rounds))


def test_without_seconds_a_turn_is_one_replay(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = timed(device, monkeypatch, 0.0)
    assert len(device.order) == 3 * (5 + 2)
    assert timings["b"].median == pytest.approx(2.0, abs=1e3 * HOST)


@pytest.mark.parametrize("benchmark", [fused, quantise])
def test_a_file_in_no_folder_is_refused_before_anything_runs(
    benchmark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "require_cuda", lambda: pytest.fail("went on"))
    with pytest.raises(SystemExit) as refusal:
        benchmark.main(["--json", str(tmp_path / "missing" / "out.json")])  # type: ignore[attr-defined]
    assert refusal.value.code == 2
    assert f"argument --json: there is no folder {tmp_path / 'missing'}" in capsys.readouterr().err


def test_a_file_in_a_folder_that_exists_is_taken(tmp_path: Path) -> None:
    assert harness.output_file(str(tmp_path / "out.json")) == tmp_path / "out.json"
    assert harness.output_file("out.json") == Path("out.json")
