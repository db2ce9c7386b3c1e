"""The ring protocol, simulated: random interleavings of every agent of every CTA.

An agent is a generator; it yields either None (a step was made) or a condition it waits for.
A random scheduler picks who steps next. Loads are asynchronous, as the copy engine's are: a load
reads the ring at some time between its issue and its completion.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfp4.dsl.ring_order import RingOrder, tile_coord
from ringfp4.dsl.tile_walk import last_piece, walk

Step = Callable[[], bool] | None


class Violation(AssertionError):
    """The protocol did something it must never do."""


@dataclass(frozen=True)
class Launch:
    order: RingOrder
    m: int
    grid: int
    packing_warps: int = 2
    consumer_warps: int = 2
    stages: int = 2
    amax: bool = False
    divides: bool = False  # the last wave of output tiles, between K chunks
    fault: str = ""  # a deliberate mistake


class Simulation:
    """One ring; ``run`` simulates one launch on it and checks everything that was promised."""

    def __init__(self, order: RingOrder) -> None:
        self.counters = [0] * order.counters
        # The unit that each (slot, part of the tile, k chunk) of the ring holds.
        self.ring: dict[tuple[int, int, int], int] = {}

    def run(self, launch: Launch, seed: int) -> None:
        self.launch, self.order = launch, launch.order
        self.m_tiles = self.order.m_tiles(launch.m)
        self.outputs: Counter[tuple[int, int]] = Counter()
        self.partials: dict[int, tuple[int, int]] = {}  # CTA -> output tile and chunk it was left at
        self.contributed = 0  # warps, to the maximum
        rng = random.Random(seed)
        agents: list[Iterator[Step]] = []
        for cta in range(launch.grid):
            agents += Cta(self, cta).agents()
        # Some agents are slow for the whole launch: uniform choice alone rarely lets one lag far behind.
        weights = [rng.choice((1, 1, 4, 30)) for _ in agents]
        waiting: dict[int, Callable[[], bool]] = {}
        alive = list(range(len(agents)))
        while alive:
            ready = [i for i in alive if i not in waiting or waiting[i]()]
            if not ready:
                raise Violation(f"deadlock: {len(alive)} agents wait, counters {self.counters}")
            i = rng.choices(ready, [weights[j] for j in ready])[0]
            waiting.pop(i, None)
            try:
                condition = next(agents[i])
            except StopIteration:
                alive.remove(i)
            else:
                if condition is not None:
                    waiting[i] = condition
        expected = {(i, j): 1 for i in range(self.m_tiles) for j in range(self.order.n_tiles)}
        if self.outputs != expected:
            raise Violation(f"output tiles missed or repeated: {self.outputs}")
        if self.partials:
            raise Violation(f"accumulators that nobody took: {self.partials}")
        if any(self.counters):
            raise Violation(f"counters not zero at the end: {self.counters}")

    def at_least(self, index: int, target: int) -> Callable[[], bool]:
        return lambda: self.counters[index] >= target

    def pack(self, unit: int, chunk: int) -> None:
        tile, part = divmod(unit, self.order.units)
        self.ring[self.order.slot(tile), part, chunk] = unit

    def publish(self, unit: int, chunk: int) -> None:
        slot = self.order.slot(self.order.tile_of(unit))
        self.counters[self.order.ready_index(slot, chunk)] += 1

    def read(self, tile: int, chunk: int) -> None:
        for part in range(self.order.units):
            held = self.ring.get((self.order.slot(tile), part, chunk))
            if held != tile * self.order.units + part:
                raise Violation(f"tile {tile} chunk {chunk} part {part}: the slot holds unit {held}")

    def check_maximum(self) -> None:
        warps = self.launch.grid * (self.launch.packing_warps + self.launch.consumer_warps)
        if self.contributed != warps:
            raise Violation(f"{self.contributed} of {warps} warps have contributed to the maximum")

    def finish(self) -> None:
        fin = self.order.fin_index
        self.counters[fin] += 1
        last = self.order.agents(self.launch.grid, self.launch.packing_warps)
        if self.launch.fault == "early reset":
            last -= 1
        if self.counters[fin] == last and self.launch.fault != "no reset":
            self.counters[:] = [0] * len(self.counters)


class Cta:
    """The agents of one CTA and its pipeline of shared-memory stages."""

    def __init__(self, sim: Simulation, cta: int) -> None:
        self.sim, self.launch, self.order, self.cta = sim, sim.launch, sim.order, cta
        self.issued = 0  # loads, in order
        self.in_flight: dict[int, tuple[int, int]] = {}  # load -> (tile, chunk)
        self.landed: set[int] = set()
        self.released: Counter[int] = Counter()  # warps that have released a stage's use
        self.at_barrier = 0
        self.contributed = 0  # warps, to the maximum
        self.maximum_is_known = False
        self.loader_left = False

    def agents(self) -> list[Iterator[Step]]:
        packers = [self.packer(w) for w in range(self.launch.packing_warps)]
        consumers = [self.consumer(w) for w in range(self.launch.consumer_warps)]
        return [*packers, *consumers, self.loader(), *(self.copy_engine() for _ in range(2))]

    def pieces(self) -> list[tuple[int, int, int]]:
        """(output tile, first and last K chunk), in the order of work."""
        tiles, grid, chunks = self.sim.m_tiles * self.order.n_tiles, self.launch.grid, self.order.k_chunks
        whole, begin, end = walk(tiles, grid, self.cta, chunks) if self.launch.divides else (tiles, 0, 0)
        pieces = [(tile, 0, chunks) for tile in range(self.cta, whole, grid)]
        while begin < end:
            pieces.append(last_piece(whole, begin, end, chunks))
            end -= pieces[-1][2] - pieces[-1][1]
        return pieces[::-1] if self.launch.fault == "wrong order" else pieces

    def absolute_maximum(self, leads: bool) -> Iterator[Step]:
        """All warps meet, one of them meets the other CTAs' for them, and tells them."""
        if not self.launch.amax:
            return
        self.contributed += 1
        self.sim.contributed += 1
        if self.launch.fault != "no meeting":
            yield lambda: self.contributed == self.launch.packing_warps + self.launch.consumer_warps
        if leads:
            self.sim.counters[self.order.amax_count_index] += 1
            yield self.sim.at_least(self.order.amax_count_index, self.launch.grid)
            self.maximum_is_known = True
        yield lambda: self.maximum_is_known
        self.sim.check_maximum()

    def packer(self, warp: int) -> Iterator[Step]:
        yield from self.absolute_maximum(leads=warp == 0)
        stride = self.launch.packing_warps * self.launch.grid
        first = self.order.prologue_parts(self.sim.m_tiles) + warp * self.launch.grid + self.cta
        for index in range(first, self.order.parts(self.sim.m_tiles), stride):
            unit, chunk = self.order.part_coord(index, self.sim.m_tiles)
            tile = self.order.tile_of(unit)
            if self.launch.fault != "no recycle wait":
                done = self.order.done_index(self.order.slot(tile))
                yield self.sim.at_least(done, self.order.done_target(tile))
            if self.launch.fault == "publish first":
                self.sim.publish(unit, chunk)
                yield None
            self.sim.pack(unit, chunk)
            yield None
            if self.launch.fault != "publish first":
                self.sim.publish(unit, chunk)
        self.sim.finish()

    def loader(self) -> Iterator[Step]:
        for index, first, last in self.pieces():
            tile, _ = self.order.tile_coord(index, self.sim.m_tiles)
            chunks = [
                self.sim.at_least(
                    self.order.ready_index(self.order.slot(tile), chunk), self.order.ready_target(tile)
                )
                for chunk in range(self.order.k_chunks)
            ]
            complete = all(ready() for ready in chunks)
            yield None
            for chunk in range(first, last):
                if not complete and self.launch.fault != "no acquire":
                    yield chunks[chunk]
                load = self.issued
                yield (
                    lambda load=load: (
                        load < self.launch.stages
                        or (self.released[load - self.launch.stages] == self.launch.consumer_warps)
                    )
                )
                self.in_flight[load] = (tile, chunk)
                self.issued += 1
        self.loader_left = True
        self.sim.finish()

    def copy_engine(self) -> Iterator[Step]:
        while True:
            yield lambda: bool(self.in_flight) or self.loader_left
            if not self.in_flight:
                return
            load = min(self.in_flight)
            tile, chunk = self.in_flight.pop(load)
            yield None
            self.sim.read(tile, chunk)
            self.landed.add(load)

    def consumer(self, warp: int) -> Iterator[Step]:
        yield from self.absolute_maximum(leads=False)
        parts = self.order.prologue_parts(self.sim.m_tiles)
        stride = self.launch.consumer_warps * self.launch.grid
        for index in range(warp * self.launch.grid + self.cta, parts, stride):
            unit, chunk = self.order.part_coord(index, self.sim.m_tiles)
            self.sim.pack(unit, chunk)
            yield None
            self.sim.publish(unit, chunk)
            yield None
        load, pieces = 0, self.pieces()
        for index, first, last in pieces:
            tile, n_tile = self.order.tile_coord(index, self.sim.m_tiles)
            done = self.order.done_index(self.order.slot(tile))
            leads = warp == 0
            if leads and first > 0:
                if self.launch.fault != "no wait for accumulators":
                    yield lambda: self.cta - 1 in self.sim.partials
                if self.sim.partials.pop(self.cta - 1, None) != (index, first):
                    raise Violation(f"accumulators of tile {index} at chunk {first} are not there")
            if leads and self.launch.fault == "early recycle":
                self.sim.counters[done] += 1
            for _ in range(first, last):
                yield lambda load=load: load in self.landed
                self.released[load] += 1
                load += 1
            if self.launch.fault == "look ahead waits" and (index, first, last) != pieces[-1]:
                yield lambda load=load: load in self.landed
            if leads and last < self.order.k_chunks:
                self.sim.partials[self.cta] = (index, last)
            elif leads:
                if self.launch.fault not in ("early recycle", "no recycle"):
                    self.sim.counters[done] += 1
                self.sim.outputs[tile, n_tile] += 1
            yield None
        self.at_barrier += 1
        if warp == 0:
            yield lambda: self.at_barrier == self.launch.consumer_warps
            self.sim.finish()


