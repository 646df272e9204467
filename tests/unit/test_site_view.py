"""What `loka show --site` draws: numbers against direct counts, pictures at 80 columns."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from planner_profiles import H200, ProfileBuilder, add_error, linear
from rich.console import Console
from rich.text import Text

from loka.artifacts import write_profile, write_statistics
from loka.cli.distribution_view import distribution_parts, history_lines
from loka.cli.distributions import QUANTILES, fate_of, operand_numbers, subnormal_share
from loka.cli.error_view import error_parts, loss_rows, loss_table
from loka.cli.main import command_line
from loka.cli.profile_view import profile_rows
from loka.numerics import OperandStatistics, round_to_format
from loka.vocab import Format, Operand, Pass


def heavy(rows: int = 400, features: int = 12, seed: int = 0) -> torch.Tensor:
    """Log-normal over some twenty octaves, within those of the histogram, with exact zeros and both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator).mul(2.2).exp()
    x *= torch.where(torch.rand(rows, features, generator=generator) < 0.3, -1.0, 1.0)
    x[torch.rand(rows, features, generator=generator) < 0.1] = 0
    return x


def learned(*batches: torch.Tensor, distributions: bool = True) -> OperandStatistics:
    found = OperandStatistics.empty(batches[0].shape[1], distributions=distributions)
    for batch in batches:
        found.add(batch, distributions=distributions)
    return found


def shown(parts: list[object], width: int = 80) -> list[str]:
    out = io.StringIO()
    console = Console(width=width, no_color=True, file=out)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part)
    return out.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("format_", [Format.E4M3, Format.E5M2])
