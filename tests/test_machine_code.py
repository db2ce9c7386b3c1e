"""The machine code of every cubin of shapes/h3.toml, for both shipped architectures.

LIMITS holds how many instructions of the main loop one FP4 MMA may cost; a change that needs
more fails here, and must be argued for by changing the table.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from ringfp4.build_cubins.machine_code import MachineCode, main, page, read_folder
from ringfp4.build_cubins.sass import TENSOR, count

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the build extra (the DSL)"
)

ARCHS = ("sm_121a", "sm_120f")
FP4_MMA = r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X$"
MMA_K = 64

# (kind, tile_m, tile_n): instructions per MMA, LDSM, LDS, at most, in the main loop.
LIMITS = {
    ("gemm", 128, 128): (3.75, 12, 4),
    ("gemm", 128, 256): (4.00, 16, 4),
    ("ring_gemm", 128, 128): (4.00, 12, 4),
}


@pytest.fixture(scope="module")
def kernels(built_h3: Path) -> list[MachineCode]:
    return read_folder(built_h3)


def of_kind(kernels: list[MachineCode], *kinds: str) -> list[MachineCode]:
    found = [kernel for kernel in kernels if kernel.entry["kind"] in kinds]
    assert found
    return found


def test_every_linear_has_every_kernel(kernels: list[MachineCode]) -> None:
    roles = {"qkv", "attn_out", "fc1", "fc2"}
    for arch in ARCHS:
        for kind in ("absmax", "pack", "gemm"):
            entries = [k.entry for k in of_kind(kernels, kind) if k.entry["arch"] == arch]
            assert set().union(*(entry["roles"] for entry in entries)) == roles


def test_architecture_and_assembler(kernels: list[MachineCode]) -> None:
    assert {kernel.elf.arch for kernel in kernels} == set(ARCHS)
    assert all(kernel.elf.arch == kernel.entry["arch"] for kernel in kernels)
    assert all(kernel.elf.ptxas.startswith("12.9.") for kernel in kernels)


def test_no_local_memory(kernels: list[MachineCode]) -> None:
    for kernel in kernels:
        assert kernel.elf.stack_bytes == 0, kernel.entry["file"]
        assert kernel.sass.count(r"(LDL|STL)\b") == 0, kernel.entry["file"]


def test_resources_fit(kernels: list[MachineCode]) -> None:
    for kernel in kernels:
        assert kernel.entry["smem_bytes"] + kernel.elf.static_smem <= 101_376
        assert kernel.elf.registers * kernel.entry["threads"] <= 65_536
        assert kernel.elf.barriers <= 16
        assert kernel.elf.registers == kernel.entry["registers"]


def test_setmaxnreg_is_in_effect(kernels: list[MachineCode]) -> None:
    """One warpgroup gives registers away, the others take them; both are in the machine code."""
    for kernel in of_kind(kernels, "gemm", "ring_gemm"):
        assert kernel.sass.count(r"USETMAXREG\.DEALLOC") >= 1, kernel.entry["file"]
        assert kernel.sass.count(r"USETMAXREG\.TRY_ALLOC") >= 1, kernel.entry["file"]


def test_one_step_of_the_main_loop(kernels: list[MachineCode]) -> None:
    """The loop is one K step of a warp: as many FP4 MMAs as its share of the tile needs."""
    for kernel in of_kind(kernels, "gemm", "ring_gemm"):
        tile_m, tile_n, tile_k = kernel.entry["tile"]
        config = kernel.entry["config"]
        config = config.get("gemm", config)
        warps = config["warps_m"] * config["warps_n"]
        expected = tile_m * tile_n * tile_k // (16 * 8 * MMA_K * warps)
        loop = kernel.sass.main_loop()
        assert count(loop, FP4_MMA) == expected, kernel.entry["file"]
        assert count(loop, TENSOR.pattern) == expected, kernel.entry["file"]


def test_no_regression(kernels: list[MachineCode]) -> None:
    for kernel in of_kind(kernels, "gemm", "ring_gemm"):
        tile_m, tile_n, _ = kernel.entry["tile"]
        per_mma, ldsm, lds = LIMITS[kernel.entry["kind"], tile_m, tile_n]
        loop = kernel.sass.main_loop()
        assert loop.total() <= per_mma * count(loop, FP4_MMA), kernel.entry["file"]
        assert count(loop, "LDSM") <= ldsm, kernel.entry["file"]
        assert count(loop, r"LDS\b") <= lds, kernel.entry["file"]


def test_quantiser_uses_the_conversion_instruction(kernels: list[MachineCode]) -> None:
    for kernel in of_kind(kernels, "pack", "ring_gemm"):
        assert kernel.sass.count(r"F2FP\.SATFINITE\.E2M1\.F32\.PACK_AB") > 0, kernel.entry["file"]


def test_page_of_the_documentation_is_current(kernels: list[MachineCode], repository: Path) -> None:
    current = (repository / "docs" / "machine_code.md").read_text()
    assert page(kernels) == current, "run: make machine-code"


def test_command_writes_the_page(built_h3: Path, kernels: list[MachineCode], tmp_path: Path) -> None:
    kernel = of_kind(kernels, "gemm")[0]
    shutil.copy(built_h3 / kernel.entry["file"], tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"kernels": [kernel.entry]}))
    assert main([str(tmp_path), "--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == page([kernel])
    assert f"| `{kernel.entry['name']}` | {kernel.entry['arch']} |" in page([kernel])


def test_command_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path}/manifest.json" in capsys.readouterr().err
