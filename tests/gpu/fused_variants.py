"""Builds the artefacts of test_fused.py: fused kernels that no release contains.

    python tests/gpu/fused_variants.py --arch twin --out DIR

Rings as small as the protocol allows, kernels with random delays, one that gives up waiting soon,
and manifest entries that launch a kernel with few CTAs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfp4.build_cubins.cache import default_cache
from ringfp4.build_cubins.checks import PTXAS, refusal
from ringfp4.build_cubins.compiler import Compiler, raise_failed
from ringfp4.build_cubins.job import Job, plan_jobs
from ringfp4.build_cubins.manifest import manifest, write_folder
from ringfp4.build_cubins.sources import source_hash
from ringfp4.dsl.config import Linear
from ringfp4.dsl.config.ring import HopperRingGemmConfig, RingFields, RingGemmConfig

LINEAR = Linear("fused", k=896, n=384)  # seven K chunks of one 128-column step, three n tiles
GRIDS = (1, 2, 7, 60)
# (m tiles of a group, slots, delays)
RINGS = (
    (1, 1, False),
    (1, 1, True),
    (1, 2, True),
    (2, 3, True),
    (2, 4, True),
    (3, 3, True),
    (8, 16, True),
)
GIVES_UP = {"slots": 4, "first": 1, "poll_limit": 4096}  # and groups of 3


def configs(arch: str) -> list[RingFields]:
    kind = HopperRingGemmConfig if arch == "sm_90a" else RingGemmConfig
    small = []
    for group, slots, jitter in RINGS:
        config = kind.for_linear(LINEAR.n, LINEAR.k, group=group, jitter=jitter)
        small.append(replace(config, slots=slots))
    return [*small, replace(kind.for_linear(LINEAR.n, LINEAR.k, group=3), **GIVES_UP)]


def with_grid(entry: dict[str, Any], ctas: int) -> dict[str, Any]:
    grid = {"rows_per_item": 1 << 20, "items": ctas, "ctas_per_sm": 1}
    return entry | {"name": f"{entry['name']}_ctas{ctas}", "grid": grid}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    jobs = plan_jobs([LINEAR], [options.arch])
    jobs += [Job(config, options.arch) for config in configs(options.arch)]
    results, failures = Compiler(default_cache(), 2).run(jobs)
    failures |= {job: why for job, built in results.items() if (why := refusal(job, built, PTXAS))}
    raise_failed(failures)
    content = manifest(results, source_hash(), PTXAS)
    rings = [entry for entry in content["kernels"] if entry["kind"] == "ring_gemm"]
    content["kernels"] += [
        with_grid(entry, ctas)
        for entry in rings
        for ctas in GRIDS
        if entry["config"]["poll_limit"] != GIVES_UP["poll_limit"]
    ]
    write_folder(options.out, results, content)
    print(f"{len(content['kernels'])} entries in {options.out}")


if __name__ == "__main__":
    main()
