"""Which output tiles a CTA works on: whole waves of tiles, then an even share of what is left.

Tiles are numbered (ring_order.tile_coord); CTA c of G takes tiles c, c + G, c + 2 G, ... If G does not
divide their number, the last wave would leave most multiprocessors idle. So the last full wave and the
rest, more than G and less than 2 G tiles, are dealt out evenly along k: laid end to end, tile after tile,
each CTA gets a section of the same length. A section begins inside a tile that the CTA before has begun:
that one hands its accumulators on, and this one continues the same sum in the same order, so that no bit
of the result depends on it.

A CTA walks through its section *backwards*: it begins with the tile that it leaves unfinished, whose
accumulators somebody waits for, and ends with the one that another CTA began long ago. Nobody waits
before handing on, so there is no chain of waiting CTAs. A section is at least as long as a tile, so a
tile is shared by two CTAs at most.

Plain arithmetic like ring_order.py: Python integers or the DSL's Int32, for kernels and for tests.
``units`` is the length of a tile along k, in whatever cannot be divided further.
"""

from __future__ import annotations

from ringfp4.dsl.ring_order import Number, minimum


def walk(tiles: Number, ctas: Number, cta: Number, units: int) -> tuple[Number, Number, Number]:
    """(whole, begin, end): tiles cta, cta + ctas, ... below ``whole``, then section [begin, end).

    A section counts units from the beginning of tile ``whole``; it is empty if nothing is to be divided.
    """
    rest = tiles % ctas
    divided = minimum(rest, 1) * minimum(tiles // ctas, 1) * (rest + ctas)
    length = divided * units
    return tiles - divided, cta * length // ctas, (cta + 1) * length // ctas


def last_piece(whole: Number, begin: Number, end: Number, units: int) -> tuple[Number, Number, Number]:
    """The tile in which section [begin, end) ends and the units [first, last) of it that are in the section.

    The piece before it ends at ``end - (last - first)``.
    """
    tile = (end - 1) // units
    first = begin - tile * units
    return whole + tile, first - minimum(first, 0), end - tile * units
