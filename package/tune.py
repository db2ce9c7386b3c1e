"""``python -m ringfp4.tune``: measure the kernels that are loaded and remember the fastest.

Afterwards ``schedule="auto"`` uses them on this device, with this driver and these artefacts.
Nothing is compiled.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ringfp4 import runtime
from ringfp4.errors import RingFP4Error
from ringfp4.runtime.tuning import ROWS, tune


def shape(text: str) -> tuple[int, int]:
    k, _, n = text.partition("x")
    return int(n), int(k)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ringfp4.tune", description=__doc__)
    parser.add_argument("--device", type=int, help="ordinal, default the current one")
    parser.add_argument("--cubins", type=Path, nargs="+", help="artefact folders, default the package's")
    parser.add_argument("--arch", help="only this architecture's kernels")
    parser.add_argument("--linear", type=shape, nargs="+", metavar="KxN", help="default: all that are served")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="each M to measure")
    options = parser.parse_args(argv)
    try:
        if options.cubins or options.arch:
            runtime.load(options.device, options.cubins, options.arch)
        tune(options.device, options.linear, options.rows, lambda line: print(line, flush=True))
    except (RingFP4Error, OSError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
