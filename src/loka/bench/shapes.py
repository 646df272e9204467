"""Which linear layers are timed: the list that comes with LoKA, or a file like it."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from pathlib import Path

from loka.errors import DataError

__all__ = ["Shape", "default_shapes", "read_shapes"]

_LISTED = "shapes.csv"
_COLUMNS = ("m", "n", "k")


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A linear layer x_MK -> y_MN.

    Attributes:
        m: Rows M.
        n: Output features N.
        k: Input features K.
        bias: Whether fwd adds one.
        models: Where it occurs; only told.
    """

    m: int
    n: int
    k: int
    bias: bool = True
    models: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """`MxNxK`."""
        return f"{self.m}x{self.n}x{self.k}"


def default_shapes() -> tuple[Shape, ...]:
    """The committed list: 64 shapes of recommendation models and the two published end points."""
    text = importlib.resources.files("loka.bench").joinpath(_LISTED).read_text(encoding="utf-8")
    return _parsed(text, _LISTED)


def read_shapes(path: Path) -> tuple[Shape, ...]:
    """Read a CSV file with the columns m, n, k and, if wanted, models (names apart by spaces).

    Lines that begin with `#` are comments; a shape that comes again is taken once.

    Raises:
        DataError: naming the file, the line and the value that cannot be.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"cannot read the shapes in `{path}`: {reason}", hint="give a CSV file") from error
    return _parsed(text, str(path))


def _parsed(text: str, name: str) -> tuple[Shape, ...]:
    lines = [
        (number, [cell.strip() for cell in line.split(",")])
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines or tuple(lines[0][1][:3]) != _COLUMNS or lines[0][1][3:] not in ([], ["models"]):
        found = f"line {lines[0][0]} is `{','.join(lines[0][1])}`" if lines else "it is empty"
        raise DataError(
            f"`{name}` does not begin with the columns `m,n,k` or `m,n,k,models`: {found}",
            hint="the first line names the columns, each other line is a shape, such as 2048,1024,512",
        )
    shapes: dict[tuple[int, int, int], Shape] = {}
    for number, cells in lines[1:]:
        if len(cells) not in (3, len(lines[0][1])):
            raise _bad(name, number, f"has {len(cells)} values, `{','.join(cells)}`")
        m, n, k = (_size(name, number, column, cell) for column, cell in zip(_COLUMNS, cells, strict=False))
        models = tuple(cells[3].split()) if len(cells) > 3 else ()
        shapes.setdefault((m, n, k), Shape(m, n, k, models=models))
    if not shapes:
        raise DataError(f"`{name}` lists no shape", hint="add lines such as 2048,1024,512")
    return tuple(shapes.values())


def _size(name: str, number: int, column: str, cell: str) -> int:
    # isdecimal alone also takes digits of other scripts, which int() reads too.
    if not (cell.isascii() and cell.isdecimal() and int(cell[:12]) > 0 and len(cell) <= 12):
        raise _bad(name, number, f"has {column} = `{cell}`")
    return int(cell)


def _bad(name: str, number: int, what: str) -> DataError:
    return DataError(
        f"`{name}`, line {number}, {what}",
        hint="a line is three whole numbers above 0, such as 2048,1024,512",
    )
