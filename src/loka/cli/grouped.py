"""Options that several verbs share, declared once as dataclasses and spread over a command's signature."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

__all__ = ["grouped"]


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose options are those of its parameters' dataclasses, and its plain parameters.

    A parameter whose annotation is a dataclass becomes one option for each field; called, the command puts
    the values together again. So an option's name, type, default and help stand in one place.

    Args:
        function: A verb. Annotations of plain parameters are typer's.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if dataclasses.is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type):
            groups[parameter.name] = parameter.annotation
            parameters += _options(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**values: Any) -> None:
        built = {
            name: group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        function(**values, **built)

    del command.__wrapped__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    options = []
    for field in dataclasses.fields(group):
        default: Any = inspect.Parameter.empty
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        kind = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter(field.name, kind, default=default, annotation=hints[field.name]))
    return options
