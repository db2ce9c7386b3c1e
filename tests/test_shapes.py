"""Shapes files: what they mean, and that every mistake is reported with its line, all at once."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from ringfp4.build_cubins.shapes import SHIPPED, key_lines, load_shapes, shipped_names
from ringfp4.dsl.config import DEFAULT_TILES, Linear, plan
from ringfp4.errors import ShapesError


def write(folder: Path, text: str, name: str = "my.toml") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return file


def mistakes(*arguments: object, **options: object) -> list[str]:
    with pytest.raises(ShapesError) as error:
        load_shapes(*arguments, **options)  # type: ignore[arg-type]
    head, *lines = str(error.value).splitlines()
    assert head == f"{len(lines)} mistake(s) in what to build:"
    return [line.strip() for line in lines]


def test_h3_is_the_default() -> None:
    request = load_shapes()
    assert request.archs == ("sm_121a", "sm_120f")
    assert {(linear.name, linear.k, linear.n) for linear in request.linears} == {
        ("qkv", 5376, 21504),
        ("attn_out", 7168, 5376),
        ("fc1", 5376, 28672),
        ("fc2", 14336, 5376),
    }
    assert all(len(linear.tiles) == 2 for linear in request.linears)


def test_a_file_and_items(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [build]
        arch = ["sm_120f"]
        [[linear]]
        name = "up"
        k = 96   # three blocks of 32
        n = 72
        tiles = ["128x256x128"]
        [[linear]]
        name = "down"
        k = 64
        n = 96
        """,
    )
    request = load_shapes([file], ["extra=128x8"])
    assert request.archs == ("sm_120f",)
    assert request.linears == (
        Linear("up", 96, 72, ((128, 256, 128),)),
        Linear("down", 64, 96, DEFAULT_TILES),
        Linear("extra", 128, 8, DEFAULT_TILES),
    )
    assert load_shapes([file], archs=["sm_121a", "sm_121a"]).archs == ("sm_121a",)


def test_items_alone_do_not_bring_h3() -> None:
    assert load_shapes(linears=["a=32x8"]).linears == (Linear("a", 32, 8),)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """\
        title = "mine"
        [build]
        archs = ["sm_120f"]
        [[linear]]
        name = "a"
        k = 100
        n = 13
        [[linear]]
        name = "b"
        k = "5376"
        m = 3
        [[linear]]
        name = "c c"
        k = 65
        n = "64"
        tiles = ["128x128", "64x64x64"]
        [[linear]]
        name = "a"
        k = 64
        n = 64
        """,
    )
    found = mistakes([file])
    places = [line.split(": ")[0].removeprefix(f"{file}:") for line in found]
    expected = [
        ("1", "unknown key 'title'"),
        ("3", "unknown key 'archs' in [build]"),
        ("6", "k = 100 is not a positive multiple of 32"),
        ("7", "n = 13 is not a positive multiple of 8"),
        ("8", "n is missing"),
        ("10", "k = '5376' is not an integer"),
        ("11", "unknown key 'm' in [[linear]]"),
        ("13", "name 'c c' is not a name"),
        ("14", "k = 65 is not a positive multiple of 32"),
        ("15", "n = '64' is not an integer"),
        ("16", "tile '128x128' is not of the form MxNxK"),
        ("18", "role 'a' stands already at"),
    ]
    assert [
        (place, text in line) for place, (_, text), line in zip(places, expected, found, strict=True)
    ] == [(place, True) for place, _ in expected]
    assert all("Remedy: " in line for line in found)


def test_tile_that_does_not_exist_or_fit(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """\
        [[linear]]
        name = "a"
        k = 64
        n = 64
        tiles = ["64x64x64"]
        """,
    )
    (line,) = mistakes([file])
    assert line.startswith(f"{file}:5: ")
    assert "64x64x64" in line
    assert "128x128x128" in line  # the remedy names what exists


def test_a_bad_name_hides_no_bad_tile(tmp_path: Path) -> None:
    file = write(tmp_path, "[[linear]]\nname = 'a b'\nk = 64\nn = 64\ntiles = ['64x64x64']\nx = 1\n")
    assert [line.split(": ")[0] for line in mistakes([file])] == [f"{file}:{n}" for n in (2, 5, 6)]


