"""``python -m ringfp4``: what it says about drivers, devices and folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver_harness import FakeDriver, linear_configs, write_folder
from ringfp4.__main__ import main
from ringfp4.runtime import devices


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_folder(tmp_path / "packaged", linear_configs(256, 128))
    monkeypatch.setattr(devices, "PACKAGED", folder)
    return folder


def test_a_served_device(fake: FakeDriver, packaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "driver     13.0" in said
    assert f"3 kernels in {packaged}, every cubin as its manifest says" in said
    assert "sm_121a: N=256 K=128 (prepacked/ring)" in said
    assert "device 0   Fake GPU 0, compute capability 12.1, 48 multiprocessors" in said
    assert "serves N=256 K=128" in said
    assert fake.live()["modules"] == 0  # it loads nothing


def test_why_a_device_is_not_served(
    fake: FakeDriver, packaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.set_capability(12, 0)
    assert main([]) == 0
    assert "serves nothing: the package ships no cubins for sm_120f" in capsys.readouterr().out
    fake.set_capability(8, 6)
    assert main([]) == 0
    assert "no kernels exist for compute capability 8.6" in capsys.readouterr().out


def test_no_device_and_no_driver(
    fake: FakeDriver, packaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(devices.DRIVER_VARIABLE, "/nowhere/libcuda.so")
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "no CUDA driver" in said
    assert "computed by the reference implementation" in said


def test_a_damaged_folder_is_an_error(
    fake: FakeDriver, packaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_folder(tmp_path / "other", linear_configs(512, 128))
    cubin = next(other.glob("*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    assert main([str(other)]) == 1
    assert "damaged or was replaced" in capsys.readouterr().out


def test_nothing_shipped(fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                         capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(devices, "PACKAGED", tmp_path)
    assert main([]) == 0
    assert "none in this package" in capsys.readouterr().out
    with pytest.raises(devices.UnservedError, match="ships no cubins") as caught:
        devices.load(0)
    assert "--arch sm_121a" in caught.value.remedy
