"""The known noise of one pair, and that one pair is judged with it."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest

from loka.artifacts import read_benchmark
from loka.recsys import JobConfig, JobResult, TrainConfig, run_job
from loka.recsys.pairs.noise import known_noise
from loka.vocab import Requirement

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "paired_noise_cpu.json"


def test_the_table_is_what_the_record_says() -> None:
    details = read_benchmark(RECORD).details
    assert "dcnv2:adult" in details
    for case, detail in details.items():
        model, _, source = case.partition(":")
        noise = known_noise(model, source)
        assert noise.sd_percent == pytest.approx(statistics.stdev(detail["pairs_percent"]))
        assert f"{noise.sd_percent:.3f} %" in noise.text


def test_what_was_not_measured_takes_the_largest_that_was() -> None:
    largest = max(statistics.stdev(d["pairs_percent"]) for d in read_benchmark(RECORD).details.values())
    noise = known_noise("wukong", "somebody's log")
    assert noise.sd_percent == pytest.approx(largest)
    assert noise.text.startswith("not measured for wukong on somebody's log")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    job = JobConfig(
        model="dcnv2",
        data="synthetic?rows=3000",
        train=TrainConfig(batch_size=256),
        overrides={"dim": 16, "deep": (32,)},
        requirement=Requirement(),
    )
    return run_job(job, tmp_path_factory.mktemp("job") / "run", bar=False)


@pytest.mark.parametrize(
    ("change", "half", "kept"), [(0.0, 0.01, True), (0.035, 0.01, True), (2.0, 0.01, False)]
)
def test_one_pair_is_judged_with_the_noise_of_pairs(
    result: JobResult, change: float, half: float, kept: bool
) -> None:
    (task,) = result.comparison.tasks
    relative = dataclasses.replace(
        task.relative_ne_percent, difference=change, low=change - half, high=change + half
    )
    changed = dataclasses.replace(
        result,
        comparison=dataclasses.replace(
            result.comparison, tasks=(dataclasses.replace(task, relative_ne_percent=relative),)
        ),
    )
    assert result.noise is not None
    assert changed.keeps_the_loss is kept
    want = change - math.hypot(half, 1.645 * result.noise.sd_percent)
    assert changed.least_change_percent(changed.comparison.tasks[0]) == pytest.approx(want)


def test_the_table_is_json_of_known_columns() -> None:
    path = Path(__file__).parents[2] / "src/loka/recsys/data/files/paired_noise.json"
    for row in json.loads(path.read_text())["rows"]:
        assert set(row) == {
            "model", "preset", "source", "batch_size", "epochs", "pairs", "sd_percent", "mean_percent"
        }  # fmt: skip
