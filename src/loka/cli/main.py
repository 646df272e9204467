"""The command `loka`: its verbs, and how errors become exit codes.

0: done. 1: the work was done and a requirement is not met. 2: wrong usage or bad input. 128 + n: stopped by
signal n (130 for Ctrl-C). stdout is data, stderr is talk.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from loka.cli import bench, diff, doctor, plan, probe, run, show, train
from loka.cli.options import TalkOptions
from loka.cli.talk import set_level, talking
from loka.errors import LokaError

__all__ = ["app", "command_line", "main"]

# Their names: typer carries its own copy of click in some releases and uses the installed one in others.
_WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="loka",
    help="FP8 that pays for large recommendation models: probe, plan, dispatch.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _verb, _short in (
    (doctor.doctor, "What this machine can do, and what FP8 could give."),
    (run.run, "The main job: train, profile, plan, train again, compare."),
    (train.train, "Train one model, as it is or by a plan."),
    (probe.probe, "Train in bf16 and measure every recipe everywhere."),
    (plan.plan, "Make a plan from a profile."),
    (show.show, "Show any file that LoKA wrote, or a run's folder."),
    (diff.diff, "What differs between two plans."),
):
    app.command(_verb.__name__, short_help=_short)(_verb)
app.add_typer(bench.app, name="bench", short_help="Time kernels on this machine, casts included.")


def _version(wanted: bool) -> None:
    if wanted:
        import loka

        print(f"loka {loka.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more on stderr.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only warnings and errors.")] = False,
) -> None:
    set_level(TalkOptions(verbose=verbose, quiet=quiet))


def main() -> None:
    """Entry point of the `loka` command."""
    sys.exit(command_line(sys.argv[1:]))


def command_line(arguments: Sequence[str]) -> int:
    """Run one command line.

    Args:
        arguments: Without the program's name; none at all asks for help.

    Returns:
        The exit code; errors have been told on stderr.
    """
    command = get_command(app)
    try:
        with talking(), command.make_context("loka", list(arguments) or ["--help"]) as context:
            command.invoke(context)
            sys.stdout.flush()
    except typer.Exit as done:
        return int(done.exit_code)
    except _WrongUsage as wrong:
        return _told(_usage_text(wrong), 2)
    except LokaError as error:
        return _told(_text(error, arguments), error.exit_code)
    except KeyboardInterrupt:
        return _told("interrupted\n\nhint: a run goes on with `--resume`, from its last checkpoint", 130)
    except BrokenPipeError:
        # Whoever read our output went away, as `head` does. Python would complain again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _told(text: str, code: int) -> int:
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def _text(error: LokaError, arguments: Sequence[str]) -> str:
    if error.exit_code > 128:
        return f"{error.what}\n\nhint: the same command with `--resume` goes on from there"
    if error.hint:
        return str(error)
    verb = next((word for word in arguments if not word.startswith("-")), "")
    return f"{error}\n\nhint: `loka {verb} --help` lists the options"


def _usage_text(wrong: Exception) -> str:
    """One sentence and a hint from a message of the option parser."""
    message = str(getattr(wrong, "format_message", lambda: wrong)()).strip().rstrip(".")
    message = message[:1].lower() + message[1:]
    context = getattr(wrong, "ctx", None)
    verb = context.command_path if context is not None else "loka"
    known = getattr(wrong, "possibilities", None)
    hint = f"`{verb} --help` lists the options"
    if known:
        wanted = str(getattr(wrong, "option_name", ""))
        near = difflib.get_close_matches(wanted, sorted(known), n=1, cutoff=0.0)[0]
        message = message.partition(" Did you mean")[0].partition(" (Possible")[0].rstrip(". ")
        hint = f"did you mean `{near}`? {hint}"
    return f"{message}\n\nhint: {hint}"
