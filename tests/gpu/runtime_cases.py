"""What the runtime's GPU tests share: a linear that the artefacts serve, scripts in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gpu_checks import Gpu
from ringfp4 import runtime

SERVED = ("small", "attn_out", "qkv")  # the first that there are cubins for


@dataclass(frozen=True)
class Case:
    """One linear, and inputs of odd sizes for it."""

    n: int
    k: int
    weight: runtime.Nvfp4Weight
    schedules: tuple[str, ...]

    def x(self, m: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(1000 * m + seed)
        return torch.randn(m, self.k, device="cuda", generator=generator).bfloat16()

    def y(self, x: torch.Tensor, **options: object) -> torch.Tensor:
        return runtime.ring_linear(x, self.weight, **options)  # type: ignore[arg-type]


def make_case(gpu: Gpu) -> Case:
    """The smallest linear that the loaded artefacts serve, with a random weight."""
    name = next((name for name in SERVED if gpu.names[name] in gpu.linears), None)
    if name is None:
        pytest.skip("no cubins for any of " + ", ".join(SERVED))
    n, k = gpu.names[name]
    generator = torch.Generator("cuda").manual_seed(1)
    weight = runtime.Nvfp4Weight.from_bf16(torch.randn(n, k, device="cuda", generator=generator).bfloat16())
    weight.prepare()
    return Case(n, k, weight, gpu.linears[n, k])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A boolean on the device: no synchronisation, so that streams stay busy."""
    return (a.view(torch.int16) == b.view(torch.int16)).all()


PREAMBLE = """
import os, sys, time
import torch
from ringfp4 import errors, runtime
torch.manual_seed(0)
N, K = {n}, {k}
PATHS, ARCH = {paths!r} or None, {arch!r}
weight = runtime.Nvfp4Weight.from_bf16(torch.randn(N, K, device="cuda").bfloat16())
x = torch.randn(300, K, device="cuda").bfloat16()
"""


def in_fresh_process(config: pytest.Config, case: Case, body: str) -> str:
    """Run ``body`` after the preamble in a new interpreter; returns stdout, fails on anything else."""
    paths = config.getoption("--cubins")
    paths = [str(Path(p).resolve()) for p in ([paths] if isinstance(paths, str) else paths or [])]
    script = PREAMBLE.format(n=case.n, k=case.k, paths=paths, arch=config.getoption("--arch"))
    done = subprocess.run(
        [sys.executable, "-c", script + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=50,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout
