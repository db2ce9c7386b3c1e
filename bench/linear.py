"""Whole linears, quantisation included, beside cuBLAS BF16, Comfy Kitchen and the device's limit.

Every shape is first checked against float64 on sampled rows. Then all contestants are timed in one
process, in an order that changes every round, through the public API only: ``schedule`` rows call
``ring_linear``, ``calibrated`` passes a tensor scale, so that no reduction runs; ``cuBLAS`` is
``F.linear`` on the weight in BF16, ``Comfy`` quantises the activation and calls the NVFP4 linear of
comfy-kitchen (which dequantises both operands on a device without FP4 tensor cores).

The limit is max(bytes / copy bandwidth, FLOP / matmul rate), both measured here: the activation and
the output once, the packed weight once; the rate of a large cuBLAS BF16 product. A device with FP4
tensor cores can beat it.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from ringfp4 import runtime
from ringfp4.errors import InputError, UnservedError
from ringfp4.runtime import lowlevel, reference
from torch.nn import functional

from bench.harness import Run, inputs_needed, print_table, require_cuda, time_all

try:
    from comfy_kitchen.tensor import QuantizedTensor
except ImportError:
    QuantizedTensor = None

ROLES = {"qkv": (5376, 21504), "attn_out": (7168, 5376), "fc1": (5376, 28672), "fc2": (14336, 5376)}  # K, N
ROWS = (1, 16, 128, 512, 946, 2048, 8192, 37_810)
SCHEDULES = ("prepacked", "ring", "fused")
CUBLAS, COMFY, CALIBRATED = "cuBLAS BF16", "Comfy", "calibrated"
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
    """One linear at one M: median milliseconds of each contestant, and the limit's."""

    role: str
    m: int
    k: int
    n: int
    limit: float
    medians: dict[str, float]
    spread: dict[str, tuple[float, float]]

    def against(self, peer: str, ours: str) -> float | None:
        """The peer's time over ours; None if one of them did not run."""
        if peer not in self.medians or ours not in self.medians:
            return None
        return self.medians[peer] / self.medians[ours]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench linear", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cubins", type=Path, nargs="+", help="folders of cubins, default the package's")
    parser.add_argument("--arch", help="only this architecture's cubins")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=11, help="the median is taken over these")
    parser.add_argument("--out", type=Path, help="folder for linear.md, linear.json and linear.png")
    args = parser.parse_args(argv)
    device = require_cuda()
    if args.cubins or args.arch:
        runtime.load(path=args.cubins, arch=args.arch)
    logging.getLogger("comfy_kitchen").setLevel(logging.ERROR)  # it warns at every call that falls back
    ceilings = measure_ceilings(device)
    results = [
        result
        for role in args.roles
        for result in measure_role(role, args.rows, device, ceilings, args.rounds)
    ]
    title = describe(device, ceilings)
    header, lines = table(results)
    print_table(title, header, lines)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write(args.out / "linear.md", markdown(title, header, lines))
        write(args.out / "linear.json", as_json(title, ceilings, results))
        plot(args.out / "linear.png", title, results)
    return 0


def measure_ceilings(device: torch.device) -> Ceilings:
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    runs: dict[str, Run] = {
        "copy": lambda _: target.copy_(source),
        "matmul": lambda _: torch.mm(a, b.t(), out=product),
    }
    times = time_all(runs, inputs=4, rounds=9)
    return Ceilings(2e3 * source.nbytes / times["copy"].median, 2e3 * 8192**3 / times["matmul"].median)


