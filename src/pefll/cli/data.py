"""`pefll data ...`: lists, downloads and checks data sets, and shows federations."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from pefll import data as sources
from pefll.cli.console import err, out
from pefll.cli.options import (
    ClientColumn,
    Clients,
    DataDir,
    Drop,
    Encode,
    Features,
    Force,
    Label,
    MinSamples,
    Missing,
    Partition,
    TimeColumn,
    Treat,
    UnseenClients,
    check_free,
)
from pefll.core.errors import PefllError
from pefll.core.progress import say
from pefll.runs import federations
from pefll.runs.config import Config
from pefll.tasks.names import allow_task

ABOUT = """List, download, check and show data sets.

Your own data needs no command. Give a path wherever a command takes a data set:

- `my.npz`: arrays `x` [N, ...], `y` [N] and `client` [N]; `split` [N] is optional: 0 train, 1 validation, 2 test

- `my.csv` or `my.parquet`: a row per sample; columns `label` and `client`, and features in all others

- a folder `client/class/*.png`; for one client's samples, `class/*.png`

With `--partition`, `client` is optional.
"""
app = typer.Typer(no_args_is_help=True, help=ABOUT)


@app.command("list")
def data_list(data_dir: DataDir = Path("data")) -> None:
    """List the data sets and whether they are in the data folder."""
    table = Table(box=None, padding=(0, 2, 1, 0))
    for heading in ("name", "what it is", "files in the data folder", "here", "from"):
        table.add_column(heading, overflow="fold")
    for source in sources.DATASETS.values():
        here = "built in" if source.embedded else "yes" if source.found(data_dir) else "no"
        table.add_row(source.name, source.about, source.files or "none needed", here, escape(source.origin))
    out.print(table)
    say(
        out,
        "Get one: pefll data get cifar10. Your own: a path to .npz, .csv, .parquet, or a folder client/class/*.png.",
    )


@app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A data set of `pefll data list`.")], data_dir: DataDir = Path("data")
) -> None:
    """Download a data set from its makers and check its md5; an interrupted download continues.

    For example: `pefll data get cifar10`
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with ExitStack() as stack:
        progress = Progress(*columns, console=err)
        bar = progress.add_task(name, total=None)

        def report(done: int, total: int | None) -> None:
            if not progress.live.is_started:  # not earlier: a wrong name prints one sentence and no bar
                stack.enter_context(progress)
            progress.update(bar, completed=done, total=total)

        path = sources.get(name, data_dir, report)
    say(out, f"{path} is here" if path else f"{name} comes with the package")


@app.command("check")
def data_check(data_dir: Annotated[Path, typer.Argument(help="The data folder.")] = Path("data")) -> None:
    """Check whether every data set in a folder is complete, readable and has the right md5."""
    if data_dir.is_file():
        raise PefllError(
            f"{data_dir} is a file; give the folder of data sets, or use `pefll data summary`", code="PEFLL-C001"
        )
    if not data_dir.is_dir():
        raise PefllError(
            f"there is no folder {data_dir}; `pefll data get cifar10 --data-dir {data_dir}` makes it", code="PEFLL-C002"
        )
    if not sources.holds_any(data_dir):
        raise PefllError(
            f"{data_dir} holds no known data set: `pefll data get cifar10 --data-dir {data_dir}` downloads one, "
            "`pefll data list` lists the files of each, and `pefll data summary PATH` shows your own data",
            code="PEFLL-C003",
        )
    findings = sources.check(data_dir, lambda sentence: say(err, sentence))
    table = Table("data set", "state", "")
    for finding in findings:
        table.add_row(finding.name, finding.state, escape(finding.sentence))
    out.print(table)
    if any(finding.state == "damaged" for finding in findings):
        raise typer.Exit(2)


@app.command("summary")
def data_summary(
    data: Annotated[str, typer.Argument(help="A data set or a path, as in `pefll train --data`.")],
    data_dir: DataDir = Path("data"),
    partition: Partition = "",
    clients: Clients = 0,
    unseen: Annotated[float, typer.Option(help="As in `pefll train`.")] = 0.1,
    seed: Annotated[int, typer.Option(help="As in `pefll train`.")] = 0,
    label: Label = sources.LABEL,
    client_column: ClientColumn = sources.CLIENT,
    features: Features = None,
    drop: Drop = None,
    treat: Treat = None,
    encode: Encode = None,
    missing: Missing = None,
    min_samples: MinSamples = None,
    time_column: TimeColumn = None,
    unseen_clients: UnseenClients = None,
    task: Annotated[str, typer.Option(help="As in `pefll train`.", show_default="what fits the labels")] = "",
    picture: Annotated[
        Path | None, typer.Option(help="Write a picture of the labels of each client, such as a .png.")
    ] = None,
    force: Force = False,
) -> None:
    """Show a federation before training: its clients, samples and classes, and a picture.

    For example:

    - `pefll data summary digits --partition 'dirichlet 0.3' --clients 100 --picture who.png`

    - `pefll data summary my.csv --label y --client-column writer`
    """
    from pefll.report import federation_picture, print_federation

    check_free(picture, "--picture", force)
    allow_task(task)
    federation = federations.federation_of(
        Config(
            data=data,
            data_dir=str(data_dir),
            partition=partition,
            clients=clients,
            unseen=unseen,
            seed=seed,
            label=label,
            client_column=client_column,
            features=features or "",
            drop=drop or "",
            treat=treat or "",
            encode=encode or "auto",
            missing=missing or "impute",
            min_samples=1 if min_samples is None else min_samples,
            time_column=time_column or "",
            unseen_clients=unseen_clients or "",
            task=task,
        ),
        err,
    )
    print_federation(sources.summarise(federation), out)
    for sentence in federation.table.sentences(most=200) if federation.table else []:
        say(out, sentence)
    if picture is not None:
        federation_picture(federation, picture)
        say(out, f"wrote {picture}")
