"""The twin's rewriter: its code against the PTX ISA's definitions, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_interpreter import run
from ringfp4.build_cubins.twin import assemble, rewrite
from ringfp4.errors import BuildError

HEAD = ".version 8.8\n.target sm_121a\n.address_size 64\n"
MMA = (
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
    "{%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, {%b0, %b1}, {%c0, %c1, %c2, %c3}, "
)
# As the DSL's own operation prints it.
MMA_DSL = MMA.replace(".m16n8k64.row.col", "").replace("::4X", "::4X.m16n8k64.row.col")
CVT = "cvt.rn.satfinite.e2m1x2.f32 %byte, %high, %low;"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def body(instruction: str) -> str:
    return rewrite(HEAD + instruction).removeprefix(HEAD.replace("sm_121a", "sm_90a"))


def e2m1(code: np.ndarray) -> np.ndarray:
    return np.where(code & 8, -1.0, 1.0) * E2M1[code & 7]


def e4m3(code: np.ndarray) -> np.ndarray:
    e, m = code >> 3 & 15, code & 7
    return np.where(e == 0, m / 8 * 2.0**-6, (1 + m / 8) * 2.0 ** (e - 7.0))


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last axis, lowest bits first."""
    shifts = np.arange(values.shape[-1], dtype=np.uint32) * bits
    return np.bitwise_or.reduce(values.astype(np.uint32) << shifts, axis=-1)


