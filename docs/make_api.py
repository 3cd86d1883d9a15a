"""Writes docs/API.md from the signatures and docstrings of the installed package.

    python docs/make_api.py            # writes docs/API.md
    python docs/make_api.py --check    # exit status 1 if docs/API.md is not what it would write

Only names in ``__all__`` of annulus, annulus.monitor and annulus.torch are shown, of classes only what they define themselves:
nothing of PyTorch's own classes, of this machine or of this version of Python gets into the text.
"""

from __future__ import annotations

import argparse
import inspect
import pathlib
import re
import sys
import types
from collections.abc import Iterator

PAGE = pathlib.Path(__file__).resolve().parent / "API.md"
COMMAND = "python docs/make_api.py"

# Every public name is in exactly one group; groups_of() complains otherwise.
GROUPS = {
    "annulus": {
        "Attention": ["attention", "attention_backward", "reference_forward", "reference_backward"],
        "Patterns, placements and plans": ["Pattern", "Branch", "Placement", "moves", "Plan"],
        "Rings and transports": [
            "RingAttention",
            "BranchState",
            "RingAttentionCache",
            "make_in_process_ring",
            "gather_records",
            "Transport",
            "Transfer",
        ],
        "Errors": [
            "Error",
            "ConfigError",
            "TransportError",
            "DeviceError",
            "OutOfMemory",
            "Interrupted",
        ],
        "Runtime": ["isa", "threads", "cache_info", "clear_cache", "__version__"],
        "CUDA": ["cuda_built", "cuda_complaint", "cuda_devices"],
    },
    "annulus.monitor": {
        "annulus.monitor: events": [
            "start",
            "stop",
            "running",
            "capacity",
            "clear",
            "read",
            "totals",
            "summary",
            "record",
            "span",
            "Event",
            "EventTotal",
            "KINDS",
        ],
        "annulus.monitor: exporters": [
            "JsonLines",
            "write_chrome_trace",
            "PrometheusExporter",
            "WandbExporter",
            "LogExporter",
            "set_log_level",
            "flush_log",
            "logger",
            "profile_memory",
            "MemorySample",
        ],
    },
    "annulus.torch": {
        "annulus.torch: attention": [
            "ring_attention",
            "RingDilatedAttention",
            "RingMultiheadDilatedAttention",
            "RingAdvancedDistributedDilatedAttention",
        ],
        "annulus.torch: models and training": [
            "LongNet",
            "LongNetLM",
            "rotary_table",
            "token_mean",
            "data_parallel",
            "Training",
        ],
        "annulus.torch: tokens and ranks": ["shard", "unshard", "reshard", "positions"],
        "annulus.torch: checkpoints": ["Checkpoints", "Resumed", "CheckpointError"],
        "annulus.torch: runtime": [
            "get_memory_info",
            "clear_cache",
            "cleanup",
            "survivors",
            "ProcessGroupTransport",
        ],
    },
}

INTRODUCTION = f"""\
# API reference

What `help()` shows, on one page: the public names of `annulus` and `annulus.monitor`, which need NumPy only, and of `annulus.torch`.
Made from the docstrings by `{COMMAND}`: change those, not this page. `ArrayT` is the type of the arrays that came in:
NumPy's, PyTorch's or any other with DLPack. [PLACEMENTS.md](PLACEMENTS.md) explains placements and positions.
"""

# Strings and tuples cannot have docstrings.
CONSTANTS = {
    "__version__": "The version of the package, a string such as `'1.2.3'`.",
    "KINDS": "The kinds of events: pass, step, compute, send, receive, wait, cache and recovery.",
}

# Plumbing of nn.Module that a class overrides but nobody calls.
HIDDEN = {"extra_repr"}

WIDTH = 100  # of code, in columns
TEXT_WIDTH = 140


