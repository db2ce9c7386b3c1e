"""The validation command where it needs no GPU: statuses, report, captures, and its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ringfp4.errors import InputError
from ringfp4.validate import __main__ as command
from ringfp4.validate import captures, gates, report
from ringfp4.validate.gates import Context, Gate, Outcome, evaluate
from ringfp4.validate.level2 import judge_equality
from ringfp4.validate.report import Result, Status


def gate(outcome: Outcome | Exception, *needs: str, level: int = 1) -> Gate:
    def run(_: Context) -> Outcome:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Gate(level, "a gate", needs, run)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome(True), Status.PASSED),
        (Outcome(False), Status.FAILED),
        (Outcome(None), Status.NOT_APPLICABLE),
        (InputError("broken"), Status.FAILED),
        (RuntimeError("CUDA error"), Status.FAILED),
        (IndexError("out of range"), Status.FAILED),
    ],
)
def test_status_of_a_gate(outcome: Outcome | Exception, status: Status) -> None:
    result = evaluate(gate(outcome), Context())
    assert result.status is status
    if isinstance(outcome, Exception):
        assert str(outcome) in result.detail


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_gates_that_need_cublas_never_pass_on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    passing = gate(Outcome(True), "block-scaled")
    on_a_gpu(monkeypatch, (9, 0))
    assert evaluate(passing, Context()).status is Status.NOT_APPLICABLE
    on_a_gpu(monkeypatch, (12, 1))
    assert evaluate(passing, Context()).status is Status.PASSED


def test_every_comparison_with_cublas_needs_block_scaled_hardware() -> None:
    with_cublas = [g for g in command.gates(Context()) if "scaled_mm" in g.name or "with Comfy" in g.name]
    assert len(with_cublas) == 8
    assert all({"block-scaled", "comfy", "kernels"} <= set(g.needs) for g in with_cublas)


def test_needs_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Context().missing("cuda") == "no CUDA device"
    on_a_gpu(monkeypatch, (9, 0))
    assert Context(why_unserved="because").missing("kernels") == "because"
    assert "this is 9.0" in Context().missing("block-scaled")
    monkeypatch.setattr(gates.comfy, "version", lambda: "0.2.30")
    assert "found 0.2.30" in Context().missing("comfy")
    assert Context().missing("cuda") == ""


def test_fc2_is_known_to_differ_from_cublas_and_others_are_not() -> None:
    assert judge_equality("fc2", 3, 10, {}).ok is None
    assert judge_equality("fc2", 0, 10, {}).ok is True
    assert judge_equality("qkv", 3, 10, {}).ok is False


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([Status.PASSED, Status.NOT_APPLICABLE, Status.SKIPPED], 0),
        ([Status.PASSED, Status.FAILED], 1),
        ([Status.NOT_APPLICABLE, Status.SKIPPED], 2),
    ],
)
def test_exit_status(statuses: list[Status], expected: int) -> None:
    assert report.exit_status([Result(1, "a gate", status) for status in statuses]) == expected


def test_levels_above_the_wanted_one_are_skipped_and_the_ladder_is_complete() -> None:
    shown: list[Result] = []
    wanted = [gate(Outcome(True), level=level) for level in (1, 2, 3)]
    results = command.run(wanted, Context(), 2, shown.append)
    assert shown == results
    assert [r.level for r in results] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [r.status for r in results] == 2 * [Status.PASSED] + 6 * [Status.SKIPPED]


def test_report_file_and_exit_status_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "report.json"
    assert command.main(["--json", str(file)]) == 2
    content = json.loads(file.read_text())
    assert content["format"] == report.FORMAT
    assert content["exit_status"] == 2
    assert {"time", "device", "gpu_state", "versions"} <= set(content["environment"])
    assert {r["status"] for r in content["results"]} == {"not applicable here", "skipped"}
    assert {r["level"] for r in content["results"]} == set(range(1, 9))
    assert "nothing could be decided" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]


def test_a_report_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("ran all the same"))
    with pytest.raises(SystemExit):
        command.main(["--json", str(tmp_path / "nowhere" / "report.json")])
    assert "no folder" in capsys.readouterr().err


def test_failed_gate_gives_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gates", lambda _: [gate(Outcome(True)), gate(Outcome(False))])
    assert command.main(["--level", "1"]) == 1


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = {dtype: name for name, dtype in captures.DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"made_by": "a test"}}
    body = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def projection(name: str) -> dict[str, torch.Tensor]:
    return {
        f"{name}.x": torch.randn(3, 64).bfloat16(),
        f"{name}.qdata": torch.randint(0, 256, (8, 32), dtype=torch.uint8),
        f"{name}.block_scale": torch.ones(128, 4).to(torch.float8_e4m3fn),
        f"{name}.tensor_scale": torch.tensor([0.5]),
    }


def test_captures_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "captures.safetensors"
    tensors = (
        projection("block24.qkv") | projection("block0.fc1") | {"block0.fc1.y": torch.zeros(3, 8).bfloat16()}
    )
    write_safetensors(file, tensors)
    fc1, qkv = captures.read(file)
    assert (fc1.name, qkv.name) == ("block0.fc1", "block24.qkv")
    for capture in (fc1, qkv):
        for key in ("x", "qdata", "block_scale", "tensor_scale"):
            found, written = getattr(capture, key), tensors[f"{capture.name}.{key}"]
            assert found.dtype is written.dtype
            assert torch.equal(found.view(torch.uint8), written.view(torch.uint8))
    assert qkv.y is None
    assert fc1.y is not None
    assert fc1.y.shape == (3, 8)


def test_captures_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    file = tmp_path / "captures.safetensors"
    tensors = projection("block0.qkv")
    library.save_file(tensors, str(file))
    for name, tensor in captures.read_tensors(file).items():
        assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.x": None}, "lacks a.x"),
        ({"a.x": torch.zeros(3, 64)}, "a.x is unusable"),
        ({"a.qdata": torch.zeros(8, 30, dtype=torch.uint8)}, "a.qdata is unusable"),
        ({"a.tensor_scale": torch.zeros(2)}, "a.tensor_scale is unusable"),
        ({"a.y": torch.zeros(3, 9).bfloat16()}, "a.y is unusable"),
    ],
)
def test_unusable_captures_are_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = {k: v for k, v in (projection("a") | change).items() if v is not None}
    file = tmp_path / "captures.safetensors"
    write_safetensors(file, tensors)
    with pytest.raises(InputError, match=message):
        captures.read(file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (1 << 40).to_bytes(8, "little"),
        (4).to_bytes(8, "little") + b"{]}!",
        (2).to_bytes(8, "little") + b"{}",
        (74).to_bytes(8, "little")
        + b'{"a.x": {"dtype": "BF16", "shape": [3, 64], "data_offsets": [0, 100000]}}  ',
        (46).to_bytes(8, "little") + b'{"a.x": {"dtype": "I65", "shape": [3, 64]}}   ',
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "captures.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError):
        captures.read(file)


def test_missing_captures_file_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--captures", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err
