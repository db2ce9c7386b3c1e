"""The package as a distribution: one version, one set of pins, nothing heavy at import, clean wheels."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ringfp4
import torch
from ringfp4 import demo, runtime


@pytest.fixture(scope="module")
def pyproject(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def check_contents(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_contents", repository / "wheels/check_contents.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_has_one_source(pyproject: dict[str, Any], repository: Path) -> None:
    assert pyproject["project"]["dynamic"] == ["version"]
    assert importlib.metadata.version("ringfp4") == ringfp4.__version__
    newest = next(
        line for line in (repository / "CHANGELOG.md").read_text().splitlines() if line[:3] == "## "
    )
    assert newest.split()[1] == ringfp4.__version__


def test_a_wheel_is_built_with_the_tools_of_the_build_extra(pyproject: dict[str, Any]) -> None:
    (wheel,) = (o for o in pyproject["tool"]["scikit-build"]["overrides"] if o["if"]["state"] == "wheel")
    assert wheel["build"]["requires"] == pyproject["project"]["optional-dependencies"]["build"]


def test_only_torch_is_required(pyproject: dict[str, Any]) -> None:
    assert [text.split(">")[0] for text in pyproject["project"]["dependencies"]] == ["torch"]


def test_tools_are_pinned_exactly(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    pins = [*pyproject["build-system"]["requires"], *(text for extra in extras.values() for text in extra)]
    assert [text for text in pins if "==" not in text] == []


@pytest.mark.parametrize("module", ["ringfp4", "ringfp4.runtime", "ringfp4.dsl.config", "ringfp4.__main__"])
def test_importing_needs_neither_the_dsl_nor_comfy(module: str) -> None:
    code = f"import sys, {module}; print(*(m for m in ('cutlass', 'comfy_kitchen') if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def write_wheel(path: Path, check_contents: ModuleType, **changes: bytes | None) -> Path:
    """A wheel with everything that is needed; ``changes`` add, replace or (None) drop files."""
    image = b"an artefact"
    kernels = [
        {"arch": arch, "file": f"k.{arch}.cubin", "sha256": hashlib.sha256(image).hexdigest()}
        for arch in sorted(check_contents.SHIPPED_ARCHS[path.stem])
    ]
    files: dict[str, bytes | None] = dict.fromkeys(check_contents.NEEDED, b"")
    files |= {check_contents.CUBINS + kernel["file"]: image for kernel in kernels}
    files[check_contents.CUBINS + "manifest.json"] = json.dumps({"kernels": kernels}).encode()
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in (files | changes).items():
            if content is not None:
                wheel.writestr(name, content)
    return path


CUBIN = "ringfp4/runtime/cubins/k.sm_121a.cubin"
TWIN = json.dumps({"kernels": [{"arch": "twin", "file": "k.twin.cubin", "sha256": ""}]}).encode()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"ringfp4/runtime/__init__.py": None}, "ringfp4/runtime/__init__.py is missing"),
        ({"ringfp4/tests/test_x.py": b""}, "does not belong here"),
        ({"cutlass/cute/core.py": b""}, "does not belong here"),
        ({"ringfp4/dsl/x.py": b"# Copyright (c) 2025 NVIDIA CORPORATION"}, "NVIDIA's copyright notice"),
        ({CUBIN: b"damaged"}, "does not have the manifest's SHA-256"),
        ({CUBIN: None}, "not in both"),
        ({"ringfp4/runtime/cubins/manifest.json": TWIN}, "artefacts for ['twin']"),
    ],
)
def test_the_contents_check_finds_it(
    tmp_path: Path, check_contents: ModuleType, changes: dict[str, bytes | None], complaint: str | None
) -> None:
    problems = check_contents.wheel_problems(write_wheel(tmp_path / "aarch64.whl", check_contents, **changes))
    assert bool(problems) == (complaint is not None)
    assert complaint is None or complaint in "; ".join(problems)


def test_wheels_must_carry_the_same_cubins(tmp_path: Path, check_contents: ModuleType) -> None:
    write_wheel(tmp_path / "aarch64.whl", check_contents)
    write_wheel(tmp_path / "x86_64.whl", check_contents)
    assert not check_contents.main(tmp_path)
    other = write_wheel(tmp_path / "x86_64.whl", check_contents, **{CUBIN: b"other"})
    assert check_contents.differing([tmp_path / "aarch64.whl", other]) == [f"{CUBIN} differs between wheels"]
    assert check_contents.main(tmp_path)


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "N", 64)
    monkeypatch.setattr(demo, "K", 256)


@pytest.mark.usefixtures("small_demo")
def test_the_demo_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--cpu"]) == 0
    assert "0 of 512 outputs differ" in capsys.readouterr().out


@pytest.mark.usefixtures("small_demo")
def test_the_demo_notices_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off_by_one_row(x: torch.Tensor, weight: runtime.Nvfp4Weight) -> torch.Tensor:
        return correct(x, weight).roll(1, 0)

    correct = runtime.ring_linear
    monkeypatch.setattr(runtime, "ring_linear", off_by_one_row)
    assert demo.main(["--cpu"]) == 1


def test_what_the_documents_name_exists(repository: Path) -> None:
    documents = [*repository.glob("*.md"), *repository.glob("docs/*.md")]
    missing = []
    for document in documents:
        named = re.findall(
            r"(?:docs|shapes|wheels|dsl|runtime|build_cubins|tests)/[\w/]+\.(?:md|py|toml|sh)",
            document.read_text(),
        )
        missing += [f"{document.name}: {name}" for name in named if not (repository / name).exists()]
    assert missing == []


def test_the_readme_names_targets_of_the_makefile(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md", "docs/release.md"):
        for target in re.findall(r"make ([a-z-]+)", (repository / document).read_text()):
            assert f"\n{target}:" in makefile, f"{document} names make {target}"
