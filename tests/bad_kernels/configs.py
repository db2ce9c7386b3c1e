"""Configurations of small kernels: one that is right, and others each wrong in one way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ringfp4.dsl.config.base import Grid, KernelConfig, Param, SassRules


@dataclass(frozen=True)
class CopyConfig(KernelConfig):
    """y = x for ``values`` elements a thread, held in registers all at once."""

    kind: ClassVar[str] = "copy"
    module: ClassVar[str] = "bad_kernels.kernels"
    variant: str = "good"
    k: int = 32
    values: int = 4
    threads_: int = 256
    min_blocks: int = 0
    setmaxnreg: tuple[int, int] = (0, 0)  # of the first warpgroup, of the others
    entry: str = ""
    smem: int = 0
    extra_param: bool = False
    early: bool = False  # launched before its predecessor has ended
    early_loads: int = 0
    tensor: str = ""

    @property
    def name(self) -> str:
        return f"copy_{self.variant}"

    @property
    def threads(self) -> int:
        return self.threads_

    @property
    def smem_bytes(self) -> int:
        return self.smem

    @property
    def grid(self) -> Grid:
        return Grid(rows_per_item=1)

    @property
    def programmatic(self) -> bool:
        return self.early

    def params(self) -> tuple[Param, ...]:
        real = (Param("x", "pointer"), Param("y", "pointer"), Param("m", "i32"))
        return (*real, Param("bias", "pointer")) if self.extra_param else real

    def sass_rules(self, arch: str) -> SassRules:
        return SassRules(
            tensor_instruction=self.tensor,
            setmaxnreg=self.setmaxnreg != (0, 0),
            early_loads=self.early_loads,
        )
