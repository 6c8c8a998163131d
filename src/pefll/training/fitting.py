"""`fit` and `fit_seeds`: train a method on a federation, as one run or several at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from torch import Tensor, nn

from pefll.core import arguments
from pefll.core.errors import Diverged, PefllError
from pefll.core.plugins import allow
from pefll.core.progress import Display, Monitor, display, say
from pefll.core.schedules import Schedule
from pefll.core.signals import Signals, Stopped, stop_signals
from pefll.core.warning import warn
from pefll.data.federation import Federation, check_is_federation
from pefll.data.label_report import columns_report, label_sentence, rare_classes
from pefll.data.ranges import out_of_proportion
from pefll.engines.cohort import Engine
from pefll.engines.device_queue import queue_of
from pefll.engines.hardware import open_engine
from pefll.engines.round_plan import Sampling
from pefll.methods import BaseMethod, method_name, method_value, split_networks, typed_settings
from pefll.runs import checkpoint
from pefll.runs.claim import claimed
from pefll.runs.config import OF_TABLES, Config
from pefll.runs.progress import restore, restore_prior, start_or_resume
from pefll.runs.record import seed_folder
from pefll.tasks import Task
from pefll.tasks.checking import direction_note
from pefll.tasks.names import allow_task, checked_task
from pefll.training.callbacks import ActiveRun, Callback, EarlyStopping, Guarded, History, ProgressBar, check_callbacks
from pefll.training.estimate import Told, advice, before_first_round
from pefll.training.evaluation import Measure, why_not_evaluated
from pefll.training.loop import local_steps, train
from pefll.training.most_frequent import hardly_better
from pefll.training.resolve import RunSpec, resolve, resolve_for
from pefll.training.round_robin import ScheduledRun, Turns, round_robin
from pefll.training.run import Run, method_template
from pefll.training.summary import summary_of, write_descriptors

OnRunEnd: TypeAlias = Callable[[RunSpec, Run], None]


def fit(
    federation: Federation,
    method: str | type | BaseMethod = "pefll",
    *,
    model: str | nn.Module = "auto",
    task: str | type | Task | None = None,
    rounds: int = 1000,
    seed: int = 0,
    out: str | Path | None = None,
    console: Console | None = None,
    config: Config | None = None,
    callbacks: Sequence[Callback] = (),
    lr_schedule: str | Schedule = "constant",
    server_lr_schedule: str | Schedule = "constant",
    sampling: str | Sampling = "uniform",
    **settings: Any,
) -> Run:
    """Train a method on a federation and return the run, with the state of its best round.

    The best round has the highest accuracy on seen clients' validation samples; for other tasks than classification,
    the best first metric of the task.

    Args:
        federation: the clients and their samples.
        method: an instance such as `pefll.PeFLL(client_lr=0.02)`, or a key or a class of `pefll.METHODS`. Your own
            method is an instance of a `BaseMethod`, or a name package.module:Class.
        model: the client model: a name (auto, lenet, cnn, mlp, package.module:function) or any `nn.Module` that maps
            samples to one score per class, or to the outputs of the task.
        task: what outputs mean: classification, regression or multilabel, perhaps with settings as in
            "regression loss_name=huber"; a value such as `pefll.Regression(loss_name="huber")`; or your own, a
            `BaseTask` or its name package.module:Class. By default it fits the labels.
        rounds: number of training rounds.
        seed: seed of all random numbers.
        out: a folder for the run. If it holds an unfinished run with the same settings, that run is resumed. A finished
            run is loaded and returned.
        console: shows progress; None for silence.
        config: all settings at once, in place of the arguments above. If it names a plug-in, pass the plug-in as
            `method` or `model` too, because a config may come from a file, which is not trusted.
        callbacks: called on events of the run, for example `pefll.EarlyStopping()`; see `pefll.Callback`.
        lr_schedule: schedule of the clients' learning rates: constant, cosine, "step 300 0.1", or a function that maps
            the number of a round to the factor of the rate.
        server_lr_schedule: schedule of the server's learning rates.
        sampling: which clients a round has: uniform; samples, in proportion to their numbers of training samples; or a
            function, see `pefll.engines.round_plan.Sampling`.
        settings: fields of `Config` (clients_per_round, device, eval_every, ...) or hyper-parameters of the method.
    """
    check_is_federation(federation)
    named, functions = names_and_functions(lr_schedule, server_lr_schedule, sampling)
    allow_task(task)
    value = checked_task(task)
    name, settings, networks, folder, callbacks = checked_arguments(method, model, settings, out, console, callbacks)
    if config is None:
        config = config_on(federation, name, model, rounds, seed, settings | named)
    elif not isinstance(config, Config):
        raise PefllError(
            f"config is {arguments.shown(config)}; give a pefll.runs.config.Config, or leave it out and give settings "
            "as arguments, such as rounds=100",
            code="PEFLL-A017",
        )
    elif named:
        config = dataclasses.replace(config, **named)
    specs = [resolve(config, federation, folder, model=model, task=value, networks=networks, functions=functions)]
    return runs_or_error(specs, train_all(specs, console, callbacks=callbacks))[0]


def fit_seeds(
    federation: Federation | Callable[[int], Federation],
    method: str | type | BaseMethod = "pefll",
    *,
    seeds: Sequence[int],
    model: str | nn.Module = "auto",
    task: str | type | Task | None = None,
    rounds: int = 1000,
    out: str | Path | None = None,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
    lr_schedule: str | Schedule = "constant",
    server_lr_schedule: str | Schedule = "constant",
    sampling: str | Sampling = "uniform",
    **settings: Any,
) -> list[Run]:
    """Train a method with several seeds at once and return the runs, in the order of the seeds.

    Each run equals the run that `fit` returns for its seed. On a GPU, this is faster than one run after another,
    because one run with few clients does not fill the device.

    Args:
        federation: one federation for all seeds, or a function that makes the federation of a seed.
        method: see `fit`.
        seeds: one per run, all different.
        model: see `fit`.
        task: see `fit`.
        rounds: see `fit`.
        out: a folder for the runs; each run has its own folder seed-N in it. See `fit` for runs that exist already.
        console: see `fit`.
        callbacks: see `fit`; all runs share them.
        lr_schedule: see `fit`.
        server_lr_schedule: see `fit`.
        sampling: see `fit`.
        settings: see `fit`.

    Raises:
        RunsFailed: if a run failed, after the others have finished. It holds the finished runs.
        Stopped: after Ctrl-C, SIGTERM or the end of the terminal; each run has written a checkpoint.
    """
    seeds = [arguments.whole_number(seed, "a seed", 0) for seed in arguments.listed(seeds, "seeds", "[0, 1, 2]")]
    if not seeds or len(set(seeds)) < len(seeds):
        raise PefllError("seeds must differ from each other; give at least one seed", code="PEFLL-T104")
    named, functions = names_and_functions(lr_schedule, server_lr_schedule, sampling)
    allow_task(task)
    value = checked_task(task)
    name, settings, networks, folder, callbacks = checked_arguments(method, model, settings, out, console, callbacks)
    specs = []
    for seed in seeds:
        data = federation(seed) if callable(federation) else federation
        check_is_federation(data)
        config = config_on(data, name, model, rounds, seed, settings | named)
        place = folder and seed_folder(folder, seed)
        given: dict[str, Any] = {"model": model, "task": value, "networks": networks, "functions": functions}
        specs.append(resolve(config, data, place, runs=len(seeds), **given))
    return runs_or_error(specs, train_all(specs, console, callbacks=callbacks))


class RunsFailed(PefllError):
    """Some of the runs that were trained at once failed.

    Attributes:
        runs: the successful runs.
        errors: the errors of the others, by seed.
    """

    def __init__(self, runs: list[Run], errors: dict[int, PefllError]) -> None:
        reasons = "; ".join(f"seed {seed}: {error}" for seed, error in errors.items())
        super().__init__(f"{len(errors)} of {len(runs) + len(errors)} runs failed: {reasons}", code="PEFLL-T126")
        self.runs, self.errors = runs, errors


def runs_or_error(specs: Sequence[RunSpec], outcomes: Sequence[Run | PefllError | Stopped]) -> list[Run]:
    """Return the runs among the outcomes of `train_all`; raise an error if a run failed or was stopped."""
    stopped = [outcome for outcome in outcomes if isinstance(outcome, Stopped)]
    if stopped:
        raise min(stopped, key=lambda one: (one.round, one.testing))
    runs = [outcome for outcome in outcomes if isinstance(outcome, Run)]
    seeds = [spec.config.seed for spec in specs]
    errors = {seed: bad for seed, bad in zip(seeds, outcomes, strict=True) if isinstance(bad, PefllError)}
    if errors and len(specs) == 1:
        raise errors[seeds[0]]
    if errors:
        raise RunsFailed(runs, errors)
    return runs


def train_all(
    specs: Sequence[RunSpec],
    console: Console | None = None,
    ended: OnRunEnd | None = None,
    seconds: float | None = None,
    callbacks: Sequence[Callback] = (),
    engine: Engine | None = None,
) -> list[Run | PefllError | Stopped]:
    """Train several runs at once and return, for each, the run or the error that ended it.

    Every run has its own engine, and the runs take turns. Finished runs are neither trained nor tested again.

    Args:
        specs: the runs to train.
        console: shows progress; None for silence.
        ended: called when a run ends, while others may still train.
        seconds: time limit, after which all runs stop with a checkpoint; None for no limit.
        callbacks: shared by all runs.
        engine: an open engine, if there is only one spec.
    """
    jobs: list[ScheduledRun] = []
    copies: dict[object, Tensor] = {}  # samples on a GPU, which the runs share
    tell = partial(say, console) if console else None
    unfinished = [spec for spec in specs if spec.finished is None]
    for stopping in [each for each in callbacks if isinstance(each, EarlyStopping)]:
        for spec in unfinished:
            why = (
                why_not_evaluated(spec.method, spec.federation, stopping.group) if spec.method.trains_in_rounds else ""
            )
            stopping.check(Measure.of(spec.method, spec.federation).names, why)
    with ExitStack() as stack:
        # The stack closes engines in reverse order: each engine restores the torch settings that it found.
        engines = [
            engine
            or stack.enter_context(
                open_engine(
                    spec.hardware,
                    spec.federation,
                    spec.method,
                    spec.config.seed,
                    spec.clients_per_round,
                    copies,
                    spec.plan,
                )
            )
            for spec in unfinished
        ]
        # Folders are made only now, so that invalid settings leave no folder behind.
        stack.enter_context(claimed(unfinished, tell or _ignore))
        for spec in unfinished:
            if spec.folder and spec.federation.table:
                spec.folder.write_columns(columns_report(spec.federation))
        screen = stack.enter_context(display(console))
        asked_to_stop = stack.enter_context(stop_signals(seconds, tell))
        engine_of = dict(zip(unfinished, engines, strict=True))
        for spec in specs:
            if spec.finished is not None:
                if tell and spec.folder:
                    tell(f"{spec.folder.path} is already finished; skipped")
                jobs.append(ScheduledRun(_load_finished(spec, spec.finished, ended), nullcontext))
                continue
            notes = out_of_proportion(spec.federation)  # values that are too large
            if direction := direction_note(spec.method.problem.task, spec.federation):
                notes = [direction, *notes]
            if tell is None and spec.precision_note:
                notes = [f"training in float32: {spec.precision_note}", *notes]
            if spec.federation.label_column and spec is specs[0]:
                notes = [*rare_classes(spec.federation), *notes]
                if tell and (sentence := label_sentence(spec.federation)):
                    notes = [sentence, *notes]
            if tell and spec.federation.table and spec is specs[0]:
                notes = [*spec.federation.table.sentences(), *notes]
            for note in [spec.headline, *notes] if tell else notes:
                tell(note) if tell else warn(note)
            turns = _train_and_test(
                spec, engine_of[spec], callbacks, screen, tell or _ignore, asked_to_stop, len(unfinished), ended
            )
            jobs.append(ScheduledRun(turns, queue_of(engine_of[spec]).turn))
        return round_robin(jobs)


def _ignore(sentence: str) -> None:
    """Print nothing, for a run without a console."""


def fit_on(
    engine: Engine, config: Config, out: str | Path | None = None, console: Console | None = None, maps: bool = True
) -> Run:
    """Train on an open engine, for example one with remote clients, and return the run.

    Args:
        engine: reaches the clients.
        config: all settings.
        out: a folder for the run; an unfinished run there with the same settings is resumed.
        console: shows progress; None for silence.
        maps: whether to write the clients' descriptors, for the descriptor map.
    """
    specs = [resolve_for(engine, config, out, maps)]
    return runs_or_error(specs, train_all(specs, console, engine=engine))[0]


def _load_finished(spec: RunSpec, saved: checkpoint.Checkpoint, ended: OnRunEnd | None) -> Turns[Run]:
    """Return the finished run in a spec's folder."""
    assert spec.folder is not None
    yield
    template = method_template(spec.method, spec.config, spec.model_spec.label_columns)
    best, final = (restore(template, saved.tensors, part) for part in ("best", "server"))
    summary, history = spec.folder.summary() or {}, spec.folder.history()
    prior = restore_prior(template, saved.tensors)
    run = Run(spec.config, spec.method, best, final, spec.model_spec, summary, spec.federation, history, prior)
    if ended is not None:
        ended(spec, run)
    return run


