"""Every fused kernel beside prepacked and ring: launches, times, and the DRAM bytes of each.

All results are compared bit for bit with prepacked before anything is timed. Times include the
reduction of the absolute maximum; ``given`` rows pass the tensor scale. With ``--traffic`` Nsight
Compute (``ncu`` on the PATH) counts the bytes that each way moves between DRAM and the device.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from ringfp4 import runtime
from ringfp4.errors import DriverError, InputError, UnservedError
from ringfp4.runtime import devices, lowlevel
from ringfp4.runtime.tuning import contestants
from ringfp4.validate.gates import FULL_ROWS, ROLES

from bench.harness import (
    Row,
    add_common_options,
    load_cubins,
    print_table,
    require_cuda,
    time_all,
    write_json,
)

CUBLAS = "cuBLAS BF16"
GIVEN = ", given"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
OURS = "regex:^absmax|^pack_|gemm_n"  # not the repack, which belongs to the weight
BYTES = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench fused", description=__doc__)
    add_common_options(parser)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, FULL_ROWS])
    parser.add_argument("--traffic", action="store_true", help="also count DRAM bytes, with ncu")
    parser.add_argument("--once", help=argparse.SUPPRESS)  # the way that ncu looks at
    args = parser.parse_args(argv)
    require_cuda()
    load_cubins(args)
    if args.once:
        Ways(args.roles[0], args.rows[0]).runs[args.once](0)
        torch.cuda.synchronize()
        return 0
    rows, lines = [], []
    for role in args.roles:
        for m in args.rows:
            ways = Ways(role, m)
            ways.check()
            timings = time_all(ways.all_runs(), inputs=1, rounds=args.rounds)
            base = timings["prepacked"].median
            for name, timing in timings.items():
                rows.append(Row(name, f"{role} {m}", timing, flop=2 * m * ways.n * ways.k))
                traffic = measure_traffic(argv, role, m, name) if args.traffic and name in ways.runs else None
                lines.append(
                    [
                        *(role, str(m), name, str(ways.launches(name)), f"{timing.median:.4f}"),
                        f"{base / timing.median:.4f}",
                        f"{timings[CUBLAS].median / timing.median:.4f}",
                        str(traffic or ""),
                    ]
                )
    header = ["linear", "M", "way", "launches", "ms", "prepacked / this", f"{CUBLAS} / this", "DRAM"]
    print_table(f"Fused kernels on {torch.cuda.get_device_name()}", header, lines)
    if args.json:
        write_json(args.json, rows)
    return 0


class Ways:
    """All ways to compute one linear, by name."""

    def __init__(self, role: str, m: int) -> None:
        self.n, self.k = ROLES[role]
        self.m = m
        self.artifacts = devices.artifacts(torch.cuda.current_device())
        self.x = torch.randn(m, self.k, device="cuda").bfloat16()
        self.y = torch.empty(m, self.n, device="cuda", dtype=torch.bfloat16)
        self.weight = runtime.Nvfp4Weight.from_bf16(torch.randn(self.n, self.k, device="cuda").bfloat16())
        self.weight.prepare()
        self.scale = lowlevel.absmax(self.x).clone()
        self.runs: dict[str, Callable[[int], object]] = {}
        for schedule in ("prepacked", "ring"):
            self.runs[schedule] = lambda _, s=schedule: self.call(schedule=s)
        for kernel in self.fused():
            for name, scale in ((kernel, None), (kernel + GIVEN, self.scale)):
                self.runs[name] = lambda _, k=kernel, s=scale: self.call(kernel=k, scale=s)

    def fused(self) -> Iterator[str]:
        found = contestants(self.artifacts, self.n, self.k, self.m)
        return (kernel for schedule, kernel in found if schedule == "fused")

    def call(
        self, schedule: str = "auto", kernel: str = "", scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``kernel``: this fused one, by way of what tuning would prefer."""
        if kernel:
            self.artifacts.prefer(self.n, self.k, 1 << 62, "fused", kernel)
        return runtime.ring_linear(self.x, self.weight, scale=scale, out=self.y, schedule=schedule)

    def check(self) -> None:
        """InputError unless every way gives the bits of prepacked; UnservedError if none is fused."""
        if not list(self.fused()):
            raise UnservedError(f"no fused kernel serves N = {self.n}, K = {self.k}")
        expected = self.call(schedule="prepacked").clone().view(torch.int16)
        for name, run in self.runs.items():
            self.y.fill_(float("nan"))
            run(0)
            if not torch.equal(self.y.view(torch.int16), expected):
                raise InputError(f"{name} differs from prepacked")

    def all_runs(self) -> dict[str, Callable[[int], object]]:
        bf16 = torch.randn(self.n, self.k, device="cuda").bfloat16()
        return self.runs | {CUBLAS: lambda _: torch.mm(self.x, bf16.t(), out=self.y)}

    def launches(self, name: str) -> int:
        """How many kernels the way launches."""
        if name == "prepacked":
            return 3
        if name == "ring":
            capacity = self.artifacts.plan("ring", self.n, self.k, self.m, 2048).capacity_rows
            return 1 + 2 * -(-self.m // capacity)
        return 1


@dataclass(frozen=True)
class Traffic:
    read: float
    written: float

    def __str__(self) -> str:
        return f"{self.read / 1e9:.2f} GB read, {self.written / 1e9:.2f} written"


def measure_traffic(argv: list[str], role: str, m: int, name: str) -> Traffic:
    """DRAM bytes of one call, all its kernels together. DriverError if ncu cannot tell."""
    again = [*argv, "--roles", role, "--rows", str(m), "--once", name]
    profiler = ["ncu", "--csv", "--clock-control", "none", "-k", OURS, "--metrics", f"{READ},{WRITTEN}"]
    try:
        done = subprocess.run(
            [*profiler, sys.executable, "-m", "bench", "fused", *again],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise DriverError("--traffic needs ncu", remedy="install Nsight Compute") from error
    traffic = traffic_in(done.stdout)
    if not traffic.read:
        raise DriverError("ncu counted nothing", remedy=(done.stdout + done.stderr).strip()[-400:])
    return traffic


def traffic_in(report: str) -> Traffic:
    """The sums over all kernels in what ``ncu --csv`` printed."""
    table = io.StringIO("\n".join(line for line in report.splitlines() if line.startswith('"')))
    total = {READ: 0.0, WRITTEN: 0.0}
    for line in csv.DictReader(table):
        total[line["Metric Name"]] += (
            float(line["Metric Value"].replace(",", "")) * BYTES[line["Metric Unit"]]
        )
    return Traffic(total[READ], total[WRITTEN])
