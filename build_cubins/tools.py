"""The installed build tools: their versions, and nvdisasm."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

from ringfp4.errors import BuildError

DSL = "nvidia-cutlass-dsl"
NVDISASM = "nvidia-cuda-nvdisasm"
REMEDY = "pip install 'ringfp4[build]'"


def version(distribution: str) -> str:
    """An installed distribution's version; BuildError naming the extra if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildError(f"{distribution} is not installed", remedy=REMEDY) from error


def tool_versions() -> dict[str, str]:
    """Every installed distribution whose version can change a cubin or its listing."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        if name.startswith((DSL, NVDISASM, "nvidia-cuda-nvcc")):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def disassemble(cubin: Path) -> str:
    """nvdisasm's listing of the code of ``cubin`` (without its data-flow analysis, which costs time)."""
    result = subprocess.run([_nvdisasm(), "-c", "-ndf", cubin], capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"nvdisasm failed on {cubin.name}", got=result.stderr.strip())
    return result.stdout


def _nvdisasm() -> Path:
    version(NVDISASM)
    for file in importlib.metadata.files(NVDISASM) or ():
        if file.stem == "nvdisasm":
            return Path(str(file.locate()))
    raise BuildError(f"{NVDISASM} holds no nvdisasm", remedy=f"pip install --force-reinstall {NVDISASM}")
