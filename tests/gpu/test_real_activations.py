"""Captured linears of a real model on the GPU, against what the reference gave on a CPU.

``--captures FILE``: what tests/minilm.py wrote on a CPU, with cubins of shapes/minilm.toml loaded.
The packed activation must be the same to the bit. The reference adds in float64 and rounds once
to FP32, a tensor core adds in FP32: so a result near a rounding boundary of BF16 may fall to the
other side, within the bound of linear_cases.py and no further.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_checks import Gpu, GuardedSlots, packed_equals, same_bits
from ringfp4.runtime import reference, ring_linear
from ringfp4.validate import captures
from ringfp4.validate import linear_cases as cases
from ringfp4.validate.level3 import to_gpu, weight_of


def test_captured_linears(gpu: Gpu, request: pytest.FixtureRequest) -> None:
    file = request.config.getoption("--captures")
    if file is None:
        pytest.skip("needs --captures FILE, made by tests/minilm.py")
    elements = different = 0
    for capture in map(to_gpu, captures.read(Path(file))):
        assert capture.y is not None
        (m, k), w = capture.x.shape, weight_of(capture)
        scale = reference.tensor_scale(capture.x, "bf16")
        assert packed_equals(GuardedSlots(m, k, 0xFF), capture.x, scale), capture.name
        results = [
            ring_linear(capture.x, w, scale_rule="bf16", bias=capture.bias, schedule=schedule)
            for schedule in gpu.schedules((w.n, w.k))
        ]
        for y in results:
            same_bits(y, results[0], capture.name)
        differing = results[0] != capture.y
        elements += differing.numel()
        different += int(differing.sum())
        assert within_bound(capture, scale, results[0]), capture.name
    print(f"{different} of {elements} elements differ from the CPU reference")
    assert elements > 0
    assert different < elements / 1000


def within_bound(capture: captures.Capture, scale: torch.Tensor, y: torch.Tensor) -> bool:
    (m, k), n = capture.x.shape, len(capture.qdata)
    assert capture.bias is not None
    q, sf = reference.quantise(capture.x, scale)
    a = reference.decode(q, reference.unswizzle(sf, m, k // reference.BLOCK)).double()
    w_sf = reference.unswizzle(capture.block_scale, n, k // reference.BLOCK)
    w = reference.decode(capture.qdata, w_sf).double()
    alpha = (scale * capture.tensor_scale).double()
    return cases.excess(y, a, w, alpha, capture.bias.double()) <= cases.ACCUMULATED
