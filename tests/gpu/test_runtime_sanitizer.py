"""Leaks, as compute-sanitizer sees them: device memory left when the context is destroyed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runtime_cases
import torch
from gpu_checks import Gpu
from ringfp4 import runtime

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
CALLS = """
runtime.load(path=PATHS, arch=ARCH)
for _ in range(10_000):
    y = runtime.ring_linear(x, weight)
for _ in range(50):
    y = runtime.ring_linear(x, weight, ring=runtime.Ring(128, K), schedule="ring")
torch.cuda.synchronize()
del y
runtime.unload()
"""
TEARDOWN = """
import ctypes, gc
from ringfp4.runtime import reference
del x, weight
reference.rcp_ulp_table.cache_clear()  # used to quantise the weight
gc.collect()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxReset_v2(0) == 0
print("reset", flush=True)
os._exit(0)  # PyTorch's own teardown would find its context gone
"""


@pytest.mark.timeout(120, method="thread")
def test_ten_thousand_calls_need_the_memory_of_a_hundred(gpu: Gpu) -> None:
    case = runtime_cases.make_case(gpu)
    x = case.x(300)

    def used_after(calls: int) -> tuple[int, int]:
        """Bytes that tensors have, and that PyTorch holds for them."""
        for i in range(calls):
            ring = runtime.Ring(128, case.k) if i % 100 == 0 else None
            case.y(x, schedule="auto" if ring is None else "ring", ring=ring)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    assert used_after(100) == used_after(10_000)


@pytest.mark.skipif(not Path(SANITIZER).exists(), reason="no compute-sanitizer")
@pytest.mark.timeout(240, method="thread")
def test_ten_thousand_calls_leak_no_device_memory(gpu: Gpu, request: pytest.FixtureRequest) -> None:
    """No more than PyTorch alone leaves behind: some bytes of its own."""
    case = runtime_cases.make_case(gpu)
    paths = [str(Path(path).resolve()) for path in request.config.getoption("--cubins") or []]
    arch = request.config.getoption("--arch")
    preamble = runtime_cases.PREAMBLE.format(n=case.n, k=case.k, paths=paths, arch=arch)
    assert leaks(preamble + CALLS + TEARDOWN) == leaks(preamble + TEARDOWN)


def leaks(script: str) -> str:
    """The sanitizer's summary, such as ``8 bytes leaked in 1 allocations``."""
    # Allocations are watched; the kernels run as they are, so that this takes seconds. Errors of the API
    # are not leaks, and a loader asks for one parameter too many to learn how many there are. Backtraces
    # would keep the Python frames of all calls alive, with everything in them.
    tool = [SANITIZER, "--tool", "memcheck", "--leak-check", "full", "--report-api-errors", "no"]
    tool += ["--show-backtrace", "no", "--kernel-name-exclude", "regex=.*"]
    done = subprocess.run(
        [*tool, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=110,
        env=dict(os.environ),
        check=False,
    )
    assert "reset" in done.stdout, done.stdout + done.stderr
    return done.stdout.split("LEAK SUMMARY: ")[1].splitlines()[0]
