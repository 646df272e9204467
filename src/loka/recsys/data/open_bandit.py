"""The Open Bandit Dataset (Saito et al. 2020, arXiv 2008.07146): fashion items shown, clicked or not.

One campaign is `<campaign>.csv.gz` (or .csv) beside `item_context.csv.gz`. A row is one item shown at one
position:

- fields: item_id and position as numbered; user_feature_0 .. 3 hashed; item_feature_1 .. 3 of the shown item,
  numbered in the order in which the item table has them;
- dense: item_feature_0 of the shown item, log1p of the user's affinity to it, log1p of the sum of the user's
  affinities to all items;
- label: click.

The propensity score is left out on purpose: it is the logging policy's own opinion of the item and would
leak what the policy learned from later clicks. Rows come in the file's order, which is time order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from loka.errors import DataError
from loka.recsys.batch import FieldSchema, Schema
from loka.recsys.data.arrow_columns import Vocabulary, hashed_ids
from loka.recsys.data.bad_rows import BadRow, shown
from loka.recsys.data.blocks import Block, BlockSource, IdColumn
from loka.recsys.data.delimited import (
    DelimitedParser,
    float_or_none,
    header_of,
    int_or_none,
    read_small_table,
)
from loka.recsys.data.dense import signed_log1p
from loka.recsys.data.file_text import total_bytes
from loka.recsys.data.lines import LineReader, UnparsableError
from loka.recsys.data.read_ahead import read_ahead
from loka.recsys.source import OnBadRow

__all__ = ["OPEN_BANDIT_COLUMNS", "OpenBanditSource", "find_campaign"]

USER_FEATURES = tuple(f"user_feature_{i}" for i in range(4))
ITEM_FEATURES = tuple(f"item_feature_{i}" for i in range(1, 4))
OPEN_BANDIT_COLUMNS = ("item_id", "position", "click", *USER_FEATURES)
_AFFINITY = "user-item_affinity_"
_POSITIONS = 3
_USER_CARDINALITY = 4096  # a user feature has about ten values


class OpenBanditSource(BlockSource):
    """Rows of one campaign, in file order, streamed.

    Args:
        path: The campaign's csv or csv.gz file, or the directory that holds it.
        on_bad_row: What to do with rows that cannot be read.

    Raises:
        DataError: if a file is missing, empty or no campaign, or the item table is damaged.
        UnknownNameError: if a column is missing.
    """

    def __init__(self, path: str, *, on_bad_row: OnBadRow = OnBadRow.ERROR) -> None:
        self._given = path
        self._path, self._item_path = find_campaign(Path(path))
        self._items = _Items(self._item_path)
        affinities = [f"{_AFFINITY}{i}" for i in range(self._items.count)]
        names = header_of(
            self._path, delimiter=",", wanted=[*OPEN_BANDIT_COLUMNS, *affinities], kind="Open Bandit"
        )
        integers = dict.fromkeys(("item_id", "position", "click"), pa.int64())
        types = integers | dict.fromkeys(USER_FEATURES, pa.string()) | dict.fromkeys(affinities, pa.float32())
        self._parser = DelimitedParser(names, types, delimiter=",")
        self._affinities = affinities
        fields = (
            FieldSchema("item_id", self._items.count + 1),
            FieldSchema("position", _POSITIONS + 1),
            *(FieldSchema(name, _USER_CARDINALITY) for name in USER_FEATURES),
            *(
                FieldSchema(n, v.cardinality)
                for n, v in zip(ITEM_FEATURES, self._items.vocabularies, strict=True)
            ),
        )
        dense = ("item_feature_0", "log1p_affinity", "log1p_affinity_total")
        super().__init__("open_bandit", Schema(dense, fields), on_bad_row=on_bad_row)

    def identity(self) -> dict[str, str | int | float]:
        """Path as given, the campaign's file, bytes on disk and the policy for bad rows."""
        return {
            "kind": self.name,
            "path": self._given,
            "file": self._path.name,
            "bytes": total_bytes((self._path, self._item_path)),
            "on_bad_row": self._bad_rows.policy.value,
        }

    def _blocks(self) -> Iterator[Block]:
        reader = LineReader(
            self._path,
            parse=self._parse,
            diagnose=self._diagnose,
            bad_rows=self._bad_rows,
            header_lines=1,
        )
        for rows, block in read_ahead(reader.read()):
            yield Block(rows, block.dense, block.ids, block.labels)

    def _parse(self, data: bytes, lines: int) -> Block:
        table = self._parser(data, lines)
        item, position, click = (table[name] for name in ("item_id", "position", "click"))
        if item.null_count or position.null_count or click.null_count:
            raise UnparsableError
        item_N, position_N, click_N = item.to_numpy(), position.to_numpy(), click.to_numpy()
        in_range = (
            (item_N >= 0) & (item_N < self._items.count) & (position_N >= 1) & (position_N <= _POSITIONS)
        )
        if not (in_range & ((click_N == 0) | (click_N == 1))).all():
            raise UnparsableError
        affinity_AN = np.stack([table[name].fill_null(0).to_numpy() for name in self._affinities])
        if not np.isfinite(affinity_AN).all():
            raise UnparsableError
        dense = np.stack(
            [
                self._items.feature_0[item_N],
                signed_log1p(affinity_AN[item_N, np.arange(lines)]),
                signed_log1p(affinity_AN.sum(axis=0)),
            ],
            axis=1,
        )
        users = [
            hashed_ids(pa.concat_arrays(table[n].chunks), field=n, cardinality=_USER_CARDINALITY)
            for n in USER_FEATURES
        ]
        ids = [item_N + 1, position_N, *users, *(feature[item_N] for feature in self._items.features)]
        rows = np.arange(lines, dtype=np.int64)
        labels = click_N.astype(np.float32)[:, None]
        return Block(rows, dense, tuple(IdColumn(column) for column in ids), labels)

    def _diagnose(self, line: bytes) -> BadRow | None:
        names = self._parser.names
        texts = line.split(b",")
        if len(texts) != len(names):
            what = f"{len(texts)} comma-separated fields, the header has {len(names)}"
            return BadRow("wrong_field_count", what)
        row = dict(zip(names, texts, strict=True))
        if int_or_none(row["click"]) not in (0, 1):
            return BadRow("bad_label", f"label click is `{shown(row['click'])}`, neither 0 nor 1")
        for name, low, high in (("item_id", 0, self._items.count - 1), ("position", 1, _POSITIONS)):
            value = int_or_none(row[name])
            if value is None or not low <= value <= high:
                return BadRow("bad_categorical", f"{name} is `{shown(row[name])}`, not in {low}..{high}")
        for name in self._affinities:
            number = float_or_none(row[name]) if row[name] else 0.0
            if number is None:
                return BadRow("bad_dense", f"dense feature {name} is `{shown(row[name])}`, not a number")
            if np.isnan(number):
                return BadRow("nan_dense", f"dense feature {name} is NaN")
            if np.isinf(number):
                return BadRow("infinite_dense", f"dense feature {name} is infinite")
        return None


