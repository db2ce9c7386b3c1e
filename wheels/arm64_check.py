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


def main() -> int:
    repository = Path(__file__).resolve().parents[1]
    assert platform.machine() == "aarch64"
    assert Path(ringfp4.__file__).is_relative_to(repository / "build/arm64/wheel")
    demo.N, demo.K = 256, 512  # the emulator is slow
    # The doctor verifies every artefact that the wheel carries.
    failed = ringfp4.__main__.main([]) or demo.main(["--cpu"])
    # Not the other driver tests: they start processes that would import torch again.
    return failed or pytest.main(
        ["-p", "no:cacheprovider", str(repository / "tests/driver/test_driver_sequence.py")]
    )


if __name__ == "__main__":
    sys.exit(main())
