"""What an aarch64 wheel must do without a GPU; wheels/arm64.sh runs it under emulation.

One process for everything, since importing torch there takes more than a minute.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import ringfp4.__main__
from ringfp4 import demo
from ringfp4.runtime import devices, manifest


def verify_artefacts() -> None:
    """Every cubin of the wheel is what its manifest says. Raises ArtifactError."""
    (packaged,) = manifest.read_all([devices.PACKAGED])
    size = sum(len(entry.image()) for entry in packaged.kernels)
    print(f"{len(packaged.kernels)} artefacts verified, {size:,} bytes, for {', '.join(packaged.archs)}")


def main() -> int:
    repository = Path(__file__).resolve().parents[1]
    assert platform.machine() == "aarch64"
    assert Path(ringfp4.__file__).is_relative_to(repository / "build/arm64/wheel")
    ringfp4.__main__.main([])
    verify_artefacts()
    demo.N, demo.K = 256, 512  # the emulator is slow
    failed = demo.main(["--cpu"])
    # Not the other driver tests: they start processes that would import torch again.
    return failed or pytest.main(
        ["-p", "no:cacheprovider", str(repository / "tests/driver/test_driver_sequence.py")]
    )


if __name__ == "__main__":
    sys.exit(main())
