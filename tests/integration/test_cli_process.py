"""The installed command in its own process: exit codes, signals, a reader that goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOKA = (sys.executable, "-c", "from loka.cli.main import main; main()")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
RUN = ("run", "dlrm", "--data", "synthetic?rows=200000", "--batch-size", "128", "--device", "cpu")


def test_wrong_usage_is_2_and_stdout_stays_empty(tmp_path: Path) -> None:
    done = subprocess.run(
        [*LOKA, "run", "dlrm", "--data", "nowhere.tsv", "-o", str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(("error: ", "device: "))
    assert "nowhere.tsv" in done.stderr
    assert "\nhint: " in done.stderr


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    checkpoint = tmp_path / "x" / "seed-0" / "bf16" / "checkpoint.safetensors"
    process = subprocess.Popen(
        [*LOKA, *RUN, "-o", str(tmp_path / "x"), "--checkpoint-every", "0.2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ONE_THREAD,
    )
    first: int | None = None
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if checkpoint.exists():
            size = checkpoint.stat().st_mtime_ns
            if first is None:
                first = size
            elif size != first:  # a second one was written: training is under way
                break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert "error: stopped after step" in err
    assert err.rstrip().endswith("hint: the same command with `--resume` goes on from there")
    assert checkpoint.is_file()
    assert not list((tmp_path / "x").rglob("*.writing"))
    assert not (tmp_path / "x" / "profile.json").exists()


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    command = " ".join(f"'{part}'" for part in LOKA) + " doctor --device cpu --json | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
    assert done.returncode in (0, 141)  # 0 where all was written before the reader left
