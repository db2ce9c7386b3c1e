"""CUDA graphs, torch.compile and torch.export."""

from __future__ import annotations

import pytest
import runtime_cases
import torch
from gpu_checks import Gpu
from ringfp4 import runtime
from ringfp4.errors import RingError
from runtime_cases import Case, same_bits


@pytest.fixture(scope="module")
def case(gpu: Gpu) -> Case:
    return runtime_cases.make_case(gpu)


def capture(case: Case, x: torch.Tensor, **options: object) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.y(x, **options)
    return graph, y


@pytest.mark.parametrize("schedule", ["ring", "prepacked", "fused", "auto"])
def test_a_thousand_replays_with_changing_input(case: Case, schedule: str) -> None:
    if schedule not in (*case.schedules, "auto"):
        pytest.skip(f"no kernels for schedule {schedule}")
    m = 2500  # more than one chunk
    sources = [case.x(m, seed=i) * (i + 1) for i in range(5)]
    expected = [case.y(x, schedule="prepacked") for x in sources]
    x = torch.zeros_like(sources[0])
    graph, y = capture(case, x, schedule=schedule)
    good = torch.ones((), dtype=torch.bool, device="cuda")
    for i in range(1000):
        x.copy_(sources[i % 5])
        graph.replay()
        good &= same_bits(y, expected[i % 5])
    assert bool(good)


def test_two_graphs_at_once(case: Case) -> None:
    xs = [case.x(1000, seed=i) for i in range(2)]
    expected = [case.y(x) for x in xs]
    graphs = [capture(case, x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    good = [torch.ones((), dtype=torch.bool, device="cuda") for _ in xs]
    torch.cuda.synchronize()
    for _ in range(100):
        for i, ((graph, y), stream) in enumerate(zip(graphs, streams, strict=True)):
            with torch.cuda.stream(stream):
                y.zero_()
                graph.replay()
                good[i] &= same_bits(y, expected[i])
    torch.cuda.synchronize()
    assert all(bool(g) for g in good)


def test_a_graph_and_eager_calls_do_not_disturb_each_other(case: Case) -> None:
    xs = [case.x(1000, seed=i) for i in range(2)]
    expected = [case.y(x) for x in xs]
    graph, y = capture(case, xs[0])
    side = torch.cuda.Stream()
    good = torch.ones((), dtype=torch.bool, device="cuda")
    side_good = good.clone()
    torch.cuda.synchronize()
    for _ in range(100):
        graph.replay()
        with torch.cuda.stream(side):
            side_good &= same_bits(case.y(xs[1]), expected[1])
        good &= same_bits(y, expected[0])
    torch.cuda.synchronize()
    assert bool(good)
    assert bool(side_good)


def test_several_linears_in_one_graph(case: Case) -> None:
    x = case.x(700)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = [case.y(x), case.y(x * 2), case.y(x, schedule="prepacked")]
    graph.replay()
    assert bool(same_bits(ys[0], case.y(x)))
    assert bool(same_bits(ys[1], case.y(x * 2)))
    assert bool(same_bits(ys[2], case.y(x)))


def test_a_captured_ring_belongs_to_its_graph(case: Case) -> None:
    ring, x = runtime.Ring(capacity_rows=128, k=case.k), case.x(300)
    expected = case.y(x)
    graph, y = capture(case, x, ring=ring, schedule="ring")
    graph.replay()
    assert bool(same_bits(y, expected))
    with pytest.raises(RingError, match="belongs to a CUDA graph"):
        case.y(x, ring=ring, schedule="ring")
    with pytest.raises(RingError, match="belongs to a CUDA graph"):
        capture(case, x, ring=ring, schedule="ring")
    with pytest.raises(RingError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        runtime.Ring(capacity_rows=128, k=case.k)
    assert bool(same_bits(case.y(x), expected))  # a refused capture breaks nothing


def test_capture_as_the_first_call_of_a_process(case: Case, request: pytest.FixtureRequest) -> None:
    body = """
    import warnings
    warnings.simplefilter("ignore")  # PyTorch's, of the empty graph
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            runtime.ring_linear(x, weight)
    except errors.ArtifactError as error:
        assert "load() before the capture" in str(error), error
    else:
        raise AssertionError("captured without artefacts")
    runtime.load(path=PATHS, arch=ARCH)
    weight.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = runtime.ring_linear(x, weight)
    graph.replay()
    assert torch.equal(y, runtime.ring_linear(x, weight))
    print("fine")
    """
    assert runtime_cases.in_fresh_process(request.config, case, body) == "fine\n"


def test_compile_sees_one_operator(case: Case) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(runtime.ring_linear(x, case.weight)) * 2

    x = case.x(300)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert bool(same_bits(compiled(x), block(x)))
    assert bool(same_bits(compiled(x[:77]), block(x[:77])))


class Module(torch.nn.Module):
    """How a model holds a weight that it exports: as buffers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.n = case.n
        data, block_scale = case.weight.operands()
        self.register_buffer("data", data)
        self.register_buffer("block_scale", block_scale)
        self.register_buffer("tensor_scale", case.weight.tensor_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.ringfp4.linear(
            x, self.data, self.block_scale, self.tensor_scale, self.n, None, "fp32", None, "auto"
        )


def test_export_keeps_the_operator(case: Case) -> None:
    x = case.x(300)
    exported = torch.export.export(Module(case), (x,))
    assert any("ringfp4.linear" in str(node.target) for node in exported.graph.nodes)
    assert bool(same_bits(exported.module()(x), case.y(x)))
