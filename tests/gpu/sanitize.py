"""compute-sanitizer over the GPU tests: ``python tests/gpu/sanitize.py --cubins DIR [--arch ARCH]``.

memcheck, racecheck, synccheck and initcheck, each over the exact cases of the reduced shapes, of sm_12x
or of sm_90a, at M = 1, 33, 129, 2048 and more. The tests check the numbers as ever: a missing barrier
that no tool reports still gives wrong results. Exit status 0 if all four are clean.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
OUR_KERNELS = ("absmax_k", "pack_", "gemm_n")  # parts of their names; ring_gemm_n... too
FILES = ("test_linear.py", "test_hopper.py")
FINDINGS = 86  # exit status that means errors were found


def command(tool: str, arguments: argparse.Namespace) -> list[str]:
    # Loading a kernel asks the driver for one parameter too many, to learn how many there are: an
    # expected error of the API, which memcheck would report.
    line = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        str(FINDINGS),
        "--report-api-errors",
        "no",
    ]
    if tool != "initcheck":  # which must see every kernel that initialises memory
        for name in OUR_KERNELS:
            line += ["--kernel-name", f"kernel_substring={name}"]
    line += [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--timeout", "0"]
    line += [str(TESTS / name) for name in FILES]
    line += ["-k", arguments.tests, "--cubins", str(arguments.cubins)]
    return line + (["--arch", arguments.arch] if arguments.arch else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cubins", type=Path, required=True, help="folder with the reduced shapes")
    parser.add_argument("--arch", help="for instance twin")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument(
        "--tests", default="reduced_exact or every_tile_at_small", help="pytest -k expression"
    )
    parser.add_argument("--limit", type=int, default=1200, help="seconds for each tool")
    arguments = parser.parse_args()
    failed = 0
    for tool in arguments.tools:
        started = time.monotonic()
        # Each allocation from the driver, so that initcheck and memcheck see where it ends.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        line = ["timeout", str(arguments.limit), *command(tool, arguments)]
        result = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        passed = re.search(r"(\d+) passed", result.stdout)
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", result.stdout + result.stderr)
        clean = result.returncode == 0 and passed is not None
        failed += not clean
        verdict = "clean" if clean else f"FAILED (exit status {result.returncode})"
        tests = f"{passed[1] if passed else 0} tests passed"
        print(
            f"{tool}: {verdict}, {tests}, {time.monotonic() - started:.0f} s; {'; '.join(summary)}",
            flush=True,
        )
        if not clean:
            print(result.stdout[-4000:], result.stderr[-2000:], flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
