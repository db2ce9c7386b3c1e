"""Interprets straight-line PTX for many lanes at once: the twin rewriter's and the quantiser's.

Registers are arrays of 32-bit patterns, one element a lane. Only what those two use is known;
anything else raises, so that a test cannot pass over it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Registers = dict[str, Words]

# Values of the 128 non-negative E4M3 patterns; the last is NaN.
_E4M3 = np.array(
    [(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)]
)
_E4M3[127] = np.nan
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def run(code: str, registers: Registers, lanes: int = 32) -> None:
    """Execute ``code`` on ``registers`` (changed in place)."""
    registers["%laneid"] = np.arange(lanes, dtype=np.uint32)
    text = re.sub(r"//[^\n]*", "", code)
    for statement in (s.strip() for s in re.split(r";|(?<=\{)\s*\n", text)):
        if statement in ("", "{", "}") or statement.startswith(".reg"):
            continue
        opcode, operands = statement.lstrip("{} \n\t").split(None, 1)
        if opcode.startswith("mma.sync"):
            _mma(registers, *(_names(v) for v in re.findall(r"\{([^}]*)\}", operands)))
        elif "{" in operands:
            assert opcode == "mov.b32"
            _mov_vector(registers, operands)
        else:
            to, *sources = _names(operands)
            values = [_value(registers, s, lanes) for s in sources]
            registers[to] = OPERATIONS[opcode](*values)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _mov_vector(registers: Registers, operands: str) -> None:
    """``mov.b32`` between a word and its halves or bytes."""
    parts = _names(re.findall(r"\{([^}]*)\}", operands)[0])
    word = re.sub(r"\{[^}]*\}|,", "", operands).strip()
    width = 32 // len(parts)
    if operands.startswith("{"):
        for i, part in enumerate(parts):
            registers[part] = registers[word] >> np.uint32(i * width) & np.uint32((1 << width) - 1)
    else:
        registers[word] = np.bitwise_or.reduce(
            [registers[part] << np.uint32(i * width) for i, part in enumerate(parts)]
        )


def _value(registers: Registers, text: str, lanes: int) -> Words:
    if text in registers:
        return registers[text]
    bits = int(text[2:], 16) if text.startswith("0f") else int(text, 0)
    return np.full(lanes, bits & 0xFFFFFFFF, np.uint32)


def _f32(x: Words) -> NDArray[np.float32]:
    return x.view(np.float32)


def _bits(x: NDArray[np.floating]) -> Words:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


def _halves(x: Words) -> NDArray[np.float16]:
    return np.ascontiguousarray(x).view(np.float16).reshape(-1, 2)


def _pair(x: NDArray[np.float16]) -> Words:
    return np.ascontiguousarray(x).view(np.uint32).reshape(-1)


def _shuffle(x: Words, source: Words, clamp: Words, members: Words) -> Words:
    assert (clamp == 31).all()
    assert (members == 0xFFFFFFFF).all()
    return x[source]


def _prmt(low: Words, high: Words, selector: Words) -> Words:
    source = [(low >> np.uint32(8 * i)) & 255 for i in range(4)] + [
        (high >> np.uint32(8 * i)) & 255 for i in range(4)
    ]
    table, out = np.stack(source), np.zeros_like(low)
    for i in range(4):
        index = (selector >> np.uint32(4 * i)) & np.uint32(7)
        out |= table[index, np.arange(low.size)] << np.uint32(8 * i)
    return out


def _e4m3x2(x: Words) -> Words:
    codes = np.stack([x, x >> 8], axis=1)
    return _pair(np.where(codes & 128, -_E4M3[codes & 127], _E4M3[codes & 127]).astype(np.float16))


def _fma(a: Words, b: Words, c: Words) -> Words:
    # Exact in float64 for what the rewriter computes: a power of two times one, plus an FP32 number.
    return _bits(_f32(a).astype(np.float64) * _f32(b) + _f32(c))


def _canonical(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Arithmetic gives one NaN only, a positive one."""
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF).view(np.float32), x)


def _xorsign(extremum: Callable[..., NDArray[np.float32]], a: Words, b: Words) -> Words:
    magnitude = _bits(extremum(np.abs(_f32(a)), np.abs(_f32(b))))
    return (magnitude & np.uint32(0x7FFFFFFF)) | ((a ^ b) & np.uint32(0x80000000))


def _flushed(x: Words) -> NDArray[np.float32]:
    """FP32 with subnormal numbers as zeros of the same sign."""
    return np.where(x & np.uint32(0x7F800000), x, x & np.uint32(0x80000000)).view(np.float32)


def _mul_ftz(a: Words, b: Words) -> Words:
    return _bits(_flushed(_bits(_canonical(_flushed(a) * _flushed(b)))))


