"""The persistent ring against the unfused kernels: rings, grids, delays, streams, and giving up.

Besides the artefacts under test it wants those of fused_variants.py (--cubins names both).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import runtime_cases
import torch
from fused_variants import GIVES_UP, LINEAR
from gpu_checks import Gpu
from ringfp4 import runtime
from ringfp4.runtime import _core, devices, lanes
from ringfp4.runtime.manifest import KernelEntry
from runtime_cases import Case, same_bits

POISON = 0xFF  # NaN as E4M3 and as BF16
ROWS = (1, 8, 127, 129, 1041, 4999)  # some with short tiles, some that use every slot many times


class _Memory:
    """Device memory of the runtime, for torch.as_tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@dataclass(frozen=True)
class Fused:
    """One linear, run by one fused kernel through a ring of its own."""

    case: Case
    ring: lanes.Ring
    entry: KernelEntry

    def poison(self) -> None:
        core = self.ring.core
        torch.as_tensor(_Memory(core.data, core.data_bytes), device="cuda").fill_(POISON)

    def y(self, x: torch.Tensor, **options: object) -> torch.Tensor:
        """Into a poisoned output, through a poisoned ring."""
        self.poison()
        out = torch.full((len(x), self.case.n), float("nan"), device="cuda", dtype=torch.bfloat16)
        return self.case.y(x, ring=self.ring, out=out, **options)

    def counters(self) -> torch.Tensor:
        address = self.ring.core.state + _core.COUNTERS_OFFSET
        return torch.as_tensor(_Memory(address, _core.COUNTER_BYTES), device="cuda").view(torch.int32)


Use = Callable[[KernelEntry], Fused]


@pytest.fixture(scope="module")
def case(gpu: Gpu) -> Case:
    shape = (LINEAR.n, LINEAR.k)
    if "fused" not in gpu.linears.get(shape, ()):
        pytest.skip("no cubins made by tests/gpu/fused_variants.py")
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    return Case(*shape, runtime.Nvfp4Weight.from_bf16(weight), gpu.linears[shape])


@pytest.fixture(scope="module")
def variants(gpu: Gpu, case: Case) -> list[KernelEntry]:
    arch = gpu.table.resolve("fused", case.n, case.k)[1]
    found = gpu.table.find(arch, "ring_gemm", case.n, case.k)
    return [entry for entry in found if entry.config["poll_limit"] != GIVES_UP["poll_limit"]]


