"""The few raw PTX instructions that the DSL does not offer as such.

Shared-memory addresses are 32-bit byte addresses; ``offset`` is a byte constant folded into
the instruction. Everything that touches memory is marked as a side effect, so neither LLVM nor
ptxas moves it across a barrier.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


def hand_over():
    """Begin where the kernel before ended: wait until it is complete and its writes are visible.

    From then on the kernel after this one may be launched. Every thread must call it before it touches
    memory that other kernels of the sequence use (programmatic dependent launch, CUDA programming guide). In
    a kernel that is not launched early there is nothing to wait for.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


def asm(text, constraints, inputs, results=(), *, side_effects, loc=None, ip=None):
    """Emit one inline-assembly statement.

    ``inputs`` are DSL values, ``results`` DSL types; returns a list with one value per result.
    """
    types = [t.mlir_type for t in results]
    if not types:
        result_type = None
    elif len(types) == 1:
        result_type = types[0]
    else:
        result_type = llvm.StructType.get_literal(types)
    out = llvm.inline_asm(
        result_type,
        [x.ir_value(loc=loc, ip=ip) for x in inputs],
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if len(types) < 2:
        return [t(out) for t in results]
    return [
        t(llvm.extractvalue(m, out, [i], loc=loc, ip=ip))
        for i, (t, m) in enumerate(zip(results, types, strict=True))
    ]


@dsl_user_op
def mma_nvfp4(acc, a, b, sfa, thread_a, sfb, thread_b, *, loc=None, ip=None):
    """acc + (SFA * A) @ (SFB * B)^T for one m16n8k64 tile of E2M1 with E4M3 scales per 16 columns.

    ``acc`` 4 Float32, ``a`` 4 Int32, ``b`` 2 Int32. ``sfa``/``sfb`` hold the four scales of one
    row each; ``thread_a`` (0, 1) selects the lane pair of each quad that holds rows g and g + 8
    of A, ``thread_b`` (0..3) the lane that holds row g of B (PTX ISA, block scaling of
    ``mma.sync``). So one scale register serves two A tiles or four B tiles.
    """
    return asm(
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
        ".f32.e2m1.e2m1.f32.ue4m3 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13}, "
        f"$14, {{0,{thread_a}}}, $15, {{0,{thread_b}}};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f,r,r",
        [*a, *b, *acc, sfa, sfb],
        [Float32] * 4,
        side_effects=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def ldmatrix_x4(address, offset, *, loc=None, ip=None):
    """Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l // 8."""
    return asm(
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];",
        "=r,=r,=r,=r,r",
        [address],
        [Int32] * 4,
        side_effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def stmatrix_x4(address, words, *, loc=None, ip=None):
    """Store four 8x8 matrices of 16-bit elements; addresses as for ``ldmatrix_x4``."""
    asm(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};",
        "r,r,r,r,r",
        [address, *words],
        side_effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_shared(address, offset, words, *, loc=None, ip=None):
    """``words`` (1, 2 or 4) consecutive 32-bit words, aligned to their total size."""
    outs = ",".join(f"${i}" for i in range(words))
    vector = "" if words == 1 else f".v{words}"
    outs = outs if words == 1 else f"{{{outs}}}"
    return asm(
        f"ld.shared{vector}.b32 {outs}, [${words}+{offset}];",
        ",".join(["=r"] * words + ["r"]),
        [address],
        [Int32] * words,
        side_effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def mul_add_to_bf16x2(low, high, factor, addends, *, loc=None, ip=None):
    """bf16x2 of (x * factor + addend): product and sum rounded to FP32 apart, never fused.

    ``addends`` is a bf16x2 word.
    """
    return asm(
        "{ .reg .f32 l, h, a; .reg .b32 t; mul.rn.f32 l, $1, $3; mul.rn.f32 h, $2, $3; "
        "shl.b32 t, $4, 16; mov.b32 a, t; add.rn.f32 l, l, a; "
        "and.b32 t, $4, 0xFFFF0000; mov.b32 a, t; add.rn.f32 h, h, a; cvt.rn.bf16x2.f32 $0, h, l; }",
        "=r,f,f,f,r",
        [low, high, factor, addends],
        [Int32],
        side_effects=False,
        loc=loc,
        ip=ip,
    )[0]
