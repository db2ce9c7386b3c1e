"""Who may use which ring: a lane is the launches and the rings of one stream.

A call on a stream uses the stream's own lane, so two streams never share a ring by default. A
:class:`Ring` made by the caller is a lane of its own; using it on several streams is ordered by
events in C++. A call that is being captured into a CUDA graph takes its slots from the graph's
private memory instead (api.py), so that graphs can replay at the same time.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ringfp4.errors import InputError, RingError
from ringfp4.runtime import _core
from ringfp4.runtime.plan import DEFAULT_CAPACITY_ROWS, TILE_ROWS, Plan, partial_bytes, slot_row_bytes

if TYPE_CHECKING:
    from ringfp4.runtime.devices import Artifacts, DeviceLike

log = logging.getLogger("ringfp4")

_MOST = 1 << 31  # rows and columns: kernels count them in signed 32 bits
_MOST_PLANS = 4096  # of one lane; forgotten all at once, since they are cheap to make again


class PlanCache:
    """Plans by (N, K, M, schedule), for one capacity: the rows of a chunk."""

    def __init__(self, artifacts: Artifacts, capacity_rows: int, slot_rows: int) -> None:
        self.artifacts = artifacts
        self.capacity_rows = capacity_rows
        self.slot_rows = slot_rows  # most that a fused kernel may have
        self.plans: dict[tuple[int, int, int, str], Plan] = {}
        # M changes no launch but its sizes: plans of all M share a sequence.
        self._by_kernels: dict[tuple[object, ...], Plan] = {}
        artifacts.remember(self)

    def plan(self, n: int, k: int, m: int, schedule: str) -> Plan:
        """Raises UnservedError, RingError if a caller's ring is too small, InputError for too many rows."""
        plan = self.plans.get((n, k, m, schedule))
        if plan is None:
            plan = self._fitting(n, k, m, schedule)
            plan = self._by_kernels.setdefault((plan.schedule, *map(id, plan.kernels)), plan)
            if len(self.plans) >= _MOST_PLANS:
                self.plans.clear()
            self.plans[n, k, m, schedule] = plan
        return plan

    def _fitting(self, n: int, k: int, m: int, schedule: str) -> Plan:
        """A new plan whose slots there is room for."""
        return self.artifacts.plan(schedule, n, k, m, self.capacity_rows, self.slot_rows)

    def forget(self) -> None:
        self.plans.clear()

    def ring_for(self, plan: Plan, capturing: bool) -> _core.Ring | None:
        """The ring a call uses now; None if it has to bring memory of its own."""
        raise NotImplementedError


class Lane(PlanCache):
    """The plans and the default rings of one stream. Rings are kept: a pointer never changes.

    They are as large as a plan needs, so every fused kernel may be used.
    """

    def __init__(self, artifacts: Artifacts, stream: int) -> None:
        super().__init__(artifacts, DEFAULT_CAPACITY_ROWS, _MOST)
        self.stream = stream
        self._rings: list[_core.Ring] = []
        self._lock = threading.Lock()

    def ring(self, data_bytes: int) -> _core.Ring:
        """A ring of at least that size, allocated if there is none. Raises DriverError, RingError."""
        for ring in self._rings:
            if ring.data_bytes >= data_bytes:
                return ring
        with self._lock:
            if not self._rings or self._rings[-1].data_bytes < data_bytes:
                log.debug("ring of %d bytes for stream %#x", data_bytes, self.stream)
                self._rings.append(_core.Ring(self.artifacts.context, data_bytes, self.stream, False))
                self._rings.sort(key=lambda ring: ring.data_bytes)
            return next(ring for ring in self._rings if ring.data_bytes >= data_bytes)

    def ring_for(self, plan: Plan, capturing: bool) -> _core.Ring | None:
        return None if capturing else self.ring(plan.ring_bytes)

    @property
    def ring_bytes(self) -> int:
        """Device memory that the lane holds."""
        return sum(ring.bytes for ring in self._rings)


class Ring(PlanCache):
    """Device memory that packed activations pass through, owned by the caller.

    ``capacity_rows``: a multiple of 128. ``k``: the largest K that it will serve, default the
    largest that is loaded. ``device``: as for ``load``. The memory is allocated here and freed when
    the object goes; the host waits for the device in both.

    One stream at a time uses a ring: a call on another stream waits, on the device, for the last
    one. A ring that was used in a CUDA graph's capture belongs to that graph and is refused
    elsewhere; it must outlive the graph. Raises InputError, DriverError, and what ``load`` raises.
    """

    def __init__(
        self, capacity_rows: int = DEFAULT_CAPACITY_ROWS, k: int | None = None, device: DeviceLike = None
    ) -> None:
        from ringfp4.runtime import devices, streams

        _require_multiple("capacity_rows", capacity_rows, TILE_ROWS)
        if k is not None:
            _require_multiple("k", k, 32)
        ordinal = devices.ordinal_of(device)
        artifacts = devices.artifacts(ordinal)
        super().__init__(artifacts, capacity_rows, capacity_rows)
        row_bytes = max(sum(slot_row_bytes(entry.arch, k or entry.k)) for entry in artifacts.table.entries)
        partials = max(partial_bytes(*loaded) for loaded in artifacts.kernels.items())
        data_bytes = capacity_rows * row_bytes + partials
        self.device = ordinal
        self.core = _core.Ring(artifacts.context, data_bytes, streams.current(ordinal), True)

    def _fitting(self, n: int, k: int, m: int, schedule: str) -> Plan:
        plan = super()._fitting(n, k, m, schedule)
        if plan.ring_bytes <= self.core.data_bytes:
            return plan
        if schedule == "auto" and plan.schedule == "fused":  # which has slots of its own choice
            return self._fitting(n, k, m, "ring")
        raise RingError(
            "the ring is too small",
            expected=f"{plan.capacity_rows} rows of {plan.row_bytes} bytes, {plan.ring_bytes} in all",
            got=f"{self.core.data_bytes} bytes for {self.capacity_rows} rows",
            remedy="make it with a larger capacity_rows or k",
        )

    def ring_for(self, plan: Plan, capturing: bool) -> _core.Ring | None:
        return self.core  # which knows whether it may be captured

    @property
    def nbytes(self) -> int:
        """Device memory it holds, slots and state."""
        return self.core.bytes


def _require_multiple(name: str, value: int, of: int) -> None:
    if not isinstance(value, int) or not 0 < value < _MOST or value % of:
        expected = f"a positive multiple of {of}, below 2**31"
        raise InputError(f"unusable {name}", expected=expected, got=repr(value))
