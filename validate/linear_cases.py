"""Linears whose results are known: inputs, packed bytes they must become, float64 products.

Activations are built from the E2M1 codes and E4M3 scales they must quantise to. With a power of
two as tensor scale and a code of +-6 in every block the quantiser reproduces both exactly.
Everything lives on one device, so that full-size cases are made and checked on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from ringfp4.runtime import reference

BLOCK = reference.BLOCK
SCALE = 2.0**-3  # the activation's tensor scale
WEIGHT_SCALE = 0.0123  # not a power of two: alpha before or after rounding makes a difference
INTEGERS = (0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15)  # codes of 0, 1, 2, 3, 4, 6 and negatives
POWERS = (0x30, 0x38, 0x40)  # E4M3 bytes of 0.5, 1, 2
# Random inputs: |y - exact| <= half a BF16 ulp of exact + ACCUMULATED * alpha * sum |a||b|; the
# first is the rounding to BF16, the second that of FP32 sums in any order.
ACCUMULATED = 2.0**-18
_CHUNK = 4096  # rows multiplied at a time


@dataclass(frozen=True)
class Weight:
    """A weight as Comfy stores it."""

    qdata: torch.Tensor  # uint8 [N, K/2]
    block_scale: torch.Tensor  # uint8, swizzled
    tensor_scale: torch.Tensor  # float32, no dimensions


@dataclass(frozen=True)
class Linear:
    """One problem. ``a`` and ``w`` are E2M1 codes [rows, K], ``*_sf`` E4M3 bytes [rows, K/16]."""

    name: str
    a: torch.Tensor
    a_sf: torch.Tensor
    w: torch.Tensor
    w_sf: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, N, K."""
        return len(self.a), len(self.w), self.a.shape[1]

    @property
    def scale(self) -> torch.Tensor:
        return torch.tensor(SCALE, device=self.a.device)

    @property
    def x(self) -> torch.Tensor:
        """The activation, BF16 [M, K]."""
        chunks = [(a * SCALE).bfloat16() for _, a in self.decoded_rows()]
        return torch.cat(chunks)

    @property
    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the activation must be packed to: q [M, K/2] and swizzled scales."""
        return pack_codes(self.a), reference.swizzle(self.a_sf)

    @property
    def weight(self) -> Weight:
        scale = torch.tensor(WEIGHT_SCALE, device=self.w.device)
        return Weight(pack_codes(self.w), reference.swizzle(self.w_sf), scale)

    def decoded_rows(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Chunks of rows and their activation, decoded without the tensor scale, float64."""
        for r in range(0, len(self.a), _CHUNK):
            rows = slice(r, min(r + _CHUNK, len(self.a)))
            yield rows, reference.decode(pack_codes(self.a[rows]), self.a_sf[rows]).double()

    def mismatches(self, y: torch.Tensor) -> int:
        """Elements of BF16 ``y`` [M, N] unlike the exact result; zeros of either sign are alike."""
        wrong = 0
        w = reference.decode(pack_codes(self.w), self.w_sf).double()
        for rows, a in self.decoded_rows():
            expected = reference.finish(a @ w.T, self.scale, self.weight.tensor_scale, self.bias)
            wrong += int((y[rows] != expected).sum())
        return wrong

    def excess(self, y: torch.Tensor) -> float:
        """Largest :func:`excess` of ``y`` over chunks of rows."""
        alpha = (self.scale * self.weight.tensor_scale).double()
        w = reference.decode(pack_codes(self.w), self.w_sf).double()
        bias = 0.0 if self.bias is None else self.bias.double()
        return max(excess(y[rows], a, w, alpha, bias) for rows, a in self.decoded_rows())


