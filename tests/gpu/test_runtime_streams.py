"""Streams, threads, rings and processes: always the bits of the serial result."""

from __future__ import annotations

import threading

import pytest
import runtime_cases
import torch
from gpu_checks import Gpu
from ringfp4 import runtime
from ringfp4.errors import InputError, RingFP4Error
from ringfp4.runtime import _core, devices
from runtime_cases import Case, same_bits

ROUNDS = 100
ODD_ROWS = (1, 3, 129, 257, 515, 31, 1000)


@pytest.fixture(scope="module")
def case(gpu: Gpu) -> Case:
    return runtime_cases.make_case(gpu)


def inputs_for(case: Case, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs of odd sizes and their results, computed one after the other."""
    xs = [case.x(ODD_ROWS[i % len(ODD_ROWS)], seed=i) for i in range(count)]
    pairs = [(x, case.y(x, schedule="prepacked")) for x in xs]
    torch.cuda.synchronize()
    return pairs


@pytest.mark.parametrize("schedule", ["ring", "prepacked", "fused", "auto"])
@pytest.mark.parametrize("count", [2, 9, 32])
def test_streams_at_once(case: Case, count: int, schedule: str) -> None:
    if schedule not in (*case.schedules, "auto"):
        pytest.skip(f"no kernels for schedule {schedule}")
    pairs = inputs_for(case, count)
    streams = [torch.cuda.Stream() for _ in range(count)]
    good = [torch.ones((), dtype=torch.bool, device="cuda") for _ in range(count)]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                good[i] &= same_bits(case.y(pairs[i][0], schedule=schedule), pairs[i][1])
    torch.cuda.synchronize()
    assert all(bool(g) for g in good)


@pytest.mark.parametrize("own_stream", [True, False])
def test_host_threads(case: Case, own_stream: bool) -> None:
    """On a stream each, and all on one stream, whose ring they then share."""
    count = 9
    pairs = inputs_for(case, count)
    failures: list[str] = []

    def work(i: int) -> None:
        stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
        good = torch.ones((), dtype=torch.bool, device="cuda")
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream), torch.no_grad():
                for _ in range(ROUNDS):
                    good &= same_bits(case.y(pairs[i][0], schedule="ring"), pairs[i][1])
                stream.synchronize()
            if not bool(good):
                failures.append(f"thread {i}: wrong bits")
        except Exception as error:
            failures.append(f"thread {i}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("capacity", [128, 256, 640, 2048])
def test_a_ring_of_any_capacity_gives_the_same_bits(case: Case, capacity: int) -> None:
    ring = runtime.Ring(capacity_rows=capacity, k=case.k)
    for m in (1, capacity - 1, capacity, capacity + 1, 5 * capacity + 77):
        x = case.x(m)
        assert bool(same_bits(case.y(x, ring=ring, schedule="ring"), case.y(x, schedule="prepacked"))), m


def test_one_ring_used_on_two_streams_in_turn(case: Case) -> None:
    ring = runtime.Ring(capacity_rows=128, k=case.k)
    pairs = inputs_for(case, 2)
    streams = [torch.cuda.Stream() for _ in pairs]
    good = [torch.ones((), dtype=torch.bool, device="cuda") for _ in pairs]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for (x, expected), stream, g in zip(pairs, streams, good, strict=True):
            with torch.cuda.stream(stream):
                g &= same_bits(case.y(x, ring=ring, schedule="ring"), expected)
    torch.cuda.synchronize()
    assert all(bool(g) for g in good)


def test_a_result_may_be_read_on_another_stream_while_the_next_call_runs(case: Case) -> None:
    """The rule of docs/runtime.md: order by an event, and tell the allocator by record_stream."""
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    xs = [case.x(515, seed=i) for i in range(4)]
    expected = [case.y(x) for x in xs]
    good = torch.ones((), dtype=torch.bool, device="cuda")
    torch.cuda.synchronize()
    for i in range(ROUNDS):
        with torch.cuda.stream(producer):
            y = case.y(xs[i % 4])
        consumer.wait_stream(producer)
        y.record_stream(consumer)
        with torch.cuda.stream(consumer):
            torch.cuda._sleep(100_000)  # the reader is late: the next results must not land in y
            good &= same_bits(y, expected[i % 4])
        del y
    torch.cuda.synchronize()
    assert bool(good)


def test_a_ring_may_be_dropped_while_it_is_in_use(case: Case) -> None:
    x = case.x(1000)
    expected = case.y(x, schedule="prepacked")
    for _ in range(20):
        y = case.y(x, ring=runtime.Ring(capacity_rows=128, k=case.k), schedule="ring")
        assert bool(same_bits(y, expected))


def test_device_memory_is_the_ring_and_little_else(case: Case) -> None:
    """At 37,810 rows: nothing of the size of the packed activation is ever allocated."""
    m = 37_810
    x, out = case.x(m), torch.empty(m, case.n, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream(priority=-1)  # of another pool: no earlier test gave it a ring
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.stream(stream):
        case.y(x, out=out, schedule="ring")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    lane = devices.artifacts(0).lane(stream.cuda_stream)
    plan = lane.plan(case.n, case.k, m, "ring")
    assert plan.capacity_rows == 2048
    ring = lane.ring(plan.slot_bytes(m))
    assert ring.bytes - plan.slot_bytes(m) == _core.STATE_BYTES <= 65_536
    if plan.arch != "sm_90a":  # packed: half a byte a value and a byte for 16
        assert plan.slot_bytes(m) == 2048 * case.k * 9 // 16
    # The driver hands out memory in pages of 2 MiB.
    assert free - torch.cuda.mem_get_info()[0] <= -(-ring.bytes // 2**21) * 2**21


def test_no_allocation_after_the_first_call(case: Case) -> None:
    x, out = case.x(1000), torch.empty(1000, case.n, dtype=torch.bfloat16, device="cuda")
    case.y(x, out=out, schedule="ring")
    torch.cuda.synchronize()
    free, count = torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(ROUNDS):
        case.y(x, out=out, schedule="ring")
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == count


def test_rows_may_be_strided_and_batched(case: Case) -> None:
    wide = case.x(257 * 3).view(257, 3 * case.k)
    x = wide[:, case.k : 2 * case.k]
    assert bool(same_bits(case.y(x), case.y(x.contiguous())))
    batched = case.x(12).view(3, 4, case.k)
    assert case.y(batched).shape == (3, 4, case.n)
    assert bool(same_bits(case.y(batched).view(12, case.n), case.y(batched.view(12, case.k))))
    assert case.y(batched[:0]).shape == (0, 4, case.n)


def test_bad_input_leaves_ring_and_output_alone(case: Case) -> None:
    x = case.x(64)
    ring = runtime.Ring(capacity_rows=128, k=case.k)
    out = torch.full((64, case.n), 7.0, dtype=torch.bfloat16, device="cuda")
    bad = [
        {"scale": torch.tensor(1.0)},  # on the CPU
        {"bias": torch.zeros(case.n, dtype=torch.bfloat16)},
        {"bias": torch.zeros(case.n, device="cuda")},
        {"schedule": "fast"},
        {"scale_rule": "fp16"},
    ]
    for options in bad:
        with pytest.raises(InputError):
            case.y(x, ring=ring, out=out, **options)
    shared = torch.empty(64 * max(case.n, case.k), dtype=torch.bfloat16, device="cuda")
    with pytest.raises(InputError, match="overlap"):
        case.y(shared[: 64 * case.k].view(64, case.k), out=shared[: 64 * case.n].view(64, case.n))
    with pytest.raises(RingFP4Error):
        runtime.ring_linear(x.cpu(), case.weight)
    torch.cuda.synchronize()
    assert bool((out == 7.0).all())
    assert bool(same_bits(case.y(x, ring=ring, schedule="ring"), case.y(x)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices(case: Case, request: pytest.FixtureRequest) -> None:
    paths = request.config.getoption("--cubins")
    runtime.load(1, paths or None, request.config.getoption("--arch"))
    x = case.x(300)
    with pytest.raises(InputError, match="different devices"):
        runtime.ring_linear(x.to("cuda:1"), case.weight)
    other = case.weight.to("cuda:1")
    for _ in range(10):  # the current device stays 0
        assert bool(same_bits(runtime.ring_linear(x.to("cuda:1"), other).to("cuda:0"), case.y(x)))


def test_exit_while_work_is_in_flight(case: Case, request: pytest.FixtureRequest) -> None:
    body = """
    runtime.load(path=PATHS, arch=ARCH)
    ring = runtime.Ring(128)
    big = torch.randn(20_000, K, device="cuda").bfloat16()
    for _ in range(20):
        runtime.ring_linear(big, weight)
        runtime.ring_linear(big, weight, ring=ring)
    print("leaving")
    """
    assert runtime_cases.in_fresh_process(request.config, case, body) == "leaving\n"


def test_fork_after_use(case: Case, request: pytest.FixtureRequest) -> None:
    body = """
    import warnings
    warnings.simplefilter("ignore")  # Python's, of a fork with threads
    runtime.load(path=PATHS, arch=ARCH)
    y = runtime.ring_linear(x, weight)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        try:
            runtime.ring_linear(x, weight, out=y)
        except errors.DriverError as error:
            assert "forked" in str(error), error
            sys.exit(7)
        sys.exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(runtime.ring_linear(x, weight), y)
    print("fine")
    """
    assert runtime_cases.in_fresh_process(request.config, case, body) == "fine\n"
