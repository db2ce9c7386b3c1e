"""The artefact folder: cubins and the manifest.json that describes them to the runtime."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ringfp4
from ringfp4.build_cubins.compiler import Built
from ringfp4.build_cubins.job import Job
from ringfp4.build_cubins.sass import TENSOR
from ringfp4.build_cubins.tools import DSL, version
from ringfp4.errors import BuildError

FORMAT = 1
MANIFEST = "manifest.json"
KEEP = ("ptx", "sass")  # what may be written beside the cubins for reading


def manifest(results: Mapping[Job, Built], sources: str, ptxas: str) -> dict[str, Any]:
    """The manifest of ``results``, made from ``sources`` (their hash).

    ``ptxas`` is the release to name where an ELF does not say which assembled it.
    """
    versions = sorted({built.elf.ptxas or ptxas for built in results.values()})
    return {
        "format": FORMAT,
        "package_version": ringfp4.__version__,
        "dsl_version": version(DSL),
        "ptxas_version": ", ".join(versions),
        "source_hash": sources,
        "kernels": [describe(job, results[job]) for job in sorted(results, key=lambda job: job.file)],
    }


def describe(job: Job, built: Built) -> dict[str, Any]:
    """A kernel's entry: all that a launch needs, and what was measured of the machine code."""
    config, elf = job.config, built.elf
    handed_on = {"partial_bytes": config.partial_bytes} if config.partial_bytes else {}
    return handed_on | {
        "name": config.name,
        "kind": config.kind,
        "arch": job.arch,
        "roles": list(job.roles),
        "n": config.n,
        "k": config.k,
        "tile": list(config.tile),
        "file": job.file,
        "sha256": hashlib.sha256(built.image).hexdigest(),
        "size_bytes": len(built.image),
        "entry": elf.entry,
        "threads": config.threads,
        "smem_bytes": config.smem_bytes,
        "registers": elf.registers,
        "spill_bytes": elf.stack_bytes,
        "tensor_instructions": built.sass.count(TENSOR.pattern),
        "params": [param.to_json() for param in config.params()],
        "grid": asdict(config.grid),
        "cluster": list(config.cluster),
        "programmatic": config.programmatic,
        "config": asdict(config),
    }


def write_folder(
    out: Path, results: Mapping[Job, Built], content: dict[str, Any], keep: tuple[str, ...] = ()
) -> None:
    """Put a complete folder at ``out`` by renaming: a reader sees the old one or the new one.

    BuildError if ``out`` exists and is not an artefact folder.
    """
    refuse_foreign(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        fresh, previous = Path(scratch) / "new", Path(scratch) / "old"
        fresh.mkdir()
        for job, built in results.items():
            (fresh / job.file).write_bytes(built.image)
            for suffix, text in (("ptx", built.ptx), ("sass", built.listing)):
                if suffix in keep:
                    (fresh / job.file).with_suffix(f".{suffix}").write_text(text)
        (fresh / MANIFEST).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        if out.exists():
            os.rename(out, previous)
        try:
            os.rename(fresh, out)
        except BaseException:
            if previous.exists() and not out.exists():
                os.rename(previous, out)
            raise


def refuse_foreign(out: Path) -> None:
    """BuildError unless ``out`` is new or one of this builder's: replacing it deletes what is in it."""
    suffixes = {".cubin", *(f".{suffix}" for suffix in KEEP)}
    if not out.exists():
        return
    remedy = "name another folder with --out"
    if not out.is_dir():
        raise BuildError(f"{out} exists", expected="a folder", got="a file", remedy=remedy)
    foreign = [f.name for f in out.iterdir() if f.name != MANIFEST and f.suffix not in suffixes]
    if foreign:
        got = ", ".join(sorted(foreign)[:5])
        raise BuildError(f"{out} holds other files", expected="cubins only", got=got, remedy=remedy)
