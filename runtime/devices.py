"""What this process knows about drivers, devices and loaded artefacts.

``load`` reads a folder's manifest and puts every cubin for a device on it. Each device has its
own kernels, and each stream of a device its own launches and ring (lanes.py).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from ringfp4.errors import ArtifactError, DriverError, InputError, RingFP4Error, UnservedError
from ringfp4.runtime import _core, tuning
from ringfp4.runtime.choose_tile import Tile, choose_tile
from ringfp4.runtime.lanes import Lane, PlanCache
from ringfp4.runtime.manifest import ARCHS, FILE_NAME, KernelEntry, Manifest, read_all
from ringfp4.runtime.plan import (
    DEFAULT_CAPACITY_ROWS,
    KernelTable,
    Plan,
    build,
    fixed_slots,
    useful_archs,
)

DeviceLike = int | str | torch.device | None
PathLike = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None

log = logging.getLogger("ringfp4")

DRIVER_VARIABLE = "RINGFP4_LIBCUDA"  # another library than libcuda.so.1, for tests
PACKAGED = Path(__file__).parent / "cubins"
# Compute capability -> architectures whose cubins run there, the best first.
SERVED_BY = {
    (12, 1): ("sm_121a", "sm_120f"),
    (12, 0): ("sm_120f",),
    (9, 0): ("sm_90a", "twin"),
}

_lock = threading.RLock()
_driver: _core.Driver | None = None
_loaded: dict[int, Artifacts] = {}


class Artifacts:
    """The kernels loaded on one device, and the lanes of its streams."""

    def __init__(self, device: _core.Device, manifests: tuple[Manifest, ...], archs: tuple[str, ...]) -> None:
        self.ordinal = device.ordinal
        self.sms = device.sms
        self.device_name = device.name
        self.driver_version = driver().version
        self.folders = tuple(manifest.folder for manifest in manifests)
        kernels = [kernel for manifest in manifests for kernel in manifest.kernels]
        entries = {(kernel.arch, kernel.name): kernel for kernel in kernels}.values()  # folders may overlap
        self.table = KernelTable(entries, useful_archs(entries, archs))
        self.context = _core.Context(device)
        self.kernels: dict[KernelEntry, _core.Kernel] = {}
        for entry in self.table.entries:
            self.kernels[entry] = load_kernel(self.context, entry)
        self.lanes: dict[int, Lane] = {}
        self._caches: list[weakref.ref[PlanCache]] = []
        # (N, K) -> [(largest M, schedule, kernel name)], sorted; see prefer().
        self.preferences: dict[tuple[int, int], list[tuple[int, str, str]]] = {}

    def lane(self, stream: int) -> Lane:
        lane = self.lanes.get(stream)
        if lane is None:
            lane = self.lanes.setdefault(stream, Lane(self, stream))
        return lane

    def prefer(self, n: int, k: int, m: int, schedule: str, kernel: str) -> None:
        """Use this schedule and GEMM for ``auto`` calls of at most ``m`` rows (runtime tuning).

        Of several preferences the one with the smallest sufficient ``m`` counts, above all of
        them the one with the largest.
        """
        rows = [entry for entry in self.preferences.get((n, k), []) if entry[0] != m]
        self.set_preferences(n, k, [*rows, (m, schedule, kernel)])

    def set_preferences(self, n: int, k: int, rows: Sequence[tuple[int, str, str]]) -> None:
        """All preferences of one linear, see ``prefer``. Plans that followed others are forgotten."""
        self.preferences[n, k] = sorted(rows)
        for reference in list(self._caches):
            if (cache := reference()) is not None:
                cache.forget()

    def remember(self, cache: PlanCache) -> None:
        """Have the cache forget its plans when preferences change, as long as it lives."""
        self._caches.append(weakref.ref(cache, self._caches.remove))

    def plan(
        self, schedule: str, n: int, k: int, m: int, capacity_rows: int, slot_rows: int | None = None
    ) -> Plan:
        """A plan for chunks of ``capacity_rows``, or a fused kernel of at most ``slot_rows`` if there is one.

        ``slot_rows`` is by default ``capacity_rows``. Raises UnservedError or RingError, and InputError for
        more rows than kernels can address.
        """
        slot_rows = capacity_rows if slot_rows is None else slot_rows
        plan = self._plan(schedule, n, k, m, capacity_rows, slot_rows)
        if schedule == "auto" and not plan.can_pack(m):  # tuned for fewer rows
            plan = self._plan("ring", n, k, m, capacity_rows, slot_rows)
        plan.check_rows(m)
        return plan

    def _plan(self, schedule: str, n: int, k: int, m: int, capacity_rows: int, slot_rows: int) -> Plan:
        preferred = ""
        if schedule == "auto" and (rows := self.preferences.get((n, k))):
            _, schedule, preferred = next((row for row in rows if row[0] >= m), rows[-1])
        short = m <= min(capacity_rows, DEFAULT_CAPACITY_ROWS)
        schedule, _ = self.table.resolve(schedule, n, k, short)

        def by_capacity(entry: KernelEntry) -> tuple[bool, int]:
            """The largest that fits first, then those that do not, the smallest first."""
            rows = fixed_slots(entry)
            return (True, rows) if rows > capacity_rows else (False, -rows)

        def choose(name: str, variants: tuple[KernelEntry, ...]) -> KernelEntry:
            for entry in variants:
                if entry.name == preferred:
                    return entry
            ordered = sorted(variants, key=by_capacity)
            allowed = [entry for entry in ordered if fixed_slots(entry) <= slot_rows]
            rows = min(m, capacity_rows) if name == "ring" else m
            return self._modelled(allowed, rows) if allowed else ordered[0]

        return build(self.table, self.kernels.__getitem__, schedule, n, k, capacity_rows, choose)

    def _modelled(self, variants: Sequence[KernelEntry], m: int) -> KernelEntry:
        """Of Hopper's GEMMs, fused or not, the one that suits ``m`` rows, of all others the first."""
        first = variants[0]
        if first.arch != "sm_90a" or first.kind not in ("gemm", "ring_gemm"):
            return first
        tiles = [Tile(e.tile[0], e.tile[1], e.grid[2], e.partial_bytes > 0) for e in variants]
        return variants[choose_tile(tiles, m, first.n, first.k, self.sms)]

    def single(self, kind: str, n: int, k: int, kernel: str | None = None) -> Plan:
        """One kernel by itself, by default the first of its kind. Raises UnservedError."""

        def choose(_schedule: str, variants: tuple[KernelEntry, ...]) -> KernelEntry:
            for entry in variants:
                if kernel in (None, entry.name):
                    return entry
            raise UnservedError(f"no {kind} kernel is called {kernel}", got=str([e.name for e in variants]))

        return build(self.table, self.kernels.__getitem__, kind, n, k, 0, choose)