@pytest.fixture
def use(case: Case) -> Iterator[Use]:
    artifacts = devices.artifacts(torch.cuda.current_device())

    def with_kernel(entry: KernelEntry) -> Fused:
        artifacts.preferences[case.n, case.k] = [(1 << 40, "fused", entry.name)]
        rows = entry.config["slots"] * entry.config["tile_m"]
        ring = runtime.Ring(-(-rows // lanes.TILE_ROWS) * lanes.TILE_ROWS, case.k)
        assert ring.plan(case.n, case.k, 1, "auto").kernels == (entry,)
        return Fused(case, ring, entry)

    yield with_kernel
    del artifacts.preferences[case.n, case.k]


def test_there_is_something_to_test(variants: list[KernelEntry]) -> None:
    grids = {entry.grid[1] for entry in variants}
    assert {1, 2, 7, 60} <= grids
    assert any(entry.config["slots"] == 1 for entry in variants)
    assert any(entry.config["jitter"] for entry in variants)


@pytest.mark.timeout(180, method="thread")
@pytest.mark.parametrize("m", ROWS)
def test_same_bits_as_unfused(case: Case, variants: list[KernelEntry], use: Use, m: int) -> None:
    """Every ring, every grid, the tensor scale given and found by both rules."""
    x = case.x(m) * torch.exp(torch.randn(m, 1, device="cuda"))
    x = x.bfloat16()
    scale = (x.abs().max().float() * 0.75 / 2688).reshape(1)
    ways: list[dict[str, object]] = [{"scale": scale}, {"scale_rule": "fp32"}, {"scale_rule": "bf16"}]
    expected = [case.y(x, schedule="prepacked", **way) for way in ways]
    for entry in variants:
        fused = use(entry)
        for way, y in zip(ways, expected, strict=True):
            assert same_bits(fused.y(x, **way), y), f"{entry.name}, {way}"
            assert not fused.counters().any(), f"{entry.name} leaves counters"


def test_bias_and_strided_rows(case: Case, variants: list[KernelEntry], use: Use) -> None:
    wide = case.x(700).repeat(1, 2)
    x, bias = wide[:, case.k :], torch.randn(case.n, device="cuda").bfloat16()
    expected = case.y(x.contiguous(), schedule="prepacked", bias=bias)
    for entry in variants:
        assert same_bits(use(entry).y(x, bias=bias), expected), entry.name


@pytest.mark.timeout(120, method="thread")
def test_many_launches_in_a_row(case: Case, variants: list[KernelEntry], use: Use) -> None:
    """A launch finds the counters as the one before left them; delays change the order of events."""
    x = case.x(3001)
    expected = case.y(x, schedule="prepacked")
    for entry in variants:
        fused, good = use(entry), torch.ones((), dtype=torch.bool, device="cuda")
        for _ in range(100):
            good &= same_bits(fused.y(x), expected)
        assert bool(good), entry.name


def test_two_streams_with_a_ring_each(case: Case, variants: list[KernelEntry], use: Use) -> None:
    """Both grids want every multiprocessor: a launch must not start with only some of its CTAs."""
    xs = [case.x(6000, seed=i) for i in range(2)]
    expected = [case.y(x, schedule="prepacked") for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    for entry in variants:
        fused = [use(entry) for _ in xs]
        good = [torch.ones((), dtype=torch.bool, device="cuda") for _ in xs]
        torch.cuda.synchronize()
        for _ in range(20):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    good[i] &= same_bits(fused[i].y(xs[i]), expected[i])
        torch.cuda.synchronize()
        assert all(bool(g) for g in good), entry.name


def test_replays_of_a_graph(case: Case, variants: list[KernelEntry], use: Use) -> None:
    x = case.x(2500)
    expected = case.y(x, schedule="prepacked")
    for entry in variants:
        fused, graph = use(entry), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused.y(x)
        good = torch.ones((), dtype=torch.bool, device="cuda")
        for _ in range(1000 if "_ctas" not in entry.name else 20):
            graph.replay()
            good &= same_bits(y, expected)
        assert bool(good), entry.name


def test_a_wait_without_end_is_reported(pytestconfig: pytest.Config, case: Case) -> None:
    """A counter is spoilt so that a slot never becomes free; the context is lost, the reason is not."""
    body = f"""
    runtime.load(path=PATHS, arch=ARCH)
    from ringfp4.runtime import _core, devices
    artifacts = devices.artifacts(0)
    entry = next(e for e in artifacts.table.entries if e.config.get("poll_limit") == {GIVES_UP["poll_limit"]})
    artifacts.preferences[N, K] = [(1 << 40, "fused", entry.name)]
    ring = runtime.Ring(2048, K)
    class Memory:
        __cuda_array_interface__ = dict(shape=(_core.COUNTER_BYTES // 4,), typestr="<i4", version=3,
            data=(ring.core.state + _core.COUNTERS_OFFSET, False))
    slots, chunks = entry.config["slots"], entry.config["k_chunks"]
    torch.as_tensor(Memory(), device="cuda")[slots * chunks : slots * (chunks + 1)] = -1000
    x = torch.randn(3000, K, device="cuda").bfloat16()
    runtime.ring_linear(x, weight, ring=ring)
    try:
        torch.cuda.synchronize()
    except Exception:
        try:
            runtime.ring_linear(x, weight, ring=ring)
        except errors.DriverError as error:
            print(error)
    os._exit(0)  # nothing can be freed in a lost context
    """
    told = runtime_cases.in_fresh_process(pytestconfig, case, body)
    # Packing warps wait for the slot, loaders for its rows; which of them gives up first is chance.
    assert "reason 2" in told or "reason 1" in told, told
