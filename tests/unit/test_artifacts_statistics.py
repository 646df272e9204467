from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch
from artifact_examples import plan, sites
from safetensors.torch import save_file

from loka.artifacts import (
    explain_difference,
    fingerprint,
    plan_text,
    read_statistics,
    write_profile,
    write_statistics,
)
from loka.artifacts.statistics import write_statistics_in_background
from loka.errors import ArtifactError
from loka.numerics import Moments, OperandStatistics
from loka.vocab import Operand, Site


def _moments(seed: int, features: int) -> Moments:
    return Moments.of(torch.randn(50, features, generator=torch.Generator().manual_seed(seed)))


def _known(seed: int, features: int, *, steps: int = 25, distributions: bool = True) -> OperandStatistics:
    known = OperandStatistics.empty(features, distributions=distributions)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        known.add(torch.randn(9, features, generator=generator), step=3 * step, distributions=distributions)
    return known


def _statistics() -> dict[str, dict[Operand, OperandStatistics]]:
    return {
        "tower/odd.0": {Operand.INPUT: _known(0, 8), Operand.GRAD_OUTPUT: _known(1, 4, steps=70)},
        "head": {Operand.WEIGHT: _known(2, 3, distributions=False)},
    }


def test_statistics_round_trip_bitwise(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    write_statistics(path, _statistics(), {"steps": 12, "model": "dlrm"})
    read, facts = read_statistics(path)
    assert facts == {"steps": 12, "model": "dlrm"}
    assert {(s, o) for s, ops in read.items() for o in ops} == {
        ("tower/odd.0", Operand.INPUT),
        ("tower/odd.0", Operand.GRAD_OUTPUT),
        ("head", Operand.WEIGHT),
    }
    for site, operands in _statistics().items():
        for operand, known in operands.items():
            again = read[site][operand].tensors()
            assert again.keys() == known.tensors().keys()
            for field, tensor in known.tensors().items():
                assert torch.equal(again[field], tensor), (site, operand, field)
                assert again[field].dtype is tensor.dtype
            assert read[site][operand].drift() == known.drift()
            assert read[site][operand].history.steps == known.history.steps
    assert read["head"][Operand.WEIGHT].covariance is None


def test_version_1_is_read(tmp_path: Path) -> None:
    """Moments without their histogram of rows, as 0.1.0 wrote them."""
    moments = _moments(0, 3)
    tensors = {f"head/input/{n}": t for n, t in moments.tensors().items() if n != "row_exponents"}
    header = '{"schema":"loka.statistics","version":1,"facts":{"steps":4}}'
    save_file(tensors, tmp_path / "s", metadata={"loka": header})
    read, facts = read_statistics(tmp_path / "s")
    assert facts == {"steps": 4}
    found = read["head"][Operand.INPUT]
    for name, tensor in found.moments.tensors().items():
        wanted = torch.zeros_like(tensor) if name == "row_exponents" else moments.tensors()[name]
        assert torch.equal(tensor, wanted), name
    assert (found.covariance, found.marginals, found.drift(), found.history.steps) == (None, None, None, ())


def test_moments_alone_can_be_written(tmp_path: Path) -> None:
    moments = _moments(0, 3)
    write_statistics(tmp_path / "s", {"head": {Operand.INPUT: moments}})
    found = read_statistics(tmp_path / "s")[0]["head"][Operand.INPUT]
    assert torch.equal(found.moments.m2, moments.m2)


def test_writing_in_the_background_keeps_what_was_known_at_the_call(tmp_path: Path) -> None:
    known, reference = _known(0, 4), _known(0, 4)
    writing = write_statistics_in_background(tmp_path / "s", {"head": {Operand.INPUT: known}}, {"steps": 1})
    known.add(torch.full((5, 4), 1e6))
    known.moments.mean.fill_(-1.0)
    second = write_statistics_in_background(
        tmp_path / "t", {"head": {Operand.INPUT: known}}, {"steps": 2}, after=writing
    )
    second.close()
    read, facts = read_statistics(tmp_path / "s")
    assert facts == {"steps": 1}
    for field, tensor in reference.tensors().items():
        assert torch.equal(read["head"][Operand.INPUT].tensors()[field], tensor), field
    assert read_statistics(tmp_path / "t")[0]["head"][Operand.INPUT].moments.amax.tolist() == [1e6] * 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s", "t"]


def test_a_failed_background_write_is_told_at_the_next_call_or_at_close(tmp_path: Path) -> None:
    writing = write_statistics_in_background(tmp_path / "none" / "s", {})
    with pytest.raises(ArtifactError, match="does not exist"):
        write_statistics_in_background(tmp_path / "t", {}, after=writing)
    assert not (tmp_path / "t").exists()
    with pytest.raises(ArtifactError, match="does not exist"):
        writing.close()


def test_equal_statistics_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_statistics(
            tmp_path / name, _statistics(), {"b": 1, "a": 2} if name == "a" else {"a": 2, "b": 1}
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_statistics_of_nothing(tmp_path: Path) -> None:
    write_statistics(tmp_path / "s", {})
    assert read_statistics(tmp_path / "s") == ({}, {})


def test_statistics_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    moments = _moments(0, 4)
    moments.mean[2] = float("nan")
    with pytest.raises(ArtifactError, match=r"`head/input/moments\.mean`: not every element is finite"):
        write_statistics(tmp_path / "s", {"head": {Operand.INPUT: moments}})
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_statistics(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(ArtifactError, match=r"statistics file `.*` does not exist"):
        read_statistics(path)
    path.write_bytes(b"\x80\x04pickle.")
    with pytest.raises(ArtifactError, match="is not a statistics file"):
        read_statistics(path)
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ArtifactError, match="not LoKA's statistics"):
        read_statistics(path)
    write_statistics(path, _statistics())
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ArtifactError, match="is not a statistics file"):
        read_statistics(path)


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("head/input/mean", torch.zeros(3), "expected torch.float64 of shape (3,), got torch.float32"),
        ("head/input/amax", torch.zeros(4), "shape (3,), got torch.float32 of shape (4,)"),
        ("head/input/other", torch.zeros(3), "`head/input/other`: unknown tensor"),
        ("head/bias/mean", torch.zeros(3), "`head/bias/mean`: unknown tensor"),
        ("head/input/m2", None, "`m2` is missing"),
    ],
)  # fmt: skip
def test_tampered_statistics(tmp_path: Path, key: str, tensor: torch.Tensor | None, message: str) -> None:
    tensors = {f"head/input/{n}": t for n, t in _moments(0, 3).tensors().items()}
    if tensor is None:
        del tensors[key]
    else:
        tensors[key] = tensor
    header = '{"schema":"loka.statistics","version":1,"facts":{}}'
    save_file(tensors, tmp_path / "s", metadata={"loka": header})
    with pytest.raises(ArtifactError, match=re.escape(message)):
        read_statistics(tmp_path / "s")
    save_file(tensors, tmp_path / "s", metadata={"loka": header.replace(":1", ":7")})
    with pytest.raises(ArtifactError, match="of version 7, this LoKA reads 1 and 2"):
        read_statistics(tmp_path / "s")