def load_kernel(context: _core.Context, entry: KernelEntry) -> _core.Kernel:
    """Verify and load one cubin. Raises ArtifactError or DriverError."""
    params = [
        _core.Param(p.name, p.kind, p.dtype, p.dims, p.strides, p.box, p.swizzle, p.size)
        for p in entry.params
    ]
    return _core.Kernel(
        context,
        entry.image(),
        name=entry.name,
        entry=entry.entry,
        threads=entry.threads,
        smem_bytes=entry.smem_bytes,
        cluster=entry.cluster,
        cooperative=entry.kind == "ring_gemm",
        programmatic=entry.programmatic,
        grid=entry.grid,
        params=params,
    )


def driver() -> _core.Driver:
    """The CUDA driver, opened once. Raises DriverError; a later call tries again."""
    global _driver
    with _lock:
        if _driver is None:
            _driver = _core.Driver(os.environ.get(DRIVER_VARIABLE, "libcuda.so.1"))
        return _driver


def archs_for(capability: tuple[int, int], arch: str | None) -> tuple[str, ...]:
    """Architectures to look for, the best first. Raises UnservedError or InputError."""
    if arch is not None and arch not in ARCHS:
        raise InputError("unknown architecture", expected=" or ".join(ARCHS), got=repr(arch))
    served = SERVED_BY.get(capability, ())
    name = f"compute capability {capability[0]}.{capability[1]}"
    if not served:
        known = ", ".join(f"{major}.{minor}" for major, minor in SERVED_BY)
        raise UnservedError(
            f"no kernels exist for {name}",
            expected=f"a device of compute capability {known}",
            remedy='fallback="dequantise" computes the linear with PyTorch',
        )
    if arch is None:
        return served
    if arch not in served:
        raise UnservedError(f"{arch} does not run on {name}", expected=" or ".join(served), got=arch)
    return (arch,)


def load(device: DeviceLike = None, path: PathLike = None, arch: str | None = None) -> None:
    """Load every cubin for a device now; nothing is loaded or allocated for kernels afterwards.

    ``device``: ordinal, "cuda:1" or torch.device, default the current CUDA device. ``path``: one or
    several folders made by ``python -m ringfp4.build_cubins``, default the one in this package.
    ``arch``: only this one of sm_121a, sm_120f, sm_90a and twin. Replaces what was loaded on the
    device before, so graphs that captured the old kernels must not be replayed afterwards.

    Raises ArtifactError (missing, damaged or foreign folder, or one without this architecture),
    UnservedError (no kernels exist for this device), DriverError.
    """
    _load(ordinal_of(device), folders(path), path is None, arch)