def split_arguments(text: str) -> list[str]:
    """Cuts at the commas that are in no bracket and no quotes."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        else:
            depth += (c in "([{") - (c in ")]}")
            if c == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += c
    return [p.strip() for p in parts if p.strip()]


def short_types(text: str) -> str:
    """Type names as one would write them after the usual imports."""
    text = re.sub(r"\b(typing|collections\.abc|numpy\.typing|annulus(?:\._core)?)\.", "", text)
    return re.sub(r"(?<![\w.])dist\.", "torch.distributed.", text)


class Signature:
    """Arguments and result of a function as text."""

    def __init__(self, arguments: list[str], result: str):
        arguments = [short_types(a) for a in arguments]
        self.arguments = [a for a in arguments if not re.match(r"self\b", a)]
        self.result = short_types(result)

    @classmethod
    def of_nanobind(cls, text: str, defaults: tuple | None) -> Signature:
        # Defaults that the binding does not spell out are \0, \1, ... and listed beside the text.
        if defaults:
            text = re.sub(r"\\(\d+)", lambda m: repr(defaults[int(m[1])]), text)
        head, _, result = text.rpartition(" -> ")
        return cls(split_arguments(head[head.index("(") + 1 : head.rindex(")")]), result)

    @classmethod
    def of_python(cls, function: types.FunctionType) -> Signature:
        # Not str(inspect.signature()): its spelling of annotations differs between versions of Python.
        signature = inspect.signature(function)
        arguments, starred = [], False
        for p in signature.parameters.values():
            if p.kind == p.KEYWORD_ONLY and not starred:
                arguments.append("*")
            starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
            text = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
            annotated = p.annotation is not p.empty
            if annotated:
                text += f": {annotation_text(p.annotation)}"
            if p.default is not p.empty:
                text += f" = {p.default!r}" if annotated else f"={p.default!r}"
            arguments.append(text)
        result = signature.return_annotation
        return cls(arguments, "" if result is inspect.Signature.empty else annotation_text(result))

    def code(self, prefix: str, with_result: bool = True) -> str:
        """prefix(arguments) -> result, one argument per line where it does not fit."""
        end = f" -> {self.result}" if with_result and self.result else ""
        line = f"{prefix}({', '.join(self.arguments)}){end}"
        if len(line) <= WIDTH:
            return line
        return "\n".join([f"{prefix}(", *(f"    {a}," for a in self.arguments), f"){end}"])

    def difference(self, first: Signature) -> Signature:
        """What an overload has that the first one has not."""
        other = [a for a in self.arguments if a not in first.arguments]
        return Signature(["..."] * (len(other) < len(self.arguments)) + other, self.result)


def annotation_text(annotation: object) -> str:
    # Modules with "from __future__ import annotations" have them as text already.
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def signatures_of(function: object) -> list[Signature]:
    """One per overload; none if there is nothing to call."""
    if hasattr(function, "__nb_signature__"):
        return [Signature.of_nanobind(text, rest[-1]) for text, *rest in function.__nb_signature__]
    return [Signature.of_python(function)] if inspect.isfunction(function) else []


def doc_of(thing: object) -> str:
    """The docstring alone: nanobind puts signatures before it."""
    if hasattr(thing, "__nb_signature__"):
        docs = [doc for _, doc, *_ in thing.__nb_signature__ if doc]
        return inspect.cleandoc(docs[0]) if docs else ""
    # Not inspect.getdoc(), which would look at base classes.
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def members_of(cls: type) -> Iterator[tuple[str, str, object]]:
    """(name, kind, thing) of what a class defines itself; kind: property, static or method."""
    for name, thing in vars(cls).items():
        if name.startswith("_") or name in HIDDEN:
            continue
        if isinstance(thing, property):
            yield name, "property", thing
        elif isinstance(thing, staticmethod):
            yield name, "static", thing.__func__
        elif isinstance(thing, classmethod):
            yield name, "static", getattr(cls, name)
        elif type(thing).__name__ == "nb_func":  # nanobind's static methods
            yield name, "static", thing
        elif callable(thing):
            yield name, "method", thing


def groups_of(module: types.ModuleType) -> dict[str, list[str]]:
    groups = GROUPS[module.__name__]
    listed = [name for names in groups.values() for name in names]
    if sorted(listed) != sorted(module.__all__):
        odd = sorted(set(listed) ^ set(module.__all__)) or "a name twice"
        raise SystemExit(f"make_api: {odd}: GROUPS and {module.__name__}.__all__ differ")
    return groups


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


class Writer:
    """The page. Knows all headings, so that references in docstrings become links."""

    def __init__(self, modules: list[types.ModuleType]):
        self.modules = modules
        self.lines: list[str] = []
        self.headings: dict[str, str] = {}  # what a reference may say, in full: the heading
        for module in modules:
            for name in module.__all__:
                full = f"{module.__name__}.{name}"
                self.headings[full] = full
                thing = getattr(module, name)
                if isinstance(thing, type):
                    for member, kind, _ in members_of(thing):
                        # Properties have no heading of their own.
                        own = full if kind == "property" else f"{name}.{member}"
                        self.headings[f"{full}.{member}"] = own

    def page(self) -> str:
        self.lines = [INTRODUCTION]
        for module in self.modules:
            for title, names in groups_of(module).items():
                links = (f"[`{n}`](#{slug(f'{module.__name__}.{n}')})" for n in names)
                self.lines += wrapped(f"- [{title}](#{slug(title)}): {', '.join(links)}", "  ")
        for module in self.modules:
            for title, names in groups_of(module).items():
                self.lines += ["", f"## {title}"]
                for name in names:
                    self.entry(module.__name__, name, getattr(module, name))
        return "\n".join(self.lines) + "\n"

    def entry(self, module: str, name: str, thing: object) -> None:
        full = f"{module}.{name}"
        self.lines += ["", f"### `{full}`"]
        if name in CONSTANTS:
            self.lines += ["", CONSTANTS[name]]
        elif not isinstance(thing, type):
            self.code(function_code(name, thing))
            self.doc(thing, (module,))
        else:
            self.code(class_code(name, thing))
            self.doc(thing, (full, module))
            self.members(full, name, thing)

    def members(self, full: str, name: str, cls: type) -> None:
        scopes = (full, full.rpartition(".")[0])
        members = list(members_of(cls))
        properties = [(n, thing) for n, kind, thing in members if kind == "property"]
        if properties:
            self.lines += ["", "Properties:", ""]
        for member, thing in properties:
            kinds = [s.result for s in signatures_of(thing.fget)]
            kind = f" (`{kinds[0]}`)" if kinds and kinds[0] else ""
            text = " ".join(doc_of(thing).split())
            self.lines += wrapped(f"- `{member}`{kind}: {self.inline(text, scopes)}", "  ")
        for member, kind, thing in members:
            if kind != "property":
                self.lines += ["", f"#### `{name}.{member}`"]
                prefix = f"{name}.{member}" if kind == "static" else member
                self.code(function_code(prefix, thing))
                self.doc(thing, scopes)

    def code(self, signatures: list[str]) -> None:
        self.lines += ["", "```py", *signatures, "```"]

    def doc(self, thing: object, scopes: tuple[str, ...]) -> None:
        """A docstring as Markdown: sections become lists, references links, literal blocks code."""
        section = False
        paragraphs = re.split(r"\n\s*\n", doc_of(thing))
        for paragraph in paragraphs:
            lines = paragraph.split("\n")
            self.lines.append("")
            heading = re.fullmatch(r"(Args|Returns|Raises):", lines[0])
            if heading:
                self.lines.append({"Args": "Arguments:"}.get(heading[1], lines[0]))
                self.lines.append("")
                self.items("\n".join(lines[1:]), heading[1], scopes)
            elif all(line.startswith("    ") for line in lines):
                self.lines += ["```py", *(line[4:] for line in lines), "```"]
            elif lines[0].startswith("- "):
                for item in re.split(r"\n(?=- )", paragraph):
                    text = " ".join(item.split())
                    self.lines += wrapped(self.inline(text, scopes), "  ")
            else:
                self.lines += wrapped(self.inline(" ".join(paragraph.split()), scopes))

    def items(self, text: str, section: str, scopes: tuple[str, ...]) -> None:
        text = inspect.cleandoc(text)
        if section == "Returns":
            self.lines += wrapped(self.inline(" ".join(text.split()), scopes))
            return
        for item in re.split(r"\n(?! )", text):
            names, _, rest = " ".join(item.split()).partition(": ")
            shown = ", ".join(self.name(n.strip(), section, scopes) for n in names.split(","))
            self.lines += wrapped(f"- {shown}: {self.inline(rest, scopes)}", "  ")

    def name(self, name: str, section: str, scopes: tuple[str, ...]) -> str:
        return self.reference(name, scopes) if section == "Raises" else f"`{name}`"

    def reference(self, name: str, scopes: tuple[str, ...]) -> str:
        # annulus.torch's docstrings name annulus's errors without their module, too.
        for scope in ("", *(f"{s}." for s in scopes), "annulus."):
            heading = self.headings.get(scope + name)
            if heading is not None:
                return f"[`{name}`](#{slug(heading)})"
        raise SystemExit(
            f"make_api: a docstring in {scopes[0]} refers to {name}, which is not public"
        )

    def inline(self, text: str, scopes: tuple[str, ...]) -> str:
        parts = re.split(r"(``.+?``|:\w+:`[^`]+`|`[^`]+`)", text)
        for i, part in enumerate(parts):
            if part.startswith("``"):
                parts[i] = part[1:-1]
            elif part.startswith(":") and part.endswith("`"):
                parts[i] = self.reference(part[part.index("`") + 1 : -1], scopes)
            elif not part.startswith("`"):
                part = re.sub(
                    r"(?<![\w`])(\w+='\w+'|\w+=(?:True|False|None)|'\w+'|\"\w+\")", r"`\1`", part
                )
                parts[i] = re.sub(r"<(?=\w|/)", "&lt;", part)
        return "".join(parts)


def function_code(prefix: str, function: object) -> list[str]:
    signatures = signatures_of(function)
    overloads = [s.difference(signatures[0]) for s in signatures[1:]]
    return [s.code(prefix) for s in signatures[:1] + overloads]


def class_code(name: str, cls: type) -> list[str]:
    bases = ", ".join(b.__name__ for b in cls.__bases__ if b.__name__ != "object")
    constructor = vars(cls).get("__init__")
    if issubclass(cls, BaseException):
        return [f"class {name}({bases})"]
    signatures = signatures_of(constructor) if constructor else []
    return [s.code(f"class {name}", with_result=False) for s in signatures] or [f"class {name}"]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of at most TEXT_WIDTH columns; code between backticks stays together."""
    words = re.findall(r"(?:`[^`]*`|[^\s`])+", text)
    lines = [""]
    for word in words:
        if lines[-1].strip() and len(lines[-1]) + 1 + len(word) > TEXT_WIDTH:
            lines.append(indent + word)
        else:
            lines[-1] += (" " if lines[-1].strip() else "") + word
    return lines


def make() -> str:
    """The text of docs/API.md. Needs PyTorch for annulus.torch."""
    import annulus
    import annulus.monitor
    import annulus.torch

    return Writer([annulus, annulus.monitor, annulus.torch]).page()


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Writes docs/API.md from the package's docstrings."
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    text = make()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print(f"docs/API.md is not what the docstrings say now: run '{COMMAND}'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
