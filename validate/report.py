"""Results of gates: a line while they run, a table at the end, a JSON file, an exit status."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ringfp4.files import write_atomically

FORMAT = 1


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable here"  # this machine cannot decide it
    SKIPPED = "skipped"  # no machine can yet, or it was not asked for


@dataclass(frozen=True)
class Result:
    """One gate's outcome. ``measured`` holds numbers: times in milliseconds, counts, errors."""

    level: int
    gate: str
    status: Status
    detail: str = ""
    measured: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def line(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.measured.items())
        tail = "; ".join(part for part in (self.detail, numbers) if part)
        return f"level {self.level}  {self.status:<19}  {self.gate}" + (f": {tail}" if tail else "")


def table(results: list[Result]) -> str:
    """Levels against statuses."""
    head = f"{'level':<7}" + "".join(f"{status:>21}" for status in Status)
    rows = [head]
    for level in sorted({result.level for result in results}):
        counts = [sum(r.level == level and r.status is status for r in results) for status in Status]
        rows.append(f"{level:<7}" + "".join(f"{count:>21}" for count in counts))
    return "\n".join(rows)


def exit_status(results: list[Result]) -> int:
    """0: nothing failed and something passed. 1: a gate failed. 2: nothing could be decided."""
    if any(result.status is Status.FAILED for result in results):
        return 1
    return 0 if any(result.status is Status.PASSED for result in results) else 2


def write_json(path: Path, environment: dict[str, Any], results: list[Result]) -> None:
    """The whole report; the file appears complete or not at all."""
    content = {
        "format": FORMAT,
        "environment": environment,
        "results": [asdict(result) for result in results],
        "exit_status": exit_status(results),
    }
    write_atomically(path, json.dumps(content, indent=2).encode())
