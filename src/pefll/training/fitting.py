"""From a federation to trained runs, one or several at once."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from pefll.core import arguments
from pefll.core.errors import Diverged, PefllError
from pefll.core.files import is_temporary
from pefll.core.named import allow
from pefll.core.progress import Display, display, say
from pefll.core.wording import argument
from pefll.data.federation import Federation, check_is_federation
from pefll.data.ranges import out_of_proportion
from pefll.engines.cohort import Engine
from pefll.methods import build_method, method_name, typed_settings
from pefll.methods.contract import Method
from pefll.models.probe import check_same_model
from pefll.runs import checkpoint, manifest
from pefll.runs.checksums import new_run
from pefll.runs.config import Config
from pefll.runs.facts import check_problem
from pefll.runs.record import LOCK, RunFolder, rounds_of, seed_folder
from pefll.training.hardware import place_data
from pefll.training.lockstep import Job, Signals, Stopped, Turns, stop_signals, take_turns
from pefll.training.loop import train
from pefll.training.preparing import Order, check_memory, describe_problem, headline, opened, other_precision
from pefll.training.run import Run, method_template
from pefll.training.saving import restore
from pefll.training.summary import summary_of, write_descriptors


def fit(
    federation: Federation,
    method: str | type = "pefll",
    *,
    model: str | nn.Module = "auto",
    rounds: int = 1000,
    seed: int = 0,
    out: str | Path | None = None,
    console: Console | None = None,
    config: Config | None = None,
    **settings: Any,
) -> Run:
    """Train a method on a federation.

    Args:
        federation: who has what.
        method: a key of `pefll.METHODS`, or its class, such as `pefll.FedAvg`; or package.module:Class, your own.
        model: what clients run: a name (auto, lenet, cnn, mlp, package.module:function) or any `nn.Module` that maps
            samples to one score per class.
        rounds: of training.
        seed: of everything random.
        out: a folder for the run; where it holds a run with the same settings, that one is resumed if it is unfinished,
            and else returned as it was recorded.
        console: shows progress; None for silence.
        config: all settings at once, instead of the arguments above. It may come from a file, so that code of your own
            that it names is named in `method` or `model` too.
        settings: fields of `Config` (clients_per_round, device, eval_every, ...) or hyper-parameters of the method.

    Returns:
        The run, with the state of the round that was best on seen clients' validation samples.
    """
    _check_asked(federation, model)
    allow(method, model)
    out = _checked_places(out, console)
    if config is None:
        config = _config(federation, method, model, rounds, seed, settings)
    elif not isinstance(config, Config):
        raise PefllError(
            f"config is {arguments.shown(config)}; it must be a pefll.runs.config.Config, or left away for settings as "
            "arguments, such as rounds=100",
            code="PEFLL-A017",
        )
    return fit_together([Order(config, federation, out)], model, console)[0]


def fit_seeds(
    federation: Federation | Callable[[int], Federation],
    method: str | type = "pefll",
    *,
    seeds: Sequence[int],
    model: str | nn.Module = "auto",
    rounds: int = 1000,
    out: str | Path | None = None,
    console: Console | None = None,
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
    allow(method, model)
    out = _checked_places(out, console)
    orders = []
    for seed in seeds:
        data = federation(seed) if callable(federation) else federation
        _check_asked(data, model)
        config = _config(data, method, model, rounds, seed, settings)
        orders.append(Order(config, data, None if out is None else seed_folder(Path(out), seed)))
    return fit_together(orders, model, console)


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
    orders: Sequence[Order], model: str | nn.Module | None = None, console: Console | None = None
) -> list[Run]:
    """Train several runs at once; see `fit_seeds`."""
    outcomes = outcomes_of(orders, model, console)
    stopped = [outcome for outcome in outcomes if isinstance(outcome, Stopped)]
    if stopped:
        raise min(stopped, key=lambda one: (one.round, one.testing))
    runs = [outcome for outcome in outcomes if isinstance(outcome, Run)]
    seeds = [order.config.seed for order in orders]
    errors = {seed: bad for seed, bad in zip(seeds, outcomes, strict=True) if isinstance(bad, PefllError)}
    if errors and len(orders) == 1:
        raise errors[seeds[0]]
    if errors:
        raise RunsFailed(runs, errors)
    return runs


def outcomes_of(
    orders: Sequence[Order],
    model: str | nn.Module | None = None,
    console: Console | None = None,
    ended: Callable[[Order, Run], None] | None = None,
    seconds: float | None = None,
) -> list[Run | PefllError | Stopped]:
    """Train several runs at once and return, for each, the run or why there is none.

    An engine is opened for each order, then the runs take turns. Finished ones are neither trained nor tested again.

    Args:
        orders: what to train.
        model: see `fit`.
        console: see `fit`.
        ended: told of each run as it ends, while others may still go on.
        seconds: after which runs are stopped as by a signal, with a checkpoint of each; None for never.
    """
    jobs: list[Job] = []
    known: dict[int, Run] = {}  # finished runs, by their place among the orders
    copies: dict[object, Tensor] = {}  # of samples on a GPU: runs that differ by their seed have the same
    with ExitStack() as stack:
        # Engines are closed all at the end, the last one first: each gives back torch's settings as it found them.
        prepared = []
        for place, order in enumerate(orders):
            federation = order.federation
            config = dataclasses.replace(order.config, data_sha256=federation.fingerprint())
            problem, facts = describe_problem(federation, model if isinstance(model, nn.Module) else config.model)
            saved = _finished(order._replace(config=config), facts)
            if saved is None:  # to read a run takes less than to train it
                check_memory(config, federation, problem, len(orders))
            learner = build_method(config.method, problem, config.settings)
            if not learner.trains_in_rounds:
                config = dataclasses.replace(config, rounds=0)
            order = order._replace(config=config)
            saved = saved or _finished(order, facts)  # a method without rounds is finished after none
            if saved is not None:
                known[place] = _recorded(order, learner, facts, saved)
                continue
            data = place_data(config, federation, problem, copies)
            engine = stack.enter_context(opened(config, data, learner))
            prepared.append((order, engine, learner, facts))
        # Only now, so that settings that cannot be run leave no folder behind; and all before any is written to.
        for order, _, _, facts in prepared:
            _check_claim(order.out, order.config, facts)
            if console and order.out is not None and (age := RunFolder(Path(order.out)).note_of_age()):
                say(console, age)
        folders = [stack.enter_context(_held(order.out)) for order, *_ in prepared]
        for (order, _, _, facts), folder in zip(prepared, folders, strict=True):
            _claim(folder, order.config, facts)
        screen = stack.enter_context(display(console))
        asked_to_stop = stack.enter_context(stop_signals(seconds, partial(say, console) if console else None))
        for (order, engine, learner, facts), folder in zip(prepared, folders, strict=True):
            if console:
                say(console, headline(order.config, order.federation) + (f", into {folder.path}" if folder else ""))
            elif note := other_precision(order.config):
                warnings.warn(f"training in float32: {note}", stacklevel=2)
            _tell_of_ranges(order.federation, console)
            turns = _fitting(order, engine, learner, facts, folder, screen, asked_to_stop, len(prepared))
            jobs.append(Job(_told(turns, order, ended), engine.turn))
        for place, recorded in known.items():  # the first place first, so that each comes to its own
            if console:
                say(console, f"{orders[place].out} was finished already, and nothing is done again")
            jobs.insert(place, Job(_told(_at_once(recorded), orders[place], ended), nullcontext))
        return take_turns(jobs)


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
    federation = engine.federation
    _, facts = describe_problem(federation, config.model)
    if not engine.method.trains_in_rounds:
        config = dataclasses.replace(config, rounds=0)
    order = Order(config, federation, out, maps=maps)
    _check_claim(out, config, facts)
    with _held(out) as folder:
        _claim(folder, config, facts)
        if console:
            say(console, headline(config, federation) + (f", into {folder.path}" if folder else ""))
        with display(console) as screen, stop_signals(tell=partial(say, console) if console else None) as asked_to_stop:
            turns = _fitting(order, engine, engine.method, facts, folder, screen, asked_to_stop, 1)
            (outcome,) = take_turns([Job(turns, engine.turn)])
    if isinstance(outcome, BaseException):
        raise outcome
    made: Run = outcome
    return made


def finished_state(folder: RunFolder, rounds: int) -> checkpoint.Checkpoint | None:
    """Return a run's last state where it has its results and that state is whole: then nothing is left to do."""
    try:
        summary = folder.summary()
        if summary is None or rounds_of(summary) < rounds or summary.get("split", "test") != "test":
            return None
        folder.history()
        folder.check_other_files()
        saved = checkpoint.latest(folder.checkpoints, lambda damage: None, folder.run_id())
    except PefllError:  # to be said, and mended, by who goes on from there
        return None
    return saved if saved.round >= rounds else None


