"""Resolves the settings of a run into a `RunSpec`, where no `auto` and no default is left."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from pefll.core.errors import PefllError
from pefll.core.schedules import Schedule, check_rounds, checked_function, parse_schedule
from pefll.core.wording import argument, counted
from pefll.data.federation import Federation
from pefll.engines.cohort import Engine
from pefll.engines.hardware import TO_READ, Hardware, check_memory, device_name, pick_hardware, pick_precision
from pefll.engines.mapping import check_task_mapped
from pefll.engines.round_plan import UNIFORM, PriorPhase, RoundPlan, checked_sampling, parse_sampling, uniformly
from pefll.methods import build_method, method_class, settings_for, with_networks
from pefll.methods.contract import Method
from pefll.methods.pefll import PeFLL
from pefll.models.own import own_networks, probe
from pefll.models.spec import ModelSpec
from pefll.runs.checkpoint import Checkpoint
from pefll.runs.claim import check_claim, finished_state, started_config
from pefll.runs.config import Config
from pefll.runs.fingerprints import Fingerprints, some_of
from pefll.runs.problem import describe_problem
from pefll.runs.record import RunFolder
from pefll.tasks import Classification, Task
from pefll.tasks.checking import probe as probe_of_task
from pefll.tasks.names import asked_text, resolve_task

# A user's functions that were given in Python, by the names of their settings: lr_schedule, sampling, ...
Functions: TypeAlias = Mapping[str, Callable[..., Any]]
NO_FUNCTIONS: Functions = {}


@dataclass(frozen=True, eq=False)
class RunSpec:
    """A run with all settings resolved, before an engine is opened. `resolve` makes it.

    Attributes:
        config: its settings, as in config.toml.
        federation: the clients and their samples.
        model: the name of the client model.
        model_spec: the spec of the client model, which checkpoints and personal models hold.
        method: the method, bound to the problem.
        hardware: device, engine, precision, processes.
        clients_per_round: number of clients in a round, c.
        folder: the run's folder, or None.
        finished: the last checkpoint in the folder if the run is finished; else None.
        label: its name among runs that train at once; "" for its method and seed.
        tunes: whether it is a trial of a search for hyper-parameters. A trial is scored on validation samples of seen
            clients, not on test samples.
        holds_out: whether its unseen clients were held out from the seen clients for the search (see
            `Federation.holding_out`). Their validation samples are then scored too.
        maps: whether to keep its clients' descriptors for the descriptor map.
        plan: sampling of clients, and schedules of learning rates.
        task_probe: what the task's loss and metrics give, see `tasks.checking.probe`; None if it is not known.
    """

    config: Config
    federation: Federation
    model: str
    model_spec: ModelSpec
    method: Method[Any]
    hardware: Hardware
    clients_per_round: int
    folder: RunFolder | None = None
    finished: Checkpoint | None = None
    label: str = ""
    tunes: bool = False
    holds_out: bool = False
    maps: bool = True
    plan: RoundPlan = UNIFORM
    task_probe: list[float | None] | None = None

    def fingerprints(self, rounds: int) -> Fingerprints:
        """Return the fingerprints of its networks, task, schedules and sampling, for the first `rounds` rounds."""
        spec = self.model_spec
        scores = [score for row in spec.probe or () for score in row]
        networks = ({"model": [spec.weights, *some_of(scores)]} if scores else {}) | (spec.networks or {})
        task = {"task": self.task_probe} if self.task_probe else {}
        plan = self.plan.fingerprints(rounds, self.federation.num_seen, self.clients_per_round)
        return networks | task | plan

    @property
    def title(self) -> str:
        """Its name in progress bars and messages."""
        return self.label or f"{self.config.method} seed {self.config.seed}"

    @property
    def headline(self) -> str:
        """Its data, method, model, rounds and device, in one line."""
        config, data, hardware = self.config, self.federation, self.hardware
        rounds = f"{counted(config.rounds, 'round')} of {counted(self.clients_per_round, 'client')}"
        if not self.method.trains_in_rounds:
            rounds = "no rounds"  # each client trains alone
        precision = hardware.precision + (f" ({note})" if (note := self.precision_note) else "")
        untested = f" ({data.num_untested:,} without test samples)" if data.num_untested else ""
        return (
            f"{config.method} on {data.name}, {data.partition}: {data.num_seen} seen and {data.num_unseen} unseen "
            f"clients{untested}, model {self.model}, {rounds}, {device_name(hardware.device)}, {precision}"
            + (f", into {self.folder.path}" if self.folder else "")
        )

    @property
    def precision_note(self) -> str:
        """Why its precision differs from its config; "" if it does not differ."""
        asked = self.config.precision
        return "" if asked in ("auto", self.hardware.precision) else f"only a GPU has {asked}"


def resolve(
    config: Config,
    federation: Federation,
    out: str | Path | None = None,
    *,
    model: str | nn.Module | None = None,
    networks: Mapping[str, Any] | None = None,
    task: Task | None = None,
    runs: int = 1,
    label: str = "",
    tunes: bool = False,
    holds_out: bool = False,
    functions: Functions = NO_FUNCTIONS,
) -> RunSpec:
    """Return the spec of a run; PefllError if it cannot run here.

    It cannot run if another run is in its folder, memory is too small, or a device is missing.

    Args:
        config: its settings.
        federation: the clients and their samples.
        out: a folder for the run, or None.
        model: an `nn.Module` given in Python; if it is not a module, the config names the model.
        networks: a user's own networks given in Python, by the names of the method's hyper-parameters.
        task: a task given in Python; None for the config's.
        runs: number of runs that are trained at once and share the memory.
        label: see `RunSpec`.
        tunes: see `RunSpec`.
        holds_out: see `RunSpec`.
        functions: see `round_plan_of`.
    """
    task, federation, text = resolve_task(task or config.task, federation)
    config = dataclasses.replace(config, data_sha256=federation.fingerprint(), task=text)
    problem, model_spec = describe_problem(federation, model if isinstance(model, nn.Module) else config.model, task)
    folder = None if out is None else RunFolder(Path(out))
    settings = with_networks(config.settings, networks or {})
    chosen = settings_for(config.method, problem, settings)
    started = started_config(folder)
    # A run of an earlier version may not have stored them; it goes on without them.
    chosen = {name: value for name, value in chosen.items() if started is None or name in started.settings}
    config, settings = dataclasses.replace(config, settings=config.settings | chosen), settings | chosen
    c = clients_per_round(config, federation)
    if config.prior_clients or config.prior_rounds:
        check_prior_is_used(config, task)
        config = with_prior_rounds(config, federation, c, started)
    # Checked first, so that another run's folder is refused at once. `claimed` checks again when it has the lock.
    check_claim(folder, config, model_spec)
    kept = None if tunes else folder  # a trial of a search keeps no weights to load
    finished, hardware = finished_state(kept, config.rounds), TO_READ
    if finished is None:
        hardware = pick_hardware(problem, config.device, config.engine, config.precision, config.processes)
        if hardware.engine == "vector" and config.processes > 1:
            raise PefllError(
                f"{argument('processes', config.processes)} is for the serial engine, but this run would use the "
                f"vector engine, in one process; use {argument('engine', 'serial')} or {argument('processes', 1)}",
                code="PEFLL-T125",
            )
        if hardware.engine == "vector":
            check_task_mapped(problem.task, federation)
        check_memory(hardware, config.method, settings, problem, federation, c, runs)
    method = build_method(config.method, problem, settings)
    # A finished run needs no plan; that of a user's functions is still compared with the one that it had.
    plan = round_plan_of(config, method, functions) if finished is None or functions else UNIFORM
    if own := own_networks(method):
        model_spec = dataclasses.replace(model_spec, networks={name: probe(one) for name, one in own.items()})
    if not method.trains_in_rounds:
        config = dataclasses.replace(config, rounds=0)
        finished = finished or finished_state(kept, 0)
    spec = RunSpec(
        config=config,
        federation=federation,
        model=model_spec.model or config.model,
        model_spec=model_spec,
        method=method,
        hardware=hardware,
        clients_per_round=c,
        folder=folder,
        finished=finished,
        label=label,
        tunes=tunes,
        holds_out=holds_out,
        plan=plan,
        task_probe=probe_of_task(task, federation),
    )
    check_claim(folder, config, model_spec, spec.fingerprints)
    return spec


def resolve_for(engine: Engine, config: Config, out: str | Path | None = None, maps: bool = True) -> RunSpec:
    """Return the spec of a run on an engine that is open already; see `resolve` and `RunSpec`."""
    if config.prior_clients:
        raise PefllError(
            f"{argument('prior_clients')} is for clients that are simulated on one machine; leave it out",
            code="PEFLL-T213",
        )
    task = engine.method.problem.task
    _, model_spec = describe_problem(engine.federation, config.model, task)
    config = dataclasses.replace(config, task=asked_text(task, engine.federation))
    if not engine.method.trains_in_rounds:
        config = dataclasses.replace(config, rounds=0)
    folder = None if out is None else RunFolder(Path(out))
    check_claim(folder, config, model_spec)
    precision = pick_precision(config.precision, engine.device)
    return RunSpec(
        config=config,
        federation=engine.federation,
        model=model_spec.model,
        model_spec=model_spec,
        method=engine.method,
        hardware=Hardware(engine.device, engine.name, precision, engine.processes),
        clients_per_round=clients_per_round(config, engine.federation),
        folder=folder,
        maps=maps,
    )


def round_plan_of(config: Config, method: Method[Any], functions: Functions = NO_FUNCTIONS) -> RoundPlan:
    """Return the sampling and the schedules that a config names; PefllError if one of them cannot be used.

    Args:
        config: the run's settings.
        method: must have a learning rate for each schedule.
        functions: the user's functions that were given in Python, by the names of their settings.
    """
    names = config.sampling, config.lr_schedule, config.server_lr_schedule
    if names == ("uniform", "constant", "constant") and not config.prior_clients:
        return UNIFORM

    def schedule(name: str) -> Schedule | None:
        given = functions.get(name)
        if given is not None:
            found: Schedule | None = checked_function(given, name)
        else:
            found = parse_schedule(getattr(config, name), name, config.rounds)
        if found is not None:
            check_rounds(found, config.rounds)
        return found

    given = functions.get("sampling")
    sampling = parse_sampling(config.sampling) if given is None else checked_sampling(given)
    prior = PriorPhase(config.prior_clients, config.prior_rounds) if config.prior_clients else None
    if prior is not None and sampling is None:
        sampling = uniformly
    plan = RoundPlan(schedule("lr_schedule"), schedule("server_lr_schedule"), sampling, prior)
    _check_rates(config, plan, method)
    return plan


def _check_rates(config: Config, plan: RoundPlan, method: Method[Any]) -> None:
    """Raise PefllError if a method has no learning rate that follows a schedule of the plan."""
    for name, schedule, rates, whose in (
        ("lr_schedule", plan.client_schedule, "client_rates", "clients"),
        ("server_lr_schedule", plan.server_schedule, "server_rates", "server"),
    ):
        if schedule is not None and not getattr(method, rates, ()):
            raise PefllError(
                f"{config.method} has no learning rate of its {whose} that follows a schedule; leave out "
                f"{argument(name)}",
                code="PEFLL-S550",
            )


def check_prior_is_used(config: Config, task: Task) -> None:
    """Raise PefllError if a run asks for a prior, but its method or task has no bound that could use one."""
    if not config.prior_clients:
        return
    given, kind = argument("prior_clients", config.prior_clients), method_class(config.method)
    if not (isinstance(kind, type) and issubclass(kind, PeFLL)):
        raise PefllError(
            f"{given} makes a prior for bounds of pefll, pefll-prior and pefll-plus, which {config.method} cannot use; "
            f"leave it out, or train one of these methods",
            code="PEFLL-T214",
        )
    if not isinstance(task, Classification):
        raise PefllError(
            f"{given} makes a prior for bounds on a share of wrong predictions, which the task "
            f"{type(task).__name__} does not have; leave it out, or train a classification",
            code="PEFLL-T215",
        )


def with_prior_rounds(config: Config, federation: Federation, c: int, started: Config | None) -> Config:
    """Return the settings with the number of prior rounds; PefllError if the prior cannot be made.

    Args:
        config: the settings.
        federation: has the seen clients, some of which make the prior.
        c: number of clients in a round.
        started: settings that the run was started with. A run that is extended keeps its number of prior rounds.
    """
    share, rounds = config.prior_clients, config.prior_rounds
    if not share:
        if rounds:
            raise PefllError(
                f"{argument('prior_rounds', rounds)} needs the share of clients in these rounds: give also "
                f"{argument('prior_clients', 0.5)}",
                code="PEFLL-T210",
            )
        return config
    rounds = rounds or (started.prior_rounds if started is not None else config.rounds // 2)
    if not 0 < rounds < config.rounds:
        raise PefllError(
            f"{argument('prior_rounds', rounds)} is not between 0 and the run's {counted(config.rounds, 'round')}; "
            "other rounds with all clients must follow",
            code="PEFLL-T211",
        )
    size = PriorPhase(share, rounds).size(federation.num_seen)
    if not c <= size < federation.num_seen:
        raise PefllError(
            f"{argument('prior_clients', share)} makes the prior with {size} of "
            f"{counted(federation.num_seen, 'seen client')}; it needs at least the {c} of a round, and others must "
            "be left",
            code="PEFLL-T212",
        )
    return dataclasses.replace(config, prior_rounds=rounds)


def clients_per_round(config: Config, federation: Federation) -> int:
    """Return the number of clients in a round: the config's, or 5% of all clients as in the paper."""
    return config.clients_per_round or math.ceil(federation.num_clients / 20)
