"""Compiles jobs, several at a time, and keeps the results in a cache of files."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ringfp4.build_cubins.cache import Cache
from ringfp4.build_cubins.elf import Cubin, read_cubin
from ringfp4.build_cubins.job import DSL_ARCH, Job, kernel_module
from ringfp4.build_cubins.ptx import Ptx, read_ptx
from ringfp4.build_cubins.sass import Sass, read_sass
from ringfp4.errors import BuildError

COMPILED, UNCHANGED, FAILED = "compiled", "unchanged", "failed"  # outcomes of a job


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


class Compiler:
    """Compiles jobs, ``threads`` at a time. ``cache`` None keeps nothing between runs.

    ``force`` compiles even what the cache has, and puts the new result there.
    """

    def __init__(self, cache: Path | None, threads: int, force: bool = False) -> None:
        self.cache = Cache(cache) if cache else None
        self.threads, self.force = threads, force
        self._workers: list[_Worker] = []
        self._own = threading.local()  # a thread's worker

    def run(
        self, jobs: Sequence[Job], done: Callable[[Job, str], None] = lambda job, outcome: None
    ) -> tuple[dict[Job, Built], dict[Job, str]]:
        """What was built, and why the others were not. ``done(job, outcome)`` marks each one's end."""
        results: dict[Job, Built] = {}
        failures: dict[Job, str] = {}
        pool = ThreadPoolExecutor(self.threads)
        try:
            futures = {pool.submit(self._get, job): job for job in jobs}
            for future in as_completed(futures):
                job = futures[future]
                try:
                    results[job], outcome = future.result()
                except BuildError as error:
                    failures[job], outcome = str(error), FAILED
                done(job, outcome)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._stop()  # after an interrupt threads wait for their workers
            pool.shutdown()
            self._stop()  # what a thread started meanwhile
        if self.cache:
            self.cache.prune()
        return results, failures

    def _get(self, job: Job) -> tuple[Built, str]:
        if self.cache is None:
            return _decode(self._compile(job)), COMPILED
        key = job.key()
        if not self.force and (output := self.cache.load(key)):
            return _decode(output), UNCHANGED
        output = self._compile(job)
        if job.key() == key:  # else the sources were edited meanwhile
            self.cache.store(key, output)
        return _decode(output), COMPILED

    def _compile(self, job: Job) -> bytes:
        arch = DSL_ARCH[job.arch]
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is None or worker.arch != arch:
            self._own.worker = worker = _Worker(arch)
            self._workers.append(worker)
        return worker.compile(kernel_module(job.config), job.config, job.arch == "twin")

    def _stop(self) -> None:
        while self._workers:
            self._workers.pop().stop()


class _Worker:
    """A worker process (worker.py) and its temporary folder."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._folder = tempfile.TemporaryDirectory(prefix="ringfp4-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "log"
        # Settings of the DSL (line tables, optimisation) would change the bytes.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ringfp4.build_cubins.worker", arch, self._folder.name],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # so that stop() reaches its children too
            )

    def compile(self, *task: object) -> bytes:
        """built.json of a task; BuildError with the end of what was printed if it failed."""
        assert self._process.stdin
        assert self._process.stdout
        with tempfile.TemporaryDirectory(dir=self._folder.name, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "task.pickle").write_bytes(pickle.dumps(task))
            try:
                self._process.stdin.write(f"{folder}\n")
                self._process.stdin.flush()
                status = self._process.stdout.readline().strip()
            except OSError:
                status = ""
            if status == "0":
                return (folder / "built.json").read_bytes()
            log = folder / "log" if status else self._log
            printed = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))  # colours
            tail = "\n".join(printed.strip().splitlines()[-25:])
            raise BuildError(f"did not compile, exit status {status or 'of the worker unknown'}\n{tail}")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()


def raise_failed(failures: Mapping[Job, str]) -> None:
    """BuildError naming every failed job, each reason once; nothing if there is none."""
    if not failures:
        return
    labels: dict[str, list[str]] = {}
    for job in sorted(failures, key=lambda job: job.file):
        labels.setdefault(failures[job], []).append(job.label)
    reasons = "\n".join(f"{', '.join(names)}: {reason}" for reason, names in labels.items())
    raise BuildError(f"{len(failures)} kernel(s) failed, nothing was written\n{reasons}")


def _decode(output: bytes) -> Built:
    parts = json.loads(output)
    return Built(parts["ptx"], base64.b64decode(parts["cubin"]), parts["listing"])
