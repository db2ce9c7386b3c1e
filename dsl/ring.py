"""Device side of the ring protocol (ring_order.py): publish, acquire, recycle, reset.

Memory order, in one place (the full argument is in docs/ring.md):

- Packed rows are written by ordinary stores (generic proxy) and read by the copy engine (async
  proxy). ``publish`` therefore fences generic before async writes, then releases at gpu scope;
  ``acquire`` acquires at gpu scope, then fences again before the copy is issued. Without the two
  proxy fences no test has ever failed, so no test can show that they may go: they are required by
  the PTX memory model, which orders accesses of different proxies by a proxy fence only.
- A slot's last reads are copies whose completion the consumers have observed on an mbarrier; a
  completed read cannot see a later write, so ``recycle`` needs a release and no proxy fence.
- Every poll ends by acquiring what the counter's writers released.

A poll that does not end within ``poll_limit`` tries writes (reason, counter, target, value seen) to
``status``, host memory that survives the trap which follows; see REASONS in ring_order.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr
from ringfp4.dsl.ring_order import WAITS_FOR_MAXIMUM, WAITS_FOR_ROWS, WAITS_FOR_SLOT, RingOrder

MAXIMUM_BARRIER = 9  # named barrier of the warps that look for the maximum; no kernel uses it otherwise


@dataclass(frozen=True)
class Ring:
    """The protocol's operations for one kernel.

    ``counters`` is the int32 array of RingOrder.counters entries, ``status`` uint32[4].
    ``packing_warps`` a CTA; ``jitter``: sleep now and then.
    """

    order: RingOrder
    packing_warps: int
    poll_limit: int
    jitter: bool
    counters: cute.Pointer
    status: cute.Pointer

    @cute.jit
    def acquire_tile(self, tile: Int32) -> Boolean:
        """Loader, whole warp: whether all of tile ``tile`` is packed already; if so, acquires it.

        Mostly it is, and one load by several lanes then replaces a poll for each chunk.
        """
        chunk = cutlass.min(cute.arch.lane_idx(), self.order.k_chunks - 1)
        ready = self.counters + self.order.ready_index(self.order.slot(tile), chunk)
        seen = cute.arch.load(ready, Int32, sem="relaxed", scope="gpu")
        complete = cute.arch.vote_all_sync(seen >= self.order.ready_target(tile))
        if complete:
            cute.arch.fence_acq_rel_gpu()
            # What each lane has acquired comes before the copies, which one lane issues.
            cute.arch.sync_warp()
            self._before_load(tile)
        return complete

    @cute.jit
    def acquire(self, tile: Int32, chunk: Int32, complete: Boolean) -> None:
        """Loader, whole warp: wait until chunk ``chunk`` is packed, unless the tile was ``complete``."""
        if not complete:
            index = self.order.ready_index(self.order.slot(tile), chunk)
            self._poll(index, self.order.ready_target(tile), WAITS_FOR_ROWS)
            self._before_load(tile)

    def _before_load(self, tile: Int32) -> None:
        shake(self.jitter, tile)
        # What was acquired was written through the generic proxy, the copy is issued to the async one.
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def wait_for_slot(self, tile: Int32) -> None:
        """Packing warp: wait until the slot of tile ``tile`` may be overwritten."""
        target = self.order.done_target(tile)
        if target > 0:
            self._poll(self.order.done_index(self.order.slot(tile)), target, WAITS_FOR_SLOT)

    @cute.jit
    def publish(self, tile: Int32, chunk: Int32) -> None:
        """Whole warp, after packing one K chunk of a unit."""
        shake(self.jitter, tile)
        # Each lane orders its own generic writes before the async reads to come ...
        cute.arch.fence_proxy("async.global")
        # ... and the warp barrier orders all lanes' writes before the lane that releases them.
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self._add_release(self.order.ready_index(self.order.slot(tile), chunk))

    @cute.jit
    def recycle(self, tile: Int32, leads: Boolean) -> None:
        """Consumers, once all loads of an output tile have landed; the one thread that ``leads`` arrives.

        It has itself waited for every load of the output tile.
        """
        if leads:
            shake(self.jitter, tile)
            self._add_release(self.order.done_index(self.order.slot(tile)))

    @cute.jit
    def contribute_maximum(self, bits: Uint32, leads: Boolean, warps: int) -> Uint32:
        """Whole warp, of ``warps`` in each CTA that do this: the maximum of all warps' ``bits``.

        One warp of a CTA ``leads``: it arrives and waits for all others. If every warp polled, their
        loads would hold up the arrivals, which go to the same address.
        """
        amax = self.counters + self.order.amax_index
        if cute.arch.lane_idx() == 0:
            cute.arch.red(amax, bits, op="max", dtype=Uint32, sem="relaxed", scope="gpu")
        # Orders the maxima of this CTA's warps before the arrival ...
        cute.arch.barrier(barrier_id=MAXIMUM_BARRIER, number_of_threads=32 * warps)
        if leads:
            if cute.arch.lane_idx() == 0:
                self._add_release(self.order.amax_count_index)
            cute.arch.sync_warp()
            self._poll(self.order.amax_count_index, cute.arch.grid_dim()[0], WAITS_FOR_MAXIMUM)
        # ... and what the leader has acquired before the other warps' loads.
        cute.arch.barrier(barrier_id=MAXIMUM_BARRIER, number_of_threads=32 * warps)
        return cute.arch.load(amax, Uint32, sem="relaxed", scope="gpu")

    @cute.jit
    def finish(self, ctas: Int32) -> None:
        """One thread of an agent that will not touch the counters again.

        The last agent of the grid sets all of them to zero for the next launch on this ring, which
        needs neither a memset nor an epoch: so a captured graph can be replayed. Acquire and release:
        every other agent's updates come before the zeros, which the end of the kernel publishes.
        """
        fin = self.counters + self.order.fin_index
        arrived = cute.arch.atomic_add(fin, Int32(1), sem="acq_rel", scope="gpu")
        if arrived == self.order.agents(ctas, self.packing_warps) - 1:
            for i in cutlass.range(self.order.counters, unroll=1):
                cute.arch.store(self.counters + i, Int32(0), sem="relaxed", scope="gpu")

    def _add_release(self, index: Int32) -> None:
        one = Int32(1)
        cute.arch.red(self.counters + index, one, op="add", dtype=Int32, sem="release", scope="gpu")

    def _poll(self, index: Int32, target: Int32, reason: int) -> None:
        poll(self.counters + index, target, reason, index, self.status, self.poll_limit)


def poll(
    counter: cute.Pointer, target: Int32, reason: int, index: Int32, status: cute.Pointer, limit: int
) -> None:
    """Wait until the counter is at least ``target``, then acquire at gpu scope; trap after ``limit`` tries.

    The tries are relaxed, with a short sleep between them: warps that spin without one take issue
    slots from the MMA warps. One fence at the end makes the successful try an acquire. ``index`` tells
    which counter it is, in ``status``.
    """
    cute.arch.inline_ptx(
        "{\n"
        ".reg .pred enough, more;\n"
        ".reg .b32 seen, tries;\n"
        "mov.u32 tries, 0;\n"
        "TRY:\n"
        "ld.relaxed.gpu.global.b32 seen, [{$r0}];\n"
        "setp.ge.s32 enough, seen, {$r1};\n"
        "@enough bra DONE;\n"
        "nanosleep.u32 50;\n"
        "add.u32 tries, tries, 1;\n"
        f"setp.lt.u32 more, tries, {limit};\n"
        "@more bra TRY;\n"
        "st.volatile.global.v4.u32 [{$r2}], { {$r3}, {$r4}, {$r1}, seen };\n"
        "fence.acq_rel.sys;\n"
        "trap;\n"
        "DONE:\n"
        "fence.acq_rel.gpu;\n"
        "}",
        read_only_args=[counter.toint(), Int32(target), status.toint(), Int32(reason), Int32(index)],
    )


def shake(jitter: bool, seed: Int32) -> None:
    """With ``jitter``, sleep for a while: for tests."""
    if const_expr(jitter):
        sleep_randomly(seed)


def sleep_randomly(seed: Int32) -> None:
    """Sleep for a pseudo-random 0 to 4095 ns: for tests that shake the order of events."""
    cute.arch.inline_ptx(
        "{\n"
        ".reg .b32 mixed;\n"
        "mul.lo.u32 mixed, {$r0}, 0x9E3779B1;\n"
        "shr.u32 mixed, mixed, 20;\n"
        "nanosleep.u32 mixed;\n"
        "}",
        read_only_args=[seed + Int32(cute.arch.clock())],
    )
