"""What the runtime launches equals, field by field, what the DSL's own host code launches.

Both are observed without a GPU: the runtime against the recording driver, the DSL's host code
against dsl_host.c. Only the grid is chosen by the caller on both sides; it is checked against the
number of tiles. Of a tensor map everything is compared but the hint about L2 promotion. Addresses
are compared as the names of the buffers they point to. The runtime launches the persistent ring
cooperatively, which the DSL's host code has no need to know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from driver_harness import FakeDriver, write_folder
from dsl_capture import Tensor, capture
from ringfp4.dsl.config.base import KernelConfig, ceil_div
from ringfp4.dsl.config.gemm import GemmConfig
from ringfp4.dsl.config.quantise import AbsmaxConfig, PackConfig
from ringfp4.dsl.config.ring import RingGemmConfig
from ringfp4.runtime import Ring, _core, devices

pytest.importorskip("cutlass", reason="needs the DSL")

N, K = 392, 288  # no whole number of tiles in any direction
ROWS = (1, 127, 128, 129, 300, 2048, 37_810)
STREAM, SMS, RULE = 0x77, 48, 1
# Addresses, far apart: by name of the buffer as the parameters of the kernels call them.
NAMES = ("x", "q", "sf", "w", "w_sf", "scale", "w_scale", "bias", "y", "amax_state", "counters", "status")
ADDRESS = {name: (index + 1) << 40 for index, name in enumerate(NAMES)}
TENSORS = {
    "mQ": "q",
    "mW": "w",
    "mSF": "sf",
    "mWSF": "w_sf",
    "mY": "y",
    "mScale": "scale",
    "mWScale": "w_scale",
}
CONFIGS: dict[str, KernelConfig] = {
    "absmax": AbsmaxConfig(k=K),
    "pack": PackConfig(k=K),
    "gemm 128x128": GemmConfig.with_tile(N, K, 128, 128),
    "gemm 128x256": GemmConfig.with_tile(N, K, 128, 256),
    "ring_gemm": RingGemmConfig.for_linear(N, K, group=1),
}


@dataclass(frozen=True)
class TensorMap:
    """Extents in elements, innermost first; strides in bytes, of all modes but the first."""

    buffer: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Launch:
    grid: int
    block: int
    smem: int
    cluster: int
    params: tuple[TensorMap | str | int, ...]


def read_map(raw: bytes, names: dict[int, str]) -> TensorMap:
    """The tensor map of compute capability 9.0 and later, as far as kernels here use it.

    Byte 0: address. 8: rank - 1 in bits 4-6, type in 7-10, swizzle in 13-14. 12: strides in units
    of 16 bytes. 32: extents - 1. 55: box - 1, a byte each. Everything else is constant.
    """
    words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, 64, 4)]
    rank = (words[2] >> 4 & 7) + 1
    return TensorMap(
        buffer=names[words[0] | words[1] << 32],
        dtype={0: "u8", 1: "u16", 10: "bf16"}[words[2] >> 7 & 15],
        dims=tuple(extent + 1 for extent in words[8 : 8 + rank]),
        strides=tuple(stride * 16 for stride in words[3 : 2 + rank]),
        box=tuple(extent + 1 for extent in raw[55 : 55 + rank]),
        swizzle=(0, 32, 64, 128)[words[2] >> 13 & 3],
    )


def read_encoded(line: str, names: dict[int, str]) -> TensorMap:
    """A recorded cuTensorMapEncodeTiled; the numbers are the driver API's enumerations."""
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    assert fields["interleave"] == "0"

    def numbers(name: str) -> tuple[int, ...]:
        return tuple(int(part) for part in fields[name].split(",") if part)

    return TensorMap(
        buffer=names[int(fields["base"], 16)],
        dtype={"0": "u8", "1": "u16", "9": "bf16"}[fields["dtype"]],
        dims=numbers("dims"),
        strides=numbers("strides"),
        box=numbers("box"),
        swizzle=(0, 32, 64, 128)[int(fields["swizzle"])],
    )


def grid(config: KernelConfig, m: int) -> int:
    """A CTA for each piece of work, in the persistent kernels at most what the GPU holds at a time."""
    if isinstance(config, GemmConfig):
        return min(SMS, ceil_div(m, config.tile_m) * ceil_div(N, config.tile_n))
    if isinstance(config, PackConfig):
        return ceil_div(m, 128) * 16 * ceil_div(K, config.warps * config.pieces * 64)
    return min(ceil_div(m, 8), SMS * config.grid.ctas_per_sm)


def ring_rows(config: KernelConfig, m: int) -> int:
    return config.ring_rows if isinstance(config, RingGemmConfig) else m


