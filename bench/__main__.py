"""``python -m bench [NAME] [arguments]``: run one benchmark, ``quantise`` if none is named."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from ringfp4.errors import RingFP4Error

_NOT_BENCHMARKS = ("__init__", "__main__", "harness")


def main(argv: list[str]) -> int:
    found = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in _NOT_BENCHMARKS)
    name, arguments = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("quantise", argv)
    if name not in found:
        print(f"no benchmark is called {name}; there are: {', '.join(found)}", file=sys.stderr)
        return 2
    try:
        status: int | None = importlib.import_module(f"bench.{name}").main(arguments)
    except RingFP4Error as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return status or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
