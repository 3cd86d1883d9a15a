"""Draws docs/images/placements.svg: which rank holds which tokens, and who does the causal work.

    python docs/draw_placements.py

Owners and shares come from annulus.Placement and annulus.Plan; nothing in the picture is made up.
"""

from __future__ import annotations

import pathlib
import sys

from annulus import Pattern, Placement, Plan

PICTURE = pathlib.Path(__file__).resolve().parent / "images" / "placements.svg"
COMMAND = "python docs/draw_placements.py"

TOKENS, RANKS = 64, 4
MANY_TOKENS = 8192  # too many to draw: a footnote says how balance is there
PLACEMENTS = {
    "contiguous": "neighbouring tokens stay together",
    "zigzag": "an early and a late chunk each",
    "striped": "token t lives on rank t mod 4",
    "hilbert": "tokens are the cells of an image",
}

# docs/draw_shared_pairs.py draws with the same colours and shapes.
# Told apart with every kind of colour vision (Okabe and Ito); the plan's pictures use the same.
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00"]
INK, GREY, MASKED, LINE = "#1f2933", "#667380", "#f1f4f7", "#d5dce3"
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"

CELL = 4  # pixels per token
SIDE = TOKENS * CELL
LEFT, GAP, RIGHT = 52, 36, 32
TOP = 196  # of the triangles
WIDTH = LEFT + len(PLACEMENTS) * SIDE + (len(PLACEMENTS) - 1) * GAP + RIGHT
BAR, BAR_STEP, FULL_BAR = 14, 23, 150  # FULL_BAR: pixels of half of all pairs
HEIGHT = TOP + SIDE + 42 + RANKS * BAR_STEP + 52


def owners(placement: Placement) -> list[int]:
    """The rank of every token."""
    owner = [0] * placement.tokens
    for rank in range(placement.ranks):
        for position in placement.positions(rank):
            owner[position] = rank
    return owner


def shares(placement: Placement) -> list[float]:
    """Of all pairs of causal dense attention, how many every rank computes."""
    plan = Plan(Pattern.dense(1, causal=True), placement)
    pairs = [plan.pairs(rank) for rank in range(placement.ranks)]
    return [p / sum(pairs) for p in pairs]


def balance(parts: list[float]) -> float:
    """The even share over the largest one: how much of the ring works when the busiest rank does."""
    return sum(parts) / len(parts) / max(parts)


def runs(owner: list[int]) -> list[tuple[int, int, int]]:
    """(first, end, rank) of neighbouring tokens with one owner."""
    found: list[tuple[int, int, int]] = []
    for t, rank in enumerate(owner):
        if found and found[-1][2] == rank:
            found[-1] = (found[-1][0], t + 1, rank)
        else:
            found.append((t, t + 1, rank))
    return found


def text(
    x: float,
    y: float,
    what: str,
    size: float,
    colour: str = INK,
    anchor: str = "start",
    more: str = "",
) -> str:
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}"{place}{more}>{what}</text>'


def rect(x: float, y: float, width: float, height: float, colour: str, more: str = "") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}"{more}/>'
    )


BOLD = ' font-weight="600"'
CRISP = ' shape-rendering="crispEdges"'


def axes(left: float, top: float, side: float) -> list[str]:
    """The names of the axes of a square whose rows are queries and whose columns are keys."""
    turned = f' transform="translate({left - 12} {top + side / 2:g}) rotate(-90)"'
    return [
        text(0, 0, "queries", 12, GREY, "middle", turned),
        text(left + side / 2, top + side + 18, "keys", 12, GREY, "middle"),
    ]


def page_of(width: int, height: int, title: str, subtitle: str, content: list[str]) -> str:
    """A whole picture: a frame with a title."""
    frame = f' rx="12" stroke="{LINE}" stroke-width="1"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img">',
        f"<title>{title}</title>",
        rect(0.5, 0.5, width - 1, height - 1, "#ffffff", frame),
        text(LEFT, 46, title, 22, INK, more=BOLD),
        text(LEFT, 71, subtitle, 13, GREY),
        *content,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def strip(x: float, y: float, owner: list[int]) -> list[str]:
    cells = [
        rect(x + first * CELL, y, (end - first) * CELL, 24, COLOURS[rank], CRISP)
        for first, end, rank in runs(owner)
    ]
    # White hairlines, so that single tokens can be counted.
    for t in range(1, len(owner)):
        width = 1 if owner[t] == owner[t - 1] else 0.6
        cells.append(rect(x + t * CELL - width / 2, y, width, 24, "#ffffff", ' opacity="0.45"'))
    return cells


