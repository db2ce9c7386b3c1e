"""Configuration of the sm_12x block-scaled GEMM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .base import REGISTERS_PER_SM, Grid, KernelConfig, Param, SassRules, ceil_div

WARP = 32
WARPGROUP_WARPS = 4  # setmaxnreg counts for a whole warpgroup
MMA_K = 64  # m16n8k64
SF_ROWS = 128  # rows of a scale tile of 128 rows x 4 blocks of 16 columns, 512 B
SF_TILE_BYTES = 512
STORE_COLS = 64  # columns of one TMA store: 128 B of BF16, the widest swizzle
STORE_ROWS = 8
BARRIER_BYTES = 8

# (m warps, n warps), stages, buffers of 8 x 64 outputs a warp; by (tile_m, tile_n)
TILES: dict[tuple[int, int], tuple[tuple[int, int], int, int]] = {
    (128, 128): ((4, 2), 4, 2),
    (128, 256): ((2, 4), 3, 2),
}


@dataclass(frozen=True)
class GemmConfig(KernelConfig):
    """y[m, N] = bf16(alpha * (SFA * A)[m, K] @ (SFB * B)[N, K]^T + bias), persistent, cooperative.

    A, B are packed E2M1, SFA, SFB E4M3 in the 128 x 4 swizzle (docs/numerics.md). One warpgroup
    loads (its first warp issues the TMA), the MMA warps tile the output ``warps_m`` x ``warps_n``.
    N and K are compiled in, m is a run-time value.
    """

    kind: ClassVar[str] = "gemm"
    module: ClassVar[str] = "blockscaled_gemm"

    features: int = field(kw_only=True)  # N
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 128
    warps_m: int = 4
    warps_n: int = 2
    stages: int = 4
    store_buffers: int = 2  # a warp, 1 KiB each
    group: int = 16  # m tiles that share the weight tiles in L2 (ring_order.tile_coord)
    producer_warps: int = WARPGROUP_WARPS
    producer_registers: int = 40
    mma_registers: int = 232

    @classmethod
    def with_tile(cls, n: int, k: int, tile_m: int = 128, tile_n: int = 128) -> GemmConfig:
        """The configuration of a known tile; raises KeyError for another."""
        (warps_m, warps_n), stages, buffers = TILES[tile_m, tile_n]
        return cls(
            features=n,
            k=k,
            tile_m=tile_m,
            tile_n=tile_n,
            warps_m=warps_m,
            warps_n=warps_n,
            stages=stages,
            store_buffers=buffers,
        )

    @property
    def n(self) -> int:
        return self.features

    @property
    def tile(self) -> tuple[int, ...]:
        return (self.tile_m, self.tile_n, self.tile_k)

    @property
    def name(self) -> str:
        return f"{self.kind}_n{self.n}_k{self.k}_{self.tile_m}x{self.tile_n}x{self.tile_k}"

    # Warps

    @property
    def mma_warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_m(self) -> int:
        return self.tile_m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.tile_n // self.warps_n

    @property
    def mma_threads(self) -> int:
        return self.mma_warps * WARP

    @property
    def threads(self) -> int:
        return self.mma_threads + self.producer_warps * WARP

    # Tiles of the problem

    @property
    def n_tiles(self) -> int:
        return ceil_div(self.n, self.tile_n)

    @property
    def k_tiles(self) -> int:
        return ceil_div(self.k, self.tile_k)

    @property
    def k_blocks(self) -> int:
        """MMA steps a K tile."""
        return self.tile_k // MMA_K

    # Shared memory of a stage, bytes

    @property
    def row_bytes(self) -> int:
        return self.tile_k // 2

    @property
    def a_bytes(self) -> int:
        return self.tile_m * self.row_bytes

    @property
    def b_bytes(self) -> int:
        return self.tile_n * self.row_bytes

    @property
    def sfa_bytes(self) -> int:
        return ceil_div(self.tile_m, SF_ROWS) * self.k_blocks * SF_TILE_BYTES

    @property
    def sfb_bytes(self) -> int:
        return ceil_div(self.tile_n, SF_ROWS) * self.k_blocks * SF_TILE_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.a_bytes + self.b_bytes + self.sfa_bytes + self.sfb_bytes

    @property
    def store_bytes(self) -> int:
        return self.mma_warps * self.store_buffers * STORE_ROWS * STORE_COLS * 2

    @property
    def smem_bytes(self) -> int:
        """Stages, output staging, a full and an empty barrier a stage; in units of 1 KiB (swizzle atoms)."""
        used = self.stages * (self.stage_bytes + 2 * BARRIER_BYTES) + self.store_bytes
        return ceil_div(used, 1024) * 1024

    @property
    def full_arrivals(self) -> int:
        """Arrivals that complete a full barrier: the loading thread's, which expects the bytes."""
        return 1

    @property
    def empty_arrivals(self) -> int:
        """Arrivals that complete an empty barrier: every MMA thread's."""
        return self.mma_threads

    # Launch

    @property
    def grid(self) -> Grid:
        return Grid(rows_per_item=self.tile_m, items=self.n_tiles, ctas_per_sm=1)

    def params(self) -> tuple[Param, ...]:
        row, sf_cols = self.k // 2, ceil_div(self.k, MMA_K)

        def operand(name: str, rows: int | str, tile: int) -> Param:
            box = (self.row_bytes, tile)
            return Param(name, "tensor_map", "u8", (row, rows), (row,), box, self.row_bytes)

        def scales(name: str, blocks: int | str, tile: int) -> Param:
            box = (SF_TILE_BYTES // 2, self.k_blocks, ceil_div(tile, SF_ROWS))
            strides = (SF_TILE_BYTES, SF_TILE_BYTES * sf_cols)
            return Param(name, "tensor_map", "u16", (SF_TILE_BYTES // 2, sf_cols, blocks), strides, box)

        store_box = (STORE_COLS, STORE_ROWS)
        return (
            operand("q", "m", self.tile_m),
            operand("w", self.n, self.tile_n),
            scales("sf", "m_blocks", self.tile_m),
            scales("w_sf", ceil_div(self.n, SF_ROWS), self.tile_n),
            Param("y", "tensor_map", "bf16", (self.n, "m"), (2 * self.n,), store_box, 2 * STORE_COLS),
            Param("scale", "pointer"),
            Param("w_scale", "pointer"),
            Param("bias", "pointer"),
            Param("m", "i32"),
        )

    # Constraints

    @property
    def mma_count(self) -> int:
        """MMA instructions of a warp in one K tile."""
        return (self.warp_m // 16) * (self.warp_n // 8) * self.k_blocks

    def sass_rules(self, arch: str) -> SassRules:
        if arch == "twin":  # each block-scaled MMA becomes four HMMA.16816
            return SassRules(r"^HMMA\.16816\.F32$", 4 * self.mma_count, setmaxnreg=True, max_registers=168)
        return SassRules(r"^OMMA\.SF\..*\.4X$", self.mma_count, setmaxnreg=True, max_registers=168)

    @property
    def launch_registers(self) -> int:
        """Registers a thread gets at launch when one CTA may fill the SM, in steps of 8."""
        return min(255, REGISTERS_PER_SM // self.threads) // 8 * 8

    def _register_problems(self) -> list[str]:
        low, high, launch = self.producer_registers, self.mma_registers, self.launch_registers
        found = []
        if self.producer_warps % WARPGROUP_WARPS or self.mma_warps % WARPGROUP_WARPS:
            # Registers come free only when all four warps of a group have executed setmaxnreg:
            # with a single loading warp the MMA warps would wait for ever.
            found.append(
                f"{self.producer_warps} producer and {self.mma_warps} MMA warps are not whole warpgroups"
            )
        if any(r % 8 or not 24 <= r <= 256 for r in (low, high)):
            found.append(f"setmaxnreg takes multiples of 8 from 24 to 256, not {low} and {high}")
        if not low <= launch <= high:
            found.append(f"setmaxnreg {low}/{high} does not bracket the {launch} registers of the launch")
        needed = WARP * (self.producer_warps * low + self.mma_warps * high)
        if needed > launch * self.threads:
            found.append(
                f"warps ask for {needed} registers, the launch holds {launch * self.threads}: deadlock"
            )
        accumulators = self.warp_m * self.warp_n // WARP
        fragments = (self.warp_m // 16) * 4 + (self.warp_n // 8) * 2
        if accumulators + fragments > high - 24:
            found.append(
                f"{accumulators} accumulators and {fragments} fragment registers leave "
                f"less than 24 of {high} a thread"
            )
        return found

    def problems(self, arch: str) -> list[str]:
        found = []
        if arch not in ("sm_121a", "sm_120f", "twin"):
            found.append(f"block-scaled MMA does not exist on {arch}")
        if self.n < 8 or self.n % 8:
            found.append(f"N = {self.n} is not a positive multiple of 8 (16-byte rows of the output)")
        if self.k < 32 or self.k % 32:
            found.append(f"K = {self.k} is not a positive multiple of 32 (16-byte rows of packed E2M1)")
        if self.tile_k != 128:
            found.append(f"tile_k = {self.tile_k}, the 64-byte swizzle needs 128")
        if self.tile_m % SF_ROWS or self.tile_n % SF_ROWS:
            found.append(f"tile {self.tile_m} x {self.tile_n} is not whole scale tiles of {SF_ROWS} rows")
        if max(self.tile_m, self.tile_n) > 256:
            found.append(f"tile {self.tile_m} x {self.tile_n} exceeds a TMA box of 256 rows")
        if self.tile_m % self.warps_m or self.warp_m not in (32, 64, 128):
            found.append(f"{self.warps_m} warps cannot share {self.tile_m} rows in whole groups of 32")
        if self.tile_n % self.warps_n or self.warp_n != STORE_COLS:
            found.append(
                f"{self.warps_n} warps cannot share {self.tile_n} columns as {STORE_COLS}-wide stores"
            )
        if self.stages < 2:
            found.append(f"{self.stages} stages, at least 2 are needed to overlap loads and MMAs")
        if self.store_buffers not in (2, 4):
            # Rotation restarts with every tile, so the buffers must divide its stores.
            found.append(f"{self.store_buffers} store buffers, must be 2 or 4")
        if self.group < 1:
            found.append(f"group = {self.group}, must be at least 1")
        found += self._register_problems()
        return [f"{self.name}: {text}" for text in found] + super().problems(arch)
