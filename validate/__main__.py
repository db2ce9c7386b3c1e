"""Validate this package on this machine's GPU, level by level.

Level 1: the quantiser against Comfy Kitchen, on adversarial and random values.
Level 2: GEMMs against float64, and bit by bit against Comfy Kitchen's scaled_mm_nvfp4.
Level 3: the four projections of MiniMax-H3 at full size, captured or synthetic, with timing.
Levels 4 to 8 need the model and are listed as skipped.

What this machine cannot decide is reported as "not applicable here", never as passed. Exit
status: 0 nothing failed, 1 a gate failed, 2 nothing could be decided.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from ringfp4 import runtime
from ringfp4.errors import RingFP4Error
from ringfp4.runtime import devices
from ringfp4.validate import environment, level1, level2, level3
from ringfp4.validate.gates import FULL_ROWS, Context, Gate, evaluate, skipped_levels
from ringfp4.validate.report import Result, Status, exit_status, table, write_json

LEVELS = tuple(range(1, 9))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ringfp4.validate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--level", type=int, choices=LEVELS, default=3, help="highest level to run, default 3"
    )
    parser.add_argument("--captures", type=Path, metavar="FILE", help="safetensors file for level 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there")
    parser.add_argument(
        "--cubins", action="append", metavar="DIR", help="artefacts, default the package's own"
    )
    parser.add_argument("--arch", help="use only artefacts of this architecture")
    parser.add_argument(
        "--rows", type=int, default=FULL_ROWS, help=f"rows of synthetic tensors, default {FULL_ROWS}"
    )
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error("--rows must be positive")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: no folder {options.json.parent}")  # now, not after the last gate
    return options


def load(options: argparse.Namespace) -> Context:
    """Load the artefacts; without a device or artefacts that serve it the reason is kept."""
    context = Context(captures=options.captures, full_rows=options.rows)
    if not torch.cuda.is_available():
        return context
    try:
        runtime.load(path=options.cubins, arch=options.arch)
    except RingFP4Error as error:
        if options.cubins:
            raise  # the user named them
        return dataclasses.replace(context, why_unserved=str(error))
    return dataclasses.replace(context, artifacts=devices.artifacts(torch.cuda.current_device()))


def gates(context: Context) -> list[Gate]:
    return [*level1.GATES, *level2.GATES, *level3.gates(context)]


def run(wanted: Iterable[Gate], context: Context, level: int, show: Callable[[Result], None]) -> list[Result]:
    """Evaluate the gates up to a level; the others are listed as skipped."""
    results = []
    for gate in wanted:
        if gate.level <= level:
            result = evaluate(gate, context)
        else:
            result = Result(gate.level, gate.name, Status.SKIPPED, f"--level {level}")
        results.append(result)
        show(result)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for result in skipped_levels():
        results.append(result)
        show(result)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        context = load(options)
        wanted = gates(context)
    except RingFP4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    described = environment.describe()
    if context.artifacts is not None:
        entries = context.artifacts.table.entries
        described["artefacts"] = {
            "folders": [str(folder) for folder in context.artifacts.folders],
            "archs": sorted({entry.arch for entry in entries}),
            "kernels": {f"{entry.name} ({entry.arch})": entry.sha256 for entry in entries},
        }
    device = described["device"]
    print(f"{device.get('name', 'no CUDA device')}, {described['versions']}", flush=True)
    results = run(wanted, context, options.level, lambda result: print(result.line(), flush=True))
    described["gpu_state_after"] = environment.gpu_state()
    print(table(results))
    if options.json is not None:
        write_json(options.json, described, results)
    status = exit_status(results)
    print({0: "no gate failed", 1: "FAILED", 2: "nothing could be decided on this machine"}[status])
    return status


if __name__ == "__main__":
    sys.exit(main())
