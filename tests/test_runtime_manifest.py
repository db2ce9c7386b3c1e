"""Artefact folders that are damaged, foreign or contradictory: each its own message and remedy."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ringfp4
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfp4.dsl.config import Linear, plan
from ringfp4.errors import ArtifactError
from ringfp4.runtime.manifest import ARCHS, KernelEntry, read, read_all

CUBIN = b"\x7fELF not really"
Json = dict[str, Any]


def kernel(**changes: Any) -> Json:
    described: Json = {
        "name": "gemm",
        "kind": "gemm",
        "arch": "sm_121a",
        "roles": ["qkv"],
        "n": 256,
        "k": 128,
        "tile": [128, 128, 128],
        "file": "gemm.cubin",
        "sha256": hashlib.sha256(CUBIN).hexdigest(),
        "entry": "gemm",
        "threads": 384,
        "smem_bytes": 1024,
        "registers": 168,
        "spill_bytes": 0,
        "params": [
            {
                "name": "q",
                "kind": "tensor_map",
                "dtype": "u8",
                "dims": [64, "m"],
                "strides": [64],
                "box": [64, 128],
                "swizzle": 64,
            },
            {"name": "scale", "kind": "pointer"},
            {"name": "m", "kind": "i32"},
            {"name": "", "kind": "bytes", "size": 16},
        ],
        "grid": {"rows_per_item": 128, "items": 2, "ctas_per_sm": 1},
        "cluster": [1, 1, 1],
        "config": {"tile_m": 128},
    }
    return described | changes


def top(*kernels: Json, **changes: Any) -> Json:
    version = ringfp4.__version__
    return {"format": 1, "package_version": version, "source_hash": "", "kernels": list(kernels)} | changes


def write(folder: Path, content: object, cubin: bytes | None = CUBIN) -> Path:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "manifest.json").write_text(text)
    if cubin is not None:
        (folder / "gemm.cubin").write_bytes(cubin)
    return folder


def test_what_the_builder_writes_is_read(tmp_path: Path) -> None:
    (manifest,) = read_all([write(tmp_path, top(kernel(), kernel(arch="sm_120f", file="b.cubin")))])
    first = manifest.kernels[0]
    assert manifest.archs == ("sm_121a", "sm_120f")
    assert first.image() == CUBIN
    assert (first.n, first.k, first.grid, first.cluster) == (256, 128, (128, 2, 1), (1, 1, 1))
    assert first.params[0].dims == (64, "m")
    assert [param.kind for param in first.params] == ["tensor_map", "pointer", "i32", "bytes"]
    assert first.params[3].size == 16
    assert (first.programmatic, first.partial_bytes) == (False, 0)


@pytest.mark.parametrize("size", [0, 128, 1 << 18])
def test_accumulators_that_a_cta_hands_on_are_read(tmp_path: Path, size: int) -> None:
    (manifest,) = read_all([write(tmp_path, top(kernel(partial_bytes=size)))])
    assert manifest.kernels[0].partial_bytes == size


@pytest.mark.parametrize("arch", ARCHS)
def test_every_planned_kernel_is_understood(tmp_path: Path, arch: str) -> None:
    """The runtime knows every buffer, scalar and symbol that a configuration names."""
    configs = plan(Linear("fc1", k=5376, n=28672), arch)
    kernels = [
        kernel(name=c.name, kind=c.kind, arch=arch, n=c.n, k=c.k, params=[p.to_json() for p in c.params()])
        for c in configs
    ]
    entries = read(write(tmp_path, top(*kernels))).kernels
    assert [entry.name for entry in entries] == [config.name for config in configs]


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: (f / "manifest.json").unlink(), "no manifest.json in"),
    "empty": (lambda f: write(f, ""), "cannot be read as JSON"),
    "truncated": (lambda f: write(f, json.dumps(top(kernel()))[:-40]), "cannot be read as JSON"),
    "binary": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), "cannot be read as JSON"),
    "deep": (lambda f: write(f, "[" * 100_000), "cannot be read as JSON"),
    "list": (lambda f: write(f, []), "the top level is unusable; expected an object"),
    "format 2": (lambda f: write(f, top(format=2)), "has another format; expected 1; got 2"),
    "format missing": (lambda f: write(f, {"kernels": []}), "has another format; expected 1; got None"),
    "format true": (lambda f: write(f, top(format=True)), "has another format"),
    "no kernels": (lambda f: write(f, {"format": 1}), "kernels is unusable; expected a list"),
    "twice": (lambda f: write(f, top(kernel(), kernel())), "lists gemm for sm_121a twice"),
    "version": (
        lambda f: write(f, top(kernel(), package_version="0.0.1")),
        "built by another version of ringfp4; expected .*; got 0.0.1",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGED[name]
    damage(write(tmp_path, top(kernel())))
    with pytest.raises(ArtifactError, match=message) as caught:
        read_all([tmp_path])
    assert "python -m ringfp4.build_cubins" in caught.value.remedy


WRONG_FIELDS: dict[str, tuple[Json, str]] = {
    "name": ({"name": 3}, r"kernels\[0\]\.name is unusable; expected a string; got 3"),
    "nul": ({"entry": "a\0b"}, "entry is unusable"),
    "kind": ({"kind": "conv"}, "kind is unusable; expected absmax or pack"),
    "arch": ({"arch": "sm_80"}, "arch is unusable; expected sm_121a or"),
    "threads": ({"threads": 2048}, r"threads is unusable; expected an integer in 1\.\.1024; got 2048"),
    "threads bool": ({"threads": True}, "threads is unusable"),
    "threads text": ({"threads": "384"}, "threads is unusable"),
    "smem": ({"smem_bytes": 1 << 20}, "smem_bytes is unusable"),
    "negative": ({"n": -8}, "n is unusable"),
    "tile": ({"tile": [0]}, "tile is unusable"),
    "roles": ({"roles": [1]}, "roles is unusable"),
    "absolute": ({"file": "/etc/passwd"}, "file is unusable; expected a file inside the folder"),
    "parent": ({"file": "../gemm.cubin"}, "file is unusable"),
    "no file": ({"file": ""}, "file is unusable"),
    "grid": ({"grid": None}, r"kernels\[0\]\.grid is unusable; expected an object"),
    "grid zero": ({"grid": {"rows_per_item": 0}}, r"grid\.rows_per_item is unusable"),
    "cluster": ({"cluster": [2, 1]}, "cluster is unusable; expected three integers"),
    "programmatic": ({"programmatic": 1}, "programmatic is unusable; expected true or false; got 1"),
    "partials": ({"partial_bytes": -128}, r"partial_bytes is unusable; expected an integer in 0\.\.262144"),
    "many partials": ({"partial_bytes": (1 << 18) + 128}, "partial_bytes is unusable"),
    "odd partials": ({"partial_bytes": 96}, "partial_bytes is unusable; expected a multiple of 128; got 96"),
    "partials text": ({"partial_bytes": "128"}, "partial_bytes is unusable"),
    "partials bool": ({"partial_bytes": True}, "partial_bytes is unusable"),
    "partials null": ({"partial_bytes": None}, "partial_bytes is unusable"),
    "config": ({"config": []}, "config is unusable"),
    "params": ({"params": {}}, "params is unusable; expected a list of at most 32"),
    "many params": ({"params": 33 * [{"name": "m", "kind": "i32"}]}, "params is unusable"),
    "param kind": ({"params": [{"name": "m", "kind": "f32"}]}, r"params\[0\]\.kind is unusable"),
    "buffer": ({"params": [{"name": "z", "kind": "pointer"}]}, "expected a buffer: x, scale"),
    "scalar": ({"params": [{"name": "x", "kind": "i32"}]}, "expected a scalar: m, m_blocks"),
    "map": ({"params": [{"name": "q", "kind": "tensor_map", "dims": [1]}]}, "as many box extents"),
    "bytes": ({"params": [{"name": "", "kind": "bytes", "size": 1 << 30}]}, "size is unusable"),
}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_a_wrong_field_is_named(tmp_path: Path, name: str) -> None:
    changes, message = WRONG_FIELDS[name]
    with pytest.raises(ArtifactError, match=message):
        read(write(tmp_path, top(kernel(**changes))))


@pytest.mark.parametrize(
    ("field", "value"),
    [("dims", [0, "m"]), ("dims", [64, "rows"]), ("box", [64, 512]), ("strides", [8]), ("strides", []),
     ("dtype", "fp4"), ("swizzle", 48)],
)  # fmt: skip
def test_a_wrong_tensor_map_is_named(tmp_path: Path, field: str, value: object) -> None:
    described = kernel()
    described["params"][0][field] = value
    with pytest.raises(ArtifactError, match=r"params\[0\]"):
        read(write(tmp_path, top(described)))


def entry(folder: Path) -> KernelEntry:
    return read(folder).kernels[0]


def test_a_missing_cubin(tmp_path: Path) -> None:
    folder = write(tmp_path, top(kernel()), cubin=None)
    with pytest.raises(ArtifactError, match=r"names a file that cannot be read: .*gemm\.cubin") as caught:
        entry(folder).image()
    assert "build_cubins" in caught.value.remedy


@pytest.mark.parametrize("damaged", [CUBIN[:-1], CUBIN[:3] + b"\0" + CUBIN[4:], b""])
def test_a_truncated_or_flipped_cubin(tmp_path: Path, damaged: bytes) -> None:
    folder = write(tmp_path, top(kernel()), cubin=damaged)
    with pytest.raises(ArtifactError, match="damaged or was replaced") as caught:
        entry(folder).image()
    assert caught.value.expected == f"SHA-256 {hashlib.sha256(CUBIN).hexdigest()}"
    assert f"{len(damaged)} bytes" in caught.value.got


def test_two_versions_on_the_path(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    write(new, top(kernel()))
    write(old, top(kernel(), package_version="0.0.1"))
    with pytest.raises(ArtifactError, match="different versions") as caught:
        read_all([new, old])
    assert f"{new}: {ringfp4.__version__}, {old}: 0.0.1" in caught.value.got
    assert "older" in caught.value.remedy


def test_the_same_kernel_in_two_folders(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", top(kernel())), write(tmp_path / "b", top(kernel()))
    assert len(read_all([a, b])) == 2
    write(b, top(kernel(sha256="0" * 64)))
    with pytest.raises(ArtifactError, match="define gemm for sm_121a differently") as caught:
        read_all([a, b])
    assert str(b / "gemm.cubin") in caught.value.got


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def read_or_refuse(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    with contextlib.suppress(ArtifactError):  # and nothing else
        for found in read(folder).kernels:
            assert found.path.is_relative_to(folder)


@settings(max_examples=150, deadline=None)
@given(content=json_values)
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    read_or_refuse(tmp_path_factory.getbasetemp(), json.dumps(content))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_change_of_one_value_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Somewhere in a good manifest one value is replaced or dropped."""
    content: Any = top(kernel(), kernel(arch="twin"))
    here = content
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if isinstance(here[key], (dict, list)) and data.draw(st.booleans()):
            here = here[key]
            continue
        if data.draw(st.booleans()):
            here[key] = data.draw(json_values)
        else:
            del here[key]
        break
    read_or_refuse(tmp_path_factory.getbasetemp(), json.dumps(content))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = bytearray(json.dumps(top(kernel())).encode())
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.getbasetemp()
    (folder / "manifest.json").write_bytes(text)
    with contextlib.suppress(ArtifactError):
        read(folder)
