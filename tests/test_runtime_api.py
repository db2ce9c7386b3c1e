"""The public API on CPU tensors, under torch.compile and torch.export, and what importing it costs."""

from __future__ import annotations

import ast
import copy
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ringfp4 import runtime
from ringfp4.errors import InputError
from ringfp4.runtime import api, reference
from ringfp4.runtime.hopper_layout import hopper_bytes

N, K = 40, 96


@pytest.fixture(scope="module")
def weight() -> runtime.Nvfp4Weight:
    generator = torch.Generator().manual_seed(1)
    return runtime.Nvfp4Weight.from_bf16(torch.randn(N, K, generator=generator).bfloat16())


def activation(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).bfloat16()


def test_cpu_is_the_reference(weight: runtime.Nvfp4Weight) -> None:
    x, bias, scale = activation(7, K), activation(N), torch.tensor(0.001)
    for options in ({}, {"scale_rule": "bf16"}, {"scale": scale}, {"bias": bias}):
        expected = reference.linear(
            x, weight, options.get("scale"), options.get("scale_rule", "fp32"), options.get("bias")
        )
        for schedule in ("auto", "prepacked", "ring", "fused"):
            assert torch.equal(runtime.ring_linear(x, weight, schedule=schedule, **options), expected)


def test_leading_dimensions_and_strided_rows(weight: runtime.Nvfp4Weight) -> None:
    x = activation(2, 3, K)
    y = runtime.ring_linear(x, weight)
    assert y.shape == (2, 3, N)
    assert torch.equal(y.view(6, N), runtime.ring_linear(x.view(6, K), weight))
    wide = activation(5, 3 * K)
    view = wide[:, K : 2 * K]
    assert torch.equal(runtime.ring_linear(view, weight), runtime.ring_linear(view.contiguous(), weight))
    assert runtime.ring_linear(activation(K), weight).shape == (N,)


def test_out_is_filled_and_returned(weight: runtime.Nvfp4Weight) -> None:
    x, out = activation(4, K), torch.empty(4, N, dtype=torch.bfloat16)
    assert runtime.ring_linear(x, weight, out=out) is out
    assert torch.equal(out, runtime.ring_linear(x, weight))


