"""A gate is one thing that must hold; what it needs of the machine is stated beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from ringfp4.runtime import devices
from ringfp4.validate import comfy
from ringfp4.validate.report import Result, Status

# (N, K) of MiniMax-H3's projections, 37,810 rows in its canonical request.
ROLES = {"qkv": (21504, 5376), "attn_out": (5376, 7168), "fc1": (28672, 5376), "fc2": (5376, 14336)}
FULL_ROWS = 37_810
# cuBLAS splits this projection's sums along K in an order of its own, so on GB10 its results
# differ in the last bits from any kernel that accumulates in one pass.
STREAM_K_ROLES = ("fc2",)


@dataclass(frozen=True)
class Outcome:
    """What a gate found. ``ok`` None: it could not be decided here, ``detail`` says why."""

    ok: bool | None
    detail: str = ""
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """The machine and the user's options."""

    captures: Path | None = None
    full_rows: int = FULL_ROWS
    artifacts: devices.Artifacts | None = None
    why_unserved: str = ""

    @property
    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

    def missing(self, need: str) -> str:
        """Why a gate that needs this cannot be decided on this machine; empty if it can."""
        if not torch.cuda.is_available():
            return "no CUDA device"
        if need == "comfy" and comfy.version() != comfy.VERSION:
            return f"needs comfy-kitchen {comfy.VERSION}, found {comfy.version() or 'none'}"
        if need == "kernels" and self.artifacts is None:
            return self.why_unserved
        if need == "block-scaled" and self.capability[0] != 12:
            return "cuBLAS multiplies NVFP4 on compute capability 12.x only, this is {}.{}".format(
                *self.capability
            )
        return ""

    def schedules(self, n: int, k: int) -> tuple[str, ...]:
        """Schedules that the loaded artefacts serve for a shape, possibly none."""
        return self.artifacts.table.linears().get((n, k), ()) if self.artifacts else ()


@dataclass(frozen=True)
class Gate:
    """``needs``: of "cuda", "comfy", "kernels", "block-scaled". ``run`` is called if all are there."""

    level: int
    name: str
    needs: tuple[str, ...]
    run: Callable[[Context], Outcome]


def evaluate(gate: Gate, context: Context) -> Result:
    """Run one gate. An exception is a failure of the gate, and its text the reason."""
    for need in gate.needs:
        if reason := context.missing(need):
            return Result(gate.level, gate.name, Status.NOT_APPLICABLE, reason)
    started = time.monotonic()
    try:
        outcome = gate.run(context)
    except Exception as error:
        outcome = Outcome(False, f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - started
    status = {True: Status.PASSED, False: Status.FAILED, None: Status.NOT_APPLICABLE}[outcome.ok]
    return Result(gate.level, gate.name, status, outcome.detail, outcome.measured, seconds)


def time_ms(function: Callable[[], object], repeats: int = 5) -> float:
    """Median time of a call on the GPU in milliseconds, after one warm-up."""
    function()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements of two tensors of one type and size whose bytes differ."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    as_bits = views[a.element_size()]
    return int((a.contiguous().view(as_bits).flatten() != b.contiguous().view(as_bits).flatten()).sum())


# Levels of the ladder that need the kernels inside a model.
MODEL_LEVELS = {
    4: "complete block equality",
    5: "all 50 blocks in a denoiser step",
    6: "two-step video and audio trajectory equality",
    7: "canonical 12-step video and audio checksum equality",
    8: "full block profile and peak memory",
}


def skipped_levels() -> Iterator[Result]:
    for level, name in MODEL_LEVELS.items():
        reason = "needs the model: the integration into its blocks does not exist yet"
        yield Result(level, name, Status.SKIPPED, reason)
