"""The quantiser's kernels as compiled: refusals of bad configurations, and facts of the machine code."""

from __future__ import annotations

import re

import pytest
from ringfp4.build_cubins.checks import refusal
from ringfp4.build_cubins.compiler import Built, Compiler
from ringfp4.build_cubins.job import Job
from ringfp4.dsl.config.quantise import AbsmaxConfig, PackConfig
from ringfp4.errors import ConfigError
from ringfp4.runtime.plan import MOST_PACKED_BYTES

K = 5376
JOBS = {
    "absmax": Job(AbsmaxConfig(k=K), "sm_121a"),
    "pack": Job(PackConfig(k=K), "sm_121a"),
    "narrow absmax": Job(AbsmaxConfig(k=96), "sm_121a"),
    "narrow pack": Job(PackConfig(k=96), "sm_121a"),
    "family pack": Job(PackConfig(k=K), "sm_120f"),
    "bf16 pack": Job(PackConfig(k=K, output="bf16"), "sm_90a"),
}


@pytest.fixture(scope="module")
def built() -> dict[str, Built]:
    pytest.importorskip("cutlass", reason="needs the CuTe DSL (the extra 'build')")
    results, failures = Compiler(None, threads=2).run(list(JOBS.values()))
    assert not failures
    return {name: results[job] for name, job in JOBS.items()}


@pytest.mark.parametrize(
    ("config", "arch", "problem"),
    [
        (AbsmaxConfig(k=100), "sm_121a", "k = 100 is not a positive multiple of 32"),
        (AbsmaxConfig(k=0), "sm_121a", "k = 0 is not"),
        (AbsmaxConfig(k=K, warps=33), "sm_121a", "33 warps, a CTA has 1 to 32"),
        (AbsmaxConfig(k=K, warps=16, ctas_per_sm=4), "sm_120f", "sm_12x holds 1536 threads"),
        (PackConfig(k=48), "sm_121a", "k = 48 is not a positive multiple of 32"),
        (PackConfig(k=K), "sm_90a", "sm_90a has no E2M1 conversion"),
    ],
)
def test_bad_configurations_are_refused(config: AbsmaxConfig | PackConfig, arch: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        config.check(arch)


def test_pieces_cover_every_column_and_row_once() -> None:
    for k in (32, 96, K, 7168, 14336):
        for output in ("packed", "bf16"):
            config = PackConfig(k=k, output=output)
            columns = config.ctas_per_group * config.warps * config.pieces * 64
            assert k <= columns < k + config.warps * config.pieces * 64
            assert config.grid.items * 8 == config.grid.rows_per_item * config.ctas_per_group


@pytest.mark.parametrize("name", JOBS)
def test_machine_code_may_ship(name: str, built: dict[str, Built]) -> None:
    JOBS[name].config.check(JOBS[name].arch)
    assert refusal(JOBS[name], built[name]) == ""


@pytest.mark.parametrize(
    ("name", "loads"), [("absmax", K // 8 // 32), ("narrow absmax", 1), ("pack", 8), ("bf16 pack", 2)]
)
def test_activation_is_read_16_bytes_at_a_time(name: str, loads: int, built: dict[str, Built]) -> None:
    sass = built[name].sass
    assert sass.count(r"LDG\.E\.128") == loads
    # Apart from them: one number each, the maximum so far or the tensor scale.
    assert sass.count(r"LDG") == loads + 1


@pytest.mark.parametrize("name", ["pack", "family pack", "bf16 pack"])
def test_packed_words_are_counted_in_32_bits(name: str, built: dict[str, Built]) -> None:
    """The runtime's limit on what is packed at a time rests on this: every store goes to a base plus
    a signed 32-bit number of words of 4 bytes. The rows of x are addressed by 64 bits."""
    ptx = built[name].ptx
    stores = set(re.findall(r"st\.global\S*\s+\[(%rd\d+)", ptx))
    assert len(stores) == (1 if name == "bf16 pack" else 2)
    for address in stores:
        offset = re.search(rf"add\.s64\s+{address}, %rd\d+, (%rd\d+);", ptx)
        assert offset
        assert re.search(rf"mul\.wide\.s32\s+{offset[1]}, %r\d+, 4;", ptx)
    assert re.search(r"m(ul|ad)\.lo\.s64", ptx)
    assert MOST_PACKED_BYTES == 4 * 2**31


def test_absmax_has_several_loads_in_flight(built: dict[str, Built]) -> None:
    opcodes = [i.opcode for i in built["absmax"].sass.code]
    first_use = next(i for i, opcode in enumerate(opcodes) if "MNMX" in opcode)
    assert sum(opcode.startswith("LDG.E.128") for opcode in opcodes[:first_use]) >= 4


@pytest.mark.parametrize("name", ["pack", "family pack", "narrow pack"])
def test_pack_uses_the_hardware_conversion_and_wide_stores(name: str, built: dict[str, Built]) -> None:
    sass = built[name].sass
    elements = 64  # of a thread
    assert sass.count(r"F2FP\.SATFINITE\.E2M1") == elements // 2
    assert sass.count(r"STG\.E\.64") == sass.count(r"STG\.E$") == elements // 16
    assert len(sass.code) < 7.5 * elements


def test_every_product_flushes_subnormals(built: dict[str, Built]) -> None:
    assert built["pack"].sass.count(r"FMUL\.FTZ$") > 64
    assert built["pack"].sass.count(r"F(MUL|FMA|ADD)(?!\.FTZ)") == 0


@pytest.mark.parametrize("name", ["pack", "bf16 pack"])
def test_reciprocals_are_approximations_and_nothing_is_divided(name: str, built: dict[str, Built]) -> None:
    assert built[name].sass.count(r"MUFU\.RCP$") == built[name].sass.count(r"MUFU") > 0
    assert built[name].sass.count(r"CALL|FCHK") == 0
