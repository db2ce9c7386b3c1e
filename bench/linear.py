"""Whole linears, quantisation included, beside cuBLAS BF16, Comfy Kitchen and the device's limit.

Every shape is first checked against float64 on sampled rows. Then all contestants are timed in one
process, in an order that changes every round, through the public API only: ``schedule`` rows call
``ring_linear``, ``calibrated`` passes a tensor scale, so that no reduction runs; ``cuBLAS`` is
``F.linear`` on the weight in BF16, ``Comfy`` quantises the activation and calls the NVFP4 linear of
comfy-kitchen (which dequantises both operands on a device without FP4 tensor cores).

With ``--sustained SECONDS`` each contestant runs alone for so long, and the second half is timed. A
device at its power limit then has the clock that this contestant's power allows, not one that all of
them share; in a model, too, the same kind of work goes on for seconds. Fewer ``--rounds`` will do.

The limit is max(bytes / copy bandwidth, FLOP / matmul rate), both measured here: the activation and
the output once, the packed weight once; the rate of a large cuBLAS BF16 product, in short turns
always. A device with FP4 tensor cores can beat it.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from ringfp4 import runtime
from ringfp4.errors import InputError, UnservedError
from ringfp4.files import write_atomically
from ringfp4.runtime import lowlevel, reference
from ringfp4.validate.gates import FULL_ROWS, ROLES
from torch.nn import functional

from bench.harness import (
    Row,
    Run,
    Timing,
    add_common_options,
    copy_bandwidth,
    inputs_needed,
    load_cubins,
    output_file,
    print_table,
    require_cuda,
    time_all,
    write_json,
)

try:
    from comfy_kitchen.tensor import QuantizedTensor
except ImportError:
    QuantizedTensor = None

ROWS = (1, 16, 128, 512, 946, 2048, 8192, FULL_ROWS)
SPEEDS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3)  # marked in the plot
SCHEDULES = ("prepacked", "ring", "fused")
CUBLAS, COMFY, CALIBRATED, LIMIT = "cuBLAS BF16", "Comfy", "calibrated", "limit"
# The contract's bound (docs/numerics.md): rounding to BF16, and FP32 sums in any order.
RELATIVE, ACCUMULATED = 2.0**-8, 2.0**-18


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to do: bytes read plus written, and FLOP, per second."""

    bytes_per_second: float
    flop_per_second: float

    def milliseconds(self, m: int, n: int, k: int) -> float:
        moved = 2 * m * (k + n) + n * k * 9 // 16
        return 1e3 * max(moved / self.bytes_per_second, 2 * m * n * k / self.flop_per_second)


@dataclass(frozen=True)
class Result:
    """One linear at one M: the time of each contestant, and the limit's milliseconds."""

    role: str
    m: int
    k: int
    n: int
    limit: float
    timings: dict[str, Timing]

    def median(self, name: str) -> float | None:
        """Milliseconds; None if that contestant did not run."""
        return self.timings[name].median if name in self.timings else None

    def against(self, peer: str, ours: str) -> float | None:
        """The peer's time over ours; None if one of them did not run."""
        theirs, own = self.median(peer), self.median(ours)
        return theirs / own if theirs and own else None

    def rows(self) -> list[Row]:
        shape = f"{self.role} {self.m} x {self.k} -> {self.n}"
        flop = 2 * self.m * self.k * self.n
        timings = self.timings | {LIMIT: Timing(self.limit, self.limit, self.limit)}
        return [Row(name, shape, timing, flop=flop) for name, timing in timings.items()]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench linear", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_common_options(parser)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--eager", action="store_true", help="time calls from Python, not graph replays")
    mode.add_argument(
        "--sustained",
        type=positive,
        default=0.0,
        metavar="SECONDS",
        help="run each contestant alone for so long, every round",
    )
    parser.add_argument("--markdown", type=output_file, help="write the table to this file as well")
    parser.add_argument(
        "--plot", type=output_file, help="draw speed over M into this PNG file (needs matplotlib)"
    )
    parser.add_argument("--from-json", type=Path, help="report what an earlier run wrote, measure nothing")
    args = parser.parse_args(argv)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; write --json here and draw it elsewhere with --from-json")
    if args.from_json:
        report(*read_results(args.from_json), args)
        return 0
    device = require_cuda()
    load_cubins(args)
    logging.getLogger("comfy_kitchen").setLevel(logging.ERROR)  # it warns at every call that falls back
    ceilings = measure_ceilings(device)
    results = [result for role in args.roles for result in measure_role(role, args, device, ceilings)]
    title = describe(device, ceilings)
    if args.eager:
        title += "; called from Python"
    if args.sustained:
        title += f"; each alone for {args.sustained} s"
    if args.json:
        rows = [row for result in results for row in result.rows()]
        write_json(args.json, rows, title=title, ceilings=asdict(ceilings))
    report(title, results, args)
    return 0


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def report(title: str, results: Sequence[Result], args: argparse.Namespace) -> None:
    header, lines = table(results)
    print_table(title, header, lines)
    if args.markdown:
        write_atomically(args.markdown, markdown(title, header, lines).encode())
    if args.plot:
        plot(args.plot, title, results)