def _finished(order: Order, facts: dict[str, Any]) -> checkpoint.Checkpoint | None:
    """Return the last state in an order's folder, where that run is finished; PefllError where it is another run."""
    if order.out is None or order.tunes:  # a search keeps scores and no weights
        return None
    _check_claim(order.out, order.config, facts)
    return finished_state(RunFolder(Path(order.out)), order.config.rounds)


def _recorded(order: Order, learner: Method[Any], facts: dict[str, Any], saved: checkpoint.Checkpoint) -> Run:
    """Return the finished run that an order's folder holds."""
    assert order.out is not None
    template = method_template(learner, order.config)
    best, final = (restore(template, saved.tensors, part) for part in ("best", "server"))
    summary = RunFolder(Path(order.out)).summary() or {}
    return Run(order.config, learner, best, final, facts, summary, order.federation)


def _at_once(made: Run) -> Turns[Run]:
    """Take the one turn that every run has, and do nothing with it."""
    yield
    return made


def _told(turns: Turns[Run], order: Order, ended: Callable[[Order, Run], None] | None) -> Turns[Run]:
    """Do as `turns` does, and tell somebody of the run at its end."""
    made = yield from turns
    if ended is not None:
        ended(order, made)
    return made


def _fitting(
    order: Order,
    engine: Engine,
    learner: Method[Any],
    facts: dict[str, Any],
    folder: RunFolder | None,
    screen: Display,
    asked_to_stop: Signals,
    together: int,
) -> Turns[Run]:
    """Train and test one run, in turns with others."""
    config, federation = order.config, order.federation
    with screen.line(order.title, config.rounds) as watch:
        try:
            progress = yield from train(engine, learner, config, folder, watch, facts, asked_to_stop, together)
        except PefllError as problem:
            error = _with_cause(problem, federation)
            if together > 1:  # said now, because the others may go on for long
                watch.say(f"{order.label or f'seed {config.seed}'} failed: {error}")
            raise error from problem
    summary = summary_of(engine, learner, order, progress, screen, asked_to_stop)
    if folder:
        if order.maps and not order.tunes:
            write_descriptors(engine, learner, progress.best, federation, folder)
        folder.write_summary(summary)
    return Run(config, learner, progress.best, progress.server, facts, summary, federation)


