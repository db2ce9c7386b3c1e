"""What the runtime launches equals, field by field, what the DSL's own host code launches.

Both are observed without a GPU: the runtime against the recording driver, the DSL's host code
against dsl_host.c. Only the grid is chosen by the caller on both sides; it is checked against the
number of tiles. Of a tensor map everything is compared but the hint about L2 promotion. Addresses
are compared as the names of the buffers they point to. The runtime launches the persistent ring
cooperatively, which the DSL's host code has no need to know. The kernels for sm_90a are compiled
for more rows than there can be, so there the extents of the DSL's tensor maps are upper bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from driver_harness import SMS, FakeDriver, write_folder
from dsl_capture import Tensor, capture
from ringfp4.dsl.config.base import KernelConfig, ceil_div
from ringfp4.dsl.config.gemm import GemmConfig
from ringfp4.dsl.config.hopper import HopperGemmConfig, HopperRepackConfig
from ringfp4.dsl.config.quantise import AbsmaxConfig, PackConfig
from ringfp4.dsl.config.ring import HopperRingGemmConfig, RingFields, RingGemmConfig
from ringfp4.runtime import Ring, _core, devices

pytest.importorskip("cutlass", reason="needs the DSL")

ROWS = (1, 127, 128, 129, 300, 2048, 37_810)
STREAM, RULE = 0x77, 1
# Addresses, far apart: by name of the buffer as the parameters of the kernels call them.
NAMES = (
    *("x", "q", "sf", "w", "w_sf", "scale", "w_scale", "bias", "y", "amax_state", "counters", "status"),
    *("partials", "flags"),
)
ADDRESS = {name: (index + 1) << 40 for index, name in enumerate((*NAMES, "packed"))}


@dataclass(frozen=True)
class Kernel:
    arch: str
    config: KernelConfig
    n: int
    k: int

    @property
    def capability(self) -> tuple[int, int]:
        return (9, 0) if self.arch == "sm_90a" else (12, 1)


def _kernels() -> dict[str, Kernel]:
    n, k = 392, 288  # no whole number of tiles in any direction
    sm_12x: dict[str, KernelConfig] = {
        "absmax": AbsmaxConfig(k=k),
        "pack": PackConfig(k=k),
        "gemm 128x128": GemmConfig.with_tile(n, k, 128, 128),
        "gemm 128x256": GemmConfig.with_tile(n, k, 128, 256),
        "ring_gemm": RingGemmConfig.for_linear(n, k, group=1),
    }
    hopper_n, hopper_k = 384, 256
    # One of each number of consumers and of CTAs a multiprocessor, and an odd number of 8 rows.
    shapes = {(208, 2, 1), (232, 2, 1), (128, 3, 1), (64, 1, 2), (16, 1, 4)}
    gemms = {
        f"hopper {g.tile_m}x{g.tile_n}": g
        for g in HopperGemmConfig.variants(hopper_n, hopper_k)
        if (g.tile_m, g.consumers, g.ctas_per_sm) in shapes
    }
    sm_90a: dict[str, KernelConfig] = {
        "hopper pack": PackConfig(k=hopper_k, output="bf16"),
        "hopper repack": HopperRepackConfig(k=hopper_k),
        **gemms,
        "hopper ring_gemm": HopperRingGemmConfig.for_linear(hopper_n, hopper_k, tile_m=176, group=1),
    }
    return {name: Kernel("sm_121a", config, n, k) for name, config in sm_12x.items()} | {
        name: Kernel("sm_90a", config, hopper_n, hopper_k) for name, config in sm_90a.items()
    }


KERNELS = _kernels()


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


def grid(kernel: Kernel, m: int) -> int:
    """A CTA for each piece of work, in the persistent kernels at most what the GPU holds at a time."""
    config, n, k = kernel.config, kernel.n, kernel.k
    if isinstance(config, (GemmConfig, HopperGemmConfig)):
        per_sm = config.ctas_per_sm if isinstance(config, HopperGemmConfig) else 1
        return min(per_sm * SMS, ceil_div(m, config.tile_m) * ceil_div(n, config.tile[1]))
    if isinstance(config, PackConfig):
        return ceil_div(m, 128) * 16 * ceil_div(k, config.warps * config.pieces * 64)
    if isinstance(config, HopperRepackConfig):
        return ceil_div(m, 64) * (k // 64)
    assert isinstance(config, AbsmaxConfig)
    return min(ceil_div(m, 8), SMS * config.ctas_per_sm)


def slot_rows(kernel: Kernel, m: int) -> int:
    """Rows of slots that the kernel's tensor maps cover."""
    return kernel.config.ring_rows if isinstance(kernel.config, RingFields) else m


