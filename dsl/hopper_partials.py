"""Accumulators on their way from the CTA that begins an output tile to the one that completes it.

A CTA has at most one tile to hand on (tile_walk.py), so its place in device memory is its own. A warp of
the CTA that continues needs what the same warp of the other one has accumulated, thread by thread, so a
flag for each warp does; who has read it sets it back to zero for the next launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr
from cutlass.cutlass_dsl import dsl_user_op
from ringfp4.dsl.config.hopper import FLAGS_PER_CTA, HopperGemmConfig
from ringfp4.dsl.ptx import asm
from ringfp4.dsl.ring import poll, shake
from ringfp4.dsl.ring_order import WAITS_FOR_PARTIAL


@dataclass(frozen=True)
class Partials:
    """``memory``: config.partial_bytes for each CTA; ``flags``: int32, FLAGS_PER_CTA for each CTA."""

    config: HopperGemmConfig
    memory: cute.Pointer
    flags: cute.Pointer
    status: cute.Pointer

    @cute.jit
    def put(self, acc, cta, warp):
        """Hand on ``acc`` of this consumer warp, ``warp`` counting a CTA's consumers' from 0."""
        address = self._address(cta, warp)
        for i in range_constexpr(cute.size(acc) // 4):
            store_vector(address, 2048 * i, [acc[4 * i + j] for j in range(4)])
        shake(self.config.jitter, cta)
        # Orders all lanes' accumulators before the flag, which one lane releases.
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.red(self._flag(cta, warp), Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")

    @cute.jit
    def take(self, acc, cta, warp):
        """Fill ``acc`` with what CTA ``cta`` hands on."""
        flag = self._flag(cta, warp)
        poll(flag, Int32(1), WAITS_FOR_PARTIAL, cta, self.status, self.config.poll_limit)
        address = self._address(cta, warp)
        for i in range_constexpr(cute.size(acc) // 4):
            for j, value in enumerate(load_vector(address, 2048 * i)):
                acc[4 * i + j] = value
        # All lanes have left the poll before the flag changes.
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.store(flag, Int32(0), sem="relaxed", scope="gpu")

    def _flag(self, cta, warp):
        return self.flags + (cta * FLAGS_PER_CTA + warp)

    def _address(self, cta, warp):
        """Of the thread's first four accumulators: those of a warpgroup lie together, 16 bytes a thread."""
        thread = warp % 4 * 32 + cute.arch.lane_idx()
        in_cta = warp // 4 * (self.config.partial_bytes // self.config.consumers) + thread * 16
        return self.memory.toint() + Int64(cta) * self.config.partial_bytes + Int64(in_cta)


@dsl_user_op
def store_vector(address, offset, values, *, loc=None, ip=None):
    """Four FP32 to ``address`` + ``offset`` bytes in global memory."""
    asm(
        f"st.global.v4.f32 [$0+{offset}], {{$1,$2,$3,$4}};",
        "l,f,f,f,f",
        [address, *values],
        side_effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_vector(address, offset, *, loc=None, ip=None):
    """Four FP32 from ``address`` + ``offset`` bytes in global memory."""
    return asm(
        f"ld.global.v4.f32 {{$0,$1,$2,$3}}, [$4+{offset}];",
        "=f,=f,=f,=f,l",
        [address],
        [Float32] * 4,
        side_effects=True,
        loc=loc,
        ip=ip,
    )
