"""The command `pefll`: its verbs, in the order of its help, and what is said when one ends badly."""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import Annotated

import torch
import typer
from rich.markup import escape

from pefll.cli import data, experiments, flower, methods, personal, runs, training
from pefll.cli.console import INTERRUPTED, err
from pefll.core.errors import PefllError
from pefll.core.plugins import fault
from pefll.core.progress import say
from pefll.core.wording import for_the_command_line
from pefll.version import __version__

TRACEBACK = "PEFLL_TRACEBACK"
# What the standard output fails with that no verb has answered: verbs answer for their own files.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# The error for a misspelt option: typer's own copy of click has it, and older typers took it from click.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Personalized federated learning by learning to learn: a model for every client, also for new ones.\n\n"
    "Start with `pefll demo`, or train on data that needs no download: `pefll train --data digits --out runs/first`.",
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
app.command(rich_help_panel="Runs")(runs.show)
app.command(rich_help_panel="Personal models")(personal.personalize)
app.command(rich_help_panel="Personal models")(personal.predict)
app.command(rich_help_panel="Experiments")(experiments.tune)
app.command(rich_help_panel="Experiments")(experiments.reproduce)
app.command(rich_help_panel="Experiments")(experiments.cost)
app.command(name="check-method", rich_help_panel="Experiments")(methods.check_method)

app.add_typer(data.app, name="data", rich_help_panel="Start here")
app.add_typer(runs.app, name="results", rich_help_panel="Experiments")
app.add_typer(flower.app, name="flower", rich_help_panel="Real clients")


def main() -> None:
    """Run the command line: one sentence and exit code 2 for anything the user can mend."""
    try:
        with for_the_command_line():
            code = app(standalone_mode=False)
        if code == INTERRUPTED:  # verbs that save something say so, and end on their own
            say(err, "stopped before there was anything to save")
        if sys.stdout is not None:  # as it is where somebody has closed it
            sys.stdout.flush()
        sys.exit(code)
    except PefllError as error:
        sentence = str(error)
    except UsageError as error:
        sentence = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        sentence = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", sentence)  # click and typer each ask, in some versions
    except OSError as error:
        if error.errno not in FULL or error.filename is not None or os.environ.get(TRACEBACK, "0") != "0":
            raise
        _give_up_output()
        sentence = f"the output cannot be written: {os.strerror(error.errno).lower()}"
    except torch.cuda.OutOfMemoryError:
        sentence = "the GPU's memory is full; use fewer clients per round, or another device"
    except Exception as error:
        sentence = fault(error)  # of a method or model of the user's own
        if not sentence or os.environ.get(TRACEBACK, "0") != "0":
            raise
        sentence += f" ({TRACEBACK}=1 shows how it came there)"
    if sentence:  # without a verb, the help was shown instead
        err.print(f"error: {escape(sentence)}", style="red", highlight=False, soft_wrap=True)
    sys.exit(2)


def _give_up_output() -> None:
    """Drop what the standard output has not taken, so that Python does not try again at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