def _load(ordinal: int, paths: Sequence[Path], packaged: bool, arch: str | None) -> Artifacts:
    """``load`` from folders; ``packaged``: they are this package's own."""
    with _lock:
        target = _core.Device(driver(), ordinal)
        archs = archs_for(target.capability, arch)
        if packaged and not (PACKAGED / FILE_NAME).exists():
            raise UnservedError(
                "this installation ships no cubins",
                remedy=f"python -m ringfp4.build_cubins --arch {archs[0]} --out DIR, then load(path=DIR)",
            )
        manifests = read_all(paths)
        if packaged:  # the twin is for tests and is never taken by itself
            archs = tuple(name for name in archs if name != "twin")
        present = {name for manifest in manifests for name in manifest.archs}
        if not present.intersection(archs):
            build_it = f"python -m ringfp4.build_cubins --arch {(archs or ('ARCH',))[0]} --out DIR"
            raise ArtifactError(
                f"no cubins for {target.name} in " + ", ".join(str(m.folder) for m in manifests),
                expected=" or ".join(archs),
                got=", ".join(sorted(present)) or "an empty manifest",
                remedy=f"{build_it}, then load(path=DIR)",
            )
        loaded = Artifacts(target, manifests, archs)
        tuning.apply(loaded, tuning.remembered(loaded))
        _loaded[ordinal] = loaded
    log.info("loaded %d kernels on device %d", len(loaded.kernels), ordinal)
    return loaded


def folders(path: PathLike) -> list[Path]:
    """Raises InputError for what names no folder."""
    if path is None:
        return [PACKAGED]
    named = [path] if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(named, Sequence) or not all(isinstance(item, (str, os.PathLike)) for item in named):
        raise InputError("unusable path", expected="a folder or a list of folders", got=repr(path))
    if not named:
        raise InputError("path names no folder", remedy="leave it out for the package's own cubins")
    return [Path(item) for item in named]


def ordinal_of(device: DeviceLike) -> int:
    """The ordinal of a CUDA device, the current one by default. Raises InputError."""
    if device is None:
        return current_device()
    if isinstance(device, int) and not isinstance(device, bool) and 0 <= device < 1 << 31:
        return device
    if isinstance(device, str):
        with contextlib.suppress(RuntimeError):  # PyTorch knows no device of that name
            device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        return current_device() if device.index is None else device.index
    raise InputError("not a CUDA device", expected='an ordinal, "cuda:N" or torch.device', got=repr(device))


def current_device() -> int:
    """PyTorch's current CUDA device, 0 if it has none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def artifacts(ordinal: int) -> Artifacts:
    """What is loaded on a device; loads the package's own cubins at the first call.

    Raises what ``load`` raises, and ArtifactError instead of loading while a CUDA graph is captured.
    """
    found = _loaded.get(ordinal)
    if found is None:
        refuse_in_capture()
        with _lock:
            found = _loaded.get(ordinal) or _load(ordinal, [PACKAGED], True, None)
    return found


def refuse_in_capture() -> None:
    """Raise ArtifactError while the current stream is being captured into a CUDA graph."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ArtifactError(
            "no kernels are loaded and a CUDA graph is being captured",
            remedy="call ringfp4.runtime.load() before the capture",
        )


def unload() -> None:
    """Forget all kernels and free the default rings. Explicit rings and graphs must be gone."""
    _loaded.clear()


def info() -> dict[str, object]:
    """Driver, devices, artefacts, and why a device is or is not served. Loads nothing; never raises."""
    report: dict[str, object] = {"packaged": _describe_folder(PACKAGED), "devices": []}
    try:
        found = driver()
        devices = [_describe_device(_core.Device(found, i)) for i in range(found.device_count())]
    except DriverError as error:
        return report | {"driver": str(error)}
    return report | {"driver": f"{found.version // 1000}.{found.version % 1000 // 10}", "devices": devices}


def _describe_folder(folder: Path) -> dict[str, object]:
    try:
        (manifest,) = read_all([folder])
    except ArtifactError as error:
        return {"folder": str(folder), "error": str(error)}
    tables = {arch: KernelTable(manifest.kernels, (arch,)) for arch in manifest.archs}
    return {
        "folder": str(folder),
        "kernels": len(manifest.kernels),
        "archs": {arch: table.shipped() for arch, table in tables.items()},
    }


def _describe_device(device: _core.Device) -> dict[str, object]:
    loaded = _loaded.get(device.ordinal)
    described: dict[str, object] = {
        "device": device.ordinal,
        "name": device.name,
        "capability": "{}.{}".format(*device.capability),
        "multiprocessors": device.sms,
        "loaded": None,
    }
    if loaded is not None:
        described["loaded"] = [str(folder) for folder in loaded.folders]
        described["serves"] = loaded.table.shipped()
        described["rings"] = {stream: lane.ring_bytes for stream, lane in list(loaded.lanes.items())}
        return described
    try:
        archs = archs_for(device.capability, None)
        manifests = read_all([PACKAGED])
        table = KernelTable(manifests[0].kernels, tuple(arch for arch in archs if arch != "twin"))
        if not table.entries:
            raise UnservedError(f"the package ships no cubins for {' or '.join(archs)}")
        described["serves"] = table.shipped()
    except RingFP4Error as error:
        described["serves"] = f"nothing: {error}"
    return described


atexit.register(unload)
