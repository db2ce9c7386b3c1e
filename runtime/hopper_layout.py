"""The weight layout of the native Hopper kernels, and the way to it and back in plain PyTorch.

The GPU makes it with the kernel ``hopper_repack``; this is what that kernel is tested against, and
the way back to Comfy's layout. Works on any device.

A weight [N, K] (N, K multiples of 64) is [N / 64] strips of [K / 64] blocks of 2,304 bytes, so it
takes as many bytes as Comfy's layout without padding. A block is 512 words of E2M1 codes followed
by 64 words of block scales (little endian), in the order in which the threads of a warpgroup need
them for wgmma's A fragment. Thread 32 w + 4 g + c (g < 8, c < 4) owns, of each 16 columns k16 < 4,
rows 16 w + g and 16 w + g + 8, columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of the sixteen:

    word 4 thread + k16         its eight codes: even columns in the low 16 bits, odd in the high
    word 512 + 2 (8 w + g) + q  scales of k16 = 2 q and 2 q + 1: bytes 0 and 1 those of row
                                16 w + g, bytes 2 and 3 those of row 16 w + g + 8

In 16 bits, from bit 15 down, with s the sign and m the three magnitude bits of a code, and with
(row half, column half) as index: s00, s11, m11[2], s10, m11[1:0], s01, m00, m10, m01. So one shift
and one mask move any of the four to BF16's sign bit and bits 8 to 6.

A block scale is one byte, five bits of exponent + 21 and three of mantissa, normalised: every E4M3
value has its own. 0 stays 0, NaN (0x7F) is 0xFF and makes the outputs of its row NaN. The sign bit
is dropped: it does not exist in UE4M3, which is what the tensor cores of sm_12x read.

Codes under a zero scale become 0, since the scale byte 0 does not decode to 0. That is the only
thing the way back cannot restore; no value changes.
"""

from __future__ import annotations

import torch
from ringfp4.errors import InputError
from ringfp4.runtime.reference import BLOCK, swizzle, unswizzle

STRIP_ROWS = 64
TILE_K = 64
BLOCK_BYTES = STRIP_ROWS * TILE_K // 2 + STRIP_ROWS * TILE_K // BLOCK
_DATA_BYTES = STRIP_ROWS * TILE_K // 2

# (row half, column half) -> moves of (mask of the code's bits, shift to the left).
_PLACES = {
    (0, 0): ((8, 12), (7, 6)),
    (1, 0): ((8, 9), (7, 3)),
    (0, 1): ((8, 6), (7, 0)),
    (1, 1): ((8, 11), (4, 11), (3, 10)),
}


def hopper_bytes(n: int, k: int) -> int:
    """Bytes of a weight [n, k] in the Hopper layout; InputError if it has none."""
    if n <= 0 or k <= 0 or n % STRIP_ROWS or k % (2 * TILE_K):
        raise InputError(
            "no Hopper layout for this weight",
            expected=f"N a multiple of {STRIP_ROWS}, K a multiple of {2 * TILE_K}",
            got=f"N = {n}, K = {k}",
        )
    return n // STRIP_ROWS * (k // TILE_K) * BLOCK_BYTES


def to_hopper(qdata: torch.Tensor, block_scale: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/2], even column high, and swizzled scales (one byte each) -> uint8 [bytes]."""
    n, k = qdata.shape[0], 2 * qdata.shape[1]
    hopper_bytes(n, k)
    scales = unswizzle(block_scale.view(torch.uint8), n, k // BLOCK) & 0x7F
    codes = torch.stack((qdata >> 4, qdata & 15), -1).view(n, k // BLOCK, BLOCK)
    codes = torch.where(scales[..., None] == 0, 0, codes).int()

    # strip, w, row half, g, k step, k16, column half, c, parity
    codes = codes.view(n // STRIP_ROWS, 4, 2, 8, k // TILE_K, 4, 2, 4, 2)
    places = (
        (codes[:, :, rows, :, :, :, columns] & mask) << shift
        for (rows, columns), moves in _PLACES.items()
        for mask, shift in moves
    )
    half_words = sum(places, start=torch.zeros((), dtype=torch.int))
    data = half_words.permute(0, 3, 1, 2, 5, 4, 6)  # strip, k step, w, g, c, k16, parity
    data_bytes = torch.stack((data & 0xFF, data >> 8), -1).to(torch.uint8)

    sf = _encode_scales(scales).view(n // STRIP_ROWS, 4, 2, 8, k // TILE_K, 2, 2)
    sf_bytes = sf.permute(0, 4, 1, 3, 5, 2, 6)  # strip, k step, w, g, q, row half, odd
    blocks = (n // STRIP_ROWS, k // TILE_K)
    return torch.cat((data_bytes.reshape(*blocks, -1), sf_bytes.reshape(*blocks, -1)), -1).flatten()


def from_hopper(packed: torch.Tensor, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of :func:`to_hopper`: qdata uint8 [N, K/2] and swizzled scales, padding 0."""
    blocks = packed.view(n // STRIP_ROWS, k // TILE_K, BLOCK_BYTES)
    data = blocks[..., :_DATA_BYTES].reshape(*blocks.shape[:2], 4, 8, 4, 4, 2, 2).int()
    half_words = data[..., 0] | data[..., 1] << 8  # strip, k step, w, g, c, k16, parity
    half_words = half_words.permute(0, 2, 3, 1, 5, 4, 6)  # strip, w, g, k step, k16, c, parity
    codes = torch.stack(
        [
            torch.stack([_take(half_words, _PLACES[rows, columns]) for columns in range(2)], -3)
            for rows in range(2)
        ],
        2,
    )  # as in to_hopper
    codes = codes.reshape(n, k // 2, 2).to(torch.uint8)

    sf = blocks[..., _DATA_BYTES:].reshape(*blocks.shape[:2], 4, 8, 2, 2, 2)
    scales = _decode_scales(sf.permute(0, 2, 5, 3, 1, 4, 6).reshape(n, k // BLOCK))
    return codes[..., 0] << 4 | codes[..., 1], swizzle(scales)


def _take(half_words: torch.Tensor, moves: tuple[tuple[int, int], ...]) -> torch.Tensor:
    code = torch.zeros_like(half_words)
    for mask, shift in moves:
        code |= (half_words >> shift) & mask
    return code


def _encode_scales(e4m3: torch.Tensor) -> torch.Tensor:
    return _scale_codes().to(e4m3.device)[e4m3.long()]


def _decode_scales(codes: torch.Tensor) -> torch.Tensor:
    inverse = torch.zeros(256, dtype=torch.uint8)
    inverse[_scale_codes().long()] = torch.arange(128, dtype=torch.uint8)
    return inverse.to(codes.device)[codes.long()]


def _scale_codes() -> torch.Tensor:
    """uint8 [128]: the layout's byte for each E4M3 byte."""
    values = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    mantissa, exponent = torch.frexp(values)  # mantissa in [0.5, 1)
    codes = ((exponent - 1 + 21) << 3) + ((2 * mantissa - 1) * 8).int()
    codes[0], codes[127] = 0, 0xFF
    return codes.to(torch.uint8)
