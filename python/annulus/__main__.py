"""``python -m annulus``: the command ``annulus`` of this package."""

import importlib.metadata
import os
import pathlib
import sys


def main() -> None:
    try:
        files = importlib.metadata.files("annulus") or []
    except importlib.metadata.PackageNotFoundError:  # imported from a folder that is not installed
        files = []
    for file in files:
        program = pathlib.Path(file.locate())
        if program.stem == "annulus" and program.parent.name in ("bin", "Scripts"):
            os.execv(program, ["annulus", *sys.argv[1:]])
    sys.exit(
        "annulus: this package was built without the command: CLI11 and nlohmann_json were missing. "
        "Install them (Debian: libcli11-dev nlohmann-json3-dev) and the package again"
    )


if __name__ == "__main__":
    main()
