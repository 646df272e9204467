"""The noise of one pair, known from repeated pairs.

With one pair there is no interval over training runs. What many pairs of the same kind scattered by is kept
in `data/files/paired_noise.json`, made by `benchmarks/paired_noise.py`.
"""

from __future__ import annotations

import json
from importlib.resources import files

__all__ = ["known_noise"]


def known_noise(model: str, source: str) -> str:
    """A sentence: how far single pairs of this model and data lie from their mean."""
    text = files("loka.recsys.data").joinpath("files/paired_noise.json").read_text(encoding="utf-8")
    for row in json.loads(text)["rows"]:
        if (row["model"], row["source"]) == (model, source):
            return (
                f"relative NE of single pairs scattered by {row['sd_percent']:.3f} % (standard deviation, "
                f"{row['pairs']} pairs of {model} {row['preset']} on {source}, batch {row['batch_size']}, "
                f"epochs {row['epochs']})."
            )
    return f"not measured for {model} on {source}; `--seeds 5` gives an interval."