def _tell_of_ranges(federation: Federation, console: Console | None) -> None:
    """Say which clients and columns have values that are out of proportion."""
    for sentence in out_of_proportion(federation):
        if console:
            say(console, sentence)
        else:
            warnings.warn(sentence, stacklevel=2)


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


def _config(
    federation: Federation, method: str | type, model: str | nn.Module, rounds: int, seed: int, settings: dict[str, Any]
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


def _check_claim(out: str | Path | None, config: Config, facts: dict[str, Any]) -> None:
    """Raise PefllError where the folder that is there is not the same run's, with the same settings and model."""
    if out is None:
        return
    folder = RunFolder(Path(out))
    if folder.config_file.is_file():
        started = Config.load(folder.config_file, folder.trained_with())
        try:
            started.check_same(config)
        except PefllError as error:  # where several runs have folders of their own, the user named none of them
            raise PefllError(f"{folder.path}: {error.args[0]}", error.code) from error
        newest = manifest.newest(folder.checkpoints, folder.run_id())
        if newest:
            check_problem(newest.facts.get("problem"), folder.path)
            check_same_model(newest.facts["problem"], facts, str(folder.path))
    elif folder.path.exists() and (
        not folder.path.is_dir()
        or any(each.name != LOCK and not is_temporary(each.name) for each in folder.path.iterdir())
    ):
        raise PefllError(
            f"{folder.path} exists and is not a run folder; choose another {argument('out')}", code="PEFLL-T109"
        )


@contextmanager
def _held(out: str | Path | None) -> Iterator[RunFolder | None]:
    """Yield the run's folder, which is nobody else's meanwhile; None for a run that is not kept."""
    if out is None:
        yield None
        return
    folder = RunFolder(Path(out))
    with folder.held():
        yield folder


def _claim(folder: RunFolder | None, config: Config, facts: dict[str, Any]) -> None:
    """Write what was asked for now into a folder that is held; somebody may have been there since it was looked at."""
    if folder:
        _check_claim(folder.path, config, facts)
        checkpoint.sweep(folder.checkpoints)
        run = folder.run_id()
        if not run:
            run = new_run()
            folder.give_checks(run)  # before the settings say that there are some
        config.save(folder.config_file, run)
