"""Host time of a call: ``python -m bench host [--cubins DIR] [--arch ARCH] [--role qkv] [--m 2048]``.

Only the time until the call returns is taken, in short batches with the device idle before each,
so that nothing waits for a full launch queue; the contestants take turns. In the same run: PyTorch's
BF16 ``F.linear``, its smallest launch (one element set to zero), which says how fast the host is, and,
if it is installed, Comfy Kitchen's quantise and matmul. Also what loading costs, and the time from
``import ringfp4.runtime`` to a finished result in a fresh process.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ringfp4 import runtime
from ringfp4.runtime import devices, streams
from ringfp4.validate.gates import FULL_ROWS, ROLES

from bench.harness import require_cuda

BATCH, BATCHES = 20, 30

FIRST_RESULT = """
import time, torch
torch.cuda.init()
x = torch.randn({m}, {k}, device="cuda").bfloat16()
qdata = torch.zeros({n}, {k} // 2, dtype=torch.uint8, device="cuda")
scales = torch.zeros(-(-{n} // 128) * 128, -(-{k} // 64) * 4, dtype=torch.uint8, device="cuda")
tensor_scale = torch.ones((), device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
from ringfp4 import runtime
imported = time.perf_counter()
runtime.load(path={paths!r} or None, arch={arch!r})
loaded = time.perf_counter()
runtime.ring_linear(x, runtime.Nvfp4Weight(qdata, scales, tensor_scale))
torch.cuda.synchronize()
done = time.perf_counter()
print(imported - start, loaded - imported, done - start)
"""


def microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of each call, the median over the batches of the mean host time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(BATCHES + 1):
        random.shuffle(names)  # what ran before decides what is in the CPU's caches
        for name in names:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BATCH):
                calls[name]()
            if turn > 0:  # the first one warms up
                times[name].append((time.perf_counter() - start) / BATCH)
    torch.cuda.synchronize()
    return {name: 1e6 * statistics.median(taken) for name, taken in times.items()}


def launches_only(x: torch.Tensor, w: runtime.Nvfp4Weight, y: torch.Tensor) -> Callable[[], object]:
    """The C++ part of a call by itself, its arguments made beforehand."""
    ordinal = x.device.index
    stream = streams.current(ordinal)
    lane = devices.artifacts(ordinal).lane(stream)
    plan = lane.plan(w.n, w.k, x.shape[0], "auto")
    ring = lane.ring(plan.ring_bytes)
    data, block_scale = w.operands_for(plan)
    scales = 0 if block_scale is None else block_scale.data_ptr()
    pointers = (x.data_ptr(), 0, data.data_ptr(), scales, w.tensor_scale.data_ptr(), 0, y.data_ptr())
    arguments = (ring, stream, x.shape[0], x.stride(0), 0, *pointers)
    return lambda: plan.sequence.run(*arguments)


def comfy_linear(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object] | None:
    """Comfy Kitchen's quantised linear, None without it."""
    try:
        from comfy_kitchen.tensor import QuantizedTensor
    except ImportError:
        return None
    # Where cuBLAS has no NVFP4 product it says so at every call, and dequantises.
    logging.getLogger("comfy_kitchen").setLevel(logging.ERROR)
    w = QuantizedTensor.from_float(weight, "TensorCoreNVFP4Layout")

    def call() -> object:
        return torch.nn.functional.linear(QuantizedTensor.from_float(x, "TensorCoreNVFP4Layout"), w)

    return call


def first_result(n: int, k: int, m: int, paths: list[str], arch: str | None) -> list[float]:
    script = FIRST_RESULT.format(n=n, k=k, m=m, paths=paths, arch=arch)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [1e3 * float(value) for value in done.stdout.split()]


def memory_beyond(w: runtime.Nvfp4Weight) -> str:
    """What a call at 37,810 rows needs beside x, the weight and y, on a stream of its own."""
    x = torch.randn(FULL_ROWS, w.k, device=w.device).bfloat16()
    out = x.new_empty(FULL_ROWS, w.n)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.stream(stream):
        runtime.ring_linear(x, w, out=out)
    torch.cuda.synchronize()
    lane = devices.artifacts(x.device.index).lane(stream.cuda_stream)
    slots = lane.plan(w.n, w.k, FULL_ROWS, "auto").slot_bytes(FULL_ROWS)
    torch_bytes = torch.cuda.max_memory_allocated() - before
    return f"slots {slots:,}, other {lane.ring_bytes - slots:,}, by PyTorch's allocator {torch_bytes:,}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench host", description=__doc__)
    parser.add_argument(
        "--cubins", action="append", default=[], help="artefact folder, default the package's"
    )
    parser.add_argument("--arch", help="sm_121a, sm_120f, sm_90a or twin")
    parser.add_argument("--role", choices=ROLES, default="qkv")
    parser.add_argument("--m", type=int, default=2048)
    arguments = parser.parse_args(argv)
    device = require_cuda()
    paths = [str(Path(path).resolve()) for path in arguments.cubins]
    (n, k), m = ROLES[arguments.role], arguments.m

    runtime.load(path=paths or None, arch=arguments.arch)
    x = torch.randn(m, k, device=device).bfloat16()
    weight = torch.randn(n, k, device=device).bfloat16()
    w = runtime.Nvfp4Weight.from_bf16(weight)
    y, scale, one = runtime.ring_linear(x, w), torch.ones((), device=device), torch.ones(1, device=device)
    plan = devices.artifacts(device.index).lane(streams.current(device.index)).plan(n, k, m, "auto")

    print(f"{torch.cuda.get_device_name()}, {plan.arch}, {arguments.role}: N = {n}, K = {k}, M = {m}")
    print(f"schedule {plan.schedule}, host time of a call in us, median of {BATCHES} batches of {BATCH}")
    calls: dict[str, Callable[[], object] | None] = {
        "ring_linear": lambda: runtime.ring_linear(x, w),
        "ring_linear, schedule ring": lambda: runtime.ring_linear(x, w, schedule="ring"),
        "ring_linear, schedule fused": lambda: runtime.ring_linear(x, w, schedule="fused"),
        "ring_linear, scale and out given": lambda: runtime.ring_linear(x, w, scale=scale, out=y),
        "its launches (C++)": launches_only(x, w, y),
        "torch.ops.ringfp4.linear": lambda: torch.ops.ringfp4.linear(
            x, *w.operands(), w.tensor_scale, n, None, "fp32", None, "auto"
        ),
        "PyTorch, one element set to zero": lambda: one.zero_(),
        "F.linear, BF16": lambda: torch.nn.functional.linear(x, weight),
        "Comfy Kitchen, quantise and matmul": comfy_linear(x, weight),
    }
    times = microseconds({name: call for name, call in calls.items() if call is not None})
    for name in calls:
        print(f"{name:36} {f'{times[name]:9.2f}' if name in times else 'not installed'}")
    print(f"device memory beside x, weight and y at {FULL_ROWS:,} rows, bytes: {memory_beyond(w)}")
    imported, loaded, total = first_result(n, k, m, paths, arguments.arch)
    print(f"fresh process, ms: import {imported:.1f}, load {loaded:.1f}, to the first result {total:.1f}")
    return 0
