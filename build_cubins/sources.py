"""Hashes of the sources that decide a kernel's bytes, and of all of them."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

_OWN = ("ringfp4.dsl", "ringfp4.build_cubins")
_ROOT = Path(__file__).resolve().parents[1]


def source_hash() -> str:
    """SHA-256 over every Python file of dsl/ and build_cubins/, by relative name and content."""
    files = [*(_ROOT / "dsl").rglob("*.py"), *(_ROOT / "build_cubins").rglob("*.py")]
    return _digest((file.relative_to(_ROOT).as_posix(), file) for file in sorted(files))


def closure_hash(modules: Iterable[str]) -> str:
    """SHA-256 over ``modules`` and what they import, directly or not, of dsl and build_cubins."""
    files: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        file = None if name in files else _file_of(name)
        if file is not None:
            files[name] = file
            waiting.extend(n for n in _imports(file.read_text(), name) if n.startswith(_OWN))
    return _digest(sorted(files.items()))


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def _file_of(module: str) -> Path | None:
    """A module's source; None for a name that is not one (``from module import function``).

    By path, since importlib would import a module to look into it, and with it the DSL.
    """
    package, *parts = module.split(".")
    if package != "ringfp4":
        spec = importlib.util.find_spec(module)
        return Path(spec.origin) if spec and spec.origin else None
    path = _ROOT.joinpath(*parts)
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@functools.cache
def _imports(source: str, module: str) -> set[str]:
    """Names that may be modules; an imported function's dotted name is among them."""
    package = module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names.add(origin)
            names.update(f"{origin}.{alias.name}" for alias in node.names)
    return names
