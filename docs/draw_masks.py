"""Draws docs/images/masks.svg: which keys a query attends to under each mask.

    python docs/draw_masks.py

Every cell comes from annulus.Pattern.allows.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

from annulus import Pattern

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from draw_placements import BOLD, COLOURS, CRISP, GREY, INK, axes, page_of, rect, text

PICTURE = pathlib.Path(__file__).resolve().parent / "images" / "masks.svg"
COMMAND = "python docs/draw_masks.py"

TOKENS = 24
DILATION = 4
EMPTY = "#f1f4f7"


@dataclasses.dataclass
class Panel:
    title: str
    arguments: str
    pattern: Pattern


PANELS = [
    Panel("causal", "is_causal=True", Pattern.dense(1, causal=True)),
    Panel("window", "window=(4, 2)", Pattern.dense(1, window=(4, 2))),
    Panel("causal window", "window=(6, 0)", Pattern.dense(1, window=(6, 0))),
    Panel(
        "dilated window",
        f'dilation {DILATION}, offsets="all", window=(12, 0)',
        Pattern.longnet(1, [TOKENS], [DILATION], offsets="all", window=(12, 0)),
    ),
]

CELL = 11
SIDE = TOKENS * CELL
LEFT, GAP, RIGHT, TOP = 52, 36, 32, 142
WIDTH = LEFT + len(PANELS) * SIDE + (len(PANELS) - 1) * GAP + RIGHT
HEIGHT = TOP + SIDE + 74


def cells(panel: Panel, x: float) -> list[str]:
    """A square for every allowed pair, in the colour of its branch."""
    pattern = panel.pattern
    return [
        rect(x + key * CELL, TOP + query * CELL, CELL - 1, CELL - 1, COLOURS[branch], CRISP)
        for branch in range(len(pattern.branches))
        for query in range(TOKENS)
        for key in range(TOKENS)
        if pattern.allows(branch, 0, query, key)
    ]


def make() -> str:
    """The text of the picture."""
    page = []
    for index, panel in enumerate(PANELS):
        x = LEFT + index * (SIDE + GAP)
        page += [
            text(x, TOP - 32, panel.title, 16, INK, more=BOLD),
            text(x, TOP - 12, panel.arguments, 12.5, GREY),
            rect(x, TOP, SIDE - 1, SIDE - 1, EMPTY, CRISP),
            *cells(panel, x),
        ]
    note = (
        f"Right: the colours are the {DILATION} offsets of the dilation. A query attends to itself and to every "
        f"{DILATION}th token before it, up to 12 tokens back."
    )
    return page_of(
        WIDTH,
        HEIGHT,
        "Which keys a query attends to",
        f"{TOKENS} tokens, one head. A row is a query, a column a key, a coloured cell an allowed pair.",
        [*page, *axes(LEFT, TOP, SIDE), text(LEFT, HEIGHT - 24, note, 12, GREY)],
    )


def main() -> int:
    PICTURE.write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
