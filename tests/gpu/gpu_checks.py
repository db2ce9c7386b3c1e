"""One check of a linear: every schedule and tile variant, packed bytes, poison and guards."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from ringfp4 import runtime
from ringfp4.runtime import devices, lowlevel, reference
from ringfp4.validate import linear_cases as cases

GUARD = 4096  # elements before and after what a kernel may write
POISON_OUT = 0x7FC1  # a BF16 NaN that no kernel produces
Shape = tuple[int, int]  # N, K


class Gpu:
    """The artefacts under test, on the current device."""

    def __init__(self, repository: Path) -> None:
        artifacts = devices.artifacts(torch.cuda.current_device())
        self.table = artifacts.table
        self.linears = self.table.linears()
        self.names: dict[str, Shape] = {}
        for file in (repository / "shapes" / "h3.toml", repository / "tests" / "gpu" / "shapes.toml"):
            for linear in tomllib.loads(file.read_text())["linear"]:
                self.names[linear["name"]] = (linear["n"], linear["k"])

    def shape(self, name: str) -> Shape:
        """N, K of a linear in the shapes files; skips the test if the artefacts do not have it."""
        shape = self.names[name]
        if shape not in self.linears:
            pytest.skip(f"no cubins for {name}: N = {shape[0]}, K = {shape[1]}")
        return shape

    def schedules(self, shape: Shape) -> tuple[str, ...]:
        return self.linears[shape]


class GuardedOutput:
    """BF16 [m, n], filled with NaN, between two guards."""

    def __init__(self, m: int, n: int) -> None:
        self.buffer = torch.full((2 * GUARD + m * n,), POISON_OUT, dtype=torch.int16, device="cuda")
        self.y = self.buffer[GUARD : GUARD + m * n].view(torch.bfloat16).view(m, n)

    def intact(self) -> bool:
        return bool((self.buffer[:GUARD] == POISON_OUT).all() and (self.buffer[-GUARD:] == POISON_OUT).all())


class GuardedSlots:
    """Slots for ``pack`` filled with ``poison`` (0x7F and 0xFF are NaN block scales), between guards."""

    def __init__(self, m: int, k: int, poison: int) -> None:
        self.size, self.poison = lowlevel.slot_bytes(m, k), poison
        self.buffer = torch.full((2 * GUARD + self.size,), poison, dtype=torch.uint8, device="cuda")
        self.slots = self.buffer[GUARD : GUARD + self.size]

    def intact(self) -> bool:
        return bool(
            (self.buffer[:GUARD] == self.poison).all() and (self.buffer[-GUARD:] == self.poison).all()
        )


def weight_of(case: cases.Linear) -> runtime.Nvfp4Weight:
    w = case.weight
    return runtime.Nvfp4Weight(w.qdata, w.block_scale, w.tensor_scale)


def packed_equals(slots: GuardedSlots, x: torch.Tensor, scale: torch.Tensor) -> bool:
    """``pack`` of x gives the reference's bytes, padding scales included, and writes nothing else."""
    rows, k = x.shape
    data, sf = lowlevel.pack(x, scale, slots.slots)
    q, expected_sf = reference.quantise(x, scale)
    if sf is None:  # sm_90a: the same values as BF16
        values = reference.decode(q, reference.unswizzle(expected_sf, rows, k // reference.BLOCK)).bfloat16()
        same = torch.equal(data[:rows].view(torch.int16), values.view(torch.int16))
    else:
        same = torch.equal(data[:rows], q) and torch.equal(sf.flatten(), expected_sf.flatten())
    return same and slots.intact()


def run(case: cases.Linear, w: runtime.Nvfp4Weight, x: torch.Tensor, schedule: str) -> torch.Tensor:
    """One call into a poisoned, guarded output."""
    out = GuardedOutput(len(x), w.n)
    runtime.ring_linear(x, w, scale=case.scale, bias=case.bias, out=out.y, schedule=schedule)
    assert out.intact(), f"{schedule} wrote beyond its output"
    return out.y


def all_ways(gpu: Gpu, case: cases.Linear) -> torch.Tensor:
    """y of ``case``, after asserting that every schedule and GEMM variant gives the same bits."""
    m, n, k = case.shape
    w, x = weight_of(case), case.x
    for poison in (0x7F, 0xFF):
        slots = GuardedSlots(m, k, poison)
        assert packed_equals(slots, x, case.scale), "packed bytes differ from the reference's"
    first = run(case, w, x, "prepacked")
    for schedule in gpu.schedules((n, k)):
        same_bits(run(case, w, x, schedule), first, schedule)
    for kernel in lowlevel.variants("gemm", n, k):
        out = GuardedOutput(m, n)
        lowlevel.gemm(slots.slots, m, w, case.scale, case.bias, out.y, kernel)
        assert out.intact(), f"{kernel} wrote beyond its output"
        same_bits(out.y, first, kernel)
    return first


def same_bits(y: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    differing = int((y.view(torch.int16) != expected.view(torch.int16)).sum())
    assert differing == 0, f"{name}: {differing} of {y.numel()} elements differ"
