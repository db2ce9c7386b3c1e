"""Compiles kernels for one architecture: ``python -m ringfp4.build_cubins.worker ARCH DUMP``.

The DSL reads its architecture from the environment when it is imported, which takes longer
than a compile. So a worker imports it once, then forks for each task: every compile has a
process of its own, in the same state. A line on standard input names a folder that holds
``task.pickle``; the child writes ``built.json`` and ``log`` there, and its exit status is
answered on standard output.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import NoReturn

from ringfp4.build_cubins.tools import disassemble


def serve(arch: str, dump: str) -> None:
    os.environ.update(
        CUTE_DSL_ARCH=arch,
        CUTE_DSL_KEEP_PTX="1",
        CUTE_DSL_KEEP_CUBIN="1",
        CUTE_DSL_DUMP_DIR=dump,
        TMPDIR=dump,  # where the DSL leaves a folder of its own
        OPENBLAS_NUM_THREADS="1",  # numpy would start threads, which do not survive a fork
    )
    importlib.import_module("cutlass.cute")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(Path(line.rstrip("\n")))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(folder: Path) -> NoReturn:
    """The forked child: one compile, then exit without the parent's clean-up."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        _compile(folder)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # the DSL's, which explains its errors
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _compile(folder: Path) -> None:
    module, config, twin = pickle.loads((folder / "task.pickle").read_bytes())
    compiled = importlib.import_module(module).compile_kernel(config)
    ptx, cubin = compiled.__ptx__, compiled.__cubin__
    if twin:
        from ringfp4.build_cubins.twin import assemble, rewrite

        ptx = rewrite(ptx)
        cubin = assemble(ptx)
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    parts = {"ptx": ptx, "cubin": base64.b64encode(cubin).decode(), "listing": disassemble(file)}
    (folder / "built.json").write_text(json.dumps(parts))


if __name__ == "__main__":
    serve(*sys.argv[1:])
