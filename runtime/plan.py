"""From the kernels of a manifest to the launches of one linear. Needs no torch.

A schedule is a row of ``RECIPES``: which kinds of kernel run over all rows and which run chunk by
chunk. :func:`build` finds them for a shape and hands them to C++ as a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ringfp4.errors import InputError, RingError, UnservedError
from ringfp4.runtime import _core
from ringfp4.runtime.manifest import KernelEntry

TILE_ROWS = 128  # rows of a tile of swizzled block scales: a ring holds whole ones
DEFAULT_CAPACITY_ROWS = 2048
# The kernels address what they pack by a signed 32-bit number of words of 4 bytes.
MOST_PACKED_BYTES = 4 << 31
# For each CTA that may hand accumulators on: dsl/config/hopper.py's FLAGS_PER_CTA, of 4 bytes.
FLAG_BYTES = 64
MOST_FLAGGED_CTAS = (_core.STATE_BYTES - _core.FLAGS_OFFSET) // FLAG_BYTES


@dataclass(frozen=True)
class Recipe:
    """Kinds of kernel, in the order of their launch.

    ``reduce`` runs only if the caller brings no scale, ``whole`` once, both over all rows;
    ``each_chunk`` for at most the capacity of the slots at a time.
    """

    reduce: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    each_chunk: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.reduce + self.whole + self.each_chunk


SCHEDULES = {
    "prepacked": Recipe(reduce=("absmax",), each_chunk=("pack", "gemm")),
    "ring": Recipe(reduce=("absmax",), each_chunk=("pack", "gemm")),
    "fused": Recipe(whole=("ring_gemm",)),
}
# What "auto" means untuned: the first one that the artefacts have. A single chunk of at most the
# default capacity is faster unfused (measured on an H200: docs/ring.md).
AUTO = ("fused", "ring")
AUTO_SHORT = ("ring", "fused")
# One kernel by itself, for tests and benchmarks (lowlevel.py) and for preparing weights.
SINGLE = {kind: Recipe(whole=(kind,)) for kind in ("absmax", "pack", "gemm", "repack")}
RECIPES = SCHEDULES | SINGLE


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def slot_row_bytes(arch: str, k: int) -> tuple[int, int]:
    """Bytes of activation and of block scales that one row of K columns takes in a slot.

    Packed: E2M1, and a scale byte for 16 columns, padded to 4 of them. On sm_90a a slot holds the
    decoded values as BF16 and no scales.
    """
    if arch == "sm_90a":
        return 2 * k, 0
    return k // 2, round_up(k // 16, 4)


def fixed_slots(entry: KernelEntry) -> int:
    """Rows of slots that a fused kernel was compiled for; 0 if the kernel takes any number."""
    if entry.kind != "ring_gemm":
        return 0
    slots, tile_m = entry.config.get("slots"), entry.config.get("tile_m")
    if not isinstance(slots, int) or not isinstance(tile_m, int):
        raise UnservedError(f"{entry.name} does not say how many slots it needs", got=repr(entry.config))
    return slots * tile_m


def partial_bytes(entry: KernelEntry, kernel: _core.Kernel) -> int:
    """Bytes of accumulators that the CTAs of a launch hand on, of as many as the device can be given."""
    return entry.partial_bytes * kernel.max_ctas


@dataclass(frozen=True)
class Plan:
    """Everything about a linear's launches but the pointers."""

    schedule: str
    arch: str
    kernels: tuple[KernelEntry, ...]
    sequence: _core.Sequence
    capacity_rows: int  # 0: as many as x has
    row_bytes: int  # of slots, activation and scales
    partial_bytes: int  # of accumulators that the last kernel's CTAs hand on, behind the slots
    repack: KernelEntry | None  # the weight is needed in the layout that this kernel makes

    def slot_bytes(self, m: int) -> int:
        """Slots for ``m`` rows of x and what lies behind them."""
        return (self.capacity_rows or round_up(m, TILE_ROWS)) * self.row_bytes + self.partial_bytes

    @property
    def ring_bytes(self) -> int:
        """What a ring must hold; nothing if there are as many slots as x has rows, made for each call."""
        return self.slot_bytes(0) if self.capacity_rows else 0

    @property
    def most_rows(self) -> int:
        """Rows that can be packed at a time."""
        return MOST_PACKED_BYTES // slot_row_bytes(self.arch, self.kernels[-1].k)[0]

    def can_pack(self, m: int) -> bool:
        """Whether x may have ``m`` rows: so many as are packed at a time are within reach."""
        return min(m, self.capacity_rows or m) <= self.most_rows

    def check_rows(self, m: int) -> None:
        """Raise InputError unless x may have ``m`` rows."""
        if not self.can_pack(m):
            raise InputError(
                f"too many rows of K = {self.kernels[-1].k} are packed at a time",
                expected=f"at most {self.most_rows}",
                got=f"{min(m, self.capacity_rows or m)} (schedule '{self.schedule}')",
                remedy="use schedule='fused', or schedule='ring' with a smaller ring",
            )


Choose = Callable[[str, tuple[KernelEntry, ...]], KernelEntry]


