"""Scripts for a library's authors, and `loka doctor --vet --repro`: written, run, and right."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path

import faulty_kernels as faulty
import pytest
from faulty_kernels import Double

from loka.cli import doctor_view
from loka.cli.main import command_line
from loka.kernels.vetting import Data, Trial, examine, repro_name, repro_script
from loka.numerics import Quantized
from loka.vocab import Accumulation, Format, GemmProblem, Granularity, OperandSpec, Pass, ScaleLayout

ROWWISE_CALL = """
def product(a, b, scale_a, scale_b, out_dtype):
    return torch._scaled_mm(a, b.t(), scale_a[:, None], scale_b[None, :], out_dtype=out_dtype)
"""
TENSORWISE_CALL = """
def product(a, b, scale_a, scale_b, out_dtype):
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out_dtype)
"""
BLOCKWISE_CALL = """
def product(a, b, scale_a, scale_b, out_dtype):
    k = a.shape[1]
    wide_a = scale_a.repeat_interleave(128, 1)[:, :k]
    wide_b = scale_b.repeat_interleave(128, 1)[:, :k].repeat_interleave(128, 0)[: b.shape[0]]
    return ((a.float() * wide_a).double() @ (b.float() * wide_b).double().t()).to(out_dtype)
"""
PLAIN_CALL = """
def product(a, b, scale_a, scale_b, out_dtype):
    return (a @ b.t()).to(out_dtype)
"""


def ran(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and stdout of a script, run in this process: importing torch anew takes seconds."""
    path = folder / "script.py"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    return stop.value.code, capsys.readouterr().out


class Laid(Double):
    """Blockwise, with scales as cuBLASLt wants them."""

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        b1, b2 = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
        return (
            OperandSpec(Format.E4M3, b1, scale_layout=ScaleLayout.MN_MAJOR, pad=16),
            OperandSpec(Format.E4M3, b2, scale_layout=ScaleLayout.MN_MAJOR_PAD4, pad=16),
        )


class Plain(Double):
    """Not quantized."""

    def operands(self, problem: GemmProblem) -> tuple[OperandSpec, OperandSpec]:
        return OperandSpec.high_precision(transposed=True), OperandSpec.high_precision()


KERNELS = {
    "rowwise": (Double("lib.rowwise", source=ROWWISE_CALL), "scale_a[:, None]", "scale_a.flip(0)[:, None]"),
    "tensorwise": (
        Double("lib.tensorwise", source=TENSORWISE_CALL, granularity=Granularity.TENSORWISE),
        "b.t(), scale_a",
        "b.t(), 2 * scale_a",
    ),
    "blockwise": (
        Laid("lib.blockwise", source=BLOCKWISE_CALL),
        "scale_b.repeat",
        "scale_b.roll(1, 1).repeat",
    ),
    "plain": (Plain("lib.plain", source=PLAIN_CALL), "a @ b.t()", "a[:, :-2] @ b[:, :-2].t()"),
}


