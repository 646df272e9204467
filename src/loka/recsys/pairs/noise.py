"""The noise of one pair, known from repeated pairs.

With one pair there is no interval over training runs. What many pairs of the same kind scattered by is kept
in `data/files/paired_noise.json`, made by `benchmarks/paired_noise.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["PairNoise", "known_noise"]


@dataclass(frozen=True, slots=True)
class PairNoise:
    """How far single pairs lie from their mean.

    Attributes:
        sd_percent: Standard deviation over pairs of the relative NE change, in percent. Where the model and
            data at hand were not measured, the largest that was measured for any.
        text: The same as a sentence, with where it comes from.
    """

    sd_percent: float
    text: str


def known_noise(model: str, source: str) -> PairNoise:
    """The noise of pairs of this model and data, as measured, or the largest measured one."""
    text = files("loka.recsys.data").joinpath("files/paired_noise.json").read_text(encoding="utf-8")
    rows = json.loads(text)["rows"]
    for row in rows:
        if (row["model"], row["source"]) == (model, source):
            return PairNoise(
                row["sd_percent"],
                f"relative NE of single pairs scattered by {row['sd_percent']:.3f} % (standard deviation, "
                f"{row['pairs']} pairs of {model} {row['preset']} on {source}, batch {row['batch_size']}, "
                f"epochs {row['epochs']}).",
            )
    largest = max(row["sd_percent"] for row in rows)
    return PairNoise(
        largest,
        f"not measured for {model} on {source}; elsewhere single pairs scattered by up to {largest:.3f} % "
        "(standard deviation). `--seeds 5` gives an interval.",
    )
