"""What a run is asked to do: the problem, the clients that its data is dealt to, the engine that they meet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

from pefll.core.errors import PefllError
from pefll.core.progress import say
from pefll.core.wording import argument, counted
from pefll.data import DATASETS, classes_without_samples, load_samples, make_federation
from pefll.data.federation import TRAIN, Federation, Samples
from pefll.engines.cohort import Engine
from pefll.engines.memory import Plan, check_fits, check_model_fits, networks_of, sample_values
from pefll.methods import build_method, hyperparameters, typed_settings
from pefll.methods.contract import Method, Problem
from pefll.models import MODELS, Network, build_model, check_model, resolve_model
from pefll.models.probe import probe
from pefll.runs.config import Config
from pefll.training.hardware import cores, device_name, make_engine, pick_device, pick_engine, pick_precision


class Order(NamedTuple):
    """A run to be trained.

    Attributes:
        config: all its settings.
        federation: who has what.
        out: its folder; None for none.
        label: what it is called while it is trained beside others; "" for its method and seed.
        tunes: whether it is there to choose hyper-parameters: then it ends with a score on the validation samples of
            seen clients, in place of the test.
        holds_out: whether its unseen clients are seen ones that were held out for that (`Federation.holding_out`), so
            that their validation samples are scored too.
        maps: whether its clients' descriptors are kept for the descriptor map.
    """

    config: Config
    federation: Federation
    out: str | Path | None
    label: str = ""
    tunes: bool = False
    holds_out: bool = False
    maps: bool = True

    @property
    def title(self) -> str:
        """What it is called while it is trained."""
        return self.label or f"{self.config.method} seed {self.config.seed}"


def describe_problem(federation: Federation, model: str | nn.Module) -> tuple[Problem, dict[str, Any]]:
    """Return what there is to learn, and the facts a personal model carries with it."""
    name = resolve_model(model, federation.input_shape, federation.tokens) if isinstance(model, str) else ""
    shape, classes = federation.input_shape, federation.classes
    module = model if isinstance(model, nn.Module) else build_checked_model(name, shape, classes)
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
        "label_column": federation.label_column,
        "client_column": federation.client_column,
        "num_clients": federation.num_clients,
        "dataset": federation.name,
        "weights": network.size,
        "probe": probe(network, federation.input_shape, federation.tokens),
    }
    return problem, facts


def build_checked_model(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Do as `build_model`; PefllError before a model of the package is made that is too large for the machine.

    Args:
        name: of the model.
        input_shape: of one sample.
        classes: width of the output.
    """
    if name in MODELS:
        with torch.device("meta"):
            sketch = MODELS[name](input_shape, classes)
        check_model_fits(f"the model {name}", sum(part.numel() for part in sketch.parameters()))
    return build_model(name, input_shape, classes)


def build_checked_method(name: str, problem: Problem, settings: dict[str, Any]) -> Method[Any]:
    """Do as `build_method`; PefllError before networks are made that are too large for the machine."""
    build = partial(build_method, name, problem, settings)
    check_model_fits(f"the server of {name}", networks_of(build))
    return build()


def check_memory(config: Config, federation: Federation, problem: Problem, runs: int = 1) -> None:
    """Raise PefllError where a run would clearly not fit into memory, before its networks are made.

    Args:
        config: all its settings.
        federation: who has what.
        problem: what there is to learn.
        runs: that are trained at once.
    """
    device = pick_device(config.device)
    kind = config.engine if config.engine != "auto" else pick_engine(device, problem)
    if kind == "vector" and config.processes > 1:
        raise PefllError(
            f"{argument('processes', config.processes)} is for the serial engine, and this run would use the vector "
            f"engine, in one process; use {argument('engine', 'serial')} or {argument('processes', 1)}",
            code="PEFLL-T125",
        )
    settings = {**hyperparameters(config.method), **typed_settings(config.method, config.settings)}
    networks = networks_of(lambda: build_method(config.method, problem, config.settings))
    clients = min(clients_per_round(config, federation), federation.num_seen)
    most = int(federation.count[TRAIN].max())
    plan = Plan(
        weights=problem.model.size,
        networks=networks,
        clients=clients if kind == "vector" else min(config.processes or cores(), clients),
        round_clients=clients,
        steps=int(settings.get("local_steps") or 1),
        batch=min(int(settings.get("batch_size") or most), most),
        values=sample_values(problem),
        runs=runs,
        device=device if kind == "vector" else torch.device("cpu"),
    )
    check_fits(plan, config.method)