@pytest.mark.parametrize("form", ["immediates", "registers", "dsl"])
@pytest.mark.parametrize("thread_a", range(2))
@pytest.mark.parametrize("thread_b", range(4))
def test_mma_equals_the_isa_definition(form: str, thread_a: int, thread_b: int) -> None:
    rng = np.random.default_rng(thread_a * 4 + thread_b)
    A, B = rng.integers(0, 16, (16, 64)), rng.integers(0, 16, (8, 64))
    # Scales near 1, so that every sum is exact in FP32; the sign bit of an unsigned scale is ignored.
    SFA, SFB = rng.integers(0x30, 0x48, (16, 4)), rng.integers(0x30, 0x48, (8, 4))
    C = rng.integers(-8, 8, (16, 8)).astype(np.float32)
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    registers: dict[str, np.ndarray] = {}
    for i in range(4):
        columns = 8 * t[:, None] + 32 * (i // 2) + np.arange(8)
        registers[f"%a{i}"] = words(A[(g + 8 * (i % 2))[:, None], columns], 4)
        registers[f"%c{i}"] = C[g + 8 * (i // 2), 2 * t + i % 2].view(np.uint32)
    for i in range(2):
        registers[f"%b{i}"] = words(B[g[:, None], 8 * t[:, None] + 32 * i + np.arange(8)], 4)
    # Lanes that are not selected hold other scales: using one of them is an error that shows.
    for name, scales, selected, row in (
        ("%sfa", SFA, t // 2 == thread_a, g + 8 * (t % 2)),
        ("%sfb", SFB, t == thread_b, g),
    ):
        other = rng.integers(0x50, 0x60, (32, 4))
        registers[name] = words(np.where(selected[:, None], scales[row], other) | 0x80, 8)
    if form == "registers":
        selectors = ("%rs0, %rs1", "%rs0, %rs2")
        registers |= {f"%rs{i}": np.full(32, v, np.uint32) for i, v in enumerate((0, thread_a, thread_b))}
    else:
        selectors = (f"0, {thread_a}", f"0,{thread_b}")
    mma = MMA_DSL if form == "dsl" else MMA
    run(body(f"{mma}%sfa, {{{selectors[0]}}}, %sfb, {{{selectors[1]}}};"), registers)

    dequantised_a = e2m1(A) * np.repeat(e4m3(SFA), 16, axis=1)
    dequantised_b = e2m1(B) * np.repeat(e4m3(SFB), 16, axis=1)
    expected = C + dequantised_a @ dequantised_b.T
    got = np.zeros((16, 8), np.float32)
    for i in range(4):
        got[g + 8 * (i // 2), 2 * t + i % 2] = registers[f"%d{i}"].view(np.float32)
    np.testing.assert_array_equal(got, expected)


def test_every_product_of_e2m1_and_e4m3_is_exact_in_fp16() -> None:
    products = np.outer(E2M1, e4m3(np.arange(127)))
    np.testing.assert_array_equal(products.astype(np.float16).astype(float), products)
    scaled_up = np.outer(E2M1 * 2.0**-14, 1.0).astype(np.float16)
    np.testing.assert_array_equal(scaled_up.astype(float) * 2.0**14, E2M1[:, None])


def exact_e2m1(bits: np.ndarray) -> np.ndarray:
    """Nearest E2M1 code, ties to the even code, saturating; +6 for a NaN: by comparing distances."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x = bits.view(np.float32).astype(np.float64)
    magnitude = np.minimum(np.abs(np.nan_to_num(x, nan=6.0)), 6.0)
    distance = np.abs(magnitude[:, None] - E2M1)
    nearest = distance == distance.min(axis=1, keepdims=True)
    code = np.where(nearest, np.arange(8) + 8 * (np.arange(8) % 2), 99).argmin(axis=1)
    return np.where(np.isnan(x), 7, code + np.where(np.signbit(x), 8, 0))


def test_conversion_to_e2m1_is_exact_everywhere() -> None:
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 1, 2, 4], np.float32).view(np.uint32)
    near = (midpoints[:, None].astype(np.int64) + np.arange(-3, 4)).ravel().astype(np.uint32)
    bf16 = np.arange(1 << 16, dtype=np.uint32) << 16
    noise = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    bits = np.concatenate([near, near | 0x80000000, bf16, bf16 | 1, bf16 | 0xFFFF, noise])
    registers = {"%high": bits, "%low": bits[::-1].copy()}
    with np.errstate(invalid="ignore", over="ignore"):
        run(body(CVT), registers, lanes=bits.size)
    expected = exact_e2m1(bits)
    assert set(expected) == set(range(16))
    np.testing.assert_array_equal(registers["%byte"], expected << 4 | expected[::-1])


def test_everything_else_is_left_alone() -> None:
    text = (
        HEAD
        + "setmaxnreg.inc.sync.aligned.u32 232;\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%r2];\n"
    )
    assert rewrite(text) == text.replace("sm_121a", "sm_90a")


@pytest.mark.parametrize(
    "instruction",
    [
        "mma.sync.aligned.kind::mxf8f6f4.block_scale.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0 {};",
        MMA.replace("4X", "2X").replace("ue4m3", "ue8m0") + "%sfa, {0, 0}, %sfb, {0, 0};",
        "cvt.rn.satfinite.e2m1x2.f16x2 %rs1, %r1;",
        "cvt.rn.satfinite.e2m3x2.f32 %rs1, %f1, %f2;",
        "cvt.rn.f16x2.e2m1x2 %r1, %rs1;",
        "ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {%r1}, [%r2];",
        "add.rn.f32x2 %rd1, %rd2, %rd3;",
        "tcgen05.wait::ld.sync.aligned;",
        MMA + "%sfa, {1, 0}, %sfb, {0, 0};",
        MMA + "%sfa, {0, 2}, %sfb, {0, 0};",
        MMA + "%sfa, {0, 0}, %sfb, {0, 4};",
    ],
)
def test_an_unknown_instruction_is_refused(instruction: str) -> None:
    with pytest.raises(BuildError):
        rewrite(HEAD + instruction)


@pytest.mark.parametrize("head", [HEAD.replace("sm_121a", "sm_90a"), HEAD + HEAD, ""])
def test_a_module_for_another_target_is_refused(head: str) -> None:
    with pytest.raises(BuildError, match=r"sm_12x"):
        rewrite(head)


def kernel(code: str) -> str:
    registers = ".reg .b8 %byte;\n.reg .b32 %high, %low;\n.reg .b64 %p;\n"
    registers += ".reg .b32 %a<4>, %b<2>, %c<4>, %d<4>, %sfa, %sfb;\n"
    loads = "".join(
        f"ld.global.b32 {name}, [%p+{4 * i}];\n"
        for i, name in enumerate(
            ["%high", "%low", *(f"%{x}{i}" for x in "ac" for i in range(4)), "%b0", "%b1", "%sfa", "%sfb"]
        )
    )
    stores = (
        "".join(f"st.global.b32 [%p+{4 * i}], %d{i};\n" for i in range(4)) + "st.global.b8 [%p+16], %byte;\n"
    )
    entry = ".visible .entry twin(.param .u64 p)\n{\n"
    return f"{HEAD}{entry}{registers}ld.param.u64 %p, [p];\n{loads}{code}\n{stores}ret;\n}}\n"


def test_the_rewritten_code_assembles() -> None:
    pytest.importorskip("nvidia.cuda_nvcc", reason="the pinned ptxas is not installed")
    cubin = assemble(rewrite(kernel(CVT + "\n" + MMA + "%sfa, {0, 1}, %sfb, {0, 3};")))
    assert cubin[:4] == b"\x7fELF"


def test_ptxas_messages_are_reported() -> None:
    pytest.importorskip("nvidia.cuda_nvcc", reason="the pinned ptxas is not installed")
    with pytest.raises(BuildError, match="nonsense"):
        assemble(rewrite(kernel("nonsense.b32 %d0, %d1;")))
