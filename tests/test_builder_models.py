"""Every ready-made shapes file builds for the family target; H3's own set is in test_machine_code.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from ringfp4.build_cubins.__main__ import main
from ringfp4.build_cubins.shapes import load_shapes, shipped_names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the build extra (the DSL)"),
]


def test_there_are_other_models() -> None:
    assert set(shipped_names()) > {"h3"}


@pytest.mark.parametrize("name", [name for name in shipped_names() if name != "h3"])
def test_model_builds(name: str, tmp_path: Path) -> None:
    out = tmp_path / "cubins"
    assert main(["--shapes", name, "--arch", "sm_120f", "--out", str(out)]) == 0
    kernels = json.loads((out / "manifest.json").read_text())["kernels"]
    for linear in load_shapes([name]).linears:
        kinds = {kernel["kind"] for kernel in kernels if linear.name in kernel["roles"]}
        assert {"absmax", "pack", "gemm"} <= kinds
        gemms = {
            (kernel["n"], kernel["k"], tuple(kernel["tile"]))
            for kernel in kernels
            if kernel["kind"] == "gemm" and linear.name in kernel["roles"]
        }
        assert gemms == {(linear.n, linear.k, tile) for tile in linear.tiles}