orders = st.builds(
    lambda units, n_tiles, k_chunks, group, extra, first: RingOrder(
        tile_m=4,
        units=units,
        n_tiles=n_tiles,
        k_chunks=k_chunks,
        slots=group + extra,
        group=group,
        first=min(first, group),
    ),
    units=st.integers(1, 3),
    n_tiles=st.integers(1, 5),
    k_chunks=st.integers(1, 3),
    group=st.integers(1, 4),
    extra=st.integers(0, 4),
    first=st.integers(1, 4),
)
launches = st.builds(
    Launch,
    order=orders,
    m=st.integers(1, 50),
    grid=st.integers(1, 5),
    packing_warps=st.integers(1, 3),
    consumer_warps=st.integers(1, 3),
    stages=st.integers(1, 3),
    amax=st.booleans(),
    divides=st.booleans(),
).filter(lambda launch: launch.order.may_divide or not launch.divides)


@given(launch=launches, seed=st.integers(0, 2**32))
@settings(max_examples=250, deadline=None)
def test_any_interleaving_is_correct(launch: Launch, seed: int) -> None:
    assert launch.order.problems() == []
    Simulation(launch.order).run(launch, seed)


def test_launches_follow_one_another_on_one_ring() -> None:
    order = RingOrder(tile_m=2, units=2, n_tiles=3, k_chunks=2, slots=3, group=2, first=1)
    sim = Simulation(order)
    for seed, m in enumerate((17, 1, 5, 12, 17)):
        sim.run(Launch(order, m, grid=3, amax=True), seed)


