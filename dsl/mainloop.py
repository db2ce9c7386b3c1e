"""Mainloop of the sm_12x block-scaled GEMM: loads and MMAs of one output tile.

Shared memory of a stage (GemmConfig gives the sizes):
  sA   (tile_m, 64 B), sB (tile_n, 64 B): packed E2M1, 64-byte swizzle
  sSFA (tile_m / 128, k_blocks, 512 B), sSFB: E4M3 in the 128 x 4 layout

A stage passes between the loading thread and the MMA threads through two barriers: ``full``
completes when its bytes have arrived, ``empty`` when every MMA thread has read them. Positions
(``PipelineState``) are handed in and returned, so they run on over the output tiles of a CTA.

The classes are frozen: the DSL lets only such objects be used inside run-time branches and loops.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from . import ptx
from .config.gemm import SF_ROWS, SF_TILE_BYTES, GemmConfig


@dataclass(frozen=True)
class Barriers:
    """The full and empty barriers of the stages, in shared memory."""

    config: GemmConfig
    full: cute.Pointer

    @property
    def empty(self):
        return self.full + self.config.stages

    def init(self):
        """Executed by one thread; a CTA-wide barrier must follow."""
        for i in range(self.config.stages):
            cute.arch.mbarrier_init(self.full + i, self.config.full_arrivals)
            cute.arch.mbarrier_init(self.empty + i, self.config.empty_arrivals)
        cute.arch.mbarrier_init_fence()


@dataclass(frozen=True)
class TmaLoad:
    """One operand's tensor map together with its source and destination tiles."""

    atom: cute.CopyAtom
    source: cute.Tensor  # (tile, row tiles, K tiles, ...)
    destination: cute.Tensor  # (tile, stages)

    @classmethod
    def make(cls, atom, tensor, smem, tiler):
        rank = len(tiler)
        tiles = cute.group_modes(cute.local_tile(tensor, tiler, (None,) * rank), 0, rank)
        destination, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, rank), tiles
        )
        return cls(atom, source, destination)

    def issue(self, row_tile, k_tile, stage, barrier):
        rest = (0,) * (cute.rank(self.source) - 3)
        source = self.source[(None, row_tile, k_tile, *rest)]
        cute.copy(self.atom, source, self.destination[(None, stage)], tma_bar_ptr=barrier)


@dataclass(frozen=True)
class Producer:
    """Issues the TMA loads of an output tile; one warp executes it."""

    config: GemmConfig
    barriers: Barriers
    a_loads: tuple[TmaLoad, ...]
    b_loads: tuple[TmaLoad, ...]

    @cute.jit
    def load_tile(self, state, a_tile, b_tile, before_k_tile: cutlass.Constexpr = None):
        """Load A and SFA of row tile ``a_tile``, B and SFB of ``b_tile``; returns the next position.

        ``before_k_tile(k_tile)`` is called before a K tile is loaded: a ring waits there.
        """
        config = self.config
        for k_tile in cutlass.range(config.k_tiles, unroll=1):
            if const_expr(before_k_tile is not None):
                before_k_tile(k_tile)
            cute.arch.mbarrier_wait(self.barriers.empty + state.index, state.phase)
            full = self.barriers.full + state.index
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, config.stage_bytes)
            for load in self.a_loads:
                load.issue(a_tile, k_tile, state.index, full)
            for load in self.b_loads:
                load.issue(b_tile, k_tile, state.index, full)
            state.advance()
        return state


