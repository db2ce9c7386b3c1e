"""Shapes files: which linears are built, with which tiles, for which architectures.

    [build]                      # optional
    arch = ["sm_120f"]

    [[linear]]
    name = "qkv"                 # the role, unique
    k = 5376                     # input features, a multiple of 32, at most 262144
    n = 21504                    # output features, a multiple of 8, at most 16777216
    tiles = ["128x128x128"]      # optional: variants to build; ringfp4.tune chooses among them

Every mistake is found before anything is compiled, and all are reported at once.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfp4.dsl.config import DEFAULT_TILES, Linear, Tile, plan
from ringfp4.dsl.config.base import ARCHS, ceil_div
from ringfp4.errors import ConfigError, ShapesError

SHIPPED = Path(__file__).resolve().parents[1] / "shapes"
DEFAULT_ARCHS = ("sm_121a", "sm_120f")

_KEYS: dict[str, type] = {"name": str, "k": int, "n": int, "tiles": list}
_DIVISORS = {"k": 32, "n": 8}
# Kernels unroll over K, so their code and the time to compile it grow with it (a minute at this limit);
# the runtime's reader of manifests takes no larger N for sane.
_LARGEST = {"k": 1 << 18, "n": 1 << 24}
_TYPES = {str: "a string", int: "an integer", list: "a list of strings", dict: "a table"}
Where = tuple[str | int, ...]


@dataclass(frozen=True)
class Request:
    linears: tuple[Linear, ...]
    archs: tuple[str, ...]


@dataclass(frozen=True)
class Mistake:
    where: str  # file:line
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. Remedy: {self.remedy}"

    def order(self) -> tuple[str, int]:
        """By file, then line."""
        file, _, line = self.where.rpartition(":")
        return (file, int(line)) if line.isdecimal() else (self.where, 0)


def shipped_names() -> list[str]:
    """Names of the ready-made files: ``--shapes NAME`` takes one of them."""
    return sorted(file.stem for file in SHIPPED.glob("*.toml"))


def load_shapes(
    files: Sequence[str | Path] = (), linears: Sequence[str] = (), archs: Sequence[str] = ()
) -> Request:
    """Read shapes files (paths or shipped names) and ``name=KxN`` items; H3 if there are neither.

    ``archs`` overrides what the files say. Raises ShapesError listing every mistake.
    """
    reader = _Reader()
    for file in files or (() if linears else ("h3",)):
        reader.read_file(_resolve(file))
    for item in linears:
        reader.read_item(item)
    return reader.finish(archs)


def key_lines(text: str) -> dict[Where, int]:
    """Line of each table and key of a TOML text, by path: ("linear", 0, "k"). tomllib has none."""
    lines: dict[Where, int] = {}
    seen: Counter[str] = Counter()
    prefix: Where = ()
    for number, line in enumerate(text.splitlines(), 1):
        if table := re.match(r"\s*(\[\[?)\s*([\w-]+)\s*\]\]?\s*(?:#.*)?$", line):
            prefix = (table[2], seen[table[2]]) if table[1] == "[[" else (table[2],)
            seen[table[2]] += table[1] == "[["
            lines[prefix] = number
        elif key := re.match(r"""\s*["']?([\w-]+)["']?\s*=""", line):
            lines[(*prefix, key[1])] = number
    return lines


def _resolve(file: str | Path) -> Path:
    path = Path(file)
    shipped = SHIPPED / f"{path}.toml"
    return shipped if not path.exists() and path.name == str(path) and shipped.exists() else path


class _Reader:
    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []
        self.linears: list[tuple[Linear, str, str]] = []  # with where it and its tiles stand
        self.archs: list[str] = []
        self._names: dict[str, str] = {}  # role -> where it was first named

    def report(self, where: str, what: str, remedy: str) -> None:
        self.mistakes.append(Mistake(where, what, remedy))

    def read_file(self, path: Path) -> None:
        try:
            text = path.read_text()
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            at = re.search(r"\(at (?:line (\d+).*|end of document)\)", str(error))
            line = int(at[1]) if at and at[1] else text.count("\n") + 1
            self.report(f"{path}:{line}", f"not TOML: {error}", "see https://toml.io for the syntax")
            return
        except (OSError, UnicodeDecodeError) as error:
            shipped = ", ".join(shipped_names())
            self.report(f"{path}", f"unreadable: {error}", f"give a file, or a shipped name ({shipped})")
            return
        _File(self, path, key_lines(text)).read(content)

    def read_item(self, item: str) -> None:
        where = f"--linear {item}"
        found = re.fullmatch(r"([^=]*)=(\d+)x(\d+)", item)
        if found is None:
            self.report(where, "not of the form name=KxN", "write, say, --linear qkv=5376x21504")
            return
        self.add(where, {}, {"name": found[1], "k": int(found[2]), "n": int(found[3])})

    def add(self, table_at: str, key_at: dict[str, str], values: dict[str, Any]) -> None:
        """Check one linear's values, all well-typed, and keep it if its sizes are right."""
        tiles_at = key_at.get("tiles", table_at)
        if "name" in values:
            self._name(key_at.get("name", table_at), values["name"])
        before = len(self.mistakes)
        for key, divisor in _DIVISORS.items():
            value = values.get(key, divisor)
            if value < divisor or value % divisor:
                what = f"{key} = {value} is not a positive multiple of {divisor}"
                remedy = f"pad the weight, here to {max(divisor, ceil_div(value, divisor) * divisor)}"
                self.report(key_at.get(key, table_at), what, remedy)
            elif value > _LARGEST[key]:
                what = f"{key} = {value} is larger than {_LARGEST[key]}"
                self.report(key_at.get(key, table_at), what, "split the linear")
        tiles = [self._tile(tiles_at, text) for text in values.get("tiles", ())]
        for text, times in Counter(values.get("tiles", ())).items():
            if times > 1:
                self.report(tiles_at, f"tile {text!r} stands {times} times", "name it once")
        if len(self.mistakes) == before and values.keys() >= _DIVISORS.keys():
            known = tuple(tile for tile in tiles if tile)
            linear = Linear(values.get("name", ""), values["k"], values["n"], known or DEFAULT_TILES)
            self.linears.append((linear, table_at, tiles_at))

    def _name(self, where: str, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", name):
            self.report(where, f"name {name!r} is not a name", "use a letter, then letters, digits, _ . -")
        elif name in self._names:
            first = self._names[name]
            self.report(where, f"role {name!r} stands already at {first}", "rename or remove one of them")
        self._names.setdefault(name, where)

    def _tile(self, where: str, text: str) -> Tile | None:
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
        if found is None:
            self.report(where, f"tile {text!r} is not of the form MxNxK", 'write, say, "128x128x128"')
            return None
        return int(found[1]), int(found[2]), int(found[3])

    def finish(self, archs: Sequence[str]) -> Request:
        chosen = tuple(dict.fromkeys(archs or self.archs or DEFAULT_ARCHS))
        for arch in chosen:
            if arch not in ARCHS:
                self.report("--arch", f"unknown architecture {arch!r}", f"use {', '.join(ARCHS)}")
        if not self.linears and not self.mistakes:
            self.report("shapes", "no linear to build", "add a [[linear]] table")
        known = [arch for arch in chosen if arch in ARCHS]
        self.mistakes += _misfits(self.linears, known)
        if self.mistakes:
            lines = "\n".join(f"  {mistake}" for mistake in sorted(self.mistakes, key=Mistake.order))
            raise ShapesError(f"{len(self.mistakes)} mistake(s) in what to build:\n{lines}")
        return Request(tuple(linear for linear, _, _ in self.linears), chosen)


class _File:
    """Types and keys of one parsed file; what is well-typed goes to the reader."""

    def __init__(self, reader: _Reader, path: Path, lines: dict[Where, int]) -> None:
        self.reader, self.path, self.lines = reader, path, lines

    def at(self, *where: str | int) -> str:
        while where and where not in self.lines:
            where = where[:-1]
        return f"{self.path}:{self.lines.get(where, 1)}"

    def read(self, content: dict[str, Any]) -> None:
        for key in sorted(content.keys() - {"linear", "build"}):
            self.reader.report(self.at(key), f"unknown key {key!r}", "use [build] and [[linear]]")
        self._build(content.get("build", {}))
        tables = content.get("linear", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self.reader.report(self.at("linear"), "linear is not a list of tables", "write [[linear]]")
            return
        if not tables:
            self.reader.report(f"{self.path}:1", "no linear", "add a [[linear]] table")
        for index, table in enumerate(tables):
            self._linear(index, table)

    def _build(self, build: Any) -> None:
        if not isinstance(build, dict):
            self.reader.report(self.at("build"), "build is not a table", "write [build]")
            return
        for key in sorted(build.keys() - {"arch"}):
            self.reader.report(self.at("build", key), f"unknown key {key!r} in [build]", "use arch")
        archs = build.get("arch", [])
        if not isinstance(archs, list) or not all(isinstance(arch, str) for arch in archs):
            self.reader.report(
                self.at("build", "arch"), "arch is not a list of strings", 'arch = ["sm_120f"]'
            )
            return
        for arch in archs:
            if arch in ARCHS:
                self.reader.archs.append(arch)
            else:
                where = self.at("build", "arch")
                self.reader.report(where, f"unknown architecture {arch!r}", f"use {', '.join(ARCHS)}")

    def _linear(self, index: int, table: dict[str, Any]) -> None:
        def at(*key: str) -> str:
            return self.at("linear", index, *key)

        for key in sorted(table.keys() - _KEYS.keys()):
            self.reader.report(at(key), f"unknown key {key!r} in [[linear]]", f"use {', '.join(_KEYS)}")
        for key in sorted({"name", "k", "n"} - table.keys()):
            self.reader.report(at(), f"{key} is missing", f"add {key} = ...")
        typed = {}
        for key in (key for key in _KEYS if key in table):
            if _is(table[key], _KEYS[key]):
                typed[key] = table[key]
            else:
                kind = _TYPES[_KEYS[key]]
                self.reader.report(at(key), f"{key} = {table[key]!r} is not {kind}", f"give {kind}")
        self.reader.add(at(), {key: at(key) for key in table}, typed)


def _is(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
    return isinstance(value, kind) and not isinstance(value, bool)


def _misfits(linears: Iterable[tuple[Linear, str, str]], archs: Sequence[str]) -> list[Mistake]:
    """Tiles and sizes that a kernel's own configuration refuses, once for each sentence."""
    found: dict[tuple[str, str], Mistake] = {}
    for linear, table_at, tiles_at in linears:
        for arch in archs:
            try:
                problems = [text for config in plan(linear, arch) for text in config.problems(arch)]
            except ConfigError as error:
                found.setdefault((tiles_at, str(error)), Mistake(tiles_at, error.what, error.remedy))
                continue
            for text in problems:
                remedy = "choose another tile or size (docs/building.md)"
                found.setdefault((table_at, text), Mistake(tiles_at, f"for {arch}: {text}", remedy))
    return list(found.values())
