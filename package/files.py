"""Files that appear complete or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside ``path``, then rename; its folder must exist. Whoever reads sees the old or the new."""
    file = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        file.write_bytes(content)
        os.replace(file, path)
    finally:
        file.unlink(missing_ok=True)
