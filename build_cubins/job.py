"""One compile: a configuration, an architecture, and the linears that need it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ringfp4.build_cubins.sources import closure_hash
from ringfp4.build_cubins.tools import tool_versions
from ringfp4.dsl.config import Linear, plan
from ringfp4.dsl.config.base import KernelConfig
from ringfp4.errors import BuildError

# What the DSL compiles for, by the architecture that the artefact is for.
DSL_ARCH = {"sm_121a": "sm_121a", "sm_120f": "sm_120f", "sm_90a": "sm_90a", "twin": "sm_121a"}
ELF_ARCH = {**DSL_ARCH, "twin": "sm_90a"}

_WORKER = "ringfp4.build_cubins.worker"


def kernel_module(config: KernelConfig) -> str:
    """Full name of the module that compiles ``config``; a bare one lies in ringfp4.dsl."""
    return config.module if "." in config.module else f"ringfp4.dsl.{config.module}"


@dataclass(frozen=True)
class Job:
    config: KernelConfig
    arch: str
    roles: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.config.name} ({self.arch})"

    @property
    def file(self) -> str:
        return f"{self.config.name}.{self.arch}.cubin"

    def key(self) -> str:
        """Equal for two compiles that give the same bytes: sources, configuration, tools."""
        kind = type(self.config)
        parts = {
            "sources": closure_hash((kind.__module__, kernel_module(self.config), _WORKER)),
            "config": [f"{kind.__module__}.{kind.__qualname__}", asdict(self.config)],
            "arch": self.arch,
            "tools": tool_versions(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def plan_jobs(linears: Iterable[Linear], archs: Iterable[str]) -> list[Job]:
    """Every kernel of every linear once per architecture, in order of architecture and name."""
    linears = list(linears)
    jobs = []
    for arch in archs:
        roles: dict[KernelConfig, list[str]] = {}
        for linear in linears:
            for config in plan(linear, arch):
                roles.setdefault(config, []).append(linear.name)
        names: dict[str, KernelConfig] = {}
        for config in roles:
            if config.name in names:
                raise BuildError(
                    f"two configurations are called {config.name} on {arch}",
                    got=f"{config} and {names[config.name]}",
                    remedy="make the name tell them apart",
                )
            names[config.name] = config
        jobs += [Job(names[name], arch, tuple(roles[names[name]])) for name in sorted(names)]
    return jobs
