"""Reads and checks the folders that ``python -m ringfp4.build_cubins`` writes.

A folder holds ``manifest.json`` and the cubins it names. Everything that is read is checked for
type and range, so that a damaged or foreign folder gives an ArtifactError that says what is
wrong and what to do, and never a wild launch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ringfp4 import __version__
from ringfp4.errors import ArtifactError

FORMAT = 1
FILE_NAME = "manifest.json"
ARCHS = ("sm_121a", "sm_120f", "sm_90a", "twin")
KINDS = ("absmax", "pack", "gemm", "ring_gemm", "repack")
REBUILD = "python -m ringfp4.build_cubins --out {folder}"
_LARGE = 1 << 40  # no extent, stride or count is anywhere near
_MOST_PARTIAL_BYTES = 1 << 18  # all registers of a multiprocessor: accumulators are registers
_PARTIAL_UNIT = 128  # so that what lies behind stays aligned


@dataclass(frozen=True)
class ParamEntry:
    """One kernel parameter; the fields mean what ringfp4.dsl.config.base.Param says."""

    name: str
    kind: str
    dtype: str
    dims: tuple[int | str, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    size: int


@dataclass(frozen=True, eq=False)
class KernelEntry:
    """One cubin: what it computes, where it is, how it is launched."""

    name: str
    kind: str
    arch: str
    roles: tuple[str, ...]
    n: int
    k: int
    tile: tuple[int, ...]
    path: Path
    sha256: str
    entry: str
    threads: int
    smem_bytes: int
    cluster: tuple[int, int, int]
    programmatic: bool
    partial_bytes: int  # of accumulators that a CTA hands on to another one
    grid: tuple[int, int, int]  # rows_per_item, items, ctas_per_sm
    params: tuple[ParamEntry, ...]
    config: dict[str, Any]

    def image(self) -> bytes:
        """The cubin's bytes. Raises ArtifactError if they are not those the manifest promised."""
        remedy = REBUILD.format(folder=self.path.parent)
        try:
            image = self.path.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"the manifest names a file that cannot be read: {self.path}", got=str(error), remedy=remedy
            ) from error
        digest = hashlib.sha256(image).hexdigest()
        if digest != self.sha256:
            raise ArtifactError(
                f"{self.path} is damaged or was replaced",
                expected=f"SHA-256 {self.sha256}",
                got=f"{digest} of {len(image)} bytes",
                remedy=remedy,
            )
        return image


@dataclass(frozen=True)
class Manifest:
    """One folder of artefacts."""

    folder: Path
    package_version: str
    source_hash: str
    kernels: tuple[KernelEntry, ...]

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(arch for arch in ARCHS if any(kernel.arch == arch for kernel in self.kernels))


class _Fields:
    """Typed access to one JSON object; every complaint names the file and the place in it."""

    def __init__(self, value: object, where: str, file: Path) -> None:
        self.where, self.file = where, file
        if not isinstance(value, dict):
            raise self.wrong("", "an object", value)
        self.value: dict[str, Any] = value

    def wrong(self, key: str, expected: str, got: object) -> ArtifactError:
        place = ".".join(part for part in (self.where, key) if part) or "the top level"
        return ArtifactError(
            f"{self.file}: {place} is unusable",
            expected=expected,
            got=repr(got)[:80],
            remedy=REBUILD.format(folder=self.file.parent),
        )

    def text(self, key: str, default: str | None = None) -> str:
        got = self.value.get(key, default)
        if not isinstance(got, str) or "\0" in got:
            raise self.wrong(key, "a string", got)
        return got

    def choice(self, key: str, choices: Sequence[str]) -> str:
        got = self.text(key)
        if got not in choices:
            raise self.wrong(key, " or ".join(choices), got)
        return got

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        got = self.value.get(key, default)
        if type(got) is not int or not low <= got <= high:
            raise self.wrong(key, f"an integer in {low}..{high}", got)
        return got

    def boolean(self, key: str, default: bool) -> bool:
        got = self.value.get(key, default)
        if not isinstance(got, bool):
            raise self.wrong(key, "true or false", got)
        return got

    def items(self, key: str, limit: int, default: list[Any] | None = None) -> list[Any]:
        got = self.value.get(key, default)
        if not isinstance(got, list) or len(got) > limit:
            raise self.wrong(key, f"a list of at most {limit}", got)
        return got

    def integers(
        self, key: str, low: int, high: int, limit: int, default: list[Any] | None = None
    ) -> tuple[int, ...]:
        got = self.items(key, limit, default)
        if not all(type(item) is int and low <= item <= high for item in got):
            raise self.wrong(key, f"integers in {low}..{high}", got)
        return tuple(got)

    def texts(self, key: str) -> tuple[str, ...]:
        got = self.items(key, 64)
        if not all(isinstance(item, str) for item in got):
            raise self.wrong(key, "strings", got)
        return tuple(got)


