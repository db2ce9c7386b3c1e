"""What the real extension asks of the driver, call by call, against a recording driver."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from driver_harness import (
    PREPARED,
    SCALE,
    SMS,
    W_SCALE,
    W_SF,
    FakeDriver,
    K,
    M,
    N,
    Stand,
    W,
    X,
    Y,
    linear_configs,
    weight_of,
    write_folder,
)
from ringfp4.dsl.config.gemm import GemmConfig
from ringfp4.dsl.config.hopper import HopperGemmConfig, HopperRepackConfig
from ringfp4.dsl.config.quantise import AbsmaxConfig, PackConfig
from ringfp4.dsl.config.ring import RingGemmConfig
from ringfp4.errors import InputError, RingError
from ringfp4.runtime import Ring, _core, api, devices, set_nvtx

STREAM = 0x77


def run(plan: object, ring: object, stream: int = STREAM, m: int = M, **pointers: int) -> None:
    call = {"x": X, "y": Y, "w": W, "w_sf": W_SF, "w_scale": W_SCALE, "x_stride": K} | pointers
    plan.sequence.run(ring, stream, m, **call)


def test_loading_makes_every_kernel_ready(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    log = fake.log()
    names = [line.split("name=")[1] for line in log if line.startswith("cuModuleGetFunction")]
    assert names == [c.name for c in [*linear_configs(N, K), RingGemmConfig.for_linear(N, 256, group=1)]]
    for call in ("cuModuleLoadData", "cuFuncLoad"):
        assert sum(line.startswith(call + " ") for line in log) == len(names)
    smem = [line for line in log if line.startswith("cuFuncSetAttribute")]
    assert f"attribute=8 value={linear_configs(N, K)[2].smem_bytes}" in smem[1]
    assert fake.live() == {"memory": 0, "modules": 4, "events": 0, "contexts": 1, "host": 1}


def test_ring_schedule_launches_chunks_in_order(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    ring = Ring(capacity_rows=128, k=K, device=0)
    q, sf, state = ring.core.data, ring.core.data + 128 * K // 2, ring.core.state
    fake.log()
    run(ring.plan(N, K, M, "ring"), ring.core)
    launches = fake.launches()
    absmax, pack, gemm = (config.name for config in linear_configs(N, K))
    assert [launch["kernel"] for launch in launches] == [absmax] + 3 * [pack, gemm]
    # Packing waits from within for the kernel before it, the others for the stream as a whole.
    assert [launch["programmatic"] for launch in launches] == ["0"] + 3 * ["1", "0"]
    assert all(launch["stream"] == hex(STREAM) for launch in launches)
    scale = hex(state + _core.SCALE_OFFSET)
    assert launches[0]["params"] == f"{X:#x},{K:#x},{M},0,{state:#x},{scale}"
    for chunk, rows in enumerate((128, 128, 44)):
        x, y = X + chunk * 128 * K * 2, Y + chunk * 128 * N * 2
        packed, multiplied = launches[1 + 2 * chunk], launches[2 + 2 * chunk]
        assert packed["params"] == f"{x:#x},{K:#x},{rows},{scale},{q:#x},{sf:#x}"
        maps = ",".join(f"map:{base:#x}" for base in (q, W, sf, W_SF, y))
        assert multiplied["params"] == f"{maps},{scale},{W_SCALE:#x},0,{rows}"


def test_chunks_have_the_tensor_maps_of_their_rows(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    ring = Ring(capacity_rows=128, k=K, device=0)
    plan = ring.plan(N, K, M, "ring")
    run(plan, ring.core)
    encoded = fake.log("cuTensorMapEncodeTiled")
    assert [line for line in encoded if f"base={W:#x}" in line] == [
        f"cuTensorMapEncodeTiled dtype=0 base={W:#x} dims=64,256 strides=64 box=64,128 interleave=0 swizzle=2"
    ]
    outputs = [line.split("dims=")[1].split()[0] for line in encoded if "dtype=9" in line]
    assert outputs == ["256,128", "256,128", "256,44"]
    # Again with the same pointers: only what differs between the first and the last chunk.
    run(plan, ring.core)
    again = fake.log("cuTensorMapEncodeTiled")
    assert not [line for line in again if f"base={W:#x}" in line or f"base={W_SF:#x}" in line]
    # One chunk: another x needs no tensor map at all.
    one = ring.plan(N, K, 128, "ring")
    run(one, ring.core, m=128)
    fake.log()
    run(one, ring.core, m=128, x=X + 0x1000)
    assert fake.log("cuTensorMapEncodeTiled") == []


def test_prepacked_is_one_chunk_in_the_callers_memory(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    lane = devices.artifacts(0).lane(STREAM)
    plan = lane.plan(N, K, M, "prepacked")
    assert plan.slot_bytes(M) == 384 * (K // 2 + K // 16)
    run(plan, lane.ring(0), slots=0x900000)
    launches = fake.launches()
    assert [launch["kernel"].split("_")[0] for launch in launches] == ["absmax", "pack", "gemm"]
    assert launches[1]["params"].endswith(f"0x900000,{0x900000 + 384 * K // 2:#x}")
    assert launches[2]["params"].endswith(f",{M}")


def test_a_given_scale_replaces_the_reduction(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    lane = devices.artifacts(0).lane(STREAM)
    plan = lane.plan(N, K, M, "auto")
    assert plan.schedule == "ring"  # no fused kernel for this shape
    run(plan, lane.ring(plan.slot_bytes(M)), scale=SCALE)
    launches = fake.launches()
    assert [launch["kernel"].split("_")[0] for launch in launches] == ["pack", "gemm"]
    assert all(hex(SCALE) in launch["params"] for launch in launches)
    assert [launch["programmatic"] for launch in launches] == ["0", "0"]  # nothing of this call comes before


@pytest.mark.parametrize(("tile", "early"), [((16, 1, 4), "1"), ((208, 2, 1), "0")])
def test_small_hopper_tiles_start_early(
    fake: FakeDriver, tmp_path: Path, tile: tuple[int, int, int], early: str
) -> None:
    tile_m, consumers, ctas_per_sm = tile
    gemm = HopperGemmConfig(features=N, k=K, tile_m=tile_m, consumers=consumers, ctas_per_sm=ctas_per_sm)
    configs = [AbsmaxConfig(k=K), PackConfig(k=K, output="bf16"), HopperRepackConfig(k=K), gemm]
    fake.set_capability(9, 0)
    devices.load(0, write_folder(tmp_path / "hopper", configs, "sm_90a"))
    lane = devices.artifacts(0).lane(STREAM)
    run(lane.plan(N, K, M, "prepacked"), lane.ring(0), slots=0x900000)
    assert [launch["programmatic"] for launch in fake.launches()] == ["0", "1", early]


def test_fused_is_one_cooperative_launch(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    lane = devices.artifacts(0).lane(STREAM)
    plan = lane.plan(N, 256, M, "fused")
    assert plan.capacity_rows == RingGemmConfig.for_linear(N, 256, group=1).ring_rows
    ring = lane.ring(plan.slot_bytes(M))
    for scale, rule in ((0, 1), (SCALE, -1)):
        run(plan, ring, scale=scale, rule=1, x_stride=256)
        (launch,) = fake.launches()
        assert (launch["cooperative"], launch["programmatic"]) == ("1", "0")
        assert launch["params"].endswith(f",{256:#x},{rule}")
        assert hex(scale or ring.state + _core.SCALE_OFFSET) in launch["params"]


def test_rows_beyond_int32_bytes_are_addressed(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    ring = Ring(capacity_rows=2048, k=K, device=0)
    m, stride = 40_000, 1 << 20
    run(ring.plan(N, K, m, "ring"), ring.core, m=m, x_stride=stride)
    last = [launch for launch in fake.launches() if launch["kernel"].startswith("pack")][-1]
    assert last["params"].split(",")[0] == hex(X + 19 * 2048 * stride * 2)


@pytest.mark.parametrize(("arch", "most"), [("sm_121a", 1 << 27), ("sm_90a", 1 << 25)])
def test_rows_beyond_the_reach_of_kernels_are_refused(
    fake: FakeDriver, tmp_path: Path, arch: str, most: int
) -> None:
    """m * (bytes of a packed row) <= 2^33: the kernels count words of 4 bytes in signed 32 bits."""
    fake.set_capability(*((9, 0) if arch == "sm_90a" else (12, 1)))
    gemm = HopperGemmConfig.variants(N, K)[0] if arch == "sm_90a" else GemmConfig.with_tile(N, K)
    packing = PackConfig(k=K, output="bf16" if arch == "sm_90a" else "packed")
    devices.load(0, write_folder(tmp_path / "cubins", [AbsmaxConfig(k=K), packing, gemm], arch))
    loaded = devices.artifacts(0)
    lane = loaded.lane(STREAM)
    assert lane.plan(N, K, most, "prepacked").schedule == "prepacked"
    with pytest.raises(InputError, match=rf"K = {K}.*at most {most}; got {most + 1}.*schedule='ring'"):
        lane.plan(N, K, most + 1, "prepacked")
    assert lane.plan(N, K, most + 1, "ring").schedule == "ring"
    with pytest.raises(InputError):
        loaded.plan("ring", N, K, most + 1, most + 128)  # a ring that large
    # A choice that was tuned for fewer rows gives way.
    loaded.prefer(N, K, 2048, "prepacked", gemm.name)
    assert lane.plan(N, K, most, "auto").schedule == "prepacked"
    assert lane.plan(N, K, most + 1, "auto").schedule == "ring"


def test_each_stream_has_its_own_ring_and_launches(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    lanes = [devices.artifacts(0).lane(stream) for stream in (1, 2, 1)]
    assert lanes[0] is lanes[2]
    rings = [lane.ring(1000) for lane in lanes]
    assert rings[0] is rings[2]
    assert rings[0].data != rings[1].data
    assert lanes[0].ring(500) is rings[0]
    assert lanes[0].ring(2000).data != rings[0].data  # larger: another, the first stays


def test_one_ring_on_two_streams_is_ordered_by_an_event(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    ring = Ring(capacity_rows=128, k=K, device=0)
    plan = ring.plan(N, K, 1, "ring")
    run(plan, ring.core, stream=0)
    fake.log()
    run(plan, ring.core, stream=0)
    assert fake.log("cuStreamWaitEvent") == []
    run(plan, ring.core, stream=5, m=1)
    log = fake.log("cuStreamWaitEvent", "cuLaunchKernelEx", "cuEventRecord")
    assert [line.split()[0] for line in log] == [
        "cuStreamWaitEvent",
        *3 * ["cuLaunchKernelEx"],
        "cuEventRecord",
    ]
    assert "stream=0x5" in log[0]
    assert "stream=0x5" in log[-1]


def test_a_captured_ring_belongs_to_its_graph(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    ring = Ring(capacity_rows=128, k=K, device=0)
    plan = ring.plan(N, K, 1, "ring")
    run(plan, ring.core, stream=4)
    fake.set_capture(9, 1234)
    fake.set_event_pending(1)
    with pytest.raises(RingError, match="in use by work outside"):
        run(plan, ring.core, stream=9)
    fake.set_event_pending(0)
    fake.log()
    run(plan, ring.core, stream=9)
    run(plan, ring.core, stream=9)
    assert fake.log("cuStreamWaitEvent") == []  # a capture must not wait for what is outside of it
    fake.set_capture(9, 0)
    with pytest.raises(RingError, match="belongs to a CUDA graph"):
        run(plan, ring.core, stream=9)
    fake.set_capture(9, 5678)
    with pytest.raises(RingError, match="belongs to a CUDA graph"):
        run(plan, ring.core, stream=9)
    fake.set_capture(9, 0)


def test_no_ring_is_allocated_in_a_capture(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    fake.set_capture(0, 77)
    fake.log()
    with pytest.raises(RingError, match="before the capture"):
        Ring(capacity_rows=128, k=K, device=0)
    assert fake.log("cuMemAlloc") == []
    fake.set_capture(0, 0)


def test_allocation_is_allowed_while_another_thread_captures(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    fake.log()
    Ring(capacity_rows=128, k=K, device=0)
    (allocation,) = fake.log("cuMemAlloc")
    assert allocation.endswith("mode=2")  # CU_STREAM_CAPTURE_MODE_RELAXED


def test_ring_memory_is_the_slots_and_one_state_block(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    fake.log()
    ring = Ring(capacity_rows=2048, k=5376, device=0)
    assert ring.nbytes == 2048 * (5376 // 2 + 5376 // 16) + _core.STATE_BYTES
    assert _core.STATE_BYTES <= 65_536
    log = fake.log("cuMemAlloc", "cuMemsetD8Async")
    assert f"bytes={ring.nbytes} " in log[0]
    assert f"address={ring.core.state:#x} value=0 bytes={_core.STATE_BYTES}" in log[1]
    before = fake.live()["memory"]
    del ring
    assert fake.live()["memory"] == before - 1


def test_a_ring_that_is_too_small_is_refused(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    small = Ring(capacity_rows=128, k=32, device=0)
    fake.log()
    for _ in range(2):  # the refusal is not forgotten
        with pytest.raises(RingError, match="larger capacity_rows or k"):
            api.launch(Stand(X), M, K, weight_of(), None, "fp32", None, Stand(Y), small, "ring")
    assert fake.launches() == []


def test_devices_have_their_own_kernels_and_rings(fake: FakeDriver, folder: Path) -> None:
    fake.set_devices(2)
    for device in (0, 1):
        devices.load(device, folder)
        lane = devices.artifacts(device).lane(STREAM)
        fake.log()
        run(lane.plan(N, K, 1, "ring"), lane.ring(100_000))
        assert {launch["context"] for launch in fake.launches()} == {hex(0xC000 + device)}
    assert devices.artifacts(0).lane(STREAM) is not devices.artifacts(1).lane(STREAM)


def test_many_threads_on_their_own_streams(fake: FakeDriver, folder: Path) -> None:
    """Every launch of a call has that call's pointers, whatever the others do."""
    devices.load(0, folder)
    loaded, rounds, streams = devices.artifacts(0), 25, 9
    lanes = [loaded.lane(0x100 + i) for i in range(streams)]
    rings = [lane.ring(1_000_000) for lane in lanes]
    fake.log()

    def work(i: int) -> None:
        for r in range(rounds):
            m = 1 + r * 7
            run(lanes[i].plan(N, K, m, "ring"), rings[i], 0x100 + i, m, x=X + i * 0x100000 + r * 0x100)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = fake.launches()
    assert len(launches) == streams * rounds * 3
    for i in range(streams):
        mine = [launch for launch in launches if launch["stream"] == hex(0x100 + i)]
        assert [launch["kernel"].split("_")[0] for launch in mine] == rounds * ["absmax", "pack", "gemm"]
        for r in range(rounds):
            x = hex(X + i * 0x100000 + r * 0x100)
            assert mine[3 * r]["params"].startswith(x)
            assert mine[3 * r + 1]["params"].startswith(x)
            assert mine[3 * r + 1]["params"].endswith(
                f"{rings[i].data:#x},{rings[i].data + 2048 * K // 2:#x}"
            )


