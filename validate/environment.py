"""What a report must say about the machine it was made on."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

import ringfp4
import torch
from ringfp4.validate import comfy

_QUERY = (
    "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,"
    "temperature.gpu,pstate"
)


def gpu_state() -> dict[str, str]:
    """nvidia-smi's view of the GPUs: driver, clocks, power, temperature; why there is none otherwise."""
    try:
        found = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": f"unavailable: {error}"}
    values = [part.strip() for part in found.strip().splitlines()[0].split(",")]
    return dict(zip(_QUERY.split(","), values, strict=False))


def describe() -> dict[str, Any]:
    """Device, driver, clocks and versions, as JSON can hold them."""
    device: dict[str, Any] = {"cuda": torch.cuda.is_available()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "machine": platform.machine(),
        "device": device,
        "gpu_state": gpu_state(),
        "versions": {
            "python": platform.python_version(),
            "ringfp4": ringfp4.__version__,
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "comfy-kitchen": comfy.version(),
        },
    }
