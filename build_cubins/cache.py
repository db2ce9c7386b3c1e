"""What was compiled before: one compressed file a compile, named by the hash of all that decides it."""

from __future__ import annotations

import contextlib
import gzip
import os
import time
import zlib
from pathlib import Path

from ringfp4.files import write_atomically

_DAYS = 30  # an entry that no build used for so long goes


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ringfp4" / "cubins"


class Cache:
    """Outputs of workers in a folder that several builds may use at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> bytes | None:
        """The entry's content, None if there is none or it is damaged."""
        file = self._file(key)
        try:
            content = gzip.decompress(file.read_bytes())
            os.utime(file)
        except (OSError, EOFError, zlib.error):
            return None
        return content

    def store(self, key: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file(key), gzip.compress(content, 6, mtime=0))

    def prune(self) -> None:
        oldest = time.time() - _DAYS * 86_400
        for file in self.folder.glob("*.json.gz"):
            with contextlib.suppress(FileNotFoundError):  # another build was faster
                if file.stat().st_mtime < oldest:
                    file.unlink()

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json.gz"