def host_arguments(config: KernelConfig, m: int) -> dict[str, Any]:
    """Arguments of the DSL's host function for m rows, by name."""
    rows, scale_columns = ring_rows(config, m), ceil_div(K, 64)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (rows, K // 2),
        "w": (N, K // 2),
        "sf": (ceil_div(rows, 128), scale_columns, 256),
        "w_sf": (ceil_div(N, 128), scale_columns, 256),
        "y": (m, N),
        "scale": (1,),
        "w_scale": (1,),
    }
    tensors = {name: Tensor(ADDRESS[buffer], shapes[buffer]) for name, buffer in TENSORS.items()}
    if isinstance(config, (AbsmaxConfig, PackConfig, RingGemmConfig)):
        del tensors["mScale"]
    ctas = grid(config, m)
    return ADDRESS | tensors | {"m": m, "x_stride": K, "rule": RULE, "ctas": ctas, "grid": ctas}


@cache
def dsl_launches() -> dict[tuple[str, int], dict[str, Any]]:
    tasks = [(config, "sm_121a", [host_arguments(config, m) for m in ROWS]) for config in CONFIGS.values()]
    keys = [(name, m) for name in CONFIGS for m in ROWS]
    return dict(zip(keys, (launch for each in capture(tasks) for launch in each), strict=True))


def dsl_launch(name: str, m: int) -> Launch:
    names = {address: buffer for buffer, address in ADDRESS.items()}
    found = dsl_launches()[name, m]
    params: list[TensorMap | str | int] = []
    for param, text in zip(CONFIGS[name].params(), found["params"], strict=True):
        raw = bytes.fromhex(text)
        number = int.from_bytes(raw, "little")
        if param.kind == "tensor_map":
            params.append(read_map(raw, names))
        else:
            params.append(names[number] if param.kind == "pointer" else number)
    assert found["grid"][1:] == found["block"][1:] == found["cluster"][1:] == [1, 1]
    return Launch(found["grid"][0], found["block"][0], found["smem"], found["cluster"][0], tuple(params))


def runtime_launch(fake: FakeDriver, folder: Path, name: str, m: int) -> Launch:
    config = CONFIGS[name]
    devices.load(0, write_folder(folder, [config]))
    addresses = {buffer: ADDRESS[buffer] for buffer in ("x", "w", "w_sf", "w_scale", "bias", "y", "scale")}
    ring = None
    if isinstance(config, RingGemmConfig):
        ring = Ring(capacity_rows=config.ring_rows, k=K, device=0)
        plan, core = ring.plan(N, K, m, "fused"), ring.core
        slots, state = core.data, core.state
    else:
        plan, core = devices.artifacts(0).single(config.kind, config.n, K), None
        slots, state = ADDRESS["q"], ADDRESS["amax_state"]
    if config.kind in ("absmax", "ring_gemm"):  # they find the scale and write it
        del addresses["scale"]
    fake.log()
    own = {"slots": 0, "state": 0} if core else {"slots": slots, "state": state}
    plan.sequence.run(core, STREAM, m, x_stride=K, rule=RULE, **own, **addresses)
    lines = fake.log("cuTensorMapEncodeTiled", "cuLaunchKernelEx")
    fields = dict(re.findall(r"(\w+)=(\S*)", lines.pop()))
    values = fields["params"].split(",")

    addresses |= {
        "q": slots,
        "sf": slots + ceil_div(ring_rows(config, m), 128) * 128 * K // 2,
        "amax_state": state,
        "counters": state + _core.STATE_BYTES - _core.COUNTER_BYTES,
    }
    addresses.setdefault("scale", state + _core.SCALE_OFFSET)
    if config.kind == "ring_gemm":  # pinned host memory, wherever the driver put it
        addresses["status"] = int(values[[p.name for p in config.params()].index("status")], 16)
    names = {address: buffer for buffer, address in addresses.items()}
    maps = {found.buffer: found for found in (read_encoded(line, names) for line in lines)}
    params: list[TensorMap | str | int] = []
    for param, value in zip(config.params(), values, strict=True):
        if param.kind == "tensor_map":
            params.append(maps[names[int(value.removeprefix("map:"), 16)]])
        else:
            params.append(names[int(value, 16)] if param.kind == "pointer" else int(value, 0))
    del plan, core, ring
    return Launch(
        int(fields["grid"]), int(fields["block"]), int(fields["smem"]), int(fields["cluster"]), tuple(params)
    )


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_runtime_launches_what_the_dsl_would(fake: FakeDriver, tmp_path: Path, name: str, m: int) -> None:
    expected = dsl_launch(name, m)
    assert runtime_launch(fake, tmp_path, name, m) == expected
    for param, value in zip(CONFIGS[name].params(), expected.params, strict=True):
        named = value.buffer if isinstance(value, TensorMap) else value
        assert param.kind in ("i32", "i64") or named == param.name


def test_comparison_sees_every_field_of_a_tensor_map() -> None:
    """Flipping any bit that a tensor map uses changes what is read from it, or cannot be read."""
    text = dsl_launches()["gemm 128x256", 300]["params"][3]
    raw = bytearray.fromhex(text)
    names = {address: buffer for buffer, address in ADDRESS.items()}
    original = read_map(bytes(raw), names)
    for byte in (5, 8, 9, 12, 16, 32, 36, 40, 55, 56, 57):
        changed = raw.copy()
        changed[byte] ^= 0x20 if byte in (8, 9) else 1
        try:
            assert read_map(bytes(changed), names) != original, byte
        except KeyError:
            continue
