"""The command line without training: parsing, errors, exit codes, what is imported."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from loka.cli.main import command_line
from loka.cli.options import ModelOptions, RequirementOptions, TrainOptions

VERBS = ("doctor", "run", "train", "probe", "plan", "show", "diff", "bench")
# A verb with verbs of its own: what prints a table, and so can print JSON, is one of those.
ENDS = (*VERBS[:-1], "bench gemm")
CRITEO_LINE = "\t".join(["1", *["3"] * 13, *["68fd1e64"] * 26])


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of stderr; nothing may have gone to stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err.rstrip("\n").split("\n")


def assert_one_sentence(lines: list[str], *parts: str) -> None:
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, lines
    for part in parts:
        assert part in errors[0]
    assert lines[-1].startswith("hint: ")
    assert lines[-2] == ""


def test_importing_the_command_line_is_light() -> None:
    code = (
        "import sys, loka.cli.main; "
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["--help"]) == 0
    text, _ = capsys.readouterr()
    listed = [line.split()[0] for line in text.partition("Commands:")[2].strip().splitlines()]
    assert tuple(listed) == VERBS
    assert command_line([]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("verb", ENDS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([*verb.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: loka {verb}")
    assert "--json" in out
    assert err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import loka

    assert command_line(["--version"]) == 0
    assert capsys.readouterr().out == f"loka {loka.__version__}\n"


def test_defaults_are_those_of_the_library() -> None:
    from loka.recsys import JobConfig, TrainConfig
    from loka.vocab import Requirement

    train, options = TrainConfig(), TrainOptions()
    for name in ("seed", "epochs", "batch_size", "max_rows", "lr_dense", "lr_sparse", "dtype", "compile"):
        assert getattr(options, name) == getattr(train, name)
    assert options.checkpoint_every == train.checkpoint_every_s
    job = JobConfig(model="dlrm", data="synthetic")
    model = ModelOptions(data="synthetic")
    assert (model.preset, model.on_bad_row) == (job.preset, str(job.on_bad_row))
    from loka.cli.configs import requirement_of

    assert requirement_of(RequirementOptions()) == Requirement()


def test_requirement_options() -> None:
    from loka.cli.configs import requirement_of
    from loka.vocab import Requirement

    given = RequirementOptions(
        min_sqnr_db=24.5,
        max_loss_increase="none",
        min_speedup="1.2",
        allow=["torch.*"],
        deny=["*.fast"],
        pin=["tower.*:wgrad=bf16", "tower.top.0=torch.rowwise"],
    )
    assert requirement_of(given) == Requirement(
        min_sqnr_db=24.5,
        max_loss_increase=None,
        min_speedup=1.2,
        allow=("torch.*",),
        deny=("*.fast",),
        pin={"tower.*:wgrad": "bf16", "tower.top.0": "torch.rowwise"},
    )


def test_overrides_take_the_type_of_their_field() -> None:
    from loka.cli.configs import job_config

    sizes = ["deep=64,32", "rank=none", "cross_layers=3", "structure=stacked"]
    job = job_config("dcnv2", ModelOptions(data="synthetic", set=sizes), TrainOptions(device="cpu"))
    assert job.overrides == {"deep": (64, 32), "rank": None, "cross_layers": 3, "structure": "stacked"}


def test_mods_are_of_the_job_and_of_its_identity() -> None:
    from loka.cli.configs import job_config

    plain, changed = (
        job_config("wukong", ModelOptions(data="synthetic", mods=mods), TrainOptions(device="cpu"))
        for mods in ([], ["no_bias,block_norm.64", "hard_swish"])
    )
    assert changed.mods == ("no_bias", "block_norm.64", "hard_swish")
    assert changed.identity() == {**plain.identity(), "mods": list(changed.mods)}


RUN = ("run", "dlrm", "--data", "synthetic?rows=2000")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("runn",), ("no such command",)),
        ((*RUN, "--min-sqnr", "3"), ("no such option", "--min-sqnr")),
        ((*RUN, "--seeds", "many"), ("--seeds",)),
        (("run", "dlrm"), ("--data",)),
        (("run", "dlrn", "--data", "synthetic"), ("`dlrn`",)),
        ((*RUN, "--preset", "huge"), ("`huge`",)),
        ((*RUN, "--mods", "blocknorm"), ("'blocknorm'", "no mod")),
        ((*RUN, "--mods", "block_norm"), ("`block_norm` matches nothing",)),
        ((*RUN, "--mods", "block_norm.0"), ("block=0",)),
        ((*RUN, "--set", "depth=3"), ("`depth`",)),
        ((*RUN, "--set", "top"), ("--set", "`top`")),
        ((*RUN, "--set", "top=wide"), ("top=wide",)),
        ((*RUN, "--set", "top=-3"), ("-3",)),
        ((*RUN, "--set", "top=3", "--set", "top=4"), ("`top`", "twice")),
        ((*RUN, "--dtype", "fp16"), ("`fp16`", "--dtype")),
        ((*RUN, "--device", "gpu"), ("`gpu`",)),
        ((*RUN, "--device", "meta"), ("`meta`",)),
        ((*RUN, "--on-bad-row", "ignore"), ("`ignore`", "--on-bad-row")),
        ((*RUN, "--min-speedup", "fast"), ("--min-speedup", "`fast`")),
        ((*RUN, "--max-loss-increase", "nan"), ("--max-loss-increase", "`nan`")),
        ((*RUN, "--allow", "cutlass.*"), ("`cutlass.*`",)),
        ((*RUN, "--pin", "tower.top.0=torch.rowise"), ("`torch.rowise`",)),
        ((*RUN, "--pin", "tower.top.0"), ("--pin", "`tower.top.0`")),
        ((*RUN, "--seeds", "0"), ("seeds", "0")),
        ((*RUN, "--batch-size", "0"), ("batch_size", "0")),
        ((*RUN, "-v", "-q"), ("--verbose", "--quiet")),
        ((*RUN, "--resume", "--overwrite"), ("resume", "overwrite")),
        (("run", "dlrm", "--data", "synthetik"), ("`synthetik`",)),
        (("run", "dlrm", "--data", "synthetic?row=3"), ("`row`",)),
        (("run", "dlrm", "--data", "criteo:no/such.tsv"), ("no/such.tsv",)),
        (("train", "dlrm", "--data", "synthetic", "--emulate"), ("--emulate",)),
        (("train", "dlrm", "--data", "synthetic?rows=2000", "--plan", "no/plan.json"), ("no/plan.json",)),
    ],
)
def test_wrong_usage(
    arguments: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    where = () if arguments[0] == "runn" else ("-o", str(out))
    assert command_line([*arguments, *where]) == 2
    assert_one_sentence(told(capsys), *parts)
    assert not out.exists()


def _file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "log.tsv"
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize("verb", ["run", "train", "probe"])
@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        (CRITEO_LINE.rpartition("\t")[0], ("39",)),
        ("2" + CRITEO_LINE[1:], ("2",)),
        (CRITEO_LINE[:-8] + "nothex!!", ("nothex!!",)),
    ],
)
def test_bad_rows_leave_nothing(
    verb: str, bad: str, parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, *[CRITEO_LINE] * 40, bad, *[CRITEO_LINE] * 40)
    out = tmp_path / "out"
    code = command_line([verb, "dlrm", "--data", f"criteo:{path}", "-o", str(out), "--device", "cpu"])
    assert code == 2
    assert_one_sentence(told(capsys), str(path), "41", *parts)
    assert not out.exists()


def test_an_empty_file_and_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for path in (_file(tmp_path), tmp_path):
        assert command_line(["run", "dlrm", "--data", str(path), "-o", str(out)]) == 2
        assert_one_sentence(told(capsys), str(path))
        assert not out.exists()


@pytest.mark.parametrize("verb", ["show", "plan"])
def test_files_that_are_no_records(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = {"empty": b"", "text": b"not json", "list": b"[1]", "other": b'{"schema": "x.y"}'}
    for name, content in contents.items():
        path = tmp_path / f"{name}.json"
        path.write_bytes(content)
        assert command_line([verb, str(path)]) == 2
        assert_one_sentence(told(capsys), str(path))
    assert command_line([verb, str(tmp_path / "gone.json")]) == 2
    assert_one_sentence(told(capsys), "gone.json")


def test_an_out_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert command_line([*RUN, "-o", str(tmp_path / "file" / "x"), "--device", "cpu"]) == 2
    assert_one_sentence(told(capsys), "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_logger_is_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("loka")
    before = (logger.level, logger.propagate, list(logger.handlers))
    assert command_line(["-v", "plan", "gone.json"]) == 2
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_quiet_and_verbose_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["doctor", "-q", "--json", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""
    assert command_line(["-q", "doctor", "--json", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""
    assert command_line(["doctor", "--json", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == "device: cpu (CPU)\n"


def test_options_are_spread_and_put_together_again() -> None:
    import inspect

    from loka.cli.run import run

    names = list(inspect.signature(run).parameters)
    for group in (ModelOptions, TrainOptions, RequirementOptions):
        assert {field.name for field in dataclasses.fields(group)} <= set(names)
    assert len(names) == len(set(names))


def test_ctrl_c_outside_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import loka.artifacts

    def interrupted(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loka.artifacts, "read_profile", interrupted)
    assert command_line(["plan", "profile.json"]) == 130
    assert told(capsys) == [
        "error: interrupted",
        "",
        "hint: a run goes on with `--resume`, from its last checkpoint",
    ]


def test_a_stopped_run_exits_by_its_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import loka.recsys
    from loka.recsys.training.interrupt import InterruptedRunError

    def stopped(*_: object, **__: object) -> None:
        raise InterruptedRunError("stopped after step 7", signal_number=15, hint="resume")

    monkeypatch.setattr(loka.recsys, "run_job", stopped)
    assert command_line([*RUN, "-o", "x", "--device", "cpu", "-q"]) == 143
    assert told(capsys) == [
        "error: stopped after step 7",
        "",
        "hint: the same command with `--resume` goes on from there",
    ]
