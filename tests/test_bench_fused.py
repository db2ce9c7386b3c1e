"""What the fused benchmark makes of Nsight Compute's report."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

REPORT = """==PROF== Connected to process 1
==PROF== Profiling "pack_k5376_0": 0%....50%....100%
"ID","Process ID","Process Name","Host Name","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","python","host","pack_k5376_0","dram__bytes_read.sum","Mbyte","406.50"
"0","1","python","host","pack_k5376_0","dram__bytes_write.sum","Kbyte","1,024.00"
"1","1","python","host","gemm_n21504_k5376_0","dram__bytes_read.sum","Gbyte","1.25"
"1","1","python","host","gemm_n21504_k5376_0","dram__bytes_write.sum","byte","512"
"""


@pytest.fixture
def fused(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository))
    return importlib.import_module("bench.fused")


def test_bytes_are_summed_over_kernels_and_units(fused: ModuleType) -> None:
    traffic = fused.traffic_in(REPORT)
    assert traffic.read == pytest.approx(406.5e6 + 1.25e9)
    assert traffic.written == pytest.approx(1024e3 + 512)
    assert str(traffic) == "1.66 GB read, 0.00 written"


def test_a_report_without_kernels_is_empty(fused: ModuleType) -> None:
    assert fused.traffic_in("==ERROR== no permission").read == 0
