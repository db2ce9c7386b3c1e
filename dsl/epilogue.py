"""Epilogue: accumulators -> y = bf16(alpha * acc + bias) -> shared memory -> TMA store.

Each MMA warp stores its own part of the output tile through its own buffers, so warps never
wait for each other. The tensor map clips rows beyond m and columns beyond N.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr
from cutlass.cute.nvgpu import cpasync

from . import ptx
from .config.gemm import STORE_COLS, STORE_ROWS, GemmConfig
from .mainloop import shared_address

BUFFER_BYTES = STORE_ROWS * STORE_COLS * 2
NEGATIVE_ZEROS = -0x7FFF8000  # 0x80008000, a bf16x2 word


@dataclass(frozen=True)
class Epilogue:
    """Stores the warp_m x warp_n part of one warp, STORE_ROWS x STORE_COLS at a time."""

    config: GemmConfig
    atom: cute.CopyAtom
    source: cute.Tensor  # (store, buffers of all warps)
    destination: cute.Tensor  # (store, blocks of 8 rows, blocks of 64 columns)
    bias: cute.Pointer  # BF16 (N), may be null
    address: Any  # stmatrix row of this lane in its warp's first buffer
    warp: Any
    lane: Any

    @classmethod
    def make(cls, config: GemmConfig, atom, mY, sC, bias, warp, lane):
        gY = cute.local_tile(mY, (STORE_ROWS, STORE_COLS), (None, None))
        source, destination = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(gY, 0, 2)
        )
        # Lane l addresses row l % 8 of 16-byte column l // 8; the 128-byte swizzle XORs the row
        # into the column.
        address = shared_address(sC) + warp * (config.store_buffers * BUFFER_BYTES)
        address += lane % 8 * (2 * STORE_COLS) + ((lane // 8) ^ (lane % 8)) * 16
        return cls(config, atom, source, destination, bias, address, warp, lane)

    @cute.jit
    def load_bias(self, column):
        """Bias of this lane's accumulator columns, a bf16x2 word for each n8 tile.

        Without a bias -0.0 twice, which leaves every sum as it is, zeros of both signs included.
        """
        rBias = cute.make_rmem_tensor((STORE_COLS // 8,), Int32)
        rBias.fill(NEGATIVE_ZEROS)
        if self.bias.toint() != 0:
            mBias = cute.make_tensor(
                cute.recast_ptr(self.bias, dtype=Int32), cute.make_layout(self.config.n // 2)
            )
            for n in range_constexpr(STORE_COLS // 8):
                first = column + n * 8
                if first < self.config.n:
                    rBias[n] = mBias[first // 2 + self.lane % 4]
        return rBias

    def to_bf16(self, acc, alpha, rBias, block, n_tiles):
        """This lane's outputs of 8 rows, a bf16x2 word for each of the n8 tiles."""
        m, first = block // 2, block % 2 * 2
        return [
            ptx.mul_add_to_bf16x2(acc[first, n, m], acc[first + 1, n, m], alpha, rBias[n]) for n in n_tiles
        ]

    @cute.jit
    def store_tile(self, acc, alpha, m_tile, n_tile):
        config = self.config
        row_block = (m_tile * config.tile_m + self.warp // config.warps_n * config.warp_m) // STORE_ROWS
        column_block = n_tile * config.warps_n + self.warp % config.warps_n
        rBias = self.load_bias(column_block * STORE_COLS)
        for block in range_constexpr(config.warp_m // STORE_ROWS):
            buffer = block % config.store_buffers
            # Free once the copy engine has read what was stored store_buffers blocks ago.
            cute.arch.cp_async_bulk_wait_group(config.store_buffers - 1, read=True)
            cute.arch.sync_warp()
            for quad in range_constexpr(2):
                words = self.to_bf16(acc, alpha, rBias, block, range(quad * 4, quad * 4 + 4))
                ptx.stmatrix_x4((self.address + buffer * BUFFER_BYTES) ^ (quad * 64), words)
            # Make the writes visible to the copy engine.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            slot = self.warp * config.store_buffers + buffer
            cute.copy(
                self.atom,
                self.source[(None, slot)],
                self.destination[(None, row_block + block, column_block)],
            )
            cute.arch.cp_async_bulk_commit_group()

    def finish(self):
        """Shared memory may be given up once the copy engine has read it."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def read_alpha(scale, w_scale) -> Float32:
    """fl32(activation scale * weight scale), both in device memory."""
    return scale[0] * w_scale[0]
