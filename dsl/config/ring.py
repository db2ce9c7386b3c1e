"""Configurations of the persistent launch that packs into a ring and multiplies (docs/ring.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ringfp4.dsl.config.base import POLL_LIMIT, KernelConfig, Param, ceil_div
from ringfp4.dsl.config.gemm import SF_ROWS, WARPGROUP_WARPS, GemmConfig
from ringfp4.dsl.config.hopper import HopperGemmConfig
from ringfp4.dsl.config.quantise import GROUP_COLUMNS, ROW_GROUP, TILE_ROWS
from ringfp4.dsl.ring_order import RingOrder

K_CHUNKS = 7  # divides K of every H3 role; enough for the first loads to start early
MAX_PIECES = 4  # more would not fit into a packing warp's registers
MAX_PROLOGUE_PIECES = 8  # a consumer warp, which has no accumulators yet, has room for more
PACKING_WARPS = WARPGROUP_WARPS - 1  # the producer warpgroup without its loader

# Output tiles of the first group: several for each CTA, to do while the second group is packed.
FIRST_TILES = 168


@dataclass(frozen=True, kw_only=True)
class RingFields(KernelConfig):
    """What a ring adds to the configuration of a GEMM; to be named before that in a list of bases.

    The GEMM's has tile_m, n_tiles and ``group``, the m tiles of a group.
    """

    kind: ClassVar[str] = "ring_gemm"
    packed: ClassVar[bool]  # the ring holds E2M1 and block scales, otherwise BF16 values

    slots: int = 32  # m tiles that the ring holds
    first: int = 1  # m tiles of the first group
    k_chunks: int = 1
    pieces: int = 1  # of 64 columns that a packing warp has in flight
    prologue_pieces: int = 1  # that a consumer warp has in flight while it packs the first group
    maximum_loads: int = 11  # 16-byte loads a thread has in flight while it looks for the maximum
    poll_limit: int = POLL_LIMIT
    jitter: bool = False  # random delays in the protocol, for tests

    @property
    def consumer_warps(self) -> int:
        raise NotImplementedError

    @property
    def name(self) -> str:
        variant = f"_g{self.group}_s{self.slots}" + ("_jitter" if self.jitter else "")
        return super().name + variant

    @property
    def programmatic(self) -> bool:
        return False  # no other kernel comes before it

    @property
    def order(self) -> RingOrder:
        units = self.tile_m // ROW_GROUP
        return RingOrder(self.tile_m, units, self.n_tiles, self.k_chunks, self.slots, self.group, self.first)

    @property
    def ring_rows(self) -> int:
        """Rows of activation that the ring must hold."""
        return self.slots * self.tile_m

    @property
    def chunk_columns(self) -> int:
        return self.k // self.k_chunks

    def params(self) -> tuple[Param, ...]:
        """The GEMM's, whose q and sf are the ring, and what packing and the protocol need.

        ``rule`` below zero: the tensor scale is given in ``scale``; otherwise the launch finds it in
        x by that rule and writes it there. ``counters``: i32, RingOrder.counters of them, zero
        between launches. ``status``: u32[4] in host memory, written before a trap.
        """
        ring = {"m": self.ring_rows, "m_blocks": self.ring_rows // SF_ROWS}
        gemm = [
            replace(p, dims=tuple(ring.get(d, d) for d in p.dims)) if p.name in ("q", "sf") else p
            for p in super().params()
        ]
        names = ("x", "q", "sf", "counters", "status") if self.packed else ("x", "q", "counters", "status")
        known = {p.name for p in gemm if p.kind == "pointer"}
        pointers = [Param(name, "pointer") for name in names if name not in known]
        return (*gemm, *pointers, Param("x_stride", "i64"), Param("rule", "i32"))

    def problems(self, arch: str) -> list[str]:
        found = self.order.problems()
        tile_k = self.tile[2]
        if self.k % self.k_chunks or (self.k_chunks > 1 and self.chunk_columns % tile_k):
            found.append(f"{self.k_chunks} K chunks do not divide K = {self.k} into steps of {tile_k}")
        if self.tile_m % ROW_GROUP:
            found.append(f"tile_m = {self.tile_m} is not a multiple of {ROW_GROUP} rows, which a warp packs")
        for pieces, most in ((self.pieces, MAX_PIECES), (self.prologue_pieces, MAX_PROLOGUE_PIECES)):
            if not 1 <= pieces <= most or self.chunk_columns % (pieces * GROUP_COLUMNS):
                found.append(
                    f"{pieces} pieces of {GROUP_COLUMNS} columns, 1 to {most} "
                    f"that divide a chunk of {self.chunk_columns} are needed"
                )
        return [f"{self.name}: {text}" for text in found] + super().problems(arch)


def with_ring(config: RingFields, group: int, jitter: bool = False, slots: int = 0) -> RingFields:
    """Groups of ``group`` m tiles and a ring of two of them, one in use, one being packed, or ``slots``."""
    k, tile_k = config.k, config.tile[2]
    chunks = K_CHUNKS if k % (K_CHUNKS * tile_k) == 0 else 1
    chunk_pieces = k // chunks // GROUP_COLUMNS

    def most_pieces(most: int) -> int:
        return max(p for p in range(1, most + 1) if chunk_pieces % p == 0)

    return replace(
        config,
        group=group,
        slots=slots or 2 * group,
        first=min(ceil_div(FIRST_TILES, config.n_tiles), group),
        k_chunks=chunks,
        pieces=most_pieces(MAX_PIECES),
        prologue_pieces=most_pieces(MAX_PROLOGUE_PIECES),
        jitter=jitter,
    )


@dataclass(frozen=True)
class RingGemmConfig(RingFields, GemmConfig):
    """The block-scaled GEMM of sm_12x with its activation quantised on the way."""

    module: ClassVar[str] = "ringfp4.dsl.ring_gemm"
    packed: ClassVar[bool] = True

    producer_registers: int = 72
    mma_registers: int = 216

    @classmethod
    def for_linear(cls, n: int, k: int, group: int = 16, jitter: bool = False) -> RingGemmConfig:
        return with_ring(cls.with_tile(n, k), group, jitter)

    @property
    def consumer_warps(self) -> int:
        return self.mma_warps

    def problems(self, arch: str) -> list[str]:
        found = []
        if self.tile_m != TILE_ROWS:
            found.append(f"tile_m = {self.tile_m}, packing needs {TILE_ROWS}: one tile of block scales")
        if self.producer_warps != WARPGROUP_WARPS:
            found.append(
                f"{self.producer_warps} producer warps, a loader and {PACKING_WARPS} packers are needed"
            )
        return [f"{self.name}: {text}" for text in found] + super().problems(arch)


@dataclass(frozen=True)
class HopperRingGemmConfig(RingFields, HopperGemmConfig):
    """The native Hopper GEMM with its activation quantised on the way, to BF16 values."""

    module: ClassVar[str] = "ringfp4.dsl.hopper_ring_gemm"
    packed: ClassVar[bool] = False
    least_producer_registers: ClassVar[int] = 88

    @classmethod
    def for_linear(
        cls, n: int, k: int, tile_m: int = 208, group: int = 4, slots: int = 0, jitter: bool = False
    ) -> HopperRingGemmConfig:
        return with_ring(cls(features=n, k=k, tile_m=tile_m), group, jitter, slots)

    @property
    def consumer_warps(self) -> int:
        return WARPGROUP_WARPS * self.consumers

    @property
    def divides(self) -> bool:
        return super().divides and self.order.may_divide

    def problems(self, arch: str) -> list[str]:
        found = super().problems(arch)
        if self.ctas_per_sm != 1:
            found.append(f"{self.name}: the ring needs one CTA for each SM, not {self.ctas_per_sm}")
        return found
