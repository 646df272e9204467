"""Habits that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import ROOT, repository_files

MODULES = sorted((ROOT / "src").rglob("*.py"))
LONGEST = 400
# Written so that the pattern does not match itself.
_MACHINE_PATH = re.compile(r"(?<![\w.}>/*-])/(?:tmp|work|root|home|mnt|Users)/\w")
_CODE_IN_DATA = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_CODE_IN_DATA_CALLS = {"torch.load", "torch.save", "torch.jit.load", "eval", "exec"}


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def _imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_a_module_keeps_the_habits(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it is for"
    assert text.count("\n") <= LONGEST, f"a file of more than {LONGEST} lines has a seam"
    assert not _imported(tree) & _CODE_IN_DATA, "a file from a stranger must do no harm"
    for name, call in _calls(tree):
        assert name not in _CODE_IN_DATA_CALLS, f"line {call.lineno}: {name} can run code from a file"
        assert name not in ("torch.manual_seed", "random.seed", "np.random.seed", "numpy.random.seed"), (
            f"line {call.lineno}: {name} changes the caller's random numbers"
        )
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: raise a LokaError instead"
        if isinstance(node, ast.ExceptHandler):
            caught = "" if node.type is None else ast.unparse(node.type)
            assert caught not in ("", "Exception", "BaseException"), f"line {node.lineno}: too broad"
        if isinstance(node, ast.Attribute | ast.Name):
            assert ast.unparse(node) not in ("os.environ", "os.getenv"), (
                f"line {node.lineno}: no environment variable changes a result"
            )


def test_no_file_speaks_of_one_machine() -> None:
    files = repository_files(".py", ".md", ".toml", ".yml", ".yaml", ".json", ".txt", ".sh")
    files += [ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / "NOTICE"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if _MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_pattern_of_machine_paths_finds_them() -> None:
    assert _MACHINE_PATH.search('open("' + "/tm" + 'p/x.json")')
    assert _MACHINE_PATH.search("at " + "/hom" + "e/me/loka")
    assert not _MACHINE_PATH.search("https://example.org" + "/wo" + "rk/page")


def test_tests_are_neither_skipped_nor_loosened() -> None:
    marks = re.compile(r"mark\.(?:skip\b|xfail)|pytest\.(?:skip|xfail)\(")
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path != Path(__file__)
        and "gpu" not in path.parts
        and marks.search(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"skipped or expected to fail: {found}"


def test_the_package_ships_what_it_needs() -> None:
    import importlib.resources

    package = importlib.resources.files("loka")
    assert package.joinpath("py.typed").is_file()
    data = package.joinpath("recsys", "data", "files")
    assert data.joinpath("adult.parquet.brotli").is_file()
    attribution = data.joinpath("ADULT_ATTRIBUTION.md").read_text(encoding="utf-8")
    for text in (attribution, (ROOT / "NOTICE").read_text(), (ROOT / "README.md").read_text()):
        assert "Becker" in text
        assert "CC BY 4.0" in text


def test_every_dependency_is_pinned() -> None:
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(r) for r in project["dependencies"] + project["optional-dependencies"]["dev"]]
    lines = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in ("#", "")
    ]
    pinned = {}
    for line in lines:
        name, equals, number = line.partition("==")
        assert equals, f"`{line}` pins nothing"
        pinned[re.sub(r"[-_.]+", "-", name).lower()] = number
    for requirement in wanted:
        assert pinned.get(requirement.name) is not None, f"{requirement.name} is not pinned"
        assert requirement.specifier.contains(pinned[requirement.name]), f"{requirement} is pinned below"
