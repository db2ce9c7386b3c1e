"""Every argument of ``ring_linear`` in every wrong way: our error, before anything happens."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ringfp4.errors import InputError, RingFP4Error
from ringfp4.runtime import Nvfp4Weight, Ring, api, ring_linear

M, N, K = 5, 40, 64
BF16 = torch.bfloat16
Arguments = dict[str, Any]


def weight(n: int = N, k: int = K) -> Nvfp4Weight:
    generator = torch.Generator().manual_seed(1)
    return Nvfp4Weight.from_bf16(torch.randn(n, k, generator=generator).bfloat16())


def arguments() -> Arguments:
    generator = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(M, K, generator=generator).bfloat16(),
        "w": weight(),
        "scale": torch.tensor(0.01),
        "bias": torch.ones(N, dtype=BF16),
        "out": torch.full((M, N), 7.0, dtype=BF16),
    }


def expired(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory was taken away."""
    tensor.untyped_storage().resize_(0)
    return tensor


def misaligned(*shape: int) -> torch.Tensor:
    size = int(torch.tensor(shape).prod())
    return torch.zeros(size + 1, dtype=BF16)[1:].view(shape)


def overlapping() -> Arguments:
    memory = torch.zeros(M * K, dtype=BF16)
    return {"x": memory.view(M, K), "out": memory[: M * N].view(M, N)}


def weight_without(name: str) -> Nvfp4Weight:
    w = weight()
    expired(getattr(w, name))
    return w


def elsewhere(w: Nvfp4Weight) -> Nvfp4Weight:
    w.device = torch.device("cuda:0")
    return w


class Wrapper(torch.Tensor):
    """Calls itself BF16 and holds something else, as Comfy Kitchen's QuantizedTensor."""

    @staticmethod
    def of(*shape: int) -> Wrapper:
        held = torch.zeros(shape, dtype=torch.uint8)
        made = torch.Tensor._make_wrapper_subclass(Wrapper, shape, dtype=BF16)
        made.held = held
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def on_gpu() -> Any:
    """What the checks look at first in a ring on a CUDA device."""
    ring = Ring.__new__(Ring)
    ring.device = 0
    return ring


