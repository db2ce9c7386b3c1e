"""Builds the recording driver, writes artefact folders that it can load, reads what it recorded."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ringfp4
from ringfp4.dsl.config.base import KernelConfig
from ringfp4.dsl.config.gemm import GemmConfig
from ringfp4.dsl.config.quantise import AbsmaxConfig, PackConfig
from ringfp4.runtime import Nvfp4Weight

N, K, M = 256, 128, 300  # a small linear
X, Y, W, W_SF, W_SCALE, SCALE, PREPARED = (i << 40 for i in range(1, 8))  # far apart
SOURCE = Path(__file__).parent / "fake_driver.c"
SMS = 48  # of the fake device
PARAM_BYTES = {"tensor_map": 128, "pointer": 8, "i64": 8, "i32": 4}
QUERIES = ("cuCtxGetCurrent", "cuStreamGetCaptureInfo")  # without effect, left out of logs


def compile_driver(folder: Path, *options: str) -> Path:
    library = folder / "libfakecuda.so"
    compiler = shutil.which("cc")
    assert compiler, "the driver tests need a C compiler called cc"
    command = [compiler, "-shared", "-fPIC", "-O1", *options, "-o", str(library), str(SOURCE), "-lpthread"]
    subprocess.run(command, check=True)
    return library


class FakeDriver:
    """The library as tests control it; the extension opens the same one by ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.fake_log.restype = ctypes.c_char_p
        self.library.fake_set_capture.argtypes = [ctypes.c_size_t, ctypes.c_uint64]
        self.library.fake_reset()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, f"fake_{name}")

        def call(*arguments: object) -> Any:
            return function(*(a.encode() if isinstance(a, str) else a for a in arguments))

        return call

    def log(self, *calls: str) -> list[str]:
        """Recorded lines, of these calls only if any are named; clears the record."""
        lines = self.library.fake_log().decode().splitlines()
        self.library.fake_clear_log()
        wanted = calls or None
        return [
            line
            for line in lines
            if (name := line.split()[0]) not in QUERIES and (wanted is None or name in wanted)
        ]

    def launches(self) -> list[dict[str, str]]:
        """The launches recorded, as {kernel, grid, stream, params, ...}; clears the record."""
        return [
            {"kernel": line.split()[1], **dict(re.findall(r"(\w+)=(\S*)", line))}
            for line in self.log("cuLaunchKernelEx")
        ]

    def live(self) -> dict[str, int]:
        """What the extension holds of the driver, once Python has let go of its garbage."""
        gc.collect()
        kinds = ("memory", "modules", "events", "contexts", "host")
        return {kind: self.library.fake_live(kind.encode()) for kind in kinds}


class Stand:
    """A stand-in for a CUDA tensor, which a machine without a GPU cannot make."""

    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


def weight_of(**changes: object) -> Nvfp4Weight:
    weight = Nvfp4Weight.__new__(Nvfp4Weight)
    weight.n, weight.k, weight.device = N, K, Stand.device
    weight.qdata, weight.block_scale, weight.tensor_scale = Stand(W), Stand(W_SF), Stand(W_SCALE)
    weight.prepared = None
    for name, value in changes.items():
        setattr(weight, name, value)
    return weight


def linear_configs(n: int, k: int) -> list[KernelConfig]:
    return [AbsmaxConfig(k=k), PackConfig(k=k), GemmConfig.with_tile(n, k)]


def fake_cubin(config: KernelConfig) -> bytes:
    sizes = [PARAM_BYTES.get(p.kind, p.size) for p in config.params()]
    return f"FAKE {config.name} {' '.join(map(str, sizes))}\n".encode()


def kernel_json(config: KernelConfig, arch: str) -> dict[str, Any]:
    handed_on = {"partial_bytes": config.partial_bytes} if config.partial_bytes else {}
    return handed_on | {
        "name": config.name,
        "kind": config.kind,
        "arch": arch,
        "roles": ["test"],
        "n": config.n,
        "k": config.k,
        "tile": list(config.tile),
        "file": f"{config.name}.{arch}.cubin",
        "sha256": hashlib.sha256(fake_cubin(config)).hexdigest(),
        "entry": config.name,
        "threads": config.threads,
        "smem_bytes": config.smem_bytes,
        "params": [param.to_json() for param in config.params()],
        "grid": asdict(config.grid),
        "cluster": list(config.cluster),
        "programmatic": config.programmatic,
        "config": asdict(config),
    }


def write_folder(folder: Path, configs: Iterable[KernelConfig], arch: str = "sm_121a") -> Path:
    """An artefact folder that the fake driver can load; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    kernels = []
    for config in configs:
        described = kernel_json(config, arch)
        (folder / described["file"]).write_bytes(fake_cubin(config))
        kernels.append(described)
    content = {"format": 1, "package_version": ringfp4.__version__, "source_hash": "", "kernels": kernels}
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder
