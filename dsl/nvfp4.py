"""The NVFP4 quantiser's arithmetic as device functions, bit for bit docs/numerics.md.

One thread quantises a block of 16 consecutive BF16 values, held as 8 words (the even column in
the low half of each). Every operation flushes subnormals, like the implementation this must equal,
and every maximum and minimum returns the number when one side is NaN.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

BLOCK = 16  # values that share one block scale


def rcp(value: Float32) -> Float32:
    """rcp.approx.ftz: neither correctly rounded nor to be replaced by a division."""
    return cute.arch.rcp_approx(value)


def quantise_block(x: list[Uint32], scale: Float32, scale_rcp: Float32) -> tuple[Uint32, Uint32, Uint32]:
    """Two words of packed E2M1 (even column in the high nibble) and the E4M3 block scale.

    ``x`` 8 words of BF16 pairs, ``scale`` the tensor scale, ``scale_rcp`` its rcp().
    """
    scale_byte, _, encode = _block_scale(x, scale, scale_rcp)
    values = [_scaled(word, encode) for word in x]
    return _e2m1x8(values[:4]), _e2m1x8(values[4:]), scale_byte


def quantise_block_to_bf16(x: list[Uint32], scale: Float32, scale_rcp: Float32) -> list[Uint32]:
    """What quantise_block packs, decoded without the tensor scale: e2m1 * e4m3, exact in BF16.

    For machines with no FP4 tensor cores. Signs of zeros are kept, as in the packed form.
    """
    _, block_scale, encode = _block_scale(x, scale, scale_rcp)
    pairs = [_scaled(word, encode) for word in x]
    return [_bf16x2(_round_to_e2m1(even), _round_to_e2m1(odd), block_scale) for even, odd in pairs]


def piece_row(lane: Int32) -> Int32:
    """Row of a warp's piece of 8 rows by 64 columns that ``lane`` quantises (a block each).

    Rows 0, 32, 64, 96 and their neighbours 1, 33, 65, 97: in the swizzled layout their block scales
    of 64 columns are 32 consecutive bytes.
    """
    return lane // 16 + lane // 4 % 4 * 32


def gather_scales(scale_byte: Uint32) -> Uint32:
    """The block scales of four neighbouring lanes (4i .. 4i + 3) as one word, in all four of them."""
    lane = cute.arch.lane_idx()
    word = scale_byte << (lane % 4 * 8)
    word |= cute.arch.shuffle_sync_bfly(word, 1)
    return word | cute.arch.shuffle_sync_bfly(word, 2)


def _block_scale(x: list[Uint32], scale: Float32, scale_rcp: Float32) -> tuple[Uint32, Float32, Float32]:
    """The block scale as a byte and as a number, and the factor that takes values into E2M1's range."""
    amax = x
    while len(amax) > 1:
        amax = [_max_magnitude(a, b) for a, b in zip(amax[::2], amax[1::2], strict=True)]
    return cute.arch.inline_ptx(
        "{\n"
        ".reg .b32 half, pair;\n"
        ".reg .b16 bytes, low, high;\n"
        ".reg .f32 amax, other;\n"
        "shl.b32 half, {$r0}, 16;\n"
        "mov.b32 amax, half;\n"
        "and.b32 half, {$r0}, 0xFFFF0000;\n"
        "mov.b32 other, half;\n"
        "abs.f32 amax, amax;\n"
        "abs.f32 other, other;\n"
        "max.f32 amax, amax, other;\n"
        # s = amax / 6 / scale, at most 448; a NaN gives 448
        "mul.rn.ftz.f32 amax, amax, 0f3E2AAAAB;\n"
        "mul.rn.ftz.f32 amax, amax, {$r2};\n"
        "min.ftz.f32 amax, amax, 0f43E00000;\n"
        "mov.f32 other, 0f00000000;\n"
        "cvt.rn.satfinite.e4m3x2.f32 bytes, other, amax;\n"
        "cvt.u32.u16 {$w0}, bytes;\n"
        "cvt.rn.f16x2.e4m3x2 pair, bytes;\n"
        "mov.b32 {low, high}, pair;\n"
        "cvt.f32.f16 {$w1}, low;\n"
        # e = 1 / (scale * s), at most FLT_MAX
        "mul.rn.ftz.f32 other, {$r1}, {$w1};\n"
        "rcp.approx.ftz.f32 other, other;\n"
        "min.ftz.f32 {$w2}, other, 0f7F7FFFFF;\n"
        "}",
        write_only_types=[Uint32, Float32, Float32],
        read_only_args=[amax[0], scale, scale_rcp],
    )


def _max_magnitude(a: Uint32, b: Uint32) -> Uint32:
    """The larger magnitude of each half of two BF16 pairs; the signs of the result mean nothing."""
    return cute.arch.inline_ptx(
        "max.xorsign.abs.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def _scaled(pair: Uint32, factor: Float32) -> tuple[Float32, Float32]:
    """Both values of a BF16 pair times ``factor``: (even column, odd column)."""
    return cute.arch.inline_ptx(
        "{\n"
        ".reg .b32 half;\n"
        ".reg .f32 value;\n"
        "shl.b32 half, {$r0}, 16;\n"
        "mov.b32 value, half;\n"
        "mul.rn.ftz.f32 {$w0}, value, {$r1};\n"
        "and.b32 half, {$r0}, 0xFFFF0000;\n"
        "mov.b32 value, half;\n"
        "mul.rn.ftz.f32 {$w1}, value, {$r1};\n"
        "}",
        write_only_types=[Float32, Float32],
        read_only_args=[pair, factor],
    )


def _e2m1x8(pairs: list[tuple[Float32, Float32]]) -> Uint32:
    """Eight values, in four pairs, to one word of E2M1: to nearest even, saturating; NaN gives +6.

    The first operand of the conversion goes to the high nibble.
    """
    values = [v for pair in pairs for v in pair]
    convert = "".join(
        f"cvt.rn.satfinite.e2m1x2.f32 byte{i}, {{$r{2 * i}}}, {{$r{2 * i + 1}}};\n" for i in range(4)
    )
    return cute.arch.inline_ptx(
        "{\n.reg .b8 byte<4>;\n" + convert + "mov.b32 {$w0}, {byte0, byte1, byte2, byte3};\n}",
        write_only_types=[Uint32],
        read_only_args=values,
    )


def _round_to_e2m1(value: Float32) -> Float32:
    """The E2M1 value that the hardware conversion would give, as a float.

    With r the largest power of two in [1, |value|], E2M1's spacing there is r / 2: that is the unit
    in the last place of r * 2^22, so adding and subtracting it rounds to nearest even. xorsign gives
    the extrema the sign of ``value``, and saturates a NaN (positive, as every product's is) to +6.
    """
    return cute.arch.inline_ptx(
        "{\n"
        ".reg .f32 v, r, sum;\n"
        ".reg .b32 bits;\n"
        "min.ftz.xorsign.abs.f32 v, {$r0}, 0f40C00000;\n"
        "max.ftz.xorsign.abs.f32 r, v, 0f3F800000;\n"
        "mov.b32 bits, r;\n"
        "and.b32 bits, bits, 0xFF800000;\n"
        "mov.b32 r, bits;\n"
        "fma.rn.ftz.f32 sum, r, 0f4A800000, v;\n"
        "fma.rn.ftz.f32 sum, r, 0fCA800000, sum;\n"
        "copysign.f32 {$w0}, v, sum;\n"
        "}",
        write_only_types=[Float32],
        read_only_args=[value],
    )


def _bf16x2(even: Float32, odd: Float32, factor: Float32) -> Uint32:
    """Both values times ``factor`` as a BF16 pair; exact for an E2M1 and an E4M3 number."""
    return cute.arch.inline_ptx(
        "{\n"
        ".reg .f32 low, high;\n"
        "mul.rn.f32 low, {$r0}, {$r2};\n"
        "mul.rn.f32 high, {$r1}, {$r2};\n"
        "cvt.rn.bf16x2.f32 {$w0}, high, low;\n"
        "}",
        write_only_types=[Uint32],
        read_only_args=[even, odd, factor],
    )
