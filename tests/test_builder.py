"""The builder's command line, end to end with the real compiler on one small linear."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ringfp4.build_cubins import sources
from ringfp4.build_cubins.__main__ import main
from ringfp4.build_cubins.cache import Cache
from ringfp4.build_cubins.compiler import Built, Compiler
from ringfp4.build_cubins.elf import read_cubin
from ringfp4.build_cubins.job import Job, plan_jobs
from ringfp4.build_cubins.report import Progress
from ringfp4.dsl.config import AbsmaxConfig, Linear

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the build extra (the DSL)"
)

SMALL = ["--linear", "small=96x64"]
ARCHS = ["sm_121a", "sm_120f", "twin"]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A first build, whose cache the other tests of this module share."""
    root = tmp_path_factory.mktemp("builder")
    arguments = [*SMALL, "--arch", *ARCHS, "--cache", str(root / "cache"), "--out", str(root / "cubins")]
    assert main([*arguments, "--keep", "ptx", "sass"]) == 0
    return root


def test_what_is_in_the_folder(first: Path) -> None:
    entries = json.loads((first / "cubins" / "manifest.json").read_text())["kernels"]
    names = {"manifest.json"}
    for entry in entries:
        stem = entry["file"].removesuffix(".cubin")
        names |= {f"{stem}.cubin", f"{stem}.ptx", f"{stem}.sass"}
    assert names == set(contents(first / "cubins"))
    assert {entry["arch"] for entry in entries} == set(ARCHS)
    assert {"absmax", "pack", "gemm"} <= {entry["kind"] for entry in entries}


def test_second_run_compiles_nothing_and_gives_the_same_bytes(
    first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "--arch", *ARCHS, "--cache", str(first / "cache"), "--out", str(tmp_path / "again")]
    assert main([*arguments, "--keep", "ptx", "sass"]) == 0
    printed = capfd.readouterr()
    assert "compiled" not in printed.err
    assert "unchanged" in printed.err
    assert contents(tmp_path / "again") == contents(first / "cubins")


def test_compiling_again_gives_the_same_bytes(first: Path, tmp_path: Path) -> None:
    """Another process, another hash seed, another order, no cache."""
    out = tmp_path / "other"
    command = [sys.executable, "-m", "ringfp4.build_cubins", *SMALL, "--arch", "sm_120f", "sm_121a"]
    options = ["--jobs", "1", "--cache", str(tmp_path / "cache"), "--out", str(out)]
    subprocess.run([*command, *options], env={**os.environ, "PYTHONHASHSEED": "7"}, check=True)
    before = contents(first / "cubins")
    cubins = {name: data for name, data in contents(out).items() if name.endswith(".cubin")}
    assert cubins
    assert all(before[name] == data for name, data in cubins.items())


