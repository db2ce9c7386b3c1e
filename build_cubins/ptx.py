"""The few facts of a PTX module that the builder compares with the configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ringfp4.errors import BuildError

_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True)
class Ptx:
    isa: str  # "8.8"
    target: str  # "sm_121a"
    entry: str
    params: tuple[int, ...]  # bytes each


def read_ptx(text: str) -> Ptx:
    """Parse a module with exactly one entry; BuildError otherwise."""
    isa = re.search(r"^\.version\s+(\S+)", text, re.MULTILINE)
    target = re.search(r"^\.target\s+([\w.]+)", text, re.MULTILINE)
    entries = re.findall(r"\.entry\s+(\w+)\s*\(([^)]*)\)", text)
    if isa is None or target is None or len(entries) != 1:
        raise BuildError(
            "unexpected PTX", expected=".version, .target and one entry", got=f"{len(entries)} entries"
        )
    entry, params = entries[0]
    return Ptx(isa[1], target[1], entry, tuple(_param_bytes(p) for p in params.split(",") if p.strip()))


def _param_bytes(declaration: str) -> int:
    # .param [.align 8] .b8 name[128], or .param .u64 [.ptr .global .align 4] name
    found = re.search(r"\.[bfsu](8|16|32|64)\b[^\[]*(?:\[(\d+)\])?$", declaration.strip())
    if found is None:
        raise BuildError("unexpected PTX parameter", got=declaration.strip())
    return _BYTES[found[1]] * int(found[2] or 1)
