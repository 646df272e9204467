"""The verbs from end to end on a small synthetic log, in this process."""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from loka.cli.main import command_line

# 3,200 training rows: 8 whole steps, so that the timed one is like the others.
SMALL = ("dlrm", "--data", "synthetic?rows=4000", "--batch-size", "400", "--device", "cpu")
SIZES = ("--set", "bottom=32", "--set", "top=32", "--probe-every", "2")


@dataclass(frozen=True)
class Done:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def loka(*arguments: object) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line([str(a) for a in arguments])
    assert "Traceback" not in err.getvalue()
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("job") / "run"
    # As in the tests: sums of another number of threads differ in their last bits.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    done = loka("run", *SMALL, *SIZES, "-o", folder, "--max-loss-increase", "0.5", "--json")
    torch.set_num_threads(threads)
    return folder, done


def _ne(logits: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    """Normalized entropy, written down anew."""
    z, y = logits.astype(np.float64), labels.astype(np.float64)
    loss = -np.mean(y * -np.logaddexp(0, -z) + (1 - y) * -np.logaddexp(0, z))
    rate = y.mean()
    return float(loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))


def test_run_is_right_by_hand(job: tuple[Path, Done]) -> None:
    folder, done = job
    assert done.code == 0
    assert done.json["keeps_the_loss"] is True
    (task,) = done.json["comparison"]["tasks"]
    rows = pq.read_table(folder / "predictions-test-seed-0.parquet")
    labels = rows["label"].to_numpy()
    ne = {arm: _ne(rows[f"logit.{arm}"].to_numpy(), labels) for arm in ("bf16", "planned")}
    assert task["rows"] == len(labels) == 400
    assert task["ne"]["baseline"] == pytest.approx(ne["bf16"], rel=1e-9)
    assert task["ne"]["candidate"] == pytest.approx(ne["planned"], rel=1e-9)
    relative = 100 * (ne["planned"] - ne["bf16"]) / ne["bf16"]
    assert task["relative_ne_percent"]["difference"] == pytest.approx(relative, abs=1e-7)
    assert ne["planned"] != ne["bf16"]  # FP8 was really there


def test_run_says_the_ceiling_and_the_plan_on_stderr(job: tuple[Path, Done]) -> None:
    _, done = job
    lines = done.err.splitlines()
    assert lines[0] == "device: cpu (CPU)"
    ceiling = next(i for i, line in enumerate(lines) if line.startswith("ceiling: "))
    plan = next(i for i, line in enumerate(lines) if line.startswith("plan for CPU, by accuracy only"))
    assert ceiling < plan
    assert "products that FP8 can speed up" in lines[ceiling + 1]
    shares = [float(line.split()[-2]) for line in lines[ceiling + 1 : ceiling + 7]]
    assert sum(shares) == pytest.approx(100, abs=0.4)
    assert shares[0] > 0


def test_run_resumed_when_done_says_the_same(job: tuple[Path, Done]) -> None:
    folder, done = job
    before = (folder / "plan.json").read_bytes()
    again = loka("run", *SMALL, *SIZES, "-o", folder, "--max-loss-increase", "0.5", "--json", "--resume")
    assert again.code == 0
    assert again.json["comparison"]["tasks"] == done.json["comparison"]["tasks"]
    assert (folder / "plan.json").read_bytes() == before


def test_run_refuses_a_used_folder_and_another_job(job: tuple[Path, Done]) -> None:
    folder, _ = job
    done = loka("run", *SMALL, *SIZES, "-o", folder)
    assert (done.code, done.out) == (2, "")
    assert "not empty" in done.err
    assert "--overwrite" in done.err
    done = loka("run", *SMALL, *SIZES, "-o", folder, "--resume", "--seed", "5")
    assert done.code == 2
    assert "holds another run" in done.err


def test_a_lost_loss_is_exit_code_1(tmp_path: Path) -> None:
    # Every limit on errors is lifted, and the loss may not rise: it must fall for the plan to pass.
    done = loka(
        *("run", *SMALL, *SIZES, "-o", tmp_path / "r"),
        *("--min-sqnr-db", "0", "--max-row-error-p99", "10", "--max-loss-increase", "-0.5"),
    )
    assert done.code == 1
    assert "relative NE" in done.out  # the comparison was printed all the same
    assert "error: the planned model does not keep the loss" in done.err
    assert "too much" in done.err
    assert (tmp_path / "r" / "comparison.json").is_file()


def test_a_run_too_short_for_probe_fails_before_it_trains(tmp_path: Path) -> None:
    done = loka("run", *SMALL, "--probe-every", "50", "-o", tmp_path / "r")
    assert done.code == 2
    assert "error: the run has 8 steps of 400 rows, and Probe would observe none" in done.err
    assert "hint: " in done.err
    assert not (tmp_path / "r").exists()


