"""What a cubin's ELF says about its kernel: resources, parameters, assembler.

The layout (note records, ``.nv.info`` attributes, header flags) is not documented by NVIDIA;
it was read off cubins of ptxas 12.9 and 13.x beside the output of ``cuobjdump -elf``, and
tests/test_builder_elf.py repeats that comparison.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ringfp4.errors import BuildError

# Attributes of .nv.info sections (names as cuobjdump prints them, without EIATTR_).
_REQNTID, _FRAME_SIZE, _KPARAM_INFO, _REGCOUNT, _NUM_BARRIERS = 0x10, 0x11, 0x17, 0x2F, 0x4C
_SVAL = 4  # attribute formats: 4 carries sized data, 1..3 carry 16 bits
_SHT_NOBITS = 8
# A CTA's shared memory starts with 1 KiB of the system's, which its limit does not count.
_SYSTEM_SMEM = 1024


@dataclass(frozen=True)
class Cubin:
    """One kernel's cubin. Sizes in bytes."""

    entry: str
    arch: str  # sm_121a, sm_120f, ...
    ptxas: str  # "12.9.83"; "" where the ELF does not say (sm_90)
    registers: int  # a thread's at launch
    stack_bytes: int  # a thread's frame in local memory: spills, local arrays
    static_smem: int
    barriers: int  # named barriers the launch reserves
    threads: int  # .reqntid, 0 if absent
    params: tuple[tuple[int, int], ...]  # (offset, size) in order


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    size: int
    data: bytes


def read_cubin(image: bytes) -> Cubin:
    """Parse a cubin that holds exactly one kernel; BuildError if it is anything else."""
    try:
        return _read(image)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise BuildError("unreadable cubin", expected="a CUDA ELF image", got=repr(error)) from error


def _read(image: bytes) -> Cubin:
    if image[:4] != b"\x7fELF" or image[4] != 2 or struct.unpack_from("<H", image, 18)[0] != 190:
        raise BuildError("unreadable cubin", expected="a 64-bit CUDA ELF image", got=repr(image[:20]))
    sections = _sections(image)
    entries = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    if len(entries) != 1:
        raise BuildError("a cubin must hold one kernel", expected="1 .text section", got=", ".join(entries))
    entry = entries[0]

    common = dict(_attributes(sections[".nv.info"].data))
    own = list(_attributes(sections[f".nv.info.{entry}"].data))
    single = dict(own)
    params = {}
    for attribute, data in own:
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack("<IHHI", data)
            params[ordinal] = (offset, packed >> 18)
    threads = struct.unpack("<3I", single[_REQNTID]) if _REQNTID in single else (0, 1, 1)
    text = sections[f".text.{entry}"]
    shared = sections.get(f".nv.shared.{entry}")
    toolkit = sections[".note.nv.tkinfo"].data.decode("latin-1") if ".note.nv.tkinfo" in sections else ""
    version = re.search(r"release [\d.]+, V([\d.]+)", toolkit)
    return Cubin(
        entry=entry,
        arch=_arch(image, toolkit),
        ptxas=version[1] if version else "",
        registers=struct.unpack("<II", common[_REGCOUNT])[1],
        stack_bytes=struct.unpack("<II", common[_FRAME_SIZE])[1],
        static_smem=max(shared.size - _SYSTEM_SMEM, 0) if shared else 0,
        barriers=single[_NUM_BARRIERS][0] if _NUM_BARRIERS in single else text.flags >> 20 & 0x7F,
        threads=threads[0] * threads[1] * threads[2],
        params=tuple(params[i] for i in range(len(params))),
    )


def _sections(image: bytes) -> dict[str, _Section]:
    table, count, names_index = (
        struct.unpack_from("<Q", image, 40)[0],
        *struct.unpack_from("<HH", image, 60),
    )
    headers = [struct.unpack_from("<IIQQQQ", image, table + 64 * i) for i in range(count)]
    names = image[headers[names_index][4] :]
    found = {}
    for name_at, kind, flags, _, offset, size in headers:
        name = names[name_at : names.index(b"\0", name_at)].decode()
        data = b"" if kind == _SHT_NOBITS else image[offset : offset + size]
        found[name] = _Section(name, kind, flags, size, data)
    return found


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        size = value if form == _SVAL else 0
        yield attribute, data[at + 4 : at + 4 + size] if form == _SVAL else data[at + 2 : at + 4]
        at += 4 + size


def _arch(image: bytes, toolkit: str) -> str:
    """The number from the header flags; the suffix from there too, or from the assembler's note."""
    flags = struct.unpack_from("<I", image, 48)[0]
    if image[8] < 8:  # ABI version: sm_90 by ptxas 12.x, which leaves no note
        return f"sm_{flags & 0xFF}" + ("a" if flags & 0x800 else "")
    number = flags >> 8 & 0xFF
    suffix = re.search(rf"-arch sm_{number}([af]?)\b", toolkit)
    return f"sm_{number}" + (suffix[1] if suffix else "")
