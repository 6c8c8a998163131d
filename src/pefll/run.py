"""From a federation to a trained run, and from a run to personal models."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import Tensor, nn

from pefll import checkpoint
from pefll.config import Config
from pefll.data import DATASETS, load_samples, make_federation
from pefll.data.arrays import labels_of
from pefll.data.federation import SPLITS, TEST, VALIDATION, Federation, Normalise, Samples, assemble
from pefll.engines.cohort import Engine
from pefll.engines.serial import SerialEngine
from pefll.errors import PefllError
from pefll.evaluation import (
    Evaluation,
    client_scores,
    counts_of,
    descriptors,
    evaluation_of,
    split_number,
    summarise,
)
from pefll.files import write_whole
from pefll.hardware import (
    device_name,
    make_engine,
    peak_memory_bytes,
    pick_device,
    pick_precision,
    place_data,
)
from pefll.lockstep import Job, Stopped, Turns, stop_signals, take_turns
from pefll.methods import build_method, typed_settings
from pefll.methods.contract import Method, Problem
from pefll.models import Network, build_model, check_model, resolve_model
from pefll.models.neighbours import NeighbourModel
from pefll.personal import PersonalModel, check_input
from pefll.progress import Display, Monitor, display, monitor, say
from pefll.record import RunFolder, seed_folder
from pefll.training import Progress, local_steps, restore, train
from pefll.tree import Tree, map_tree
from pefll.version import __version__

Array = npt.NDArray[Any]
MAP_CLIENTS = 10_000  # a descriptor map of more clients shows no more
COUNTED_CLIENTS = 10_000  # a summary with the counts of more clients is no longer small


class ClientScore(NamedTuple):
    """What a client's personal model does on one split of the client's samples.

    Attributes:
        client: its number in the federation.
        seen: whether it took part in training.
        samples: how many.
        correct: how many were right.
        masked: how many were right with classes absent from its training labels ruled out.
        loss: the summed cross-entropy.
    """

    client: int
    seen: bool
    samples: int
    correct: int
    masked: int
    loss: float

    @property
    def accuracy(self) -> float:
        """Right answers over samples; NaN without samples."""
        return self.correct / self.samples if self.samples else math.nan


def evaluation_of_clients(clients: Sequence[ClientScore]) -> Evaluation:
    """Return the accuracies of seen and unseen clients from each client's own score."""
    groups = (
        summarise(np.array([one[2:] for one in clients if one.seen == seen], dtype=np.float64).reshape(-1, 4))
        for seen in (True, False)
    )
    return Evaluation(*groups)


