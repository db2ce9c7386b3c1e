"""What ``bench linear`` writes is what ``--from-json`` reports."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

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
