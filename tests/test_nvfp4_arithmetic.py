"""The quantiser's device functions against the reference: their PTX, interpreted on the CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from ptx_interpreter import OPERATIONS, run
from ringfp4.runtime import reference
from ringfp4.validate import quantiser_cases as cases

pytest.importorskip("cutlass", reason="needs the CuTe DSL (the extra 'build')")
BLOCK = reference.BLOCK


@pytest.fixture
def nvfp4(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with arrays of words, one element a thread, in place of the DSL's values."""
    from ringfp4.dsl import nvfp4

    def inline_ptx(
        code: str, write_only_types: Sequence[type], read_only_args: Sequence[np.ndarray]
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        registers = {f"%r{i}": words.copy() for i, words in enumerate(read_only_args)}
        with np.errstate(all="ignore"):
            run(re.sub(r"\{\$([rw]\d+)\}", r"%\1", code), registers, lanes=read_only_args[0].size)
        written = tuple(registers[f"%w{i}"] for i in range(len(write_only_types)))
        return written if len(written) > 1 else written[0]

    monkeypatch.setitem(OPERATIONS, "rcp.approx.ftz.f32", rcp)
    monkeypatch.setattr(nvfp4, "cute", SimpleNamespace(arch=SimpleNamespace(inline_ptx=inline_ptx)))
    return nvfp4


def rcp(x: np.ndarray) -> np.ndarray:
    values = torch.from_numpy(x.copy().view(np.float32))
    return reference.rcp_approx_ftz(values).numpy().view(np.uint32)


@pytest.mark.parametrize("group", cases.ADVERSARIAL)
def test_block_functions_equal_the_reference(nvfp4: ModuleType, group: str) -> None:
    """All cases of a group at once: one block and its own tensor scale a thread."""
    found = list(cases.ADVERSARIAL[group]())
    expected = [reference.quantise(case.blocks, case.scale) for case in found]  # a block a row
    q = torch.cat([q for q, _ in expected])
    scale_bytes = torch.cat([reference.unswizzle(sf, len(q), 1) for q, sf in expected])

    words = torch.cat([case.blocks for case in found]).view(torch.int32).numpy().view(np.uint32)
    x = [words[:, i] for i in range(BLOCK // 2)]
    scale = torch.cat([case.scale.expand(len(case.blocks)) for case in found]).numpy().view(np.uint32)
    *packed, scale_byte = nvfp4.quantise_block(x, scale, rcp(scale))
    np.testing.assert_array_equal(scale_byte, scale_bytes[:, 0].numpy())
    np.testing.assert_array_equal(np.stack(packed, 1).view(np.uint8), q.numpy())

    decoded = reference.decode(q, scale_bytes).bfloat16()
    bf16 = np.stack(nvfp4.quantise_block_to_bf16(x, scale, rcp(scale)), 1)
    np.testing.assert_array_equal(bf16.view(np.int16), decoded.view(torch.int16).numpy())


def test_piece_rows_are_those_of_one_sector_of_scales(nvfp4: ModuleType) -> None:
    rows = [nvfp4.piece_row(lane) for lane in range(32)]
    offsets = [row % 32 * 16 + row // 32 * 4 + lane % 4 for lane, row in enumerate(rows)]
    assert offsets == list(range(32))