def test_files_of_version_2_without_even_bins_are_read(tmp_path: Path) -> None:
    known = _known(0, 3)
    later = ("fine_counts", "fine_inside", "fine_squares", "digits")
    tensors = {f"head/input/{n}": t for n, t in known.tensors().items() if not n.endswith(later)}
    header = '{"schema":"loka.statistics","version":2,"facts":{}}'
    save_file(tensors, tmp_path / "s", metadata={"loka": header})
    read = read_statistics(tmp_path / "s")[0]["head"][Operand.INPUT]
    for name, tensor in known.tensors().items():
        if not name.endswith(later):
            assert torch.equal(read.tensors()[name], tensor), name
    assert read.marginals is not None
    assert read.marginals.digits.tolist() == [24, 24, 24]
    assert int(read.marginals.fine_counts.sum()) == 0


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("moments.row_exponents", torch.zeros(64), "expected torch.int64 of shape (64,), got torch.float32"),
        ("covariance.scatter", torch.zeros(3, 4), "`head/input/covariance.scatter`: expected torch.float32"),
        ("covariance.scatter", torch.full((3, 3), torch.nan), "covariance.scatter`: not every element is"),
        ("history.amax", None, "`history.amax` is missing"),
        ("marginals.low", None, "`marginals.low` is missing"),
        ("moments.mean", None, "`moments.mean` is missing"),
        ("window.other", torch.zeros(1), "`head/input/window.other`: unknown tensor"),
    ],
)  # fmt: skip
def test_tampered_statistics_of_version_2(
    tmp_path: Path, key: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = {f"head/input/{n}": t for n, t in _known(0, 3).tensors().items()}
    if tensor is None:
        del tensors[f"head/input/{key}"]
    else:
        tensors[f"head/input/{key}"] = tensor
    save_file(
        tensors, tmp_path / "s", metadata={"loka": '{"schema":"loka.statistics","version":2,"facts":{}}'}
    )
    with pytest.raises(ArtifactError, match=re.escape(message)):
        read_statistics(tmp_path / "s")


def _site(name: str, n: int = 8, k: int = 4, bias: bool = True, rows: int = 32) -> Site:
    return Site(name=name, kind="linear", n=n, k=k, bias=bias, rows=rows)


def test_fingerprint_depends_on_the_model_only() -> None:
    a, b = _site("a"), _site("b", n=16)
    same = fingerprint([a, b], 100)
    assert fingerprint([_site("b", n=16, rows=7), a], 100) == same
    assert len(same.sites) == 64
    others = [
        fingerprint([a], 100),
        fingerprint([a, _site("b", n=17)], 100),
        fingerprint([a, _site("b", n=16, bias=False)], 100),
        fingerprint([a, _site("c", n=16)], 100),
        fingerprint([a, b], 101),
        fingerprint([a, b], 100, ["no_bias"]),
    ]
    assert all(other != same for other in others)


def test_explained_difference_names_every_kind() -> None:
    plan_sites = [_site("a"), _site("b"), _site("c")]
    model_sites = [_site("a"), _site("c", n=9, bias=False), _site("d", k=5)]
    assert explain_difference(plan_sites, model_sites) == [
        "b  only in the plan, N=8 K=4 with bias",
        "d  only in the model, N=8 K=5 with bias",
        "c  plan N=8 K=4 with bias, model N=9 K=4 without bias",
    ]
    assert explain_difference(plan_sites, plan_sites) == []
    many = explain_difference([], [_site(f"s{i}") for i in range(40)])
    assert len(many) == 13
    assert many[-1] == "... and 28 more"


def test_site_table_gives_sites() -> None:
    first, second = sites().sites()
    assert (first.name, first.n, first.k, first.rows, first.plannable) == ("tower.0", 512, 256, 1024, True)
    assert not second.plannable


def test_print_plan_shows_every_pass() -> None:
    text = str(plan())
    assert text == plan_text(plan())
    lines = text.splitlines()
    assert lines[0] == "plan for NVIDIA H200, by measured time: 1 of 3 passes in FP8, at 1 of 1 sites"
    assert re.search(
        r"tower\.0 +fwd +high_precision\.bf16 below M=512, then torch\.rowwise +1 rejected +fastest", text
    )
    assert re.search(r"tower\.0 +wgrad +high_precision\.bf16 +0 rejected +pinned by", text)
    assert "not planned: tower.cross.weight: functional" in text
    assert "override: tower.0 wgrad: high_precision.bf16, not torch.rowwise (pin `tower.0:wgrad`)" in text
    same = plan().overrides[0].instead_of
    without_effect = msgspec.structs.replace(plan().overrides[0], kernel=same)
    pinned = msgspec.structs.replace(plan(), overrides=(*plan().overrides, without_effect))
    assert plan_text(pinned) == text
    assert "3.2 us saved a step, loss +1.2e-05 relative (se 4.0e-06)" in text
    assert "1 candidates were rejected; `loka show PLAN --site '*'`" in text


def test_write_needs_a_folder(tmp_path: Path) -> None:
    from artifact_examples import profile

    with pytest.raises(ArtifactError, match="does not exist"):
        write_profile(tmp_path / "x" / "p.json", profile())
    with pytest.raises(ArtifactError, match="does not exist"):
        write_statistics(tmp_path / "x" / "s", {})