def test_a_weight_with_rows_of_padding() -> None:
    """N = 40 as Comfy stores it, in 48 rows."""
    good = runtime.Nvfp4Weight.from_bf16(activation(N, K))
    padded = torch.cat([good.qdata, torch.full((8, K // 2), 0x77, dtype=torch.uint8)])
    w = runtime.Nvfp4Weight(padded, good.block_scale, good.tensor_scale, (N, K))
    x = activation(3, K)
    assert torch.equal(runtime.ring_linear(x, w), runtime.ring_linear(x, good))


def test_comfys_weight() -> None:
    tensor = pytest.importorskip("comfy_kitchen.tensor")
    x = activation(9, 64)
    for n in (64, 40):  # 40: padded to 48 rows
        bf16 = activation(n, 64)
        qt = tensor.QuantizedTensor.from_float(bf16, "TensorCoreNVFP4Layout")
        w = runtime.Nvfp4Weight.from_comfy(qt)
        assert w.qdata.data_ptr() == qt._qdata.data_ptr()  # shared, not copied
        ours = runtime.Nvfp4Weight.from_bf16(bf16, "bf16")  # the rule that Comfy uses
        assert (w.n, w.k) == (n, 64)
        assert torch.equal(runtime.ring_linear(x, w), runtime.ring_linear(x, ours))
    with pytest.raises(InputError, match="transposed"):
        runtime.Nvfp4Weight.from_comfy(qt.t())
    with pytest.raises(InputError, match=r"x is not a plain tensor.*got QuantizedTensor"):
        runtime.ring_linear(qt, w)


@pytest.mark.parametrize("fallback", ["reference", "dequantise"])
def test_fallbacks_compute_the_same_linear(weight: runtime.Nvfp4Weight, fallback: str) -> None:
    """They run on a CUDA device that no artefact serves; the arithmetic is PyTorch's on any device."""
    x, bias = activation(2, 5, K), activation(N)
    for scale in (None, torch.tensor(0.002)):
        out = torch.empty(2, 5, N, dtype=torch.bfloat16)
        api._fall_back(fallback, x, weight, scale, "fp32", bias, out)
        exact = runtime.ring_linear(x, weight, scale=scale, bias=bias)
        if fallback == "reference":
            assert torch.equal(out, exact)
        else:  # the sum is rounded to BF16 before alpha, and again after
            acc = (exact.float() - bias.float()).abs()
            assert bool(((out.float() - exact.float()).abs() <= 2**-8 * (acc + 2 * exact.abs())).all())


@pytest.mark.parametrize("fallback", ["reference", "dequantise"])
def test_autocast_changes_nothing(fallback: str) -> None:
    """Sums of 60,000 and more, which float16 does not hold."""
    x, weight = 100 * activation(5, K), runtime.Nvfp4Weight.from_bf16(activation(N, K))
    plain, under_autocast = (torch.empty(5, N, dtype=torch.bfloat16) for _ in range(2))
    api._fall_back(fallback, x, weight, None, "fp32", None, plain)
    with torch.autocast("cpu", dtype=torch.float16):
        api._fall_back(fallback, x, weight, None, "fp32", None, under_autocast)
    assert torch.equal(under_autocast, plain)


def test_weight_to_a_device(weight: runtime.Nvfp4Weight) -> None:
    assert weight.to("cpu") is weight
    assert weight.to("cpu:0") is weight  # as "cuda" may be "cuda:0"
    moved = weight.to("meta")
    assert (moved.n, moved.k, moved.device.type) == (N, K, "meta")


def test_a_weight_made_from_parameters_has_no_gradient() -> None:
    x, bf16 = activation(3, K), torch.nn.Parameter(activation(N, K))
    weight = runtime.Nvfp4Weight.from_bf16(bf16)
    qdata, block_scale = weight.originals()
    again = runtime.Nvfp4Weight(qdata, block_scale, torch.nn.Parameter(weight.tensor_scale))
    for w in (weight, again):
        assert not w.tensor_scale.requires_grad
        assert not runtime.ring_linear(x, w).requires_grad


def test_a_weight_is_copied_and_saved(weight: runtime.Nvfp4Weight) -> None:
    """A loaded one is where its tensors are, not where they were."""
    x, file = activation(3, K), io.BytesIO()
    assert torch.equal(runtime.ring_linear(x, copy.deepcopy(weight)), runtime.ring_linear(x, weight))
    torch.save(weight, file)
    for device in ("cpu", "meta"):
        file.seek(0)
        loaded = torch.load(file, map_location=device, weights_only=False)
        assert loaded.device.type == loaded.qdata.device.type == device


def test_compile_of_ring_linear(weight: runtime.Nvfp4Weight) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        y = runtime.ring_linear(x, weight, scale_rule="bf16", fallback="dequantise")
        return torch.relu(y) + 1

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for rows in (3, 5):
        x = activation(rows, K)
        assert torch.equal(compiled(x), block(x))


def test_compile_refuses_what_it_cannot_see(weight: runtime.Nvfp4Weight) -> None:
    def block(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return runtime.ring_linear(x, weight, out=out)

    compiled = torch.compile(block, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="out and ring cannot be compiled"):
        compiled(activation(3, K), activation(3, N))


@pytest.mark.parametrize("name", ["x", "scale", "bias"])
def test_compile_refuses_gradients(weight: runtime.Nvfp4Weight, name: str) -> None:
    """A compiled graph would compute y and silently no gradient."""

    def block(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return runtime.ring_linear(x, weight, scale=scale, bias=bias)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    call = {"x": activation(3, K), "scale": torch.tensor(0.01), "bias": activation(N)}
    expected = block(**call)
    call[name].requires_grad_()
    with pytest.raises(Exception, match="must not require a gradient"):
        compiled(**call)
    with torch.no_grad():
        assert torch.equal(compiled(**call), expected)


class Module(torch.nn.Module):
    def __init__(self, weight: runtime.Nvfp4Weight) -> None:
        super().__init__()
        self.register_buffer("qdata", weight.qdata)
        self.register_buffer("block_scale", weight.block_scale)
        self.register_buffer("tensor_scale", weight.tensor_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.ringfp4.linear(
            x, self.qdata, self.block_scale, self.tensor_scale, N, None, "fp32", None, "auto"
        )


def test_export_with_dynamic_rows(weight: runtime.Nvfp4Weight) -> None:
    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(Module(weight), (activation(4, K),), dynamic_shapes=({0: rows},))
    assert [n for n in exported.graph.nodes if "ringfp4.linear" in str(n.target)]
    x = activation(11, K)
    assert torch.equal(exported.module()(x), runtime.ring_linear(x, weight))


def test_operator_is_well_behaved(weight: runtime.Nvfp4Weight) -> None:
    """PyTorch's own checks of the schema, the fake implementation and tracing."""
    arguments = (activation(3, K), *weight.operands(), weight.tensor_scale, N, None, "fp32", None, "auto")
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.ringfp4.linear.default, arguments, test_utils=utilities)


def test_operator_checks_its_arguments(weight: runtime.Nvfp4Weight) -> None:
    x, data, scales, scale = activation(3, K), *weight.operands(), weight.tensor_scale
    with pytest.raises(InputError, match="unknown schedule"):
        torch.ops.ringfp4.linear(x, data, scales, scale, N, None, "fp32", None, "quick")
    with pytest.raises(InputError, match="does not hold the weight"):
        torch.ops.ringfp4.linear(x[:, :64], data, scales, scale, N, None, "fp32", None, "auto")
    prepared = torch.zeros(hopper_bytes(64, 128), dtype=torch.uint8)
    with pytest.raises(InputError, match=r"unusable tensor_scale.*float64"):
        torch.ops.ringfp4.linear(
            activation(3, 128), prepared, None, scale.double(), 64, None, "fp32", None, "auto"
        )


def in_process(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_importing_the_runtime_brings_neither_compiler_nor_comfy() -> None:
    script = """
import sys
import torch
before = set(sys.modules)
from ringfp4 import runtime
runtime.info()
foreign = ("cutlass", "comfy_kitchen", "cuda", "ringfp4.dsl", "ringfp4.build_cubins")
print([name for name in foreign if name in sys.modules.keys() - before])
"""
    assert in_process(script) == "[]\n"


def test_info_without_a_driver() -> None:
    script = """
import os
os.environ["RINGFP4_LIBCUDA"] = "/nowhere/libcuda.so"
from ringfp4 import runtime
report = runtime.info()
assert "no CUDA driver" in report["driver"], report
assert report["devices"] == []
"""
    assert in_process(script) == ""


def test_the_library_prints_nothing(repository: Path) -> None:
    for file in sorted((repository / "runtime").glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], file
    for file in sorted((repository / "runtime" / "src").glob("*")):
        assert "printf" not in file.read_text(), file
        assert "std::cout" not in file.read_text(), file
