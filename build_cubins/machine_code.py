"""What the machine code of built cubins is made of: ``python -m ringfp4.build_cubins.machine_code DIR``.

Prints, or with ``--out FILE`` writes, the page docs/machine_code.md, from the cubins themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfp4.build_cubins.elf import Cubin, read_cubin
from ringfp4.build_cubins.report import markdown_table
from ringfp4.build_cubins.sass import TENSOR, Sass, count, read_sass
from ringfp4.build_cubins.tools import disassemble
from ringfp4.errors import RingFP4Error
from ringfp4.files import write_atomically

INTRODUCTION = """\
# Machine code

Read from the cubins of `shapes/h3.toml`; made by

    python -m ringfp4.build_cubins --out cubins
    python -m ringfp4.build_cubins.machine_code cubins --out docs/machine_code.md

and held by tests/test_machine_code.py. Counts under *main loop* are of the innermost loop with
the tensor instructions, for one warp; in the block-scaled kernels it is one K step of 128.
`per MMA` is instructions of that loop for each tensor instruction in it, counting the no-ops that
ptxas puts between FP4 MMAs. *Local* is local-memory loads and stores (spills), *setmaxnreg* the
`USETMAXREG` instructions, *smem* what a CTA is launched with, in bytes. Architectures share a row
where all of it agrees.
"""
HEADER = (
    *("kernel", "ELF architecture", "tensor instruction", "in main loop", "LDSM", "LDS", "all", "per MMA"),
    *("setmaxnreg", "local", "registers", "smem", "barriers", "bytes"),
)


@dataclass(frozen=True)
class MachineCode:
    """One cubin: its manifest entry, its ELF's facts, its instructions."""

    entry: dict[str, Any]
    elf: Cubin
    sass: Sass

    @property
    def tensor_opcode(self) -> str:
        """The tensor instruction of the main loop, "" if there is none."""
        return next((opcode for opcode in self.sass.main_loop() if TENSOR.match(opcode)), "")

    def row(self) -> tuple[object, ...]:
        """The table's columns after the architecture."""
        loop = self.sass.main_loop()
        tensor = count(loop, TENSOR.pattern)
        return (
            f"`{self.tensor_opcode}`" if tensor else "",
            *((tensor, count(loop, "LDSM"), count(loop, r"LDS\b"), loop.total()) if tensor else ("",) * 4),
            f"{loop.total() / tensor:.2f}" if tensor else "",
            self.sass.count("USETMAXREG"),
            self.sass.count(r"(LDL|STL)\b"),
            self.elf.registers,
            self.entry["smem_bytes"] + self.elf.static_smem,
            self.elf.barriers,
            self.entry["size_bytes"],
        )


def read_folder(folder: Path) -> list[MachineCode]:
    """Every cubin that the folder's manifest lists."""
    entries = json.loads((folder / "manifest.json").read_text())["kernels"]

    def read(entry: dict[str, Any]) -> MachineCode:
        file = folder / entry["file"]
        return MachineCode(entry, read_cubin(file.read_bytes()), read_sass(disassemble(file)))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(read, entries))


def page(kernels: Sequence[MachineCode]) -> str:
    """docs/machine_code.md."""
    archs: dict[tuple[object, ...], list[str]] = {}
    for kernel in kernels:
        archs.setdefault((kernel.entry["name"], *kernel.row()), []).append(kernel.elf.arch)
    rows = [
        (f"`{name}`", ", ".join(sorted(archs[name, *rest])), *rest) for name, *rest in sorted(archs, key=str)
    ]
    return f"{INTRODUCTION}\n{markdown_table(HEADER, rows)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ringfp4.build_cubins.machine_code", description=__doc__)
    parser.add_argument("folder", type=Path, help="what python -m ringfp4.build_cubins wrote")
    parser.add_argument("--out", type=Path, help="file to write instead of printing")
    options = parser.parse_args(arguments)
    try:
        text = page(read_folder(options.folder))
    except (OSError, RingFP4Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out, text.encode())
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
