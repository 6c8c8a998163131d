"""The command line: thin verbs over the package."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from pefll import data as sources
from pefll import files, fitting, preparing, run
from pefll.config import Config
from pefll.deploy.verbs import app as flower_app
from pefll.errors import PefllError, unknown
from pefll.lockstep import Stopped
from pefll.methods import METHODS, hyperparameters, method_class, typed_settings
from pefll.personal import PersonalModel
from pefll.progress import say
from pefll.record import GROUPS, MEASURES, RunFolder, run_folders, seed_folder
from pefll.version import __version__

out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)

INTERRUPTED = 130  # what typer makes of a Ctrl-C that no verb has answered

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Personalized federated learning by learning to learn: a model for every client, also for new ones.\n\n"
    "Start with `pefll demo`, or train on data that needs no download: `pefll train --data digits --out runs/first`.",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets: which there are, get them, check them, look at them.")
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")
results_app = typer.Typer(no_args_is_help=True, help="Results: finished runs as small files, and tables made of them.")
app.add_typer(results_app, name="results")

# The error for a misspelt option: typer's own copy of click has it, and older typers took it from click.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

RunPath = Annotated[Path, typer.Argument(help="A run folder, as made by `pefll train --out`.", metavar="RUN")]
DataDir = Annotated[Path, typer.Option("--data-dir", help="Where data sets lie.")]


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


@app.command(rich_help_panel="Start here")
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where runs and pictures go.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
) -> None:
    """Compare Local, FedAvg and PeFLL on embedded real data, and make one personal model, in about a minute."""
    from pefll.experiments.demo import demo as run_demo

    run_demo(folder, seeds, out)


@app.command(rich_help_panel="Start here")
def methods(name: Annotated[str | None, typer.Argument(help="One method.")] = None) -> None:
    """Explain the methods and their hyper-parameters, for `pefll train --set NAME=VALUE`."""
    for each in [name] if name else METHODS:
        defaults = hyperparameters(each)
        kind: Any = method_class(each)
        out.print(f"[bold]{each}[/bold]: {escape((kind.__doc__ or '').splitlines()[0])}", highlight=False)
        notes: dict[str, str] = {}
        for variation_of in reversed(kind.__mro__):  # a variation of a method explains only what it adds
            lines = (variation_of.__doc__ or "").splitlines()[1:]
            notes |= dict(line.strip().split(": ", 1) for line in lines if line.startswith("        ") and ": " in line)
        table = Table("hyper-parameter", "default", "meaning", box=None, padding=(0, 2, 0, 2))
        for key, value in defaults.items():
            table.add_row(key, str(value), escape(notes.get(key, "")))
        out.print(table)
        out.print()


@app.command(name="check-method", rich_help_panel="Start here")
def check_method(
    name: Annotated[str, typer.Argument(help="A method, or one of your own: package.module:Class.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A hyper-parameter, NAME=VALUE; may be repeated. Few steps make the checks quick."),
    ] = None,
) -> None:
    """Check that a method does what every method must, on both engines; exit code 1 where it does not."""
    from pefll import checking

    findings = checking.check_method(name, typed_settings(name, _settings(settings)) if settings else {})
    for rule, problem in findings:
        out.print(f"[red]no [/red] {escape(rule)}: {escape(problem)}" if problem else f"[green]yes[/green] {rule}")
    if any(problem for _, problem in findings):
        raise typer.Exit(1)


@app.command(rich_help_panel="Runs")
def train(
    method: Annotated[
        str | None,
        typer.Option(
            help="`pefll methods` lists and explains them; or package.module:Class, one of your own. [default: pefll]"
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A data set (`pefll data list`) or a path: .npz, .csv, .parquet, or a folder client/class/*.png."
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie. [default: data]")] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="Who gets what: 'by-class K', 'dirichlet A', 'dirichlet A/B' (B for new clients), 'natural'. "
            "[default: the data's]"
        ),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="How many clients, seen and unseen together. [default: the data's]")
    ] = None,
    unseen: Annotated[
        float | None, typer.Option(help="Share of clients kept away from training. [default: 0.1]")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="auto, lenet, cnn, resnet20, mlp, tiny, lstm, or your.module:function. [default: auto]"),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training. [default: 1000]")] = None,
    clients_per_round: Annotated[int | None, typer.Option(help="Clients in a round. [default: 5% of all]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random. [default: 0]")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Several seeds, such as 0,1,2: trained at once, each as it would be alone, into OUT/seed-0, "
            "OUT/seed-1 and so on. On a GPU this is faster than one after another."
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="serial (processes) or vector (clients as one axis). [default: auto]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. [default: auto]")] = None,
    precision: Annotated[
        str | None, typer.Option(help="auto (tf32 on a GPU), float32, tf32, bf16 or float64. [default: auto]")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Of the serial engine. [default: one per core]")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Rounds between evaluations. [default: 30]")] = None,
    eval_clients: Annotated[
        int | None, typer.Option(help="Clients per evaluation while training. [default: as many as cost little]")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Rounds between checkpoints. [default: 1000]")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A hyper-parameter of the method, NAME=VALUE; may be repeated. See `pefll methods`."
        ),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The label's column in a table. [default: label]")] = None,
    client_column: Annotated[str | None, typer.Option(help="The client's column in a table. [default: client]")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="A new folder for the run. [default: runs/DATA-METHOD-SEED]")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, or with all its seeds.", metavar="RUN")
    ] = None,
) -> None:
    """Train a method on a federation; Ctrl-C saves and stops, `--resume` goes on.

    For example:

    - `pefll train --data digits --rounds 300 --out runs/first`

    - `pefll train --data cifar10 --clients 100 --rounds 5000 --seed 0 --out runs/c10`

    - `pefll train --data cifar10 --clients 100 --rounds 5000 --seeds 0,1,2 --out runs/c10`

    - `pefll train --data cifar100 --clients 100 --rounds 5000 --set embedding=linear --out runs/c100`

    - `pefll train --data my.csv --label y --client-column writer --method local`

    - `pefll train --resume runs/c10`
    """
    given: dict[str, Any] = {
        "method": method,
        "data": data,
        "data_dir": None if data_dir is None else str(data_dir),
        "partition": partition,
        "clients": clients,
        "unseen": unseen,
        "model": model,
        "rounds": rounds,
        "clients_per_round": clients_per_round,
        "seed": seed,
        "engine": engine,
        "device": device,
        "precision": precision,
        "processes": processes,
        "eval_every": eval_every,
        "eval_clients": eval_clients,
        "checkpoint_every": checkpoint_every,
        "label": label,
        "client_column": client_column,
        "settings": _settings(settings) if settings else None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if seeds is not None and (seed is not None or resume is not None):
        raise PefllError("--seeds is for new runs, and in place of --seed; --resume RUN goes on with all seeds in RUN")
    if resume is not None:
        if folder is not None:
            raise PefllError("--resume goes on in its own folder; leave --out away")
        target, folders = resume, run_folders(resume)
        started = [_started(each) for each in folders]
        configs = [_resumed(config, given) for config in started]
        longer = any(new.rounds > old.rounds for new, old in zip(configs, started, strict=True))
        finished = not longer and all(each.summary() is not None for each in folders)
    else:
        if "data" not in given:
            raise PefllError("say what to train on: --data digits needs no file, `pefll data list` shows the others")
        if given["data"] not in sources.DATASETS and Path(given["data"]).exists():
            given["data"] = str(Path(given["data"]).resolve())  # so that the run finds it again from another folder
        config = Config(**given)
        config = dataclasses.replace(config, settings=typed_settings(config.method, config.settings))
        name = f"{Path(config.data).stem}-{config.method}".replace(":", "-")
        if seeds is None:
            target = folder or _free(Path("runs") / f"{name}-{config.seed}")
            configs, folders = [config], [RunFolder(target)]
        else:
            target = folder or _free(Path("runs") / name)
            configs = [dataclasses.replace(config, seed=number) for number in _seeds(seeds)]
            folders = [RunFolder(seed_folder(target, each.seed)) for each in configs]
        if any(each.config_file.exists() for each in (RunFolder(target), *folders, *run_folders(target))):
            raise PefllError(
                f"{target} already holds a run: go on with `pefll train --resume {target}`, or choose another --out"
            )
        finished = False
    orders = [
        preparing.Order(
            dataclasses.replace(config, partition=federation.partition, clients=federation.num_clients),
            federation,
            each.path,
        )
        for config, federation, each in zip(configs, preparing.federations_of(configs, err), folders, strict=True)
    ]
    try:
        trained = fitting.fit_together(orders, console=err)
    except Stopped as stopped:
        least = "" if len(orders) == 1 else " or later, for each seed"
        say(err, f"Saved after round {stopped.round}{least}. Go on with: pefll train --resume {target}")
        sys.exit(128 + stopped.signal)
    except fitting.RunsFailed as failed:
        if failed.runs:
            out.print(_seeds_table(failed.runs))
        raise
    if finished:
        say(err, f"The run was finished already; --rounds {2 * configs[0].rounds} would go on.")
    if len(trained) > 1:
        out.print(_seeds_table(trained))
    else:
        summary = trained[0].summary
        if summary["rounds"]:
            say(out, f"{folders[0].path}: best round {summary['best_round']} of {summary['rounds']}")
        out.print(_accuracy_table(summary["accuracy"]["best"], "Test accuracy at the best round"))
    for sentence in _nothing_to_measure(orders[0].federation):
        say(out, sentence)
    say(out, f"Next: pefll show {target}")


def _nothing_to_measure(federation: sources.Federation) -> list[str]:
    """Return a sentence for what an accuracy is not there for."""
    sentences = []
    if not int(federation.count[sources.TEST].sum()):
        sentences.append(
            "No client has a test sample, so there is no accuracy: clients need more than one sample each."
        )
    elif not federation.num_unseen:
        sentences.append("No client was kept as a new one: --unseen 0.3 keeps three of ten out of training.")
    return sentences


@app.command(rich_help_panel="Experiments")
def tune(
    grid: Annotated[
        list[str], typer.Option("--grid", help="Values to try, NAME=VALUE,VALUE; may be repeated for a product of all.")
    ],
    data: Annotated[str, typer.Option(help="As in `pefll train`.")],
    method: Annotated[str, typer.Option(help="As in `pefll train`.")] = "pefll",
    data_dir: DataDir = Path("data"),
    partition: Annotated[str, typer.Option(help="As in `pefll train`.")] = "",
    clients: Annotated[int, typer.Option(help="As in `pefll train`.")] = 0,
    unseen: Annotated[float, typer.Option(help="As in `pefll train`.")] = 0.1,
    model: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Of each run.")] = 1000,
    clients_per_round: Annotated[int, typer.Option(help="As in `pefll train`; 0 for 5% of all.")] = 0,
    seeds: Annotated[str, typer.Option(help="Every setting is tried with each of these.")] = "0",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A hyper-parameter that is the same for all, NAME=VALUE.")
    ] = None,
    eval_every: Annotated[int, typer.Option(help="As in `pefll train`.")] = 30,
    engine: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    device: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    precision: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    processes: Annotated[int, typer.Option(help="As in `pefll train`.")] = 0,
    at_once: Annotated[int, typer.Option(help="How many runs share the device.")] = 4,
    folder: Annotated[Path, typer.Option("--out", help="Where runs go, so that a stopped one goes on.")] = Path(
        "runs/tune"
    ),
    target: Annotated[Path, typer.Option("--to", help="Where the results of all trials go.")] = Path("results/tune"),
) -> None:
    """Choose hyper-parameters by grid search, by validation accuracy on seen clients.

    Test samples and unseen clients take no part in the choice. What was tried before is not tried again: after Ctrl-C,
    or with more values, give the command again. All trials of a method on a federation are kept in one file,
    `results/tune/DATA-METHOD-nCLIENTS.json`, from which `pefll reproduce` takes the best.

    For example:

    - `pefll tune --data digits --method fedavg --grid client_lr=1e-3,1e-2,1e-1 --rounds 100`

    - `pefll tune --data cifar10 --clients 100 --grid client_lr=2e-3,5e-3 --grid server_lr=2e-4,5e-4 --seeds 0,1`

    - `pefll tune --data cifar100 --clients 100 --set embedding=linear --grid server_lr=2e-4,5e-4,1e-3`
    """
    from pefll.experiments import tune as search

    config = Config(
        method=method,
        settings=typed_settings(method, _settings(settings or [])),
        data=str(Path(data).resolve()) if data not in sources.DATASETS and Path(data).exists() else data,
        data_dir=str(data_dir),
        partition=partition,
        clients=clients,
        unseen=unseen,
        model=model,
        rounds=rounds,
        clients_per_round=clients_per_round,
        eval_every=eval_every,
        engine=engine,
        device=device,
        precision=precision,
        processes=processes,
    )
    wanted = search.Search(config, search.parse_grid(method, grid), tuple(_seeds(seeds)))
    try:
        trials = search.tune(wanted, folder, target, at_once, err)
    except Stopped as stopped:
        say(err, f"Saved in {folder} and {target}. The same command goes on.")
        sys.exit(128 + stopped.signal)
    out.print(search.trials_table(trials, wanted.seeds))
    for sentence in search.advice(trials, wanted):
        say(out, sentence)
    say(out, f"wrote {trials.path}")


@app.command(rich_help_panel="Experiments")
def reproduce(
    what: Annotated[str, typer.Argument(help="table1", metavar="WHAT")],
    only: Annotated[
        str, typer.Option(help="Run only these methods, cells or data sets: pefll,fedavg/cifar10-100,femnist.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Seeds that every cell should have.")] = "0,1,2",
    rounds: Annotated[int, typer.Option(help="Rounds that every run should have.")] = 5000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is missing and what it will take.")] = False,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Only write the tables; train nothing.")] = False,
    data_dir: DataDir = Path("data"),
    folder: Annotated[Path, typer.Option("--out", help="Where runs go, so that a stopped one goes on.")] = Path(
        "runs/table1"
    ),
    results: Annotated[Path, typer.Option(help="The folder of results.")] = Path("results"),
    at_once: Annotated[int, typer.Option(help="How many seeds of a method in a cell share the device.")] = 3,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Minutes that there are: what would not fit is left out, and what is not done by then is saved.",
            metavar="MINUTES",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    precision: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
) -> None:
    """Reproduce the paper's Table 1: run what is missing, then write results/table1.md, .tex and .csv.

    A run is missing while `results/` has no file with its method, data, clients, seed, rounds and hyper-parameters.
    These are what `pefll tune` found best for the cell, or else for 100 clients of the same data, or else the method's
    defaults. The cheapest runs come first. A result is written as its run ends; after Ctrl-C or a crash, give the
    command again: runs that were under way go on from their last checkpoint.

    For example:

    - `pefll reproduce table1 --dry-run`

    - `pefll reproduce table1 --only pefll,fedavg,cifar10-100 --seeds 0`

    - `pefll reproduce table1 --budget 25`

    - `pefll reproduce table1 --tables-only`
    """
    from pefll.experiments import comparison
    from pefll.experiments import reproduce as table

    if what != "table1":
        raise unknown("experiment", what, ["table1"])
    if budget is not None and not 0 < budget < math.inf:
        raise PefllError(f"--budget is {budget}; it must be more than 0 minutes")
    seconds = None if budget is None else 60 * budget
    plan = table.make_plan(results, _seeds(seeds), rounds, only)
    if dry_run:
        out.print(table.missing_table(plan, table.cheapest_first(plan, at_once, folder), seconds))
        return
    failures: list[str] = []
    if not tables_only:
        try:
            failures = table.run_missing(
                plan, results, folder, data_dir, at_once, err, seconds, device=device, precision=precision
            )
        except Stopped as stopped:
            say(err, f"Saved in {folder} and {results}. The same command goes on.")
            sys.exit(128 + stopped.signal)
        plan = table.make_plan(results, _seeds(seeds), rounds, only)
    for path in comparison.write_tables(plan.comparison(), results):
        say(out, f"wrote {path}")
    if failures:
        raise PefllError(f"{len(failures)} runs failed: {'; '.join(failures)}")


@app.command(rich_help_panel="Experiments")
def cost(
    paths: Annotated[
        list[Path], typer.Argument(help="Finished run folders, result files, or a folder of results.", metavar="RUN...")
    ],
    data_dir: Annotated[Path | None, typer.Option(help="Where the data lies now, if it moved.")] = None,
    target: Annotated[Path | None, typer.Option("--out", help="Also write OUT.md and OUT.csv.", metavar="OUT")] = None,
) -> None:
    """Show what a client that was never seen pays for its model: exchanges, bytes, FLOPs, seconds, method by method.

    It is counted now, on one core, for the unseen client with the median number of samples. Nothing is trained but
    what the method lets a new client train.

    For example:

    - `pefll cost runs/c10 runs/c10-fedavg`

    - `pefll cost results --out results/cost`
    """
    from pefll.experiments import costs

    found = costs.read_any(paths)
    if not found:
        raise PefllError(f"there are no results in {paths[0]}; `pefll results add RUN` puts some there")
    bills = costs.bills(found, data_dir, err)
    for table in costs.costs_tables(bills):
        out.print(table)
    for path in costs.write_costs(bills, target) if target is not None else []:
        say(out, f"wrote {path}")


def _started(folder: RunFolder) -> Config:
    folder.check_is_run()
    return Config.load(folder.config_file)


def _resumed(started: Config, given: dict[str, Any]) -> Config:
    """Return what a run was started with, changed as was asked for, where that is possible."""
    if "settings" in given:
        given = given | {"settings": started.settings | typed_settings(started.method, given["settings"])}
    config = dataclasses.replace(started, **given)
    started.check_same(config)
    return config


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise PefllError(f"--seeds takes different whole numbers with commas between them, such as 0,1,2, not {text!r}")
    return [int(part) for part in parts]


@app.command(rich_help_panel="Runs")
def evaluate(
    path: RunPath,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    mask_labels: Annotated[
        bool, typer.Option("--mask-labels", help="Rule out classes that a client's training labels do not have.")
    ] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data lies now, if it moved.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    per_client: Annotated[
        Path | None,
        typer.Option(
            help="Also write a CSV with a row for each client: its samples, how many are right, how many are with "
            "classes that it lacks ruled out (masked), the sum of losses, the accuracy (masked with --mask-labels).",
            metavar="FILE.csv",
        ),
    ] = None,
) -> None:
    """Score the personal models of all clients of a run, seen and unseen, at its best round.

    For example:

    - `pefll evaluate runs/c10 --split test --mask-labels`

    - `pefll evaluate runs/c10 --per-client clients.csv`
    """
    trained = run.load(path, err)
    config = dataclasses.replace(trained.config, device=device)
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=str(data_dir))
    federation = preparing.federation_of(config, err)
    clients = dataclasses.replace(trained, config=config).evaluate_clients(split, federation, err)
    if per_client is not None:
        files.write_csv(per_client, (_client_row(one, mask_labels) for one in clients))
    result = run.evaluation_of_clients(clients)
    groups = {name: value._asdict() if value else None for name, value in result._asdict().items()}
    if as_json:
        typer.echo(json.dumps({"run": str(path), "split": split, **groups}, indent=2))
        return
    out.print(_accuracy_table(groups, f"{split} accuracy", ("masked",) if mask_labels else MEASURES))


@app.command(rich_help_panel="Personal models")
def personalize(
    path: RunPath,
    data: Annotated[
        Path, typer.Option(help="The client's samples: .npz with x and y, .csv, .parquet, or a folder class/*.png.")
    ],
    model: Annotated[Path, typer.Option("--out", help="The file to write, a .safetensors.")],
    label: Annotated[str, typer.Option(help="The label's column in a table.")] = "label",
) -> None:
    """Make a model for a client that was never seen. With PeFLL that is one forward pass: no training.

    For example: `pefll personalize runs/c10 --data my_samples.npz --out me.safetensors`
    """
    if model.suffix not in ("", ".safetensors"):
        raise PefllError(f"personal models are .safetensors files; write to {model.with_suffix('.safetensors')}")
    trained = run.load(path, err)
    x, y = _read_client(data, label, trained.facts, alone=True)
    if y is None and trained.method.uses_labels and data.suffix.lower() in sources.TABLES:
        raise PefllError(f"{data} has no column {label!r}; say with --label which one has the labels")
    personal = trained.personalize(x, y)
    with files.sentences_for_disk_errors(str(model)):
        model.parent.mkdir(parents=True, exist_ok=True)
    personal.save(model)
    say(out, f"{model}: a personal {trained.facts['model']} from {len(x)} samples")
    if y is not None:
        right, guess = float((personal.predict(x) == y).mean()), float(np.bincount(y).max() / len(y))
        say(out, f"It is right on {100 * right:.1f}% of the samples it was made from.")
        if right < guess:
            say(
                out,
                f"Always naming this client's most frequent class would be right on {100 * guess:.1f}%: the run has "
                "not learned to serve clients like this one. More clients, rounds, or other learning rates may help; "
                "compare with --method local.",
            )
    say(out, f"Next: pefll predict {model} --data more_samples.npz")


@app.command(rich_help_panel="Personal models")
def predict(
    model: Annotated[Path, typer.Argument(help="A file made by `pefll personalize`.", metavar="MODEL")],
    data: Annotated[Path, typer.Option(help="Samples: .npz with x (and y), .csv, .parquet, or a folder class/*.png.")],
    target: Annotated[
        Path | None, typer.Option("--out", help="Write a CSV with sample, class and probability.")
    ] = None,
    label: Annotated[str, typer.Option(help="The label's column in a table.")] = "label",
    architecture: Annotated[
        str | None, typer.Option("--model", help="your.module:function, for a model that is not the package's own.")
    ] = None,
) -> None:
    """Classify samples with a personal model; says how many are right where the file has labels.

    For example: `pefll predict me.safetensors --data more_samples.npz --out answers.csv`
    """
    personal = PersonalModel.load(model, architecture=architecture)
    x, y = _read_client(data, label, personal.facts)
    if y is not None and len(y) and not 0 <= int(y.min()) <= int(y.max()) < personal.facts["classes"]:
        raise PefllError(
            f"{data}: labels are {y.min()} to {y.max()}; the model knows 0..{personal.facts['classes'] - 1}"
        )
    chances = personal.probabilities(x)
    classes = chances.argmax(axis=1)
    names = personal.facts["class_names"] or [str(number) for number in range(personal.facts["classes"])]
    if target is not None:
        answers = enumerate(classes)
        files.write_csv(
            target,
            ({"sample": row, "class": names[c], "probability": f"{chances[row, c]:.6f}"} for row, c in answers),
        )
        say(out, f"wrote {target}")
    else:
        for row, c in enumerate(classes[:20]):
            say(out, f"sample {row}: {names[c]} ({100 * chances[row, c]:.0f}%)")
        if len(classes) > 20:
            say(out, f"... and {len(classes) - 20} more; --out predictions.csv writes all")
    if y is not None:
        say(out, f"{100 * float((classes == y).mean()):.1f}% of {len(y)} samples are right")
    elif data.suffix.lower() in sources.TABLES:
        say(out, f"Nobody knows how many are right: there is no column {label!r}; --label names another.")


@app.command(rich_help_panel="Runs")
def show(
    paths: Annotated[list[Path], typer.Argument(help="Run folders, or folders of several seeds.", metavar="RUN...")],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where to write pictures. [default: the first run]")
    ] = None,
) -> None:
    """Show runs side by side: tables, curves, the map of client descriptors.

    For example: `pefll show runs/c10 runs/c10-fedavg --out pictures`
    """
    from pefll.report import show as show_runs

    show_runs([each.path for path in paths for each in run_folders(path)], folder or paths[0], out)


@data_app.command("list")
def data_list(data_dir: DataDir = Path("data")) -> None:
    """List the data sets, and which of them are here."""
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


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A data set of `pefll data list`.")], data_dir: DataDir = Path("data")
) -> None:
    """Download a data set from its makers, with a check of its md5; a transfer that broke off goes on."""
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
            if not progress.live.is_started:  # not before, so that a wrong name is answered by a sentence alone
                stack.enter_context(progress)
            progress.update(bar, completed=done, total=total)

        path = sources.get(name, data_dir, report)
    say(out, f"{path} is here" if path else f"{name} comes with the package")


@data_app.command("check")
def data_check(data_dir: Annotated[Path, typer.Argument(help="The data folder.")] = Path("data")) -> None:
    """Check every data set in a folder: complete, readable, right md5."""
    if data_dir.is_file():
        raise PefllError(f"{data_dir} is a file; say which folder has the data sets, or use `pefll data summary`")
    if not data_dir.is_dir():
        raise PefllError(f"there is no folder {data_dir}; `pefll data get cifar10 --data-dir {data_dir}` makes it")
    findings = sources.check(data_dir, lambda sentence: say(err, sentence))
    table = Table("data set", "state", "")
    for finding in findings:
        table.add_row(finding.name, finding.state, escape(finding.sentence))
    out.print(table)
    if any(finding.state == "damaged" for finding in findings):
        raise typer.Exit(2)


@data_app.command("summary")
def data_summary(
    data: Annotated[str, typer.Argument(help="A data set or a path.")],
    data_dir: DataDir = Path("data"),
    partition: Annotated[str, typer.Option(help="As in `pefll train`.")] = "",
    clients: Annotated[int, typer.Option(help="As in `pefll train`.")] = 0,
    unseen: Annotated[float, typer.Option(help="As in `pefll train`.")] = 0.1,
    seed: Annotated[int, typer.Option(help="As in `pefll train`.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Write a picture of who has what.")] = None,
) -> None:
    """Show a federation before training on it: clients, samples, classes, and a picture.

    For example: `pefll data summary digits --partition 'dirichlet 0.3' --clients 100 --picture who.png`
    """
    from pefll.report import federation_picture, print_federation

    federation = preparing.federation_of(
        Config(data=data, data_dir=str(data_dir), partition=partition, clients=clients, unseen=unseen, seed=seed), err
    )
    print_federation(sources.summarise(federation), out)
    if picture is not None:
        federation_picture(
            federation.histograms(), federation.num_seen, picture, federation.class_names, federation.name
        )
        say(out, f"wrote {picture}")


@results_app.command("add")
def results_add(
    paths: Annotated[
        list[Path], typer.Argument(help="Finished run folders, or folders of several seeds.", metavar="RUN...")
    ],
    target: Annotated[Path, typer.Option("--to", help="The folder of results.")] = Path("results"),
) -> None:
    """Keep finished runs as small JSON files: command, commit, device, seed, accuracies, curves."""
    from pefll.experiments.results import collect

    for folder in [folder for path in paths for folder in run_folders(path)]:
        out.print(f"wrote {collect(folder, target)}", highlight=False)


@results_app.command("table")
def results_table(source: Annotated[Path, typer.Argument(help="The folder of results.")] = Path("results")) -> None:
    """Print all results as a Markdown table, beside the paper's numbers."""
    from pefll.experiments.results import markdown_table, read_results

    results = read_results(source)
    if not results:
        raise PefllError(f"there are no results in {source}; `pefll results add RUN` puts some there")
    typer.echo(markdown_table(results))


