"""Patterns, placements, plans and errors are proper Python values."""

from __future__ import annotations

import ast
import pathlib
import pickle
import xml.etree.ElementTree

import annulus
import numpy as np
import pytest
from annulus import Branch, Pattern, Placement, Plan

PATTERNS = [
    Pattern.dense(3),
    Pattern.dense(3, causal=True),
    Pattern.longnet(4, [16, 64], [1, 2], causal=True),
    Pattern.longnet(4, [16, 64], [1, 2], offsets="interleaved", group_scale=True),
    Pattern.head_groups(5, [16, 32], [1, 4]),
    Pattern.head_groups(5, [16, 32], [1, 4], group_scale=True),
    Pattern(2, [Branch(8, 2, offset=[0, -1]), Branch(offset=[-1, 0])], causal=True, name="mine"),
]
PLACEMENTS = [
    Placement.contiguous(100, 3),
    Placement.contiguous(100, 3, align=16),
    Placement.zigzag(100, 3),
    Placement.striped(100, 3),
    Placement.hilbert(100, 3),
    Placement.hilbert(100, 3, rows=4, cols=25),
    Placement.explicit(100, [[range(50, 100)], [], [range(0, 50, 2), range(1, 50, 2)]]),
]


@pytest.mark.parametrize("values", [PATTERNS, PLACEMENTS], ids=["pattern", "placement"])
def test_values_equal_their_copies_and_nothing_else(values: list) -> None:
    for i, value in enumerate(values):
        copy = pickle.loads(pickle.dumps(value))
        assert copy == value and hash(copy) == hash(value) and repr(copy) == repr(value)
        assert [other == value for other in values] == [j == i for j in range(len(values))]
        assert value != "something else"


def test_branches_equal_their_copies() -> None:
    branch = Branch(16, 4, offset=[0, -1, 3])
    assert pickle.loads(pickle.dumps(branch)) == branch and eval(repr(branch)) == branch
    assert branch != Branch(16, 4, offset=[0, -1, 2]) and hash(branch) == hash(eval(repr(branch)))
    assert Branch(offset=[0]).segment_length is None


def test_patterns_have_the_offsets_of_the_definition() -> None:
    blocked = Pattern.longnet(4, [16, 64], [1, 2])
    assert [b.offset for b in blocked.branches] == [[0] * 4, [0, 0, 1, 1]]
    mixed = Pattern.longnet(4, [16, 64], [1, 2], offsets="interleaved")
    assert [b.offset for b in mixed.branches] == [[0] * 4, [0, 1, 0, 1]]
    groups = Pattern.head_groups(5, [16, 32], [1, 4], group_scale=True)
    assert [b.offset for b in groups.branches] == [[0, 0, 0, -1, -1], [-1, -1, -1, 1, 1]]
    assert (
        groups.output_scale == 0.5
        and Pattern.longnet(4, [8, 16], [1, 2], group_scale=True).output_scale == 0.5
    )
    assert (blocked.name, blocked.heads, blocked.causal) == ("longnet", 4, False)
    assert (
        blocked.allows(1, 2, 3, 5)
        and not blocked.allows(1, 2, 3, 4)
        and not blocked.allows(0, 0, 15, 16)
    )
    assert Pattern.dense(2, causal=True).allowed_pairs(10) == 2 * 55


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
def test_placements_hold_every_token_once(placement: Placement) -> None:
    positions = [placement.positions(rank) for rank in range(placement.ranks)]
    assert sorted(np.concatenate(positions)) == list(range(placement.tokens))
    for rank, mine in enumerate(positions):
        assert mine.dtype == np.int64 and len(mine) == placement.local_tokens(rank)
        assert [placement.position(rank, i) for i in range(len(mine))] == list(mine)
        assert [t for part in placement.ranges(rank) for t in part] == list(mine)


def test_positions_stay_valid_without_their_placement() -> None:
    positions = Placement.striped(9, 2).positions(1)
    assert list(positions) == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pattern.dense(0), "heads is 0"),
        (lambda: Pattern.longnet(4, [16, 32], [1]), "longnet"),
        (
            lambda: Pattern.longnet(4, [16], [1], offsets="odd"),
            "offsets is 'odd', expected one of 'blocked', 'interleaved'",
        ),
        (lambda: Pattern.head_groups(1, [8, 16], [1, 2]), "head_groups"),
        (lambda: Pattern(2, []), "no branches"),
        (lambda: Pattern(2, [Branch(8, 2, offset=[0, 2])]), "offset of head 1 is 2"),
        (lambda: Placement.contiguous(0, 2), "tokens is 0"),
        (lambda: Placement.named("spiral", 10, 2), "'spiral'"),
        (lambda: Placement.explicit(4, [[range(0, 3)]]), "position 3 is held by none"),
        (lambda: Placement.explicit(4, [[range(3, -1, -1)]]), "stride below 1"),
        (lambda: Placement.explicit(4, [[(0, 4)]]), "expected range objects"),
        (lambda: Placement.zigzag(10, 2).positions(2), "rank is 2, expected 0..1"),
        (lambda: Placement.zigzag(10, 2).local_tokens(-1), "rank is -1"),
        (lambda: Placement.zigzag(10, 2).position(0, 5), "local token 5"),
        (lambda: Plan(PATTERNS[0], PLACEMENTS[0], kv_heads=2), "kv_heads is 2"),
        (lambda: Plan(PATTERNS[0], PLACEMENTS[0], schedule="auto"), "'ring' or 'gather'"),
        (lambda: Plan(PATTERNS[0], PLACEMENTS[0], travel="none"), "travel is 'none'"),
        (lambda: Plan(PATTERNS[0], PLACEMENTS[0]).sent_rows(3), "rank is 3"),
    ],
)
def test_wrong_values_are_config_errors_that_name_them(make, message: str) -> None:
    with pytest.raises(annulus.ConfigError, match="(?s).*") as caught:
        make()
    assert message in str(caught.value)


