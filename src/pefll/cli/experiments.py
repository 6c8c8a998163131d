"""`pefll demo`, `tune` and `cost`: experiments of many runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pefll import data as sources
from pefll.cli.console import err, out
from pefll.cli.options import (
    ClientColumn,
    Clients,
    DataDir,
    Drop,
    Encode,
    Features,
    Label,
    MinSamples,
    Missing,
    OwnMethods,
    OwnModels,
    Partition,
    TimeColumn,
    Treat,
    UnseenClients,
    parse_seeds,
    parse_settings,
)
from pefll.cli.stopped import advice_when_stopped
from pefll.core.files import check_folder
from pefll.core.plugins import allow
from pefll.core.progress import say
from pefll.methods import typed_settings
from pefll.runs import federations
from pefll.runs.config import Config
from pefll.tasks.names import allow_task, task_text

if TYPE_CHECKING:
    pass


def demo(
    folder: Annotated[Path, typer.Option("--out", help="The folder for runs and pictures.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(help="Number of seeds per method.")] = 3,
) -> None:
    """Compare Local, FedAvg and PeFLL on built-in data and make one personal model, in about a minute."""
    from pefll.experiments.demo import demo as run_demo

    run_demo(folder, seeds, out)


def tune(
    grid: Annotated[
        list[str], typer.Option("--grid", help="Values to try, NAME=VALUE,VALUE; repeat it to try all combinations.")
    ],
    data: Annotated[str, typer.Option(help="As in `pefll train`.")],
    method: Annotated[str, typer.Option(help="As in `pefll train`.")] = "pefll",
    data_dir: DataDir = Path("data"),
    partition: Partition = "",
    clients: Clients = 0,
    unseen: Annotated[float, typer.Option(help="As in `pefll train`.")] = 0.1,
    model: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    task: Annotated[str, typer.Option(help="As in `pefll train`.", show_default="what fits the labels")] = "",
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = 1000,
    clients_per_round: Annotated[int, typer.Option(help="As in `pefll train`.", show_default="5% of all")] = 0,
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0,1,2; every setting is tried with each.")] = "0",
    hold_out: Annotated[
        float,
        typer.Option(
            help="Share of seen clients that do not train; settings are chosen by their metric as new clients."
        ),
    ] = 0.0,
    judge: Annotated[
        str,
        typer.Option(
            help="With --hold-out: held-out, or both for the mean of their metric and that of clients that train."
        ),
    ] = "held-out",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A hyper-parameter that all trials share, NAME=VALUE; may be repeated."),
    ] = None,
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
    eval_every: Annotated[int, typer.Option(help="As in `pefll train`.")] = 30,
    engine: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    device: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    precision: Annotated[str, typer.Option(help="As in `pefll train`.")] = "auto",
    processes: Annotated[int, typer.Option(help="As in `pefll train`.")] = 0,
    at_once: Annotated[int, typer.Option(help="Number of runs that share the device.")] = 4,
    folder: Annotated[Path, typer.Option("--out", help="The folder for runs; stopped runs resume from it.")] = Path(
        "runs/tune"
    ),
    target: Annotated[Path, typer.Option("--to", help="The folder for the results of all trials.")] = Path(
        "results/tune"
    ),
) -> None:
    """Choose hyper-parameters by grid search: those with the best validation metric on seen clients.

    The metric is the first one of the task: the highest accuracy, or the lowest error of a regression.

    Test samples and unseen clients take no part in the choice. Settings that only new clients use (`new_lr`,
    `new_epochs`) are chosen with seen clients that are treated as new. To choose training settings that are good for
    new clients, use `--hold-out`: some seen clients then take no part in training.

    Trials are not repeated. After Ctrl-C, or to try more values, give the command again. All trials of a method on a
    federation are in one file, `results/tune/DATA-METHOD-nCLIENTS.json`. `pefll reproduce` uses the best trial. Trials
    with other data, code or fixed settings stay in the file, and do not count.
    Trials with `--hold-out` have a file of their own, which `pefll reproduce` prefers for the same number of clients.

    For example:

    - `pefll tune --data digits --method fedavg --grid client_lr=1e-3,1e-2,1e-1 --rounds 100`

    - `pefll tune --data cifar10 --clients 100 --grid client_lr=2e-3,5e-3 --grid server_lr=2e-4,5e-4 --seeds 0,1`

    - `pefll tune --data cifar100 --clients 100 --set embedding=linear --grid server_lr=2e-4,5e-4,1e-3`

    - `pefll tune --data cifar10 --clients 100 --method pfedhn --set server_lr=0.03 --grid new_lr=0.1,0.3,1,3`

    - `pefll tune --data cifar10 --clients 100 --method pefll-prior --grid descriptor_size=1,4,26 --hold-out 0.1`

    - `pefll tune --data prices.csv --label price --client-column city --task regression --grid client_lr=1e-3,1e-2`
    """
    from pefll.experiments import grid_search as search
    from pefll.experiments.trials import trials_table

    allow(method, model)
    allow_task(task or None)
    config = Config(
        method=method,
        task=task_text(task) if task else "",
        settings=typed_settings(method, parse_settings(settings or [])),
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
        label=label,
        client_column=client_column,
        features=features or "",
        drop=drop or "",
        treat=treat or "",
        encode=encode or "auto",
        missing=missing or "impute",
        min_samples=1 if min_samples is None else min_samples,
        time_column=time_column or "",
        unseen_clients=federations.kept_names(unseen_clients or ""),
    )
    wanted = search.Search(config, search.parse_grid(method, grid), tuple(parse_seeds(seeds)), hold_out, judge)
    with advice_when_stopped(folder, target):
        trials = search.run_search(wanted, folder, target, at_once, err)
    out.print(trials_table(trials, wanted.seeds))
    for sentence in search.advice(trials, wanted):
        say(out, sentence)
    say(out, f"wrote {trials.path}")


def cost(
    paths: Annotated[
        list[Path], typer.Argument(help="Finished run folders, result files, or a folder of results.", metavar="RUN...")
    ],
    data_dir: Annotated[Path | None, typer.Option(help="The folder of data sets, if it has moved.")] = None,
    target: Annotated[Path | None, typer.Option("--out", help="Also write OUT.md and OUT.csv.", metavar="OUT")] = None,
    model: OwnModels = None,
    method: OwnMethods = None,
) -> None:
    """Show what a new client's model costs with each method: exchanges, bytes, FLOPs and seconds.

    The cost is measured now, on one core, for the unseen client with the median number of samples. Nothing is trained,
    except what the method lets a new client train.

    For example:

    - `pefll cost runs/c10 runs/c10-fedavg`

    - `pefll cost results --out results/cost`
    """
    from pefll.experiments import costs
    from pefll.experiments.results import no_results

    allow(*(model or ()), *(method or ()))
    if target is not None:
        check_folder(target.parent)
    found = costs.read_any(paths)
    if not found:
        raise no_results(paths[0])
    rows = costs.method_costs(found, data_dir, err)
    for table in costs.new_client_tables(rows):
        out.print(table)
    for path in costs.write_costs(rows, target) if target is not None else []:
        say(out, f"wrote {path}")