def test_roles_are_unique_across_files(tmp_path: Path) -> None:
    table = """\
        [[linear]]
        name = "a"
        k = 64
        n = 64
        """
    first, second = write(tmp_path, table, "1.toml"), write(tmp_path, table, "2.toml")
    (line,) = mistakes([first, second])
    assert line.startswith(f"{second}:2: role 'a' stands already at {first}:2")


def test_several_files_report_together(tmp_path: Path) -> None:
    broken = write(tmp_path, "[[linear]]\nname = \n", "broken.toml")
    found = mistakes([broken, tmp_path / "absent.toml"], ["q=5376"], ["sm_89"])
    assert [line.split(":")[0] for line in found] == [
        "--arch",
        "--linear q=5376",
        str(tmp_path / "absent.toml"),
        str(broken),
    ]
    assert found[-1].startswith(f"{broken}:2: not TOML")


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("", 1, "no linear"),
        ("linear = 3", 1, "linear is not a list of tables"),
        ("build = 3\n[[linear]]\nname='a'\nk=32\nn=8", 1, "build is not a table"),
        ("[[linear]]\nname='a'\nk=true\nn=8", 3, "k = True is not an integer"),
        ("[[linear]]\nname='a'\nk=32\nn=8\ntiles=[]", 5, "tiles = [] is not a list of strings"),
        ("[[linear]]\nname='a b'\nk=32\nn=8", 2, "name 'a b' is not a name"),
        ("[[linear]]\nname='a'\nk=0\nn=8", 3, "k = 0 is not a positive multiple"),
        ("[[linear]]\nname='a'\nk=-32\nn=8", 3, "k = -32 is not a positive multiple"),
        ("[[linear]]\nname='a'\nk=262176\nn=8", 3, "k = 262176 is larger than 262144"),
        ("[[linear]]\nname='a'\nk=32\nn=16777224", 4, "n = 16777224 is larger than 16777216"),
        ("[build]\narch=['sm_90']\n[[linear]]\nname='a'\nk=32\nn=8", 2, "unknown architecture 'sm_90'"),
        ("[build]\narch='sm_120f'\n[[linear]]\nname='a'\nk=32\nn=8", 2, "arch is not a list of strings"),
        ("[[linear]]\nname='a'\nk=32\nn=8\ntiles=['128x128x128','128x128x128']", 5, "stands 2 times"),
    ],
)
def test_one_mistake(tmp_path: Path, text: str, place: int, what: str) -> None:
    file = write(tmp_path, text)
    (line,) = mistakes([file])
    assert line.startswith(f"{file}:{place}: ")
    assert what in line


def test_padding_remedy_is_large_enough() -> None:
    (line,) = mistakes(linears=["a=100x8"])
    assert "pad the weight, here to 128" in line


def test_key_lines() -> None:
    lines = ["a = 1", "", "[[linear]]  # one", '"name" = "x"', "tiles = [", '  "1x1x1",', "]"]
    text = "\n".join([*lines, "[[linear]]", 'name = "y"', "[build]", "arch = []"])
    assert key_lines(text) == {
        ("a",): 1,
        ("linear", 0): 3,
        ("linear", 0, "name"): 4,
        ("linear", 0, "tiles"): 5,
        ("linear", 1): 8,
        ("linear", 1, "name"): 9,
        ("build",): 10,
        ("build", "arch"): 11,
    }


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_files_are_right(name: str) -> None:
    request = load_shapes([name])
    assert request.linears == load_shapes([SHIPPED / f"{name}.toml"]).linears
    for linear in request.linears:
        kinds = {config.kind for config in plan(linear, "sm_120f")}
        assert {"absmax", "pack", "gemm"} <= kinds


def test_shipped_files_are_documented(repository: Path) -> None:
    page = (repository / "docs" / "building.md").read_text()
    assert [name for name in shipped_names() if f"| `{name}` |" not in page] == []


def test_equal_sizes_share_kernels() -> None:
    """A model's roles of one size are one kernel."""
    assert plan(Linear("a", 64, 96), "sm_120f") == plan(Linear("b", 64, 96), "sm_120f")