@dataclass(frozen=True, eq=False)
class Run:
    """A trained method, ready to personalise.

    Attributes:
        config: what was asked for.
        method: with its hyper-parameters.
        server: the method's state at the best round.
        final: the method's state after the last round.
        facts: what the models take: see `PersonalModel.facts`.
        summary: what came out, as in summary.json; empty for a run that is not finished.
        federation: the data; None for a run loaded from its folder.
    """

    config: Config
    method: Method[Any]
    server: Tree
    final: Tree
    facts: dict[str, Any]
    summary: dict[str, Any]
    federation: Federation | None = None

    def __repr__(self) -> str:
        return f"Run({self.config.method} on {self.config.data}, best of {self.summary.get('rounds', '?')} rounds)"

    def evaluate(
        self, split: str = "test", federation: Federation | None = None, console: Console | None = None
    ) -> Evaluation:
        """Score personal models of all clients, seen and unseen, on one split of their own samples.

        Args:
            split: train, validation or test.
            federation: other data of the same kind; by default what the run was trained on.
            console: shows progress; None for silence.
        """
        return evaluation_of_clients(self.evaluate_clients(split, federation, console))

    def evaluate_clients(
        self, split: str = "test", federation: Federation | None = None, console: Console | None = None
    ) -> list[ClientScore]:
        """Do as `evaluate`, but return each client's own score, seen clients first."""
        number = split_number(split)
        data = federation or self.federation or federation_of(self.config, console)
        if data.input_shape != tuple(self.facts["input_shape"]) or data.classes != self.facts["classes"]:
            raise PefllError(
                f"the run was trained on {self.facts['classes']} classes of shape {tuple(self.facts['input_shape'])}, "
                f"but {data.name} has {data.classes} of shape {data.input_shape}"
            )
        if (
            self.method.trains_new_clients
            and federation is not None
            and federation.fingerprint() != self.config.data_sha256
        ):
            data = dataclasses.replace(federation, num_seen=0)  # nobody here took part in training
        with (
            opened(self.config, data, self.method, trains=False) as engine,
            monitor(console, "evaluating", data.num_clients) as watch,
        ):
            server = map_tree(lambda leaf: leaf.to(engine.device), self.server)
            everyone = np.arange(data.num_clients)
            sums = client_scores(engine, self.method, server, everyone, number, counting(watch))
        return [
            ClientScore(client, client < data.num_seen, int(samples), int(correct), int(masked), float(loss))
            for client, (samples, correct, masked, loss) in enumerate(sums)
        ]

    def personalize(self, x: Any, y: Any = None) -> PersonalModel:
        """Return a model for a client that was never seen: one forward pass, no training of shared weights.

        Args:
            x: [m, ...] the client's samples, as in the training data.
            y: [m] its labels; None for a client without labels.
        """
        x = check_input(x, self.facts)
        if y is None and self.method.uses_labels:
            kind = "convnet" if len(self.facts["input_shape"]) == 3 else "mlp"
            raise PefllError(
                "this run needs labels to personalise; train one that does not with "
                f"--method pefll --set embedding={kind}-unlabeled"
            )
        labels = np.zeros(len(x), dtype=np.int64) if y is None else labels_of(y, self.facts["class_names"], "y")
        one = self._alone(x, labels)
        if y is None:
            one = dataclasses.replace(one, y=torch.full_like(one.y, -1))  # no class at all, in place of the first one
        engine = SerialEngine(one, self.method, self.config.seed, 0, _dtype(self.config))
        try:
            ((_, cohort),) = engine.cohorts(np.zeros(1, dtype=np.int64))
            with torch.no_grad():
                theta = self.method.personalize(map_tree(engine.cast, self.server), cohort)
                # A method whose models are more than a network with other weights makes them itself.
                make = getattr(self.method, "personal_module", None)
                module = make(cohort, theta) if make else self.method.problem.model.with_parameters(theta[0])
        finally:
            engine.close()
        facts = self.facts | ({"neighbours": module.settings} if isinstance(module, NeighbourModel) else {})
        return PersonalModel(module.eval(), facts)

    def _alone(self, x: Array, y: Array) -> Federation:
        """Return a federation of one client that holds these samples for training."""
        samples = Samples(
            x=x,
            y=y,
            classes=self.facts["classes"],
            normalise=Normalise(*map(tuple, self.facts["normalise"])) if self.facts["normalise"] else None,
            name="the new client",
            tokens=self.facts["tokens"],
        )
        nobody_else = np.zeros(len(x), dtype=np.int64)
        return assemble(samples, nobody_else, nobody_else.astype(np.int8), num_seen=0, partition="one client")


