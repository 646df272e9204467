"""From what a user writes after `--data` to a source.

    SOURCE = KIND [":" PATH] ["?" OPTION "=" VALUE {"&" OPTION "=" VALUE}]  |  PATH ["?" ...]

e.g. `synthetic?rows=200000&seed=3`, `adult`, `criteo:days/day_*.gz?cardinality=100000`,
`parquet:log.parquet?label=buy`, `open_bandit:bts/all`, `movielens:data/ml-100k`, or just `log.parquet`: the
kind of a bare path follows from what lies there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loka.errors import DataError, UsageError, unknown_name
from loka.recsys.data.dense import DenseTransform
from loka.recsys.data.file_text import find_files, first_line
from loka.recsys.source import OnBadRow, Source

__all__ = ["SOURCE_KINDS", "open_source"]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


_WORDS: dict[Callable[[str], Any], str] = {
    int: "an integer",
    float: "a number",
    DenseTransform: "log1p or raw",
}
_OPTIONS: dict[str, dict[str, Callable[[str], Any]]] = {
    "synthetic": {"rows": int, "seed": int, "variant": str, "ctr": float, "tasks": int},
    "adult": {},
    "criteo": {"cardinality": int, "transform": DenseTransform},
    "parquet": {
        "label": _names,
        "dense": _names,
        "ids": _names,
        "drop": _names,
        "weight": str,
        "cardinality": int,
        "max_length": int,
        "transform": DenseTransform,
    },
    "open_bandit": {},
    "movielens": {"min_rating": float, "history": int},
}
SOURCE_KINDS = tuple(_OPTIONS)
_NO_PATH = ("synthetic",)
_HINT = f"kinds: {', '.join(SOURCE_KINDS)}; write `KIND:PATH?option=value`"


def open_source(spec: str, *, on_bad_row: OnBadRow = OnBadRow.ERROR) -> Source:
    """Open a data source by its name.

    Args:
        spec: `KIND[:PATH][?option=value&...]`, or a path whose kind follows from its content.
        on_bad_row: Raise at a row that cannot be read, or leave it out and count it.

    Returns:
        The source. Files are checked (present, not empty, readable); rows are read when batches are.

    Raises:
        UnknownNameError: for a kind or option that does not exist.
        UsageError: for an option with a value that it cannot have.
        DataError: for a file that is missing, empty, a directory or of the wrong kind.
    """
    place, _, query = spec.partition("?")
    kind, path = _kind_and_path(place)
    options = _options(kind, query)
    if path is None and kind not in ("synthetic", "adult"):
        raise UsageError(f"data source `{kind}` needs a path", hint=f"write `{kind}:PATH`")
    if path is not None and kind in _NO_PATH:
        raise UsageError(
            f"data source `{kind}` takes no path, got `{path}`", hint="its options come after a `?`"
        )
    return _open(kind, path or "", options, on_bad_row)


def _open(kind: str, path: str, options: Mapping[str, Any], on_bad_row: OnBadRow) -> Source:
    # Imported here: a run on one kind of data does not load the readers of the others.
    if kind == "synthetic":
        from loka.recsys.data.synthetic import SyntheticSource

        return SyntheticSource(**options)
    if kind == "adult":
        from loka.recsys.data.adult import AdultSource

        return AdultSource(path or None, on_bad_row=on_bad_row)
    if kind == "criteo":
        from loka.recsys.data.criteo import CriteoSource

        return CriteoSource(path, **options, on_bad_row=on_bad_row)
    if kind == "parquet":
        from loka.recsys.data.parquet import ParquetSource

        return ParquetSource(path, **options, on_bad_row=on_bad_row)
    if kind == "open_bandit":
        from loka.recsys.data.open_bandit import OpenBanditSource

        return OpenBanditSource(path, on_bad_row=on_bad_row)
    from loka.recsys.data.movielens import MovieLensSource

    return MovieLensSource(path, **options, on_bad_row=on_bad_row)


def _kind_and_path(place: str) -> tuple[str, str | None]:
    kind, colon, path = place.partition(":")
    if kind in SOURCE_KINDS:
        if colon and not path:
            raise UsageError(f"data source `{place}` has an empty path", hint=f"write `{kind}:PATH`")
        return kind, path or None
    if Path(place).exists():
        return _kind_of_path(place), place
    if re.fullmatch(r"[A-Za-z_]\w*", kind) and (colon or place == kind):
        raise unknown_name("data source", kind, SOURCE_KINDS)
    find_files(place)  # says which of the files is missing
    return _kind_of_path(place), place


def _options(kind: str, query: str) -> dict[str, Any]:
    known = _OPTIONS[kind]
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, equals, text = part.partition("=")
        if name not in known:
            raise unknown_name("option", name, list(known), where=f"data source `{kind}`")
        if not equals or not text:
            raise UsageError(
                f"option `{name}` of data source `{kind}` has no value", hint=f"write `{name}=VALUE`"
            )
        if name in options:
            raise UsageError(f"option `{name}` of data source `{kind}` is given twice")
        try:
            options[name] = known[name](text)
        except ValueError as error:
            wanted = _WORDS[known[name]]
            raise UsageError(f"option `{name}` of data source `{kind}` is `{text}`, not {wanted}") from error
    return options


def _kind_of_path(place: str) -> str:
    """What lies at a bare path (or the first of several files), by its content."""
    path = Path(place)
    if path.is_dir():
        if any(path.glob("*.inter")):
            return "movielens"
        if any(path.glob("item_context.csv*")):
            return "open_bandit"
        raise DataError(
            f"{path}: is a directory, a file is wanted",
            hint=f"name its files, e.g. `{path}/*` in quotes; {_HINT}",
        )
    path = find_files(place)[0]
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            from loka.recsys.data.adult import has_adult_columns

            return "adult" if has_adult_columns(path) else "parquet"
    line = first_line(path)
    if line.startswith(b"user_id:token"):
        return "movielens"
    if b"propensity_score" in line or (b"item_id" in line and b"click" in line):
        return "open_bandit"
    if b"\t" in line or path.name.endswith((".tsv", ".txt", ".gz")):
        return "criteo"
    if path.name.endswith((".parquet", ".parquet.brotli")):
        return "parquet"  # whose reader says what is wrong with it
    raise DataError(f"{path}: its content is of no kind that is known", hint=_HINT)
