"""A QKV-shaped linear of MiniMax-H3 through ``runtime.ring_linear``, checked to the bit.

``python -m ringfp4.demo`` uses the GPU if the artefacts serve it, else the CPU reference. The
inputs are chosen so that quantising loses nothing and every partial sum is an integer below
2**24: whatever the order of accumulation, the result must equal float64's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from ringfp4 import runtime
from ringfp4.errors import RingFP4Error
from ringfp4.runtime import devices, reference
from ringfp4.runtime.plan import DEFAULT_CAPACITY_ROWS, round_up, slot_row_bytes

K, N = 5376, 21504
REQUEST_ROWS = 37_810  # tokens of the canonical H3 request
GPU_ROWS = DEFAULT_CAPACITY_ROWS + 946  # a full chunk of the ring and a ragged one, as in that request
CPU_ROWS = 8
CHECKED_ROWS = 16  # float64 products on the CPU are slow
WEIGHT_SCALE = 0.25
BLOCK = reference.BLOCK


def exact_activation(rows: int, random: torch.Generator) -> torch.Tensor:
    """BF16 [rows, K] that NVFP4 holds exactly: E2M1 values times 448 / 2**j, j a block's own.

    Each block contains 6 or -6, so its scale is 448 / 2**j; the tensor scale is 2688 / 2688 = 1.
    """
    codes = torch.randint(0, 16, (rows, K // BLOCK, BLOCK), generator=random)
    codes[..., 0] |= 7
    halvings = torch.randint(0, 4, (rows, K // BLOCK, 1), generator=random)
    halvings[0, 0] = 0
    return (reference.E2M1_VALUES[codes] * 448 / 2**halvings).view(rows, K).bfloat16()


def exact_weight(random: torch.Generator) -> tuple[runtime.Nvfp4Weight, torch.Tensor]:
    """A weight of -1, 0 and 1 with block scales 1/2 and 1, and its values as float32 [N, K]."""
    codes = torch.randint(0, 3, (N, K), generator=random, dtype=torch.uint8)
    values = codes.float() - 1
    codes = torch.tensor([0xA, 0x0, 0x2], dtype=torch.uint8)[codes.int()]  # E2M1 -1, 0, 1
    scales = torch.randint(0, 2, (N, K // BLOCK), generator=random, dtype=torch.uint8)
    values *= (0.5 + 0.5 * scales).repeat_interleave(BLOCK, 1)
    scales = 0x30 + 8 * scales  # E4M3 1/2 and 1
    packed = codes[:, 0::2] << 4 | codes[:, 1::2]
    return runtime.Nvfp4Weight(packed, reference.swizzle(scales), torch.tensor(WEIGHT_SCALE)), values


def float64_product(x: torch.Tensor, weight_values: torch.Tensor) -> torch.Tensor:
    """BF16 [rows, N], rounded once."""
    parts = [weight_values[first : first + 1024] for first in range(0, N, 1024)]
    sums = [x.double() @ part.double().T for part in parts]
    return (WEIGHT_SCALE * torch.cat(sums, 1)).bfloat16()


def served_device(path: str | None, cpu: bool) -> tuple[torch.device, str]:
    """Where to run, and why there."""
    if cpu:
        return torch.device("cpu"), "asked for"
    if not torch.cuda.is_available():
        return torch.device("cpu"), "PyTorch sees no CUDA device"
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        runtime.load(path=path)
        schedule, arch = devices.artifacts(device.index).table.resolve("auto", N, K)
    except RingFP4Error as error:
        return torch.device("cpu"), str(error)
    return device, f"{torch.cuda.get_device_name(device)}, kernels for {arch}, schedule {schedule}"


def slot_bytes(rows: int, arch: str) -> int:
    """Device memory for ``rows`` quantised rows."""
    return round_up(rows, 128) * sum(slot_row_bytes(arch, K))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ringfp4.demo", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="the CPU reference even if a GPU is served")
    parser.add_argument("--path", help="artefact folder; default: the package's own")
    options = parser.parse_args(arguments)

    device, reason = served_device(options.path, options.cpu)
    rows = CPU_ROWS if device.type == "cpu" else GPU_ROWS
    random = torch.Generator().manual_seed(4)
    x, (weight, weight_values) = exact_activation(rows, random), exact_weight(random)
    x_there, weight_there = x.to(device), weight.to(device)

    start = time.perf_counter()
    y = runtime.ring_linear(x_there, weight_there).cpu()
    seconds = time.perf_counter() - start

    checked = torch.linspace(0, rows - 1, min(rows, CHECKED_ROWS)).int()
    wrong = int((y[checked] != float64_product(x[checked], weight_values)).sum())
    arch = "sm_121a"
    if device.type == "cuda":
        _, arch = devices.artifacts(device.index).table.resolve("auto", N, K)
    ring, whole = slot_bytes(DEFAULT_CAPACITY_ROWS, arch), slot_bytes(REQUEST_ROWS, arch)
    ran_on = "GPU" if device.type == "cuda" else "CPU reference"
    print(f"ran on   {ran_on}: {reason}")
    print(f"work     qkv, x [{rows}, {K}] -> y [{rows}, {N}], first call {seconds:.2f} s")
    print(f"check    {wrong} of {checked.numel() * N:,} outputs differ from float64 (exact inputs)")
    print(
        f"memory   the ring holds {ring / 1e6:.2f} MB; the whole packed activation"
        f" of {REQUEST_ROWS:,} rows would take {whole / 1e6:.2f} MB"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
