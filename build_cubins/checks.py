"""What must not ship, and why: the machine code against the configuration that asked for it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ringfp4.build_cubins.compiler import Built
from ringfp4.build_cubins.job import ELF_ARCH, Job
from ringfp4.dsl.config.base import REGISTERS_PER_SM, SMEM_BYTES, Param, ceil_div

PTXAS = "12.9"  # of the DSL's default flavour
PTX_ISA = {"12.9": "8.8", "13.0": "9.0", "13.1": "9.1", "13.2": "9.2", "13.3": "9.3", "13.4": "9.4"}
MAX_BARRIERS = 16
_PARAM_BYTES = {"tensor_map": 128, "pointer": 8, "i32": 4, "i64": 8}
_GLOBAL_ACCESS = re.compile(r"(LDG?|STG?|REDG?|ATOMG?|LDGSTS|UTM(?!ACCTL)\w+|UBLK\w+)\b")
_WARPGROUP = 128  # threads; setmaxnreg is for whole warpgroups

Problem = tuple[str, object, object]  # what, expected, got


def refusal(job: Job, built: Built, ptxas: str = PTXAS) -> str:
    """Everything wrong with ``built``, "" if it may ship. ``ptxas``: the release it must be from."""
    found = [
        problem
        for rule in (_identity, _interface, _memory, _registers, _instructions, _start)
        for problem in rule(job, built)
    ]
    found += _assembler(built, ptxas)
    return "; ".join(f"{what}: expected {expected}, got {got}" for what, expected, got in found)


def param_bytes(param: Param) -> int:
    return param.size if param.kind == "bytes" else _PARAM_BYTES[param.kind]


def _identity(job: Job, built: Built) -> Iterator[Problem]:
    name, elf = job.config.name, built.elf
    if elf.arch != ELF_ARCH[job.arch]:
        yield "ELF architecture", ELF_ARCH[job.arch], elf.arch
    # The DSL numbers the kernels of a module, so its entry ends in _0.
    if elf.entry not in (name, f"{name}_0"):
        yield "entry name", f"{name} or {name}_0", elf.entry
    if built.ptx_facts.entry != elf.entry:
        yield "entry name in the PTX", elf.entry, built.ptx_facts.entry


def _interface(job: Job, built: Built) -> Iterator[Problem]:
    params = job.config.params()
    expected = [param_bytes(p) for p in params]
    got = {"PTX": list(built.ptx_facts.params), "ELF": [size for _, size in built.elf.params]}
    for where, sizes in got.items():
        if sizes != expected and (where == "PTX" or sizes != got["PTX"]):
            named = " ".join(f"{p.name}:{param_bytes(p)}" for p in params)
            yield f"bytes of each parameter in the {where}", named, " ".join(map(str, sizes))
    if built.elf.threads != job.config.threads:
        yield "threads of a CTA", job.config.threads, built.elf.threads


def _memory(job: Job, built: Built) -> Iterator[Problem]:
    local = built.sass.count(r"(LDL|STL)\b")
    if built.elf.stack_bytes or local:
        got = f"{built.elf.stack_bytes} bytes of stack, {local} local loads and stores"
        yield "spills or local arrays", "none", got
    limit, dynamic = SMEM_BYTES[job.arch], job.config.smem_bytes
    if dynamic + built.elf.static_smem > limit:
        got = f"{dynamic} dynamic + {built.elf.static_smem} static"
        yield "shared memory, bytes", f"at most {limit}", got
    if built.elf.barriers > MAX_BARRIERS:
        yield "named barriers", f"at most {MAX_BARRIERS}", built.elf.barriers


def _registers(job: Job, built: Built) -> Iterator[Problem]:
    rules, threads = job.config.sass_rules(job.arch), job.config.threads
    if built.elf.registers > rules.max_registers:
        yield "registers a thread", f"at most {rules.max_registers}", built.elf.registers
    pool = ceil_div(built.elf.registers, 8) * 8 * threads
    if pool > REGISTERS_PER_SM:
        yield "registers a CTA", f"at most {REGISTERS_PER_SM}", pool
    asked = {int(n) for n in re.findall(r"\bsetmaxnreg\.(?:inc|dec)\S*\s+(\d+)", built.ptx)}
    if not asked and not rules.setmaxnreg:
        return
    if not built.sass.count("USETMAXREG"):
        where = "present in the PTX, absent from the machine code" if asked else "absent"
        yield "setmaxnreg", "in effect (launch with min_blocks_per_mp=1)", where
        return
    if threads % _WARPGROUP:
        yield "threads of a CTA that uses setmaxnreg", f"a multiple of {_WARPGROUP}", threads
    elif asked:
        # Every value is taken by one warpgroup at least; the others take the smallest.
        groups = threads // _WARPGROUP
        least = (sum(asked) + (groups - len(asked)) * min(asked)) * _WARPGROUP
        if len(asked) > groups or least > pool:
            got = f"at least {least} for setmaxnreg {sorted(asked)}"
            yield "registers after setmaxnreg", f"at most the {pool} of the launch", got


def _instructions(job: Job, built: Built) -> Iterator[Problem]:
    rules = job.config.sass_rules(job.arch)
    if rules.tensor_instruction:
        count = built.sass.count(rules.tensor_instruction)
        if count < max(1, rules.tensor_count):
            expected = f"at least {max(1, rules.tensor_count)} {rules.tensor_instruction}"
            yield "tensor instructions", expected, count
    if rules.max_wgmma_waits is not None:
        waits = built.sass.count(r"WARPGROUP\.DEPBAR")
        if waits > rules.max_wgmma_waits:
            yield "waits for wgmma (serialised)", f"at most {rules.max_wgmma_waits}", waits


def _start(job: Job, built: Built) -> Iterator[Problem]:
    """A kernel that is launched early must not touch what others use before it has waited."""
    if not job.config.programmatic:
        return
    if not built.sass.count("ACQBULK"):
        yield "wait for the kernel before (griddepcontrol.wait)", "present", "absent"
        return
    early = [i.opcode for i in built.sass.before("ACQBULK") if _GLOBAL_ACCESS.match(i.opcode)]
    allowed = job.config.sass_rules(job.arch).early_loads
    if len(early) > allowed or not all(opcode.startswith("LDG.E.128") for opcode in early):
        expected = f"at most {allowed} loads of 16 bytes" if allowed else "none"
        yield "accesses of global memory before griddepcontrol.wait", expected, ", ".join(early)


def _assembler(built: Built, ptxas: str) -> Iterator[Problem]:
    """The DSL comes in flavours with different assemblers, and picks one by itself."""
    remedy = "(uninstall the other flavour of nvidia-cutlass-dsl-libs, or pass --ptxas)"
    if built.elf.ptxas and not built.elf.ptxas.startswith(f"{ptxas}."):
        yield "ptxas", f"{ptxas} {remedy}", built.elf.ptxas
    elif built.ptx_facts.isa != PTX_ISA.get(ptxas):
        yield "PTX version", f"{PTX_ISA.get(ptxas)} of ptxas {ptxas} {remedy}", built.ptx_facts.isa
