"""Inputs on which a quantiser that is nearly right goes wrong.

A case is a list of blocks (BF16 [B, 16]) and one tensor scale. Blocks are independent, so a
test may lay them out in rows of any length. Everything is deterministic: numpy's PCG64 with
fixed seeds, and exact searches over bit patterns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from ringfp4.runtime import reference

BLOCK = reference.BLOCK
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # of neighbouring E2M1 values
BF16_MAX = torch.finfo(torch.bfloat16).max
SCALES = (1.0, 2.0**-11, 3.0 * 2.0**-9, 0.0123, 0.7071067690849304)


@dataclass(frozen=True)
class Case:
    name: str
    blocks: torch.Tensor  # BF16 [B, 16]
    scale: torch.Tensor  # float32, no dimensions

    def rows(self, k: int) -> torch.Tensor:
        """The blocks as BF16 [M, k], filled up with zero blocks."""
        per_row = k // BLOCK
        missing = -len(self.blocks) % per_row
        filled = torch.cat((self.blocks, self.blocks.new_zeros(missing, BLOCK)))
        return filled.reshape(-1, k)


def from_bits(bits: np.ndarray) -> torch.Tensor:
    """uint16 array -> BF16 tensor with these bit patterns."""
    return torch.from_numpy(np.ascontiguousarray(bits, np.uint16).view(np.int16)).view(torch.bfloat16)


def step_bits(x: torch.Tensor, ulps: int) -> torch.Tensor:
    """BF16 or float32 values moved away from zero by ``ulps`` units in the last place."""
    integer = torch.int16 if x.dtype is torch.bfloat16 else torch.int32
    return (x.view(integer) + ulps).view(x.dtype)


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def all_patterns() -> Iterator[Case]:
    """Every BF16 bit pattern in a block whose other values are 0, 1 or the largest finite."""
    bits = np.arange(1 << 16)
    for rest_name, rest in (("0", 0.0), ("1", 1.0), ("max", BF16_MAX)):
        blocks = torch.full((len(bits), BLOCK), rest, dtype=torch.bfloat16)
        blocks[torch.from_numpy(bits), torch.from_numpy(bits % BLOCK)] = from_bits(bits)
        for scale in (1.0, 0.0123, 2.0**115):
            yield Case(f"patterns, rest {rest_name}, scale {scale:g}", blocks, _scalar(scale))


def _scaled_block_amax(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    s = reference.mul_ftz(amax.float(), reference.ONE_SIXTH)
    return reference.mul_ftz(s, reference.rcp_approx_ftz(scale))


def block_scale_boundaries() -> Iterator[Case]:
    """Tensor scales that put the block scale on each E4M3 rounding boundary and 1 ulp beside it.

    The boundaries are the midpoints of all neighbouring finite values, and the saturation
    point. For each wanted float32 value a pair of amax and tensor scale is searched that
    yields it exactly; the other values of the block sit on E2M1 midpoints of both outcomes.
    """
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    boundaries = torch.cat(((e4m3[:-1] + e4m3[1:]) / 2, e4m3[-1:]))
    mantissas = 1 + torch.arange(128).bfloat16() / 128
    nudges = torch.arange(-4, 5, dtype=torch.int32)
    for index, boundary in enumerate(boundaries):
        for ulps in (-1, 0, 1):
            wanted = step_bits(boundary, ulps)
            near = (mantissas.float() * reference.ONE_SIXTH / wanted).unsqueeze(1)
            scales = (near.view(torch.int32) + nudges).view(torch.float32)  # (amax, nudge)
            amax = mantissas.unsqueeze(1).expand_as(scales)
            hits = (_scaled_block_amax(amax, scales) == wanted).nonzero()
            if len(hits) == 0:
                raise AssertionError(f"no amax and scale give {wanted.item()!r}")
            row, column = hits[index % len(hits)].tolist()
            scale = scales[row, column]
            neighbours = e4m3[max(index - 1, 0) : index + 2]
            mids = (scale * neighbours.unsqueeze(1) * MIDPOINTS).bfloat16().flatten()
            mids = mids[mids.abs() <= mantissas[row]]
            values = torch.cat((mids, -mids))[: BLOCK - 1]
            blocks = torch.zeros(4, BLOCK, dtype=torch.bfloat16)
            for b, position in enumerate((0, 5, 10, 15)):
                blocks[b, : len(values)] = values.roll(b)
                blocks[b, position] = mantissas[row] if b % 2 == 0 else -mantissas[row]
            yield Case(f"block scale at {boundary:g} {ulps:+d} ulp", blocks, scale)


def midpoints() -> Iterator[Case]:
    """Values on E2M1 midpoints of every reachable block scale, and 1 BF16 ulp beside them."""
    e4m3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for scale in map(_scalar, SCALES):
        amax = (6.0 * e4m3 * scale).bfloat16()
        byte = reference.encode_e4m3(_scaled_block_amax(amax, scale).clamp(max=448.0))
        mids = (MIDPOINTS * byte.float().unsqueeze(1) * scale).bfloat16()  # (block scale, midpoint)
        groups = []
        for ulps in (-1, 0, 1):
            moved = step_bits(mids, ulps)
            signed = torch.cat((moved, -moved), 1)
            groups.append(torch.cat((amax.unsqueeze(1), signed, -amax.unsqueeze(1)), 1))
        yield Case(f"midpoints, scale {scale:g}", torch.cat(groups), scale)


def reciprocal_midpoints() -> Iterator[Case]:
    """Values whose E2M1 code hangs on the last bit of ``rcp.approx``.

    Searched: tensor scales with a block scale byte such that a BF16 value times the hardware's
    reciprocal falls on one side of a midpoint, times the exact reciprocal on the other.
    """
    x = (1 + torch.arange(128) / 128).reshape(-1, 1, 1, 1)  # all BF16 mantissas
    mids = MIDPOINTS.reshape(-1, 1, 1)
    block_scales = torch.tensor([0.5, 0.5625, 1, 1.125, 1.375, 28, 104, 448]).reshape(-1, 1)
    nudges = torch.arange(-2, 3, dtype=torch.int32)
    scales = ((x / (mids * block_scales)).view(torch.int32) + nudges).view(torch.float32)
    x, block_scales = x.expand_as(scales), block_scales.expand_as(scales)
    decoded = reference.mul_ftz(scales, block_scales)
    hardware = reference.encode_e2m1(reference.mul_ftz(reference.rcp_approx_ftz(decoded), x))
    exact = reference.encode_e2m1(reference.mul_ftz(1.0 / decoded, x))
    amax = (6.0 * decoded).bfloat16()
    s = torch.stack([_scaled_block_amax(a, g) for a, g in zip(amax, scales, strict=True)])
    reached = reference.encode_e4m3(s.clamp(max=448.0)).float() == block_scales
    for index in ((hardware != exact) & reached).nonzero()[::4]:
        at = tuple(index.tolist())
        block = x[at].repeat(BLOCK).bfloat16() * torch.tensor([1, -1]).repeat(8)
        block[3] = amax[at]
        yield Case(f"reciprocal of {decoded[at]:.9g}, value {x[at]:g}", block.reshape(1, -1), scales[at])


def _special_blocks() -> torch.Tensor:
    nan, inf, tiny = float("nan"), float("inf"), torch.finfo(torch.bfloat16).tiny
    sub = tiny / 128  # smallest subnormal BF16
    rows = [
        [0.0] * 16,
        [-0.0] * 16,
        [0.0, -0.0] * 8,
        [nan] * 16,
        [nan] * 15 + [1.0],
        [nan, -3.0] + [0.5] * 14,
        [inf] * 16,
        [-inf] + [1.0] * 15,
        [inf, nan, -inf, 0.0, -0.0, 1.0, -1.0, sub, -sub, tiny, -tiny, BF16_MAX, -BF16_MAX, 2.0, 3.0, 6.0],
        [sub * i for i in range(16)],
        [-sub * (127 - i) for i in range(16)],
        [tiny * (1 + i / 128) for i in range(16)],
        [BF16_MAX, -BF16_MAX] + [BF16_MAX / 2**i for i in range(14)],
        [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0],
        [448.0 * 6] + [1.0] * 15,
        [1e-3 * (-1) ** i for i in range(16)],
    ]
    return torch.tensor(rows, dtype=torch.float64).bfloat16()


def scale_range() -> Iterator[Case]:
    """Special and random blocks under tensor scales of every FP32 exponent, and odd ones."""
    rng = np.random.default_rng(11)
    random_bits = from_bits(rng.integers(0, 1 << 16, (16, BLOCK)))
    for exponent in range(-149, 128):
        for mantissa in (1.0, 1.5, 2.0 - 2.0**-23):
            scale = _scalar(float(np.float32(np.ldexp(mantissa, exponent))))
            # Values whose block scales span E4M3's range under this tensor scale.
            digits = rng.integers(-255, 256, (16, BLOCK)) * mantissa
            fitting = torch.from_numpy(np.ldexp(digits, exponent + rng.integers(-16, 5, (16, 1)))).bfloat16()
            blocks = torch.cat((_special_blocks(), random_bits, fitting))
            yield Case(f"scale {mantissa:.7g} * 2^{exponent}", blocks, scale)
    for value in (0.0, -0.0, float("inf"), float("nan"), -1.0, -(2.0**-11)):
        yield Case(f"scale {value}", torch.cat((_special_blocks(), random_bits)), _scalar(value))


def by_own_scale() -> Iterator[Case]:
    """Tensors whose scale follows from them: all zero, with NaN, with infinity, one value."""
    special = _special_blocks()
    tensors = {
        "all zero": torch.zeros(64, BLOCK, dtype=torch.bfloat16),
        "all minus zero": torch.full((64, BLOCK), -0.0, dtype=torch.bfloat16),
        "zero but one": torch.zeros(64, BLOCK, dtype=torch.bfloat16).index_fill_(
            0, torch.tensor([3]), torch.tensor(2.0, dtype=torch.bfloat16)
        ),
        "with NaN and infinity": special,
        "with infinity": special[[0, 1, 2, 6, 7, 13]],
        "subnormal": special[[0, 9, 10]],
    }
    for name, blocks in tensors.items():
        for rule in reference.SCALE_RULES:
            yield Case(f"{name}, rule {rule}", blocks, reference.tensor_scale(blocks, rule))


# Every case but the random ones, by the name tests and golden vectors know them by.
ADVERSARIAL = {
    "patterns": all_patterns,
    "boundaries": block_scale_boundaries,
    "midpoints": midpoints,
    "reciprocal": reciprocal_midpoints,
    "scale_range": scale_range,
    "own_scale": by_own_scale,
}


DISTRIBUTIONS = ("normal", "wide", "uniform", "heavy tails", "integers", "bit patterns")


def random_values(kind: str, count: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """BF16 [count / 16, 16] of one of DISTRIBUTIONS."""
    gen = torch.Generator(device).manual_seed(seed)
    normal = torch.randn(count, generator=gen, device=device)
    if kind == "normal":
        x = normal
    elif kind == "wide":
        x = normal.sign() * torch.exp2(12 * torch.randn(count, generator=gen, device=device))
    elif kind == "uniform":
        x = torch.rand(count, generator=gen, device=device) * 2 - 1
    elif kind == "heavy tails":
        x = normal / torch.rand(count, generator=gen, device=device).clamp(min=1e-4)
    elif kind == "integers":
        x = (normal * 8).round()
    elif kind == "bit patterns":
        bits = torch.randint(-(1 << 15), 1 << 15, (count,), generator=gen, device=device)
        x = bits.to(torch.int16).view(torch.bfloat16)
    else:
        raise ValueError(kind)
    return x.bfloat16().reshape(-1, BLOCK)