# name -> (what replaces good arguments, what the message says)
BAD: dict[str, tuple[Callable[[], Arguments], str]] = {
    "x list": (lambda: {"x": [1.0]}, "x is not a tensor.*got list"),
    "x wrapper": (lambda: {"x": Wrapper.of(M, K)}, r"x is not a plain tensor.*Wrapper.*x.dequantize\(\)"),
    "x float32": (lambda: {"x": torch.zeros(M, K)}, "wrong dtype.*torch.bfloat16.*got torch.float32"),
    "x rank 0": (lambda: {"x": torch.zeros((), dtype=BF16)}, r"wrong shape.*\[\.\.\., 64\].*got \[\]"),
    "x columns": (lambda: {"x": torch.zeros(M, K + 1, dtype=BF16)}, r"wrong shape.*got \[5, 65\]"),
    "x transposed": (lambda: {"x": torch.zeros(K, M, dtype=BF16).T}, r"without a copy.*strides \[1, 5\]"),
    "x 3-D strided": (lambda: {"x": torch.zeros(2, M, 2 * K, dtype=BF16)[..., :K]}, "without a copy"),
    "x odd stride": (lambda: {"x": torch.zeros(M, K + 1, dtype=BF16)[:, :K]}, "rows of x.*got 65"),
    "x expanded": (lambda: {"x": torch.zeros(1, K, dtype=BF16).expand(M, K)}, "rows of x.*got 0"),
    "x misaligned": (lambda: {"x": misaligned(M, K)}, "x is not aligned.*divisible by 16"),
    "x expired": (lambda: {"x": expired(torch.zeros(M, K, dtype=BF16))}, "x has no memory"),
    "x meta": (lambda: {"x": torch.zeros(M, K, dtype=BF16, device="meta")}, "unusable device.*got meta"),
    "x gradient": (lambda: {"x": torch.zeros(M, K, dtype=BF16, requires_grad=True)}, "requires a gradient"),
    "scale gradient": (lambda: {"scale": torch.nn.Parameter(torch.ones(()))}, "scale requires a gradient"),
    "bias gradient": (
        lambda: {"bias": torch.nn.Parameter(torch.ones(N, dtype=BF16))},
        "bias requires a grad",
    ),
    "w tensor": (lambda: {"w": torch.zeros(N, K)}, "w is not a weight.*Nvfp4Weight.*got Tensor"),
    "w K": (lambda: {"w": weight(N, 2 * K)}, r"wrong shape.*\[\.\.\., 128\]"),
    "w device": (lambda: {"w": elsewhere(weight())}, "different devices.*expected cpu.*got cuda:0"),
    "w data expired": (lambda: {"w": weight_without("qdata")}, "weight's qdata has no memory"),
    "w scales expired": (lambda: {"w": weight_without("block_scale")}, "weight's block_scale has no memory"),
    "w scale expired": (lambda: {"w": weight_without("tensor_scale")}, "weight's tensor_scale has no memory"),
    "scale number": (lambda: {"scale": 0.5}, "scale is not a tensor.*got float"),
    "scale float64": (lambda: {"scale": torch.tensor(0.5).double()}, "unusable scale.*float32.*float64"),
    "scale two": (lambda: {"scale": torch.ones(2)}, r"one element; got torch.float32 \[2\]"),
    "scale device": (lambda: {"scale": torch.ones((), device="meta")}, "scale is elsewhere.*got meta"),
    "scale negative": (lambda: {"scale": torch.tensor(-1.0)}, "not negative; got -1.0"),
    "scale NaN": (lambda: {"scale": torch.tensor(float("nan"))}, "got nan"),
    "scale expired": (lambda: {"scale": expired(torch.ones(()))}, "scale has no memory"),
    "bias list": (lambda: {"bias": [0.0]}, "bias is not a tensor"),
    "bias wrapper": (lambda: {"bias": Wrapper.of(N)}, "bias is not a plain tensor"),
    "out wrapper": (lambda: {"out": Wrapper.of(M, N)}, "out is not a plain tensor"),
    "bias float32": (lambda: {"bias": torch.zeros(N)}, "unusable bias.*got torch.float32"),
    "bias size": (lambda: {"bias": torch.zeros(N + 1, dtype=BF16)}, r"bfloat16 \[40\]; got .*\[41\]"),
    "bias rank": (lambda: {"bias": torch.zeros(1, N, dtype=BF16)}, r"got .*\[1, 40\]"),
    "bias strided": (lambda: {"bias": torch.zeros(2 * N, dtype=BF16)[::2]}, "bias is not contiguous"),
    "bias misaligned": (lambda: {"bias": misaligned(N)}, "bias is not aligned"),
    "bias device": (lambda: {"bias": torch.zeros(N, dtype=BF16, device="meta")}, "bias is elsewhere"),
    "bias expired": (lambda: {"bias": expired(torch.zeros(N, dtype=BF16))}, "bias has no memory"),
    "out list": (lambda: {"out": [0.0]}, "out is not a tensor"),
    "out float32": (lambda: {"out": torch.zeros(M, N)}, "unusable out.*got torch.float32"),
    "out shape": (lambda: {"out": torch.zeros(N, M, dtype=BF16)}, r"bfloat16 \[5, 40\]; got .*\[40, 5\]"),
    "out strided": (lambda: {"out": torch.zeros(M, 2 * N, dtype=BF16)[:, :N]}, "out is not contiguous"),
    "out misaligned": (lambda: {"out": misaligned(M, N)}, "out is not aligned"),
    "out device": (lambda: {"out": torch.zeros(M, N, dtype=BF16, device="meta")}, "out is elsewhere"),
    "out expired": (lambda: {"out": expired(torch.zeros(M, N, dtype=BF16))}, "out has no memory"),
    "out gradient": (lambda: {"out": torch.zeros(M, N, dtype=BF16, requires_grad=True)}, "gradient"),
    "out is x": (overlapping, "out and x overlap"),
    "ring number": (lambda: {"ring": 2048}, "ring is not a ring.*runtime.Ring.*got int"),
    "ring elsewhere": (lambda: {"ring": on_gpu()}, "ring is elsewhere.*expected cpu; got cuda:0"),
    "schedule": (lambda: {"schedule": "fast"}, "unknown schedule.*prepacked.*got 'fast'"),
    "schedule list": (lambda: {"schedule": []}, r"unknown schedule.*got \[\]"),
    "schedule kind": (lambda: {"schedule": "absmax"}, "unknown schedule"),
    "scale_rule": (lambda: {"scale_rule": "fp16"}, "unknown scale_rule.*fp32 or bf16.*got 'fp16'"),
    "fallback": (lambda: {"fallback": "cublas"}, "unknown fallback.*'dequantise'.*got 'cublas'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, message = BAD[name]
    call = arguments() | make()
    monkeypatch.setattr(api.reference, "linear", lambda *_a, **_k: pytest.fail("computed all the same"))
    out = call["out"] if name.startswith(("x", "w", "scale", "bias", "ring")) else None
    with pytest.raises(InputError, match=message):
        ring_linear(**call)
    if out is not None and "overlap" not in message:
        assert bool((out == 7.0).all())


def test_good_arguments_pass() -> None:
    """The table starts from a call that works."""
    call = arguments()
    assert ring_linear(**call) is call["out"]
    assert not bool((call["out"] == 7.0).any())


@pytest.mark.parametrize("shape", [(0, K), (3, 0, K)])
def test_no_rows_give_an_empty_result(shape: tuple[int, ...]) -> None:
    y = ring_linear(torch.zeros(shape, dtype=BF16), weight())
    assert y.shape == (*shape[:-1], N)
    assert y.dtype is BF16


BAD_WEIGHTS: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "qdata list": (lambda w: {"qdata": [1]}, "qdata is not a tensor.*got list"),
    "tensor scale number": (lambda w: {"tensor_scale": 1.0}, "tensor_scale is not a tensor.*got float"),
    "qdata dtype": (lambda w: {"qdata": w["qdata"].float()}, "unusable qdata"),
    "qdata rank": (lambda w: {"qdata": w["qdata"].flatten()}, "unusable qdata"),
    "qdata strided": (lambda w: {"qdata": w["qdata"].repeat(1, 2)[:, ::2]}, "qdata is not contiguous"),
    "N": (lambda w: {"qdata": w["qdata"][:39]}, "N a multiple of 8.*got N=39"),
    "K": (lambda w: {"qdata": w["qdata"][:, :24].contiguous()}, "K of 32; got N=40, K=48"),
    "shape": (lambda w: {"shape": (48, K)}, r"at least 48, 32.*got \[40, 32\]"),
    "empty": (lambda w: {"qdata": w["qdata"][:0]}, "unusable weight shape"),
    "scales size": (lambda w: {"block_scale": w["block_scale"][:64]}, "unusable block_scale.*512 elements"),
    "scales dtype": (lambda w: {"block_scale": w["block_scale"].float()}, "unusable block_scale"),
    "tensor scale": (lambda w: {"tensor_scale": torch.ones(2)}, "unusable tensor_scale"),
    "scale dtype": (lambda w: {"tensor_scale": torch.ones((), dtype=BF16)}, "unusable tensor_scale"),
    "devices": (lambda w: {"tensor_scale": torch.ones((), device="meta")}, "tensor_scale is elsewhere"),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_bad_weight(name: str) -> None:
    make, message = BAD_WEIGHTS[name]
    good = weight()
    parts = {"qdata": good.qdata, "block_scale": good.block_scale, "tensor_scale": good.tensor_scale}
    Nvfp4Weight(**parts)
    with pytest.raises(InputError, match=message):
        Nvfp4Weight(**(parts | make(parts)))


@pytest.mark.parametrize(
    "bad",
    [
        [[0.0] * 32] * 8,
        torch.zeros(8, 32),
        torch.zeros(8, dtype=BF16),
        torch.zeros(8, 24, dtype=BF16),
        torch.zeros(8, 0, dtype=BF16),
        torch.zeros(0, 32, dtype=BF16),
    ],
)
def test_bad_bf16_weight(bad: Any) -> None:
    with pytest.raises(InputError):
        Nvfp4Weight.from_bf16(bad)


def test_not_comfys_weight() -> None:
    with pytest.raises(InputError, match=r"QuantizedTensor of TensorCoreNVFP4Layout.*got Tensor"):
        Nvfp4Weight.from_comfy(torch.zeros(3))
    good = weight()
    params = SimpleNamespace(block_scale=good.block_scale, scale=good.tensor_scale, orig_shape=(N, K))
    params.transposed = True
    with pytest.raises(InputError, match="transposed"):
        Nvfp4Weight.from_comfy(SimpleNamespace(_params=params, _qdata=good.qdata))


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_rows": 100},
        {"capacity_rows": 0},
        {"capacity_rows": 128.0},
        {"capacity_rows": 1 << 62},
        {"k": 48},
        {"k": 1 << 62},
    ],
)
def test_bad_ring(options: Arguments) -> None:
    with pytest.raises(InputError, match="positive multiple"):
        Ring(**options)


def test_every_error_is_ours() -> None:
    assert issubclass(InputError, RingFP4Error)
    with pytest.raises(ValueError, match="unknown schedule"):
        ring_linear(**(arguments() | {"schedule": ""}))
