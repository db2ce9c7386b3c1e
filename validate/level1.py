"""Level 1: the quantiser on adversarial values, byte for byte against Comfy Kitchen on this device."""

from __future__ import annotations

import torch
from ringfp4.runtime import lowlevel, reference
from ringfp4.validate import comfy, quantiser_cases, reciprocal
from ringfp4.validate.gates import ROLES, Context, Gate, Outcome, different, time_ms

_RANDOM_VALUES = 1 << 23  # of each distribution
_TIMED_ROWS = 2048


def _packed(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Our kernel's q [M, K/2] and swizzled scales; None where it packs into another format."""
    q, sf = lowlevel.pack(x, scale)
    return None if sf is None else (q[: len(x)], sf)


def _packing_k(context: Context) -> int:
    """A K for which a pack kernel is loaded."""
    assert context.artifacts is not None
    return min(entry.k for entry in context.artifacts.table.entries if entry.kind == "pack")


def _comfy_bytes(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Comfy's bytes for x with rows filled up to 16 by zeros, without the rows added."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 16))
    q, sf = comfy.quantise(padded, scale)
    scales = reference.unswizzle(sf, len(x), x.shape[1] // reference.BLOCK)
    return q[: len(x)], reference.swizzle(scales)


def _reciprocal(_: Context) -> Outcome:
    count = reciprocal.count_differences()
    return Outcome(count == 0, f"{count} of 2^32 arguments give another result than the table")


def _scale_rules(_: Context) -> Outcome:
    """Every finite BF16 amax, as PyTorch computes both rules on this device."""
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    theirs = {"fp32": amax.cuda().float() / 2688, "bf16": (amax.cuda() / 2688.0).float()}
    wrong = 0
    for rule, expected in theirs.items():
        ours = torch.stack([reference.tensor_scale(a.reshape(1), rule) for a in amax])
        wrong += different(ours, expected.cpu())
    return Outcome(wrong == 0, f"{wrong} of {2 * len(amax)} scales differ from PyTorch's")


def _compare(context: Context | None, x: torch.Tensor, scale: torch.Tensor) -> int:
    """Bytes in which Comfy differs from our kernel, or from the reference if there is no context."""
    ours = reference.quantise(x, scale) if context is None else _packed(x, scale)
    if ours is None:
        raise RuntimeError("the loaded pack kernel does not write NVFP4")
    return sum(different(a, b) for a, b in zip(ours, _comfy_bytes(x, scale), strict=True))


def _adversarial(context: Context | None) -> Outcome:
    k = 256 if context is None else _packing_k(context)
    wrong, cases = 0, 0
    for generate in quantiser_cases.ADVERSARIAL.values():
        for case in generate():
            wrong += _compare(context, case.rows(k).cuda(), case.scale.cuda())
            cases += 1
    return Outcome(wrong == 0, f"{wrong} differing bytes in {cases} cases")


def _random(context: Context | None) -> Outcome:
    k = 256 if context is None else _packing_k(context)
    wrong, values = 0, 0
    for seed, kind in enumerate(quantiser_cases.DISTRIBUTIONS):
        count = _RANDOM_VALUES // k * k
        x = quantiser_cases.random_values(kind, count, seed, "cuda").reshape(-1, k)
        for rule in reference.SCALE_RULES:
            wrong += _compare(context, x, reference.tensor_scale(x[x.isfinite()], rule))
            values += count
    return Outcome(wrong == 0, f"{wrong} differing bytes in {values} values")


def _kernel_only(context: Context) -> str:
    """Why our pack kernel cannot be compared with Comfy's bytes; empty if it can."""
    assert context.artifacts is not None
    archs = {entry.arch for entry in context.artifacts.table.entries if entry.kind == "pack"}
    return "the pack kernel of sm_90a writes BF16 values, not NVFP4" if archs == {"sm_90a"} else ""


def _pack_adversarial(context: Context) -> Outcome:
    reason = _kernel_only(context)
    return Outcome(None, reason) if reason else _adversarial(context)


def _pack_random(context: Context) -> Outcome:
    reason = _kernel_only(context)
    return Outcome(None, reason) if reason else _random(context)


def _timing(context: Context) -> Outcome:
    """Not a judgement: Comfy's quantiser beside ours, both given the tensor scale."""
    n, k = ROLES["qkv"]
    if not context.schedules(n, k):
        return Outcome(None, "no kernels for qkv are loaded")
    x = torch.randn(_TIMED_ROWS, k, device="cuda").bfloat16()
    scale = reference.tensor_scale(x)
    slots = torch.empty(lowlevel.slot_bytes(_TIMED_ROWS, k), dtype=torch.uint8, device="cuda")
    ours = time_ms(lambda: lowlevel.pack(x, scale, slots), repeats=20)
    theirs = time_ms(lambda: comfy.quantise(x, scale), repeats=20)
    return Outcome(True, f"{_TIMED_ROWS} x {k}", {"pack ms": ours, "comfy ms": theirs})


GATES = (
    Gate(1, "reciprocal unit equals the table of the reference", ("cuda",), _reciprocal),
    Gate(1, "both scale rules equal PyTorch's on this device", ("cuda",), _scale_rules),
    Gate(1, "reference = Comfy's quantiser, adversarial cases", ("comfy",), lambda _: _adversarial(None)),
    Gate(1, "reference = Comfy's quantiser, random values", ("comfy",), lambda _: _random(None)),
    Gate(1, "pack kernel = Comfy's quantiser, adversarial cases", ("kernels", "comfy"), _pack_adversarial),
    Gate(1, "pack kernel = Comfy's quantiser, random values", ("kernels", "comfy"), _pack_random),
    Gate(1, "quantiser timed beside Comfy's", ("kernels", "comfy"), _timing),
)
