"""The Hopper weight layout on the CPU: exact, reversible, and what the kernel's bit tricks undo."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfp4.errors import InputError
from ringfp4.runtime import reference
from ringfp4.runtime.hopper_layout import BLOCK_BYTES, from_hopper, hopper_bytes, to_hopper

ZERO, NAN = 0x00, 0x7F


def random_weight(n: int, k: int, seed: int, scales: tuple[int, int] = (0, 128)):
    g = torch.Generator().manual_seed(seed)
    qdata = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g)
    return qdata, torch.randint(*scales, (n, k // 16), dtype=torch.uint8, generator=g)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
def test_there_and_back(strips: int, k_steps: int, seed: int):
    n, k = 64 * strips, 128 * k_steps
    qdata, scales = random_weight(n, k, seed)
    packed = to_hopper(qdata, reference.swizzle(scales))
    assert packed.numel() == hopper_bytes(n, k) == n * k * 9 // 16

    back, back_sf = from_hopper(packed, n, k)

    zeroed = (scales == ZERO).repeat_interleave(8, dim=1)
    assert torch.equal(back, torch.where(zeroed, 0, qdata))
    assert torch.equal(back_sf, reference.swizzle(scales))


def test_the_sign_of_a_scale_is_dropped():
    qdata, scales = random_weight(64, 128, 1)
    unsigned = to_hopper(qdata, reference.swizzle(scales))
    assert torch.equal(to_hopper(qdata, reference.swizzle(scales | 0x80)), unsigned)


def kernel_values(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """What unpack() of dsl/hopper_mainloop.py makes of a packed weight, [n, k] in float64.

    Written from the kernel's masks and shifts and from wgmma's fragment (PTX ISA), not from
    runtime/hopper_layout.py.
    """
    values = torch.full((n, k), float("nan"), dtype=torch.float64)
    blocks = packed.view(n // 64, k // 64, BLOCK_BYTES)
    data = blocks[..., :2048].contiguous().view(torch.int32).long()
    scales = blocks[..., 2048:].contiguous().view(torch.int32).long()
    thread = torch.arange(128)
    row = thread // 32 * 16 + thread % 32 // 4
    column = 2 * (thread % 4)
    for k16 in range(4):
        word = data[..., thread * 4 + k16] & 0xFFFFFFFF
        sf = scales[..., thread // 4 * 2 + k16 // 2] & 0xFFFFFFFF
        shifted = sf >> 4 if k16 % 2 else sf << 4
        factors = (shifted & 0x0FF00FF0) | 0x70007000
        a = word & 0x81C081C0
        b = (word << 3) & 0x81C081C0
        c = (word << 6) & 0x81C081C0
        d = ((word >> 4) & 0x00C000C0) | ((word >> 5) & 0x01000100) | ((word << 1) & 0x80008000)
        for register, pair in enumerate((a, b, c, d)):
            factor = bf16((factors >> (16 * (register % 2))) & 0xFFFF)
            for parity in range(2):
                product = bf16((pair >> (16 * parity)) & 0xFFFF) * factor
                rounded = product.to(torch.bfloat16).double()
                assert torch.equal(rounded.nan_to_num(), product.nan_to_num())  # exact in BF16
                r = row + 8 * (register % 2)
                col = k16 * 16 + column + 8 * (register // 2) + parity
                for strip in range(n // 64):
                    for step in range(k // 64):
                        values[strip * 64 + r, step * 64 + col] = rounded[strip, step]
    return values


def bf16(bits: torch.Tensor) -> torch.Tensor:
    return (bits << 16).to(torch.int32).view(torch.float32).double()


def test_the_kernel_unpacks_every_code_and_scale_exactly():
    # 256 rows x 8 blocks: each of the 128 scales meets all 16 codes.
    n, k = 256, 128
    scales = (torch.arange(n)[:, None] + 16 * torch.arange(8)).remainder(128).to(torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).repeat(n, k // 16)
    qdata = codes[:, 0::2] << 4 | codes[:, 1::2]

    values = kernel_values(to_hopper(qdata, reference.swizzle(scales)), n, k)

    expected = reference.decode(qdata, scales).double() / 256
    assert torch.equal(values.isnan(), (scales == NAN).repeat_interleave(16, dim=1))
    assert torch.equal(values.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(("n", "k"), [(63, 128), (64, 64), (64, 192), (0, 128)])
def test_other_shapes_are_refused(n: int, k: int):
    with pytest.raises(InputError, match="multiple of 64"):
        hopper_bytes(n, k)
