"""Leaks, as compute-sanitizer sees them: device memory left when the context is destroyed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import runtime_cases
from gpu_checks import Gpu

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
BODY = """
import ctypes, gc
runtime.load(path=PATHS, arch=ARCH)
for _ in range(10_000):
    y = runtime.ring_linear(x, weight)
for _ in range(50):
    y = runtime.ring_linear(x, weight, ring=runtime.Ring(128, K), schedule="ring")
torch.cuda.synchronize()
del x, y, weight
runtime.unload()
gc.collect()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0
assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxReset_v2(0) == 0
print("reset", flush=True)
os._exit(0)  # PyTorch's own teardown would find its context gone
"""


@pytest.mark.skipif(not Path(SANITIZER).exists(), reason="no compute-sanitizer")
@pytest.mark.timeout(120, method="thread")
def test_ten_thousand_calls_leak_no_device_memory(gpu: Gpu, request: pytest.FixtureRequest) -> None:
    case = runtime_cases.make_case(gpu)
    paths = [str(Path(path).resolve()) for path in request.config.getoption("--cubins") or []]
    arch = request.config.getoption("--arch")
    script = runtime_cases.PREAMBLE.format(n=case.n, k=case.k, paths=paths, arch=arch)
    # Allocations are watched; the kernels run as they are, so that this takes seconds.
    tool = [SANITIZER, "--tool", "memcheck", "--leak-check", "full", "--kernel-name-exclude", "regex=.*"]
    done = subprocess.run(
        [*tool, sys.executable, "-c", script + textwrap.dedent(BODY)],
        capture_output=True,
        text=True,
        timeout=110,
        env=dict(os.environ),
        check=False,
    )
    assert "reset" in done.stdout, done.stdout + done.stderr
    assert "LEAK SUMMARY: 0 bytes leaked in 0 allocations" in done.stdout, done.stdout