class KernelTable:
    """The kernels a device may use, by what they compute. ``archs`` come in order of preference."""

    def __init__(self, entries: Iterable[KernelEntry], archs: tuple[str, ...]) -> None:
        self.archs = archs
        self.entries = tuple(entry for entry in entries if entry.arch in archs)
        self._by_key: dict[tuple[str, str, int, int], list[KernelEntry]] = {}
        for entry in self.entries:
            self._by_key.setdefault((entry.arch, entry.kind, entry.n, entry.k), []).append(entry)

    def find(self, arch: str, kind: str, n: int, k: int) -> tuple[KernelEntry, ...]:
        """All variants in the order of the manifest; N does not matter to some kinds."""
        return tuple(self._by_key.get((arch, kind, n, k), self._by_key.get((arch, kind, 0, k), ())))

    def arch_for(self, recipe: Recipe, n: int, k: int) -> str | None:
        """The first architecture that has every kernel of the recipe: kernels are never mixed."""
        for arch in self.archs:
            if all(self.find(arch, kind, n, k) for kind in recipe.kinds):
                return arch
        return None

    def resolve(self, schedule: str, n: int, k: int, short: bool = False) -> tuple[str, str]:
        """(schedule, architecture) that serve a linear; ``short``: it is one chunk at most.

        Raises UnservedError.
        """
        names = (AUTO_SHORT if short else AUTO) if schedule == "auto" else (schedule,)
        for arch in self.archs:
            for name in names:
                if all(self.find(arch, kind, n, k) for kind in RECIPES[name].kinds):
                    return name, arch
        raise UnservedError(
            f"no artefact serves N = {n}, K = {k} with schedule '{schedule}'",
            expected=self.shipped() or "some kernels, but none is loaded",
            remedy=f"add the shape to a shapes file and run python -m ringfp4.build_cubins --shapes FILE "
            f"--arch {self.archs[0] if self.archs else 'ARCH'} --out DIR, then load(path=DIR)",
        )

    def linears(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """(N, K) of every linear that has kernels -> the schedules that serve it."""
        shapes = dict.fromkeys((entry.n, entry.k) for entry in self.entries if entry.n)
        served = {
            shape: tuple(name for name, recipe in SCHEDULES.items() if self.arch_for(recipe, *shape))
            for shape in shapes
        }
        return {shape: names for shape, names in served.items() if names}

    def shipped(self) -> str:
        return ", ".join(f"N={n} K={k} ({'/'.join(names)})" for (n, k), names in self.linears().items())


def useful_archs(entries: Iterable[KernelEntry], archs: tuple[str, ...]) -> tuple[str, ...]:
    """Of ``archs``, the best first, those that have a kernel which no better one has."""
    seen: set[tuple[str, int, int]] = set()
    useful = []
    for arch in archs:
        keys = {(entry.kind, entry.n, entry.k) for entry in entries if entry.arch == arch}
        if keys - seen:
            useful.append(arch)
        seen |= keys
    return tuple(useful)


def build(
    table: KernelTable,
    loaded: Callable[[KernelEntry], _core.Kernel],
    schedule: str,
    n: int,
    k: int,
    capacity_rows: int,
    choose: Choose = lambda _schedule, variants: variants[0],
) -> Plan:
    """Plan one linear. ``capacity_rows`` is the ring's; ``choose`` picks among tile variants.

    Raises UnservedError if a kernel is missing or needs more flags than a ring has, RingError if a
    fused kernel needs more counters.
    """
    name, arch = table.resolve(schedule, n, k)
    recipe = RECIPES[name]
    picked = {kind: choose(name, table.find(arch, kind, n, k)) for kind in recipe.kinds}
    main = picked[recipe.kinds[-1]]
    q_row, sf_row = slot_row_bytes(arch, k)
    if fixed := fixed_slots(main):
        capacity_rows = fixed
        _check_counters(main)
    elif name != "ring":
        capacity_rows = 0
    _check_flags(main, loaded(main).max_ctas)
    reduce, whole, each_chunk = (
        [loaded(picked[kind]) for kind in kinds] for kinds in (recipe.reduce, recipe.whole, recipe.each_chunk)
    )
    sequence = _core.Sequence(
        reduce,
        whole,
        each_chunk,
        capacity_rows=capacity_rows,
        q_row_bytes=q_row,
        sf_row_bytes=sf_row,
        y_row_bytes=2 * n,
    )
    return Plan(
        schedule=name,
        arch=arch,
        kernels=tuple(picked.values()),
        sequence=sequence,
        capacity_rows=capacity_rows,
        row_bytes=q_row + sf_row,
        partial_bytes=partial_bytes(main, loaded(main)),
        repack=next(iter(table.find(arch, "repack", n, k)), None),
    )


def _check_counters(entry: KernelEntry) -> None:
    """The counters of the fused protocol (docs/ring.md) must fit into a ring's state block."""
    slots, chunks = entry.config["slots"], entry.config.get("k_chunks", 1)
    if 4 * (slots * (chunks + 1) + 8) > _core.COUNTER_BYTES:
        raise RingError(
            f"{entry.name} needs more counters than a ring holds",
            expected=f"at most {_core.COUNTER_BYTES} bytes",
            got=f"{slots} slots of {chunks} chunks",
            remedy="build it with fewer slots",
        )


def _check_flags(entry: KernelEntry, ctas: int) -> None:
    """Each of the CTAs that may hand accumulators on needs its own flags; 0 ``ctas``: any number."""
    if entry.partial_bytes and not 0 < ctas <= MOST_FLAGGED_CTAS:
        raise UnservedError(
            f"{entry.name} can have more CTAs here than there are flags for accumulators that they hand on",
            expected=f"at most {MOST_FLAGGED_CTAS}",
            got=f"{ctas} ({entry.grid[2]} a multiprocessor)" if ctas else "any number",
            remedy="build it with fewer CTAs a multiprocessor, or so that it hands none on",
        )
