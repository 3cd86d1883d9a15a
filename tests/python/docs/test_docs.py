"""The documents are correct: examples run, generated tables and pictures are up to date, links have targets.

In README.md and docs/, the ```python blocks of a page run in order, in one namespace. An ```output block is what the
block before it prints. Other blocks (```py, ```text, indented ones) are not run.
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

import annulus
import pytest
from support import HANG, ROOT

DOCS = ROOT / "docs"
MODULES = ["annulus", "annulus.monitor", "annulus.torch"]


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
    """One rank: the functions of multi-gpu.md give every rank its part of what one process computes."""
    import annulus.torch as at
    import torch
    import torch.distributed as dist

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


ALL_PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in ALL_PAGES if blocks_of(page)]


def name_of(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


# In a process of its own: examples may set things up that other tests must not see.
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_run_and_print_what_the_page_says(page: pathlib.Path) -> None:
    if any("torch" in block.code for block in blocks_of(page)):
        pytest.importorskip("torch", reason="PyTorch is not installed")
    run_this_file(str(page))


def test_placement_examples_are_right_on_a_ring(torch: types.ModuleType) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no Gloo")
    run_this_file(str(DOCS / "multi-gpu.md"), "3")


def test_tables_are_what_the_results_say() -> None:
    for page, text in script(ROOT / "bench" / "tables.py").filled().items():
        if page.read_text(encoding="utf-8") != text:
            pytest.fail(
                f"{name_of(page)} is not what bench/results says: run 'python3 bench/tables.py'"
            )


@pytest.mark.parametrize("name", ["draw_masks", "draw_placements", "draw_shared_pairs"])
def test_picture_is_up_to_date(name: str) -> None:
    draw = script(DOCS / f"{name}.py")
    if draw.PICTURE.read_text(encoding="utf-8") != draw.make():
        pytest.fail(
            f"docs/images/{draw.PICTURE.name} is out of date: run '.venv/bin/{draw.COMMAND}'"
        )


def test_every_picture_is_used() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in ALL_PAGES)
    for picture in sorted((DOCS / "images").iterdir()):
        assert f"images/{picture.name}" in text, (
            f"no page shows docs/images/{picture.name}: delete it"
        )


def module_named(name: str) -> types.ModuleType:
    if name == "annulus.torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    return importlib.import_module(name)


@pytest.mark.parametrize("name", MODULES)
def test_api_pages_list_every_public_name_once(name: str) -> None:
    page = DOCS / "api" / f"{name.rpartition('.')[2]}.md"
    listed = re.findall(
        rf"^::: {re.escape(name)}\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(module_named(name).__all__), (
        f"{name_of(page)} and {name}.__all__ differ"
    )


def doc_of(thing: object) -> str:
    """The docstring alone: nanobind puts signatures before it."""
    if hasattr(thing, "__nb_signature__"):
        return next((doc for _, doc, *_ in thing.__nb_signature__ if doc), "")
    return getattr(thing, "__doc__", None) or ""


@pytest.mark.parametrize("name", ["annulus", "annulus.torch"])
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = module_named(name)
    assert module.__doc__
    for each in module.__all__:
        thing = getattr(module, each)
        if isinstance(thing, (str, tuple)):  # constants; the page has a sentence about them
            continue
        assert doc_of(thing), f"{name}.{each} has no docstring"
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            # extra_repr: nn.Module calls it, users do not.
            if member.startswith("_") or member == "extra_repr":
                continue
            if isinstance(value, property) or callable(value):
                value = getattr(value, "__func__", value)
                assert doc_of(value), f"{name}.{each}.{member} has no docstring"


def anchors_of(page: pathlib.Path) -> set[str]:
    """As on GitHub, and on the site as long as headings have no punctuation between words."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_have_targets(page: pathlib.Path) -> None:
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for target in sorted(set(re.findall(r"\]\(([^)\s]+)\)", text))):
        if re.match(r"\w+:", target):  # the web
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{name_of(page)} links to {target}: there is no such file"
        if anchor:
            found = anchor in anchors_of(file)
            assert found, f"{name_of(page)} links to {target}: there is no such heading"


def main(page: pathlib.Path, ranks: int) -> None:
    if ranks == 1:
        run_blocks(page)
        return
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_on_a_ring, (ranks, page, f"{folder}/store"), nprocs=ranks)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
