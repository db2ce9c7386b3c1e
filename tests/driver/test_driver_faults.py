"""The driver fails at every call it gets, once: the right exception, nothing leaked, and the next
attempt works. Also drivers that are missing, too old or incomplete."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from driver_harness import FakeDriver, K, M, N, linear_configs, write_folder
from ringfp4.dsl.config.ring import RingGemmConfig
from ringfp4.dsl.ring_order import REASONS
from ringfp4.errors import ArtifactError, DriverError, UnservedError
from ringfp4.runtime import Ring, _core, devices

POINTERS = {name: (i + 1) << 40 for i, name in enumerate(("x", "y", "w", "w_sf", "w_scale"))}
OUT_OF_MEMORY, LAUNCH_FAILED = 2, 719
SYMBOLS = [
    "cuInit", "cuModuleLoadData", "cuFuncLoad", "cuFuncGetParamInfo", "cuLaunchKernelEx", "cuMemAlloc",
    "cuTensorMapEncodeTiled", "cuStreamGetCaptureInfo", "cuThreadExchangeStreamCaptureMode",
]  # fmt: skip
LOADING = [
    ("cuDeviceGet", 1), ("cuDeviceGetAttribute", 1), ("cuDevicePrimaryCtxRetain", 1), ("cuCtxGetCurrent", 1),
    ("cuCtxPushCurrent", 1), ("cuMemHostAlloc", 1), ("cuModuleLoadData", 1), ("cuModuleLoadData", 3),
    ("cuModuleGetFunction", 2), ("cuFuncLoad", 2), ("cuFuncSetAttribute", 1),
]  # fmt: skip
RING = [("cuStreamGetCaptureInfo", 1), ("cuMemAlloc", 1), ("cuMemsetD8Async", 1), ("cuEventCreate", 1),
        ("cuEventRecord", 1), ("cuEventSynchronize", 1)]  # fmt: skip
# 300 rows in chunks of 128: absmax, then three times pack and gemm with five tensor maps.
RUNNING = [("cuStreamGetCaptureInfo", 1), ("cuStreamWaitEvent", 1), ("cuTensorMapEncodeTiled", 1),
           ("cuTensorMapEncodeTiled", 5), ("cuTensorMapEncodeTiled", 6),
           *(("cuLaunchKernelEx", nth) for nth in range(1, 8))]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "cubins", linear_configs(N, K))


def run(ring: Ring, stream: int) -> None:
    ring.plan(N, K, M, "ring").sequence.run(ring.core, stream, M, x_stride=K, **POINTERS)


@pytest.mark.parametrize(("call", "nth"), LOADING)
def test_loading_fails_cleanly_and_can_be_repeated(
    fake: FakeDriver, folder: Path, call: str, nth: int
) -> None:
    devices.driver()
    before = fake.live()
    fake.fail(call, nth, OUT_OF_MEMORY)
    with pytest.raises(DriverError) as caught:
        devices.load(0, folder)
    assert caught.value.code == OUT_OF_MEMORY
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert call in caught.value.what
    assert caught.value.remedy
    del caught  # its traceback holds what was half made
    assert fake.live() == before
    devices.load(0, folder)
    assert fake.live()["modules"] == before["modules"] + 3


@pytest.mark.parametrize(("call", "nth"), RING)
def test_making_a_ring_fails_cleanly(fake: FakeDriver, folder: Path, call: str, nth: int) -> None:
    devices.load(0, folder)
    before = fake.live()
    fake.fail(call, nth, OUT_OF_MEMORY)
    with pytest.raises(DriverError, match=call):
        Ring(128, K, 0)
    assert fake.live() == before
    run(Ring(128, K, 0), 7)


@pytest.mark.parametrize(("call", "nth"), RUNNING)
def test_a_sequence_stops_at_a_failure_and_runs_again(
    fake: FakeDriver, folder: Path, call: str, nth: int
) -> None:
    devices.load(0, folder)
    ring = Ring(128, K, 0)
    fake.log()
    fake.fail(call, nth, LAUNCH_FAILED)
    with pytest.raises(DriverError) as caught:
        run(ring, 7)
    assert (caught.value.code, caught.value.name) == (LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED")
    assert call in caught.value.what
    log = fake.log("cuLaunchKernelEx", "cuEventRecord")
    if call == "cuLaunchKernelEx":  # the failed one is recorded, nothing after it is launched
        assert sum(line.startswith("cuLaunchKernelEx") for line in log) == nth
    if call not in ("cuStreamGetCaptureInfo", "cuStreamWaitEvent"):
        # What was launched may still use the ring: the next stream has to wait for it.
        assert log[-1].startswith("cuEventRecord")
    run(ring, 7)
    assert len(fake.launches()) == 7
    del caught
    live = fake.live()
    del ring
    assert fake.live() == live | {"memory": live["memory"] - 1, "events": live["events"] - 1}


def test_the_words_of_a_stopped_kernel_come_with_the_next_error(fake: FakeDriver, tmp_path: Path) -> None:
    """A fused kernel writes them into host memory before it traps; the test does so in its place."""
    fused = RingGemmConfig.for_linear(N, 256, group=1)
    devices.load(0, write_folder(tmp_path, [fused]))
    loaded = devices.artifacts(0)
    lane = loaded.lane(7)
    plan = lane.plan(N, 256, M, "fused")
    ring = lane.ring(plan.slot_bytes(M))
    fake.log()
    plan.sequence.run(ring, 7, M, **POINTERS)
    names = [param.name for param in fused.params()]
    status = int(fake.launches()[0]["params"].split(",")[names.index("status")], 16)
    assert loaded.context.status == [0, 0, 0, 0]
    (ctypes.c_uint32 * 4).from_address(status)[:] = (2, 17, 48, 47)
    fake.fail("cuLaunchKernelEx", 1, LAUNCH_FAILED)
    with pytest.raises(DriverError, match="reason 2, counter 17, waited for 48, saw 47") as caught:
        plan.sequence.run(ring, 7, M, **POINTERS)
    assert caught.value.code == LAUNCH_FAILED
    fake.fail("cuStreamGetCaptureInfo", 1, LAUNCH_FAILED)
    with pytest.raises(DriverError, match="reason 2"):
        loaded.context.capturing(7)
    for reason, words in REASONS.items():
        ctypes.c_uint32.from_address(status).value = reason
        fake.fail("cuLaunchKernelEx", 1, LAUNCH_FAILED)
        with pytest.raises(DriverError, match=rf"stopped before: {words} \(reason {reason}, "):
            plan.sequence.run(ring, 7, M, **POINTERS)


def test_a_failed_tensor_map_is_not_taken_for_encoded(fake: FakeDriver, folder: Path) -> None:
    devices.load(0, folder)
    ring = Ring(128, K, 0)
    run(ring, 7)
    fake.log()
    run(ring, 7)
    usual = fake.log("cuTensorMapEncodeTiled")
    fake.fail("cuTensorMapEncodeTiled", 1, OUT_OF_MEMORY)
    with pytest.raises(DriverError):
        run(ring, 7)
    fake.log()
    run(ring, 7)
    assert fake.log("cuTensorMapEncodeTiled") == usual


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_an_incomplete_driver_is_named(fake: FakeDriver, symbol: str) -> None:
    fake.hide(symbol)
    with pytest.raises(DriverError, match=f"lacks {symbol}; it is version 13.0"):
        devices.driver()
    fake.hide("")
    assert devices.driver().version == 13000


def test_an_old_driver_is_named(fake: FakeDriver) -> None:
    fake.set_version(12020)
    with pytest.raises(DriverError, match=r"version 12\.2") as caught:
        devices.driver()
    assert "12.4 or newer" in caught.value.remedy


def test_no_driver_and_no_device(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(devices.DRIVER_VARIABLE, str(tmp_path / "libnothing.so"))
    with pytest.raises(DriverError, match="no CUDA driver"):
        devices.load(0)
    monkeypatch.setenv(devices.DRIVER_VARIABLE, str(fake.path))
    fake.set_devices(0)
    with pytest.raises(DriverError, match="cuInit"):
        devices.load(0)


def test_a_library_that_is_no_driver(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="no CUDA driver"):
        _core.Driver("libm.so.6")


def test_unserved_devices_and_architectures(fake: FakeDriver, folder: Path) -> None:
    fake.set_capability(8, 9)
    with pytest.raises(UnservedError, match=r"compute capability 8\.9"):
        devices.load(0, folder)
    fake.set_capability(12, 0)  # cannot run sm_121a, all there is in the folder
    with pytest.raises(ArtifactError, match="no cubins for Fake GPU 0") as caught:
        devices.load(0, folder)
    assert (caught.value.expected, caught.value.got) == ("sm_120f", "sm_121a")
    assert "--arch sm_120f" in caught.value.remedy
    with pytest.raises(UnservedError, match="sm_121a does not run"):
        devices.load(0, folder, arch="sm_121a")
    fake.set_capability(12, 1)
    with pytest.raises(ArtifactError, match="no cubins"):
        devices.load(0, folder, arch="sm_120f")
    devices.load(0, folder)


def test_a_manifest_of_another_cubin_is_refused(fake: FakeDriver, folder: Path) -> None:
    """The parameters that the driver reads from the cubin must be those of the manifest."""
    before = fake.live()
    manifest = folder / "manifest.json"
    whole = manifest.read_text()
    scale, m = '{"name": "scale", "kind": "pointer"}', '{"name": "m", "kind": "i32"}'
    assert scale in whole
    manifest.write_text(whole.replace(scale, m, 1))
    with pytest.raises(ArtifactError, match="has 8 bytes in the cubin, 4 in the manifest"):
        devices.load(0, folder)
    manifest.write_text(whole.replace(f", {scale}", "", 1))
    with pytest.raises(ArtifactError, match="parameters in the cubin"):
        devices.load(0, folder)
    assert fake.live() == before


def test_a_file_that_is_no_cubin_is_refused(fake: FakeDriver, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, linear_configs(N, K))
    content = json.loads((folder / "manifest.json").read_text())
    kernel = content["kernels"][0]
    (folder / kernel["file"]).write_bytes(b"not a cubin")
    kernel["sha256"] = hashlib.sha256(b"not a cubin").hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_IMAGE") as caught:
        devices.load(0, folder)
    assert "build_cubins" in caught.value.remedy


def test_info_explains_without_raising(fake: FakeDriver, folder: Path) -> None:
    fake.set_devices(2)
    fake.set_capability(8, 0)
    report = devices.info()
    assert report["driver"] == "13.0"
    described = report["devices"]
    assert isinstance(described, list)
    assert [d["name"] for d in described] == ["Fake GPU 0", "Fake GPU 1"]
    assert "compute capability 8.0" in described[0]["serves"]
    fake.set_capability(12, 1)
    devices.load(1, folder)
    described = devices.info()["devices"]
    assert isinstance(described, list)
    assert described[0]["loaded"] is None
    assert described[1]["loaded"] == [str(folder)]
    assert f"N={N} K={K}" in described[1]["serves"]
    fake.fail("cuDeviceGetAttribute", 1, LAUNCH_FAILED)
    assert "cuDeviceGetAttribute" in str(devices.info()["driver"])


SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from ringfp4.errors import DriverError
from ringfp4.runtime import Ring, devices
devices.load(0, Path({folder!r}))
ring = Ring(128, {k}, 0)
lane = devices.artifacts(0).lane(5)
core = lane.ring(100_000)
plan = lane.plan({n}, {k}, 1, "ring")

def run():
    places = dict(x=1 << 40, y=1 << 41, w=1 << 42, w_sf=1 << 43, w_scale=1 << 44)
    plan.sequence.run(core, 5, 1, x_stride={k}, **places)

run()
"""


