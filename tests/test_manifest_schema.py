"""The manifest: every field that the runtime relies on, with the type and the meaning it has."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ringfp4
from ringfp4.build_cubins.elf import read_cubin
from ringfp4.build_cubins.manifest import describe
from ringfp4.build_cubins.sources import source_hash
from ringfp4.dsl.config.base import KernelConfig
from ringfp4.dsl.config.hopper import HopperGemmConfig
from ringfp4.dsl.config.quantise import PackConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the build extra (the DSL)"
)

TOP = {
    "format": int,
    "package_version": str,
    "dsl_version": str,
    "ptxas_version": str,
    "source_hash": str,
    "kernels": list,
}
KERNEL = {
    "name": str,
    "kind": str,
    "arch": str,
    "roles": list,
    "n": int,
    "k": int,
    "tile": list,
    "file": str,
    "sha256": str,
    "size_bytes": int,
    "entry": str,
    "threads": int,
    "smem_bytes": int,
    "registers": int,
    "spill_bytes": int,
    "tensor_instructions": int,
    "params": list,
    "grid": dict,
    "cluster": list,
    "programmatic": bool,
    "config": dict,
}
PARAM_BYTES = {"tensor_map": 128, "pointer": 8, "i32": 4, "i64": 8}
SYMBOLS = {"m", "m_blocks", "cap", "cap_blocks"}


@pytest.fixture(scope="module")
def folder(built_h3: Path) -> Path:
    return built_h3


@pytest.fixture(scope="module")
def manifest(folder: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return parsed


def test_fields_and_types(manifest: dict[str, Any]) -> None:
    assert {key: type(value) for key, value in manifest.items()} == TOP
    for kernel in manifest["kernels"]:
        optional = {"partial_bytes": int} if "partial_bytes" in kernel else {}
        assert {key: type(value) for key, value in kernel.items()} == KERNEL | optional, kernel["name"]
        assert kernel.get("partial_bytes", 1) > 0


@pytest.mark.parametrize(
    ("config", "written"),
    [
        (HopperGemmConfig(features=256, k=256, tile_m=208), {"partial_bytes": 208 * 128 * 4}),
        (HopperGemmConfig(features=256, k=256, tile_m=16, consumers=1, ctas_per_sm=4), {}),
        (PackConfig(k=256), {}),
    ],
)
def test_accumulators_are_named_where_some_are_handed_on(
    config: KernelConfig, written: dict[str, int]
) -> None:
    job: Any = SimpleNamespace(config=config, arch="sm_90a", roles=(), file="")
    elf = SimpleNamespace(entry="", registers=0, stack_bytes=0)
    built: Any = SimpleNamespace(elf=elf, image=b"", sass=SimpleNamespace(count=lambda _pattern: 0))
    described = describe(job, built)
    assert {key: type(value) for key, value in described.items()} == KERNEL | dict.fromkeys(written, int)
    assert {key: described[key] for key in written} == written


def test_where_it_comes_from(manifest: dict[str, Any]) -> None:
    assert manifest["format"] == 1
    assert manifest["package_version"] == ringfp4.__version__
    assert manifest["dsl_version"] == importlib.metadata.version("nvidia-cutlass-dsl")
    assert manifest["ptxas_version"].startswith("12.9.")
    assert manifest["source_hash"] == source_hash()


def test_files(folder: Path, manifest: dict[str, Any]) -> None:
    files = [kernel["file"] for kernel in manifest["kernels"]]
    assert len(set(files)) == len(files)
    assert {"manifest.json", *files} == {file.name for file in folder.iterdir()}
    for kernel in manifest["kernels"]:
        image = (folder / kernel["file"]).read_bytes()
        assert kernel["sha256"] == hashlib.sha256(image).hexdigest()
        assert kernel["size_bytes"] == len(image)


def test_written_sorted(folder: Path, manifest: dict[str, Any]) -> None:
    text = (folder / "manifest.json").read_text()
    assert text == json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    files = [kernel["file"] for kernel in manifest["kernels"]]
    assert files == sorted(files)


def test_kernels_are_unique_within_an_architecture(manifest: dict[str, Any]) -> None:
    names = [(kernel["arch"], kernel["name"]) for kernel in manifest["kernels"]]
    assert len(set(names)) == len(names)


def test_launches_are_what_the_cubins_ask_for(folder: Path, manifest: dict[str, Any]) -> None:
    for kernel in manifest["kernels"]:
        elf = read_cubin((folder / kernel["file"]).read_bytes())
        assert kernel["entry"] == elf.entry
        assert kernel["threads"] == elf.threads
        assert kernel["registers"] == elf.registers
        assert kernel["spill_bytes"] == elf.stack_bytes == 0
        sizes = [PARAM_BYTES.get(param["kind"], param.get("size")) for param in kernel["params"]]
        assert sizes == [size for _, size in elf.params]


def test_parameters(manifest: dict[str, Any]) -> None:
    for kernel in manifest["kernels"]:
        for param in kernel["params"]:
            assert param["kind"] in {*PARAM_BYTES, "bytes"}
            if param["kind"] == "tensor_map":
                assert param["dtype"] in {"u8", "u16", "bf16"}
                assert len(param["dims"]) == len(param["box"]) == len(param["strides"]) + 1
                assert all(isinstance(d, int) or d in SYMBOLS for d in param["dims"])
                assert all(stride % 16 == 0 for stride in param["strides"])
                assert all(1 <= extent <= 256 for extent in param["box"])
                assert param.get("swizzle", 0) in {0, 32, 64, 128}


def test_grids(manifest: dict[str, Any]) -> None:
    for kernel in manifest["kernels"]:
        grid = kernel["grid"]
        assert set(grid) == {"rows_per_item", "items", "ctas_per_sm"}
        assert grid["rows_per_item"] >= 1
        assert grid["items"] >= 1
        assert grid["ctas_per_sm"] >= 0
        assert len(kernel["cluster"]) == 3