def host_arguments(kernel: Kernel, m: int) -> dict[str, Any]:
    """Arguments of the DSL's host function for m rows, by name."""
    n, k, rows = kernel.n, kernel.k, slot_rows(kernel, m)
    ctas, scale_columns = grid(kernel, m), ceil_div(k, 64)
    tensors = {
        "mQ": Tensor(ADDRESS["q"], (rows, k // 2)),
        "mW": Tensor(ADDRESS["w"], (n, k // 2)),
        "mSF": Tensor(ADDRESS["sf"], (ceil_div(rows, 128), scale_columns, 256)),
        "mWSF": Tensor(ADDRESS["w_sf"], (ceil_div(n, 128), scale_columns, 256)),
        "mY": Tensor(ADDRESS["y"], (m, n)),
        "mScale": Tensor(ADDRESS["scale"], (1,)),
        "mWScale": Tensor(ADDRESS["w_scale"], (1,)),
    }
    if kernel.arch == "sm_90a":  # all extents are compiled in
        constant = {"mQ": "q", "mW": "w", "mYt": "y"}
        tensors = {name: Tensor(ADDRESS[buffer], ()) for name, buffer in constant.items()}
    return ADDRESS | tensors | {"m": m, "x_stride": k, "rule": RULE, "ctas": ctas, "grid": ctas}


@cache
def dsl_launches(arch: str) -> dict[tuple[str, int], dict[str, Any]]:
    kernels = {name: kernel for name, kernel in KERNELS.items() if kernel.arch == arch}
    tasks = [(kernel.config, arch, [host_arguments(kernel, m) for m in ROWS]) for kernel in kernels.values()]
    keys = [(name, m) for name in kernels for m in ROWS]
    return dict(zip(keys, (launch for each in capture(tasks) for launch in each), strict=True))


def dsl_launch(name: str, m: int) -> Launch:
    kernel = KERNELS[name]
    names = {address: buffer for buffer, address in ADDRESS.items()}
    found = dsl_launches(kernel.arch)[name, m]
    params: list[TensorMap | str | int] = []
    for param, text in zip(kernel.config.params(), found["params"], strict=True):
        raw = bytes.fromhex(text)
        number = int.from_bytes(raw, "little")
        if param.kind == "tensor_map":
            params.append(read_map(raw, names))
        else:
            params.append(names[number] if param.kind == "pointer" else number)
    assert found["grid"][1:] == found["block"][1:] == found["cluster"][1:] == [1, 1]
    ctas = grid(kernel, m) if kernel.arch == "sm_90a" else found["grid"][0]
    return Launch(ctas, found["block"][0], found["smem"], found["cluster"][0], tuple(params))


def runtime_launch(fake: FakeDriver, folder: Path, name: str, m: int) -> Launch:
    kernel = KERNELS[name]
    config, n, k = kernel.config, kernel.n, kernel.k
    fake.set_capability(*kernel.capability)
    devices.load(0, write_folder(folder, [config], kernel.arch))
    given = ("x", "w", "w_sf", "w_scale", "bias", "y", "scale", "packed")
    addresses = {buffer: ADDRESS[buffer] for buffer in given}
    ring = None
    if isinstance(config, RingFields):
        ring = Ring(capacity_rows=ceil_div(config.ring_rows, 128) * 128, k=k, device=0)
        plan, core = ring.plan(n, k, m, "fused"), ring.core
        slots, state = core.data, core.state
    else:
        plan, core = devices.artifacts(0).single(config.kind, config.n, k), None
        slots, state = ADDRESS["q"], ADDRESS["amax_state"]
    if config.kind in ("absmax", "ring_gemm"):  # they find the scale and write it
        del addresses["scale"]
    fake.log()
    own = {"slots": 0, "state": 0} if core else {"slots": slots, "state": state}
    plan.sequence.run(core, STREAM, m, x_stride=k, rule=RULE, **own, **addresses)
    lines = fake.log("cuTensorMapEncodeTiled", "cuLaunchKernelEx")
    fields = dict(re.findall(r"(\w+)=(\S*)", lines.pop()))
    values = fields["params"].split(",")

    q_row = 2 * k if kernel.arch == "sm_90a" else k // 2
    addresses |= {
        "q": slots,
        "sf": slots + ceil_div(slot_rows(kernel, m), 128) * 128 * q_row,
        "amax_state": state,
        "counters": state + _core.COUNTERS_OFFSET,
        "flags": state + _core.FLAGS_OFFSET,
    }
    addresses.setdefault("scale", state + _core.SCALE_OFFSET)
    wanted = [param.name for param in config.params()]
    if "partials" in wanted:  # behind the slots; on sm_90a these hold no block scales
        rows = config.ring_rows if isinstance(config, RingFields) else ceil_div(m, 128) * 128
        addresses["partials"] = slots + rows * q_row
    if "status" in wanted:  # pinned host memory, wherever the driver put it
        addresses["status"] = int(values[wanted.index("status")], 16)
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


def within(launch: Launch, other: Launch, spare_smem: int) -> Launch:
    """``launch`` with the extents and shared memory of ``other``.

    Extents must not exceed ``launch``'s, shared memory may be up to ``spare_smem`` bytes more.
    """
    params = []
    for mine, theirs in zip(launch.params, other.params, strict=True):
        if isinstance(mine, TensorMap) and isinstance(theirs, TensorMap):
            assert all(a >= b for a, b in zip(mine.dims, theirs.dims, strict=True))
            mine = replace(mine, dims=theirs.dims)
        params.append(mine)
    assert launch.smem <= other.smem <= launch.smem + spare_smem
    return replace(launch, smem=other.smem, params=tuple(params))


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("name", KERNELS)
def test_runtime_launches_what_the_dsl_would(fake: FakeDriver, tmp_path: Path, name: str, m: int) -> None:
    dsl, runtime = dsl_launch(name, m), runtime_launch(fake, tmp_path, name, m)
    if KERNELS[name].arch == "sm_90a":
        # Tiles of an odd number of 8 rows: the configuration counts 8 rows of the last stage and of
        # the last staged strip that the DSL leaves out, each of 128 bytes.
        dsl = within(dsl, runtime, spare_smem=2048 if "232" in name else 0)
    assert runtime == dsl
    for param, value in zip(KERNELS[name].config.params(), runtime.params, strict=True):
        named = value.buffer if isinstance(value, TensorMap) else value
        assert param.kind in ("i32", "i64") or named == param.name


def test_comparison_sees_every_field_of_a_tensor_map() -> None:
    """Flipping any bit that a tensor map uses changes what is read from it, or cannot be read."""
    text = dsl_launches("sm_121a")["gemm 128x256", 300]["params"][3]
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