def in_process(body: str, fake: FakeDriver, folder: Path) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(folder), n=N, k=K)
    return subprocess.run(
        [sys.executable, "-c", script + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, devices.DRIVER_VARIABLE: str(fake.path)},
        check=False,
    )


def test_a_forked_child_is_told_and_the_parent_goes_on(fake: FakeDriver, folder: Path) -> None:
    body = """
    child = os.fork()
    if child == 0:
        try:
            run()
        except DriverError as error:
            assert "forked" in str(error) and "spawn" in error.remedy
            sys.exit(7)  # an ordinary exit, with all destructors
        sys.exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    run()
    print("fine")
    """
    done = in_process(body, fake, folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_the_interpreter_exits_quietly_with_everything_alive(fake: FakeDriver, folder: Path) -> None:
    """Module-level rings, lanes and plans: nanobind would report what leaked on stderr."""
    done = in_process("print('fine')", fake, folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_a_leak_would_be_reported(fake: FakeDriver, folder: Path) -> None:
    """The test above can fail: one reference too many, and stderr is not empty."""
    body = """
    import ctypes
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(ring))
    """
    assert "nanobind: leaked" in in_process(body, fake, folder).stderr


def test_ten_thousand_calls_leak_nothing(fake: FakeDriver, folder: Path) -> None:
    nothing = fake.live()
    devices.load(0, folder)
    ring = Ring(128, K, 0)
    live = fake.live()
    for i in range(10_000):
        if i % 1000 == 0:
            fake.log()
            Ring(128, K, 0)
        run(ring, i % 3)
    assert fake.live() == live
    del ring
    devices.unload()
    assert fake.live() == nothing