def excess(
    y: torch.Tensor,
    a: torch.Tensor,
    w: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | float = 0.0,
) -> float:
    """Largest error of BF16 ``y`` beyond half an ulp, in units of alpha * sum |a||b|.

    ``a`` [M, K] and ``w`` [N, K] are decoded operands, ``alpha`` the product of the tensor scales,
    all float64. Infinite if ``y`` has a NaN.
    """
    exact = alpha * (a @ w.T) + bias
    _, exponent = torch.frexp(exact)  # of a mantissa in [0.5, 1)
    error = (y.double() - exact).abs() - torch.ldexp(torch.ones_like(exact), exponent - 9)
    if bool(error.isnan().any()):
        return float("inf")
    magnitude = alpha * (a.abs() @ w.abs().T)
    return float((error / magnitude.clamp(min=1e-300)).max())


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, K] E2M1 codes -> uint8 [rows, K/2], even column in the high nibble."""
    return codes[:, 0::2] << 4 | codes[:, 1::2]


class _Random:
    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def below(self, limit: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(limit, shape, generator=self.generator, device=self.device, dtype=torch.uint8)

    def of(self, values: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        choices = torch.tensor(values, dtype=torch.uint8, device=self.device)
        return choices[self.below(len(values), shape).int()]

    def with_six(self, codes: torch.Tensor) -> torch.Tensor:
        """One code of every block becomes +6 or -6."""
        rows, k = codes.shape
        at = self.below(BLOCK, (rows, k // BLOCK, 1)).long()
        six = self.of((7, 15), (rows, k // BLOCK, 1))
        return codes.reshape(rows, -1, BLOCK).scatter(2, at, six).reshape(rows, k)


def _distinct_scales(rows: int, k: int, device: torch.device | str) -> torch.Tensor:
    """All 126 finite positive E4M3 bytes, neighbours in either direction different."""
    row = torch.arange(rows, device=device).unsqueeze(1)
    block = torch.arange(k // BLOCK, device=device)
    return (1 + (row * 11 + block * 5) % 126).to(torch.uint8)


def exact(
    m: int, n: int, k: int, seed: int = 0, device: torch.device | str = "cpu", bias: bool = False
) -> Linear:
    """Dense integers with scales 0.5, 1, 2: every partial sum is exact in FP32 in any order.

    Products are multiples of 1/4 of at most 144, so up to K = 29,127 no sum needs more than 24 bits.
    """
    rng = _Random(seed, device)
    blocks = k // BLOCK
    return Linear(
        f"exact {m} x {n} x {k}",
        rng.with_six(rng.of(INTEGERS, (m, k))),
        rng.of(POWERS, (m, blocks)),
        rng.of(INTEGERS, (n, k)),
        rng.of(POWERS, (n, blocks)),
        torch.randn(n, generator=rng.generator, device=device).bfloat16() if bias else None,
    )


def one_hot_k(m: int, n: int, k: int, device: torch.device | str = "cpu") -> Linear:
    """One value a row of the activation, against dense weights with a distinct scale a block."""
    rng = _Random(1, device)
    row = torch.arange(m, device=device)
    column = (row * 37 + 5) % k
    a, a_sf = torch.zeros(m, k, dtype=torch.uint8, device=device), _distinct_scales(m, k, device)
    a[row, column] = torch.where(row % 2 == 0, 7, 15).to(torch.uint8)
    used = torch.zeros_like(a_sf, dtype=torch.bool)
    used[row, column // BLOCK] = True
    return Linear("one-hot along K", a, a_sf * used, rng.below(16, (n, k)), _distinct_scales(n, k, device))


def one_hot_n(m: int, n: int, k: int, device: torch.device | str = "cpu") -> Linear:
    """One value a row of the weight, against a dense activation with a distinct scale a block."""
    rng = _Random(2, device)
    row = torch.arange(n, device=device)
    w = torch.zeros(n, k, dtype=torch.uint8, device=device)
    w[row, (row * 29 + 3) % k] = torch.where(row % 3 == 0, 13, 3).to(torch.uint8)
    a = rng.with_six(rng.below(16, (m, k)))
    return Linear("one-hot along N", a, _distinct_scales(m, k, device), w, _distinct_scales(n, k, device))


def all_scales(m: int, n: int, k: int, device: torch.device | str = "cpu") -> Linear:
    """One dense block a row of the activation; every E4M3 scale meets every other, exactly."""
    rng = _Random(3, device)
    blocks = k // BLOCK
    row = torch.arange(m, device=device)
    a = rng.with_six(rng.below(16, (m, k))).reshape(m, blocks, BLOCK)
    a_sf = torch.zeros(m, blocks, dtype=torch.uint8, device=device)
    a_sf[row, row % blocks] = (1 + (row * 5) % 126).to(torch.uint8)
    a = (a * (a_sf != 0).unsqueeze(-1)).reshape(m, k)
    return Linear("all scales", a, a_sf, rng.below(16, (n, k)), _distinct_scales(n, k, device))


def random(m: int, n: int, k: int, seed: int = 4, device: torch.device | str = "cpu") -> Linear:
    """Gaussian activation and weight as the quantiser leaves them: sums round, order matters."""
    generator = torch.Generator(device).manual_seed(seed)

    def quantised(rows: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(rows, k, generator=generator, device=device).bfloat16()
        q, sf = reference.quantise(values, torch.tensor(scale, device=device))
        return reference.unpack(q), reference.unswizzle(sf, rows, k // BLOCK)

    return Linear("random", *quantised(m, 2.0**-9), *quantised(n, 2.0**-9))


EXACT: tuple[Callable[..., Linear], ...] = (exact, one_hot_k, one_hot_n, all_scales)
