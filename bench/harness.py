"""Timing on a CUDA device, the way every benchmark here does it.

What is compared is timed in one process and in changing order, each as replays of a CUDA graph
that calls it on one input after another: the launches follow each other closely, and the inputs
together exceed the L2 cache several times, so none is found there. Figures are medians over the
rounds. The ceiling for bytes per second is a large device-to-device copy, measured alike but
without a graph: as a node of one it can be a third slower.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from ringfp4 import runtime
from ringfp4.errors import DriverError
from ringfp4.files import write_atomically

Run = Callable[[int], object]  # run on input number i
REPLAY_MILLISECONDS = 2.0  # at least, for each timing
QUEUED = 3  # replays handed to the device ahead of time, so that it never waits for the host


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median over the rounds and the fastest and slowest round."""

    median: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Row:
    """One line of a table, and one record of the JSON file. ``bytes_moved`` 0: not of interest."""

    what: str
    shape: str
    timing: Timing
    bytes_moved: int = 0
    flop: int = 0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_moved / self.timing.median * 1e3

    @property
    def flop_per_second(self) -> float:
        return self.flop / self.timing.median * 1e3


def require_cuda() -> torch.device:
    """The current CUDA device; DriverError if PyTorch has none."""
    if not torch.cuda.is_available():
        raise DriverError("PyTorch finds no CUDA device", remedy="run benchmarks on a machine with a GPU")
    return torch.device("cuda", torch.cuda.current_device())


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="medians are taken over these")
    parser.add_argument("--json", type=output_file, help="write the figures to this file as well")
    parser.add_argument("--cubins", type=Path, nargs="+", help="folders of cubins, default the package's")
    parser.add_argument("--arch", help="only this architecture's cubins")


def output_file(text: str) -> Path:
    """The type of options that name a file to write: refused before anything is measured for it."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def load_cubins(args: argparse.Namespace) -> None:
    """Load what the common options name, or leave it to the runtime."""
    if args.cubins or args.arch:
        runtime.load(path=args.cubins, arch=args.arch)


def inputs_needed(bytes_each: int, device: torch.device, at_most: int = 64) -> int:
    """How many inputs of that size together are four times the L2 cache."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(at_most, -(-4 * l2 // max(bytes_each, 1))))


def time_all(
    runs: dict[str, Run],
    inputs: int,
    rounds: int = 15,
    warm_ups: int = 2,
    eager: bool = False,
    seconds: float = 0.0,
) -> dict[str, Timing]:
    """Time each of ``runs`` on inputs 0 .. inputs - 1, all of them once a round.

    As a CUDA graph's replay, or, if ``eager``, called from Python: what a caller without graphs sees,
    host time included where the device has to wait for it. With ``seconds`` every turn lasts that long
    and is its own warm-up: turns of milliseconds share one clock, which a power limit sets by the last
    some hundred milliseconds and thus by all of ``runs`` together.
    """
    warm_ups = 0 if seconds else warm_ups
    replays = {name: _repeated(run, inputs, eager) for name, run in runs.items()}
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm_ups + rounds):
        # Another order each round: what ran before decides how far the clock has been throttled.
        for name in random.Random(turn).sample(names, len(names)):
            replay, calls = replays[name]
            milliseconds = (_sustained(replay, seconds) if seconds else _elapsed(replay)) / calls
            if turn >= warm_ups:
                times[name].append(milliseconds)
    return {name: _timing(t) for name, t in times.items()}


def copy_bandwidth(device: torch.device, rounds: int = 15) -> float:
    """Bytes per second, read plus written, of a copy of a gigabyte within the device."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [_elapsed(lambda: target.copy_(source)) for _ in range(rounds + 2)][2:]
    return 2e3 * source.nbytes / statistics.median(times)


def _timing(milliseconds: list[float]) -> Timing:
    return Timing(statistics.median(milliseconds), min(milliseconds), max(milliseconds))


def _repeated(run: Run, inputs: int, eager: bool) -> tuple[Callable[[], object], int]:
    """Something that calls ``run`` on every input, if possible a graph's replay, and how many calls it makes.

    Inputs are gone through again until a replay is so long that launching it costs next to nothing.
    If ``run`` cannot be captured (a peer that synchronises) it is called from Python all the same.
    """

    def each() -> None:
        for i in range(inputs):
            run(i)

    each()  # lazy initialisation must be neither timed nor captured
    repeats = min(32, math.ceil(REPLAY_MILLISECONDS / _elapsed(each)))

    def all_calls() -> None:
        for _ in range(repeats):
            each()

    if eager:
        return all_calls, repeats * inputs
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            all_calls()
    except RuntimeError:
        torch.cuda.synchronize()
        return all_calls, repeats * inputs
    return graph.replay, repeats * inputs


def _elapsed(call: Callable[[], object]) -> float:
    begin = _mark()
    call()
    end = _mark()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _sustained(replay: Callable[[], object], seconds: float) -> float:
    """Milliseconds of one replay among those of the second half of ``seconds`` of nothing else."""
    queued: deque[torch.cuda.Event] = deque()
    for _ in range(2):  # what is kept is the second half's
        begin, replays = _mark(), 0
        half = time.perf_counter() + seconds / 2
        while replays == 0 or time.perf_counter() < half:
            replay()
            replays += 1
            queued.append(_mark())
            if len(queued) > QUEUED:
                queued.popleft().synchronize()
    queued[-1].synchronize()
    return float(begin.elapsed_time(queued[-1])) / replays


def _mark() -> torch.cuda.Event:
    """An event at the end of what the stream has been given so far."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A Markdown table, padded so that it reads well in a terminal too."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    print(f"\n{title}\n")
    print(row(header))
    print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for line in lines:
        print(row(line))


def write_json(path: Path, rows: Sequence[Row], **facts: object) -> None:
    """The rows and other facts, with the device and the versions that gave them."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    record = {
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **facts,
        "rows": [asdict(row) for row in rows],
    }
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
