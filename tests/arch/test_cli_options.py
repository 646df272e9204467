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


def shown_now() -> dict[str, Any]:
    """Every verb with its options, as the command line has them now."""
    command: Any = get_command(app)
    return {"loka": _options(command)} | {
        f"loka {verb}": _options(sub) for verb, sub in sorted(command.commands.items())
    }


def test_verbs_and_options_are_frozen() -> None:
    assert shown_now() == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_every_verb_and_option_says_what_it_is_for() -> None:
    command: Any = get_command(app)
    for verb, sub in command.commands.items():
        assert sub.help, f"loka {verb} has no help"
        for parameter in sub.params:
            if parameter.param_type_name == "option":
                assert parameter.help, f"loka {verb} {parameter.opts[0]} has no help"


def test_what_the_pages_name_exists() -> None:
    frozen = shown_now()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "Makefile"):
        for line in re.findall(r"(?:^|[`\s/])(loka [a-z]+(?: [^`\n]*)?)", page.read_text(encoding="utf-8")):
            verb = " ".join(line.split()[:2])
            if verb not in frozen:
                # Prose such as "LoKA" never matches; `loka show` does.
                continue
            known = {name for option in frozen[verb].values() for name in option.get("names", [])}
            known |= {"--help"}
            named = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", line))
            assert named <= known, f"{page.name}: `{line}` names {sorted(named - known)}"


def test_the_readme_names_every_verb_and_no_other() -> None:
    listed = set(re.findall(r"^\| `(loka [a-z]+)` \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert listed == set(shown_now()) - {"loka"}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(shown_now(), indent=2) + "\n", encoding="utf-8")
