"""The columns of the synthetic click log: ids, lengths and dense features of any rows.

Users and items belong to one of 8 latent clusters. A row's user and item are Zipf draws; with a fixed
probability the item, the query's words and the history's items are exchanged for ones of the user's cluster,
the tags for ones of the item's. Attributes (region, brand, ...) are fixed functions of the user or item, and
drawn the same way. Ids are 1 + permutation(rank); 0 means missing.

Shapes: B rows, D dense features, F id fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loka.recsys.batch import FieldSchema, Ids
from loka.recsys.data.synthetic_draws import Zipf, bits, key_of, normals, permutation

__all__ = ["CLUSTERS", "DENSE", "FIELDS", "LATENT", "Columns", "DenseSpec", "Drawn", "FieldSpec"]

CLUSTERS = 8
LATENT = 4
_LOW32 = 2**32 - 1


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One id field.

    Attributes:
        name: Column name.
        cardinality: Ids lie in [0, cardinality).
        alpha: Zipf exponent of the ranks.
        follows: Whose cluster the draws follow: `user`, `item` or nobody.
        of: The entity that the field is an attribute of, `user` or `item`; empty for one drawn in each row.
        snap: Probability that a draw is exchanged for its like in the followed cluster.
        missing: Probability of id 0.
        lengths: (most ids a row, Zipf-Mandelbrot exponent, shift) of the number of ids; None for exactly one.
    """

    name: str
    cardinality: int
    alpha: float
    follows: str = ""
    of: str = ""
    snap: float = 0.0
    missing: float = 0.0
    lengths: tuple[int, float, float] | None = None

    @property
    def schema(self) -> FieldSchema:
        """The field as batches and models know it."""
        return FieldSchema(self.name, self.cardinality, self.lengths[0] if self.lengths else 1)


# `history` holds item ids; its permutation and clusters are the item's.
FIELDS: tuple[FieldSpec, ...] = (
    FieldSpec("user", 20_000, 0.7),
    FieldSpec("region", 200, 0.9, follows="user", of="user", snap=0.5, missing=0.08),
    FieldSpec("segment", 16, 0.6, follows="user", of="user", snap=0.7),
    FieldSpec("device", 48, 1.1),
    FieldSpec("hour", 25, 0.0),
    FieldSpec("page", 2_000, 0.9, missing=0.1),
    FieldSpec("item", 50_000, 0.9, follows="user", snap=0.5),
    FieldSpec("category", 304, 0.8, follows="item", of="item", snap=0.8),
    FieldSpec("brand", 5_000, 0.9, follows="item", of="item", snap=0.5, missing=0.05),
    FieldSpec("advertiser", 10_000, 1.0, follows="item", of="item", snap=0.3),
    FieldSpec("tags", 1_000, 0.8, follows="item", snap=0.6, lengths=(8, 1.0, 3.0)),
    FieldSpec("words", 5_000, 0.9, follows="user", snap=0.4, lengths=(12, 1.0, 2.0)),
    FieldSpec("history", 50_000, 0.9, follows="user", snap=0.7, lengths=(64, 1.0, 2.0)),
)
_INDEX = {spec.name: i for i, spec in enumerate(FIELDS)}


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """One dense feature: exp(mu + sigma z), 0 with probability `zero`, -1 (missing) with `missing`.

    `loading` moves mu with one coordinate of the user's latent vector. Values end at `largest`.
    """

    name: str
    mu: float
    sigma: float
    zero: float
    missing: float
    loading: float = 0.3
    largest: float = 1.6e6