def _param(value: object, where: str, file: Path) -> ParamEntry:
    from ringfp4.runtime import _core

    fields = _Fields(value, where, file)
    kind = fields.choice("kind", ("tensor_map", "pointer", "i32", "i64", "bytes"))
    name = fields.text("name")
    if kind in ("tensor_map", "pointer") and name not in _core.BUFFERS:
        raise fields.wrong("name", "a buffer: " + ", ".join(_core.BUFFERS), name)
    if kind in ("i32", "i64") and name not in _core.SYMBOLS:
        raise fields.wrong("name", "a scalar: " + ", ".join(_core.SYMBOLS), name)
    dims = fields.items("dims", 5, [])
    for dim in dims:
        known = dim in _core.SYMBOLS if isinstance(dim, str) else type(dim) is int and 1 <= dim < _LARGE
        if not known:
            raise fields.wrong("dims", "positive integers or " + ", ".join(_core.SYMBOLS), dims)
    strides = fields.integers("strides", 16, _LARGE, 4, [])
    box = fields.integers("box", 1, 256, 5, [])
    dtype = fields.text("dtype", "")
    swizzle = fields.integer("swizzle", 0, 128, 0)
    if kind == "tensor_map":
        if not dims or len(box) != len(dims) or len(strides) != len(dims) - 1:
            raise fields.wrong("dims", "1 to 5 dims, as many box extents, one stride less", value)
        if dtype not in ("u8", "u16", "bf16"):
            raise fields.wrong("dtype", "u8, u16 or bf16", dtype)
        if swizzle not in (0, 32, 64, 128):
            raise fields.wrong("swizzle", "0, 32, 64 or 128", swizzle)
    size = fields.integer("size", 0, 4096, 0)
    return ParamEntry(name, kind, dtype, tuple(dims), strides, box, swizzle, size)


def _kernel(value: object, index: int, file: Path) -> KernelEntry:
    fields = _Fields(value, f"kernels[{index}]", file)
    relative = PurePosixPath(fields.text("file"))
    if relative.is_absolute() or ".." in relative.parts or not relative.name:
        raise fields.wrong("file", "a file inside the folder", str(relative))
    grid = _Fields(fields.value.get("grid"), f"kernels[{index}].grid", file)
    config = fields.value.get("config", {})
    if not isinstance(config, dict):
        raise fields.wrong("config", "an object", config)
    cluster = fields.integers("cluster", 1, 16, 3, [1, 1, 1])
    if len(cluster) != 3:
        raise fields.wrong("cluster", "three integers", cluster)
    partial_bytes = fields.integer("partial_bytes", 0, _MOST_PARTIAL_BYTES, 0)
    if partial_bytes % _PARTIAL_UNIT:
        raise fields.wrong("partial_bytes", f"a multiple of {_PARTIAL_UNIT}", partial_bytes)
    return KernelEntry(
        name=fields.text("name"),
        kind=fields.choice("kind", KINDS),
        arch=fields.choice("arch", ARCHS),
        roles=fields.texts("roles"),
        n=fields.integer("n", 0, 1 << 24),
        k=fields.integer("k", 16, 1 << 24),
        tile=fields.integers("tile", 1, 1 << 16, 8),
        path=file.parent / relative,
        sha256=fields.text("sha256"),
        entry=fields.text("entry"),
        threads=fields.integer("threads", 1, 1024),
        smem_bytes=fields.integer("smem_bytes", 0, 232_448),
        cluster=(cluster[0], cluster[1], cluster[2]),
        programmatic=fields.boolean("programmatic", False),
        partial_bytes=partial_bytes,
        grid=(
            grid.integer("rows_per_item", 1, 1 << 20),
            grid.integer("items", 1, 1 << 24, 1),
            grid.integer("ctas_per_sm", 0, 64, 0),
        ),
        params=tuple(
            _param(param, f"kernels[{index}].params[{i}]", file)
            for i, param in enumerate(fields.items("params", 32))
        ),
        config=config,
    )


def read(folder: Path) -> Manifest:
    """Read one folder's manifest. Raises ArtifactError; does not read the cubins."""
    file = folder / FILE_NAME
    remedy = REBUILD.format(folder=folder)
    try:
        top = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ArtifactError(f"no {FILE_NAME} in {folder}", remedy=remedy) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{file} cannot be read as JSON", got=str(error)[:80], remedy=remedy) from error
    fields = _Fields(top, "", file)
    if (got := fields.value.get("format")) != FORMAT or type(got) is not int:
        raise ArtifactError(
            f"{file} has another format", expected=str(FORMAT), got=repr(got)[:80], remedy=remedy
        )
    kernels = tuple(_kernel(value, i, file) for i, value in enumerate(fields.items("kernels", 10_000)))
    seen: dict[tuple[str, str], KernelEntry] = {}
    for kernel in kernels:
        if seen.setdefault((kernel.arch, kernel.name), kernel) is not kernel:
            raise ArtifactError(f"{file} lists {kernel.name} for {kernel.arch} twice", remedy=remedy)
    return Manifest(folder, fields.text("package_version"), fields.text("source_hash", ""), kernels)


def read_all(folders: Sequence[Path]) -> tuple[Manifest, ...]:
    """Read several folders that are to be used together.

    Raises ArtifactError if one is unusable, if they come from different versions of this package
    or from another than the installed one, or if two define a kernel differently.
    """
    manifests = tuple(read(folder) for folder in folders)
    versions = {manifest.package_version for manifest in manifests}
    if len(versions) > 1:
        raise ArtifactError(
            "the folders hold artefacts of different versions",
            expected=f"{__version__} everywhere",
            got=", ".join(f"{m.folder}: {m.package_version}" for m in manifests),
            remedy="rebuild the older folder, or leave it out",
        )
    for manifest in manifests:
        if manifest.package_version != __version__:
            raise ArtifactError(
                f"{manifest.folder} was built by another version of ringfp4",
                expected=__version__,
                got=manifest.package_version,
                remedy=REBUILD.format(folder=manifest.folder),
            )
    seen: dict[tuple[str, str], KernelEntry] = {}
    for kernel in (kernel for manifest in manifests for kernel in manifest.kernels):
        first = seen.setdefault((kernel.arch, kernel.name), kernel)
        if first.sha256 != kernel.sha256:
            raise ArtifactError(
                f"two folders define {kernel.name} for {kernel.arch} differently",
                got=f"{first.path} and {kernel.path}",
                remedy="leave one of the folders out of the path",
            )
    return manifests