def _xorsign_bf16x2(a: Words, b: Words) -> Words:
    """The maximum's magnitude; NaN only where both are."""
    out = np.zeros_like(a)
    for mask, shift in ((0xFFFF, 16), (0xFFFF0000, 0)):
        halves = ((x & np.uint32(mask)) << np.uint32(shift) for x in (a, b))
        out |= (_xorsign(np.fmax, *halves) & np.uint32(0xFFFF0000)) >> np.uint32(shift)
    return out


def _to_e4m3x2(high: Words, low: Words) -> Words:
    return _encode(high, _E4M3[:127], 7, 0x7F) << np.uint32(8) | _encode(low, _E4M3[:127], 7, 0x7F)


def _to_e2m1x2(high: Words, low: Words) -> Words:
    return _encode(high, _E2M1, 3, 7) << np.uint32(4) | _encode(low, _E2M1, 3, 7)


def _encode(x: Words, values: NDArray[np.float64], sign_bit: int, nan: int) -> Words:
    """Saturating; ``values`` are the format's non-negative ones, ``nan`` is what a NaN becomes."""
    sign = (x >> np.uint32(31)) << np.uint32(sign_bit)
    code = _nearest(np.abs(_f32(x)), values).astype(np.uint32) | sign
    return np.where(np.isnan(_f32(x)), np.uint32(nan), code)


def _nearest(x: NDArray[np.float32], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Index of the nearest of the ascending ``values`` of a format; ties to the even index."""
    upper = np.searchsorted(values, np.minimum(x.astype(np.float64), values[-1])).clip(1, len(values) - 1)
    above, below = values[upper] - x, x - values[upper - 1]
    down = (below < above) | ((below == above) & (upper % 2 == 1))
    return np.where(x >= values[-1], len(values) - 1, np.where(down, upper - 1, upper))


def _to_bf16x2(high: Words, low: Words) -> Words:
    """Exact conversions only: what is cut off must be zero."""
    assert not ((high | low) & np.uint32(0xFFFF)).any()
    return high | low >> np.uint32(16)


OPERATIONS = {
    "mov.u32": lambda a: a.copy(),
    "mov.b32": lambda a: a.copy(),
    "cvt.u32.u16": lambda a: a & np.uint32(0xFFFF),
    "cvt.u16.u32": lambda a: a & np.uint32(0xFFFF),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shfl.sync.idx.b32": _shuffle,
    "prmt.b32": _prmt,
    "cvt.rn.f16x2.e4m3x2": _e4m3x2,
    "mul.rn.f16x2": lambda a, b: _pair(_halves(a) * _halves(b)),
    "fma.rn.f32": _fma,
    "add.rn.f32": lambda a, b: _bits(_canonical(_f32(a) + _f32(b))),
    "min.xorsign.abs.f32": lambda a, b: _xorsign(np.fmin, a, b),
    "max.xorsign.abs.f32": lambda a, b: _xorsign(np.fmax, a, b),
    "max.f32": lambda a, b: _bits(np.fmax(_f32(a), _f32(b))),
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "mov.f32": lambda a: a.copy(),
    "copysign.f32": lambda a, b: (a & np.uint32(0x80000000)) | (b & np.uint32(0x7FFFFFFF)),
    "mul.rn.f32": lambda a, b: _bits(_canonical(_f32(a) * _f32(b))),
    "mul.rn.ftz.f32": _mul_ftz,
    "min.ftz.f32": lambda a, b: _bits(np.fmin(_flushed(a), _flushed(b))),
    "min.ftz.xorsign.abs.f32": lambda a, b: _xorsign(np.fmin, _bits(_flushed(a)), b),
    "max.ftz.xorsign.abs.f32": lambda a, b: _xorsign(np.fmax, _bits(_flushed(a)), b),
    "fma.rn.ftz.f32": _fma,
    "max.xorsign.abs.bf16x2": _xorsign_bf16x2,
    "cvt.f32.f16": lambda a: _bits(a.astype(np.uint16).view(np.float16)),
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3x2,
    "cvt.rn.satfinite.e2m1x2.f32": _to_e2m1x2,
    "cvt.rn.bf16x2.f32": _to_bf16x2,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "cvt.u8.u32": lambda a: a & np.uint32(0xFF),
}


def _mma(registers: Registers, d: list[str], a: list[str], b: list[str], c: list[str]) -> None:
    """mma.sync m16n8k16, FP16 operands, by the PTX ISA's fragment layouts; sums in float64, then FP32."""
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    A, B, D = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i, name in enumerate(a):
        for h in range(2):
            A[g + 8 * (i % 2), 2 * t + 8 * (i // 2) + h] = _halves(registers[name])[:, h]
    for i, name in enumerate(b):
        for h in range(2):
            B[2 * t + 8 * i + h, g] = _halves(registers[name])[:, h]
    for i, name in enumerate(c):
        D[g + 8 * (i // 2), 2 * t + i % 2] = _f32(registers[name])
    D += A @ B
    for i, name in enumerate(d):
        registers[name] = _bits(D[g + 8 * (i // 2), 2 * t + i % 2])