def fit(
    federation: Federation,
    method: str = "pefll",
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
        method: a key of `pefll.METHODS`, or package.module:Class, one of your own.
        model: what clients run: a name (auto, lenet, cnn, mlp, package.module:function) or any `nn.Module` that maps
            samples to one score per class.
        rounds: of training.
        seed: of everything random.
        out: a folder for the run; where it holds an unfinished run with the same settings, that one is resumed.
        console: shows progress; None for silence.
        config: all settings at once, instead of the arguments above.
        settings: fields of `Config` (clients_per_round, device, eval_every, ...) or hyper-parameters of the method.

    Returns:
        The run, with the state of the round that was best on seen clients' validation samples.
    """
    if config is None:
        config = _config(federation, method, model, rounds, seed, settings)
    return fit_together([Order(config, federation, out)], model, console)[0]


def fit_seeds(
    federation: Federation | Callable[[int], Federation],
    method: str = "pefll",
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
        out: a folder for the runs, each in a folder seed-N of its own; unfinished ones there are resumed.
        console: see `fit`.
        settings: see `fit`.

    Returns:
        The runs, in the order of the seeds.

    Raises:
        RunsFailed: when a run diverged, after the others have finished; it has their runs.
        Stopped: after Ctrl-C or SIGTERM, with a checkpoint of each run written.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise PefllError("seeds must be different from each other, and there must be at least one")
    orders = []
    for seed in seeds:
        data = federation if isinstance(federation, Federation) else federation(seed)
        config = _config(data, method, model, rounds, seed, settings)
        orders.append(Order(config, data, None if out is None else seed_folder(Path(out), seed)))
    return fit_together(orders, model, console)


class Order(NamedTuple):
    """A run to be trained.

    Attributes:
        config: all its settings.
        federation: who has what.
        out: its folder; None for none.
        label: what it is called while it is trained beside others; "" for its method and seed.
        tunes: whether it is there to choose hyper-parameters: then it ends with a score on the validation samples of
            seen clients, in place of the test.
    """

    config: Config
    federation: Federation
    out: str | Path | None
    label: str = ""
    tunes: bool = False

    @property
    def title(self) -> str:
        """What it is called while it is trained."""
        return self.label or f"{self.config.method} seed {self.config.seed}"


class RunsFailed(PefllError):
    """Some of the runs that were trained together failed.

    Attributes:
        runs: those that did not.
        errors: the others' errors, by seed.
    """

    def __init__(self, runs: list[Run], errors: dict[int, PefllError]) -> None:
        reasons = "; ".join(f"seed {seed}: {error}" for seed, error in errors.items())
        super().__init__(f"{len(errors)} of {len(runs) + len(errors)} runs failed: {reasons}")
        self.runs, self.errors = runs, errors


def fit_together(
    orders: Sequence[Order], model: str | nn.Module | None = None, console: Console | None = None
) -> list[Run]:
    """Train several runs at once; see `fit_seeds`."""
    outcomes = outcomes_of(orders, model, console)
    stopped = [outcome for outcome in outcomes if isinstance(outcome, Stopped)]
    if stopped:
        raise min(stopped, key=lambda one: one.round)
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

    An engine is opened for each order, then the runs take turns.

    Args:
        orders: what to train.
        model: see `fit`.
        console: see `fit`.
        ended: told of each run as it ends, while others may still go on.
        seconds: after which runs are stopped as by a signal, with a checkpoint of each; None for never.
    """
    jobs: list[Job] = []
    copies: dict[object, Tensor] = {}  # of samples on a GPU: runs that differ by their seed have the same
    with ExitStack() as stack:
        # Engines are closed all at the end, the last one first: each gives back torch's settings as it found them.
        prepared = []
        for order in orders:
            federation = order.federation
            config = dataclasses.replace(order.config, data_sha256=federation.fingerprint())
            problem, facts = describe_problem(federation, model if isinstance(model, nn.Module) else config.model)
            learner = build_method(config.method, problem, config.settings)
            if not learner.trains_in_rounds:
                config = dataclasses.replace(config, rounds=0)
            data = place_data(config, federation, problem, copies)
            engine = stack.enter_context(opened(config, data, learner))
            prepared.append((order._replace(config=config), engine, learner, facts))
        # Only now, so that settings that cannot be run leave no folder behind.
        for order, *_ in prepared:
            if order.out is not None:
                _check_claim(order.out, order.config)
        screen = stack.enter_context(display(console))
        asked_to_stop = stack.enter_context(stop_signals(seconds))
        for order, engine, learner, facts in prepared:
            folder = _claim(order.out, order.config) if order.out is not None else None
            if console:
                say(console, headline(order.config, order.federation) + (f", into {folder.path}" if folder else ""))
            turns = _fitting(order, engine, learner, facts, folder, screen, asked_to_stop, len(orders))
            jobs.append(Job(_told(turns, order, ended), engine.turn))
        return take_turns(jobs)


def fit_on(engine: Engine, config: Config, out: str | Path | None = None, console: Console | None = None) -> Run:
    """Train on an engine that is open already, such as one whose clients are on other machines.

    Args:
        engine: reaches the clients.
        config: all settings.
        out: a folder for the run; where it holds an unfinished run with the same settings, that one is resumed.
        console: shows progress; None for silence.
    """
    federation = engine.federation
    _, facts = describe_problem(federation, config.model)
    if not engine.method.trains_in_rounds:
        config = dataclasses.replace(config, rounds=0)
    order = Order(config, federation, out)
    if out is not None:
        _check_claim(out, config)
    folder = _claim(out, config) if out is not None else None
    if console:
        say(console, headline(config, federation) + (f", into {folder.path}" if folder else ""))
    with display(console) as screen, stop_signals() as asked_to_stop:
        turns = _fitting(order, engine, engine.method, facts, folder, screen, asked_to_stop, 1)
        (outcome,) = take_turns([Job(turns, engine.turn)])
    if isinstance(outcome, BaseException):
        raise outcome
    made: Run = outcome
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
    asked_to_stop: Sequence[int],
    together: int,
) -> Turns[Run]:
    """Train and test one run, in turns with others."""
    config, federation = order.config, order.federation
    if folder:
        folder.summary_file.unlink(missing_ok=True)  # of a run that is being extended
    with screen.line(order.title, config.rounds) as watch:
        try:
            progress = yield from train(engine, learner, config, folder, watch, facts, asked_to_stop, together)
        except PefllError as error:
            if together > 1:  # said now, because the others may go on for long
                watch.say(f"{order.label or f'seed {config.seed}'} failed: {error}")
            raise
    summary = _summarise(engine, learner, order, progress, screen, asked_to_stop)
    if folder:
        if not order.tunes:
            _write_descriptors(engine, learner, progress.best, federation, folder)
        folder.write_summary(summary)
    return Run(config, learner, progress.best, progress.server, facts, summary, federation)


