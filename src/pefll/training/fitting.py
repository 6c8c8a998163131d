"""From a federation to trained runs, one or several at once."""

from __future__ import annotations

import dataclasses
import warnings
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
from pefll.core.progress import Display, display, say
from pefll.core.signals import Signals, Stopped, stop_signals
from pefll.data.federation import Federation, check_is_federation
from pefll.data.ranges import out_of_proportion
from pefll.engines.cohort import Engine
from pefll.engines.device_queue import queue_of
from pefll.engines.hardware import open_engine
from pefll.methods import BaseMethod, method_name, method_value, typed_settings
from pefll.runs import checkpoint
from pefll.runs.claim import claimed
from pefll.runs.config import Config
from pefll.runs.progress import restore
from pefll.runs.record import seed_folder
from pefll.training.callbacks import (
    ActiveRun,
    Callback,
    History,
    ProgressBar,
    check_callbacks,
)
from pefll.training.loop import train
from pefll.training.resolve import RunSpec, resolve, resolve_for
from pefll.training.round_robin import ScheduledRun, Turns, round_robin
from pefll.training.run import Run, method_template
from pefll.training.summary import summary_of, write_descriptors

Ended: TypeAlias = Callable[[RunSpec, Run], None]  # told of each run as it ends


def fit(
    federation: Federation,
    method: str | type | BaseMethod = "pefll",
    *,
    model: str | nn.Module = "auto",
    rounds: int = 1000,
    seed: int = 0,
    out: str | Path | None = None,
    console: Console | None = None,
    config: Config | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Run:
    """Train a method on a federation.

    Args:
        federation: who has what.
        method: a value such as `pefll.PeFLL(client_lr=0.02)`, a key of `pefll.METHODS`, or its class; or your own, as a
            value of a `BaseMethod` or as package.module:Class.
        model: what clients run: a name (auto, lenet, cnn, mlp, package.module:function) or any `nn.Module` that maps
            samples to one score per class.
        rounds: of training.
        seed: of everything random.
        out: a folder for the run; where it holds a run with the same settings, that one is resumed if it is unfinished,
            and else returned as it was recorded.
        console: shows progress; None for silence.
        config: all settings at once, instead of the arguments above. It may come from a file, so that code of your own
            that it names is named in `method` or `model` too.
        callbacks: are told what happens, such as `pefll.EarlyStopping()`; see `pefll.Callback`.
        settings: fields of `Config` (clients_per_round, device, eval_every, ...) or hyper-parameters of the method.

    Returns:
        The run, with the state of the round that was best on seen clients' validation samples.
    """
    _check_asked(federation, model)
    method, settings = _named(method, settings)
    allow(method, model)
    out, callbacks = _checked_places(out, console), check_callbacks(callbacks)
    if config is None:
        config = _config(federation, method, model, rounds, seed, settings)
    elif not isinstance(config, Config):
        raise PefllError(
            f"config is {arguments.shown(config)}; it must be a pefll.runs.config.Config, or left away for settings as "
            "arguments, such as rounds=100",
            code="PEFLL-A017",
        )
    return fit_together([resolve(config, federation, out, model=model)], console, callbacks)[0]


def fit_seeds(
    federation: Federation | Callable[[int], Federation],
    method: str | type | BaseMethod = "pefll",
    *,
    seeds: Sequence[int],
    model: str | nn.Module = "auto",
    rounds: int = 1000,
    out: str | Path | None = None,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> list[Run]:
    """Train a method with several seeds at once; each run is what `fit` makes of its seed alone.

    On a GPU this takes less time than one run after another, because a run of few clients does not fill the device.

    Args:
        federation: who has what: the same for all, or a function that makes it for a seed.
        method: see `fit`.
        seeds: one per run, all different.
        model: see `fit`.
        rounds: see `fit`.
        out: a folder for the runs, each in a folder seed-N of its own; see `fit` for those that are there.
        console: see `fit`.
        callbacks: see `fit`; all runs share them.
        settings: see `fit`.

    Returns:
        The runs, in the order of the seeds.

    Raises:
        RunsFailed: when a run diverged, after the others have finished; it has their runs.
        Stopped: after Ctrl-C, SIGTERM or the end of the terminal, with a checkpoint of each run written.
    """
    seeds = [arguments.whole_number(seed, "a seed", 0) for seed in arguments.listed(seeds, "seeds", "[0, 1, 2]")]
    if not seeds or len(set(seeds)) < len(seeds):
        raise PefllError("seeds must be different from each other, and there must be at least one", code="PEFLL-T104")
    method, settings = _named(method, settings)
    allow(method, model)
    out, callbacks = _checked_places(out, console), check_callbacks(callbacks)
    specs = []
    for seed in seeds:
        data = federation(seed) if callable(federation) else federation
        _check_asked(data, model)
        config = _config(data, method, model, rounds, seed, settings)
        folder = None if out is None else seed_folder(Path(out), seed)
        specs.append(resolve(config, data, folder, model=model, runs=len(seeds)))
    return fit_together(specs, console, callbacks)


class RunsFailed(PefllError):
    """Some of the runs that were trained together failed.

    Attributes:
        runs: those that did not.
        errors: the others' errors, by seed.
    """

    def __init__(self, runs: list[Run], errors: dict[int, PefllError]) -> None:
        reasons = "; ".join(f"seed {seed}: {error}" for seed, error in errors.items())
        super().__init__(f"{len(errors)} of {len(runs) + len(errors)} runs failed: {reasons}", code="PEFLL-T126")
        self.runs, self.errors = runs, errors


def fit_together(
    specs: Sequence[RunSpec], console: Console | None = None, callbacks: Sequence[Callback] = ()
) -> list[Run]:
    """Train several runs at once; see `fit_seeds`."""
    outcomes = train_all(specs, console, callbacks=callbacks)
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
    ended: Ended | None = None,
    seconds: float | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[Run | PefllError | Stopped]:
    """Train several runs at once and return, for each, the run or why there is none.

    An engine is opened for each run, then the runs take turns. Finished ones are neither trained nor tested again.

    Args:
        specs: what to train.
        console: see `fit`.
        ended: told of each run as it ends, while others may still go on.
        seconds: after which runs are stopped as by a signal, with a checkpoint of each; None for never.
        callbacks: see `fit`.
    """
    jobs: list[ScheduledRun] = []
    copies: dict[object, Tensor] = {}  # of samples on a GPU: runs that differ by their seed have the same
    unfinished = [spec for spec in specs if spec.finished is None]
    with ExitStack() as stack:
        # Engines are closed all at the end, the last one first: each gives back torch's settings as it found them.
        engines = [
            stack.enter_context(
                open_engine(
                    spec.hardware, spec.federation, spec.method, spec.config.seed, spec.clients_per_round, copies
                )
            )
            for spec in unfinished
        ]
        # Only now, so that settings that cannot be run leave no folder behind.
        stack.enter_context(claimed(unfinished, partial(say, console) if console else lambda sentence: None))
        screen = stack.enter_context(display(console))
        asked_to_stop = stack.enter_context(stop_signals(seconds, partial(say, console) if console else None))
        for spec, engine in zip(unfinished, engines, strict=True):
            notes = out_of_proportion(spec.federation)  # clients and columns with values that are too large
            if console is None and spec.precision_note:
                notes = [f"training in float32: {spec.precision_note}", *notes]
            for note in [spec.headline, *notes] if console else notes:
                say(console, note) if console else warnings.warn(note, stacklevel=2)
            turns = _fitting(spec, engine, callbacks, screen, asked_to_stop, len(unfinished), ended)
            jobs.append(ScheduledRun(turns, queue_of(engine).turn))
        for place, spec in enumerate(specs):  # the first place first, so that each comes to its own
            if spec.finished is not None:
                if console and spec.folder:
                    say(console, f"{spec.folder.path} was finished already, and nothing is done again")
                jobs.insert(place, ScheduledRun(_recorded(spec, spec.finished, ended), nullcontext))
        return round_robin(jobs)


def fit_on(
    engine: Engine, config: Config, out: str | Path | None = None, console: Console | None = None, maps: bool = True
) -> Run:
    """Train on an engine that is open already, such as one whose clients are on other machines.

    Args:
        engine: reaches the clients.
        config: all settings.
        out: a folder for the run; where it holds an unfinished run with the same settings, that one is resumed.
        console: shows progress; None for silence.
        maps: whether clients' descriptors are kept for the descriptor map.
    """
    spec = resolve_for(engine, config, out, maps)
    with claimed([spec], lambda sentence: None):
        if console:
            say(console, spec.headline)
        with display(console) as screen, stop_signals(tell=partial(say, console) if console else None) as asked_to_stop:
            turns = _fitting(spec, engine, (), screen, asked_to_stop, 1)
            (outcome,) = round_robin([ScheduledRun(turns, queue_of(engine).turn)])
    if isinstance(outcome, BaseException):
        raise outcome
    made: Run = outcome
    return made


def _recorded(spec: RunSpec, saved: checkpoint.Checkpoint, ended: Ended | None) -> Turns[Run]:
    """Return the finished run that a spec's folder holds, after one turn in which nothing is done."""
    assert spec.folder is not None
    yield
    template = method_template(spec.method, spec.config)
    best, final = (restore(template, saved.tensors, part) for part in ("best", "server"))
    summary, history = spec.folder.summary() or {}, spec.folder.history()
    made = Run(spec.config, spec.method, best, final, spec.facts, summary, spec.federation, history)
    if ended is not None:
        ended(spec, made)
    return made


def _fitting(
    spec: RunSpec,
    engine: Engine,
    callbacks: Sequence[Callback],
    screen: Display,
    asked_to_stop: Signals,
    together: int,
    ended: Ended | None = None,
) -> Turns[Run]:
    """Train and test one run, in turns with others."""
    run = ActiveRun(spec)
    try:
        with screen.line(spec.title, spec.config.rounds) as bar:
            told = [History(), *callbacks, ProgressBar(bar)]
            try:
                progress = yield from train(engine, run, told, bar.say, asked_to_stop, together)
            except PefllError as problem:
                error = _with_cause(problem, spec.federation)
                if together > 1:  # said now, because the others may go on for long
                    bar.say(f"{spec.label or f'seed {spec.config.seed}'} failed: {error}")
                raise error from problem
        summary = summary_of(engine, run, progress, screen, asked_to_stop)
        if spec.folder:
            if spec.maps and not spec.tunes:
                write_descriptors(engine, spec.method, progress.best, spec.federation, spec.folder)
            spec.folder.write_summary(summary)
        run.summary = summary
    finally:
        for each in callbacks:
            each.on_end(run)
    made = Run(
        spec.config, spec.method, progress.best, progress.server, spec.facts, summary, spec.federation, run.history
    )
    if ended is not None:
        ended(spec, made)
    return made


def _with_cause(error: PefllError, federation: Federation) -> PefllError:
    """Return the error; where training diverged on data that is out of proportion, with that as its likely cause."""
    causes = out_of_proportion(federation) if isinstance(error, Diverged) else []
    return Diverged(f"{error.args[0]}, but first look at the data: {causes[0]}", error.code) if causes else error


def _check_asked(federation: Any, model: Any) -> None:
    """Raise PefllError for what is easily given in place of a federation or of a model."""
    check_is_federation(federation)
    if isinstance(model, type):
        raise PefllError(
            f"the model is a class, {model.__name__}; give one that is made, such as {model.__name__}(...)",
            code="PEFLL-T105",
        )
    if not isinstance(model, str | nn.Module):
        raise PefllError(
            f"the model must be a name or a torch.nn.Module, not a {type(model).__name__}", code="PEFLL-T106"
        )


def _checked_places(out: Any, console: Any) -> Path | None:
    """Return the folder for a run; PefllError for what is no path, or where progress is to be shown on no console."""
    if console is not None and not isinstance(console, Console):
        raise PefllError(
            f"console is {arguments.shown(console)}; it must be a rich.console.Console, or None for silence",
            code="PEFLL-A018",
        )
    return None if out is None else arguments.path(out, "out")


def _named(method: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a method's name, and all settings; of a method that is a value, its hyper-parameters are among these."""
    named, own = method_value(method)
    if own and (twice := own.keys() & settings.keys()):
        raise PefllError(f"{min(twice)} is given twice, in the method and beside it; give it once", code="PEFLL-T128")
    return named, own | settings


def _config(
    federation: Federation, method: Any, model: str | nn.Module, rounds: int, seed: int, settings: dict[str, Any]
) -> Config:
    method = method_name(method)
    names = {each.name for each in dataclasses.fields(Config)}
    for name in ("data", "data_dir", "partition", "clients", "unseen", "data_sha256"):
        if name in settings:
            raise PefllError(
                f"{name} belongs to the federation, which is made before it is given to fit", code="PEFLL-T107"
            )
    for name in ("settings", "seed"):  # the second where several seeds are trained
        if name in settings:
            raise PefllError(
                f"{name} is no argument here: give hyper-parameters one by one, such as local_steps=10, and seeds as "
                "seeds=[0, 1]",
                code="PEFLL-A023",
            )
    return Config(
        method=method,
        data=federation.name,
        partition=federation.partition,
        clients=federation.num_clients,
        unseen=federation.num_unseen / federation.num_clients,
        model=model if isinstance(model, str) else type(model).__qualname__,
        rounds=rounds,
        seed=seed,
        settings=typed_settings(method, {key: value for key, value in settings.items() if key not in names}),
        **{key: value for key, value in settings.items() if key in names},
    )
