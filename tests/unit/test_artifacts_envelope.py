from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from artifact_examples import DETAILS, ENVIRONMENT, METRICS, plan, profile, profile_v1

from loka.artifacts import (
    BENCHMARK,
    PLAN,
    PROFILE,
    Schema,
    atomic,
    body_text,
    describe_environment,
    read_benchmark,
    read_envelope,
    read_plan,
    read_profile,
    read_record,
    write_atomically,
    write_benchmark,
    write_envelope,
    write_plan,
    write_profile,
    write_record,
)
from loka.artifacts.records import Benchmark
from loka.errors import ArtifactError, UnknownNameError

GOLDEN = Path(__file__).parents[1] / "golden"


def test_golden_profile_reads_and_is_written_the_same() -> None:
    path = GOLDEN / "profile_v2.json"
    assert read_profile(path) == profile()
    assert json.loads(body_text(PROFILE, profile())) == json.loads(path.read_text())["body"]


def test_a_profile_of_version_1_is_read_and_says_no_more_than_it_did(tmp_path: Path) -> None:
    old = read_envelope(GOLDEN / "profile_v1.json", PROFILE)
    assert old.version == 1
    assert old.body == profile_v1()
    write_profile(tmp_path / "p.json", old.body)
    assert json.loads((tmp_path / "p.json").read_text())["version"] == 2
    assert read_profile(tmp_path / "p.json") == old.body


def test_golden_plan_reads_and_is_written_the_same() -> None:
    path = GOLDEN / "plan_v1.json"
    assert read_plan(path) == plan()
    assert json.loads(body_text(PLAN, plan())) == json.loads(path.read_text())["body"]


def test_golden_benchmark_reads_and_is_written_the_same() -> None:
    path = GOLDEN / "benchmark_v1.json"
    envelope = read_envelope(path, BENCHMARK)
    assert envelope.body.metrics == METRICS
    assert envelope.body.details == DETAILS
    assert envelope.environment == ENVIRONMENT
    assert envelope.created == "2026-01-02T03:04:05+00:00"
    body = Benchmark(metrics=METRICS, details=DETAILS)
    assert json.loads(body_text(BENCHMARK, body)) == json.loads(path.read_text())["body"]


def test_written_golden_bytes_are_stable(tmp_path: Path) -> None:
    """The body inside a file is byte-equal, whitespace included."""
    write_plan(tmp_path / "plan.json", plan(), environment=ENVIRONMENT)
    written, golden = (p.read_text() for p in (tmp_path / "plan.json", GOLDEN / "plan_v1.json"))
    assert written[written.index('  "environment"') :] == golden[golden.index('  "environment"') :]


