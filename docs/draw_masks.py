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
    queries: int = TOKENS


PANELS = [
    Panel("causal", "is_causal=True", Pattern.dense(1, causal=True)),
    Panel("window", "window=(4, 2)", Pattern.dense(1, window=(4, 2))),
    Panel("causal window", "window=(6, 0)", Pattern.dense(1, window=(6, 0))),
    Panel(
        "dilated window",
        f'dilation {DILATION}, offsets="all", window=(12, 0)',
        Pattern.longnet(1, [TOKENS], [DILATION], offsets="all", window=(12, 0)),
    ),
    Panel(
        "documents",
        "is_causal=True, cu_seqlens=[0, 9, 14, 24]",
        Pattern.dense(1, causal=True).with_documents([0, 9, 14, 24]),
    ),
    Panel(
        "documents with a window",
        "window=(3, 0), cu_seqlens=[0, 9, 14, 24]",
        Pattern.dense(1, window=(3, 0)).with_documents([0, 9, 14, 24]),
    ),
    Panel(
        "LongNet in documents",
        "segments 4 and 8, the same cu_seqlens",
        Pattern.longnet(1, [4, 8], [1, 2], causal=True).with_documents([0, 9, 14, 24]),
    ),
    Panel(
        "8 queries, 24 keys",
        "is_causal=True, query_start=16",
        Pattern.dense(1, causal=True).with_documents([0, 8], [0, TOKENS], 16),
        queries=8,
    ),
]

CELL = 11
SIDE = TOKENS * CELL
LEFT, GAP, RIGHT, TOP = 52, 36, 32, 142
COLUMNS = 4
ROW = SIDE + 96  # pixels from one row of panels to the next
WIDTH = LEFT + COLUMNS * SIDE + (COLUMNS - 1) * GAP + RIGHT
HEIGHT = TOP + ROW + SIDE + 92


def cells(panel: Panel, x: float, y: float) -> list[str]:
    """A square for every allowed pair, in the colour of its first branch."""
    drawn = []
    for query in range(panel.queries):
        for key in range(TOKENS):
            branches = range(len(panel.pattern.branches))
            having = [b for b in branches if panel.pattern.allows(b, 0, query, key)]
            if having:
                left, top = x + key * CELL, y + query * CELL
                drawn.append(rect(left, top, CELL - 1, CELL - 1, COLOURS[having[0]], CRISP))
    return drawn


def make() -> str:
    """The text of the picture."""
    page = []
    for index, panel in enumerate(PANELS):
        x, y = LEFT + index % COLUMNS * (SIDE + GAP), TOP + index // COLUMNS * ROW
        page += [
            text(x, y - 32, panel.title, 16, INK, more=BOLD),
            text(x, y - 12, panel.arguments, 12.5, GREY),
            rect(x, y, SIDE - 1, panel.queries * CELL - 1, EMPTY, CRISP),
            *cells(panel, x, y),
        ]
    notes = [
        f"Colours are branches. Dilated window: a branch for each offset. A query attends to itself and to every {DILATION}th "
        "token before it, up to 12 tokens back.",
        "LongNet in documents: a pair of both branches has the colour of the finer one. 8 queries: they are the last of 24 tokens.",
    ]
    return page_of(
        WIDTH,
        HEIGHT,
        "Which keys a query attends to",
        f"{TOKENS} keys, one head. A row is a query, a column a key, a coloured cell an allowed pair.",
        [
            *page,
            *axes(LEFT, TOP + ROW, SIDE),
            *(text(LEFT, HEIGHT - 42 + 18 * i, note, 12, GREY) for i, note in enumerate(notes)),
        ],
    )


def main() -> int:
    PICTURE.write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
