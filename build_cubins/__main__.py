"""Command line of the builder; ``--help`` lists the options, docs/building.md explains them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ringfp4.build_cubins.cache import default_cache
from ringfp4.build_cubins.checks import PTXAS, refusal
from ringfp4.build_cubins.compiler import Built, Compiler, raise_failed
from ringfp4.build_cubins.job import Job, plan_jobs
from ringfp4.build_cubins.manifest import KEEP, manifest, refuse_foreign, write_folder
from ringfp4.build_cubins.report import Progress, built_table
from ringfp4.build_cubins.shapes import Request, load_shapes, shipped_names
from ringfp4.build_cubins.sources import source_hash
from ringfp4.build_cubins.tools import DSL, NVDISASM, version
from ringfp4.errors import BuildError, RingFP4Error


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ringfp4.build_cubins", description="Compile the kernels of a model's linears."
    )
    shipped = ", ".join(shipped_names())
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="FILE", help=f"shapes files, or of {shipped}; default h3"
    )
    parser.add_argument(
        "--linear", nargs="+", default=[], metavar="NAME=KxN", help="linears given here instead of in a file"
    )
    parser.add_argument(
        "--arch", nargs="+", default=[], help="sm_121a, sm_120f, sm_90a, twin; default: what the file says"
    )
    parser.add_argument("--out", type=Path, default=Path("cubins"), help="artefact folder; default cubins")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiles at a time")
    parser.add_argument("--force", action="store_true", help="compile even what is in the cache")
    parser.add_argument("--cache", type=Path, default=default_cache(), help=f"default {default_cache()}")
    parser.add_argument(
        "--keep", nargs="+", default=[], choices=KEEP, help="also write these listings beside the cubins"
    )
    parser.add_argument("--ptxas", default=PTXAS, help=f"assembler release to insist on; default {PTXAS}")
    parsed = parser.parse_args(arguments)
    if parsed.jobs < 1:
        parser.error("--jobs must be at least 1")
    return parsed


def build(
    request: Request,
    *,
    cache: Path | None,
    threads: int = os.cpu_count() or 1,
    force: bool = False,
    ptxas: str = PTXAS,
) -> dict[Job, Built]:
    """Compile and check every kernel of ``request``; raises BuildError naming each that failed."""
    for tool in (DSL, NVDISASM):  # before anything starts, an error naming the extra
        version(tool)
    jobs = plan_jobs(request.linears, request.archs)
    # A worker is for one architecture; within it the slow compiles first, so that the last are short.
    order = sorted(jobs, key=lambda job: (job.arch, job.config.n == 0, job.file))
    results, failures = Compiler(cache, threads, force).run(order, Progress(len(jobs)).done)
    refusals = {job: refusal(job, built, ptxas) for job, built in results.items()}
    failures |= {job: f"must not ship: {why}" for job, why in refusals.items() if why}
    raise_failed(failures)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    start = time.monotonic()
    try:
        sources = source_hash()
        request = load_shapes(options.shapes, options.linear, options.arch)
        refuse_foreign(options.out)  # before minutes of compiling
        results = build(
            request, cache=options.cache, threads=options.jobs, force=options.force, ptxas=options.ptxas
        )
        if source_hash() != sources:
            raise BuildError("the sources changed during the build", remedy="run it again")
        write_folder(options.out, results, manifest(results, sources, options.ptxas), tuple(options.keep))
    except (RingFP4Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    print(built_table(results))
    size = sum(len(built.image) for built in results.values())
    seconds = time.monotonic() - start
    print(f"{len(results)} kernels, {size:,} bytes, in {options.out}; {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
