"""A comparison as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loka.recsys.evaluation.comparison import Change, Comparison, NoiseSource, TaskComparison

__all__ = ["comparison_table"]

_METRICS = (("NE", "ne"), ("log loss", "log_loss"), ("AUC", "auc"), ("calibration", "calibration"))


def _number(value: float | None, *, sign: bool = False, digits: int = 5) -> str:
    if value is None:
        return "undefined"
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def _interval(change: Change, *, digits: int, unit: str = "") -> str:
    if change.low is None or change.high is None:
        return "-"
    return f"{change.low:+.{digits}f} .. {change.high:+.{digits}f}{unit}"


def _add_task(table: Table, task: TaskComparison, comparison: Comparison) -> None:
    prefix = f"{task.task}: " if len(comparison.tasks) > 1 else ""
    lost = {arm: n for arm, n in comparison.diverged.items() if n}

    def level(arm: str, value: float | None) -> str:
        return f"diverged {lost[arm]} of {comparison.pairs}" if arm in lost else _number(value)

    for title, name in _METRICS:
        change: Change = getattr(task, name)
        table.add_row(
            prefix + title,
            level(comparison.baseline, change.baseline),
            level(comparison.candidate, change.candidate),
            "-" if lost else _number(change.difference, sign=True, digits=6),
            _interval(change, digits=6),
        )
    relative = task.relative_ne_percent
    difference = "-" if lost else _number(relative.difference, sign=True, digits=4)
    unit = "" if relative.difference is None else " %"
    table.add_row(prefix + "relative NE", "", "", difference + unit, _interval(relative, digits=4, unit=" %"))


def _notes(comparison: Comparison) -> Iterator[str]:
    judged = f"{comparison.tasks[0].rows:,} {comparison.split} rows" if comparison.tasks else comparison.split
    level = f"{100 * comparison.level:.0f} %"
    noise = {task.relative_ne_percent.noise for task in comparison.tasks}
    if NoiseSource.PAIRS in noise:
        yield f"{judged}; {comparison.pairs} pairs; {level} intervals over the pairs (noise of training)."
    elif comparison.pairs == 1:
        yield f"{judged}; one pair; {level} intervals from the sampling of rows, not the noise of training."
    else:
        yield f"{judged}; {comparison.pairs} pairs."
    if comparison.noise:
        yield f"Known noise: {comparison.noise}"
    if any(comparison.diverged.values()):
        for task in comparison.tasks:
            finished = [p.relative_ne_percent for p in task.pairs if p.relative_ne_percent is not None]
            values = ", ".join(f"{v:+.4f} %" for v in finished) or "none"
            yield f"Relative NE of the pairs that finished ({task.task}): {values}."
    yield from comparison.notes


def comparison_table(comparison: Comparison) -> RenderableType:
    """A rich renderable: metrics of both arms, FP8 by pass, measured speed, what the numbers mean."""
    table = Table(title=f"{comparison.candidate} against {comparison.baseline}")
    table.add_column("metric")
    for title in (comparison.baseline, comparison.candidate, "difference", f"{100 * comparison.level:.0f} %"):
        table.add_column(title, justify="right")
    for task in comparison.tasks:
        _add_task(table, task, comparison)
    for arm_speed in [comparison.steps_per_s] if comparison.steps_per_s else []:
        ours, theirs = (arm_speed.get(arm) for arm in (comparison.baseline, comparison.candidate))
        ratio = f"x {theirs / ours:.3f}" if ours and theirs else "-"
        table.add_row("steps/s", _number(ours, digits=2), _number(theirs, digits=2), ratio, "-")
    parts: list[RenderableType] = [table]
    if comparison.coverage:
        fp8 = Table(title=f"FP8 in {comparison.candidate}")
        fp8.add_column("pass")
        fp8.add_column("sites in FP8", justify="right")
        fp8.add_column("GEMM FLOPs in FP8", justify="right")
        for part in comparison.coverage:
            share = 100 * part.gemm_flops_fp8 / max(part.gemm_flops, 1)
            fp8.add_row(str(part.gemm_pass), f"{part.sites_fp8} of {part.sites}", f"{share:.1f} %")
        parts.append(fp8)
    parts += [Text(note) for note in _notes(comparison)]
    return Group(*parts)