@pytest.mark.parametrize("name", list(KERNELS))
def test_a_script_tells_right_from_wrong(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel, good, bad = KERNELS[name]
    trial = Trial(GemmProblem(600, 144, 200, Pass.DGRAD))
    text = repro_script(kernel, trial, reason="worst row 3 is off by 2", device="cpu")
    code, out = ran(text, tmp_path, capsys)
    assert code == 0, out
    assert out.endswith("two runs are the same\nright\n")
    assert text.count(good) == 1
    code, out = ran(text.replace(good, bad), tmp_path, capsys)
    assert code == 1, out
    assert out.endswith("WRONG\n")
    assert "worst row" in out


def test_a_script_stands_alone() -> None:
    kernel = KERNELS["blockwise"][0]
    text = repro_script(kernel, Trial(GemmProblem(600, 144, 200)), reason="x", device="cuda")
    assert "loka" not in text.lower()
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        imported |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        imported |= {str(node.module)} if isinstance(node, ast.ImportFrom) else set()
    assert imported == {"math", "platform", "sys", "importlib", "torch"}
    assert 'DEVICE = "cuda"' in text
    assert max(map(len, text.splitlines())) <= 140


def test_a_script_tells_that_runs_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = KERNELS["rowwise"][0]
    text = repro_script(kernel, Trial(GemmProblem(33, 48, 200)), reason="", device="cpu")
    unsteady = text.replace(
        "    return torch._scaled_mm",
        "    calls.append(0)\n    return (1 + 2.0**-8 * (len(calls) % 2)) * torch._scaled_mm",
    ).replace("DEVICE =", "calls = []\nDEVICE =", 1)
    code, out = ran(unsteady, tmp_path, capsys)
    assert code == 1
    assert "two runs are different" in out


def test_a_script_of_data_of_one_sign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A product that is 1 % too small is beyond what an exact kernel may lose, and not a fast one."""
    wrong = ROWWISE_CALL.replace("return ", "return 0.99 * ")
    trial = Trial(GemmProblem(33, 48, 200), Data.ONE_SIGNED, Format.FP32)
    exact = Double("lib.rowwise", source=wrong)
    assert ran(repro_script(exact, trial, reason="", device="cpu"), tmp_path, capsys)[0] == 1
    fast = Double("lib.rowwise.fast", source=wrong, accumulation=Accumulation.FAST)
    assert ran(repro_script(fast, trial, reason="", device="cpu"), tmp_path, capsys)[0] == 0


def test_what_was_found_cannot_break_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = KERNELS["rowwise"][0]
    reason = 'raised """ \\N{x} $name\nimport os'
    text = repro_script(kernel, Trial(GemmProblem(33, 48, 200)), reason=reason, device="cpu")
    assert ran(text, tmp_path, capsys)[0] == 0


def test_names_and_kernels_without_a_library() -> None:
    trial = Trial(GemmProblem(48, 272, 18, Pass.WGRAD, Format.E5M2), Data.ONE_SIGNED, Format.FP32)
    assert (
        repro_name(Double("torch.rowwise"), trial) == "torch_rowwise_wgrad_48x272x18_e5m2_fp32_one_signed.py"
    )
    assert repro_script(Double("ours"), trial, reason="", device="cpu") == ""


@pytest.fixture
def doctored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one right kernel, one wrong one of a library, one of our own, and an unsteady one."""

    def sometimes(a: Quantized, b: Quantized) -> object:
        out = faulty.right(a, b)
        sometimes.count += 1  # type: ignore[attr-defined]
        out[0, 0] *= 1 + 2.0**-7 * (sometimes.count % 2)  # type: ignore[attr-defined]
        return out

    sometimes.count = 0  # type: ignore[attr-defined]
    wrong_call = ROWWISE_CALL.replace("scale_a[:, None]", "scale_a.flip(0)[:, None]")
    doubles = [
        Double("lib.right", source=ROWWISE_CALL),
        Double("lib.wrong", product=faulty.shifted_scales, source=wrong_call),
        Double("ours.wrong", product=faulty.shifted_scales),
        Double("lib.unsteady", product=sometimes, source=ROWWISE_CALL, verified=False),  # type: ignore[arg-type]
    ]
    monkeypatch.setattr(doctor_view, "KERNELS", {double.name: double for double in doubles})
    monkeypatch.setattr(doctor_view, "check_patterns", lambda globs: None)


def doctor(*arguments: object) -> int:
    return command_line(["doctor", "--device", "cpu", *map(str, arguments)])


@pytest.mark.usefixtures("doctored")
def test_doctor_writes_a_script_for_each_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "faults" / "deep"
    assert doctor("--vet", "--json", "--kernels", "*.wrong,lib.right", "--repro", folder) == 1
    out, err = capsys.readouterr()
    rows = json.loads(out)["vetting"]
    assert {row["kernel"] for row in rows} == {"lib.right", "lib.wrong", "ours.wrong"}
    assert all(row["ok"] == (row["kernel"] == "lib.right") for row in rows)
    assert all(row["worst_row"] > 0.1 and row["failed"] for row in rows if not row["ok"])
    written = sorted(path.name for path in folder.iterdir())
    assert len(written) == len({name for name in written if name.startswith("lib_wrong_")}) == 20
    assert f"written to {folder}: " in err
    assert "checks of kernels failed on cpu" in err
    done = subprocess.run([sys.executable, str(folder / written[0])], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.endswith("WRONG\n")
    assert doctor("--vet", "--kernels", "lib.wrong", "--repro", folder) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"error: the folder `{folder}` is not empty" in err
    assert sorted(path.name for path in folder.iterdir()) == written


@pytest.mark.usefixtures("doctored")
def test_doctor_names_what_is_nondeterministic_and_unverified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor("--vet", "--kernels", "lib.unsteady", "--kernels", "lib.right") == 0
    out, err = capsys.readouterr()
    row = next(line for line in out.splitlines() if "lib.unsteady" in line and "20 of 20" in line)
    assert [cell.strip() for cell in row.split("│")][2:4] == ["20 of 20", "20"]
    assert "two runs on the same operands differ" in row
    assert "warning: nondeterministic, so in no plan: lib.unsteady" in err
    assert "unverified: written by its library's contract" in out
    assert doctor("--vet", "-q", "--kernels", "lib.right", "--repro", tmp_path / "none") == 0
    assert not (tmp_path / "none").exists()


def test_repro_needs_vet_and_a_folder_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, part in (
        (("--repro", tmp_path / "x"), "--repro is for --vet"),
        (("--vet", "--repro", Path(__file__)), "cannot write scripts to"),
        (("--vet", "--repro", Path(__file__).parent), "is not empty"),
        (("--vet", "--kernels", "nothing.*"), "kernel pattern `nothing.*` matches no kernel"),
    ):
        assert doctor(*arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert part in err
        assert "hint: " in err
    assert not (tmp_path / "x").exists()


def test_doctor_lists_only_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--json", "--kernels", "torch.*,emulated.mx_1x32", "-q") == 0
    answer = json.loads(capsys.readouterr().out)
    names = {row["kernel"] for row in answer["kernels"]}
    assert "emulated.mx_1x32" in names
    assert "high_precision.bf16" not in names
    assert all({"ok", "reason", "emulated", "verified"} <= row.keys() for row in answer["kernels"])
    assert {"triton", "mslk-cuda", "sgl-deep-gemm"} <= answer["versions"].keys()


def test_the_script_of_a_real_kernel_runs_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`repro()` of the kernels of this machine, as their backends write it."""
    from loka.kernels import KERNELS, device_of

    problem = GemmProblem(70, 48, 200)
    with_source = [
        k for k in KERNELS.values() if k.repro() and k.supports(problem, device_of("cpu")) and k.available()
    ]
    for kernel in with_source:
        verdict = examine(kernel, problem, "cpu")
        text = repro_script(kernel, Trial(problem), reason=verdict.reason, device="cpu")
        code, out = ran(text, tmp_path, capsys)
        assert code == 0, (kernel.name, out)
