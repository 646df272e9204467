"""One worker process after another, seen from the program that asked: started again behind what ends it."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import IO

import msgspec

from loka.kernels.preparing.tasks import Answer, Task
from loka.kernels.preparing.worker import Begun, Group, Settings

__all__ = ["Worker"]

_log = logging.getLogger("loka")

# Not `-m`: that would put the working directory on the path. Not a spawned process of `multiprocessing`:
# that would run the main module of the program again.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from loka.kernels.preparing.worker import main; main(sys.argv[2])"
)

_SIGKILL = 9
_END_S = 10.0  # from the end of what a process says to its own

Numbered = tuple[int, Task]


class Worker:
    """Carries out groups of tasks in a process of its own.

    Args:
        settings: For the process.
        on_answer: Gets each answer.

    Attributes:
        usable: False once a process could not be started, or ended before it tried anything.
    """

    def __init__(self, settings: Settings, on_answer: Callable[[Answer], object]) -> None:
        self._settings = settings
        self._on_answer = on_answer
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._begun: int | None = None
        self._busy = False
        self._stalled = False
        self._heard = 0.0
        self._closed = False
        self._starting = threading.Lock()  # none is started behind a `kill`
        self.usable = True

    def carry_out(self, tasks: Iterable[Numbered]) -> None:
        """Have every task answered; what no usable process could take stays without an answer."""
        left, self._heard, self._busy = dict(tasks), time.monotonic(), True
        try:
            self._carry_out(left)
        finally:
            self._busy = False

    def _carry_out(self, left: dict[int, Task]) -> None:
        while left and self.usable and not self._closed:
            before = len(left)
            self._exchange(left)
            if not left:
                return
            code = self._ended()
            if self._begun is not None:
                self._answered(left, self._of_culprit(self._begun, code))
            elif len(left) == before and not self._closed:
                self.usable = False
                _log.warning("a preparing process ended with code %s before it tried anything", code)

    def _of_culprit(self, task: int, code: int | None) -> Answer:
        if self._stalled:
            return Answer(task, failed="stalled the process that tried it", ended=True)
        if code == -_SIGKILL:  # by the system, where memory is short: no kernel does that to itself
            return Answer(task, left=True)
        return Answer(task, failed=f"ended the process that tried it (exit code {code})", ended=True)

    def _exchange(self, left: dict[int, Task]) -> None:
        """Send the tasks and read answers, up to the last one or the end of the process."""
        self._begun, self._stalled = None, False
        try:
            process = self._running()
            stdin, stdout = _streams(process)
            stdin.write(msgspec.json.encode(Group(list(left.items()))) + b"\n")
            stdin.flush()
        except OSError as error:
            _log.debug("a preparing process takes nothing: %s", error)
            return
        for line in stdout:
            self._heard = time.monotonic()
            try:
                said = msgspec.json.decode(line, type=Answer | Begun)
            except msgspec.MsgspecError:  # a line that a killed process did not finish
                continue
            if isinstance(said, Begun):
                self._begun = said.task
                continue
            self._answered(left, said)
            if said.ended:
                self._ended(kill=True)  # with a lost GPU it may take long to end by itself
            if said.ended or not left:
                return

    def _answered(self, left: dict[int, Task], answer: Answer) -> None:
        self._begun = None
        del left[answer.task]
        self._on_answer(answer)

    def _running(self) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._closed:
                raise OSError("no process is to be started any more")
            return self._process or self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed where the process ends
        arguments = [json.dumps(sys.path), msgspec.json.encode(self._settings).decode()]
        self._heard = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        return self._process

    def _ended(self, *, kill: bool = False) -> int | None:
        """Its exit code, once it has ended; what it wrote to standard error goes to the log."""
        process, errors = self._process, self._errors
        self._process = self._errors = None
        code = None
        if process is not None:
            for stream in _streams(process):
                with contextlib.suppress(OSError):  # what was to be sent finds no reader any more
                    stream.close()
            code = _exit_code(process, within_s=0.0 if kill else _END_S)
        if errors is not None:
            errors.seek(0)
            text = errors.read()[-2000:].decode(errors="replace").strip()
            errors.close()
            if code and text:
                _log.debug("a preparing process ended with code %s: %s", code, text)
        return code

    def kill_if_stalled(self, after_s: float) -> None:
        """End a process that has said nothing for so long; whoever reads from it then goes on."""
        process = self._process
        if process is not None and self._busy and time.monotonic() - self._heard > after_s:
            self._stalled = True
            process.kill()

    def close(self) -> None:
        """End the process, which has nothing to do any more."""
        self._ended(kill=True)

    def kill(self) -> None:
        """End the process at once and start no other."""
        with self._starting:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()


def _exit_code(process: subprocess.Popen[bytes], *, within_s: float) -> int:
    """Of a process that should have ended by then; it is killed where it has not."""
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _streams(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None:
        raise OSError("a process without pipes")
    return process.stdin, process.stdout
