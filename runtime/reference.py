"""The numerical contract (docs/numerics.md) in plain PyTorch: exact to the bit, and slow.

Serves CPU tensors in the runtime and is what every kernel is tested against. It uses only
IEEE operations, so it gives the same bits on any device its arguments are on. The one part of
a GPU that they do not reproduce is ``rcp.approx.ftz.f32``: its distance from the correctly
rounded reciprocal was read off an H200 for all 2^23 mantissas and is kept in
``data/rcp_approx.xz`` (one signed byte each, in units in the last place).
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from ringfp4.errors import InputError

BLOCK = 16  # consecutive columns that share one block scale
E2M1_MAX, E4M3_MAX = 6.0, 448.0
FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN_NORMAL = torch.finfo(torch.float32).tiny
ONE_SIXTH = 0.16666667163372039794921875  # 0x3E2AAAAB, the float32 nearest 1/6
SCALE_RULES = ("fp32", "bf16")
# The value of each E2M1 code; the sign is bit 3.
E2M1_VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Upper end of the values that round to codes 0..6: midpoints go to the even code, so every
# second boundary lies one unit below its midpoint.
_E2M1_UPPER = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_E2M1_UPPER[1::2] = torch.nextafter(_E2M1_UPPER[1::2], torch.zeros(3))
_CHUNK_ELEMENTS = 1 << 22  # bounds the temporary memory of the loops over rows


class PackedWeight(Protocol):
    """What :func:`linear` reads of a weight (``runtime.Nvfp4Weight`` has it)."""

    @property
    def qdata(self) -> torch.Tensor: ...  # uint8 [N, K/2]
    @property
    def block_scale(self) -> torch.Tensor: ...  # one byte each, swizzled as by swizzle()
    @property
    def tensor_scale(self) -> torch.Tensor: ...  # float32, one element


def ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tensor_scale(x: torch.Tensor, rule: str = "fp32") -> torch.Tensor:
    """The tensor scale of activation ``x`` (BF16, any shape): float32, no dimensions.

    ``fp32`` is ``x.abs().amax().float() / 2688`` and ``bf16`` is
    ``(x.abs().amax() / 2688.0).float()``, both as PyTorch computes them on a CUDA device,
    where division by a Python scalar is multiplication by its float32 reciprocal.
    A NaN in ``x`` gives NaN, an infinity gives infinity, an empty ``x`` gives 0.
    """
    if rule not in SCALE_RULES:
        raise InputError("unknown scale rule", expected=" or ".join(SCALE_RULES), got=repr(rule))
    if x.dtype is not torch.bfloat16:
        raise InputError("wrong activation dtype", expected="torch.bfloat16", got=str(x.dtype))
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    reciprocal = torch.tensor(1.0) / torch.tensor(E4M3_MAX * E2M1_MAX)
    scale = x.abs().amax().float() * reciprocal
    return scale if rule == "fp32" else scale.bfloat16().float()


@cache
def rcp_ulp_table(device: torch.device | str = "cpu") -> torch.Tensor:
    """int8 [2^23]: rcp.approx minus the correctly rounded reciprocal, by mantissa."""
    raw = lzma.decompress((Path(__file__).parent / "data" / "rcp_approx.xz").read_bytes())
    return torch.frombuffer(bytearray(raw), dtype=torch.int8).to(device)


def _ftz(v: torch.Tensor) -> torch.Tensor:
    """Subnormal float32 values become zeros of the same sign."""
    return torch.where(v.abs() < FLT_MIN_NORMAL, v * 0.0, v)


def mul_ftz(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    """PTX ``mul.ftz.f32``; a Python ``b`` is a normal number that float32 holds exactly."""
    return _ftz(_ftz(a) * (_ftz(b) if isinstance(b, torch.Tensor) else b))


def min_ftz(a: torch.Tensor, limit: float) -> torch.Tensor:
    """PTX ``min.ftz``: the number where ``a`` is NaN."""
    return torch.where(a.isnan(), limit, _ftz(a).clamp(max=limit))


def rcp_approx_ftz(x: torch.Tensor) -> torch.Tensor:
    """``rcp.approx.ftz.f32`` of a float32 tensor, bit for bit as an H200 computes it.

    Zero and subnormals give infinity, infinity gives zero, a reciprocal below the smallest
    normal number is flushed to zero; signs are kept. NaN gives NaN.
    """
    x = _ftz(x)
    exact = _ftz(1.0 / x)
    # Infinite, zero and NaN results, and those of exact powers of two, need no correction.
    regular = exact.isfinite() & (exact != 0)
    ulp = rcp_ulp_table(x.device)[(x.view(torch.int32) & 0x7FFFFF).long()].to(torch.int32)
    return torch.where(regular, (exact.view(torch.int32) + ulp).view(torch.float32), exact)


def encode_e4m3(v: torch.Tensor) -> torch.Tensor:
    """float32 without NaN -> float8_e4m3fn, to nearest even, saturating at +-448."""
    return v.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def encode_e2m1(v: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 codes, to nearest even, saturating at +-6; NaN gives +6."""
    nan = v.isnan()
    code = torch.bucketize(v.abs(), _E2M1_UPPER.to(v.device), out_int32=True).to(torch.uint8)
    code |= torch.signbit(v).to(torch.uint8) << 3
    return torch.where(nan, 7, code)