def load(path: str | Path, console: Console | None = None, model: nn.Module | None = None) -> Run:
    """Read a run from its folder: the state of its best round, without data.

    Args:
        path: the folder.
        console: is told of damaged checkpoints that are passed over.
        model: the architecture, for a run that was trained on an `nn.Module` given in Python.
    """
    folder = RunFolder(Path(path))
    folder.check_is_run()
    config = Config.load(folder.config_file)
    saved = checkpoint.latest(folder.checkpoints, lambda sentence: say(console, sentence) if console else None)
    facts = saved.facts["problem"]
    if model is None and not facts["model"]:
        raise PefllError(f"{path} was trained on a model given in Python; load it there: pefll.load(path, model=...)")
    module = model or build_model(facts["model"], tuple(facts["input_shape"]), facts["classes"])
    problem = Problem(
        Network(module), tuple(facts["input_shape"]), facts["classes"], facts["num_clients"], facts["tokens"]
    )
    method = build_method(config.method, problem, config.settings)
    template = method_template(method, config)
    return Run(
        config=config,
        method=method,
        server=restore(template, saved.tensors, "best"),
        final=restore(template, saved.tensors, "server"),
        facts=facts,
        summary=folder.summary() or {},
    )


def method_template(method: Method[Any], config: Config) -> Tree:
    """Return a state of the right shape and type for a method, from one made-up client."""
    problem = method.problem
    kind = np.int64 if problem.tokens else np.float32
    samples = Samples(
        x=np.zeros((2, *problem.input_shape), dtype=kind),
        y=np.zeros(2, dtype=np.int64),
        classes=problem.classes,
        tokens=problem.tokens,
    )
    zeros = np.zeros(2, dtype=np.int64)
    engine = SerialEngine(
        assemble(samples, zeros, zeros.astype(np.int8), 1, "one client"), method, 0, 1, _dtype(config)
    )
    try:
        return engine.start()
    finally:
        engine.close()


def describe_problem(federation: Federation, model: str | nn.Module) -> tuple[Problem, dict[str, Any]]:
    """Return what there is to learn, and the facts a personal model carries with it."""
    name = resolve_model(model, federation.input_shape, federation.tokens) if isinstance(model, str) else ""
    module = model if isinstance(model, nn.Module) else build_model(name, federation.input_shape, federation.classes)
    network = Network(module)
    check_model(network, federation.input_shape, federation.classes, federation.tokens)
    problem = Problem(network, federation.input_shape, federation.classes, federation.num_clients, federation.tokens)
    facts = {
        "model": name,
        "input_shape": list(federation.input_shape),
        "classes": federation.classes,
        "normalise": [list(part) for part in federation.normalise] if federation.normalise else None,
        "tokens": federation.tokens,
        "class_names": list(federation.class_names),
        "feature_names": list(federation.feature_names),
        "num_clients": federation.num_clients,
        "dataset": federation.name,
    }
    return problem, facts


def headline(config: Config, federation: Federation) -> str:
    """Return what a run is about to do, in one line, with what `auto` stands for."""
    device = pick_device(config.device)
    model = resolve_model(config.model, federation.input_shape, federation.tokens)
    rounds = f"{config.rounds} rounds of {clients_per_round(config, federation)} clients"
    precision = pick_precision(config.precision, device)
    if config.precision not in ("auto", precision):
        precision += f" (only a GPU has {config.precision})"
    return (
        f"{config.method} on {federation.name}, {federation.partition}: {federation.num_seen} seen and "
        f"{federation.num_unseen} unseen clients, model {model}, {rounds}, {device_name(device)}, {precision}"
    )


