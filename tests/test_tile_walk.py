"""What each CTA works on: every unit of every tile once, in pieces that can follow one another."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from ringfp4.dsl.tile_walk import last_piece, walk

Piece = tuple[int, int, int]  # tile, first and last unit of it


def pieces(tiles: int, ctas: int, cta: int, units: int) -> list[Piece]:
    whole, begin, end = walk(tiles, ctas, cta, units)
    found = [(tile, 0, units) for tile in range(cta, whole, ctas)]
    while begin < end:
        found.append(last_piece(whole, begin, end, units))
        end -= found[-1][2] - found[-1][1]
    assert begin == end
    return found


@given(tiles=st.integers(1, 400), ctas=st.integers(1, 40), units=st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_every_tile_is_worked_on_once(tiles: int, ctas: int, units: int) -> None:
    ctas = min(ctas, tiles)  # as the grid is
    by_tile: dict[int, list[tuple[int, int, int]]] = {}
    for cta in range(ctas):
        mine = pieces(tiles, ctas, cta, units)
        handed_on = [piece for piece in mine if piece[2] < units]
        continued = [piece for piece in mine if piece[1] > 0]
        # One place in memory for a CTA does, and what it hands on comes before what it waits for.
        assert len(handed_on) <= 1
        assert len(continued) <= 1
        if handed_on and continued:
            assert mine.index(handed_on[0]) < mine.index(continued[0])
        for tile, first, last in mine:
            assert 0 <= first < last <= units
            by_tile.setdefault(tile, []).append((first, last, cta))
    assert sorted(by_tile) == list(range(tiles))
    for parts in by_tile.values():
        parts.sort()
        assert (parts[0][0], parts[-1][1]) == (0, units)
        assert len(parts) <= 2
        if len(parts) == 2:
            (_, middle, giver), (begin, _, taker) = parts
            assert (middle, giver + 1) == (begin, taker)


@given(tiles=st.integers(1, 400), ctas=st.integers(1, 40), units=st.integers(1, 60))
def test_no_cta_has_more_than_its_share(tiles: int, ctas: int, units: int) -> None:
    ctas = min(ctas, tiles)
    work = [sum(last - first for _, first, last in pieces(tiles, ctas, cta, units)) for cta in range(ctas)]
    assert max(work) - min(work) <= 1


def test_by_hand() -> None:
    # 7 tiles of 6 units, 4 CTAs: tiles 0 to 6 are one wave and three quarters.
    assert [walk(7, 4, cta, 6) for cta in range(4)] == [(0, 0, 10), (0, 10, 21), (0, 21, 31), (0, 31, 42)]
    assert pieces(7, 4, 1, 6) == [(3, 0, 3), (2, 0, 6), (1, 4, 6)]
    # Nothing to divide: whole waves, or less than one.
    assert pieces(8, 4, 1, 6) == [(1, 0, 6), (5, 0, 6)]
    assert walk(3, 4, 2, 6) == (3, 0, 0)
