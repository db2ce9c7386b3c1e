"""Configurations of the two kernels that prepare an activation: its absolute maximum and packing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ringfp4.dsl.config.base import Grid, KernelConfig, Param, SassRules, ceil_div

BLOCK = 16  # columns that share one block scale
ROW_GROUP = 8  # rows that one warp packs together
GROUP_COLUMNS = 4 * BLOCK  # columns of one such piece: 4 lanes a row, one block a lane
TILE_ROWS = 128  # rows of one tile of swizzled block scales


def _k_problems(config: KernelConfig) -> list[str]:
    if config.k <= 0 or config.k % 32:
        return [f"{config.name}: k = {config.k} is not a positive multiple of 32"]
    return []


@dataclass(frozen=True)
class AbsmaxConfig(KernelConfig):
    """max |x| over [m, K] and the tensor scale; one warp reads one row at a time."""

    kind: ClassVar[str] = "absmax"
    module: ClassVar[str] = "ringfp4.dsl.absmax"
    warps: int = 8
    loads: int = 7  # 16-byte loads that each thread has in flight
    ctas_per_sm: int = 4

    @property
    def name(self) -> str:
        return f"absmax_k{self.k}"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        return 4 * self.warps  # one maximum a warp

    @property
    def grid(self) -> Grid:
        return Grid(rows_per_item=self.warps, ctas_per_sm=self.ctas_per_sm)

    def params(self) -> tuple[Param, ...]:
        return (
            Param("x", "pointer"),
            Param("x_stride", "i64"),
            Param("m", "i32"),
            Param("rule", "i32"),
            Param("amax_state", "pointer"),
            Param("scale", "pointer"),
        )

    def sass_rules(self, arch: str) -> SassRules:
        return SassRules(max_registers=65_536 // (self.threads * self.ctas_per_sm) // 8 * 8)

    def problems(self, arch: str) -> list[str]:
        found = super().problems(arch) + _k_problems(self)
        if not 1 <= self.warps <= 32:
            found.append(f"{self.name}: {self.warps} warps, a CTA has 1 to 32")
        if self.threads * self.ctas_per_sm > 1536:
            found.append(
                f"{self.name}: {self.ctas_per_sm} CTAs of {self.threads} threads a multiprocessor, "
                "sm_12x holds 1536 threads"
            )
        return found


@dataclass(frozen=True)
class PackConfig(KernelConfig):
    """Quantise rows of x: ``packed`` E2M1 with swizzled block scales, or the same values as ``bf16``.

    A warp packs pieces of 8 rows by 64 columns, ``pieces`` of them side by side. The rows are two
    neighbours and those 32, 64 and 96 further on: their block scales fill one 32-byte sector.
    """

    kind: ClassVar[str] = "pack"
    module: ClassVar[str] = "ringfp4.dsl.pack"
    output: Literal["packed", "bf16"] = "packed"

    @property
    def name(self) -> str:
        return f"pack_{'' if self.output == 'packed' else 'bf16_'}k{self.k}"

    # Warps and pieces: best over K = 5376 and 7168 with 128, 2048 and 37,810 rows on an H200. Three
    # pieces a warp make BF16 output half as slow again.

    @property
    def warps(self) -> int:
        return 2 if self.output == "packed" else 14

    @property
    def pieces(self) -> int:
        return 4 if self.output == "packed" else 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def programmatic(self) -> bool:
        return True

    @property
    def ctas_per_group(self) -> int:
        """CTAs side by side over the K columns of one group of 8 rows."""
        return ceil_div(self.k, self.warps * self.pieces * GROUP_COLUMNS)

    @property
    def grid(self) -> Grid:
        return Grid(rows_per_item=TILE_ROWS, items=TILE_ROWS // ROW_GROUP * self.ctas_per_group)

    def params(self) -> tuple[Param, ...]:
        inputs = (
            Param("x", "pointer"),
            Param("x_stride", "i64"),
            Param("m", "i32"),
            Param("scale", "pointer"),
        )
        outputs = (Param("q", "pointer"), Param("sf", "pointer"))
        return inputs + (outputs if self.output == "packed" else outputs[:1])

    def sass_rules(self, arch: str) -> SassRules:
        # 1024 threads a multiprocessor at least, or too few loads are in flight.
        return SassRules(max_registers=64, early_loads=2 * self.pieces)

    def problems(self, arch: str) -> list[str]:
        found = super().problems(arch) + _k_problems(self)
        if self.output == "packed" and arch == "sm_90a":
            found.append(f"{self.name}: sm_90a has no E2M1 conversion, use output='bf16'")
        return found
