"""Draws docs/images/shared_pairs.svg: pairs that several branches have, and the branch that computes them.

    python docs/draw_shared_pairs.py

Who may attend to whom comes from annulus.Pattern; hosts follow the rule of src/pattern/shared_pairs.h: the finest branch that has a pair.
"""

from __future__ import annotations

import pathlib
import sys

from annulus import Pattern

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from draw_placements import BOLD, COLOURS, CRISP, GREY, INK, axes, page_of, rect, text

PICTURE = pathlib.Path(__file__).resolve().parent / "images" / "shared_pairs.svg"
COMMAND = "python docs/draw_shared_pairs.py"

TOKENS = 32
SEGMENTS, DILATIONS = [8, 16, 32], [1, 2, 4]
PATTERN = Pattern.longnet(1, SEGMENTS, DILATIONS)

EMPTY = "#f1f4f7"

CELL = 8
SIDE = TOKENS * CELL
LEFT, GAP, RIGHT, TOP = 52, 36, 32, 142
PANELS = len(SEGMENTS) + 1
WIDTH = LEFT + PANELS * SIDE + (PANELS - 1) * GAP + RIGHT
HEIGHT = TOP + SIDE + 78


def branches_of(query: int, key: int) -> list[int]:
    """The branches that let the query see the key, finest first."""
    return [b for b in range(len(SEGMENTS)) if PATTERN.allows(b, 0, query, key)]


def cell(x: float, y: float, query: int, key: int, branch: int, count: int = 1) -> list[str]:
    left, top = x + key * CELL, y + query * CELL
    drawn = [rect(left, top, CELL - 1, CELL - 1, COLOURS[branch], CRISP)]
    if count > 1:  # white digits would be too small: one white dot for every further branch
        for dot in range(count - 1):
            centre = left + (CELL - 1) / 2 + (dot - (count - 2) / 2) * 3
            drawn.append(f'<circle cx="{centre:g}" cy="{top + 3.5:g}" r="1.25" fill="#ffffff"/>')
    return drawn


def panel(index: int, title: str, subtitle: str, cells: list[str]) -> list[str]:
    x = LEFT + index * (SIDE + GAP)
    return [
        text(x, TOP - 32, title, 16, INK, more=BOLD),
        text(x, TOP - 12, subtitle, 12.5, GREY),
        rect(x, TOP, SIDE - 1, SIDE - 1, EMPTY, CRISP),
        *cells,
    ]


def make() -> str:
    """The text of the picture."""
    pairs = [(q, k) for q in range(TOKENS) for k in range(TOKENS)]
    total = computed = 0
    last = LEFT + len(SEGMENTS) * (SIDE + GAP)
    shared: list[str] = []
    own: list[list[str]] = [[] for _ in SEGMENTS]
    counts = [0] * len(SEGMENTS)
    for query, key in pairs:
        having = branches_of(query, key)
        for branch in having:
            counts[branch] += 1
            own[branch] += cell(LEFT + branch * (SIDE + GAP), TOP, query, key, branch)
        if having:
            total += len(having)
            computed += 1
            shared += cell(last, TOP, query, key, having[0], len(having))
    page = []
    for branch, (segment, dilation) in enumerate(zip(SEGMENTS, DILATIONS)):
        title = f"branch {branch}: segments of {segment}"
        every = {1: "every token", 2: "every 2nd token", 4: "every 4th token"}[dilation]
        page += panel(branch, title, f"{every}, {counts[branch]} pairs", own[branch])
    page += panel(
        len(SEGMENTS),
        "what is computed",
        f"{computed} pairs instead of {total}: {100 * (1 - computed / total):.0f} % less",
        shared,
    )
    page += [
        *axes(LEFT, TOP, SIDE),
        text(
            LEFT,
            HEIGHT - 28,
            "Right: the colour is the host, the finest branch that has the pair. A white dot is one more branch that has it: "
            "its weight counts twice with one dot, three times with two.",
            12,
            GREY,
        ),
    ]
    return page_of(
        WIDTH,
        HEIGHT,
        "Pairs that several branches have are computed once",
        f"{TOKENS} tokens, one head. A row is a query, a column a key, a coloured cell a pair that a branch has.",
        page,
    )


def main() -> int:
    PICTURE.write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
