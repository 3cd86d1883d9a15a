"""What 'make docs' does besides rendering docs/: sources for the API pages, and pages from files outside docs/."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import shutil

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import Abort
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = ROOT / "build" / "docs" / "python"
EXAMPLES = ROOT / "examples" / "python"


def find_stub() -> pathlib.Path:
    """The stub of annulus._core: of the installed package, or else of the newest build."""
    spec = importlib.util.find_spec("annulus")
    installed = [pathlib.Path(spec.origin).parent / "_core.pyi"] if spec and spec.origin else []
    built = list(ROOT.glob("build/*/python/annulus/_core.pyi"))
    built.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in installed + built:
        if path.exists():
            return path
    raise Abort("docs: annulus is not installed here and not built: run 'make python' first")


def union(annotations: list[ast.expr | None]) -> ast.expr | None:
    texts = list(dict.fromkeys(ast.unparse(each) for each in annotations if each is not None))
    if sorted(texts) == ["Literal[False]", "Literal[True]"]:
        texts = ["bool"]
    return ast.parse(" | ".join(texts), mode="eval").body if texts else None


def with_implementations(stub: str) -> str:
    """The stub with one definition of each overloaded function: griffe shows none that has overloads only."""
    tree = ast.parse(stub)
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        first: dict[str, ast.FunctionDef] = {}
        for function in list(scope.body):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not any(ast.unparse(each) == "overload" for each in function.decorator_list):
                continue
            kept = first.setdefault(function.name, function)
            if kept is function:
                function.decorator_list.clear()
                continue
            others = {each.arg: each for each in function.args.args + function.args.kwonlyargs}
            for each in kept.args.args + kept.args.kwonlyargs:
                if each.arg in others:
                    each.annotation = union([each.annotation, others[each.arg].annotation])
            kept.returns = union([kept.returns, function.returns])
            scope.body.remove(function)
    return ast.unparse(tree)


@event_priority(100)  # before mkdocstrings looks for the folder
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    shutil.rmtree(SOURCES, ignore_errors=True)
    shutil.copytree(
        ROOT / "python" / "annulus",
        SOURCES / "annulus",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    stub = with_implementations(find_stub().read_text(encoding="utf-8"))
    (SOURCES / "annulus" / "_core.pyi").write_text(stub, encoding="utf-8")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=contributing))
    for program in sorted(EXAMPLES.glob("*.py")):
        text = f"# {program.name}\n\n`{program.relative_to(ROOT)}`\n\n```py\n{program.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, f"examples/{program.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside docs/ work in the repository. Here examples have pages; of others the name remains."""
    markdown = re.sub(r"\]\(\.\./examples/python/(\w+)\.py\)", r"](examples/\1.md)", markdown)
    markdown = markdown.replace("](../CONTRIBUTING.md", "](contributing.md")
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?!\w+\.md)[^)]*\)", r"\1", markdown)
