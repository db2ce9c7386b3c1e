"""The Hopper twin: sm_12x PTX rewritten so that it assembles for sm_90a and computes the same.

Everything but two instructions exists on both architectures (TMA, mbarriers, ldmatrix, stmatrix,
setmaxnreg) and stays untouched:

- the block-scaled MMA becomes shuffles that fetch the scales, an exact conversion of scaled E2M1
  to FP16 and four FP16 MMAs with FP32 accumulation;
- the conversion of two FP32 to E2M1 becomes integer and FP32 arithmetic.

So kernels made for sm_12x can be run and tested on a Hopper. The twin says nothing about speed,
nor about the FP4 tensor core's own rounding. Anything else of sm_12x is refused.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from pathlib import Path

from ringfp4.errors import BuildError

PTXAS = "nvidia-cuda-nvcc-cu12"
PTXAS_VERSION = "12.9.86"  # reads the PTX 8.8 that the DSL writes
REMEDY = "pip install 'ringfp4[twin]'"

_VECTOR = r"\s*\{([^}]*)\}\s*"
_MMA = re.compile(
    r"mma\.sync\.aligned(?:\.m16n8k64\.row\.col)?\.kind::mxf4nvf4\.block_scale\.scale_vec::4X"
    r"(?:\.m16n8k64\.row\.col)?\.f32\.e2m1\.e2m1\.f32\.ue4m3"
    rf"{_VECTOR},{_VECTOR},{_VECTOR},{_VECTOR},"
    rf"\s*\{{?(%?\w+)\}}?\s*,{_VECTOR},\s*\{{?(%?\w+)\}}?\s*,{_VECTOR};"
)
_CVT = re.compile(r"cvt\.rn\.satfinite\.e2m1x2\.f32\s+(%?\w+)\s*,\s*(%?\w+)\s*,\s*(%?\w+)\s*;")
_MMA_COMMENT = "// block-scaled MMA by FP16"
_TARGET = re.compile(r"^(\.target\s+)sm_12\w+", re.MULTILINE)

# What must not be left: features of sm_100 and later, whatever ptxas would say about them.
_FOREIGN = re.compile(
    r"kind::|block_scale|scale_vec|ue4m3|ue8m0|e2m1|e2m3|e3m2|b4x16|b6x16|tcgen05"
    r"|clusterlaunchcontrol|multimem|sm_1\d\d|\.f32x2|\.acc_bytes"
)


def rewrite(ptx: str) -> str:
    """The twin of a PTX module for sm_12x; BuildError for anything that has no twin."""
    out, targets = _TARGET.subn(r"\1sm_90a", ptx)
    if targets != 1:
        raise BuildError("not PTX for sm_12x", expected="one .target sm_12x", got=f"{targets} of them")
    out = _MMA.sub(_mma, out)
    out = _CVT.sub(_cvt, out)
    for number, line in enumerate(out.splitlines(), 1):
        code = line.split("//")[0]
        if found := _FOREIGN.search(code):
            raise BuildError(
                f"line {number} has no twin on sm_90a: {code.strip()[:120]}",
                got=found[0],
                remedy="teach ringfp4.build_cubins.twin this instruction, with a test",
            )
    return out


def assemble(ptx: str) -> bytes:
    """The sm_90a cubin of a rewritten module, by the pinned ptxas; BuildError with its messages."""
    # Above -O1 ptxas moves the shuffles of many emulated MMAs to the front and spills their results.
    level = "-O1" if _MMA_COMMENT in ptx else "-O3"
    with tempfile.TemporaryDirectory(prefix="ringfp4-twin-") as folder:
        source, cubin = Path(folder) / "twin.ptx", Path(folder) / "twin.cubin"
        source.write_text(ptx)
        command: list[str | Path] = [_ptxas(), "-arch=sm_90a", level, source, "-o", cubin]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise BuildError("ptxas refused the twin", got=result.stderr.strip()[:2000])
        return cubin.read_bytes()


def _ptxas() -> Path:
    try:
        distribution = importlib.metadata.distribution(PTXAS)
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildError(f"{PTXAS} is not installed, the twin needs its ptxas", remedy=REMEDY) from error
    if distribution.version != PTXAS_VERSION:
        raise BuildError(f"wrong {PTXAS}", expected=PTXAS_VERSION, got=distribution.version, remedy=REMEDY)
    for file in distribution.files or ():
        if file.name == "ptxas":
            return Path(str(file.locate()))
    raise BuildError(f"{PTXAS} holds no ptxas", remedy=f"pip install --force-reinstall {PTXAS}")


def _operands(text: str, count: int) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    if len(found) != count:
        raise BuildError("unexpected operands of a block-scaled MMA", expected=str(count), got=text)
    return found


def _selector(text: str, limit: int) -> str:
    """The thread selector of {byte selector, thread selector}; 4X scales allow only byte 0."""
    byte, thread = _operands(text, 2)
    if not (byte.startswith("%") or byte == "0"):
        raise BuildError("a 4X block-scaled MMA with a byte selector", expected="0", got=byte)
    if not thread.startswith("%") and not (thread.isdigit() and int(thread) < limit):
        raise BuildError("thread selector out of range", expected=f"0..{limit - 1}", got=thread)
    return thread


def _mma(match: re.Match[str]) -> str:
    """D = C + (SFA * A) (SFB * B)^T, m16n8k64, on the same registers.

    With g = lane // 4 and t = lane % 4 a lane holds columns 8 t .. 8 t + 7 of rows g and g + 8 in
    a0 and a1, columns 32 further in a2 and a3, and of row g of B in b0 and b1. Nibbles i and i + 4
    of a word become one FP16 pair of MMA i: a permutation of K, the same for A and B. Every
    product of an E2M1 and an E4M3 number is exact in FP16.
    """
    d, a, b, c = (_operands(match[i], n) for i, n in ((1, 4), (2, 4), (3, 2), (4, 4)))
    sfa, select_a, sfb, select_b = match[5], _selector(match[6], 2), match[7], _selector(match[8], 4)
    out = [
        f"{{ {_MMA_COMMENT}",
        ".reg .b32 quad, source, row, low, high, rows_a, rows_a8, rows_b, s<6>, x, y, unit, fa<4>, fb<2>;",
        ".reg .b16 pair;",
        ".reg .f32 f<4>;",
        "mov.u32 x, %laneid;",
        "and.b32 quad, x, 28;",
        # Selector t of A: quad lanes 2 t and 2 t + 1 hold the scales of rows g and g + 8.
        *_widen("row", select_a),
        "shl.b32 row, row, 1;",
        "add.u32 source, quad, row;",
        f"shfl.sync.idx.b32 rows_a, {sfa}, source, 31, -1;",
        "add.u32 source, source, 1;",
        f"shfl.sync.idx.b32 rows_a8, {sfa}, source, 31, -1;",
        # Selector t of B: quad lane t holds the scales of row g.
        *_widen("row", select_b),
        "add.u32 source, quad, row;",
        f"shfl.sync.idx.b32 rows_b, {sfb}, source, 31, -1;",
        # Columns 8 t .. lie in block t / 2, those 32 further in block 2 + t / 2; byte twice as prmt wants.
        "shr.u32 x, x, 1;",
        "and.b32 x, x, 1;",
        "mul.lo.u32 low, x, 0x11;",
        "add.u32 high, low, 0x22;",
    ]
    scales = [("rows_a", "low"), ("rows_a8", "low"), ("rows_a", "high"), ("rows_a8", "high")]
    scales += [("rows_b", "low"), ("rows_b", "high")]
    for i, (word, block) in enumerate(scales):
        out += [
            f"prmt.b32 x, {word}, 0, {block};",
            "and.b32 x, x, 0x7f7f;",
            "cvt.u16.u32 pair, x;",
            f"cvt.rn.f16x2.e4m3x2 s{i}, pair;",
        ]
    out.append("mov.b32 unit, 0x74007400;")  # 2^14 twice
    out += [f"mov.b32 f{i}, {c[i]};" for i in range(4)]
    for i in range(4):
        for j, word in enumerate((*a, *b)):
            out += _nibbles_to_f16(f"fa{j}" if j < 4 else f"fb{j - 4}", word, i, f"s{j}")
        out.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{f0, f1, f2, f3}, {fa0, fa1, fa2, fa3}, {fb0, fb1}, {f0, f1, f2, f3};"
        )
    out += [f"mov.b32 {d[i]}, f{i};" for i in range(4)]
    return "\n\t".join([*out, "}"])


def _widen(to: str, selector: str) -> list[str]:
    operation = "cvt.u32.u16" if selector.startswith("%rs") else "mov.u32"
    return [f"{operation} {to}, {selector};"]


def _nibbles_to_f16(to: str, word: str, i: int, scale: str) -> list[str]:
    """Nibbles i and i + 4 of ``word`` times ``scale``, as an FP16 pair."""
    return [
        f"shl.b32 x, {word}, {12 - 4 * i};",
        "and.b32 y, x, 0x70007000;",
        "shr.u32 y, y, 3;",  # exponent and mantissa in place, 2^14 too small
        "and.b32 x, x, 0x80008000;",
        "or.b32 x, x, y;",
        "mul.rn.f16x2 x, x, unit;",
        f"mul.rn.f16x2 {to}, x, {scale};",
    ]


def _cvt(match: re.Match[str]) -> str:
    """Two FP32 to E2M1: nearest even, saturating, NaN gives +6; the first goes to the high nibble.

    The pack kernel is to stay bound by memory as a twin too, so this is made of few instructions.
    v = x with its magnitude at most 6, r = +-2^e the power of two in [1, 4] below it with the sign of
    v (xorsign): r 2^22 + v rounds v to multiples of r / 2 and leaves that multiple q in the low bits
    of the mantissa; the code is q + 2 e. The sum's bits from 22 on are 2 (149 + e), those from 28 on
    8 sign + 4: added to q they give q + 2 e + 8 sign + 46 modulo 256, and 105 r more in the sum adds
    210. Before, x + (-0) changes nothing but the sign of a NaN.
    """
    out = ["{ // E2M1 by rounding in FP32", ".reg .b32 high, low, bits;", ".reg .f32 v, r;"]
    for x, code in ((match[2], "high"), (match[3], "low")):
        out += [
            f"add.rn.f32 v, {x}, 0f80000000;",
            "min.xorsign.abs.f32 v, v, 0f40C00000;",
            "max.xorsign.abs.f32 r, v, 0f3F800000;",
            "mov.b32 bits, r;",
            "and.b32 bits, bits, 0xFF800000;",
            "mov.b32 r, bits;",
            "fma.rn.f32 v, r, 0f4A8000D2, v;",  # 2^22 + 105
            f"mov.b32 {code}, v;",
            f"shr.u32 bits, {code}, 22;",
            f"add.u32 bits, bits, {code};",
            f"shr.u32 {code}, {code}, 28;",
            f"add.u32 {code}, {code}, bits;",
        ]
    return "\n\t".join([*out, "mad.lo.u32 low, high, 16, low;", f"cvt.u8.u32 {match[1]}, low;", "}"])