def test_show_a_run(job: tuple[Path, Done]) -> None:
    folder, done = job
    shown = loka("show", folder)
    assert shown.code == 0
    (task,) = done.json["comparison"]["tasks"]
    assert f"{task['ne']['candidate']:.5f}" in shown.out
    for name, word in (("profile", "ceiling: "), ("plan", "emulated."), ("run", "batch_size")):
        part = loka("show", folder / f"{name}.json")
        assert part.code == 0
        assert part.out.startswith(f"{name} of ")
        assert word in part.out
        as_json = loka("show", folder / f"{name}.json", "--json").json
        assert as_json == json.loads((folder / f"{name}.json").read_text())


def test_show_sites(job: tuple[Path, Done]) -> None:
    folder, _ = job
    found = loka("show", folder, "--site", "*.top.0", "--json").json
    assert [site["site"] for site in found["sites"]] == ["tower.top.0"]
    assert {error["site"] for error in found["errors"]} == {"tower.top.0"}
    assert [part["pass"] for part in found["plan"]] == ["fwd", "dgrad", "wgrad"]
    assert all(part["rejected"] and part["choices"] for part in found["plan"])
    text = loka("show", folder, "--site", "*.top.0").out
    assert "errors at tower.top.0" in text
    assert "plan at tower.top.0" in text
    assert "not torch.tensorwise.fast" in text
    assert "tower.head" not in text
    alone = loka("show", folder / "plan.json", "--site", "*bmm")
    assert "both operands are activations" in alone.out


def test_a_site_pattern_must_match(job: tuple[Path, Done]) -> None:
    folder, _ = job
    done = loka("show", folder / "profile.json", "--site", "tower.topp.0")
    assert (done.code, done.out) == (2, "")
    assert "`tower.topp.0`" in done.err
    assert "tower.top.0" in done.err
    done = loka("show", folder / "run.json", "--site", "*")
    assert done.code == 2
    assert "says nothing of sites" in done.err


def test_plan_and_diff(job: tuple[Path, Done], tmp_path: Path) -> None:
    folder, _ = job
    out = tmp_path / "plan.json"
    done = loka("plan", folder / "profile.json", "-o", out, "--pin", "*.top.0:fwd=bf16")
    assert done.code == 0
    assert "tower.top.0" in done.out
    changed = loka("diff", folder / "plan.json", out, "--json").json
    assert [(c["site"], c["pass"]) for c in changed if c["site"]] == [("tower.top.0", "fwd")]
    table = loka("diff", folder / "plan.json", out)
    assert table.code == 0
    assert "tower.top.0" in table.out
    assert loka("diff", out, out, "--json").json == []
    again = loka("plan", folder / "profile.json", "-o", out)
    assert again.code == 2
    assert "exists already" in again.err
    assert loka("plan", folder / "profile.json", "-o", out, "--overwrite").code == 0
    assert loka("plan", folder / "profile.json", "-o", folder / "run.json", "--overwrite").code == 2
    mixed = loka("diff", folder / "profile.json", out)
    assert mixed.code == 2
    assert "is a profile, a plan is needed" in mixed.err


def test_a_plan_of_nothing_says_so(job: tuple[Path, Done]) -> None:
    folder, _ = job
    done = loka("plan", folder / "profile.json", "--min-sqnr-db", "200", "--json")
    assert done.code == 0
    assert "warning: nothing keeps the requirement" in done.err
    assert all(
        choice["kernel"] == "high_precision.bf16"
        for site in done.json["sites"]
        for pass_ in ("fwd", "dgrad", "wgrad")
        for choice in site[pass_]
    )


def test_train_by_the_plan_gives_the_arm_of_the_run(job: tuple[Path, Done], tmp_path: Path) -> None:
    folder, _ = job
    arms = {"bf16": (), "planned": ("--plan", folder / "plan.json")}
    theirs = pq.read_table(folder / "predictions-test-seed-0.parquet")
    for arm, extra in arms.items():
        out = tmp_path / arm
        done = loka("train", *SMALL, *SIZES[:4], *extra, "-o", out, "--json")
        assert done.code == 0
        mine = pq.read_table(out / "predictions-test.parquet")
        assert mine[f"logit.{arm}"].equals(theirs[f"logit.{arm}"])  # bitwise
        ne = _ne(mine[f"logit.{arm}"].to_numpy(), mine["label"].to_numpy())
        assert done.json["metrics"]["ne.test"] == pytest.approx(ne, rel=1e-9)
        assert loka("show", out, "--json").json["body"]["metrics"] == done.json["metrics"]
    table = loka("train", *SMALL, *SIZES[:4], "-o", tmp_path / "bf16", "--resume")
    assert table.code == 0
    assert "calibration" in table.out