def test_profile_round_trip_and_byte_equal_bodies(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        write_profile(tmp_path / name, profile())
    assert read_profile(tmp_path / "a.json") == profile()
    a, b = ((tmp_path / n).read_text().split('"body"')[1] for n in ("a.json", "b.json"))
    assert a == b


def test_envelope_fields_and_environment(tmp_path: Path) -> None:
    write_benchmark(tmp_path / "b.json", METRICS)
    raw = json.loads((tmp_path / "b.json").read_text())
    assert list(raw) == ["schema", "version", "producer", "created", "environment", "body"]
    assert raw["producer"] == "loka 0.1.0"
    here = describe_environment()
    assert raw["environment"]["python"] == here.python
    assert raw["environment"]["torch"].split("+")[0] >= "2.11"
    assert "numpy" in raw["environment"]["libraries"]
    assert here.cpu_count >= 1
    assert here.devices == () or here.driver is not None


def test_records_of_free_bodies(tmp_path: Path) -> None:
    body = {"ne": {"bf16": 0.8, "planned": 0.8001}, "rows": 10, "note": None}
    write_record(tmp_path / "c.json", "loka.comparison", body)
    assert read_record(tmp_path / "c.json", "loka.comparison").body == body
    with pytest.raises(ArtifactError, match="is a comparison, a run is needed"):
        read_record(tmp_path / "c.json", "loka.run")
    with pytest.raises(UnknownNameError, match=r"unknown record schema `loka\.comparisn`"):
        write_record(tmp_path / "c.json", "loka.comparisn", body)


# ---- versions


def _doubled(body: dict[str, Any]) -> dict[str, Any]:
    return {"metrics": {name: 2 * value for name, value in body["metrics"].items()}, "details": body["notes"]}


NEXT: Schema[Benchmark] = Schema("loka.benchmark", 2, Benchmark, upgrade=_doubled)


def _benchmark_file(tmp_path: Path, version: Any, body: Any) -> Path:
    raw = json.loads((GOLDEN / "benchmark_v1.json").read_text()) | {"version": version, "body": body}
    (tmp_path / "v.json").write_text(json.dumps(raw))
    return tmp_path / "v.json"


def test_reader_takes_n_and_n_minus_1(tmp_path: Path) -> None:
    write_envelope(tmp_path / "n.json", NEXT, Benchmark(metrics={"a": 1}))
    assert read_envelope(tmp_path / "n.json", NEXT).body.metrics == {"a": 1}
    old = _benchmark_file(tmp_path, 1, {"metrics": {"a": 1.5}, "notes": "old"})
    envelope = read_envelope(old, NEXT)
    assert (envelope.version, envelope.body) == (1, Benchmark(metrics={"a": 3.0}, details="old"))


def test_reader_refuses_other_versions(tmp_path: Path) -> None:
    newer = _benchmark_file(tmp_path, 3, {})
    with pytest.raises(ArtifactError, match="of version 3, this LoKA reads up to 2") as caught:
        read_envelope(newer, NEXT)
    assert "upgrade LoKA" in str(caught.value)
    third: Schema[Benchmark] = Schema("loka.benchmark", 3, Benchmark, upgrade=_doubled)
    with pytest.raises(ArtifactError, match="of version 1, this LoKA reads from 2 on"):
        read_envelope(_benchmark_file(tmp_path, 1, {}), third)
    without: Schema[Benchmark] = Schema("loka.benchmark", 2, Benchmark)
    with pytest.raises(ArtifactError, match="of version 1, this LoKA reads from 2 on"):
        read_envelope(_benchmark_file(tmp_path, 1, {}), without)


@pytest.mark.parametrize("version", [True, 0, -1, 1.5, "1", None])
def test_version_must_be_a_positive_integer(tmp_path: Path, version: Any) -> None:
    with pytest.raises(ArtifactError, match=r"at `\$\.version`: expected an integer from 1 on"):
        read_benchmark(_benchmark_file(tmp_path, version, {"metrics": {}}))


# ---- what is refused


def test_wrong_schema(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"plan_v1\.json` is a plan, a profile is needed"):
        read_profile(GOLDEN / "plan_v1.json")
    (tmp_path / "p.json").write_text('{"schema": 3}')
    with pytest.raises(ArtifactError, match="is a record of schema 3, a plan is needed"):
        read_plan(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "plan file `.*` is empty"),
        (b'{"schema": "loka.plan", "ver', r"not valid JSON \(it is cut off\)"),
        (b"{'schema': 1}", r"is not a plan: it is not valid JSON \(.*byte 1"),
        (b"\xff\xfe{}", "is not a plan: it is not valid JSON"),
        (b'{"a": "\xff"}', "is not a plan: it is not valid JSON"),
        (b"[1, 2]", r"expected an object, got \[1,2\]"),
        (b"{}", r"at `\$`: field `schema` is missing, a plan is needed"),
        (b'{"schema": "loka.plan"}', r"at `\$`: field `version` is missing"),
        (b'{"a": NaN}', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply|not valid JSON"),
    ],
)
def test_files_that_are_no_plans(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=message) as caught:
        read_plan(tmp_path / "plan.json")
    assert "plan.json" in str(caught.value)
    assert caught.value.exit_code == 2


def test_missing_file_directory_and_unreadable(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ArtifactError, match="does not exist") as caught:
        read_plan(tmp_path / "plan.json")
    assert "`other.json`" in str(caught.value)
    with pytest.raises(ArtifactError, match="does not exist") as caught:
        read_plan(tmp_path / "no" / "plan.json")
    assert "the folder" in str(caught.value)
    with pytest.raises(ArtifactError, match="is a directory, a plan file is needed"):
        read_plan(tmp_path)


