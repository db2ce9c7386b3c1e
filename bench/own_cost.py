"""The runtime's own share of a call's C++ part, against a driver that does nothing. Needs no GPU.

What ``bench host`` measures on a GPU is this and the driver. Needs the source tree (tests/driver) and a C
compiler called cc. In microseconds, the best of several batches: anything else is another process's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ringfp4.runtime import devices

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "driver"))

CALLS, BATCHES = 10_000, 20
N, K, M, STREAM = 256, 128, 2048, 7
POINTERS = {"x": 1 << 20, "w": 2 << 20, "w_sf": 3 << 20, "w_scale": 4 << 20, "y": 5 << 20, "x_stride": K}


def microseconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        taken.append((time.perf_counter() - start) / CALLS)
    return 1e6 * min(taken)


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(prog="python -m bench own_cost", description=__doc__).parse_args(argv)
    import driver_harness

    with tempfile.TemporaryDirectory() as scratch:
        os.environ[devices.DRIVER_VARIABLE] = str(driver_harness.compile_driver(Path(scratch), "-DSILENT"))
        configs = driver_harness.linear_configs(N, K)
        devices.load(0, driver_harness.write_folder(Path(scratch) / "cubins", configs))
        measure(devices.artifacts(0))
        devices.unload()
    return 0


def measure(loaded: devices.Artifacts) -> None:
    lane = loaded.lane(STREAM)
    plan = lane.plan(N, K, M, "ring")
    ring, run = lane.ring(plan.slot_bytes(M)), plan.sequence.run
    reduced = microseconds(lambda: run(ring, STREAM, M, **POINTERS))
    given = microseconds(lambda: run(ring, STREAM, M, scale=6 << 20, **POINTERS))
    print(f"three launches {reduced:.2f}, two {given:.2f}")
    print(f"is the stream captured? {microseconds(lambda: loaded.context.capturing(STREAM)):.2f}")