def triangle(x: float, y: float, owner: list[int]) -> list[str]:
    """Row t: query t, as long as the keys that it attends to."""
    drawn = [rect(x, y, SIDE, SIDE, MASKED, CRISP)]
    for first, end, rank in runs(owner):
        stairs = "".join(f"H{x + (t + 1) * CELL:g}v{CELL}" for t in range(first, end))
        drawn.append(
            f'<path d="M{x:g} {y + first * CELL:g}{stairs}H{x:g}z" fill="{COLOURS[rank]}"{CRISP}/>'
        )
    return drawn


def grid(x: float, y: float, cell: float, placement: Placement) -> list[str]:
    """The tokens as the cells of an image."""
    owner, side = owners(placement), round(placement.tokens**0.5)
    return [
        rect(x + t % side * cell, y + t // side * cell, cell - 1, cell - 1, COLOURS[rank])
        for t, rank in enumerate(owner)
    ]


def bars(x: float, y: float, parts: list[float]) -> list[str]:
    drawn, left = [], x + 54
    even = left + 2 * FULL_BAR / len(parts)
    bottom = y + len(parts) * BAR_STEP - (BAR_STEP - BAR)
    for rank, part in enumerate(parts):
        top, length = y + rank * BAR_STEP, 2 * FULL_BAR * part
        drawn += [
            text(x, top + 11, f"rank {rank}", 12, GREY),
            rect(left, top, length, BAR, COLOURS[rank], ' rx="2"'),
            text(x + SIDE, top + 11.5, f"{100 * part:.1f} %", 12.5, INK, "end", BOLD),
        ]
    drawn.append(
        f'<path d="M{even:g} {y - 5:g}V{bottom + 5:g}" stroke="{INK}" stroke-width="1" '
        'stroke-dasharray="2 3"/>'
    )
    return drawn


def column(x: float, name: str, subtitle: str) -> list[str]:
    placement = Placement.named(name, TOKENS, RANKS)
    owner, parts = owners(placement), shares(placement)
    drawn = [
        text(x, 124, name, 18, INK, more=BOLD),
        text(x, 143, subtitle, 12.5, GREY),
        *strip(x, 158, owner),
        *triangle(x, TOP, owner),
        text(x + SIDE - 12, TOP + 38, f"{100 * balance(parts):.0f} %", 30, INK, "end", BOLD),
        text(x + SIDE - 12, TOP + 56, "balance", 12, GREY, "end"),
        *bars(x, TOP + SIDE + 42, parts),
    ]
    if name == "hilbert":
        drawn += grid(x + SIDE - 12 - 8 * 9 + 1, TOP + 68, 9, placement)
    return drawn


def footnote() -> str:
    many = [shares(Placement.named(name, MANY_TOKENS, RANKS)) for name in PLACEMENTS]
    return (
        "Bars: a rank's share of all pairs; dotted: an even share. Balance: the even share over the largest one; "
        f"with {MANY_TOKENS:,} tokens: {', '.join(f'{100 * balance(parts):.0f} %' for parts in many)}."
    )


def make() -> str:
    """The text of the picture."""
    page = []
    for rank, colour in enumerate(COLOURS):
        x = WIDTH - RIGHT - 74 * (RANKS - rank) + 10
        page += [
            rect(x, 33, 14, 14, colour, ' rx="3"'),
            text(x + 20, 45, f"rank {rank}", 13, INK),
        ]
    page += axes(LEFT, TOP, SIDE)
    page.append(text(LEFT, HEIGHT - 26, footnote(), 12, GREY))
    for i, (name, subtitle) in enumerate(PLACEMENTS.items()):
        page += column(LEFT + i * (SIDE + GAP), name, subtitle)
    return page_of(
        WIDTH,
        HEIGHT,
        "Who holds which tokens, and who does the causal work",
        f"{TOKENS} tokens on {RANKS} ranks, dense causal attention. Top: the tokens in the order of the "
        "sequence. Below: a row is a query, as long as the keys it attends to.",
        page,
    )


def main() -> int:
    PICTURE.write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