def _train_and_test(
    spec: RunSpec,
    engine: Engine,
    callbacks: Sequence[Callback],
    screen: Display,
    tell: Callable[[str], None],
    asked_to_stop: Signals,
    runs_at_once: int,
    ended: OnRunEnd | None,
) -> Turns[Run]:
    """Train and test one run, in turns with others."""
    active = ActiveRun(spec) if tell is _ignore else ActiveRun(spec, tell=tell)
    guarded = [Guarded(each) for each in callbacks]
    try:
        try:
            progress, active.history = start_or_resume(engine, spec.config, spec.folder, tell)
            progress.lockstep = max(progress.lockstep, runs_at_once)
            if progress.round:
                tell(f"{spec.title}: resuming after round {progress.round}")
            told = Told()
            if tell is not _ignore:
                steps = local_steps(spec.method, spec.federation)
                told = before_first_round(engine, spec, progress, steps, runs_at_once)
                if told.sentence:
                    stops_early = any(isinstance(each, EarlyStopping) for each in callbacks)
                    # A run that is resumed cannot be shortened.
                    more = "" if progress.round else advice(told, spec, runs_at_once, stops_early)
                    tell(f"{spec.title}: {told.sentence}{more}")
            # A method without rounds has no bar of rounds, only that of the test, in which its clients train.
            rounds = spec.config.rounds
            with screen.line(spec.title, rounds, progress.round) if rounds else Monitor() as bar:
                observers = [History(), *guarded, ProgressBar(bar)]
                yield from train(engine, active, progress, observers, tell, asked_to_stop, runs_at_once, told.of_round)
        except PefllError as problem:
            error = _with_cause(problem, spec.federation)
            if runs_at_once > 1:  # report it now, because the other runs may take long
                tell(f"{spec.label or f'seed {spec.config.seed}'} failed: {error}")
            raise error from (problem.__cause__ if error is problem else problem)
        summary = summary_of(engine, active, progress, screen, asked_to_stop)
        if spec.folder:
            if spec.maps and not spec.tunes:
                write_descriptors(engine, spec.method, progress.best, spec.federation, spec.folder)
            spec.folder.write_summary(summary)
        active.summary = summary
        if not spec.tunes and (note := hardly_better(spec.federation, active.history)):
            warn(note) if tell is _ignore else tell(f"{spec.title}: {note}")
    finally:
        for each in guarded:
            each.on_end(active)
    if active.failure is not None:  # in the last call: everything is written
        raise active.failure
    best, final = progress.best, progress.server
    data, history = spec.federation, active.history
    run = Run(spec.config, spec.method, best, final, spec.model_spec, summary, data, history, progress.prior)
    if ended is not None:
        ended(spec, run)
    return run


