"""Compiles one kernel: ``python -m ringfp4.build_cubins.worker OUT``, its task pickled on standard input.

A process of its own, because the DSL reads its architecture from the environment when it is
imported. Writes OUT, a JSON object with the PTX, the cubin (base64) and its disassembly.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import sys
import tempfile
from pathlib import Path

from ringfp4.build_cubins.tools import disassemble
from ringfp4.dsl.config.base import KernelConfig


def compile_config(module: str, config: KernelConfig, arch: str, dump: str) -> tuple[str, bytes]:
    """PTX and cubin of ``config`` for the DSL's ``arch``; must precede any import of the DSL."""
    os.environ.update(
        CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP_PTX="1", CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=dump
    )
    compiled = importlib.import_module(module).compile_kernel(config)
    return compiled.__ptx__, compiled.__cubin__


def main() -> None:
    out = Path(sys.argv[1])
    module, config, arch, twin = pickle.load(sys.stdin.buffer)
    with tempfile.TemporaryDirectory(prefix="ringfp4-") as folder:
        ptx, cubin = compile_config(module, config, arch, folder)
        if twin:
            from ringfp4.build_cubins.twin import assemble, rewrite

            ptx = rewrite(ptx)
            cubin = assemble(ptx)
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        listing = disassemble(file)
    out.write_text(json.dumps({"ptx": ptx, "cubin": base64.b64encode(cubin).decode(), "listing": listing}))


if __name__ == "__main__":
    main()