# A ring that is reused several times, more CTAs than tiles of a group, several k chunks.
ORDER = RingOrder(tile_m=2, units=2, n_tiles=3, k_chunks=2, slots=3, group=2, first=1)


def caught(launch: Launch, seeds: int = 40) -> list[str]:
    """What the simulation found wrong, over several interleavings."""
    found = []
    for seed in range(seeds):
        try:
            Simulation(launch.order).run(launch, seed)
        except Violation as violation:
            found.append(str(violation))
    return found


# Two groups of m tiles, which dividing needs; five CTAs have 30 output tiles, of three chunks each.
DIVIDED = Launch(RingOrder(2, 2, 3, 3, slots=4, group=2, first=1), m=19, grid=4, divides=True)


def test_the_correct_protocol_is_not_accused() -> None:
    assert caught(Launch(ORDER, m=20, grid=3, amax=True)) == []
    assert caught(DIVIDED) == []


@pytest.mark.parametrize(
    ("fault", "symptom"),
    [
        ("no acquire", "the slot holds"),
        ("publish first", "the slot holds"),
        ("no recycle wait", "the slot holds"),
        ("early recycle", "the slot holds"),
        ("no recycle", "deadlock"),
        ("wrong order", "deadlock"),
        ("no reset", "counters not zero"),
        ("early reset", "counters not zero"),
        ("no meeting", "have contributed"),
    ],
)
def test_a_broken_protocol_is_caught(fault: str, symptom: str) -> None:
    found = caught(Launch(ORDER, m=20, grid=3, amax=True, fault=fault))
    assert any(symptom in text for text in found), found


