"""Kernels with one deliberate mistake each: ``python tests/gpu/mutants.py OUT``, on any machine.

Builds the twin of a small linear, changes one thing in the PTX of its GEMM, assembles it and
writes an artefact folder per mutant, and one without a change. test_mutants.py then shows on a
Hopper that the numeric checks notice every one of them: a check that cannot fail proves nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

N, K = 640, 512
GEMM = f"gemm_n{N}_k{K}_128x128x128"
UNCHANGED = "unchanged"
WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], %r\d+, 10000000;"


@dataclass(frozen=True)
class Mutation:
    """Replaces matches ``first`` to ``first + count`` of ``pattern`` (count 0: all that follow)."""

    pattern: str
    replacement: str
    first: int = 0
    count: int = 1

    def apply(self, ptx: str) -> str:
        """Raises ValueError if there is nothing to change."""
        matches = list(re.finditer(self.pattern, ptx))[self.first :]
        matches = matches[: self.count] if self.count else matches
        if not matches or (self.count and len(matches) != self.count):
            raise ValueError(f"{len(matches)} places match {self.pattern}")
        for match in reversed(matches):
            ptx = ptx[: match.start()] + match.expand(self.replacement) + ptx[match.end() :]
        return ptx


MUTATIONS = {
    "sfa_address": Mutation(r"(ld\.shared\.b32 %r\d+, \[%r\d+)\+512\]", r"\1+0]"),
    "sfb_address": Mutation(r"(ld\.shared\.v2\.b32 \{[^}]*\}, \[%r\d+)\+512\]", r"\1+0]"),
    "stage_of_the_load": Mutation(r"(shl\.b32\s+%r\d+, %r\d+), 13;", r"\1, 12;"),
    "stage_of_the_scales": Mutation(r"(shl\.b32\s+%r\d+, %r\d+), 10;", r"\1, 9;"),
    "sfa_row_coordinate": Mutation(
        r"(\[%r\d+\+81920\], \[%rd\d+, \{)(%r\d+), (%r\d+), (%r\d+)\}", r"\1\2, \3, \2}"
    ),
    "b_column_coordinate": Mutation(r"(\[%r\d+\+32768\], \[%rd\d+, \{)(%r\d+), (%r\d+)\}", r"\1\3, \3}"),
    "ldmatrix_address": Mutation(r"(ldmatrix[^\[]*\[%r\d+)\+1024\]", r"\1+0]"),
    "ldmatrix_registers": Mutation(r"(ldmatrix[^{]*\{)(%r\d+),(%r\d+),", r"\1\3,\2,"),
    "stmatrix_registers": Mutation(r"(stmatrix[^{]*\{)(%r\d+),(%r\d+),", r"\1\3,\2,"),
    "no_wait_for_a_free_stage": Mutation(WAIT, "setp.eq.u32 P1, 0, 0;"),
    "no_wait_for_the_loads": Mutation(WAIT, "setp.eq.u32 P1, 0, 0;", first=1, count=0),
    "no_wait_for_the_last_store": Mutation(
        r"cp\.async\.bulk\.wait_group\.read\s+1;\s+bar\.warp\.sync\s+-1;", "", count=0
    ),
    "no_barrier_before_the_store": Mutation(
        r"fence\.proxy\.async\.shared::cta;\s+bar\.warp\.sync\s+-1;", "", count=0
    ),
}


def build(out: Path) -> None:
    """One folder in ``out`` for every mutant, and one for the unchanged kernels."""
    from ringfp4.build_cubins.twin import assemble

    base = out / UNCHANGED
    command = [sys.executable, "-m", "ringfp4.build_cubins", "--linear", f"mutants={K}x{N}"]
    subprocess.run([*command, "--arch", "twin", "--keep", "ptx", "--out", str(base)], check=True)
    manifest = json.loads((base / "manifest.json").read_text())
    kept = [k for k in manifest["kernels"] if k["kind"] in ("absmax", "pack") or k["name"] == GEMM]
    (gemm,) = (k for k in kept if k["name"] == GEMM)
    ptx = (base / gemm["file"]).with_suffix(".ptx").read_text()
    for name, mutation in MUTATIONS.items():
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        image = assemble(mutation.apply(ptx))
        for kernel in kept:
            shutil.copy(base / kernel["file"], folder)
        (folder / gemm["file"]).write_bytes(image)
        changed = dict(gemm, sha256=hashlib.sha256(image).hexdigest())
        kernels = [changed if k is gemm else k for k in kept]
        (folder / "manifest.json").write_text(json.dumps(manifest | {"kernels": kernels}))
        print(f"{name}: built", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    build(parser.parse_args().out)