def clients_per_round(config: Config, federation: Federation) -> int:
    """Return c: as asked for, or 5% of all clients as in the paper."""
    return config.clients_per_round or math.ceil(federation.num_clients / 20)


def federation_of(config: Config, console: Console | None) -> Federation:
    """Read the data that a config names and deal it to clients.

    Raises:
        PefllError: where it cannot be read, or is not what the config was saved with.
    """
    return federations_of([config], console)[0]


def federations_of(configs: Sequence[Config], console: Console | None) -> list[Federation]:
    """Do as `federation_of` for several configs, whose federations share the samples that they have in common."""
    known: dict[tuple[str, ...], Samples] = {}
    federations = []
    for config in configs:
        source = (config.data, config.data_dir, config.label, config.client_column)
        if source not in known:
            known[source] = _samples_of(config, console)
        federations.append(_deal(known[source], config))
    return federations


def _samples_of(config: Config, console: Console | None) -> Samples:
    if config.data not in DATASETS and config.data_sha256 and not Path(config.data).exists():
        if Path(config.data).suffix or len(Path(config.data).parts) > 1:
            raise PefllError(f"the run was trained on {config.data}, which is not there any more; put it back")
        raise PefllError(f"the run was trained on data given in Python ({config.data}); evaluate it there")
    return load_samples(
        config.data,
        config.data_dir,
        lambda sentence: say(console, sentence) if console else None,
        label=config.label,
        client=config.client_column,
    )


def _deal(samples: Samples, config: Config) -> Federation:
    source = DATASETS.get(config.data)
    partition = config.partition or (source.partition if source else "")
    if not partition:
        if samples.client is None:
            raise PefllError(
                f"{config.data} does not say whose each sample is; add --partition 'by-class 2' --clients 50"
            )
        partition = "natural"
    natural_number = partition == "natural" and not config.clients
    clients = None if natural_number else config.clients or (source.clients if source else None)
    federation = make_federation(samples, partition=partition, clients=clients, seed=config.seed, unseen=config.unseen)
    if config.data_sha256 and federation.fingerprint() != config.data_sha256:
        where = f"the data in {config.data_dir}" if source else f"what is in {config.data}"
        raise PefllError(f"{where} is not what the run was trained on")
    return federation


@contextmanager
def opened(config: Config, federation: Federation, method: Method[Any], trains: bool = True) -> Iterator[Engine]:
    """Open the engine that a config asks for, and close it after the block."""
    engine = make_engine(config, federation, method, clients_per_round(config, federation) if trains else 0)
    try:
        yield engine
    finally:
        engine.close()


def counting(watch: Monitor) -> Callable[[int], None]:
    """Return what moves a monitor on by the number of clients done since it was last called."""
    finished = 0

    def report(clients: int) -> None:
        nonlocal finished
        finished += clients
        watch.at(finished)

    return report


def _config(
    federation: Federation, method: str, model: str | nn.Module, rounds: int, seed: int, settings: dict[str, Any]
) -> Config:
    names = {each.name for each in dataclasses.fields(Config)}
    for name in ("data", "data_dir", "partition", "clients", "unseen", "data_sha256"):
        if name in settings:
            raise PefllError(f"{name} belongs to the federation, which is made before it is given to fit")
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


def _check_claim(out: str | Path, config: Config) -> None:
    """Raise PefllError where the folder that is there is not the same run's."""
    folder = RunFolder(Path(out))
    if folder.config_file.is_file():
        Config.load(folder.config_file).check_same(config)
    elif folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise PefllError(f"{folder.path} exists and is not a run folder; choose another --out")


def _claim(out: str | Path, config: Config) -> RunFolder:
    """Make the run's folder, or take the one that is there, with what was asked for now."""
    folder = RunFolder(Path(out))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PefllError(f"cannot make the folder {folder.path}: {error.strerror}") from error
    config.save(folder.config_file)
    return folder