def headline(config: Config, federation: Federation) -> str:
    """Return what a run is about to do, in one line, with what `auto` stands for."""
    device = pick_device(config.device)
    model = resolve_model(config.model, federation.input_shape, federation.tokens)
    rounds = f"{counted(config.rounds, 'round')} of {counted(clients_per_round(config, federation), 'client')}"
    precision = pick_precision(config.precision, device)
    if note := other_precision(config):
        precision += f" ({note})"
    untested = f" ({federation.num_untested:,} without test samples)" if federation.num_untested else ""
    return (
        f"{config.method} on {federation.name}, {federation.partition}: {federation.num_seen} seen and "
        f"{federation.num_unseen} unseen clients{untested}, model {model}, {rounds}, {device_name(device)}, {precision}"
    )


def other_precision(config: Config) -> str:
    """Return why a run does not have the precision that was asked for; "" where it has."""
    used = pick_precision(config.precision, pick_device(config.device))
    return "" if config.precision in ("auto", used) else f"only a GPU has {config.precision}"


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


def data_of_python(config: Config) -> bool:
    """Return whether the data of a run has only a name, and no place: it was given in Python."""
    return _is_gone(config) and not Path(config.data).suffix and len(Path(config.data).parts) == 1


def _is_gone(config: Config) -> bool:
    return config.data not in DATASETS and config.data_sha256 != "" and not Path(config.data).exists()


def _samples_of(config: Config, console: Console | None) -> Samples:
    if data_of_python(config):
        raise PefllError(
            f"the run was trained on data given in Python ({config.data}); evaluate it there, with "
            "pefll.load(path).evaluate(federation=...)",
            code="PEFLL-T117",
        )
    if _is_gone(config):
        raise PefllError(
            f"the run was trained on {config.data}, which is not there any more; put it back", code="PEFLL-T118"
        )
    samples = load_samples(
        config.data,
        config.data_dir,
        lambda sentence: say(console, sentence) if console else None,
        label=config.label,
        client=config.client_column,
    )
    # Not where a run goes on or is evaluated: it was said when the run began.
    if (
        console
        and config.data not in DATASETS
        and not config.data_sha256
        and (gaps := classes_without_samples(samples))
    ):
        largest, classes = samples.classes - 1, samples.classes
        say(console, f"{samples.name}: the largest label is {largest}, so that there are {classes} classes, but {gaps}")
    return samples


def _deal(samples: Samples, config: Config) -> Federation:
    source = DATASETS.get(config.data)
    partition = config.partition or (source.partition if source else "")
    if not partition:
        if samples.client is None:
            raise PefllError(
                f"{config.data} does not say whose each sample is; add {argument('partition', 'by-class 2')} and "
                f"{argument('clients', 50)}",
                code="PEFLL-T119",
            )
        partition = "natural"
    natural_number = partition == "natural" and not config.clients
    clients = None if natural_number else config.clients or (source.clients if source else None)
    federation = make_federation(samples, partition=partition, clients=clients, seed=config.seed, unseen=config.unseen)
    if config.data_sha256 and federation.fingerprint() != config.data_sha256:
        where = f"the data in {config.data_dir}" if source else f"what is in {config.data}"
        raise PefllError(f"{where} is not what the run was trained on", code="PEFLL-T120")
    return federation


@contextmanager
def opened(config: Config, federation: Federation, method: Method[Any], trains: bool = True) -> Iterator[Engine]:
    """Open the engine that a config asks for, and close it after the block."""
    engine = make_engine(config, federation, method, clients_per_round(config, federation) if trains else 0)
    try:
        yield engine
    finally:
        engine.close()
