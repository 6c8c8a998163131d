"""`pefll reproduce`: tables and figures of the paper."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pefll.cli.console import err, out
from pefll.cli.options import DataDir, parse_seeds
from pefll.cli.stopped import advice_when_stopped
from pefll.core.errors import PefllError, unknown
from pefll.core.files import check_folder
from pefll.core.progress import say
from pefll.core.wording import counted, first_few
from pefll.engines.hardware import pick_device, pick_precision
from pefll.runs.config import Config

if TYPE_CHECKING:
    from pefll.experiments.experiment import Experiment
    from pefll.experiments.reproduce import TableStatus


def reproduce(
    what: Annotated[
        str | None,
        typer.Argument(
            help="What to reproduce: table1, unlabeled, label-masking, hypernetwork-size, embedding, regularisation, "
            "cost, descriptors, extrapolation, resnet, fl-bench, shakespeare or certificates.",
            metavar="WHAT",
            show_default=False,
        ),
    ] = None,
    missing: Annotated[
        bool,
        typer.Option(
            "--missing",
            help="Run the missing runs of all experiments, the most valuable first; it replaces WHAT.",
        ),
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            help="Run only these methods or rows, cells or data sets: pefll,fedavg/cifar10-100,femnist. "
            "With --missing: only these experiments."
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Seeds to run. Tables use seeds 0, 1, 2, and others that every method has.",
            show_default="0,1,2; 0 outside of Table 1 for n=500 and n=1000",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of every run.")] = 5000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the missing runs and their times.")] = False,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Only write the tables; train nothing.")] = False,
    data_dir: DataDir = Path("data"),
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The folder for runs; stopped runs resume from it.",
            show_default="runs/table1, or runs/paper for all but Table 1",
        ),
    ] = None,
    results: Annotated[Path, typer.Option(help="The folder of results.")] = Path("results"),
    at_once: Annotated[int, typer.Option(help="Number of seeds of a method that share the device.")] = 3,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Minutes to use. Runs that do not fit are left out, and unfinished runs are saved.",
            metavar="MINUTES",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    precision: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
) -> None:
    """Reproduce a table or figure of the paper: do its missing runs, then write its tables to the results folder.

    Table 1 becomes results/table1.md, .tex and .csv. Every other experiment becomes NAME.md and NAME.csv. They have our
    figures beside the paper's, and say for each of the paper's statements whether it holds.

    A run is missing if `results/` has no file with its method, data, clients, seed, rounds and hyper-parameters.
    Hyper-parameters are the best of `pefll tune` for the cell, else for the nearest number of clients, else the
    method's defaults. The cheapest runs of Table 1 come first. In other experiments, small federations come first,
    then small seeds, then cheap runs. Each run writes its result when it ends. After Ctrl-C or a crash, give the
    command again: unfinished runs resume from their last checkpoint.

    For example:

    - `pefll reproduce table1 --dry-run`

    - `pefll reproduce table1 --only pefll,fedavg,cifar10-100 --seeds 0`

    - `pefll reproduce table1 --only pefll-ten-steps,pefll-plus-ten-steps`

    - `pefll reproduce hypernetwork-size --only S,L,cifar10-100 --precision bf16`

    - `pefll reproduce --missing --budget 25`

    - `pefll reproduce --missing --tables-only`
    """
    from pefll.experiments import gpu_time
    from pefll.experiments import reproduce as table
    from pefll.experiments.grid_search import check_at_once
    from pefll.experiments.jobs import absent_data_words
    from pefll.experiments.missing import missing_runs
    from pefll.experiments.pages import diverged_words
    from pefll.experiments.results import no_results

    names = _names(what, missing, only)
    if dry_run and tables_only:
        raise PefllError(
            "--dry-run writes nothing, and --tables-only writes the tables; leave one of them out", code="PEFLL-C004"
        )
    if budget is not None and not 0 < budget < math.inf:
        raise PefllError(f"--budget is {budget}; it must be more than 0 minutes", code="PEFLL-C005")
    # Wrong options are refused even if no run is missing.
    Config(rounds=rounds, device=device, precision=precision)
    pick_device(device)
    check_at_once(at_once)
    check_folder(results)
    if tables_only and not results.is_dir():
        raise no_results(results)
    seconds = None if budget is None else 60 * budget
    numbers, words = seeds if seeds is None else parse_seeds(seeds), None if missing else only
    asked = None if precision == "auto" else pick_precision(precision, pick_device(device))

    def read() -> dict[str, table.TableStatus]:
        return {name: table.read_status(results, numbers, rounds, words, _experiment(name), asked) for name in names}

    statuses = read()
    status = table.joined(list(statuses.values())) if missing else statuses[names[0]]
    order = table.cheapest_first if names == ["table1"] and not missing else table.most_valuable_first
    folder = folder or Path("runs/table1" if order is table.cheapest_first else "runs/paper")

    def work() -> list[gpu_time.Work]:
        return gpu_time.work_of(statuses, results, lambda status: order(status, at_once, folder))

    if dry_run:
        if missing:
            out.print(gpu_time.summary_table(work()))
        out.print(missing_runs(status, order(status, at_once, folder), seconds))
        for found in statuses.values():
            if found.diverged:
                say(out, diverged_words(found.diverged))
        if absent := absent_data_words(status.missing, data_dir):
            say(out, absent)
        if status.missing and pick_device(device).type == "cpu":
            why = "there is no GPU" if pick_device("auto").type == "cpu" else f"--device {device} uses none"
            say(out, f"These are times on a GPU, but {why}: a CPU takes much longer.")
        return
    failures: list[str] = []
    if not tables_only:
        with advice_when_stopped(folder, results):
            keeps = order is table.cheapest_first  # the runs of other experiments would fill a disk
            hardware = {"device": device, "precision": precision}
            failures = table.run_missing(
                status, results, folder, data_dir, at_once, err, seconds, order, keeps, **hardware
            )
        statuses = read()
    for name, found in statuses.items():
        _write(name, found, results, quiet=missing)
    if missing and only is None:
        say(out, f"wrote {_statements(statuses, results)}")
        say(out, f"wrote {gpu_time.write_page(work(), results)}")
    if failures:
        raise PefllError(f"{counted(len(failures), 'run')} failed: {'; '.join(failures)}", code="PEFLL-C006")


def _names(what: str | None, missing: bool, only: str | None) -> list[str]:
    """Return the names of the experiments that the options ask for."""
    from pefll.experiments.paper import EXPERIMENTS

    known = ["table1", *EXPERIMENTS]
    if missing == (what is not None):
        raise PefllError(
            f"name one experiment ({', '.join(known)}), or give --missing for all of them", code="PEFLL-C036"
        )
    if what is not None:
        if what not in known:
            raise unknown("experiment", what, known)
        return [what]
    asked = [word for word in re.split(r"[,\s]+", only or "") if word]
    for word in asked:
        if word not in known:
            raise unknown("experiment", word, known)
    return [name for name in known if name in (asked or known)]


def _experiment(name: str) -> Experiment | None:
    """Return an experiment by name; None for Table 1."""
    from pefll.experiments.paper import EXPERIMENTS

    return EXPERIMENTS.get(name)


def _write(name: str, status: TableStatus, results: Path, quiet: bool) -> None:
    """Write the tables of an experiment and print them.

    Args:
        name: the experiment's name.
        status: the experiment's results.
        results: the folder for the tables.
        quiet: whether to print only the names of the files, not the tables.
    """
    from pefll.experiments import comparison, pages

    experiment = _experiment(name)
    if experiment is None:
        if status.diverged:
            say(out, pages.diverged_words(status.diverged))
        for path in comparison.write_tables(status.comparison(), results):
            say(out, f"wrote {path}")
        if status.left_out:
            listed = first_few(f"{counted(number, 'result')} of {where}" for where, number in status.left_out.items())
            say(out, f"left out, because other settings were chosen later ({results / 'tune'}): {listed}")
        return
    evidence = status.evidence(experiment)
    paths = pages.write_page(evidence, results)
    if not quiet:
        out.print(paths[0].read_text(encoding="utf-8"), markup=False, highlight=False, soft_wrap=True)
    for path in paths:
        say(out, f"wrote {path}")


def _statements(statuses: Mapping[str, TableStatus], results: Path) -> Path:
    """Write the page with all statements of the paper, and return its path."""
    from pefll.experiments.statements import TABLE1, write_page

    return write_page([found.evidence(_experiment(name) or TABLE1) for name, found in statuses.items()], results)
