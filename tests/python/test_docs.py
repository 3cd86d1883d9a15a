"""The documents say what is so: examples run, what is generated is up to date, links lead somewhere.

In ``docs/*.md`` the ```python blocks of a page run in order, in one namespace; an ```output block is what the
block before it prints. Other kinds of blocks (```py, ```text, indented ones) are only read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types

import pytest
from support import HANG
from conftest import ROOT

import annulus

DOCS = ROOT / "docs"


@dataclasses.dataclass
class Block:
    line: int  # of the page, of the first line of code; counted from 1
    code: str
    output: str | None = None


def blocks_of(page: pathlib.Path) -> list[Block]:
    blocks: list[Block] = []
    kind, first, lines = None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if kind is None and line.startswith("```"):
            kind, first, lines = line[3:].strip(), number + 1, []
        elif kind is not None and line.rstrip() == "```":
            text = "".join(f"{each}\n" for each in lines)
            if kind == "python":
                blocks.append(Block(first, text))
            elif kind == "output":
                assert blocks and blocks[-1].output is None, f"{page.name}:{first}: output of what?"
                blocks[-1].output = text
            kind = None
        else:
            lines.append(line)
    assert kind is None, f"{page.name}:{first}: the block has no end"
    return blocks


def run_blocks(page: pathlib.Path) -> dict[str, object]:
    """Runs a page's examples here. Tracebacks have the page's line numbers."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
        if block.output is not None and printed.getvalue() != block.output:
            raise AssertionError(
                f"{page.name}:{block.line}: the example prints\n{printed.getvalue()}"
                f"but the page says\n{block.output}"
            )
    return namespace


def run_on_a_ring(rank: int, ranks: int, page: pathlib.Path, store: str) -> None:
    """One rank: PLACEMENTS.md's functions give every rank its part of what one process gets."""
    import torch
    import torch.distributed as dist

    import annulus.torch as at

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    examples = run_blocks(page)
    q, k, v = torch.randn(3, 2, 101, 4, 16, generator=torch.Generator().manual_seed(1)).unbind()
    expected = examples["attend"](q, k, v, 101)
    for placement in ("contiguous", "zigzag", "striped", "hilbert"):
        place = {"placement": placement, "group": dist.group.WORLD}
        mine = (at.shard(x, **place) for x in (q, k, v))
        o = at.unshard(examples["attend"](*mine, 101, **place), **place)
        torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)

    lengths = [101 - 10 * (ranks - 1)] + [10] * (ranks - 1)
    where = examples["own_positions"](lengths[rank], dist.group.WORLD)
    assert torch.equal(where, torch.arange(101).split(lengths)[rank])
    q, k, v = (x.split(lengths, 1)[rank] for x in (q, k, v))
    q, k = (examples["rotate"](x, where) for x in (q, k))
    o = at.ring_attention(q, k, v, is_causal=True, group=dist.group.WORLD)
    whole = at.unshard(o, group=dist.group.WORLD)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(annulus.ConfigError):  # n_global stands for equal shares
        at.ring_attention(q, k, v, is_causal=True, group=dist.group.WORLD, n_global=101)
    with pytest.raises(annulus.ConfigError):
        at.ring_attention(q, k, v, is_causal=True, group=dist.group.WORLD, placement="zigzag")
    at.cleanup()
    dist.destroy_process_group()


def script(path: pathlib.Path) -> types.ModuleType:
    """A program, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def run_this_file(*arguments: str) -> None:
    run = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        timeout=HANG,
        cwd=pathlib.Path(__file__).parent,
        env={"GLOO_SOCKET_IFNAME": "lo"}
        | os.environ
        | {"ANNULUS_THREADS": "1", "OMP_NUM_THREADS": "1"}
        # What torchrun --nproc-per-node=1 would set; port 0 is any free one.
        | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    )
    if run.returncode != 0:
        pytest.fail(f"{' '.join(arguments)}:\n{run.stdout}{run.stderr[-6000:]}")


PAGES = [page for page in sorted(DOCS.glob("*.md")) if blocks_of(page)]


# In a process of its own: examples may set things up that other tests must not see.
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run_and_print_what_the_page_says(page: pathlib.Path) -> None:
    if any("torch" in block.code for block in blocks_of(page)):
        pytest.importorskip("torch", reason="PyTorch is not installed")
    run_this_file(str(page))


def test_placement_examples_are_right_on_a_ring(torch: types.ModuleType) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no Gloo")
    run_this_file(str(DOCS / "PLACEMENTS.md"), "3")


def test_tables_are_what_the_results_say() -> None:
    tables = script(ROOT / "bench" / "tables.py")
    written = tables.PAGE.read_text(encoding="utf-8")
    if tables.filled(written) != written:
        pytest.fail("docs/PERFORMANCE.md is not what bench/results says: run 'python3 bench/tables.py'")


def test_api_page_is_up_to_date(torch: types.ModuleType) -> None:
    make_api = script(DOCS / "make_api.py")
    written, made = make_api.PAGE.read_text(encoding="utf-8"), make_api.make()
    # Not an assertion on the texts: a page of differences says less than the command.
    if written != made:
        pairs = zip(written.splitlines(), made.splitlines())
        line = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), "the end")
        pytest.fail(
            f"docs/API.md is not what the docstrings say now (from line {line}): run 'make python' if you have "
            f"changed docstrings, then '.venv/bin/{make_api.COMMAND}'"
        )


@pytest.mark.parametrize("name", ["draw_placements", "draw_shared_pairs"])
def test_picture_is_up_to_date(name: str) -> None:
    draw = script(DOCS / f"{name}.py")
    if draw.PICTURE.read_text(encoding="utf-8") != draw.make():
        pytest.fail(f"docs/images/{draw.PICTURE.name} is out of date: run '.venv/bin/{draw.COMMAND}'")


@pytest.mark.parametrize("package", ["annulus", "annulus.torch"])
def test_every_public_name_has_a_docstring(package: str) -> None:
    if package == "annulus.torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    module = importlib.import_module(package)
    make_api = script(DOCS / "make_api.py")
    assert module.__doc__
    for name in module.__all__:
        thing = getattr(module, name)
        if isinstance(thing, str):
            assert name in make_api.CONSTANTS, f"docs/make_api.py has no text for {name}"
            continue
        assert make_api.doc_of(thing), f"{package}.{name} has no docstring"
        if inspect.isclass(thing):
            for member, _, value in make_api.members_of(thing):
                assert make_api.doc_of(value), f"{package}.{name}.{member} has no docstring"


def anchors_of(page: pathlib.Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    slug = script(DOCS / "make_api.py").slug
    return {slug(heading) for heading in headings}


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    anchors: dict[pathlib.Path, set[str]] = {}
    for target in sorted(set(re.findall(r"\]\(([^)\s]+)\)", text))):
        if re.match(r"\w+:", target):  # the web
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}: there is no such file"
        if anchor:
            if file not in anchors:
                anchors[file] = anchors_of(file)
            found = anchor in anchors[file]
            assert found, f"{page.name} links to {target}: there is no such heading"


def main(page: pathlib.Path, ranks: int) -> None:
    if ranks == 1:
        run_blocks(page)
        return
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_on_a_ring, (ranks, page, f"{folder}/store"), nprocs=ranks)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