class _Items:
    """The item table: feature_0 float32 [items]; for each other feature its vocabulary, ids int64 [items]."""

    def __init__(self, path: Path) -> None:
        types = {"item_id": pa.int64(), "item_feature_0": pa.float32()}
        table = read_small_table(
            path, types | dict.fromkeys(ITEM_FEATURES, pa.string()), delimiter=",", kind="item table"
        )
        numbers: NDArray[np.int64] = table["item_id"].to_numpy()
        self.count = len(numbers)
        if (np.sort(numbers) != np.arange(self.count)).any():
            raise DataError(
                f"{path}: its item_id values are not 0..{self.count - 1}, each once",
                hint="is it the whole table?",
            )
        order = np.argsort(numbers)
        self.feature_0: NDArray[np.float32] = table["item_feature_0"].to_numpy()[order]
        if not np.isfinite(self.feature_0).all():
            line = int(np.argmin(np.isfinite(table["item_feature_0"].to_numpy()))) + 2
            raise DataError(f"{path}, line {line}: item_feature_0 is not finite", hint="mend the table")
        self.vocabularies = tuple(Vocabulary(table[name].unique().to_pylist()) for name in ITEM_FEATURES)
        columns = (table[name] for name in ITEM_FEATURES)
        self.features = tuple(v.ids(c)[order] for v, c in zip(self.vocabularies, columns, strict=True))


def find_campaign(path: Path) -> tuple[Path, Path]:
    """The campaign's file and its item table, from the file or its directory.

    Raises:
        DataError: if there is none, or a directory holds several.
    """
    if path.is_dir():
        found = [p for p in sorted(path.iterdir()) if p.name.endswith((".csv", ".csv.gz"))]
        found = [p for p in found if not p.name.startswith("item_context.")]
        if len(found) != 1:
            below = [
                str(p) for p in sorted(path.glob("**/*.csv.gz")) if not p.name.startswith("item_context.")
            ]
            raise DataError(
                f"{path}: holds {len(found)} campaign files (.csv or .csv.gz), one is wanted",
                lines=below[:10],
                hint="name one campaign's file or directory, e.g. `bts/all`",
            )
        path = found[0]
    for name in ("item_context.csv.gz", "item_context.csv"):
        if (path.parent / name).exists() or name.endswith(".csv"):
            return path, path.parent / name
    raise DataError(f"{path}: no item_context.csv.gz beside it", hint="copy the whole campaign directory")
