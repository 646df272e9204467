"""A module imports only from floors below."""

from __future__ import annotations

import re
import tomllib

from running import ROOT, run

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
SOURCE = ROOT / "src" / "loka"


def test_every_import_goes_down() -> None:
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    said = run("-c", command)
    assert f"{len(CONTRACTS)} kept, 0 broken" in said


def test_every_package_stands_on_a_floor() -> None:
    listed = set(re.findall(r"loka\.(\w+)", " ".join(CONTRACTS[0]["layers"])))
    optional = set(re.findall(r"\(loka\.(\w+)\)", " ".join(CONTRACTS[0]["layers"])))
    found = {p.parent.name for p in SOURCE.glob("*/__init__.py")} | {p.stem for p in SOURCE.glob("*.py")}
    found.discard("__init__")
    assert found <= listed, "a package that no floor names"
    assert listed - optional <= found, "a floor that names a package which does not exist"
