"""The teacher of the synthetic click log: the true probability of every label.

logit = b + s (linear + pairs + mlp + drift), each part of a fixed share on a fixed sample of rows:
linear = sum_f w_f(id); pairs = sum_{f<g} <v_f(id), v_g(id)>, rank 8 (a field with several ids enters by its
mean, one with none not at all); mlp = tanh(W x + c) . (a + A u) on the log dense features x and the user's
latent vector u; drift = a slow wave of the item's cluster in time. s and b are solved on the same sample so
that the Bayes NE is 0.80 and the click rate is what was asked for.

Everything is in float64. Shapes: B rows, C ids of a field, R = 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from loka.recsys.data.synthetic_columns import CLUSTERS, DENSE, FIELDS, LATENT, Columns, Drawn
from loka.recsys.data.synthetic_draws import bits, key_of, normals

__all__ = ["BAYES_NE", "PERIODS", "RANK", "SHARES", "Teacher", "binary_entropy"]

BAYES_NE = 0.80
CONVERSION_RATE = 0.2
RANK = 8
HIDDEN = 16
# Standard deviations of linear, pairs, mlp and drift, relative to one another.
SHARES = (0.80, 0.50, 0.30, 0.12)
# Rows in one period of the drift: about the length of a small run, and of a large one.
PERIODS = (2**18, 2**23)
# The sample spans 67 million rows, so that it covers the drift; it does not depend on the length of a source.
_SAMPLE = torch.arange(1 << 14) * 4099
# How much of a field's weights is the cluster's; the rest is the id's own, which takes many rows to learn.
_SHARED = {"user": 0.95, "item": 0.95, "history": 0.95, "advertiser": 0.9, "brand": 0.9, "words": 0.9}
# Which fields interact strongly: as in real logs, a few of all pairs carry most.
_STRENGTH = {"user": 1.0, "segment": 1.5, "item": 1.0, "category": 1.5, "history": 1.0}


def binary_entropy(p: Tensor) -> Tensor:
    """-p log p - (1 - p) log(1 - p) in nats, elementwise; 0 at 0 and 1."""
    return -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))


def _solve(f: Callable[[float], float], low: float, high: float, *, tolerance: float) -> float:
    """A root of f between two places of opposite sign, by the Illinois method (Dowell and Jarratt 1971)."""
    f_low, f_high = f(low), f(high)
    for x, y in ((low, f_low), (high, f_high)):
        if abs(y) <= tolerance:
            return x
    for _ in range(100):
        if f_low == f_high:  # nothing but rounding is left
            break
        x = (low * f_high - high * f_low) / (f_high - f_low)
        y = f(x)
        if abs(y) <= tolerance:
            return x
        if y * f_high < 0:
            low, f_low = high, f_high
        else:  # the far end has not moved: halve its value, so that it will
            f_low /= 2
        high, f_high = x, y
    return high


def _intercept(t: Tensor, rate: float, weight: Tensor) -> float:
    """The b for which the weighted mean of sigmoid(t + b) is `rate`."""
    share, logit = weight / weight.sum(), math.log(rate / (1 - rate))
    # Where every term is below the rate, and where every term is above it.
    low, high = logit - float(t.max()), logit - float(t.min())
    return _solve(lambda b: float(share @ torch.sigmoid(t + b)) - rate, low, high, tolerance=1e-13)


class Teacher:
    """True click (and conversion) probabilities, for rows drawn by `Columns` of the same seed.

    Args:
        columns: The columns, on the CPU: the solution for scale and intercept must not depend on a device.
        seed: The same seed.
        ctr: Mean click probability.
    """

    def __init__(self, columns: Columns, *, seed: int, ctr: float) -> None:
        self._key: Callable[[str], int] = partial(key_of, seed)
        # Of each field by id: [w, v (8), weight in the conversion], float64 [C, 10].
        self.tables = [self._table(i, columns) for i in range(len(FIELDS))]
        self._fuse(columns)
        layer = self._normals("mlp:in", HIDDEN, len(DENSE)) / math.sqrt(len(DENSE))
        self.mlp = [layer, 0.5 * self._normals("mlp:bias", HIDDEN, 1)[:, 0]]
        self.mlp += [
            0.6 * self._normals("mlp:out", HIDDEN, 1)[:, 0],
            0.4 * self._normals("mlp:user", HIDDEN, LATENT),
        ]
        phase = self._normals("drift", CLUSTERS, len(PERIODS)) * math.pi
        self.drift_weights = torch.stack([phase.cos(), phase.sin()])
        self._latent = columns.user_latent
        sample = columns.draw(_SAMPLE)
        self._dense = (sample.log.mean(0), sample.log.std(0))
        self._calibrate(sample, ctr)

    def _normals(self, purpose: str, rows: int, columns: int) -> Tensor:
        counter, place = torch.arange(rows)[:, None], torch.arange(columns)
        return normals(bits(counter, self._key(f"teacher:{purpose}"), position=place))[0]

    def _table(self, field: int, columns: Columns) -> Tensor:
        spec = FIELDS[field]
        shared = math.sqrt(_SHARED.get(spec.name, 0.5))
        centre = self._normals(f"{spec.name}:centre", CLUSTERS, RANK + 2)[columns.cluster_of[spec.name]]
        own = self._normals(f"{spec.name}:own", spec.cardinality, RANK + 2)
        table = shared * centre + math.sqrt(1 - shared**2) * own
        table[:, 1 : 1 + RANK] *= _STRENGTH.get(spec.name, 0.3)
        table[0] = 0.0  # missing
        return table

    def _fuse(self, columns: Columns) -> None:
        """Sum the tables of an entity and its attributes: [w, v, sum |v|^2, conversion], in one lookup."""
        self.fused: dict[str, Tensor] = {}
        for spec, table in zip(FIELDS, self.tables, strict=True):
            if spec.lengths:
                continue
            rows = table[columns.attribute[spec.name]] if spec.of else table
            v = rows[:, 1 : 1 + RANK]
            fused = torch.cat(
                [rows[:, : 1 + RANK], v.square().sum(1, keepdim=True), rows[:, 1 + RANK :]], dim=1
            )
            name = spec.of or spec.name
            self.fused[name] = self.fused[name] + fused if name in self.fused else fused
        self.bags = {i: self.tables[i] for i, spec in enumerate(FIELDS) if spec.lengths}

    def to(self, device: torch.device | str) -> Teacher:
        """Move the tables that labels are computed from, in place."""
        self.fused = {name: table.to(device) for name, table in self.fused.items()}
        self.bags = {i: table.to(device) for i, table in self.bags.items()}
        self.mlp = [t.to(device) for t in self.mlp]
        self.drift_weights = self.drift_weights.to(device)
        self._latent = self._latent.to(device)
        self._dense = (self._dense[0].to(device), self._dense[1].to(device))
        return self

    def _parts(self, drawn: Drawn) -> tuple[list[Tensor], Tensor]:
        """([linear, pairs, mlp, drift], linear part of the conversion), not to scale yet; float64 [B]."""
        names = [spec.name for spec in FIELDS]
        total = torch.zeros(len(drawn.rows), RANK + 3, dtype=torch.float64, device=drawn.rows.device)
        for name, table in self.fused.items():
            total = total + table[drawn.ids.field(names.index(name))[0]]
        w, v, squares, conversion = (
            total[:, 0],
            total[:, 1 : 1 + RANK],
            total[:, 1 + RANK],
            total[:, 2 + RANK],
        )
        for i, table in self.bags.items():
            mean = nn.functional.embedding_bag(
                drawn.ids.field(i)[0], table, drawn.ids.field(i)[1], mode="mean"
            )
            w, v, conversion = w + mean[:, 0], v + mean[:, 1 : 1 + RANK], conversion + mean[:, 1 + RANK]
            squares = squares + mean[:, 1 : 1 + RANK].square().sum(1)
        pairs = (v.square().sum(1) - squares) / 2  # sum over f < g of <v_f, v_g>
        user = self._latent[drawn.ids.field(0)[0]]
        inner, bias, out, by_user = self.mlp
        hidden = torch.tanh(((drawn.log - self._dense[0]) / self._dense[1]) @ inner.T + bias)
        mlp = (hidden * (out + user @ by_user.T)).sum(1)
        return [w, pairs, mlp, self._drift(drawn)], conversion

    def _drift(self, drawn: Drawn) -> Tensor:
        wave = torch.zeros(len(drawn.rows), dtype=torch.float64, device=drawn.rows.device)
        for i, period in enumerate(PERIODS):
            angle = (drawn.rows % period).to(torch.float64) * (2 * math.pi / period)
            cosine, sine = self.drift_weights[:, drawn.item_cluster, i]
            wave = wave + angle.sin() * cosine + angle.cos() * sine
        return wave

    def _calibrate(self, sample: Drawn, ctr: float) -> None:
        """Fix the shares of the parts, then scale and intercept, on the sample."""
        parts, conversion = self._parts(sample)
        norm = math.sqrt(sum(s * s for s in SHARES))
        self._means = [float(p.mean()) for p in parts]
        self._factors = [s / norm / float(p.std()) for s, p in zip(SHARES, parts, strict=True)]
        self._conversion = (float(conversion.mean()), 1 / float(conversion.std()))
        t, even = self._unit(parts), torch.ones(len(_SAMPLE), dtype=torch.float64)

        def excess(scale: float) -> float:
            p = torch.sigmoid(scale * t + _intercept(scale * t, ctr, even))
            base = binary_entropy(torch.tensor(ctr, dtype=torch.float64))
            return BAYES_NE - float(binary_entropy(p).mean() / base)

        self.scale = _solve(excess, 0.0, 8.0, tolerance=1e-11)
        self.intercept = _intercept(self.scale * t, ctr, even)
        p = torch.sigmoid(self.scale * t + self.intercept)
        self.conversion_intercept = _intercept(self._conversion_score(t, conversion), CONVERSION_RATE, p)

    def _unit(self, parts: list[Tensor]) -> Tensor:
        scaled = [(p - m) * f for p, m, f in zip(parts, self._means, self._factors, strict=True)]
        return torch.stack(scaled).sum(0)

    def _conversion_score(self, t: Tensor, conversion: Tensor) -> Tensor:
        return 0.5 * t + (conversion - self._conversion[0]) * self._conversion[1]

    def logits(self, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """(logit of a click, logit of a conversion given a click), float64 [B] each."""
        parts, conversion = self._parts(drawn)
        t = self._unit(parts)
        return self.scale * t + self.intercept, self._conversion_score(
            t, conversion
        ) + self.conversion_intercept
