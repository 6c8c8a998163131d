"""The program `pefll`: lists its commands in the order of the help, and prints errors."""

from __future__ import annotations

import errno
import os
import re
import sys
from io import TextIOWrapper
from typing import Annotated

import torch
import typer
from rich.markup import escape

from pefll.cli import certify, data, experiments, flower, methods, personal, reproduce, runs, training
from pefll.cli.console import INTERRUPTED, REFUSED, SOME_FAILED, SomeClientsFailed, err
from pefll.core.errors import PefllError
from pefll.core.plugins import fault
from pefll.core.progress import say
from pefll.core.wording import for_the_command_line
from pefll.version import __version__

TRACEBACK = "PEFLL_TRACEBACK"
# Errors of the standard output. Commands handle the errors of their own files.
OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# The error for a misspelt option. It is in typer's copy of click, or in click itself for older versions of typer.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Personalized federated learning by learning to learn: a model for every client, also for new ones.\n\n"
    "Start with `pefll demo`, or train on data that needs no download: `pefll train --data digits --out runs/first`."
    "\n\nExit codes: 0 done, 2 an error, 3 done for some clients but not for all, 130 stopped by Ctrl-C.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pefll {__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version


app.command(rich_help_panel="Start here")(experiments.demo)
app.command(rich_help_panel="Start here")(methods.methods)
app.command(rich_help_panel="Runs")(training.train)
app.command(rich_help_panel="Runs")(personal.evaluate)
app.command(rich_help_panel="Runs")(certify.certify)
app.command(rich_help_panel="Runs")(runs.show)
app.command(rich_help_panel="Personal models")(personal.personalize)
app.command(rich_help_panel="Personal models")(personal.predict)
app.command(rich_help_panel="Experiments")(experiments.tune)
app.command(rich_help_panel="Experiments")(reproduce.reproduce)
app.command(rich_help_panel="Experiments")(experiments.cost)
app.command(name="check-method", rich_help_panel="Experiments")(methods.check_method)

app.add_typer(data.app, name="data", rich_help_panel="Start here")
app.add_typer(runs.app, name="results", rich_help_panel="Experiments")
app.add_typer(flower.app, name="flower", rich_help_panel="Real clients")


def main() -> None:
    """Run the command line; print one sentence and exit with code 2 or 3 for an error that the user can fix."""
    failed = REFUSED
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal or a file may not have all letters
        sys.stdout.reconfigure(errors="replace")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # personal models are small: more threads only wait for each other
    try:
        with for_the_command_line():
            code = app(standalone_mode=False)
        if code == INTERRUPTED:  # a command that has saved something exits before this line
            say(err, "stopped before there was anything to save")
        if sys.stdout is not None:  # None if it was closed
            sys.stdout.flush()
        sys.exit(code)
    except PefllError as error:
        sentence, failed = str(error), SOME_FAILED if isinstance(error, SomeClientsFailed) else REFUSED
    except UsageError as error:
        sentence = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        sentence = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", sentence)  # some versions ask twice
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None or os.environ.get(TRACEBACK, "0") != "0":
            raise
        if sys.stdout is not None:  # Python must not try to write the rest again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sentence = f"the output cannot be written: {os.strerror(error.errno).lower()}"
    except torch.cuda.OutOfMemoryError:
        sentence = "the GPU's memory is full; use fewer clients per round, or another device"
    except Exception as error:
        sentence = fault(error)  # in a method or model of the user's own
        if not sentence or os.environ.get(TRACEBACK, "0") != "0":
            raise
        sentence += f" ({TRACEBACK}=1 shows the traceback)"
    if sentence:  # it is empty if the user gave no command; then the help was shown
        err.print(f"error: {escape(sentence)}", style="red", highlight=False, soft_wrap=True)
    sys.exit(failed)
