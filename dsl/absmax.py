"""max |x| over a BF16 activation, and the tensor scale that follows from it, in one launch.

Magnitudes of BF16 values order as their bit patterns do, NaN above infinity: so the maximum is taken
over integers, is exact and the same in any order, and has PyTorch's NaN. Rows are dealt out to warps;
CTAs meet in ``amax_state``, and the last to arrive computes the scale and leaves the state zero.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from ringfp4.dsl.config.quantise import AbsmaxConfig

VECTOR = 8  # BF16 values of a 16-byte load
RULE_BF16 = 1  # the scale rounded to BF16; any other value: FP32


def _max_u16x2(a: Uint32, b: Uint32) -> Uint32:
    return cute.arch.inline_ptx(
        "max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


class Absmax:
    def __init__(self, config: AbsmaxConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        x_stride: Int64,
        m: Int32,
        rule: Int32,
        amax_state: cute.Pointer,
        scale: cute.Pointer,
        ctas: Int32,
    ):
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(x, x_stride, m, rule, amax_state, scale).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1)
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        x_stride: Int64,
        m: Int32,
        rule: Int32,
        amax_state: cute.Pointer,
        scale: cute.Pointer,
    ):
        warps = self.config.warps
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_launch_dependents()  # the next kernel waits for the end of this one
        amax = self.rows_amax(x, x_stride, m, cta * warps + warp, ctas * warps)

        # (warp)
        sAmax = cutlass.utils.SmemAllocator().allocate_tensor(Uint32, cute.make_layout(warps))
        if lane == 0:
            sAmax[warp] = amax
        cute.arch.sync_threads()
        if warp == 0:
            amax = sAmax[cutlass.min(lane, warps - 1)]
            amax = cute.arch.warp_redux_sync(amax, "max")
            if lane == 0:
                self.arrive(amax, ctas, rule, amax_state, scale)

    @cute.jit
    def rows_amax(self, x: cute.Pointer, x_stride: Int64, m: Int32, first: Int32, step: Int32) -> Uint32:
        """Whole warp: the maximum magnitude in rows first, first + step, ... of x, as a BF16 pattern."""
        vectors, lane = self.config.k // VECTOR, cute.arch.lane_idx()
        # (row, (value, vector))
        mX = cute.make_tensor(
            x,
            cute.make_layout(
                (m, (VECTOR, vectors)), stride=(cute.assume(x_stride, divby=VECTOR), (1, VECTOR))
            ),
        )
        amax = Uint32(0)
        # The last row first: what L2 still holds at the end is what will be packed first.
        for row in cutlass.range(first, m, step, unroll=1):
            amax = self.row_amax(mX[m - 1 - row, (None, None)], lane, amax)
        return cute.arch.warp_redux_sync(_max_u16x2(amax, amax >> 16) & 0x7FFF, "max")

    @cute.jit
    def row_amax(self, gX: cute.Tensor, lane: Int32, amax: Uint32) -> Uint32:
        """The maximum of ``amax`` and one row's magnitudes, by halves; the lanes share the row."""
        vectors = self.config.k // VECTOR
        per_lane = -(-vectors // 32)
        for first in range_constexpr(0, per_lane, self.config.loads):
            count = min(self.config.loads, per_lane - first)
            # (value, load)
            rX = cute.make_rmem_tensor((VECTOR, count), BFloat16)
            for i in range_constexpr(count):
                vector = (first + i) * 32 + lane
                if const_expr((first + i + 1) * 32 <= vectors):
                    cute.autovec_copy(gX[None, vector], rX[None, i])
                else:
                    rX[None, i].fill(0.0)
                    if vector < vectors:
                        cute.autovec_copy(gX[None, vector], rX[None, i])
            words = cute.recast_tensor(rX, Uint32)
            for i in range_constexpr(cute.size(words)):
                amax = _max_u16x2(amax, words[i] & 0x7FFF7FFF)
        return amax

    @cute.jit
    def arrive(self, amax: Uint32, ctas: Int32, rule: Int32, amax_state: cute.Pointer, scale: cute.Pointer):
        """One thread a CTA. The arrival releases its maximum; the last arrival acquires them all."""
        cute.arch.red(amax_state, amax, op="max", dtype=Uint32, sem="relaxed", scope="gpu")
        arrivals = amax_state + 1
        before = cute.arch.atomic_add(arrivals, Uint32(1), sem="acq_rel", scope="gpu")
        if before == ctas - 1:
            bits = cute.arch.load(amax_state, Uint32, sem="relaxed", scope="gpu")
            cute.arch.store(amax_state, Uint32(0), sem="relaxed", scope="gpu")
            cute.arch.store(arrivals, Uint32(0), sem="relaxed", scope="gpu")
            cute.arch.store(scale, self.tensor_scale(bits, rule))

    @cute.jit
    def tensor_scale(self, amax: Uint32, rule: Int32) -> Float32:
        """amax / 2688 as PyTorch has it on a CUDA device: times the FP32 reciprocal."""
        value = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[amax << 16]
        ) * Float32(1 / 2688)
        if rule == RULE_BF16:
            value = value.to(BFloat16).to(Float32)
        return value


def compile_kernel(config: AbsmaxConfig):
    """Compile for the architecture in CUTE_DSL_ARCH; parameters as config.params()."""

    def pointer(dtype, align):
        return cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    return cute.compile(
        Absmax(config),
        pointer(BFloat16, 16),
        Int64(config.k),
        Int32(1),
        Int32(0),
        pointer(Uint32, 16),
        pointer(Float32, 4),
        Int32(1),
    )