def read_results(path: Path) -> tuple[str, list[Result]]:
    """Title and results of a file that ``--json`` wrote."""
    content = json.loads(path.read_text())
    shapes: dict[str, dict[str, Timing]] = {}
    for row in content["rows"]:
        shapes.setdefault(row["shape"], {})[row["what"]] = Timing(**row["timing"])
    results = []
    for shape, timings in shapes.items():
        role, m, k, n = re.fullmatch(r"(\w+) (\d+) x (\d+) -> (\d+)", shape).groups()  # type: ignore[union-attr]
        limit = timings.pop(LIMIT).median
        results.append(Result(role, int(m), int(k), int(n), limit, timings))
    return content["title"], results


def measure_ceilings(device: torch.device) -> Ceilings:
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    matmul = time_all({"matmul": lambda _: torch.mm(a, b.t(), out=product)}, inputs=1, rounds=9)["matmul"]
    return Ceilings(copy_bandwidth(device), 2e3 * 8192**3 / matmul.median)


def measure_role(
    role: str, args: argparse.Namespace, device: torch.device, ceilings: Ceilings
) -> list[Result]:
    n, k = ROLES[role]
    weights = Weights(n, k, device)
    return [measure(role, m, weights, device, ceilings, args) for m in args.rows]


class Weights:
    """As many weights, packed and in BF16, as keep one call from finding the next one's in L2."""

    def __init__(self, n: int, k: int, device: torch.device) -> None:
        self.n, self.k = n, k
        self.bf16: list[torch.Tensor] = []
        self.packed: list[runtime.Nvfp4Weight] = []
        self.comfy: list[object] = []
        for _ in range(inputs_needed(n * k * 9 // 16, device)):
            weight = torch.randn(n, k, device=device).bfloat16()
            packed = runtime.Nvfp4Weight.from_bf16(weight)
            self.comfy.append(comfy_tensor(weight))
            self.bf16.append(dequantise(packed))
            packed.prepare()
            self.packed.append(packed)


def measure(
    role: str, m: int, weights: Weights, device: torch.device, ceilings: Ceilings, args: argparse.Namespace
) -> Result:
    """Check, then time every contestant at one shape."""
    n, k = weights.n, weights.k
    count = max(1, min(len(weights.packed), (1 << 26) // (m * max(n, k))))
    x = [torch.randn(m, k, device=device).bfloat16() for _ in range(count)]
    y = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    scale = lowlevel.absmax(x[0]).clone()
    runs: dict[str, Run] = {CUBLAS: lambda i: torch.mm(x[i], weights.bf16[i].t(), out=y)}
    expected = Expected(x[0], weights.packed[0])
    for schedule in SCHEDULES:
        y.fill_(float("nan"))
        try:
            runtime.ring_linear(x[0], weights.packed[0], out=y, schedule=schedule)
        except UnservedError:
            continue
        expected.check(y, schedule)
        runs[schedule] = lambda i, s=schedule: runtime.ring_linear(x[i], weights.packed[i], out=y, schedule=s)
    runs[CALIBRATED] = lambda i: runtime.ring_linear(
        x[i], weights.packed[i], scale=scale, out=y, schedule="prepacked"
    )
    if QuantizedTensor is not None:
        runs[COMFY] = lambda i: functional.linear(comfy_tensor(x[i]), weights.comfy[i])
    timings = time_all(runs, count, args.rounds, eager=args.eager, seconds=args.sustained)
    return Result(role, m, k, n, ceilings.milliseconds(m, n, k), timings)


class Expected:
    """The first and the last rows of y in float64, and how far a result may be from them."""

    def __init__(self, x: torch.Tensor, w: runtime.Nvfp4Weight) -> None:
        self.rows = torch.arange(len(x), device=x.device)
        self.rows = torch.cat((self.rows[:64], self.rows[64:][-64:]))
        scale = reference.tensor_scale(x)
        q, sf = reference.quantise(x[self.rows], scale)
        a = reference.decode(q, reference.unswizzle(sf, len(q), w.k // reference.BLOCK)).double()
        b = decoded(w)
        alpha = float(scale * w.tensor_scale)
        self.exact, magnitude = alpha * (a @ b.T), alpha * (a.abs() @ b.abs().T)
        self.bound = RELATIVE * self.exact.abs() + ACCUMULATED * magnitude

    def check(self, y: torch.Tensor, name: str) -> None:
        """InputError unless y is written everywhere and within the contract's bound."""
        if bool(y.isnan().any()):
            raise InputError(f"{name} left outputs unwritten")
        if bool(((y[self.rows].double() - self.exact).abs() > self.bound).any()):
            raise InputError(f"{name} is wrong", expected="the bound of docs/numerics.md")


def decoded(w: runtime.Nvfp4Weight) -> torch.Tensor:
    """W without its tensor scale, float64."""
    qdata, block_scale = w.originals()
    scales = reference.unswizzle(block_scale, w.n, w.k // reference.BLOCK)
    return reference.decode(qdata, scales).double()


def dequantise(w: runtime.Nvfp4Weight) -> torch.Tensor:
    return (decoded(w) * w.tensor_scale.double()).bfloat16()


def comfy_tensor(x: torch.Tensor) -> object:
    """As Comfy's caller quantises: the tensor scale from the maximum, then its CUDA quantiser."""
    if QuantizedTensor is None:
        return None
    return QuantizedTensor.from_float(x, "TensorCoreNVFP4Layout")


# Reports


def describe(device: torch.device, ceilings: Ceilings) -> str:
    return (
        f"Linears on {torch.cuda.get_device_name(device)}, {date.today()}, torch {torch.__version__}; "
        f"copy {ceilings.bytes_per_second / 1e12:.2f} TB/s, "
        f"matmul {ceilings.flop_per_second / 1e12:.0f} TFLOP/s"
    )


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    ours = [s for s in (*SCHEDULES, CALIBRATED) if any(s in r.timings for r in results)]
    header = ["linear", "M", f"{CUBLAS} us", *(f"{s} us" for s in ours)]
    header += [f"{CUBLAS} / {s}" for s in ours] + [f"{COMFY} / {ours[0]}", f"limit / {ours[0]}"]
    lines = []
    for r in results:
        times = [r.median(name) for name in (CUBLAS, *ours)]
        ratios = [r.against(CUBLAS, s) for s in ours] + [
            r.against(COMFY, ours[0]),
            r.limit / r.timings[ours[0]].median,
        ]
        lines.append(
            [
                r.role,
                str(r.m),
                *("" if t is None else f"{1e3 * t:.1f}" for t in times),
                *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
            ]
        )
    return header, lines


def markdown(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return f"{title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def plot(path: Path, title: str, results: Sequence[Result]) -> None:
    """One panel a linear: each contestant's speed relative to cuBLAS BF16, over M."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    roles = list(dict.fromkeys(r.role for r in results))
    figure, axes = pyplot.subplots(1, len(roles), figsize=(4.2 * len(roles), 3.6), sharey=True, squeeze=False)
    for axis, role in zip(axes[0], roles, strict=True):
        rows = [r for r in results if r.role == role]
        for name in (*SCHEDULES, CALIBRATED, COMFY):
            points = [(r.m, r.against(CUBLAS, name)) for r in rows if name in r.timings]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.plot(
            [r.m for r in rows], [r.timings[CUBLAS].median / r.limit for r in rows], "k--", label="limit"
        )
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="rows M", title=f"{role}: {rows[0].k} -> {rows[0].n}")
        axis.set_xticks([r.m for r in rows], [str(r.m) for r in rows], rotation=60, fontsize=7)
        axis.set_yticks(SPEEDS, [f"{speed:g}" for speed in SPEEDS])
        axis.minorticks_off()
    axes[0][0].set_ylabel("speed relative to cuBLAS BF16")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=len(names), fontsize=7)
    figure.suptitle(title, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    pyplot.close(figure)
    write_atomically(path, image.getvalue())
