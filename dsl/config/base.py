"""What every kernel configuration states about itself, without importing the DSL.

A configuration is frozen, checks its own constraints before anything is compiled, and
describes the compiled kernel's launch (threads, shared memory, grid, parameters) and the
machine code it must have. The builder writes that description into the manifest, so the
runtime launches kernels without knowing how they were made.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from ringfp4.errors import ConfigError

# Shared memory a block may use, bytes (CUDA programming guide, compute capabilities).
SMEM_BYTES = {"sm_121a": 101_376, "sm_120f": 101_376, "twin": 101_376, "sm_90a": 232_448}
REGISTERS_PER_SM = 65_536
# A poll takes about 0.5 us with its sleep, so this is some seconds; other work may hold SMs for long.
POLL_LIMIT = 1 << 24
ARCHS = tuple(SMEM_BYTES)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Param:
    """One kernel parameter, in the order of the entry's parameter list.

    kind ``tensor_map``: 128 bytes, encoded by the runtime over the buffer ``name``;
    ``dims`` (elements, innermost first), ``strides`` (bytes, of dims 1..), ``box``, ``swizzle``
    (0, 32, 64 or 128 bytes). An entry of ``dims`` is a number or one of the symbols
    ``m`` (rows of this launch), ``m_blocks`` (ceil(m / 128)), ``cap`` (ring rows), ``cap_blocks``.
    kind ``pointer``: the device address of the buffer ``name``. kind ``i32``/``i64``: the
    scalar ``name``. kind ``bytes``: ``size`` zero bytes that the kernel does not read.
    """

    name: str
    kind: Literal["tensor_map", "pointer", "i32", "i64", "bytes"]
    dtype: str = ""  # tensor_map: u8, u16, bf16
    dims: tuple[int | str, ...] = ()
    strides: tuple[int, ...] = ()
    box: tuple[int, ...] = ()
    swizzle: int = 0
    size: int = 0  # bytes only

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v not in ("", (), 0) or k in ("name", "kind")}


@dataclass(frozen=True)
class Grid:
    """CTAs = ceil(m / rows_per_item) * items, at most ctas_per_sm * SMs if that is not 0.

    Rounded down to a multiple of the cluster size (at least one cluster).
    """

    rows_per_item: int
    items: int = 1
    ctas_per_sm: int = 0


@dataclass(frozen=True)
class SassRules:
    """What the machine code must look like; the builder refuses anything else."""

    tensor_instruction: str = ""  # regular expression over SASS opcodes, "" for none
    tensor_count: int = 0  # at least this many of them
    setmaxnreg: bool = False  # USETMAXREG must be there
    max_registers: int = 255
    # Loads of 16 bytes before griddepcontrol.wait, of memory that no kernel of a sequence writes.
    early_loads: int = 0
    max_wgmma_waits: int | None = None  # sm_90a: more waits than this means serialised wgmma


@dataclass(frozen=True)
class KernelConfig:
    """Base of all configurations. Subclasses add fields and override what differs."""

    kind: ClassVar[str]
    module: ClassVar[str]  # has compile_kernel(config) -> the DSL's compiled object
    k: int = field(kw_only=True)

    @property
    def n(self) -> int:
        """Output features, 0 for a kernel that does not depend on them."""
        return 0

    @property
    def tile(self) -> tuple[int, ...]:
        return ()

    @property
    def name(self) -> str:
        """Stem of the cubin's file name and the kernel's entry name; unique within an arch."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory a CTA is launched with."""
        return 0

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (1, 1, 1)

    @property
    def programmatic(self) -> bool:
        """The kernel is to be launched while the one before it in a sequence still runs.

        Before it touches memory that kernels have in common, it waits for that one's end by itself.
        """
        return False

    @property
    def partial_bytes(self) -> int:
        """Device memory for accumulators that a CTA hands on to another one."""
        return 0

    @property
    def grid(self) -> Grid:
        raise NotImplementedError

    def params(self) -> tuple[Param, ...]:
        raise NotImplementedError

    def sass_rules(self, arch: str) -> SassRules:
        return SassRules()

    def problems(self, arch: str) -> list[str]:
        """Every violated constraint, as a sentence naming the values; empty when usable."""
        limit = SMEM_BYTES[arch]
        if self.smem_bytes > limit:
            return [f"{self.name}: {self.smem_bytes} B of shared memory, {arch} has {limit} B"]
        return []

    def check(self, arch: str) -> None:
        """Raise ConfigError naming every violated constraint."""
        if arch not in ARCHS:
            raise ConfigError("unknown architecture", expected=" or ".join(ARCHS), got=arch)
        if found := self.problems(arch):
            raise ConfigError("unusable kernel configuration: " + "; ".join(found))
