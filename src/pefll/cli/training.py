"""`pefll train`: trains new runs, several seeds at once, and resumes runs."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pefll import data as sources
from pefll.cli.console import INTERRUPTED, err, out
from pefll.cli.options import (
    Drop,
    Encode,
    Features,
    MinSamples,
    Missing,
    TimeColumn,
    Treat,
    UnseenClients,
    own_code,
    parse_seeds,
    parse_settings,
)
from pefll.cli.tables import best_table, seeds_table
from pefll.core.errors import PefllError
from pefll.core.plugins import allow
from pefll.core.progress import say
from pefll.core.signals import Stopped
from pefll.core.wording import first_few, without_samples
from pefll.methods import typed_settings
from pefll.models.own import GIVEN
from pefll.models.spec import spec_of_checkpoint
from pefll.runs import federations, manifest
from pefll.runs.claim import finished_state
from pefll.runs.config import Config
from pefll.runs.record import RunFolder, run_folders, seed_folder
from pefll.tasks.names import allow_task, task_text
from pefll.training import fitting
from pefll.training.callbacks import EarlyStopping
from pefll.training.loggers import loggers_of
from pefll.training.resolve import resolve


def train(
    method: Annotated[
        str | None,
        typer.Option(help="A method (see `pefll methods`), or your own: package.module:Class. [default: pefll]"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A data set (`pefll data list`) or a path: .npz, .csv, .parquet, or a folder client/class/*.png."
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The folder of data sets. [default: data]")] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="How samples are split among clients: 'by-class K' (K classes each), 'dirichlet A', 'dirichlet A/B' "
            "(B for new clients), 'natural' (as in the data). "
            "[default: the data's]"
        ),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Number of clients, seen and unseen together. [default: the data's]")
    ] = None,
    unseen: Annotated[
        float | None, typer.Option(help="Share of clients that take no part in training. [default: 0.1]")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The client model: auto (by the samples' shape), lenet, cnn, resnet20, mlp, tiny, lstm, or "
            "your.module:function. [default: auto]"
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="What labels are: classification, regression, multilabel, or your.module:Class. Settings follow, as "
            "in 'regression loss_name=huber' or 'classification own_loss=your.module:function'. "
            "[default: what fits the labels]"
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training. [default: 1000]")] = None,
    clients_per_round: Annotated[int | None, typer.Option(help="Clients in a round. [default: 5% of all]")] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            help="Which clients a round has: uniform, samples (in proportion to their numbers of training samples), or "
            "your.module:function. [default: uniform]"
        ),
    ] = None,
    prior_clients: Annotated[
        float | None,
        typer.Option(
            help="Share of the seen clients in the first rounds. Their state is kept as the prior of PAC-Bayes bounds, "
            "which the other clients make useful: see `pefll certify`. [default: 0, no prior]"
        ),
    ] = None,
    prior_rounds: Annotated[
        int | None, typer.Option(help="Number of these first rounds. [default: half of the rounds]")
    ] = None,
    lr_schedule: Annotated[
        str | None,
        typer.Option(
            help="Schedule of the clients' learning rates: constant, cosine, 'step 300 0.1' (times 0.1 after each 300 "
            "rounds), or your.module:function of the round. [default: constant]"
        ),
    ] = None,
    server_lr_schedule: Annotated[
        str | None, typer.Option(help="Schedule of the server's learning rates. [default: constant]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of all random numbers. [default: 0]")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Several seeds, such as 0,1,2, trained at once into OUT/seed-0, OUT/seed-1 and so on. Results are "
            "the same as for one seed after another, but on a GPU it is faster."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="serial (clients one by one, in processes) or vector (clients at once). [default: auto]"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. [default: auto]")] = None,
    precision: Annotated[
        str | None, typer.Option(help="auto (tf32 on a GPU), float32, tf32, bf16 or float64. [default: auto]")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes of the serial engine; 0 for one per core. [default: 0]")
    ] = None,
    eval_every: Annotated[int | None, typer.Option(help="Rounds between evaluations. [default: 30]")] = None,
    eval_clients: Annotated[
        int | None, typer.Option(help="Clients per evaluation in training. [default: a share that costs little]")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Rounds between checkpoints. [default: 1000]")] = None,
    checkpoint_minutes: Annotated[
        float | None, typer.Option(help="Minutes after which a checkpoint is written, too. [default: 5]")
    ] = None,
    early_stopping: Annotated[
        int | None,
        typer.Option(
            help="End the run when its validation metric has not improved for this many evaluations.",
            metavar="EVALUATIONS",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A hyper-parameter of the method, NAME=VALUE; may be repeated. See `pefll methods`."
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="Name of the label column in a table, or of the array in an .npz; several columns with commas between "
            "them. [default: label; in an .npz, y]"
        ),
    ] = None,
    client_column: Annotated[
        str | None, typer.Option(help="Name of the client column in a table or .npz. [default: client]")
    ] = None,
    features: Features = None,
    drop: Drop = None,
    treat: Treat = None,
    encode: Encode = None,
    missing: Missing = None,
    min_samples: MinSamples = None,
    time_column: TimeColumn = None,
    unseen_clients: UnseenClients = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="A new folder for the run. [default: runs/DATA-METHOD-SEED]")
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            help="Loggers, with commas between them: tensorboard, trackio, wandb. Each needs its package: "
            "`pip install trackio`."
        ),
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="The same as `--log tensorboard`.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Resume the run in this folder, or all its seeds. More --rounds extend a finished run.",
            metavar="RUN",
        ),
    ] = None,
) -> None:
    """Train a method on a federation. Ctrl-C saves and stops; `--resume` continues.

    For example:

    - `pefll train --data digits --rounds 300 --out runs/first`

    - `pefll train --data cifar10 --clients 100 --rounds 5000 --seed 0 --out runs/c10`

    - `pefll train --data cifar10 --clients 100 --rounds 5000 --seeds 0,1,2 --out runs/c10`

    - `pefll train --data cifar100 --clients 100 --rounds 5000 --set embedding=linear --out runs/c100`

    - `pefll train --data digits --lr-schedule cosine --early-stopping 10 --log tensorboard`

    - `pefll train --data my.csv --label y --client-column writer --method local`

    - `pefll train --data prices.csv --label price --client-column city --task regression`

    - `pefll train --resume runs/c10`

    - `pefll train --resume runs/c10 --rounds 8000`
    """
    given: dict[str, Any] = {
        "method": method,
        "data": data,
        "data_dir": None if data_dir is None else str(data_dir),
        "partition": partition,
        "clients": clients,
        "unseen": unseen,
        "model": model,
        "task": task,
        "rounds": rounds,
        "clients_per_round": clients_per_round,
        "sampling": sampling,
        "prior_clients": prior_clients,
        "prior_rounds": prior_rounds,
        "lr_schedule": lr_schedule,
        "server_lr_schedule": server_lr_schedule,
        "seed": seed,
        "engine": engine,
        "device": device,
        "precision": precision,
        "processes": processes,
        "eval_every": eval_every,
        "eval_clients": eval_clients,
        "checkpoint_every": checkpoint_every,
        "checkpoint_minutes": checkpoint_minutes,
        "label": label,
        "client_column": client_column,
        "features": features,
        "drop": drop,
        "treat": treat,
        "encode": encode,
        "missing": missing,
        "min_samples": min_samples,
        "time_column": time_column,
        "unseen_clients": unseen_clients,
        "settings": parse_settings(settings) if settings else None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    allow(*(given.get(name) for name in ("method", "model", "sampling", "lr_schedule", "server_lr_schedule")))
    allow_task(task)
    loggers = ",".join(name for name in ("tensorboard" if tensorboard else "", log or "") if name)
    callbacks, again = (loggers_of(loggers), f" --log {loggers}") if loggers else ([], "")
    if early_stopping is not None:
        callbacks.append(EarlyStopping(early_stopping))
        again += f" --early-stopping {early_stopping}"
    if seeds is not None and (seed is not None or resume is not None):
        raise PefllError(
            "--seeds is for new runs, without --seed; --resume RUN resumes all seeds in RUN",
            code="PEFLL-C015",
        )
    if resume is not None:
        if folder is not None:
            raise PefllError("--resume RUN continues in the folder RUN; leave out --out", code="PEFLL-C016")
        target, folders = resume, run_folders(resume)
        configs = [_resumed(each, given) for each in folders]
        if all(finished_state(each, config.rounds) for each, config in zip(folders, configs, strict=True)):
            more = f"; --rounds {2 * configs[0].rounds} would extend it" if configs[0].rounds else ""
            results = first_few(each.summary_file for each in folders)
            say(err, f"{target} was finished already, so nothing is trained: its results are in {results}{more}.")
            _print_results(folders, [each.summary() or {} for each in folders])
            say(out, f"Next: pefll show {target}")
            return
        for each, config in zip(folders, configs, strict=True):
            _check_resumable(each, config)
    else:
        if "data" not in given:
            raise PefllError(
                "name the data to train on: --data digits needs no file, `pefll data list` shows the others",
                code="PEFLL-C017",
            )
        if given["data"] not in sources.DATASETS and Path(given["data"]).exists():
            given["data"] = str(Path(given["data"]).resolve())  # so that commands in other folders find it
        if unseen_clients:
            given["unseen_clients"] = federations.kept_names(unseen_clients)
        config = Config(**given)
        config = dataclasses.replace(config, settings=typed_settings(config.method, config.settings))
        name = f"{Path(config.data).stem}-{config.method}".replace(":", "-")
        if seeds is None:
            target = folder or _free(Path("runs") / f"{name}-{config.seed}")
            configs, folders = [config], [RunFolder(target)]
        else:
            target = folder or _free(Path("runs") / name)
            configs = [dataclasses.replace(config, seed=number) for number in parse_seeds(seeds)]
            folders = [RunFolder(seed_folder(target, each.seed)) for each in configs]
        there = [RunFolder(each) for each in (target, *target.glob("seed-[0-9]*"))]
        if any(each.config_file.exists() and not each.is_untrained() for each in there):
            raise PefllError(
                f"{target} holds a run already: resume it with `pefll train --resume {target}`, or choose another "
                "--out",
                code="PEFLL-C018",
            )
    specs = [
        resolve(
            dataclasses.replace(config, partition=federation.partition, clients=federation.num_clients),
            federation,
            each.path,
            runs=len(configs),
        )
        for config, federation, each in zip(configs, federations.federations_of(configs, err), folders, strict=True)
    ]
    try:
        trained = fitting.runs_or_error(specs, fitting.train_all(specs, err, callbacks=callbacks))
    except Stopped as stopped:
        say(err, f"{_saved(stopped, len(specs))} Go on with: {_resume_command(target, configs[0], again)}")
        sys.exit(128 + stopped.signal)
    except KeyboardInterrupt:
        if not any(manifest.newest_first(each.checkpoints) for each in folders):
            raise
        say(err, f"Stopped at once. Go on from the last checkpoint with: {_resume_command(target, configs[0], again)}")
        sys.exit(INTERRUPTED)
    except fitting.RunsFailed as failed:
        if failed.runs:
            out.print(seeds_table([one.summary for one in failed.runs]))
        raise
    _print_results(folders, [one.summary for one in trained])
    federation = specs[0].federation
    if federation.num_untested:
        say(out, without_samples(federation.num_untested, federation.num_clients, "test"))
    if federation.num_untested < federation.num_clients and not federation.num_unseen:
        say(
            out,
            "All clients took part in training, so none is unseen. With --unseen 0.3, three of ten do not.",
        )
    say(out, f"Next: pefll show {target}")


def _resume_command(folder: Path, config: Config, again: str) -> str:
    """Return the command that goes on with a run; `again` has the options that a run does not keep."""
    code = own_code(
        config.settings,
        method=config.method,
        model=config.model,
        task=config.task,
        sampling=config.sampling,
        lr_schedule=config.lr_schedule,
        server_lr_schedule=config.server_lr_schedule,
    )
    return f"pefll train --resume {folder}{code}{again}"


def _saved(stopped: Stopped, runs: int) -> str:
    """Return a sentence that says what is saved; `stopped` is about the run with the fewest rounds."""
    if stopped.testing and not stopped.round:
        which = "The run starts" if runs == 1 else "Unfinished seeds start"
        return f"{which} from the beginning next time: this method trains during the test, which is not saved."
    who, least = ("Saved", "") if runs == 1 else ("Each seed is saved", " or later")
    again = " Training has finished; only the test must be repeated." if stopped.testing else ""
    return f"{who} after round {stopped.round}{least}.{again}"


def _check_resumable(folder: RunFolder, config: Config) -> None:
    """Raise PefllError if a run's data or model was given in Python: the command line cannot find it."""
    newest = manifest.newest(folder.checkpoints)
    model = spec_of_checkpoint(newest.metadata, folder.path).model if newest else None
    networks = [name for name, value in config.settings.items() if isinstance(value, str) and value.endswith(GIVEN)]
    given = [
        *(["data"] if federations.data_of_python(config) else []),
        *(["a model"] if model == "" else []),
        *(f"its {name}" for name in networks),
    ]
    if given:
        raise PefllError(
            f"{folder.path} was trained on {' and '.join(given)} given in Python; go on in Python, with "
            f"pefll.fit(federation, ..., out={str(folder.path)!r})",
            code="PEFLL-C019",
        )


