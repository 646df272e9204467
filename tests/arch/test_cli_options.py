"""The verbs and options are a promise too: `tests/golden/cli_options.json` holds them.

Rewrite it with `python tests/arch/test_cli_options.py`, and say the change in the CHANGELOG.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import Any

from typer.main import get_command

from loka.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "cli_options.json"


def _plain(value: Any) -> Any:
    """A default as JSON; values that are made at run time by their type's name."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | int | float | bool) else type(value).__name__


def _options(command: Any) -> dict[str, Any]:
    found = {}
    for parameter in command.params:
        is_option = parameter.param_type_name == "option"
        shown: dict[str, Any] = {"kind": parameter.param_type_name, "takes": parameter.metavar}
        if is_option:
            shown["names"] = sorted([*parameter.opts, *parameter.secondary_opts])
        if parameter.required:
            shown["required"] = True
        else:
            shown["default"] = _plain(parameter.default)
        if parameter.multiple or parameter.nargs != 1:
            shown["many"] = True
        found[parameter.name] = shown
    return found


def _verbs(name: str, command: Any) -> dict[str, Any]:
    """The command and, where it has verbs of its own, those: `loka bench` and `loka bench gemm`."""
    found = {name: command}
    for verb, sub in sorted(getattr(command, "commands", {}).items()):
        found |= _verbs(f"{name} {verb}", sub)
    return found


def shown_now() -> dict[str, Any]:
    """Every verb with its options, as the command line has them now."""
    return {name: _options(command) for name, command in _verbs("loka", get_command(app)).items()}


def test_verbs_and_options_are_frozen() -> None:
    assert shown_now() == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_every_verb_and_option_says_what_it_is_for() -> None:
    for name, command in _verbs("loka", get_command(app)).items():
        assert command.help, f"{name} has no help"
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help, f"{name} {parameter.opts[0]} has no help"


def test_what_the_pages_name_exists() -> None:
    frozen = shown_now()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "Makefile"):
        for line in re.findall(r"(?:^|[`\s/])(loka [a-z]+(?: [^`\n]*)?)", page.read_text(encoding="utf-8")):
            words = line.split()
            longest = " ".join(words[:3])
            verb = longest if longest in frozen else " ".join(words[:2])
            if verb not in frozen:
                # Prose such as "LoKA" never matches; `loka show` does.
                continue
            known = {name for option in frozen[verb].values() for name in option.get("names", [])}
            known |= {"--help"}
            named = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", line))
            assert named <= known, f"{page.name}: `{line}` names {sorted(named - known)}"


def test_the_readme_names_every_verb_and_no_other() -> None:
    text = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"^\| `(loka [a-z]+(?: [a-z]+)?)` \|", text, flags=re.MULTILINE))
    shown = set(shown_now())
    with_verbs = {name for name in shown if any(other.startswith(f"{name} ") for other in shown)}
    assert listed == shown - with_verbs


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(shown_now(), indent=2) + "\n", encoding="utf-8")
