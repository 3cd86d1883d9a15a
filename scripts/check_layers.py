#!/usr/bin/env python3
"""Checks every #include against the layers that CMakeLists.txt declares with annulus_layer(<name> USES <layer>...).

A layer may include itself and whatever it uses, directly or through others. On top of that:
  public headers   include only public headers and the standard library: no third-party types reach users
  cli, python      may use every layer, but not each other
  bench, tests     may use every layer and cli
  examples         and the install test see public headers only, like a user
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

# Which layer a public header belongs to. Its private sources are in src/<layer>/.
PUBLIC_HEADERS = {
    "error.h": "core",
    "device.h": "core",
    "events.h": "core",
    "tensor.h": "core",
    "half.h": "core",
    "band.h": "pattern",
    "pattern.h": "pattern",
    "row_set.h": "placement",
    "moves.h": "placement",
    "placement.h": "placement",
    "plan.h": "plan",
    "reference.h": "kernels",
    "cuda.h": "kernels",
    "transport.h": "transport",
    "in_process.h": "transport",
    "mpi.h": "transport",
    "ring_check.h": "transport",
    "ring_attention.h": "ring",
    "ring_cache.h": "kv_cache",
    "simulate.h": "simulate",
}

SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh"}
LAYER = re.compile(r"^annulus_layer\(\s*(\w+)(?:\s+USES\s+([\w\s]+?))?\s*\)", re.MULTILINE)
# HWY_TARGET_INCLUDE is what Highway's foreach_target.h includes, once per instruction set.
INCLUDE = re.compile(r"^\s*#\s*(?:include|define\s+HWY_TARGET_INCLUDE)\s*([<\"])([^>\"]+)[>\"]")


def read_layers(root):
    """{layer: every layer it may include, itself too}, from CMakeLists.txt."""
    reach = {}
    for name, uses in LAYER.findall((root / "CMakeLists.txt").read_text()):
        reach[name] = {name}.union(*(reach[used] for used in uses.split()))
    if not reach:
        sys.exit("check_layers: CMakeLists.txt declares no layer with annulus_layer(...)")
    return reach


def sources(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def includes(path):
    """(line number, is it <...>, what) of every include."""
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if match := INCLUDE.match(line):
            yield number, match[1] == "<", match[2]


class Checker:
    def __init__(self, root):
        self.root = root
        self.reach = read_layers(root)
        self.problems = []

    def report(self, path, line, message):
        where = path.relative_to(self.root).as_posix()
        self.problems.append(f"{where}:{line}: {message}" if line else f"{where}: {message}")

    def layer_of(self, path, what):
        """The layer, 'cli', or None for what is not ours. Unknown public headers are reported once, by check_public."""
        if what.startswith("annulus/"):
            return PUBLIC_HEADERS.get(what.removeprefix("annulus/"))
        beside = (path.parent / what).resolve()
        inside = beside if beside.exists() else self.root / "src" / what
        for folder in [*self.reach, "cli"]:
            top = self.root / ("cli" if folder == "cli" else f"src/{folder}")
            if inside.is_relative_to(top) or what.startswith(f"{folder}/"):
                return folder
        return None

    def check_layers(self):
        for folder in sorted(path for path in (self.root / "src").iterdir() if path.is_dir()):
            files = sources(folder)
            if files and folder.name not in self.reach:
                self.report(folder, 0, f"'{folder.name}' is not a layer: declare it with annulus_layer in CMakeLists.txt")
                continue
            for path in files:
                self.check_file(path, folder.name)
        for path in (self.root / "src").glob("*"):
            if path.suffix in SUFFIXES:
                self.report(path, 0, "belongs to no layer: move it into src/<layer>/")

    def check_file(self, path, layer):
        for line, _, what in includes(path):
            target = self.layer_of(path, what)
            if target is not None and target not in self.reach[layer]:
                allowed = ", ".join(name for name in self.reach if name in self.reach[layer])
                self.report(path, line, f"layer '{layer}' includes {what} of '{target}'; it may use {allowed}")

    def check_public(self):
        for path in sources(self.root / "include" / "annulus"):
            name = path.relative_to(self.root / "include" / "annulus").as_posix()
            layer = PUBLIC_HEADERS.get(name)
            if layer is None:
                self.report(path, 0, "has no layer: add it to PUBLIC_HEADERS in scripts/check_layers.py")
                continue
            if layer in self.reach:
                self.check_file(path, layer)
            for line, angled, what in includes(path):
                standard = angled and re.fullmatch(r"[a-z_]+", what)
                if not standard and not what.startswith("annulus/"):
                    self.report(path, line, f"a public header includes {what}; only the standard library and annulus/ are allowed")

    def check_cli(self):
        # cli and python are above every layer: nothing to forbid but programs that are built on top of it.
        self.forbid(self.root / "cli", ("bench/", "tests/", "python/"), "cli must not depend on it")
        self.forbid(self.root / "python", ("bench/", "tests/", "cli/"), "the bindings must not depend on it")

    def check_users(self):
        private = tuple(f"{name}/" for name in [*self.reach, "cli", "src"])
        for folder in ("examples", "tests/install_consumer"):
            self.forbid(self.root / folder, private, "users see public headers only")

    def forbid(self, folder, prefixes, why):
        for path in sources(folder) if folder.is_dir() else []:
            for line, _, what in includes(path):
                if what.startswith(prefixes):
                    self.report(path, line, f"includes {what}: {why}")

    def run(self):
        self.check_layers()
        self.check_public()
        self.check_cli()
        self.check_users()
        return self.problems


def self_test():
    """The check finds what it is for: each wrong file gives exactly one problem, the right ones none."""
    cmake = "annulus_layer(core)\nannulus_layer(pattern USES core)\nannulus_layer(kernels USES pattern)\n"
    cmake += "annulus_layer(transport USES core)\nannulus_layer(ring USES kernels transport)\n"
    right = {
        "CMakeLists.txt": cmake,
        "include/annulus/error.h": "#include <string>\n",
        "include/annulus/pattern.h": '#include <cstdint>\n#include "annulus/error.h"\n',
        "include/annulus/transport.h": "#include <span>\n",
        "src/core/thread_pool.h": "",
        "src/core/thread_pool.cpp": '#include "core/thread_pool.h"\n#include <fmt/format.h>\n',
        "src/kernels/tile.h": '#include "annulus/pattern.h"\n#include "core/thread_pool.h"\n',
        "src/kernels/cpu/tile.cpp": '#define HWY_TARGET_INCLUDE "kernels/cpu/tile.cpp"\n#include "../tile.h"\n',
        "src/transport/in_process.cpp": '#include "annulus/transport.h"\n',
        "src/ring/run.cpp": '#include "kernels/tile.h"\n#include "annulus/transport.h"\n',
        "cli/main.cpp": '#include "ring/run.h"\n',
        "python/src/ring.cpp": '#include "ring/run.h"\n',
        "examples/one.cpp": '#include "annulus/pattern.h"\n',
    }
    wrong = {
        "src/core/up.cpp": '#include "annulus/pattern.h"\n',
        "src/kernels/sees_transport.cpp": '  #  include "annulus/transport.h"\n',
        "src/kernels/cpu/sees_ring.cpp": '#include "../../ring/run.cpp"\n',
        "src/transport/sees_kernels.cpp": '#include "kernels/tile.h"\n',
        "src/transport/sees_pattern.cpp": '#include <annulus/pattern.h>\n',
        "src/ring/sees_cli.cpp": '#include "cli/options.h"\n',
        "src/telemetry/hook.cpp": "",
        "src/stray.cpp": "",
        "include/annulus/unknown.h": "",
        "include/annulus/half.h": "#include <hwy/base.h>\n",
        "include/annulus/tensor.h": '#include "core/thread_pool.h"\n',
        "python/src/sees_cli.cpp": '#include "cli/options.h"\n',
        "examples/private.cpp": '#include "core/thread_pool.h"\n',
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()

        def write(files):
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)

        write(right)
        found = Checker(root).run()
        assert not found, "right files were reported:\n" + "\n".join(found)
        write(wrong)
        found = Checker(root).run()
        reported = sorted(problem.split(":")[0] for problem in found)
        expected = sorted(name if name != "src/telemetry/hook.cpp" else "src/telemetry" for name in wrong)
        assert reported == expected, "found:\n" + "\n".join(found) + "\nexpected:\n" + "\n".join(expected)
    print(f"check_layers: self-test passed, {len(wrong)} kinds of wrong include found")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--self-test", action="store_true", help="check the checker and nothing else")
    arguments = parser.parse_args()
    if arguments.self_test:
        self_test()
        return 0
    checker = Checker(arguments.root.resolve())
    problems = checker.run()
    if problems:
        print("\n".join(problems), file=sys.stderr)
        print(f"check_layers: {len(problems)} includes break the layers", file=sys.stderr)
        return 1
    files = len(sources(arguments.root / "src")) + len(sources(arguments.root / "include"))
    print(f"check_layers: {files} files follow the {len(checker.reach)} layers ({', '.join(checker.reach)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
