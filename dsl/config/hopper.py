"""Configurations of the native Hopper kernels: dequantise to BF16 in registers, then wgmma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ringfp4.dsl.config.base import (
    POLL_LIMIT,
    REGISTERS_PER_SM,
    SMEM_BYTES,
    Grid,
    KernelConfig,
    Param,
    SassRules,
    ceil_div,
)

STRIP_ROWS = 64  # weight rows of one consumer warpgroup: wgmma's M
TILE_K = 64  # one 128-byte swizzled row of BF16
STRIP_BYTES = STRIP_ROWS * TILE_K // 2 + STRIP_ROWS * TILE_K // 16  # E2M1 data, then block scales
SMEM_PER_SM = 233_472  # each resident CTA takes 1,024 B of it for the system
MAX_STAGES = 16
ENOUGH_STAGES = 6  # for which a tile is stored in parts, each of which costs two barriers
MOST_STORE_PARTS = 8
STORE_BUFFERS = 2
# tile_m, consumers, CTAs a multiprocessor: few, so that one of them suits each M (docs/hopper.md)
VARIANTS = (
    (256, 2, 1),
    (176, 2, 1),
    (160, 2, 1),
    (128, 2, 1),
    (96, 2, 1),
    (128, 3, 1),
    (64, 1, 2),
    (16, 1, 4),
)
FLAGS_PER_CTA = 16  # of the accumulators a CTA hands on, one a consumer warp, and some to spare
MIN_STAGES = 3  # one being read, one being dequantised, one in flight


def padded_rows(rows: int) -> int:
    """What tiles lie apart in shared memory: the DSL cannot slice tiles of an odd number of 8 rows."""
    return ceil_div(rows, 16) * 16


@dataclass(frozen=True)
class HopperGemmConfig(KernelConfig):
    """y[m, n] = sum_k q[m, k] * W[n, k], times the tensor scales, plus bias.

    A CTA's output tile is ``tile_m`` rows of y by 64 * ``consumers`` columns: each consumer
    warpgroup owns a strip of 64 weight rows, which are wgmma's M, while rows of y are its N.
    """

    kind: ClassVar[str] = "gemm"
    module: ClassVar[str] = "ringfp4.dsl.hopper_gemm"
    least_producer_registers: ClassVar[int] = 32

    features: int  # N
    tile_m: int
    consumers: int = 2
    ctas_per_sm: int = 1
    # m tiles that are worked on together (ring_order.tile_coord): few, since weights are the smaller operand.
    group: int = 2
    poll_limit: int = POLL_LIMIT
    jitter: bool = False  # random delays, for tests

    @classmethod
    def variants(cls, n: int, k: int) -> list[HopperGemmConfig]:
        """A tile for every M, the best one for many rows first; runtime/choose_tile.py chooses."""
        return [
            cls(features=n, k=k, tile_m=tile_m, consumers=consumers, ctas_per_sm=ctas)
            for tile_m, consumers, ctas in VARIANTS
        ]

    @property
    def n(self) -> int:
        return self.features

    @property
    def tile_n(self) -> int:
        return self.consumers * STRIP_ROWS

    @property
    def tile(self) -> tuple[int, int, int]:
        return (self.tile_m, self.tile_n, TILE_K)

    @property
    def n_tiles(self) -> int:
        """Weight tiles; strips of the last one that lie beyond N store nothing."""
        return ceil_div(self.features, self.tile_n)

    @property
    def name(self) -> str:
        shape = f"n{self.features}_k{self.k}_{self.tile_m}x{self.tile_n}x{TILE_K}"
        return f"hopper_{self.kind}_{shape}_o{self.ctas_per_sm}"

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)  # the producer is a warpgroup too, for setmaxnreg

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer and of the consumers, after setmaxnreg.

        They share what the kernel is launched with: the register file over its threads.
        """
        at_launch = min(REGISTERS_PER_SM // (self.threads * self.ctas_per_sm) // 8 * 8, 248)
        total = at_launch * (1 + self.consumers)
        consumer = min((total - self.least_producer_registers) // self.consumers // 8 * 8, 240)
        return total - self.consumers * consumer, consumer

    @property
    def programmatic(self) -> bool:
        """Small tiles only, of which a multiprocessor takes several CTAs.

        A CTA that starts early goes where there is room. Those of larger tiles must not: neighbours share
        tiles, and share them best where the hardware puts them on an idle device.
        """
        return self.ctas_per_sm > 1

    @property
    def divides(self) -> bool:
        """The last wave of tiles is divided evenly (tile_walk.py). Small tiles hardly ever make two waves."""
        return self.ctas_per_sm == 1 and self.k_units > 1

    @property
    def partial_bytes(self) -> int:
        return self.tile_m * self.tile_n * 4 if self.divides else 0

    @property
    def k_units(self) -> int:
        """K steps come in pairs: the mainloop has two fragments of A."""
        return self.k // (2 * TILE_K)

    @property
    def rows_in_smem(self) -> int:
        """Rows from one stage to the next."""
        return padded_rows(self.tile_m)

    @property
    def stage_bytes(self) -> int:
        """What one K step brings in; the bytes that complete a stage's barrier are in load_bytes."""
        return self.rows_in_smem * TILE_K * 2 + self.consumers * STRIP_BYTES

    @property
    def load_bytes(self) -> int:
        return self.tile_m * TILE_K * 2 + self.consumers * STRIP_BYTES

    @property
    def store_parts(self) -> int:
        """Parts in which a tile is stored: the fewest that leave room for stages enough, or for most."""
        parts = [p for p in range(1, MOST_STORE_PARTS + 1) if self.tile_m // 8 % p == 0]
        return max(parts, key=lambda p: min(self._stages_beside(p), ENOUGH_STAGES))

    @property
    def store_rows(self) -> int:
        return self.tile_m // self.store_parts

    @property
    def store_buffers(self) -> int:
        """Staging buffers of a consumer: one part is written while the one before is being stored."""
        return min(self.store_parts, STORE_BUFFERS)

    @property
    def rows_in_staging(self) -> int:
        """Rows from one staging buffer to the next."""
        return padded_rows(self.store_rows)

    @property
    def staging_bytes(self) -> int:
        """Parts of the output tile in BF16, on their way from registers to the TMA store."""
        return self._staging_bytes(self.store_parts)

    def _staging_bytes(self, parts: int) -> int:
        rows = min(parts, STORE_BUFFERS) * padded_rows(self.tile_m // parts)
        return self.consumers * rows * STRIP_ROWS * 2

    def _stages_beside(self, parts: int) -> int:
        limit = SMEM_BYTES["sm_90a"]
        if self.ctas_per_sm > 1:
            limit = SMEM_PER_SM // self.ctas_per_sm - 1024
        barriers = 16  # a full and an empty mbarrier
        return min((limit - self._staging_bytes(parts)) // (self.stage_bytes + barriers), MAX_STAGES)

    @property
    def stages(self) -> int:
        return self._stages_beside(self.store_parts)

    @property
    def smem_bytes(self) -> int:
        """Stages with their barriers and the staged output; in units of 1 KiB (swizzle atoms)."""
        used = self.stages * (self.stage_bytes + 16) + self.staging_bytes
        return ceil_div(used, 1024) * 1024

    @property
    def grid(self) -> Grid:
        return Grid(rows_per_item=self.tile_m, items=self.n_tiles, ctas_per_sm=self.ctas_per_sm)

    def params(self) -> tuple[Param, ...]:
        k, n = self.k, self.features
        return (
            Param("w", "pointer"),
            Param("q", "tensor_map", "bf16", (k, "m"), (2 * k,), (TILE_K, self.tile_m), 128),
            Param("y", "tensor_map", "bf16", (n, "m"), (2 * n,), (STRIP_ROWS, self.store_rows), 128),
            Param("scale", "pointer"),
            Param("w_scale", "pointer"),
            Param("bias", "pointer"),
            Param("partials", "pointer"),
            Param("flags", "pointer"),
            Param("status", "pointer"),
            Param("m", "i32"),
        )

    def sass_rules(self, arch: str) -> SassRules:
        # Four k16 instructions and one wait a K step; the first, two in the loop and the last are
        # separate code. More waits mean that ptxas serialised the wgmma.
        copies = min(self.k // TILE_K, 4)
        return SassRules(
            tensor_instruction=r"HGMMA\.64",
            tensor_count=4 * copies,
            setmaxnreg=True,
            max_wgmma_waits=copies,
        )

    def problems(self, arch: str) -> list[str]:
        found = super().problems(arch)
        if arch != "sm_90a":
            found.append(f"{self.name}: only for sm_90a, not {arch}")
        if self.features < STRIP_ROWS or self.features % STRIP_ROWS:
            found.append(f"{self.name}: N = {self.features} is not a multiple of {STRIP_ROWS}")
        if self.k < 2 * TILE_K or self.k % (2 * TILE_K):
            found.append(f"{self.name}: K = {self.k} is not a multiple of {2 * TILE_K}")
        if not 1 <= self.consumers <= 3:
            found.append(f"{self.name}: {self.consumers} consumer warpgroups, expected 1 to 3")
        if not 8 <= self.tile_m <= 256 or self.tile_m % 8:
            found.append(f"{self.name}: tile_m = {self.tile_m} is not a multiple of 8 in 8..256")
        if self.stages < MIN_STAGES:
            found.append(f"{self.name}: room for {self.stages} stages, needs {MIN_STAGES}")
        # tile_m / 2 accumulators, two A fragments of 16; with less than 48 more ptxas serialises wgmma.
        needed = self.tile_m // 2 + 32 + 48
        if self.registers[1] < needed:
            found.append(f"{self.name}: {self.registers[1]} registers a consumer thread, needs {needed}")
        return found


@dataclass(frozen=True)
class HopperRepackConfig(KernelConfig):
    """Comfy's weight layout -> the Hopper layout (runtime/hopper_layout.py), once per weight.

    A launch's rows ``m`` are the weight's N. A CTA makes one block of 64 rows by 64 columns.
    """

    kind: ClassVar[str] = "repack"
    module: ClassVar[str] = "ringfp4.dsl.hopper_repack"

    @property
    def name(self) -> str:
        return f"hopper_repack_k{self.k}"

    @property
    def threads(self) -> int:
        return 128

    @property
    def grid(self) -> Grid:
        return Grid(rows_per_item=STRIP_ROWS, items=self.k // TILE_K)

    def params(self) -> tuple[Param, ...]:
        return (Param("w", "pointer"), Param("w_sf", "pointer"), Param("packed", "pointer"))

    def problems(self, arch: str) -> list[str]:
        found = super().problems(arch)
        if self.k < 2 * TILE_K or self.k % (2 * TILE_K):
            found.append(f"{self.name}: K = {self.k} is not a multiple of {2 * TILE_K}")
        return found
