"""Reading machine code: opcodes, natural loops and the main loop, on listings written by hand."""

from __future__ import annotations

import pytest
from ringfp4.build_cubins.sass import natural_loops, read_sass
from ringfp4.errors import BuildError


def listing(*lines: str) -> str:
    """As nvdisasm prints it; a line that starts with a dot is a label."""
    out, address = [], 0
    for line in lines:
        if line.startswith("."):
            out.append(f"{line}:")
        else:
            out.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(out)


NESTED = listing(
    "S2R R0, SR_TID.X",
    ".L_x_0",  # the tile loop
    "LDG.E R2, desc[UR4][R2.64]",
    ".L_x_1",  # the K loop
    "LDSM.16.M88.4 R4, [R3]",
    "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R8, R4, R6, R8, R2, R3, UR5",
    "@!P0 BRA `(.L_x_3)",  # wait, out of line
    ".L_x_4",
    "@P1 BRA `(.L_x_1)",
    "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R8, R4, R6, R8, R2, R3, UR5",  # peeled
    "STG.E desc[UR4][R2.64], R8",
    "@P2 BRA `(.L_x_0)",
    "EXIT",
    ".L_x_3",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2",
    "@!P0 BRA `(.L_x_3)",
    "BRA `(.L_x_4)",
    ".L_x_5",
    "BRA `(.L_x_5)",  # what ptxas puts after the end
)


def test_loops() -> None:
    """Tile loop, K loop and waiting loop; the unreachable one after the end is none."""
    sass = read_sass(NESTED)
    bodies = {frozenset(sass.code[i].opcode.split(".")[0] for i in loop) for loop in natural_loops(sass)}
    assert bodies == {
        frozenset({"LDG", "LDSM", "OMMA", "BRA", "STG", "SYNCS"}),
        frozenset({"LDSM", "OMMA", "BRA", "SYNCS"}),
        frozenset({"SYNCS", "BRA"}),
    }


def test_main_loop_is_the_innermost_with_the_most_tensor_instructions() -> None:
    loop = read_sass(NESTED).main_loop()
    assert loop["OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"] == 1
    assert loop["STG.E"] == 0
    assert loop.total() == 7


def test_counts_and_predicates() -> None:
    sass = read_sass(
        listing(
            "@!UPT UIADD3 URZ, UPT, UPT, URZ, URZ, URZ",
            "@P0 LDL.64 R2, [R1]",
            "LDS.64 R2, [R1]",
            "LDSM.16.M88.4 R4, [R3]",
            "USETMAXREG.DEALLOC.CTAPOOL 0x28",
            "BRA.U UP0, `(.L_x_9)",
            "EXIT",
            ".L_x_9",
        )
    )
    assert sass.count(r"LDS\b") == 1
    assert sass.count("LDSM") == 1
    assert sass.count(r"(LDL|STL)\b") == 1
    assert sass.count("USETMAXREG") == 1
    assert [i.predicated for i in sass.code[:3]] == [True, True, False]
    assert not sass.main_loop()


def test_kernel_without_loops_has_no_main_loop() -> None:
    assert not read_sass(listing("HMMA.16816.F32 R0, R2, R4, R0", "EXIT")).main_loop()


def test_empty_listing_is_refused() -> None:
    with pytest.raises(BuildError, match="no instructions"):
        read_sass("nvdisasm fatal   : something")


@pytest.mark.parametrize(
    ("lines", "before"),
    [
        (("S2R R0, SR_TID.X", "ACQBULK", "STG.E desc[UR4][R2.64], R0", "EXIT"), ["S2R"]),
        (("@P0 ACQBULK", "STG.E desc[UR4][R2.64], R0", "EXIT"), ["ACQBULK", "STG.E", "EXIT"]),
        # One of two ways to the store waits.
        (
            (
                "@P0 BRA `(.L_x_0)",
                "ACQBULK",
                "BRA `(.L_x_1)",
                ".L_x_0",
                "NOP",
                ".L_x_1",
                "STG.E [R2], R0",
                "EXIT",
            ),
            ["BRA", "NOP", "STG.E", "EXIT"],
        ),
        (("@P0 EXIT", "ACQBULK", "STG.E desc[UR4][R2.64], R0", "EXIT"), ["EXIT"]),
    ],
)
def test_what_can_be_executed_before_a_wait(lines: tuple[str, ...], before: list[str]) -> None:
    assert [i.opcode for i in read_sass(listing(*lines)).before("ACQBULK")] == before