def test_table_and_listing(first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--cache", str(first / "cache"), "--out", str(tmp_path / "out")]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "arch", "registers", "spills", "smem", "tensor", "size"]
    (gemm,) = (line.split() for line in lines if line.startswith("gemm_") and "sm_121a" in line)
    listing = (first / "cubins" / f"{gemm[0]}.sm_121a.sass").read_text()
    assert int(gemm[5]) == listing.count("OMMA.SF") > 0
    assert int(gemm[3]) == 0


def outcomes(compiler: Compiler, job: Job) -> tuple[Built, list[str]]:
    seen: list[str] = []
    results, failures = compiler.run([job], lambda job, outcome: seen.append(outcome))
    assert not failures
    return results[job], seen


@pytest.mark.parametrize("damage", [b"", b"not gzip", None])
def test_damaged_cache_entries_are_compiled_again(first: Path, tmp_path: Path, damage: bytes | None) -> None:
    job = Job(AbsmaxConfig(k=96), "sm_121a")
    good, seen = outcomes(Compiler(first / "cache", threads=1), job)
    assert seen == ["unchanged"]
    name = f"{job.key()}.json.gz"
    half = (first / "cache" / name).read_bytes()[:-100]
    (tmp_path / name).write_bytes(half if damage is None else damage)
    assert outcomes(Compiler(tmp_path, threads=1), job) == (good, ["compiled"])
    assert outcomes(Compiler(tmp_path, threads=1), job) == (good, ["unchanged"])


def test_force_compiles_what_is_cached(first: Path) -> None:
    job = Job(AbsmaxConfig(k=96), "sm_121a")
    assert outcomes(Compiler(first / "cache", threads=1, force=True), job)[1] == ["compiled"]


def test_cache_forgets_what_is_not_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for key in ("old", "used"):
        cache.store(key, b"content")
        os.utime(tmp_path / f"{key}.json.gz", (0, 0))
    assert cache.load("used") == b"content"
    (tmp_path / "gone.json.gz").symlink_to("nowhere")  # listed, but another build has deleted it
    cache.prune()
    assert (cache.load("old"), cache.load("used")) == (None, b"content")


def test_key_depends_on_what_decides_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(AbsmaxConfig(k=96), "sm_121a", ("a",))
    assert job.key() == Job(AbsmaxConfig(k=96), "sm_121a", ("b",)).key()
    others = [Job(AbsmaxConfig(k=64), "sm_121a"), Job(AbsmaxConfig(k=96), "sm_120f")]
    monkeypatch.setattr("ringfp4.build_cubins.job.tool_versions", lambda: {"nvidia-cutlass-dsl": "0"})
    assert len({job.key(), *(other.key() for other in others)}) == 3
    monkeypatch.undo()
    assert job.key() not in {other.key() for other in others}


def test_closure_follows_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's hash covers what it imports of dsl/, and nothing else."""
    (tmp_path / "dsl").mkdir()
    files = {"a": "from . import b\n", "b": "from ringfp4.dsl.c import f\n", "c": "f = 1\n", "d": ""}
    for name, text in files.items():
        (tmp_path / "dsl" / f"{name}.py").write_text(text)
    monkeypatch.setattr(sources, "_ROOT", tmp_path)

    def hashes() -> tuple[str, str]:
        return sources.closure_hash(["ringfp4.dsl.a"]), sources.closure_hash(["ringfp4.dsl.d"])

    before = hashes()
    (tmp_path / "dsl" / "c.py").write_text("f = 2\n")
    after = hashes()
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_builder_itself_does_not_import_the_dsl() -> None:
    """Its workers do: one that did would compile for whatever architecture came first."""
    code = (
        "import sys; from ringfp4.build_cubins.job import plan_jobs; from ringfp4.dsl.config import Linear\n"
        "[job.key() for job in plan_jobs([Linear('a', 96, 64)], ['twin'])]\n"
        "sys.exit('cutlass' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_roles_of_one_size_share_kernels() -> None:
    jobs = plan_jobs([Linear("a", 96, 64), Linear("b", 96, 64), Linear("c", 96, 72)], ["sm_120f"])
    roles = {job.config.name: job.roles for job in jobs}
    assert roles["absmax_k96"] == ("a", "b", "c")
    assert roles["gemm_n64_k96_128x128x128"] == ("a", "b")


def test_other_peoples_folder_is_left_alone(
    first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    assert main([*SMALL, "--arch", "sm_121a", "--cache", str(first / "cache"), "--out", str(tmp_path)]) == 1
    said = capfd.readouterr().err
    assert "thesis.tex" in said
    assert "[1/" not in said  # before anything is compiled
    assert contents(tmp_path) == {"thesis.tex": b"text"}


@pytest.mark.parametrize("option", ["--out", "--cache"])
def test_a_place_that_cannot_be_written_is_named(
    first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "folder")
    places = {"--out": str(tmp_path / "out"), "--cache": str(first / "cache")} | {option: place}
    arguments = [argument for pair in places.items() for argument in pair]
    assert main(["--linear", "a=96x64", "--arch", "sm_121a", *arguments]) == 1
    said = capfd.readouterr().err
    assert re.search(rf"error: .*{tmp_path / 'file'}", said)
    assert "Traceback" not in said


def test_refused_build_keeps_the_old_folder(
    first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cubins"
    arguments = [*SMALL, "--arch", "sm_121a", "--cache", str(first / "cache"), "--out", str(out)]
    assert main(arguments) == 0
    before = contents(out)
    assert main([*arguments, "--ptxas", "13.4"]) == 1
    assert "must not ship: ptxas: expected 13.4" in capfd.readouterr().err
    assert contents(out) == before
    assert [file.name for file in tmp_path.iterdir()] == ["cubins"]


def test_mistaken_shapes_compile_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    assert main(["--linear", "a=33x8", "--cache", str(cache), "--out", str(tmp_path / "out")]) == 1
    assert "k = 33 is not a positive multiple of 32" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_interrupt_leaves_nothing_half_written(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "ringfp4.build_cubins", "--jobs", "2"]
    folders = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out" / "cubins")]
    process = subprocess.Popen(
        [*command, *folders],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in the background may have been told to ignore it, and processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr
    assert "[1/" in process.stderr.readline()  # one kernel is done, others are being compiled
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted; nothing was written" in printed
    assert not (tmp_path / "out").exists()
    assert list(temporary.iterdir()) == []
    entries = list((tmp_path / "cache").iterdir())
    assert entries
    assert all(json.loads(gzip.decompress(file.read_bytes())) for file in entries)
    assert _workers_of(temporary) == []


def _workers_of(folder: Path) -> list[str]:
    """Worker processes that still use ``folder``; they get a moment to be reaped."""
    deadline = time.monotonic() + 5
    while True:
        alive = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = entry.read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(folder) in command:
                alive.append(command)
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_and_lines() -> None:
    job = Job(AbsmaxConfig(k=96), "sm_121a")
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        progress = Progress(2, stream)
        progress.done(job, "compiled")
        progress.done(job, "unchanged")
    assert "\r\x1b[K[" + "#" * 15 + "." * 15 + "] 1/2 absmax_k96 (sm_121a)" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")  # the bar makes room for the table
    assert pipe.getvalue() == "[1/2] absmax_k96 (sm_121a) compiled\n[2/2] absmax_k96 (sm_121a) unchanged\n"


def test_twin_is_hopper_code(first: Path) -> None:
    entries = json.loads((first / "cubins" / "manifest.json").read_text())["kernels"]
    files = [first / "cubins" / entry["file"] for entry in entries if entry["arch"] == "twin"]
    assert files
    assert {read_cubin(file.read_bytes()).arch for file in files} == {"sm_90a"}
