"""The CPU reference against bytes recorded from Comfy Kitchen 0.2.31 on an H200."""

from __future__ import annotations

from pathlib import Path

import make_golden
import numpy as np
import pytest
import torch
from ringfp4.runtime import reference
from ringfp4.validate import quantiser_cases as cases


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / "data" / "golden_quantiser.npz") as file:
        return dict(file)


def check(found: list[cases.Case], q: np.ndarray, sf: np.ndarray) -> None:
    """All blocks of the cases, in order, against Comfy's q [B, 8] and block scales [B]."""
    start = 0
    for case in found:
        part = slice(start, start + len(case.blocks))
        ours_q, ours_sf = reference.quantise(case.blocks, case.scale)
        ours_sf = reference.unswizzle(ours_sf, len(case.blocks), 1)[:, 0]
        bad = torch.from_numpy((ours_q.numpy() != q[part]).any(1) | (ours_sf.numpy() != sf[part]))
        first = case.blocks[bad][:1]
        assert not bad.any(), f"{case.name}: {int(bad.sum())} blocks differ, the first is {first}"
        start = part.stop
    assert start == len(sf) == len(q)


@pytest.mark.parametrize("group", cases.ADVERSARIAL)
def test_adversarial_cases_equal_comfys_recorded_bytes(group: str, golden: dict[str, np.ndarray]) -> None:
    found = list(cases.ADVERSARIAL[group]())
    assert np.array_equal(make_golden.input_digest(found), golden[f"{group}_digest"]), "other inputs"
    check(found, golden[f"{group}_q"], golden[f"{group}_sf"])


def test_random_values_equal_comfys_recorded_bytes(golden: dict[str, np.ndarray]) -> None:
    blocks = torch.from_numpy(golden["random_x"]).view(torch.bfloat16)
    scales = torch.from_numpy(golden["random_scale"])
    kinds = [kind for kind in cases.DISTRIBUTIONS for _ in reference.SCALE_RULES]
    found = [
        cases.Case(kind, blocks[i // 2], scale)
        for i, (kind, scale) in enumerate(zip(kinds, scales, strict=True))
    ]
    check(found, golden["random_q"], golden["random_sf"])


def test_recorded_bytes_tell_the_reciprocals_apart(
    golden: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With correctly rounded reciprocals the comparison must fail: the vectors reach the difference."""
    found = list(cases.block_scale_boundaries())
    monkeypatch.setattr(reference, "rcp_approx_ftz", lambda x: reference._ftz(1.0 / reference._ftz(x)))
    with pytest.raises(AssertionError, match="blocks differ"):
        check(found, golden["boundaries_q"], golden["boundaries_sf"])