def _free(folder: Path) -> Path:
    """Return the folder, with a number behind its name where it exists already."""
    if not folder.exists():
        return folder
    return next(path for number in itertools.count(2) if not (path := Path(f"{folder}-{number}")).exists())


def _read_client(data: Path, label: str, facts: dict[str, Any], alone: bool = False) -> tuple[Any, Any]:
    """Read one client's samples as the data that a model was trained on."""
    return sources.read_client(
        data,
        label=label,
        class_names=facts["class_names"],
        tokens=facts["tokens"],
        features=facts["feature_names"],
        alone=alone,
    )


def _settings(pairs: list[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise PefllError(f"--set takes NAME=VALUE, not {pair!r}")
        settings[name.strip()] = value.strip()
    return settings


def _client_row(one: run.ClientScore, mask_labels: bool) -> dict[str, Any]:
    right = one.masked if mask_labels else one.correct
    accuracy = f"{right / one.samples:.6f}" if one.samples else ""
    return one._asdict() | {"seen": int(one.seen), "accuracy": accuracy}


def _accuracy_table(groups: dict[str, Any], title: str, measures: tuple[str, ...] = MEASURES) -> Table:
    words = {"per_sample": "per sample", "per_client": "per client", "masked": "masked", "worst_tenth": "worst tenth"}
    table = Table("clients", *(words[measure] for measure in measures), title=title, title_justify="left")
    for name, values in groups.items():
        cells = ("—" if values is None else f"{100 * values[measure]:.1f}%" for measure in measures)
        table.add_row(name, *cells)
    return table


def _seeds_table(runs: list[run.Run]) -> Table:
    """Return a table with a row for each run and their mean ± standard deviation."""
    from pefll.report import mean_and_std

    def per_cent(values: list[float]) -> str:
        mean, std = mean_and_std(values) if values else (None, None)
        return "—" if mean is None else f"{mean:.1f}%" if std is None else f"{mean:.1f} ± {std:.1f}%"

    table = Table("seed", "best round", *GROUPS, title="Test accuracy at the best round", title_justify="left")
    columns: dict[str, list[float]] = {group: [] for group in GROUPS}
    for one in runs:
        cells = []
        for group, values in columns.items():
            score = one.summary["accuracy"]["best"][group]
            mine = [100 * score["per_sample"]] if score else []
            values += mine
            cells.append(per_cent(mine))
        table.add_row(str(one.config.seed), str(one.summary["best_round"]), *cells)
    table.add_row("mean", "", *map(per_cent, columns.values()))
    return table


def main() -> None:
    """Run the command line: one sentence and exit code 2 for anything the user can mend."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # verbs that save something say so, and end on their own
            say(err, "stopped before there was anything to save")
        sys.exit(code)
    except PefllError as error:
        sentence = str(error)
    except UsageError as error:
        sentence = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    except torch.cuda.OutOfMemoryError:
        sentence = "the GPU's memory is full; use fewer clients per round, or another device"
    if sentence:  # without a verb, the help was shown instead
        err.print(f"error: {escape(sentence)}", style="red", highlight=False, soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
