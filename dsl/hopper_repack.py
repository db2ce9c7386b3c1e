"""Comfy's weight layout -> the Hopper layout, byte for byte as runtime/hopper_layout.py has it.

w is E2M1 [N, K / 2], even column in the high nibble; w_sf E4M3 in the 128 x 4 swizzle; packed
receives N / 64 strips of K / 64 blocks of 2,304 bytes. One CTA makes one block.
"""

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint8, Uint32, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_ptr
from ringfp4.dsl.config.hopper import STRIP_BYTES, STRIP_ROWS, TILE_K, HopperRepackConfig

SF_TILE_BYTES = 512  # 128 rows x 4 blocks of 16 columns
DATA_WORDS = STRIP_ROWS * TILE_K // 8


class HopperRepack:
    def __init__(self, config: HopperRepackConfig):
        self.config = config
        self.k_steps = config.k // TILE_K

    @cute.jit
    def __call__(self, w: cute.Pointer, w_sf: cute.Pointer, packed: cute.Pointer, stream):
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(w, w_sf, packed).launch(grid=(1, 1, 1), block=(self.config.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, w: cute.Pointer, w_sf: cute.Pointer, packed: cute.Pointer):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        strip = cta // self.k_steps
        k_step = cta - strip * self.k_steps
        block = packed + Int64(cta) * (STRIP_BYTES // 4)
        # The thread's place in wgmma's A fragment: rows g and g + 8 of its warp's 16, column pair c.
        c, row = thread % 4, thread // 32 * 16 + thread % 32 // 4

        words = [Uint32(0)] * 4  # one for each k16
        for half in range_constexpr(2):
            r = strip * STRIP_ROWS + row + 8 * half
            sf = self.row_scales(w_sf, r, k_step)
            data = w + Int64(r) * (self.config.k // 2) + k_step * (TILE_K // 2)
            for k16 in range_constexpr(4):
                zero_scale = (sf[k16] & Uint8(0x7F)) == Uint8(0)
                for k8 in range_constexpr(2):
                    pair = Uint32(data[k16 * 8 + k8 * 4 + c])
                    if zero_scale:
                        pair = Uint32(0)
                    words[k16] |= place(pair >> 4, half, k8) | place(pair & 15, half, k8) << 16
        for k16 in range_constexpr(4):
            block[thread * 4 + k16] = words[k16]

        if c < 2:
            scales = Uint32(0)
            for half in range_constexpr(2):
                sf = self.row_scales(w_sf, strip * STRIP_ROWS + row + 8 * half, k_step)
                for odd in range_constexpr(2):
                    scales |= encode_scale(sf[c * 2 + odd]) << (16 * half + 8 * odd)
            block[DATA_WORDS + thread // 4 * 2 + c] = scales

    def row_scales(self, w_sf: cute.Pointer, row, k_step) -> cute.Pointer:
        """The four scales of a row in one K step: consecutive bytes of a 128 x 4 tile."""
        tile = Int64(row // 128 * self.k_steps + k_step) * SF_TILE_BYTES
        return w_sf + tile + (row % 32 * 16 + row % 128 // 32 * 4)


def place(code, half, k8):
    """An E2M1 code in its 16 bits of a word: where one shift and mask make it BF16's bits."""
    sign, magnitude = code >> 3, code & 7
    if (half, k8) == (0, 0):
        return sign << 15 | magnitude << 6
    if (half, k8) == (1, 0):
        return sign << 12 | magnitude << 3
    if (half, k8) == (0, 1):
        return sign << 9 | magnitude
    return sign << 14 | (magnitude >> 2) << 13 | (magnitude & 3) << 10


@cute.jit
def encode_scale(byte: Uint8) -> Uint32:
    """E4M3 -> five bits of exponent (+ 21), three of mantissa, normalised; zero is 0, NaN 0xFF."""
    e4m3 = Uint32(byte) & 0x7F
    code = e4m3 + 112
    if e4m3 < 8:  # subnormal: FP32 normalises it
        code = (Uint32(Float32(e4m3).bitcast(Uint32)) >> 20) - 920
    if e4m3 == 0:
        code = Uint32(0)
    if e4m3 == 0x7F:
        code = Uint32(0xFF)
    return code


def compile_kernel(config: HopperRepackConfig):
    """The compiled kernel; its entry is config.name, its parameters are config.params()."""

    def pointer(dtype, align):
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    return cute.compile(
        HopperRepack(config), pointer(Uint8, 16), pointer(Uint8, 16), pointer(Uint32, 16), make_fake_stream()
    )