def _edited(tmp_path: Path, name: str, *path: str | int, value: Any) -> Path:
    version = re.search(r"_v(\d+)$", name)
    raw = json.loads((GOLDEN / f"{name if version else name + '_v1'}.json").read_text())
    inner = raw
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(raw))
    return file


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("body", "sites", "n", 1), "x", r"sites\.n\[1\]`: expected `int`, got `str` \(value \"x\"\)"),
        (("body", "sites", "m", ), [1], r"`\$\.body\.sites`: object contains unknown field `m`"),
        (("body", "device", "sm"), 9, r"`\$\.body\.device`: unknown field `sm`"),
        (("body", "device", "arch"), [9], r"`\$\.body\.device\.arch`"),
        (("body", "errors", "pass", 0), "bwd", r"\$\.body\.errors\.pass\[0\]`: invalid enum value .*bwd"),
        (("body", "casts", "specs", 0, 0, "pad"), 0, r"specs\[0\]\[0\]`: OperandSpec\(pad=0\)"),
        (("body", "casts", "specs", 0, 0, "padding"), 1, r"specs\[0\]\[0\]`: unknown field `padding`"),
        (("body", "casts", "specs", 0, 0, "format"), "e3m4", r"specs\[0\]\[0\]\.format`: invalid enum"),
        (("body", "steps_seen"), None, r"`\$\.body\.steps_seen`: expected `int`, got `null` \(value null\)"),
        (("body", "errors", "mere"), [], r"errors\.mere`: the column has 0 entries, `site` has 1"),
        (("environment", "cpu_count"), "16", r"`\$\.environment\.cpu_count`: expected `int`"),
        (("extra",), 1, r"at `\$`: unknown field `extra`"),
        (("created",), 5, r"`\$\.created`: expected `str`, got `int` \(value 5\)"),
        (("body",), [], r"`\$\.body`: expected (an object, got \[\]|`object`, got `array`)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("golden", ["profile_v1", "profile_v2"])
def test_profile_values_of_the_wrong_kind(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, message: str, golden: str
) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        read_profile(_edited(tmp_path, golden, *path, value=value))
    assert str(caught.value).count("hint:") <= 1


def test_a_number_beyond_fp64_is_refused(tmp_path: Path) -> None:
    text = (GOLDEN / "profile_v1.json").read_text().replace("28.75", "1e999")
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"p\.json"):
        read_profile(tmp_path / "p.json")


def test_requirement_is_checked_on_read(tmp_path: Path) -> None:
    file = _edited(tmp_path, "plan", "body", "requirement", "max_row_error_p99", value=-1)
    with pytest.raises(ArtifactError, match="must be above 0"):
        read_plan(file)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_not_written(tmp_path: Path, bad: float) -> None:
    broken = profile()
    broken.errors.row_p99[0] = bad
    with pytest.raises(
        ArtifactError, match=r"at `\$\.body\.errors\.row_p99\[0\]`: .* is not a finite number"
    ):
        write_profile(tmp_path / "p.json", broken)
    with pytest.raises(ArtifactError, match=r"`\$\.body\.metrics\.ne`"):
        write_benchmark(tmp_path / "p.json", {"a": 1.0, "ne": bad})
    with pytest.raises(ArtifactError, match=r"`\$\.body\.details\.x\[1\]`"):
        write_benchmark(tmp_path / "p.json", {}, {"x": [1.0, bad]})
    assert list(tmp_path.iterdir()) == []


def test_columns_of_unequal_length_are_not_written(tmp_path: Path) -> None:
    broken = profile()
    broken.products.pass_.append(broken.products.pass_[0])
    with pytest.raises(ArtifactError, match=r"products\.pass`: the column has 2 entries, `device` has 1"):
        write_profile(tmp_path / "p.json", broken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["fast", None, True, [1.0]])
def test_metrics_are_numbers(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ArtifactError, match=r"`\$\.body\.metrics\.speed`: expected a number"):
        write_benchmark(tmp_path / "b.json", {"speed": value})


def test_details_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"`\$\.body\.details`: encoding objects of type object"):
        write_benchmark(tmp_path / "b.json", {}, {"x": object()})


# ---- writing whole or not at all


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.json"
    write_atomically(target, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match=r"cannot write `.*plan\.json`: No space left on device"):
        write_plan(target, plan())
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "plan.json", b"new")
    assert list(tmp_path.iterdir()) == []


def test_write_to_a_directory_or_into_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="it is a directory"):
        write_plan(tmp_path, plan())
    with pytest.raises(ArtifactError, match="does not exist"):
        write_plan(tmp_path / "no" / "plan.json", plan())


def test_write_keeps_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_bytes(b"old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_atomically(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"new"


def test_files_are_readable_by_plain_json(tmp_path: Path) -> None:
    """The hand-written layout is the same JSON as msgspec's."""
    value = {"a": [], "b": {}, "c": [[1, 2], []], "d": {"e": [{"f": 'q"\n'}]}, "g": [1.5, None, True]}
    write_record(tmp_path / "r.json", "loka.run", value)
    assert json.loads((tmp_path / "r.json").read_text())["body"] == value
    assert msgspec.json.decode((tmp_path / "r.json").read_bytes())["body"] == value


def test_a_read_only_file_system_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There even the clean-up of a file that was never made fails."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(atomic, "_write_synced", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(ArtifactError, match="Read-only file system"):
        write_atomically(tmp_path / "plan.json", b"new")