def _summarise(
    engine: Engine,
    method: Method[Any],
    order: Order,
    progress: Progress,
    screen: Display,
    asked_to_stop: Sequence[int],
) -> dict[str, Any]:
    """Score the best and the last state on the test split and gather everything about the run."""
    config, federation = order.config, order.federation
    split, clients = (VALIDATION, federation.num_seen) if order.tunes else (TEST, federation.num_clients)
    moments = ("best",) if order.tunes else ("best", "final")
    different = "final" in moments and progress.best_round != progress.round
    started = time.perf_counter()
    with screen.line(f"testing {order.label or f'seed {config.seed}'}", clients * (1 + different)) as watch:
        count = counting(watch)

        def report(clients: int) -> None:
            if asked_to_stop:  # all rounds are saved, and testing is done again when the run is resumed
                raise Stopped(progress.round, asked_to_stop[0])
            count(clients)

        sums = {"best": client_scores(engine, method, progress.best, np.arange(clients), split, report)}
        if different:
            sums["final"] = client_scores(engine, method, progress.server, np.arange(clients), split, report)
    accuracy = {}
    for moment in moments:
        result = evaluation_of(sums.get(moment, sums["best"]), federation.num_seen)
        accuracy[moment] = {group: value._asdict() if value else None for group, value in result._asdict().items()}
    c = clients_per_round(config, federation)
    steps = local_steps(method, federation)
    seconds = progress.train_seconds
    return {
        "command": config.command() if config.data in DATASETS or Path(config.data).exists() else "",
        "method": config.method,
        "settings": {
            field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.name != "problem"
        },
        "dataset": federation.name,
        "partition": federation.partition,
        "model": resolve_model(config.model, federation.input_shape, federation.tokens),
        "num_clients": federation.num_clients,
        "num_seen": federation.num_seen,
        "num_unseen": federation.num_unseen,
        "rounds": progress.round,
        "clients_per_round": c,
        "local_steps": steps,
        "seed": config.seed,
        "engine": engine.name,
        "device": device_name(engine.device),
        "precision": pick_precision(config.precision, engine.device),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "lockstep": progress.lockstep,
        "timing": _timing(progress.lockstep, engine.device),
        "train_seconds": round(seconds, 3),
        "eval_seconds": round(progress.eval_seconds, 3),
        "seconds_per_round": round(seconds / progress.round, 5) if progress.round else None,
        "client_steps_per_second": round(progress.round * c * steps / seconds, 1) if seconds and steps else None,
        "bytes_down": engine.ledger.down,
        "bytes_up": engine.ledger.up,
        "peak_memory_bytes": peak_memory_bytes(engine.device),
        "best_round": progress.best_round,
        "test_seconds": round(time.perf_counter() - started, 3),
        "data_sha256": config.data_sha256,
        "split": SPLITS[split],
        "accuracy": accuracy,
        "client_counts": counts_of(sums["best"], federation.num_seen) if clients <= COUNTED_CLIENTS else None,
    }


def _timing(lockstep: int, device: torch.device) -> str:
    """Return how the seconds of a run are to be read, in words."""
    if lockstep == 1:
        return "alone"
    if device.type == "cpu":
        return f"took turns with {lockstep - 1} other runs; seconds are of this run's own turns"
    return (
        f"shared the device with {lockstep - 1} other runs: seconds are of this run while they slowed it down, steps "
        "per second are its share of the device's, and peak memory is that of all together"
    )


def _write_descriptors(
    engine: Engine, method: Method[Any], server: Tree, federation: Federation, folder: RunFolder
) -> None:
    if federation.num_clients > MAP_CLIENTS or not len(federation.rows):  # or where only clients know their labels
        return
    v = descriptors(engine, method, server)
    if v is not None:
        seen = np.arange(federation.num_clients) < federation.num_seen
        content = io.BytesIO()
        np.savez_compressed(content, descriptors=v, histograms=federation.histograms(), seen=seen)
        write_whole(folder.descriptors_file, content.getvalue())


def commit() -> str:
    """Return the git commit the package runs from, "+changes" where files differ from it, or "" outside a checkout."""
    if "PEFLL_COMMIT" in os.environ:  # for copies of the code that are not a checkout
        return os.environ["PEFLL_COMMIT"]
    here = Path(__file__).parent
    try:
        name = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True)
        state = subprocess.run(["git", "status", "--porcelain", "."], cwd=here, capture_output=True, text=True)
    except OSError:
        return ""
    tracked = subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True)
    if name.returncode or tracked.returncode:  # no checkout, or one that the package is merely installed in
        return ""
    return name.stdout.strip() + ("+changes" if state.stdout.strip() else "")


def _dtype(config: Config) -> torch.dtype:
    return torch.float64 if config.precision == "float64" else torch.float32