@pytest.mark.parametrize(
    ("launch", "symptom"),
    [
        (replace(DIVIDED, fault="no wait for accumulators"), "are not there"),
        (replace(DIVIDED, fault="wrong order"), "deadlock"),
        # A tile that is not handed back before the next one's rows are there may be what these wait for.
        (Launch(ORDER, m=20, grid=9, fault="look ahead waits"), "deadlock"),
    ],
)
def test_a_broken_division_is_caught(launch: Launch, symptom: str) -> None:
    found = caught(launch)
    assert any(symptom in text for text in found), found


@pytest.mark.parametrize(
    "order",
    [
        RingOrder(tile_m=2, units=1, n_tiles=3, k_chunks=3, slots=2, group=2, first=2),
        RingOrder(tile_m=2, units=1, n_tiles=1, k_chunks=3, slots=2, group=1, first=1),
    ],
)
def test_dividing_deadlocks_with_fewer_slots_than_it_may_have(order: RingOrder) -> None:
    found = []
    for m in range(8, 40):
        for grid in (2, 4, 5):
            found += caught(Launch(order, m=m, grid=grid, divides=True), seeds=4)
    assert any("deadlock" in text for text in found)
    assert not order.may_divide


def test_a_ring_smaller_than_a_group_deadlocks_and_is_refused() -> None:
    order = RingOrder(tile_m=2, units=2, n_tiles=3, k_chunks=2, slots=2, group=3, first=1)
    assert any("deadlock" in text for text in caught(Launch(order, m=20, grid=2)))
    assert order.problems() == ["ring of 2 tiles is smaller than a group of 3"]


def test_problems_name_the_values() -> None:
    order = RingOrder(tile_m=128, units=16, n_tiles=0, k_chunks=1, slots=4, group=2, first=3)
    assert order.problems() == [
        "n_tiles = 0, must be at least 1",
        "first group of 3 tiles is larger than a group of 2",
    ]


@given(
    m_tiles=st.integers(1, 40),
    n_tiles=st.integers(1, 20),
    group=st.integers(1, 12),
    first=st.none() | st.integers(1, 12),
)
def test_tile_coord_visits_each_tile_once_group_after_group(
    m_tiles: int, n_tiles: int, group: int, first: int | None
) -> None:
    first = None if first is None else min(first, group)
    coords = [tile_coord(i, m_tiles, n_tiles, group, first) for i in range(m_tiles * n_tiles)]
    assert sorted(coords) == [(i, j) for i in range(m_tiles) for j in range(n_tiles)]
    head = group if first is None else first
    groups = [0 if i < head else 1 + (i - head) // group for i, _ in coords]
    # Groups ascend; inside one the n tile never decreases.
    assert [(g, j) for g, (_, j) in zip(groups, coords, strict=True)] == sorted(
        (g, j) for g, (_, j) in zip(groups, coords, strict=True)
    )


@given(order=orders, m_tiles=st.integers(1, 20))
def test_every_part_is_packed_once_group_after_group(order: RingOrder, m_tiles: int) -> None:
    parts = [order.part_coord(i, m_tiles) for i in range(order.parts(m_tiles))]
    units = m_tiles * order.units
    assert sorted(parts) == [(unit, chunk) for unit in range(units) for chunk in range(order.k_chunks)]
    tiles = [order.tile_of(unit) for unit, _ in parts]
    groups = [0 if tile < order.first else 1 + (tile - order.first) // order.group for tile in tiles]
    keys = [(group, chunk, unit) for group, (unit, chunk) in zip(groups, parts, strict=True)]
    assert keys == sorted(keys)
    assert order.prologue_parts(m_tiles) == groups.count(0)


def test_tile_coord_by_hand() -> None:
    coords = [tile_coord(i, m_tiles=4, n_tiles=2, group=2, first=1) for i in range(8)]
    assert coords == [(0, 0), (0, 1), (1, 0), (2, 0), (1, 1), (2, 1), (3, 0), (3, 1)]


def test_targets_by_hand() -> None:
    order = RingOrder(tile_m=128, units=16, n_tiles=42, k_chunks=7, slots=10, group=5, first=1)
    assert (order.slot(23), order.generation(23)) == (3, 2)
    assert order.done_target(23) == 84
    assert order.ready_target(23) == 3 * 16
    assert order.counters == 10 * 7 + 10 + 3
    assert order.agents(grid=48, packing_warps=3) == 240
