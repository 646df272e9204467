"""The metrics of one trained model, as a table and as a flat map."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from loka.recsys.evaluation.metrics import TaskMetrics
from loka.recsys.training.step import TrainResult

__all__ = ["flat_metrics", "metrics_table"]

BySplit = Mapping[str, Mapping[str, TaskMetrics]]
_COLUMNS = ("base_rate", "ne", "log_loss", "auc", "calibration")
_TITLES = ("base rate", "NE", "log loss", "AUC", "calibration")


def metrics_table(found: BySplit, arm: str) -> Table:
    """A line a split and task."""
    table = Table(title=f"metrics of {arm}", title_justify="left")
    table.add_column("rows of")
    table.add_column("task")
    for title in ("rows", *_TITLES):
        table.add_column(title, justify="right")
    for split, tasks in found.items():
        for task, metrics in tasks.items():
            values = [getattr(metrics, name) for name in _COLUMNS]
            numbers = ["undefined" if v is None else f"{v:.5f}" for v in values]
            table.add_row(split, task, f"{metrics.rows:,}", *numbers)
    return table


def flat_metrics(found: BySplit, result: TrainResult) -> dict[str, float]:
    """`ne.test`, `auc.valid.<task>` where there are several tasks, speed; what is undefined is left out."""
    flat: dict[str, float | None] = {"steps": float(result.steps), "rows": float(result.rows)}
    for split, tasks in found.items():
        for task, metrics in tasks.items():
            end = f"{split}.{task}" if len(tasks) > 1 else split
            flat[f"rows.{end}"] = float(metrics.rows)
            flat |= {f"{name}.{end}": getattr(metrics, name) for name in _COLUMNS}
    if result.speed is not None:
        flat["steps_per_s"], flat["rows_per_s"] = result.speed.steps_per_s, result.speed.rows_per_s
    return {name: value for name, value in flat.items() if value is not None}