def test_plan_prints_and_draws() -> None:
    plan = Plan(Pattern.longnet(4, [16, 64], [1, 2]), Placement.zigzag(100, 3), kv_heads=2)
    assert plan.ranks == 3 and plan.steps >= 1 and plan.schedule == "ring" and plan.travel == "keys"
    assert str(plan) == plan.table() and "zigzag placement on 3 ranks" in str(plan)
    assert "Plan longnet, zigzag: 100 tokens on 3 ranks" in repr(plan)
    root = xml.etree.ElementTree.fromstring(plan._repr_svg_())
    assert root.tag.endswith("svg") and plan.svg() == plan._repr_svg_()
    assert plan.pattern == Pattern.longnet(
        4, [16, 64], [1, 2]
    ) and plan.placement == Placement.zigzag(100, 3)
    assert (
        plan.kv_heads == 2 and plan.digest == Plan(plan.pattern, plan.placement, kv_heads=2).digest
    )


def test_plan_counts_rows_and_bytes() -> None:
    # Dense over 2 ranks: each needs all rows of the other.
    plan = Plan(Pattern.dense(2), Placement.contiguous(10, 2))
    for rank in range(2):
        assert plan.sent_rows(rank) == plan.received_rows(rank) == 5 * 2
        assert plan.sent_bytes(rank, head_dim=8, dtype="float16", batch=3) == 10 * 3 * 2 * 8 * 2
        assert plan.received_bytes(rank, head_dim=8) == 10 * 2 * 8 * 4
        # A row in a message is a multiple of 16 bytes.
        assert plan.sent_bytes(rank, head_dim=1, dtype="float16") == 10 * 2 * 16
        assert plan.sent_bytes(rank, head_dim=33) == 10 * 2 * 144
        # Queries bring 16 bytes of statistics along.
        queries = Plan(Pattern.dense(2), Placement.contiguous(10, 2), travel="queries")
        assert queries.sent_bytes(rank, head_dim=8) == 10 * (2 * 8 * 4 + 16)
        assert plan.pairs(rank) == 2 * 5 * 10


def test_errors_are_of_our_kinds_and_pythons() -> None:
    for kind, builtin in [
        (annulus.ConfigError, ValueError),
        (annulus.TransportError, ConnectionError),
        (annulus.DeviceError, RuntimeError),
        (annulus.Interrupted, Exception),
    ]:
        assert issubclass(kind, annulus.Error) and issubclass(kind, builtin)
        copy = pickle.loads(pickle.dumps(kind("what")))
        assert type(copy) is kind and str(copy) == "what"
        assert kind.__module__ == "annulus"
    assert annulus.TransportError("x").rank == -1


def test_every_public_name_is_documented_and_in_the_stub() -> None:
    package = pathlib.Path(annulus.__file__).parent
    assert (package / "py.typed").exists()
    stub = ast.parse((package / "_core.pyi").read_text())
    bodies = {
        node.name: node for node in stub.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    for name in set(annulus.__all__) - {"__version__"}:
        assert getattr(annulus, name).__doc__, f"{name} has no docstring"
        assert name in bodies, f"{name} is not in the stub"
        for member, value in (
            vars(getattr(annulus, name)).items() if isinstance(bodies[name], ast.ClassDef) else []
        ):
            if not member.startswith("_") and callable(getattr(value, "__get__", None)):
                assert value.__doc__, f"{name}.{member} has no docstring"
                body = bodies[name].body
                functions = {n.name for n in body if isinstance(n, ast.FunctionDef)}
                constants = {n.target.id for n in body if isinstance(n, ast.AnnAssign)}  # of the class
                assert member in functions | constants, f"{name}.{member} is not in the stub"


def test_machine() -> None:
    sets = {"amx_bf16", "amx_bf16_emulated", "avx512_bf16", "avx512", "avx2", "neon", "scalar"}
    assert annulus.isa() in sets
    assert annulus.threads() >= 1
    assert annulus.__version__.count(".") == 2
