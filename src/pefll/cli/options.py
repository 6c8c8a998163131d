"""Options and arguments that several commands have."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pefll.core.arguments import in_utf8
from pefll.core.errors import PefllError
from pefll.core.plugins import allow


def column_names(value: str | None) -> str | None:
    """Return the names of columns in an option, as they are in the file, also if the locale is not UTF-8."""
    return None if value is None else in_utf8(value)


RunPath = Annotated[Path, typer.Argument(help="A run folder, as made by `pefll train --out`.", metavar="RUN")]
Label = Annotated[
    str,
    typer.Option(
        help="Name of the label column in a table, or of the array in an .npz.",
        show_default="label; in an .npz, y",
        callback=column_names,
    ),
]
TrainedLabel = Annotated[
    str | None,
    typer.Option(
        help="Name of the label column in a table, or of the array in an .npz.",
        show_default="as in training; in an .npz, y",
        callback=column_names,
    ),
]
ClientColumn = Annotated[str, typer.Option(help="Name of the client column in a table or .npz.", callback=column_names)]
Features = Annotated[
    str | None,
    typer.Option(help="The columns of a table that are features, with commas between them. [default: all others]"),
]
Drop = Annotated[str | None, typer.Option(help="Columns of a table that are not used, with commas between them.")]
Treat = Annotated[
    str | None,
    typer.Option(
        help="Rules for columns of a table, such as joined=date,zip=category: number, category, date (days), calendar "
        "(time of the year, the week, the day), text (counts of words) or decimal-comma (3,5 is 3.5)."
    ),
]
Encode = Annotated[
    str | None,
    typer.Option(
        help="auto: standardise a table's numbers, give categories an input per value, fill missing values. none: "
        "take numbers as they are. [default: auto]"
    ),
]
Missing = Annotated[
    str | None,
    typer.Option(
        help="Missing values in a table: impute (fill and mark them), drop (leave such rows out), drop-unlabelled "
        "(impute, but leave rows without a label out) or refuse. [default: impute]"
    ),
]
MinSamples = Annotated[int | None, typer.Option(help="Leave out clients with fewer samples. [default: 1]")]
TimeColumn = Annotated[
    str | None,
    typer.Option(
        help="A column of a table, or an array of an .npz, of dates or numbers: each client's last samples are for the "
        "test."
    ),
]
UnseenClients = Annotated[
    str | None,
    typer.Option(
        help="The clients that take no part in training: names with commas between them, or a file with one name per "
        "line. In place of --unseen."
    ),
]
Partition = Annotated[str, typer.Option(help="As in `pefll train`.", show_default="from the data")]
Clients = Annotated[int, typer.Option(help="As in `pefll train`.", show_default="from the data")]
DataDir = Annotated[Path, typer.Option("--data-dir", help="The folder of data sets.")]

OwnModel = Annotated[
    str | None, typer.Option("--model", help="your.module:function, if the run's model is your own code.")
]
OwnMethod = Annotated[
    str | None, typer.Option("--method", help="your.module:Class, if the run's method is your own code.")
]
OwnTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="The run's --task again, if it names your own code: your.module:Class, or 'classification "
        "own_loss=your.module:function'.",
    ),
]
OwnModels = Annotated[list[str] | None, typer.Option("--model", help="your.module:function; may be repeated.")]
OwnMethods = Annotated[list[str] | None, typer.Option("--method", help="your.module:Class; may be repeated.")]

PersonalSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="A hyper-parameter that training did not use, such as refine_steps=10; may be repeated."
    ),
]

Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")]


def check_free(path: Path | None, option: str, force: bool) -> None:
    """Raise PefllError if the file of an option exists, unless `force` allows overwriting it."""
    if path is not None and path.is_file() and not force:
        raise PefllError(
            f"{path} exists already: choose another name with {option}, or add --force to overwrite it",
            code="PEFLL-C010",
        )


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """Return the hyper-parameters of `--set NAME=VALUE`, still as text."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise PefllError(f"--set takes NAME=VALUE, not {pair!r}", code="PEFLL-C011")
        settings[name.strip()] = value.strip()
    allow(*settings.values())  # an own network, such as embedding=my.module:build
    return settings


def parse_seeds(text: str) -> list[int]:
    """Return the numbers of `--seeds 0,1,2`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise PefllError(
            f"--seeds takes different whole numbers with commas between them, such as 0,1,2, not {text!r}",
            code="PEFLL-C012",
        )
    return [int(part) for part in parts]


def own_code(settings: Mapping[str, Any] | None = None, **names: str) -> str:
    """Return the options that name a user's own code, such as ` --model mine:Net`; "" if there is none.

    `settings` are hyper-parameters, which may name an own network.
    """
    words = [f"--{option.replace('_', '-')} {shlex.quote(name)}" for option, name in names.items() if ":" in name]
    named = {key: value for key, value in (settings or {}).items() if isinstance(value, str) and ":" in value}
    words += [f"--set {shlex.quote(f'{key}={value}')}" for key, value in named.items()]
    return "".join(f" {word}" for word in words)