def _with_cause(error: PefllError, federation: Federation) -> PefllError:
    """Return the error; if training diverged on data with too large values, an error that names these values."""
    causes = out_of_proportion(federation) if isinstance(error, Diverged) else []
    return Diverged(f"{error.args[0]}, but first look at the data: {causes[0]}", error.code) if causes else error


def names_and_functions(
    lr_schedule: Any, server_lr_schedule: Any, sampling: Any
) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Return the settings that differ from their defaults, as texts, and the functions that the user gave for them.

    A run's config has the name module:function of a function. A resumed run needs the function again.
    """
    given = {"lr_schedule": lr_schedule, "server_lr_schedule": server_lr_schedule, "sampling": sampling}
    functions = {name: value for name, value in given.items() if callable(value)}
    names = {
        name: f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"
        for name, value in functions.items()
    }
    texts = {name: arguments.text(value, name) for name, value in given.items() if name not in functions}
    allow(*texts.values())
    defaults = {each.name: each.default for each in dataclasses.fields(Config)}
    return {name: value for name, value in (texts | names).items() if value != defaults[name]}, functions


def checked_arguments(
    method: Any, model: Any, settings: dict[str, Any], out: Any, console: Any, callbacks: Any
) -> tuple[Any, dict[str, Any], dict[str, Any], Path | None, list[Callback]]:
    """Return the method's class or name, all settings, networks given in Python, the run's folder, the callbacks."""
    if isinstance(model, type):
        raise PefllError(
            f"model is the class {model.__name__}; pass an instance, such as {model.__name__}(...)",
            code="PEFLL-T105",
        )
    if not isinstance(model, str | nn.Module):
        raise PefllError(
            f"model is a {type(model).__name__}; it must be a name or a torch.nn.Module", code="PEFLL-T106"
        )
    name, of_method = method_value(method)
    if twice := of_method.keys() & settings.keys():
        raise PefllError(f"{min(twice)} is set both in the method and as an argument; remove one", code="PEFLL-T128")
    allow(name, model, *of_method.values(), *settings.values())
    if console is not None and not isinstance(console, Console):
        raise PefllError(
            f"console is {arguments.shown(console)}; it must be a rich.console.Console, or None for silence",
            code="PEFLL-A018",
        )
    folder = None if out is None else arguments.path(out, "out")
    settings, networks = split_networks(method_name(name), of_method | settings)
    return name, settings, networks, folder, check_callbacks(callbacks)


def config_on(
    federation: Federation, method: Any, model: str | nn.Module, rounds: int, seed: int, settings: dict[str, Any]
) -> Config:
    """Return the config of a run on a federation that was made in Python."""
    method = method_name(method)
    names = {each.name for each in dataclasses.fields(Config)}
    of_data = ("data", "data_dir", "partition", "clients", "unseen", "data_sha256", *OF_TABLES)
    for name in of_data:
        if name in settings:
            raise PefllError(
                f"{name} belongs to the federation; give it to the function that makes the federation",
                code="PEFLL-T107",
            )
    for name in ("settings", "seed"):  # `fit_seeds` has no argument `seed`
        if name in settings:
            raise PefllError(
                f"{name} is not an argument here; give hyper-parameters one by one, such as local_steps=10, and seeds "
                "as seeds=[0, 1]",
                code="PEFLL-A023",
            )
    of_method = {key: value for key, value in settings.items() if key not in names}
    arguments_here = [*sorted(names.difference(of_data, ("settings",))), "out", "console", "callbacks"]
    return Config(
        method=method,
        data=federation.name,
        partition=federation.partition,
        clients=federation.num_clients,
        unseen=federation.num_unseen / federation.num_clients,
        model=model if isinstance(model, str) else type(model).__qualname__,
        rounds=rounds,
        seed=seed,
        settings=typed_settings(method, of_method, arguments_here),
        **{key: value for key, value in settings.items() if key in names},
    )
