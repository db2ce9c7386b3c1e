"""Record Comfy Kitchen's bytes for the adversarial cases: ``python tests/make_golden.py OUT.npz``.

Needs a CUDA GPU and comfy-kitchen. The file holds Comfy's output for every case of
quantiser_cases and a digest of the inputs, which the tests generate again; the random
inputs are stored, since generators may differ between machines.
"""

from __future__ import annotations

import argparse
import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from ringfp4.files import write_atomically
from ringfp4.runtime import reference
from ringfp4.validate import comfy
from ringfp4.validate import quantiser_cases as cases

K = 256
RANDOM_BLOCKS = 512


def input_digest(group: list[cases.Case]) -> np.ndarray:
    """SHA-256 over the bit patterns of all blocks and scales, as uint8 [32]."""
    digest = hashlib.sha256()
    for case in group:
        digest.update(case.blocks.contiguous().view(torch.int16).numpy().tobytes())
        digest.update(case.scale.view(torch.int32).numpy().tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def random_group() -> list[cases.Case]:
    found = []
    for seed, kind in enumerate(cases.DISTRIBUTIONS):
        blocks = cases.random_values(kind, RANDOM_BLOCKS * cases.BLOCK, seed)
        for rule in reference.SCALE_RULES:
            scale = reference.tensor_scale(blocks[torch.isfinite(blocks)], rule)
            found.append(cases.Case(f"{kind}, rule {rule}", blocks, scale))
    return found


def comfy_bytes(group: list[cases.Case]) -> dict[str, np.ndarray]:
    """Comfy's q [B, 8] and block scales [B] for all blocks of the group, in order."""
    q_parts, sf_parts = [], []
    for case in group:
        x = case.rows(K).cuda()
        q, sf = comfy.quantise(x, case.scale.cuda())
        count = len(case.blocks)
        q_parts.append(q[: len(x)].reshape(-1, cases.BLOCK // 2)[:count].cpu())
        sf_parts.append(reference.unswizzle(sf, len(x), K // cases.BLOCK).flatten()[:count].cpu())
    return {"q": torch.cat(q_parts).numpy(), "sf": torch.cat(sf_parts).numpy()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    arrays = {}
    for name, generate in cases.ADVERSARIAL.items():
        group = list(generate())
        arrays |= {f"{name}_{key}": value for key, value in comfy_bytes(group).items()}
        arrays[f"{name}_digest"] = input_digest(group)
    group = random_group()
    arrays |= {f"random_{key}": value for key, value in comfy_bytes(group).items()}
    arrays["random_x"] = torch.stack([case.blocks for case in group[::2]]).view(torch.int16).numpy()
    arrays["random_scale"] = torch.stack([case.scale for case in group]).numpy()
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(out, content.getvalue())
    blocks = sum(len(array) for name, array in arrays.items() if name.endswith("_sf"))
    print(f"{out}: {out.stat().st_size} bytes, {blocks} blocks")


if __name__ == "__main__":
    main()
