"""`pefll show` and `pefll results ...`: the results of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pefll.cli.console import out
from pefll.core.errors import PefllError
from pefll.runs.record import run_folders, runs_below

app = typer.Typer(
    no_args_is_help=True, help="Keep the results of finished runs as small files, and make tables of them."
)


def show(
    paths: Annotated[list[Path], typer.Argument(help="Run folders, or folders with runs in them.", metavar="RUN...")],
    folder: Annotated[
        Path | None, typer.Option("--out", help="The folder for pictures and tables. [default: the first RUN]")
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help="Formats of the pictures: png, pdf, svg; or several.")
    ] = "png",
    tables: Annotated[
        str, typer.Option("--table", help="Also write comparison.md, .tex and .csv: formats, such as md,tex,csv.")
    ] = "",
    measures: Annotated[
        str,
        typer.Option(
            "--measure",
            help="What --table compares: per_sample, per_client, masked, worst_tenth, or metrics of the runs' task; or "
            "several. [default: the metric that chooses the best round]",
            show_default=False,
        ),
    ] = "",
    intervals: Annotated[
        bool, typer.Option("--intervals", help="--table also says how far rows are behind the best, with p.")
    ] = False,
) -> None:
    """Compare runs: tables of accuracies, learning curves, and a map of client descriptors.

    For example:

    - `pefll show runs/c10 runs/c10-fedavg --out pictures`

    - `pefll show runs --out paper --format pdf,svg --table tex,csv`
    """
    from pefll.report import show as show_runs

    folders = [each.path for path in paths for each in runs_below(path)]
    show_runs(
        folders, folder or paths[0], out, _listed(formats), _listed(tables), _listed(measures), intervals=intervals
    )


def _listed(text: str) -> list[str]:
    """Return the names in a text that are separated by commas, each once."""
    return list(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))


@app.command("add")
def results_add(
    paths: Annotated[
        list[Path], typer.Argument(help="Finished run folders, or folders of several seeds.", metavar="RUN...")
    ],
    target: Annotated[Path, typer.Option("--to", help="The folder of results.")] = Path("results"),
) -> None:
    """Write finished runs as small JSON files: command, commit, device, seed, accuracies, curves.

    For example: `pefll results add runs/c10 --to results`
    """
    from pefll.experiments.results import collect

    for folder in (folder for path in paths for folder in run_folders(path)):
        out.print(f"wrote {collect(folder, target)}", highlight=False)


@app.command("table")
def results_table(
    source: Annotated[Path, typer.Argument(help="The folder of results.")] = Path("results"),
    method: Annotated[str | None, typer.Option(help="Only results of this method.")] = None,
) -> None:
    """Print all results as a Markdown table, beside the paper's numbers."""
    from pefll.experiments.results import markdown_table, no_results, read_results

    results = read_results(source)
    if not results:
        raise no_results(source)
    have = sorted({str(result["method"]) for result in results})
    if method is not None and method not in have:
        raise PefllError(f"there are no results of {method} in {source}, only of {', '.join(have)}", code="PEFLL-C014")
    results = [result for result in results if method in (None, result["method"])]
    typer.echo(markdown_table(results))