def test_threads_sharing_a_ring_do_not_interleave_their_launches(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    ring = Ring(capacity_rows=128, k=K, device=0)
    plan = ring.plan(N, K, M, "ring")
    fake.log()

    def work(i: int) -> None:
        for _ in range(25):
            run(plan, ring.core, 0x100 + i, x=X + i * 0x100000)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = fake.launches()
    assert len(launches) == 4 * 25 * 7
    for first in range(0, len(launches), 7):
        assert len({launch["stream"] for launch in launches[first : first + 7]}) == 1


def test_api_hands_over_the_pointers_of_its_tensors(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    fake.log()
    api.launch(Stand(X), M, K, weight_of(), None, "bf16", Stand(0x70000), Stand(Y), None, "ring")
    launches = fake.launches()
    assert launches[0]["params"].startswith(f"{X:#x},{K:#x},{M},1,")
    assert launches[-1]["params"].endswith(f",{W_SCALE:#x},0x70000,{M}")
    assert f"map:{W:#x}" in launches[-1]["params"]


def test_nvtx_marks_calls_only_if_switched_on(
    fake: FakeDriver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: nullcontext(marks.append(name)))
    devices.load(0, folder)
    call = (Stand(X), M, K, weight_of(), None, "fp32", None, Stand(Y), None, "ring")
    api.launch(*call)
    assert marks == []
    set_nvtx(True)
    try:
        api.launch(*call)
    finally:
        set_nvtx(False)
    assert marks == ["ringfp4.linear"]


def test_sm_90a_reads_its_own_weight_layout(fake: FakeDriver, tmp_path: Path) -> None:
    fake.set_capability(9, 0)
    gemm = HopperGemmConfig.variants(N, K)[0]
    configs = [AbsmaxConfig(k=K), PackConfig(k=K, output="bf16"), gemm, HopperRepackConfig(k=K)]
    devices.load(0, write_folder(tmp_path, configs, "sm_90a"))
    ring = Ring(128, K, 0)
    partials = SMS * gemm.partial_bytes
    assert ring.core.data_bytes == 128 * K * 2 + partials  # decoded values, BF16
    fake.log()
    call = (Stand(X), M, K)
    rest = (None, "fp32", None, Stand(Y), ring, "ring")
    with pytest.raises(RingError, match=r"weight.prepare\(\)"):
        api.launch(*call, weight_of(_transient=True), *rest)
    assert fake.launches() == []
    api.launch(*call, weight_of(prepared=Stand(PREPARED)), *rest)
    launches = fake.launches()
    assert len(launches) == 7
    assert launches[2]["params"].startswith(f"{PREPARED:#x},map:{ring.core.data:#x}")
    assert not any(hex(W) in launch["params"] for launch in launches)