# After Criteo's integer features: log means of 0.8 to 7, one with values up to 1.6 million, zeros, missing.
DENSE: tuple[DenseSpec, ...] = (
    DenseSpec("clicks_7d", 0.9, 1.1, 0.46, 0.0),
    DenseSpec("views_7d", 2.2, 1.9, 0.18, 0.0),
    DenseSpec("price", 2.6, 1.1, 0.01, 0.20),
    DenseSpec("rank", 1.9, 0.9, 0.07, 0.19),
    DenseSpec("age_s", 7.6, 2.8, 0.02, 0.05),
    DenseSpec("dwell_s", 3.8, 1.7, 0.07, 0.25),
    DenseSpec("repeats", 1.9, 1.2, 0.25, 0.05),
    DenseSpec("stock", 2.3, 1.0, 0.11, 0.0),
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What is drawn for B rows before the label.

    Attributes:
        rows: int64 [B], row numbers.
        ids: All F fields.
        item_cluster: int64 [B], the cluster of each row's item.
        raw: float64 [B, D], raw dense features; -1 is missing.
        log: float64 [B, D], sign(x) log(1 + |x|) of them.
    """

    rows: Tensor
    ids: Ids
    item_cluster: Tensor
    raw: Tensor
    log: Tensor


def _snapped(rank: Tensor, random: Tensor, cluster: Tensor, *, probability: float, n: int) -> Tensor:
    """With a probability, the rank of the same block of 8 that belongs to `cluster` (rank modulo 8)."""
    like = (rank & ~(CLUSTERS - 1)) | cluster
    exchange = ((random & _LOW32) < int(probability * 2**32)) & (like < n)
    return torch.where(exchange, like, rank)


class Columns:
    """Tables from which ids and dense features of any rows follow.

    Args:
        seed: Any integer; all tables and draws depend on it.
    """

    def __init__(self, *, seed: int) -> None:
        self._key: Callable[[str], int] = partial(key_of, seed)
        self.zipf = {s.name: Zipf(s.cardinality - 1, s.alpha) for s in FIELDS}
        self.lengths = {
            s.name: Zipf(s.lengths[0] + 1, s.lengths[1], shift=s.lengths[2]) for s in FIELDS if s.lengths
        }
        # id_of[rank] and cluster_of[id] (cluster 0 for id 0, which is never asked for).
        self.id_of: dict[str, Tensor] = {}
        self.cluster_of: dict[str, Tensor] = {}
        for spec in FIELDS:
            source = "item" if spec.name == "history" else spec.name
            id_of = 1 + permutation(spec.cardinality - 1, self._key(f"permutation:{source}"))
            cluster_of = torch.zeros(spec.cardinality, dtype=torch.int64)
            cluster_of[id_of] = torch.arange(spec.cardinality - 1) & (CLUSTERS - 1)
            self.id_of[spec.name], self.cluster_of[spec.name] = id_of, cluster_of
        self.attribute = {s.name: self._attribute(s) for s in FIELDS if s.of}
        self.user_latent = self._user_latent()
        self.dense = torch.tensor(
            [(s.mu, s.sigma, s.loading, s.largest, s.zero * 2**32, (1 - s.missing) * 2**32) for s in DENSE],
            dtype=torch.float64,
        ).T

    def _attribute(self, spec: FieldSpec) -> Tensor:
        """The attribute of every user or item by its id; int64 [cardinality of `spec.of`]."""
        entity = torch.arange(FIELDS[_INDEX[spec.of]].cardinality)
        return self._one(spec, entity, self.cluster_of[spec.of])

    def _user_latent(self) -> Tensor:
        """float64 [users, LATENT]: the cluster's centre and a part of the user's own, unit variance."""
        users, place = torch.arange(FIELDS[0].cardinality)[:, None], torch.arange(LATENT)
        own, _ = normals(bits(users, self._key("latent:user"), position=place))
        clusters = torch.arange(CLUSTERS)[:, None]
        centre, _ = normals(bits(clusters, self._key("latent:cluster"), position=place))
        return 0.8 * centre[self.cluster_of["user"]] + 0.6 * own

    def to(self, device: torch.device | str) -> Columns:
        """Move the tables in place; rows are then drawn there. They are always computed on the CPU."""
        for zipf in (*self.zipf.values(), *self.lengths.values()):
            zipf.table = zipf.table.to(device)
        for tables in (self.id_of, self.cluster_of, self.attribute):
            tables.update({name: table.to(device) for name, table in tables.items()})
        self.user_latent, self.dense = self.user_latent.to(device), self.dense.to(device)
        return self

    def _one(self, spec: FieldSpec, counter: Tensor, cluster: Tensor | None) -> Tensor:
        """One id for each counter, following `cluster` where the field does; int64 [B]."""
        random = bits(counter, self._key(f"id:{spec.name}"))
        rank = self.zipf[spec.name].ranks(random)
        if cluster is not None:
            rank = _snapped(rank, random, cluster, probability=spec.snap, n=spec.cardinality - 1)
        ids = self.id_of[spec.name][rank]
        if not spec.missing:
            return ids
        lost = bits(counter, self._key(f"missing:{spec.name}")) & _LOW32
        return torch.where(lost < int(spec.missing * 2**32), 0, ids)

    def _bag(self, spec: FieldSpec, rows: Tensor, cluster: Tensor) -> tuple[Tensor, Tensor, int]:
        """(ids of all rows in order, ids a row int64 [B], their sum) of a field with several ids."""
        lengths = self.lengths[spec.name].ranks(bits(rows, self._key(f"length:{spec.name}")))
        total = int(lengths.sum())
        row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), lengths, output_size=total)
        place = torch.arange(total, device=rows.device) - (lengths.cumsum(0) - lengths)[row]
        random = bits(rows[row], self._key(f"id:{spec.name}"), position=place)
        rank = self.zipf[spec.name].ranks(random)
        rank = _snapped(rank, random, cluster[row], probability=spec.snap, n=spec.cardinality - 1)
        return self.id_of[spec.name][rank], lengths, total

    def _dense(self, rows: Tensor, user: Tensor) -> tuple[Tensor, Tensor]:
        """(raw, signed log1p) of the dense features, float64 [B, D] each."""
        place = torch.arange((len(DENSE) + 1) // 2, device=rows.device)
        z = torch.cat(normals(bits(rows[:, None], self._key("dense"), position=place)), dim=1)
        place = torch.arange(len(DENSE), device=rows.device)
        fate = bits(rows[:, None], self._key("dense:fate"), position=place) & _LOW32
        latent = self.user_latent[user]
        mu, sigma, loading, largest, zero, present = self.dense
        raw = torch.exp(z[:, : len(DENSE)] * sigma + mu + latent[:, place % LATENT] * loading)
        raw = torch.minimum(raw, largest).masked_fill(fate < zero, 0.0).masked_fill(fate >= present, -1.0)
        return raw, torch.log1p(raw.abs()).copysign(raw)

    def draw(self, rows: Tensor) -> Drawn:
        """Ids and dense features of rows int64 [B], in any order, repeated or not."""
        values: list[Tensor] = []
        lengths: list[Tensor] = []
        starts = [0]
        cluster: dict[str, Tensor] = {}
        of: dict[str, Tensor] = {}
        one = torch.ones_like(rows)
        for spec in FIELDS:
            total, count = len(rows), one
            if spec.name == "hour":  # 256 rows an hour
                ids = (rows >> 8) % (spec.cardinality - 1) + 1
            elif spec.of:
                ids = self.attribute[spec.name][of[spec.of]]
            elif spec.lengths:
                ids, count, total = self._bag(spec, rows, cluster[spec.follows])
            else:
                ids = self._one(spec, rows, cluster.get(spec.follows))
            if spec.name in ("user", "item"):
                of[spec.name] = ids
                cluster[spec.name] = self.cluster_of[spec.name][ids]
            values.append(ids)
            lengths.append(count)
            starts.append(starts[-1] + total)
        raw, log = self._dense(rows, of["user"])
        ids_of_batch = Ids(torch.cat(values), torch.stack(lengths), tuple(starts))
        return Drawn(rows, ids_of_batch, cluster["item"], raw, log)