@dataclass(frozen=True)
class Fragments:
    """Registers of a warp: A and scales of two MMA steps (64 columns of K), B of one, in two halves."""

    rA: cute.Tensor  # (register, m16 tiles, MMA step)
    rSFA: cute.Tensor  # (32-row groups, MMA step)
    rSFB: cute.Tensor
    rB: cute.Tensor  # (register, n8 tiles)

    @classmethod
    def make(cls, config: GemmConfig):
        return cls(
            cute.make_rmem_tensor((4, config.warp_m // 16, 2), Int32),
            cute.make_rmem_tensor((config.warp_m // 32, 2), Int32),
            cute.make_rmem_tensor((config.warp_n // 32, 2), Int32),
            cute.make_rmem_tensor((2, config.warp_n // 8), Int32),
        )


@dataclass(frozen=True)
class Consumer:
    """Multiplies an output tile; every MMA warp executes it for its own warp_m x warp_n part.

    The addresses are this lane's, in stage 0.
    """

    config: GemmConfig
    barriers: Barriers
    a_address: Any
    b_address: Any
    sfa_address: Any
    sfb_address: Any

    @classmethod
    def make(cls, config: GemmConfig, barriers: Barriers, sA, sB, sSFA, sSFB, warp, lane):
        row_a = warp // config.warps_n * config.warp_m
        row_b = warp % config.warps_n * config.warp_n

        def operand(smem, row, half):
            # The 64-byte swizzle XORs bits 1-2 of the row into the 16-byte chunk.
            return shared_address(smem) + row * config.row_bytes + (half ^ (row // 2 % 4)) * 16

        def scales(smem, row):
            # Lane 4 g + t reads row 8 t + g of each 32-row group: what thread selector t expects.
            tile = row // SF_ROWS * (config.k_blocks * SF_TILE_BYTES)
            return shared_address(smem) + tile + row % SF_ROWS // 32 * 4 + (lane % 4 * 8 + lane // 4) * 16

        return cls(
            config,
            barriers,
            # ldmatrix: both 16-byte halves of a step for 16 rows of A, for two n8 tiles of B.
            operand(sA, row_a + lane % 16, lane // 16),
            operand(sB, row_b + lane // 16 * 8 + lane % 8, lane // 8 % 2),
            scales(sSFA, row_a),
            scales(sSFB, row_b),
        )

    def load_a(self, frag: Fragments, stage, k_block):
        """A, SFA and SFB of MMA step ``k_block`` (a constant): shared memory -> registers."""
        config, slot = self.config, k_block % 2
        sf_offset = k_block * SF_TILE_BYTES
        sfa = self.sfa_address + stage * config.sfa_bytes
        sfb = self.sfb_address + stage * config.sfb_bytes
        for i, word in enumerate(ptx.load_shared(sfa, sf_offset, config.warp_m // 32)):
            frag.rSFA[i, slot] = word
        for i, word in enumerate(ptx.load_shared(sfb, sf_offset, config.warp_n // 32)):
            frag.rSFB[i, slot] = word
        # A step is 32 bytes: two chunks of 16 bytes, which the swizzle moves as a pair.
        address = (self.a_address + stage * config.a_bytes) ^ (k_block * 32)
        for m in range(config.warp_m // 16):
            for i, word in enumerate(ptx.ldmatrix_x4(address, m * 16 * config.row_bytes)):
                frag.rA[i, m, slot] = word

    def load_b(self, frag: Fragments, stage, k_block, half):
        """One half of B's columns of MMA step ``k_block``."""
        config = self.config
        address = (self.b_address + stage * config.b_bytes) ^ (k_block * 32)
        for n16 in self.n16_tiles(half):
            for i, word in enumerate(ptx.ldmatrix_x4(address, n16 * 16 * config.row_bytes)):
                frag.rB[i % 2, 2 * n16 + i // 2] = word

    def n16_tiles(self, half):
        count = self.config.warp_n // 32
        return range(half * count, (half + 1) * count)

    def mma(self, acc, frag: Fragments, k_block, half):
        slot = k_block % 2
        for m in range(self.config.warp_m // 16):
            for n in (n8 for n16 in self.n16_tiles(half) for n8 in (2 * n16, 2 * n16 + 1)):
                out = ptx.mma_nvfp4(
                    [acc[i, n, m] for i in range(4)],
                    [frag.rA[i, m, slot] for i in range(4)],
                    [frag.rB[i, n] for i in range(2)],
                    frag.rSFA[m // 2, slot],
                    m % 2,
                    frag.rSFB[n // 4, slot],
                    n % 4,
                )
                for i in range(4):
                    acc[i, n, m] = out[i]

    def make_accumulators(self):
        # (value, n8 tiles, m16 tiles)
        return cute.make_rmem_tensor((4, self.config.warp_n // 8, self.config.warp_m // 16), Float32)

    @cute.jit
    def multiply_tile(self, acc, state):
        """Overwrite ``acc`` with the tile's sum over K, always in ascending K; returns the next position.

        Loads run half an MMA step ahead of the MMAs, across stages too.
        """
        config, barriers = self.config, self.barriers
        frag = Fragments.make(config)
        acc.fill(0.0)
        cute.arch.mbarrier_wait(barriers.full + state.index, state.phase)
        self.load_a(frag, state.index, 0)
        self.load_b(frag, state.index, 0, 0)
        for k_tile in cutlass.range(config.k_tiles, unroll=1):
            for k_block in range_constexpr(config.k_blocks):
                self.load_b(frag, state.index, k_block, 1)
                self.mma(acc, frag, k_block, 0)
                if const_expr(k_block + 1 < config.k_blocks):
                    self.load_a(frag, state.index, k_block + 1)
                    self.load_b(frag, state.index, k_block + 1, 0)
                else:
                    cute.arch.mbarrier_arrive(barriers.empty + state.index)
                    state.advance()
                    if k_tile + 1 < config.k_tiles:
                        cute.arch.mbarrier_wait(barriers.full + state.index, state.phase)
                        self.load_a(frag, state.index, 0)
                        self.load_b(frag, state.index, 0, 0)
                self.mma(acc, frag, k_block, 1)
        return state


def shared_address(smem):
    """32-bit byte address of a shared-memory tensor."""
    return Int32(smem.iterator.toint())
