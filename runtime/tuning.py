"""Which schedule and kernel ``auto`` uses, measured once on the device and remembered.

Only kernels that are loaded are measured; nothing is compiled. Choices are kept in one JSON file
in the user's cache folder, named after device, driver and artefacts, so that they lapse when one of
them changes. ``load`` takes up what is remembered.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringfp4.errors import InputError, UnservedError
from ringfp4.files import write_atomically
from ringfp4.runtime.plan import DEFAULT_CAPACITY_ROWS, SCHEDULES

if TYPE_CHECKING:
    from ringfp4.runtime.devices import Artifacts, DeviceLike

log = logging.getLogger("ringfp4")

FORMAT = 1
ROWS = (1, 16, 128, 512, 2048, 8192, 37_810)
ROUNDS = 7
MILLISECONDS = 2.0  # of calls in one measurement, at least
_ANY_ROWS = 1 << 62


@dataclass(frozen=True)
class Choice:
    """The fastest way found for a linear and ``m`` rows; it holds down to the next smaller ``m``."""

    n: int
    k: int
    m: int
    schedule: str
    kernel: str
    milliseconds: float


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ringfp4" / "tuning"


def identity(artifacts: Artifacts) -> dict[str, object]:
    """What a choice depends on."""
    cubins = sorted(f"{e.arch} {e.name} {e.sha256}" for e in artifacts.table.entries)
    return {
        "format": FORMAT,
        "device": artifacts.device_name,
        "multiprocessors": artifacts.sms,
        "driver": artifacts.driver_version,
        "artefacts": hashlib.sha256("\n".join(cubins).encode()).hexdigest(),
    }


def cache_file(artifacts: Artifacts) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "-", artifacts.device_name).strip("-")
    key = hashlib.sha256(json.dumps(identity(artifacts), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{name}-{key[:16]}.json"


def remembered(artifacts: Artifacts) -> tuple[Choice, ...]:
    """What was stored for this device, driver and artefacts; nothing if that is unreadable."""
    file = cache_file(artifacts)
    try:
        content = json.loads(file.read_text())
        if content["identity"] != identity(artifacts):
            return ()
        choices = tuple(Choice(**choice) for choice in content["choices"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is unreadable and is ignored: %s", file, error)
        return ()
    known = {entry.name for entry in artifacts.table.entries}
    return tuple(c for c in choices if c.kernel in known and c.schedule in SCHEDULES)


def apply(artifacts: Artifacts, choices: Sequence[Choice]) -> None:
    """Make ``auto`` follow the choices, for their linears."""
    for shape in {(choice.n, choice.k) for choice in choices}:
        artifacts.set_preferences(*shape, [])
    for choice in choices:
        artifacts.prefer(choice.n, choice.k, choice.m, choice.schedule, choice.kernel)


def store(artifacts: Artifacts, choices: Sequence[Choice]) -> Path:
    """Remember the choices, with those stored before for other linears. Returns the file."""
    tuned = {(choice.n, choice.k) for choice in choices}
    kept = [choice for choice in remembered(artifacts) if (choice.n, choice.k) not in tuned]
    content = {"identity": identity(artifacts), "choices": [asdict(choice) for choice in (*kept, *choices)]}
    file = cache_file(artifacts)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())
    return file


def tune(
    device: DeviceLike = None,
    shapes: Sequence[tuple[int, int]] | None = None,
    rows: Sequence[int] = ROWS,
    progress: Callable[[str], None] = log.info,
) -> tuple[Choice, ...]:
    """Measure every schedule and kernel variant that is loaded, remember the fastest, use them.

    ``device``: as for ``load``. ``shapes``: (N, K) of linears, default all that are
    served. ``rows``: each M to measure; a choice holds for smaller M too, down to the next one, and
    the last for all larger. ``progress`` gets a line after each M. Takes seconds a linear, and device
    memory for the largest M. Raises InputError, UnservedError, and what ``load`` raises.
    """
    from ringfp4.runtime import devices

    if not isinstance(rows, Sequence) or not rows or any(not isinstance(m, int) or m < 1 for m in rows):
        raise InputError("unusable rows", expected="positive integers", got=repr(rows))
    artifacts = devices.artifacts(devices.ordinal_of(device))
    wanted = list(shapes) if shapes is not None else list(artifacts.table.linears())
    choices = []
    for n, k in wanted:
        if (n, k) not in artifacts.table.linears():
            raise UnservedError(f"nothing serves N = {n}, K = {k}", expected=artifacts.table.shipped())
        before = artifacts.preferences.get((n, k), [])
        try:
            for m in sorted(set(rows)):
                choices.append(_fastest(artifacts, n, k, m))
                progress(
                    "N={n} K={k} M={m}: {schedule}, {kernel}, {milliseconds:.4f} ms".format(
                        **asdict(choices[-1])
                    )
                )
        finally:
            artifacts.set_preferences(n, k, before)
    apply(artifacts, choices)
    progress(f"remembered in {store(artifacts, choices)}")
    return tuple(choices)


def contestants(artifacts: Artifacts, n: int, k: int, m: int) -> Iterator[tuple[str, str]]:
    """(schedule, kernel) of everything that could compute the linear; equal ways once."""
    for schedule, recipe in SCHEDULES.items():
        if schedule == "ring" and m <= DEFAULT_CAPACITY_ROWS:
            continue  # one chunk: the launches of prepacked
        arch = artifacts.table.arch_for(recipe, n, k)
        if arch is not None:
            for entry in artifacts.table.find(arch, recipe.kinds[-1], n, k):
                yield schedule, entry.name


def _fastest(artifacts: Artifacts, n: int, k: int, m: int) -> Choice:
    import torch
    from ringfp4.runtime.api import ring_linear
    from ringfp4.runtime.weight import Nvfp4Weight

    with torch.cuda.device(artifacts.ordinal):
        x = torch.randn(m, k, device="cuda").bfloat16()
        y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        weight = Nvfp4Weight.from_bf16(torch.randn(n, k, device="cuda").bfloat16())
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def measure(schedule: str, kernel: str, calls: int) -> float:
            """Milliseconds of one of ``calls`` calls."""
            artifacts.set_preferences(n, k, [(_ANY_ROWS, schedule, kernel)])
            ring_linear(x, weight, out=y)  # plans, and warms up
            begin.record()
            for _ in range(calls):
                ring_linear(x, weight, out=y)
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / calls

        ways = list(contestants(artifacts, n, k, m))
        calls = {way: max(1, round(MILLISECONDS / max(measure(*way, 1), 1e-3))) for way in ways}
        times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for turn in range(ROUNDS):
            # Another order each time: what ran before decides how far the clock has been throttled.
            first = turn * len(ways) // ROUNDS
            for way in ways[first:] + ways[:first]:
                times[way].append(measure(*way, calls[way]))
    best = min(ways, key=lambda way: statistics.median(times[way]))
    return Choice(n, k, m, *best, milliseconds=statistics.median(times[best]))