def block_amax(blocks: torch.Tensor) -> torch.Tensor:
    """Largest |value| over the last dimension, ignoring NaN; NaN where all are NaN."""
    magnitude = blocks.float().abs()
    largest = torch.where(magnitude.isnan(), -1.0, magnitude).amax(-1)
    return torch.where(largest < 0, torch.nan, largest)


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(columns, 1))
    return (slice(r, min(r + step, rows)) for r in range(0, rows, step))


def quantise(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack BF16 ``x`` [M, K] with tensor scale ``scale`` (float32, one element).

    Returns ``q`` uint8 [M, K/2] (even column in the high nibble) and ``sf`` uint8
    [M padded to 128, K/16 padded to 4], block scales in the swizzled order of :func:`swizzle`.
    Bit for bit what Comfy Kitchen 0.2.31 computes on CUDA. K is a multiple of 16.
    """
    if x.dtype is not torch.bfloat16 or x.dim() != 2 or x.shape[1] % BLOCK:
        got = f"{x.dtype} {tuple(x.shape)}"
        raise InputError(
            "cannot quantise", expected=f"torch.bfloat16 [M, K], K a multiple of {BLOCK}", got=got
        )
    rows, columns = x.shape
    g = scale.reshape(()).float()
    g_reciprocal = rcp_approx_ftz(g)
    q = torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.uint8, device=x.device)
    for chunk in _row_chunks(rows, columns):
        blocks = x[chunk].reshape(-1, columns // BLOCK, BLOCK)
        s = mul_ftz(mul_ftz(block_amax(blocks), ONE_SIXTH), g_reciprocal)
        block_scale = encode_e4m3(min_ftz(s, E4M3_MAX))
        encode = min_ftz(rcp_approx_ftz(mul_ftz(g, block_scale.float())), FLT_MAX)
        code = encode_e2m1(mul_ftz(blocks.float(), encode.unsqueeze(-1))).flatten(1)
        q[chunk] = code[:, 0::2] << 4 | code[:, 1::2]
        scales[chunk] = block_scale.view(torch.uint8)
    return q, swizzle(scales)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, blocks] -> uint8 [rows padded to 128, blocks padded to 4], swizzled.

    The bytes are tiles of 128 rows x 4 blocks in row-major order of tiles; inside a tile the
    offset is ``row % 32 * 16 + row % 128 // 32 * 4 + block % 4``. Padding bytes are 0.
    """
    rows, blocks = scales.shape
    padded = scales.new_zeros(ceil_to(rows, 128), ceil_to(blocks, 4))
    padded[:rows, :blocks] = scales
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)  # (row tile, quarter, row, block tile, block)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape)


def unswizzle(sf: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Inverse of :func:`swizzle`: one byte each, any shape -> uint8 [rows, blocks]."""
    tiles = sf.contiguous().view(torch.uint8).reshape(-1, ceil_to(blocks, 4) // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1, ceil_to(blocks, 4))[:rows, :blocks]


def unpack(q: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] packed E2M1 -> uint8 [..., K] codes."""
    return torch.stack((q >> 4, q & 15), -1).flatten(-2)


def decode(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``e2m1 * e4m3`` as float32 [rows, K], exact; the tensor scale is not applied.

    ``q`` uint8 [rows, K/2]; ``scales`` uint8 [rows, K/16], not swizzled.
    """
    values = E2M1_VALUES.to(q.device)[unpack(q).int()].reshape(*scales.shape, BLOCK)
    return (values * scales.view(torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(1)


def finish(
    acc: torch.Tensor, scale: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The epilogue on accumulators of any float type: BF16, rounded once after alpha (and bias)."""
    alpha = scale.reshape(()).float() * weight_scale.reshape(()).float()
    y = acc.float() * alpha
    return (y if bias is None else y + bias.float()).bfloat16()


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    scale: torch.Tensor | None = None,
    rule: str = "fp32",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` BF16 [M, K] times the transposed weight -> BF16 [M, N].

    ``scale`` (float32, one element) is a calibrated tensor scale; without it ``rule`` names
    how it follows from ``x``. Sums are taken in float64 over exact products and rounded to
    float32 once, so they are the exact sums a GPU's accumulator approximates.
    """
    rows, columns = x.shape
    n = weight.qdata.shape[0]
    y = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    if rows == 0:
        return y
    g = tensor_scale(x, rule) if scale is None else scale
    q, sf = quantise(x, g)
    a = decode(q, unswizzle(sf, rows, columns // BLOCK)).double()
    w_scales = unswizzle(weight.block_scale, n, columns // BLOCK)
    for part in _row_chunks(n, columns):
        w = decode(weight.qdata[part], w_scales[part]).double()
        part_bias = None if bias is None else bias[part]
        y[:, part] = finish(a @ w.T, g, weight.tensor_scale, part_bias)
    return y
