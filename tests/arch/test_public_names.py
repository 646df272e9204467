"""The public names are a promise: a change here is a change of the API and belongs in the CHANGELOG."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest

import loka

PUBLIC = [
    "Plan",
    "Probe",
    "Profile",
    "Recipe",
    "Requirement",
    "Site",
    "__version__",
    "apply_mods",
    "apply_plan",
    "find_sites",
    "load_plan",
    "load_profile",
    "make_plan",
    "revert",
    "weights_fixed",
]


def test_the_list_is_frozen() -> None:
    assert sorted(loka.__all__) == PUBLIC
    assert dir(loka) == PUBLIC


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_every_name_loads_is_documented_and_typed(name: str) -> None:
    thing = getattr(loka, name)
    assert inspect.getdoc(thing), f"{name} has no docstring"
    if inspect.isfunction(thing):
        assert name.islower(), "verbs are functions"
        assert "return" in thing.__annotations__
        assert set(inspect.signature(thing).parameters) <= set(thing.__annotations__)
    else:
        assert inspect.isclass(thing)
        assert name[0].isupper(), "nouns are classes"


def test_functions_take_options_by_keyword() -> None:
    for name in (
        "apply_mods",
        "apply_plan",
        "find_sites",
        "make_plan",
        "revert",
        "load_plan",
        "load_profile",
    ):
        parameters = inspect.signature(getattr(loka, name)).parameters.values()
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert len(positional) <= 2, f"{name}: {[p.name for p in positional]}"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'loka' has no attribute 'freeeze'"):
        _ = loka.freeeze


def test_the_version_is_the_package_s() -> None:
    assert loka.__version__ == version("loka")
