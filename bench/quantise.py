"""The activation's side of a linear: absolute maximum (with the tensor scale) and packing.

Both only move bytes, so the ceiling is a large copy's bytes per second. Beside them PyTorch's two
ways to an absolute maximum and Comfy Kitchen's quantiser, where it is installed.
Every output is compared with the reference before anything is timed.
"""

from __future__ import annotations

import argparse

import torch
from ringfp4.errors import InputError
from ringfp4.runtime import lowlevel, reference
from ringfp4.validate.gates import FULL_ROWS

from bench.harness import (
    Row,
    Run,
    add_common_options,
    copy_bandwidth,
    inputs_needed,
    load_cubins,
    print_table,
    require_cuda,
    time_all,
    write_json,
)

try:
    import comfy_kitchen
except ImportError:
    comfy_kitchen = None

COMFY = "Comfy quantize_nvfp4"
HEADER = (
    *("rows x K", "what", "us", "fastest", "slowest", "GB/s", "% of copy"),
    *("abs().amax() / ours", "inf-norm / ours", "Comfy / ours"),
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench quantise", description=__doc__)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[FULL_ROWS, 2048], help="rows of the activation"
    )
    parser.add_argument("--k", type=int, nargs="+", default=[5376, 7168, 14336], help="columns")
    add_common_options(parser)
    args = parser.parse_args(argv)
    device = require_cuda()
    load_cubins(args)
    rows = [row for k in args.k for m in args.rows for row in measure(m, k, device, args.rounds)]
    ceiling = copy_bandwidth(device, args.rounds)
    name = torch.cuda.get_device_name(device)
    title = f"Quantising BF16 activations on {name}; a copy moves {ceiling / 1e9:.0f} GB/s"
    print_table(title, HEADER, lines(rows, ceiling))
    if args.json:
        write_json(args.json, rows, copy_bytes_per_second=ceiling)
    return 0


def measure(m: int, k: int, device: torch.device, rounds: int) -> list[Row]:
    """Check, then time everything at one shape."""
    count = inputs_needed(2 * m * k, device)
    x = [torch.randn(m, k, device=device).bfloat16() for _ in range(count)]
    scale = lowlevel.absmax(x[0])
    slots = torch.empty(lowlevel.slot_bytes(m, k, device.index), dtype=torch.uint8, device=device)
    output_bytes = check(x[0], scale, slots)
    state = lowlevel.absmax_state(device)
    read = 2 * m * k
    runs: dict[str, tuple[Run, int]] = {
        "absmax": (lambda i: lowlevel.absmax(x[i], state=state), read),
        "x.abs().amax()": (lambda i: x[i].abs().amax(), read),
        "inf-norm": (lambda i: torch.linalg.vector_norm(x[i], float("inf")), read),
        "pack": (lambda i: lowlevel.pack(x[i], scale, slots), read + output_bytes),
    }
    if comfy_kitchen is not None:
        comfy_bytes = read + m * k // 2 + m * k // reference.BLOCK
        runs[COMFY] = (lambda i: comfy_kitchen.quantize_nvfp4(x[i], scale, pad_16x=True), comfy_bytes)
    timings = time_all({name: run for name, (run, _) in runs.items()}, count, rounds)
    return [Row(name, f"{m} x {k}", timings[name], moved) for name, (_, moved) in runs.items()]


def check(x: torch.Tensor, scale: torch.Tensor, slots: torch.Tensor) -> int:
    """InputError unless scale and packed bytes equal the reference's; returns the bytes packed."""
    expected = reference.tensor_scale(x)
    if not torch.equal(scale, expected):
        raise InputError("absmax is wrong", expected=str(expected.item()), got=str(scale.item()))
    slots.fill_(0x7F)
    q, sf = lowlevel.pack(x, scale, slots)
    wanted_q, wanted_sf = reference.quantise(x, scale)
    if sf is None:
        scales = reference.unswizzle(wanted_sf, len(x), x.shape[1] // reference.BLOCK)
        wanted_q = reference.decode(wanted_q, scales).bfloat16()
    wrong = int((q[: len(x)] != wanted_q).sum())
    wrong += 0 if sf is None else int((sf != wanted_sf).sum())
    if wrong:
        raise InputError("pack is wrong", expected="the reference's bytes", got=f"{wrong} differ")
    return wanted_q.nbytes + (0 if sf is None else wanted_sf.nbytes)


def lines(rows: list[Row], ceiling: float) -> list[list[str]]:
    """Cells of the table; ratios are the peer's time over ours, of the same shape."""
    found = {(row.shape, row.what): row for row in rows}
    peers = {"absmax": ("x.abs().amax()", "inf-norm"), "pack": ("", "", COMFY)}
    table = []
    for row in rows:
        ratios = ["", "", ""]
        for i, peer in enumerate(peers.get(row.what, ())):
            if other := found.get((row.shape, peer)):
                ratios[i] = f"{other.timing.median / row.timing.median:.2f}"
        of_copy = row.bytes_per_second / ceiling
        times = (f"{1e3 * t:.1f}" for t in (row.timing.median, row.timing.fastest, row.timing.slowest))
        table.append(
            [row.shape, row.what, *times, f"{row.bytes_per_second / 1e9:.0f}", f"{of_copy:.0%}", *ratios]
        )
    return table