def measure_role(
    role: str, rows: Sequence[int], device: torch.device, ceilings: Ceilings, rounds: int
) -> list[Result]:
    k, n = ROLES[role]
    weights = Weights(n, k, device)
    return [measure(role, m, weights, device, ceilings, rounds) for m in rows]


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
    role: str, m: int, weights: Weights, device: torch.device, ceilings: Ceilings, rounds: int
) -> Result:
    """Check, then time every contestant at one shape."""
    n, k = weights.n, weights.k
    count = max(1, min(len(weights.packed), (1 << 26) // (m * max(n, k))))
    x = [torch.randn(m, k, device=device).bfloat16() for _ in range(count)]
    y = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    scale = lowlevel.absmax(x[0]).clone()
    runs: dict[str, Run] = {CUBLAS: lambda i: torch.mm(x[i], weights.bf16[i].t(), out=y)}
    for schedule in SCHEDULES:
        try:
            check(x[0], weights.packed[0], y, schedule)
        except UnservedError:
            continue
        runs[schedule] = lambda i, s=schedule: runtime.ring_linear(x[i], weights.packed[i], out=y, schedule=s)
    runs[CALIBRATED] = lambda i: runtime.ring_linear(
        x[i], weights.packed[i], scale=scale, out=y, schedule="prepacked"
    )
    if QuantizedTensor is not None:
        runs[COMFY] = lambda i: functional.linear(comfy_tensor(x[i]), weights.comfy[i])
    times = time_all(runs, count, rounds)
    return Result(
        role=role,
        m=m,
        k=k,
        n=n,
        limit=ceilings.milliseconds(m, n, k),
        medians={name: t.median for name, t in times.items()},
        spread={name: (t.fastest, t.slowest) for name, t in times.items()},
    )


def check(x: torch.Tensor, w: runtime.Nvfp4Weight, y: torch.Tensor, schedule: str) -> None:
    """InputError unless the first and the last rows are within the contract's bound of float64."""
    y.fill_(float("nan"))
    runtime.ring_linear(x, w, out=y, schedule=schedule)
    if bool(y.isnan().any()):
        raise InputError(f"{schedule} left outputs unwritten")
    for part in (slice(0, 64), slice(max(0, len(x) - 64), len(x))):
        scale = reference.tensor_scale(x)
        q, sf = reference.quantise(x[part].contiguous(), scale)
        a = reference.decode(q, reference.unswizzle(sf, len(q), w.k // reference.BLOCK)).double()
        b = decoded(w)
        alpha = float(scale * w.tensor_scale)
        exact, magnitude = alpha * (a @ b.T), alpha * (a.abs() @ b.abs().T)
        excess = (y[part].double() - exact).abs() - RELATIVE * exact.abs() - ACCUMULATED * magnitude
        if float(excess.max()) > 0:
            raise InputError(f"{schedule} is wrong", expected="the bound of docs/numerics.md")


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
    ours = [s for s in (*SCHEDULES, CALIBRATED) if any(s in r.medians for r in results)]
    header = ["linear", "M", f"{CUBLAS} us", *(f"{s} us" for s in ours)]
    header += [f"{CUBLAS} / {s}" for s in ours] + [f"{COMFY} / {ours[0]}", f"limit / {ours[0]}"]
    lines = []
    for r in results:
        times = [r.medians.get(name) for name in (CUBLAS, *ours)]
        ratios = [r.against(CUBLAS, s) for s in ours] + [
            r.against(COMFY, ours[0]),
            r.limit / r.medians[ours[0]],
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


def as_json(title: str, ceilings: Ceilings, results: Sequence[Result]) -> str:
    record = {"title": title, "ceilings": asdict(ceilings), "results": [asdict(r) for r in results]}
    return json.dumps(record, indent=1) + "\n"


def write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


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
            points = [(r.m, r.against(CUBLAS, name)) for r in rows if name in r.medians]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.plot([r.m for r in rows], [r.medians[CUBLAS] / r.limit for r in rows], "k--", label="limit")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="rows M", title=f"{role}: {rows[0].k} -> {rows[0].n}")
    axes[0][0].set_ylabel("speed relative to cuBLAS BF16")
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    temporary = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(temporary, dpi=150)
    pyplot.close(figure)
    temporary.replace(path)