def test_the_fate_of_an_octave_is_that_of_its_numbers(format_: Format) -> None:
    """Numbers spread evenly in log2 over an octave, rounded at the scale that fits amax."""
    amax = 37.0
    scale = amax / format_.max
    for exponent in range(-40, 6):
        x = 2.0 ** (exponent + (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096)
        code = round_to_format((x / scale).float(), format_)
        fate = fate_of(exponent, amax, format_)
        smallest_normal = format_.smallest_subnormal * 2**format_.mantissa_bits
        zero = (code == 0).double().mean().item()
        small = (x / scale < smallest_normal).double().mean().item()
        assert fate.zero == pytest.approx(zero, abs=1e-3)
        assert fate.zero + fate.subnormal == pytest.approx(small, abs=1e-3)


def test_shares_are_those_of_a_cast_within_an_octave() -> None:
    x = heavy(4000)
    x = x[x != 0]
    scaled = x * (448 / float(x.abs().max()))
    zero = round_to_format(scaled, Format.E4M3) == 0
    shares = operand_numbers(learned(x[:, None]))["formats"]["e4m3"]
    assert shares["underflow"] == pytest.approx(zero.double().mean().item(), abs=0.01)
    small = (scaled.abs() < 2.0**-6) & ~zero
    assert shares["subnormal"] == pytest.approx(small.double().mean().item(), abs=0.01)
    assert subnormal_share([0] * 64, 1.0, Format.E4M3) == 0.0


def test_numbers_are_direct_counts() -> None:
    first, second = heavy(seed=1), heavy(seed=2)
    second[3, 2] = float("inf")
    numbers = operand_numbers(learned(first, second))
    x = torch.cat([first, second[torch.arange(400) != 3]])
    assert (numbers["rows"], numbers["features"], numbers["nonfinite_rows"]) == (799, 12, 1)
    assert numbers["zero_share"] == (x == 0).sum().item() / x.numel()
    assert numbers["negative_share"] == (x < 0).sum().item() / x.numel()
    assert numbers["amax"] == x.abs().max().item()
    amaxes = [first.abs().max().item(), x[400:].abs().max().item()]
    assert numbers["amax_history"] == {"steps": [0, 1], "amax": amaxes}
    octaves = torch.log2(x[x != 0].abs()).floor().long()
    assert numbers["exponents"] == {int(e): int((octaves == e).sum()) for e in octaves.unique()}
    rows = torch.log2(x.abs().amax(dim=1)).floor().sort().values
    assert numbers["row_amax_octaves"]["p50"] == rows[math.ceil(0.5 * 799) - 1]
    features = torch.log2(x.abs().amax(dim=0).double()).sort().values
    assert numbers["feature_amax_octaves"]["p99"] == pytest.approx(features[-1].item())
    assert numbers["feature_amax_octaves"]["always_zero"] == 0
    assert numbers["drift"] is None
    widest = numbers["quantiles"][0]
    column = x[:, widest["feature"]]
    assert (widest["low"], widest["high"]) == (column.min().item(), column.max().item())
    assert x.abs().max().item() in (-widest["low"], widest["high"])
    middle = widest["values"][QUANTILES.index(0.5)]
    near = column.double().quantile(torch.tensor([0.4, 0.6], dtype=torch.float64))
    assert near[0] <= middle <= near[1]
    json.dumps(numbers, allow_nan=False)


def test_the_picture_of_an_operand() -> None:
    batches = [heavy(seed=s) * (1 + s) for s in range(12)]
    numbers = operand_numbers(learned(*batches))
    lines = shown(distribution_parts("input of tower.deep.0", numbers))
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    text = "\n".join(lines)
    assert "input of tower.deep.0: 4,800 rows of 12 features" in text
    assert "drift: exponents" in text
    fullest = max(numbers["exponents"], key=lambda e: numbers["exponents"][e])
    bars = {line.split()[0]: line.count("#") for line in lines if line.lstrip().startswith("2^")}
    assert max(bars, key=lambda octave: bars[octave]) == f"2^{fullest}"
    zero = {line.split()[0] for line in lines if " zero" in line and line.lstrip().startswith("2^")}
    flushed = [e for e in numbers["exponents"] if fate_of(e, numbers["amax"], Format.E4M3).zero > 0]
    assert zero <= {f"2^{e}" for e in flushed}
    assert zero


def test_several_sites_take_three_lines_an_operand() -> None:
    numbers = operand_numbers(learned(*(heavy(seed=s) for s in range(4))))
    lines = shown(distribution_parts("input of tower.deep.0", numbers, brief=True))
    assert len(lines) == 3
    octaves = sorted((int(e) for e in numbers["exponents"]), reverse=True)
    marks = lines[2].partition("|x| from ")[2].split("|")[1]
    fullest = max(numbers["exponents"], key=lambda e: numbers["exponents"][e])
    assert marks[octaves[0] - int(fullest)] == "@"
    assert lines[2].split("|x| from ")[1].startswith(f"2^{octaves[0]} ")
    empty = shown(distribution_parts("g", operand_numbers(learned(torch.zeros(5, 3))), brief=True))
    assert [line.split(",")[0] for line in empty] == ["g: 5 rows of 3 features", "  exact zeros 100.00 %"]


def test_an_operand_without_distributions_and_one_of_zeros() -> None:
    lines = shown(distribution_parts("g", operand_numbers(learned(heavy(), distributions=False))))
    assert not [line for line in lines if "feature  " in line]
    lines = shown(distribution_parts("g", operand_numbers(learned(torch.zeros(5, 3)))))
    assert lines[0] == "g: 5 rows of 3 features"
    assert "exact zeros 100.00 %" in lines[1]
    lines = shown(distribution_parts("g", operand_numbers(OperandStatistics.empty(3))))
    assert lines == ["g: 0 rows of 3 features; nothing to show"]


def test_one_sign_is_said() -> None:
    positive = operand_numbers(learned(heavy().abs()))
    assert "one sign" in "\n".join(shown(distribution_parts("x", positive)))
    both = operand_numbers(learned(heavy()))
    assert "one sign" not in "\n".join(shown(distribution_parts("x", both)))


def test_history_is_a_column_a_step_on_a_log_scale() -> None:
    lines = history_lines([100, 200, 300, 400], [1.0, 2.0, 4.0, 8.0])
    columns = [line.partition("|")[2].ljust(4) for line in lines[1:]]
    assert [sum(row[i] == "#" for row in columns) for i in range(4)] == [1, 2, 3, 4]
    assert lines[1].startswith("         8 |")
    assert lines[-1].startswith("         1 |")
    assert history_lines([1], [1.0]) == []
    assert history_lines([], []) == []


def _profile():  # type: ignore[no-untyped-def]
    site = linear("tower.deep.0", 4096, 64, 32)
    profile = ProfileBuilder([site], H200, db=lambda *_: None).build()
    for kernel, source, db in (
        ("emulated.rowwise", "live", 30.0),
        ("torch.rowwise", "sampled", 29.0),
        ("mslk.rowwise", "sampled", 12.0),
    ):
        add_error(
            profile, site.name, Pass.FWD, "e4m3.rowwise", "e4m3.rowwise", db, kernel=kernel, source=source
        )
    for m in (64, 4096):
        add_error(
            profile, site.name, Pass.WGRAD, "e5m2.rowwise", "e4m3.rowwise", 20.0,
            kernel="triton.rowwise", source="sampled", m=m,
        )  # fmt: skip
    for name, value in (
        ("site", site.name), ("pass_", Pass.FWD), ("spec_a", "e4m3.rowwise"), ("spec_b", "e4m3.rowwise"),
        ("delta_ne", 3e-5), ("se", 1e-5), ("method", "estimate+direct"),
    ):  # fmt: skip
        getattr(profile.loss, name).append(value)
    return profile


def test_live_stands_beside_sampled_kernel_by_kernel() -> None:
    lines = shown(error_parts("at tower.deep.0", profile_rows(_profile(), ["tower.deep.0"])))
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    numbered = [line.split() for line in lines if line.lstrip()[:2].strip().isdigit()]
    assert numbered[0][:6] == ["1", "fwd", "emulated.rowwise", "live", "30.50", "0.50"]
    assert numbered[1][2:5] == ["mslk.rowwise", "sampled", "12.50"]
    assert numbered[2][2:5] == ["torch.rowwise", "sampled", "29.50"]
    assert (len(numbered[0][6]), len(numbered[1][6])) == (8, 3)  # a # every 4 dB
    assert "(e5m2) M=64" in "\n".join(lines)
    # The second table has the same lines.
    assert len(numbered) == 10
    assert numbered[5][1] == f"{100 * 10 ** (-30.5 / 20):.2f}"


def test_a_profile_of_version_1_names_the_recipe_and_one_observation_has_no_spread() -> None:
    profile = ProfileBuilder([], db=lambda *_: None).build()
    add_error(profile, "a", Pass.FWD, "e4m3.rowwise", "e4m3.tensorwise", 30.0, "fast")
    profile.errors.observations[0] = 1
    text = "\n".join(shown(error_parts("at a", profile_rows(profile, ["a"])), width=120))
    assert "e4m3.rowwise x e4m3.tensorwise fast" in text
    assert "30.50 ?" in " ".join(text.split())


def test_the_loss_with_its_standard_error() -> None:
    rows = loss_rows(_profile(), ["tower.deep.0"])
    text = "\n".join(shown([loss_table(rows)]))
    assert "+3.00e-05" in text
    assert "+3.0" in text
    assert "estimate+direct" in text
    assert loss_rows(_profile(), ["another"]) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(tmp_path / "profile.json", _profile())
    write_statistics(
        tmp_path / "statistics.safetensors",
        {
            "tower.deep.0": {
                Operand.INPUT: learned(heavy()),
                Operand.WEIGHT: learned(heavy(), distributions=False),
            }
        },
    )
    return tmp_path


def test_show_site_in_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["show", str(folder), "--site", "tower.*"]) == 0
    text = capsys.readouterr().out
    for part in (
        "input of tower.deep.0",
        "weight of tower.deep.0",
        "errors at tower.deep.0",
        "estimate+direct",
    ):
        assert part in text
    assert "\x1b" not in text


def test_show_site_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["show", str(folder), "--site", "tower.*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    operands = found["statistics"]["tower.deep.0"]
    assert list(operands) == ["input", "weight"]
    assert operands["input"]["rows"] == 400
    assert operands["weight"]["quantiles"] is None
    assert len(found["errors"]) == 5
    assert found["errors"][0]["rel_err_half"] == 0.0
    assert found["loss"][0]["se"] == 1e-5


def test_show_site_without_statistics_and_with_damaged_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statistics = folder / "statistics.safetensors"
    statistics.write_bytes(b"no tensors")
    assert command_line(["show", str(folder), "--site", "tower.*"]) == 2
    assert "statistics.safetensors" in capsys.readouterr().err
    statistics.unlink()
    assert command_line(["show", str(folder), "--site", "tower.*"]) == 0
    assert "errors at tower.deep.0" in capsys.readouterr().out
    assert command_line(["show", str(folder / "profile.json"), "--site", "nothing.*"]) == 2
    assert "nothing.*" in capsys.readouterr().err


def test_show_of_a_profile_has_the_quadrants(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["show", str(folder / "profile.json")]) == 0
    text = capsys.readouterr().out
    assert "safe, not timed" in text
    assert "judged by: SQNR >= 20 dB" in text
