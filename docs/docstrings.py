"""Makes references such as :func:`shard` in docstrings links of the API pages. An extension of griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe

MODULES = ("annulus", "annulus.monitor", "annulus.torch")
# A list of arguments over two lines, which griffe expects on one.
BROKEN_NAMES = re.compile(r"^( +(?:\w+, *)+)\n +(?=[\w, ]+:)", re.MULTILINE)
ROLE = re.compile(r":(?:func|meth|class|attr|mod|data|exc):`~?([^`]+)`")


class References(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        known = self.public_names(pkg)
        seen: set[str] = set()
        for module in MODULES:
            for name in pkg.modules_collection[module].exports or []:
                self.rewrite(
                    pkg.modules_collection[module][str(name)],
                    (f"{module}.{name}", module),
                    known,
                    seen,
                )

    @staticmethod
    def public_names(pkg: griffe.Module) -> set[str]:
        known = set(MODULES)
        for module in MODULES:
            package = pkg.modules_collection[module]
            for name in package.exports or []:
                known.add(f"{module}.{name}")
                if package[str(name)].is_class:
                    known |= {f"{module}.{name}.{member}" for member in package[str(name)].members}
        return known

    def rewrite(self, thing: Any, scopes: tuple[str, ...], known: set[str], seen: set[str]) -> None:
        if thing.is_alias:
            thing = thing.final_target
        if thing.path in seen:
            return
        seen.add(thing.path)
        if thing.docstring:
            text = BROKEN_NAMES.sub(lambda match: match[1].rstrip() + " ", thing.docstring.value)
            thing.docstring.value = ROLE.sub(lambda match: self.link(match[1], scopes, known), text)
        if thing.is_class:
            for member in thing.members.values():
                self.rewrite(member, scopes, known, seen)

    @staticmethod
    def link(name: str, scopes: tuple[str, ...], known: set[str]) -> str:
        # Docstrings of annulus.torch name errors of annulus without their module.
        for scope in ("", *(f"{each}." for each in scopes), "annulus."):
            if scope + name in known:
                return f"[`{name}`][{scope}{name}]"
        return f"`{name}`"
