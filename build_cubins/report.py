"""Tables for people: what was built, and what its machine code is made of."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from ringfp4.build_cubins.compiler import Built
from ringfp4.build_cubins.job import Job
from ringfp4.build_cubins.sass import TENSOR


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to width; all but the first two to the right."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    rule = ["---"] * 2 + ["---:"] * (len(header) - 2)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, rule, *rows))


def built_table(results: Mapping[Job, Built]) -> str:
    """One line a kernel: kernel, arch, registers, spills, smem, tensor instructions, size."""
    header = ("kernel", "arch", "registers", "spills", "smem", "tensor", "size")
    rows = [
        (
            job.config.name,
            job.arch,
            built.elf.registers,
            built.elf.stack_bytes,
            job.config.smem_bytes,
            built.sass.count(TENSOR.pattern),
            len(built.image),
        )
        for job, built in sorted(results.items(), key=lambda item: item[0].file)
    ]
    return text_table(header, rows)


class Progress:
    """A bar on a terminal, one line a kernel elsewhere."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.count = total, 0
        self.stream = stream if stream is not None else sys.stderr
        self.bar = self.stream.isatty()

    def done(self, job: Job, outcome: str) -> None:
        self.count += 1
        if self.bar:
            filled = 30 * self.count // self.total
            bar = "#" * filled + "." * (30 - filled)
            self.stream.write(f"\r\x1b[K[{bar}] {self.count}/{self.total} {job.label}")
            if self.count == self.total:
                self.stream.write("\r\x1b[K")
        else:
            self.stream.write(f"[{self.count}/{self.total}] {job.label} {outcome}\n")
        self.stream.flush()