def _resumed(folder: RunFolder, given: dict[str, Any]) -> Config:
    """Return the config of a folder's run, changed by the given options; PefllError if these do not fit."""
    folder.check_is_run()
    started = Config.load(folder.config_file, folder.trained_with())
    if "settings" in given:
        given = given | {"settings": started.settings | typed_settings(started.method, given["settings"])}
    config = dataclasses.replace(started, **given)
    if "task" in given:
        # A user names the code again, or writes the same settings in another way.
        same = started.task.split()[:1] == [given["task"]] or task_text(given["task"]) == started.task
        config = dataclasses.replace(config, task=started.task if same else config.task)
    started.check_same(config)
    return config


def _print_results(folders: list[RunFolder], summaries: list[dict[str, Any]]) -> None:
    """Print the test accuracies of one run, or of several seeds."""
    if len(summaries) > 1:
        out.print(seeds_table(summaries))
        return
    (summary,) = summaries
    if summary["rounds"]:
        say(out, f"{folders[0].path}: best round {summary['best_round']} of {summary['rounds']}")
    out.print(best_table(summary))


def _free(folder: Path) -> Path:
    """Return the folder, with a number after its name if it exists already."""
    if not folder.exists():
        return folder
    return next(path for number in itertools.count(2) if not (path := Path(f"{folder}-{number}")).exists())
