"""An NVFP4 weight as Comfy Kitchen stores it, and the layout that a kernel wants it in."""

from __future__ import annotations

from typing import Any

import torch
from ringfp4.errors import InputError, RingError
from ringfp4.runtime import reference, streams
from ringfp4.runtime.hopper_layout import hopper_bytes
from ringfp4.runtime.plan import Plan, round_up


class Nvfp4Weight:
    """W [N, K] in E2M1 with block scales; y = x W^T. Immutable.

    ``qdata``: uint8 [N or more, K/2], even column in the high nibble. ``block_scale``:
    float8_e4m3fn or uint8, N padded to 128 times K/16 padded to 4 elements of any shape, swizzled
    (docs/numerics.md). ``tensor_scale``: float32, one element. All contiguous, on one device.
    ``shape``: (N, K) where ``qdata`` has rows of padding. Raises InputError.
    """

    _transient = False  # made for one call of the operator: nothing is worth preparing

    def __init__(
        self,
        qdata: torch.Tensor,
        block_scale: torch.Tensor,
        tensor_scale: torch.Tensor,
        shape: tuple[int, int] | None = None,
    ) -> None:
        _require("qdata", qdata, (torch.uint8,), "uint8 [N, K/2]", dims=2)
        self.n, self.k = shape or (qdata.shape[0], 2 * qdata.shape[1])
        if self.n % 8 or self.k % 32 or self.n <= 0 or self.k <= 0:
            raise InputError(
                "unusable weight shape", expected="N a multiple of 8, K of 32", got=f"N={self.n}, K={self.k}"
            )
        if qdata.shape[0] < self.n or 2 * qdata.shape[1] != self.k:
            raise InputError(
                "qdata does not hold the weight",
                expected=f"uint8 [at least {self.n}, {self.k // 2}]",
                got=str(list(qdata.shape)),
            )
        scales = round_up(self.n, 128) * round_up(self.k // 16, 4)
        dtypes = (torch.float8_e4m3fn, torch.uint8)
        _require("block_scale", block_scale, dtypes, f"float8_e4m3fn, {scales} elements", numel=scales)
        if block_scale.device != qdata.device:
            raise InputError(
                "block_scale is elsewhere", expected=str(qdata.device), got=str(block_scale.device)
            )
        _require_scale(tensor_scale, qdata.device)
        self.qdata: torch.Tensor | None = qdata[: self.n]
        self.block_scale: torch.Tensor | None = block_scale.view(torch.uint8)
        self.tensor_scale = tensor_scale.detach()
        self.device = qdata.device
        self.prepared: torch.Tensor | None = None

    @classmethod
    def from_comfy(cls, qt: Any) -> Nvfp4Weight:
        """From Comfy Kitchen's ``QuantizedTensor`` of layout TensorCoreNVFP4Layout; shares its memory.

        Raises InputError for another layout, a transposed one, or K that is not a multiple of 32.
        """
        params, qdata = getattr(qt, "_params", None), getattr(qt, "_qdata", None)
        if params is None or qdata is None or not hasattr(params, "block_scale"):
            raise InputError(
                "not an NVFP4 weight of Comfy Kitchen",
                expected="a QuantizedTensor of TensorCoreNVFP4Layout",
                got=type(qt).__name__,
            )
        if getattr(params, "transposed", False):
            raise InputError(
                "the weight is transposed", expected="[N, K] as stored", remedy="pass weight.t()"
            )
        n, k = params.orig_shape
        return cls(qdata, params.block_scale, params.scale, (n, k))

    @classmethod
    def from_bf16(cls, weight: torch.Tensor, scale_rule: str = "fp32") -> Nvfp4Weight:
        """Quantise BF16 [N, K] on the device it is on, by the contract's quantiser. Raises InputError.

        A parameter may be passed: what is made from it has no gradient and does not keep it alive.
        """
        if not isinstance(weight, torch.Tensor):
            raise InputError("weight is not a tensor", expected="BF16 [N, K]", got=type(weight).__name__)
        if weight.dim() != 2 or weight.dtype is not torch.bfloat16 or weight.numel() == 0:
            got = f"{weight.dtype} {list(weight.shape)}"
            raise InputError("unusable weight", expected="torch.bfloat16 [N, K]", got=got)
        weight = weight.detach()
        scale = reference.tensor_scale(weight, scale_rule)
        return cls(*reference.quantise(weight.contiguous(), scale), scale)

    def to(self, device: torch.device | str | int) -> Nvfp4Weight:
        """The same weight on another device; self if it is there. Raises RingError without originals."""
        tensor_scale = self.tensor_scale.to(device)
        if tensor_scale.device == self.device:  # "cuda" may be this weight's "cuda:0"
            return self
        qdata, block_scale = self.originals()
        return Nvfp4Weight(qdata.to(device), block_scale.to(device), tensor_scale, (self.n, self.k))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """``torch.load(map_location=...)`` puts the tensors elsewhere than they were saved."""
        self.__dict__.update(state)
        self.device = self.tensor_scale.device

    def originals(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(qdata, block_scale). Raises RingError after ``prepare(keep_original=False)``."""
        if self.qdata is None or self.block_scale is None:
            raise RingError(
                "the original weight was given up", remedy="use prepare(keep_original=True), the default"
            )
        return self.qdata, self.block_scale

    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(data, block scales) as ``torch.ops.ringfp4.linear`` takes them; see ``prepare``."""
        if self.prepared is not None:
            return self.prepared, None
        return self.originals()

    def operands_for(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(data, block scales) in the layout of a plan's kernels, made now if need be.

        Raises RingError where it must not be made now: in a capture and in the operator.
        """
        if plan.repack is None:
            return self.originals()
        if self.prepared is None:
            self.prepared = self._repacked()
        return self.prepared, None

    @classmethod
    def from_operands(
        cls, data: torch.Tensor, block_scale: torch.Tensor | None, tensor_scale: torch.Tensor, n: int, k: int
    ) -> Nvfp4Weight:
        """Inverse of ``operands``. Raises InputError."""
        if block_scale is not None:
            weight = cls(data, block_scale, tensor_scale, (n, k))
            weight._transient = True
            return weight
        size = hopper_bytes(n, k)
        _require("data", data, (torch.uint8,), f"uint8 [{size}]", numel=size)
        _require_scale(tensor_scale, data.device)
        weight = cls.__new__(cls)
        weight.n, weight.k, weight.device = n, k, data.device
        weight.qdata = weight.block_scale = None
        weight.tensor_scale, weight.prepared = tensor_scale, data
        return weight

    def prepare(self, keep_original: bool = True) -> None:
        """Make the layout that this device's kernels want, if it is not Comfy's (sm_90a only).

        ``ring_linear`` does so at a weight's first call, except in a graph's capture or under
        torch.compile. The copy belongs to this object; ``keep_original=False`` gives up the
        original tensors. Waits for the device. Raises UnservedError, RingError, DriverError.
        """
        from ringfp4.runtime import devices

        if self.device.type != "cuda":
            return
        ordinal = self.device.index
        lane = devices.artifacts(ordinal).lane(streams.current(ordinal))
        if lane.plan(self.n, self.k, 1, "auto").repack is not None and self.prepared is None:
            self.prepared = self._repacked()
        if self.prepared is not None and not keep_original:
            self.qdata = self.block_scale = None

    def _repacked(self) -> torch.Tensor:
        """The weight in the Hopper layout (hopper_layout.py), complete when this returns."""
        from ringfp4.runtime import devices

        ordinal = self.device.index
        loaded, stream = devices.artifacts(ordinal), streams.current(ordinal)
        if self._transient or loaded.context.capturing(stream):
            raise RingError(
                "this weight is not in the layout that the device's kernels read",
                remedy="call weight.prepare() before a graph's capture, torch.compile or operands()",
            )
        qdata, block_scale = self.originals()
        packed = torch.empty(hopper_bytes(self.n, self.k), dtype=torch.uint8, device=self.device)
        loaded.single("repack", self.n, self.k).sequence.run(
            None,
            stream,
            m=self.n,
            w=qdata.data_ptr(),
            w_sf=block_scale.data_ptr(),
            packed=packed.data_ptr(),
        )
        torch.cuda.current_stream(self.device).synchronize()  # any stream may use it from now on
        return packed


def _require_scale(tensor_scale: torch.Tensor, device: torch.device) -> None:
    _require("tensor_scale", tensor_scale, (torch.float32,), "one float32", numel=1)
    if tensor_scale.device != device:
        raise InputError("tensor_scale is elsewhere", expected=str(device), got=str(tensor_scale.device))


def _require(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    expected: str,
    *,
    dims: int | None = None,
    numel: int | None = None,
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{name} is not a tensor", expected=expected, got=type(tensor).__name__)
    fits = dims in (None, tensor.dim()) and numel in (None, tensor.numel())
    if tensor.dtype not in dtypes or not fits:
        raise InputError(f"unusable {name}", expected=expected, got=f"{tensor.dtype} {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise InputError(f"{name} is not contiguous", remedy=f"pass {name}.contiguous()")
    if tensor.numel() > 1 and tensor.data_ptr() % 16:
        raise InputError(
            f"{name} is not aligned", expected="an address divisible by 16", remedy=f"pass {name}.clone()"
        )
