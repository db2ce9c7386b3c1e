"""Checks what the built wheels carry. Usage: python wheels/check_contents.py FOLDER"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

CUBINS = "ringfp4/runtime/cubins/"
# By the machine at the end of a wheel's name. The twin is for tests and never shipped.
SHIPPED_ARCHS = {"x86_64": {"sm_121a", "sm_120f", "sm_90a"}, "aarch64": {"sm_121a", "sm_120f"}}
NEEDED = {
    "ringfp4/__init__.py",
    "ringfp4/__main__.py",
    "ringfp4/build_cubins/__main__.py",
    "ringfp4/dsl/config/base.py",
    "ringfp4/runtime/__init__.py",
    "ringfp4/runtime/_core.abi3.so",
    CUBINS + "manifest.json",
}
# A test, the DSL's own files, C++ sources, a file that only this machine has.
FORBIDDEN = re.compile(
    r"(^|/)(tests?|src|cutlass|nvidia_cutlass_dsl|__pycache__)/|(^|/)test_|\.(cpp|h|pyc|ptx|sass)$"
)
NVIDIA_NOTICE = re.compile(rb"Copyright.{0,40}NVIDIA|SPDX-License-Identifier: LicenseRef-NvidiaProprietary")
MAX_BYTES = 8 * 2**20


def artefact_problems(wheel: zipfile.ZipFile, shipped: set[str]) -> list[str]:
    """Every disagreement between the manifest, the cubins beside it, and what is to be shipped."""
    kernels = json.loads(wheel.read(CUBINS + "manifest.json"))["kernels"]
    problems = []
    if (archs := {kernel["arch"] for kernel in kernels}) != shipped:
        problems.append(f"artefacts for {sorted(archs)}, expected {sorted(shipped)}")
    listed = {CUBINS + kernel["file"]: kernel["sha256"] for kernel in kernels}
    present = {name for name in wheel.namelist() if name.startswith(CUBINS) and name.endswith(".cubin")}
    problems += [f"{name} is in the manifest or the wheel, but not in both" for name in present ^ set(listed)]
    for name in present & set(listed):
        if hashlib.sha256(wheel.read(name)).hexdigest() != listed[name]:
            problems.append(f"{name} does not have the manifest's SHA-256")
    return problems


def wheel_problems(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        problems = [f"{name} is missing" for name in sorted(NEEDED - names)]
        problems += [f"{name} does not belong here" for name in sorted(names) if FORBIDDEN.search(name)]
        problems += [
            f"{name} carries NVIDIA's copyright notice"
            for name in sorted(names)
            if name.endswith(".py") and NVIDIA_NOTICE.search(wheel.read(name))
        ]
        if CUBINS + "manifest.json" in names:
            shipped = next((a for machine, a in SHIPPED_ARCHS.items() if path.stem.endswith(machine)), set())
            problems += artefact_problems(wheel, shipped)
    if path.stat().st_size > MAX_BYTES:
        problems.append(f"{path.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
    return problems


def cubins(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".cubin")}


def differing(wheels: list[Path]) -> list[str]:
    """Cubins that two wheels have under one name, but not with the same bytes."""
    first: dict[str, bytes] = {}
    return [
        f"{name} differs between wheels"
        for path in wheels
        for name, image in cubins(path).items()
        if first.setdefault(name, image) != image
    ]


def main(folder: Path) -> int:
    wheels = sorted(folder.glob("*.whl"))
    failed = len(wheels) < 2
    if failed:
        print(f"expected a wheel for x86_64 and one for aarch64 in {folder}, got {[w.name for w in wheels]}")
    for path in wheels:
        problems = wheel_problems(path)
        failed |= bool(problems)
        verdict = "; ".join(problems) or "contents as they should be"
        print(f"{path.name}: {path.stat().st_size:,} bytes, {verdict}")
    for problem in differing(wheels):
        failed = True
        print(problem)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