def test_train_refuses_a_plan_of_another_model(job: tuple[Path, Done], tmp_path: Path) -> None:
    folder, _ = job
    done = loka("train", *SMALL, "--plan", folder / "plan.json", "-o", tmp_path / "x")
    assert done.code == 2
    assert "made for another model" in done.err
    assert not (tmp_path / "x").exists()


def test_probe_begins_with_the_ceiling(job: tuple[Path, Done], tmp_path: Path) -> None:
    out = tmp_path / "p"
    done = loka("probe", *SMALL, *SIZES, "-o", out)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("ceiling: FP8 can make this step at most ")
    assert lines[1].startswith("  products that FP8 can speed up")
    assert "tower.top.0" in done.out
    # A run that was over before its profile was written can still write it.
    (out / "profile.json").unlink()
    again = loka("probe", *SMALL, *SIZES, "-o", out, "--resume", "--json")
    assert again.code == 0
    folder, _ = job
    assert again.json["sites"] == loka("show", folder, "--site", "*", "--json").json["sites"]


def test_skipped_rows_are_counted(tmp_path: Path) -> None:
    good = "\t".join(["0", *["3"] * 13, *["68fd1e64"] * 26])
    lines = [("1" if i % 3 == 0 else "0") + good[1:] for i in range(600)]
    lines[7] = "2" + good[1:]
    path = tmp_path / "log.tsv"
    path.write_text("\n".join(lines) + "\n")
    arguments = ("dlrm", "--data", f"criteo:{path}?cardinality=100", "--batch-size", "64", "--device", "cpu")
    done = loka("train", *arguments, *SIZES[:4], "-o", tmp_path / "t", "--on-bad-row", "skip", "--json")
    assert done.code == 0
    assert list(done.json["skipped"].values()) == [1]
    assert "warning: 1 rows left out" in done.err


def test_doctor_with_a_model_begins_with_the_ceiling() -> None:
    done = loka("doctor", "--model", "dlrm", "--batch-size", "64", "--device", "cpu", "--data", "adult")
    assert done.code == 0
    assert done.out.startswith("ceiling: FP8 can make this step at most ")
    assert "emulated.mx_1x32" in done.out


def test_doctor_vets(monkeypatch: pytest.MonkeyPatch) -> None:
    from loka.cli import doctor_vet
    from loka.kernels.vetting import Verdict

    done = loka("doctor", "--vet", "--json", "--device", "cpu")
    assert done.code == 0
    kernels = done.json["kernels"]
    fast = [k for k in kernels if k["kernel"] == "torch.rowwise.fast"]
    assert fast
    assert all(not k["ok"] and k["reason"] for k in fast)
    assert all(v["ok"] for v in done.json["vetting"])
    assert {v["kernel"] for v in done.json["vetting"]} == {
        k["kernel"] for k in kernels if k["ok"] and k["kernel"] != "high_precision.bf16"
    }
    monkeypatch.setattr(doctor_vet, "examine", lambda *_: Verdict(False, "worst row is off by 2"))
    done = loka("doctor", "--vet", "--device", "cpu")
    assert done.code == 1
    assert "checks of kernels failed" in done.err
    assert "hint: " in done.err


def test_a_short_file_is_observed_often_enough(tmp_path: Path) -> None:
    """A file does not say how many rows it has; the run is short all the same."""
    row = "\t".join([*["3"] * 13, *["68fd1e64"] * 26])
    path = tmp_path / "log.tsv"
    path.write_text("".join(f"{int(i % 3 == 0)}\t{row}\n" for i in range(600)))
    arguments = ("dlrm", "--data", f"criteo:{path}?cardinality=100", "--batch-size", "64", "--device", "cpu")
    done = loka("probe", *arguments, *SIZES[:4], "-o", tmp_path / "p", "--json")
    assert done.code == 0
    assert done.json["steps_seen"] == 8
    assert done.json["steps_observed"] == 4


def test_a_loss_that_is_not_defined_is_not_judged(tmp_path: Path) -> None:
    """All test rows of one class: neither kept nor lost."""
    row = "\t".join(["1", *["3"] * 13, *["68fd1e64"] * 26])
    path = tmp_path / "log.tsv"
    path.write_text(f"{row}\n" * 200)
    arguments = ("dlrm", "--data", f"criteo:{path}?cardinality=100", "--batch-size", "32", "--device", "cpu")
    done = loka("run", *arguments, *SIZES[:4], "-o", tmp_path / "r", "--json")
    assert done.code == 0
    assert done.json["keeps_the_loss"] is None
