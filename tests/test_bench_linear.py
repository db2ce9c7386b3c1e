"""What ``bench linear`` writes is what ``--from-json`` reports; what it refuses and how it has to time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ringfp4.errors import UnservedError

from bench import linear
from bench.harness import Timing


def result(m: int, cublas: float, ours: float) -> linear.Result:
    timings = {
        linear.CUBLAS: Timing(cublas, cublas / 2, cublas * 2),
        "prepacked": Timing(ours, ours, ours),
        linear.CALIBRATED: Timing(ours / 2, ours / 2, ours / 2),
    }
    return linear.Result("qkv", m, 5376, 21504, 0.25, timings)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    rows = [asdict(row) for r in (result(16, 2.0, 1.0), result(2048, 3.0, 4.0)) for row in r.rows()]
    file = tmp_path / "linear.json"
    file.write_text(json.dumps({"title": "Linears on a device", "rows": rows}))
    return file


def test_results_are_read_as_they_were(written: Path) -> None:
    title, results = linear.read_results(written)
    assert title == "Linears on a device"
    assert results == [result(16, 2.0, 1.0), result(2048, 3.0, 4.0)]


def test_an_earlier_run_is_reported_without_a_gpu(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "linear.md"
    assert linear.main(["--from-json", str(written), "--markdown", str(page)]) == 0
    assert "Linears on a device" in capsys.readouterr().out
    rows = [line for line in page.read_text().splitlines() if line.startswith("| qkv")]
    assert rows == [
        "| qkv | 16 | 2000.0 | 1000.0 | 500.0 | 2.000 | 4.000 |  | 0.250 |",
        "| qkv | 2048 | 3000.0 | 4000.0 | 2000.0 | 0.750 | 1.500 |  | 0.062 |",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sustained", "0"], "argument --sustained: 0 is not a positive number"),
        (["--sustained", "-1"], "argument --sustained: -1 is not a positive number"),
        (["--sustained", "nan"], "argument --sustained: nan is not a positive number"),
        (["--sustained", "inf"], "argument --sustained: inf is not a positive number"),
        (["--sustained", "1", "--eager"], "--eager: not allowed with argument --sustained"),
        (["--json", "missing/x.json"], "argument --json: there is no folder missing"),
        (["--markdown", "missing/x.md"], "argument --markdown: there is no folder missing"),
        (["--plot", "missing/x.png"], "argument --plot: there is no folder missing"),
    ],
)
def test_refused_before_anything_is_measured(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(linear, "require_cuda", lambda: pytest.fail("went on"))
    with pytest.raises(SystemExit) as refusal:
        linear.main(options)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def keywords(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Keywords of each call of time_all, which measures nothing; no kernel is needed."""
    calls: list[dict[str, object]] = []

    def time_all(runs: object, inputs: int, rounds: int, **given: object) -> dict[str, Timing]:
        calls.append({"rounds": rounds, **given})
        return result(16, 2.0, 1.0).timings

    def unserved(*_: object, **__: object) -> None:
        raise UnservedError("no kernel")

    weights = SimpleNamespace(n=32, k=32, packed=[None], bf16=[None], comfy=[None])
    for name, fake in (
        ("time_all", time_all),
        ("require_cuda", lambda: torch.device("cpu")),
        ("measure_ceilings", lambda _: linear.Ceilings(1e12, 1e15)),
        ("Weights", lambda *_: weights),
        ("Expected", lambda *_: None),
        ("runtime", SimpleNamespace(ring_linear=unserved)),
        ("lowlevel", SimpleNamespace(absmax=lambda _: torch.ones(()))),
    ):
        monkeypatch.setattr(linear, name, fake)
    properties = SimpleNamespace(name="a device", multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: properties.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return calls


@pytest.mark.parametrize(
    ("options", "given", "ending"),
    [
        (["--sustained", "1"], {"rounds": 15, "eager": False, "seconds": 1.0}, "; each alone for 1.0 s"),
        (["--eager"], {"rounds": 15, "eager": True, "seconds": 0.0}, "; called from Python"),
        (["--rounds", "3"], {"rounds": 3, "eager": False, "seconds": 0.0}, " TFLOP/s"),
    ],
)
def test_the_mode_is_timed_and_the_title_says_so_later_too(
    options: list[str],
    given: dict[str, object],
    ending: str,
    keywords: list[dict[str, object]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "linear.json"
    assert linear.main([*options, "--roles", "qkv", "--rows", "16", "--json", str(file)]) == 0
    assert keywords == [given]
    title = capsys.readouterr().out.splitlines()[1]
    assert title.startswith("Linears on a device")
    assert title.endswith(ending)
    assert linear.main(["--from-json", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == title
