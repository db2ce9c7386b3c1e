"""Runs workers, several at a time, and keeps what they made in a cache of files."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ringfp4.build_cubins.elf import Cubin, read_cubin
from ringfp4.build_cubins.job import DSL_ARCH, Job, kernel_module
from ringfp4.build_cubins.ptx import Ptx, read_ptx
from ringfp4.build_cubins.sass import Sass, read_sass
from ringfp4.errors import BuildError


@dataclass(frozen=True)
class Built:
    """What one compile gave, with the facts read from it."""

    ptx: str
    image: bytes
    listing: str

    @cached_property
    def ptx_facts(self) -> Ptx:
        return read_ptx(self.ptx)

    @cached_property
    def elf(self) -> Cubin:
        return read_cubin(self.image)

    @cached_property
    def sass(self) -> Sass:
        return read_sass(self.listing)


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ringfp4" / "cubins"


class Compiler:
    """Compiles jobs, ``workers`` at a time. ``cache`` None keeps nothing between runs.

    ``force`` compiles even what the cache has, and puts the new result there.
    """

    def __init__(self, cache: Path | None, workers: int, force: bool = False) -> None:
        self.cache, self.workers, self.force = cache, workers, force
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    def run(self, jobs: Sequence[Job], done: Callable[[Job, bool], None]) -> dict[Job, Built]:
        """``done(job, cached)`` is called as each finishes. BuildError names every failed job."""
        results: dict[Job, Built] = {}
        failures: list[BuildError] = []
        with ThreadPoolExecutor(self.workers) as pool:
            futures = {pool.submit(self._get, job): job for job in jobs}
            try:
                for future in as_completed(futures):
                    job = futures[future]
                    try:
                        results[job], cached = future.result()
                        done(job, cached)
                    except BuildError as error:
                        failures.append(error)
            except BaseException:
                self._stop()
                pool.shutdown(cancel_futures=True)
                raise
        raise_together(failures)
        return results

    def _get(self, job: Job) -> tuple[Built, bool]:
        file = self.cache / f"{job.key()}.json" if self.cache else None
        if file and not self.force and (built := _load(file)):
            return built, True
        return self._compile(job, file), False

    def _compile(self, job: Job, keep: Path | None) -> Built:
        with tempfile.TemporaryDirectory(prefix="ringfp4-") as folder:
            out = Path(folder) / "built.json"
            # Settings of the DSL (line tables, optimisation) would change the bytes.
            environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
            command = [sys.executable, "-P", "-m", "ringfp4.build_cubins.worker", str(out)]
            task = pickle.dumps((kernel_module(job.config), job.config, DSL_ARCH[job.arch], job.arch == "twin"))
            if self._stopped.is_set():
                raise BuildError(f"{job.label} was not compiled: the build was interrupted")
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            self._running.add(process)
            output, _ = process.communicate(task)
            self._running.discard(process)
            built = _load(out)
            if process.returncode or built is None:
                tail = "\n".join(output.decode(errors="replace").splitlines()[-25:])
                raise BuildError(f"{job.label} did not compile; exit status {process.returncode}\n{tail}")
            if keep:
                write_atomically(keep, out.read_bytes())
            return built

    def _stop(self) -> None:
        self._stopped.set()
        for process in list(self._running):
            process.kill()


def raise_together(failures: Sequence[BuildError]) -> None:
    if len(failures) == 1:
        raise failures[0]
    if failures:
        text = "\n".join(str(failure) for failure in sorted(failures, key=str))
        raise BuildError(f"{len(failures)} kernels failed:\n{text}")


def write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _load(file: Path) -> Built | None:
    """A worker's output; None if there is none or it is damaged."""
    try:
        parts = json.loads(file.read_bytes())
        return Built(parts["ptx"], base64.b64decode(parts["cubin"]), parts["listing"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
