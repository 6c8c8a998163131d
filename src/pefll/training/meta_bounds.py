"""PAC-Bayes bounds on the error of future clients, for a trained run of PeFLL or of a method like it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.core.progress import monitor
from pefll.core.tree import map_tree
from pefll.core.wording import counted
from pefll.data.federation import Federation
from pefll.data.samples import TEST, TRAIN
from pefll.engines.cohort import sampled
from pefll.engines.device_queue import queue_of
from pefll.engines.hardware import open_engine, pick_hardware
from pefll.engines.round_plan import PriorPhase
from pefll.guarantees.pac_bayes import FIXED, NO_SEARCH, check
from pefll.guarantees.statement import Statement
from pefll.methods.contract import Method
from pefll.methods.pefll import PeFLL, Server
from pefll.runs.config import Config
from pefll.runs.federations import data_of_python
from pefll.tasks import Classification
from pefll.training.posterior_losses import Ids, PosteriorLosses, number_of_draws
from pefll.training.query_bounds import BUDGET as QUERY_BUDGET
from pefll.training.query_bounds import FAMILIES, QueryProblem, query_statements, without_influence
from pefll.training.resolve import clients_per_round, round_plan_of
from pefll.training.run import Run
from pefll.training.sampled_networks import Part, Posterior
from pefll.training.theorem_bounds import BUDGET as THEOREM_BUDGET
from pefll.training.theorem_bounds import Centres, check_equal, equal_samples, evaluated, theorem_statement, zero_model

NO_PRIOR = (
    "There is no bound with a learned prior: this run has none; train with --prior-clients 0.5 for one, which needs no "
    "second run."
)


def meta_bounds(
    run: Run,
    delta: float = 0.05,
    console: Console | None = None,
    federation: Federation | None = None,
    notes: list[str] | None = None,
) -> list[Statement]:
    """Return bounds on the expected error of future clients: Theorem 3.2, and tighter bounds if the run has a prior.

    Each statement holds with probability 1 - δ by itself; those whose names begin with query hold together.

    Args:
        run: the trained run.
        delta: δ.
        console: shows progress; None for silence.
        federation: the data that the run was trained on; None for the run's own.
        notes: gets a sentence for each bound that is left out.

    Raises:
        PefllError: if the method is not like PeFLL, or the task is not classification.
    """
    check(delta)
    method = checked_method(run.method)
    data = checked_data(run, federation, console)
    config, told = run.config, [] if notes is None else notes
    hardware = pick_hardware(method.problem, config.device, config.engine, config.precision, config.processes)
    total = _clients_to_evaluate(method, data, run)
    with (
        torch.no_grad(),
        open_engine(hardware, data, method, config.seed, min(hardware.processes, data.num_seen)) as engine,
        queue_of(engine).turn(),
        monitor(console, "PAC-Bayes bounds: clients evaluated", total) as watch,
    ):
        done = [0]

        def advance(clients: int) -> None:
            done[0] += clients
            watch.at(min(done[0], total - 1))  # the number of pilots depends on the run

        def on_device(state: Any) -> Any:
            return map_tree(lambda leaf: leaf.to(engine.device), state)

        server = on_device(run.server)
        bench = PosteriorLosses(engine, method, server, config.seed, advance)
        if method.refine_steps:
            told.append(
                "Theorem 3.2, also with a prior from other clients, is about models as the hypernetwork makes them. "
                f"It says nothing about the {counted(method.refine_steps, 'refining step')} after which each client "
                "uses its model here."
            )
        found = theorem_bounds(bench, config, data, server, delta, told)
        if run.prior is None:
            told.append(NO_PRIOR)
        else:
            found += prior_bounds(bench, config, data, server, on_device(run.prior), delta, told)
        watch.at(total)
        return found


def checked_data(run: Run, federation: Federation | None, console: Console | None) -> Federation:
    """Return the data that the run was trained on; PefllError if it is other data, or on other machines."""
    if federation is None and run.federation is None and data_of_python(run.config):
        raise PefllError(
            "the run was trained on data given in Python; give it to run.certify(federation=...) there",
            code="PEFLL-G216",
        )
    data = run._data(federation, console, "certify(federation=...)")
    if run.config.data_sha256 and data.fingerprint() != run.config.data_sha256:
        raise PefllError(
            f"{data.name} is not the data that the run was trained on, so its clients give no PAC-Bayes bound; leave "
            "out the federation",
            code="PEFLL-G214",
        )
    if not len(data.rows):
        raise PefllError(
            f"{data.name}: the clients' samples are on other machines, so PAC-Bayes bounds cannot be computed here",
            code="PEFLL-G215",
        )
    return data


def checked_method(method: Method[Any]) -> PeFLL:
    """Return the method; PefllError if these bounds are not about it."""
    if not isinstance(method, PeFLL):
        raise PefllError(
            f"PAC-Bayes bounds need an embedding network and a hypernetwork, which {type(method).__name__} does not "
            "have; train pefll, pefll-prior or pefll-plus",
            code="PEFLL-G212",
        )
    if not isinstance(method.problem.task, Classification):
        raise PefllError(
            f"PAC-Bayes bounds need a loss between 0 and 1, and the task {type(method.problem.task).__name__} has "
            "none; use classification",
            code="PEFLL-G213",
        )
    return method


def theorem_bounds(
    bench: PosteriorLosses, config: Config, data: Federation, server: Server, delta: float, notes: list[str]
) -> list[Statement]:
    """Return Theorem 3.2 with the paper's prior, for two losses.

    One seen client is left out: the numbers that standardise all descriptors come from its descriptor.
    """
    clients = np.arange(data.num_seen, dtype=np.int64)
    who = f"hyper-parameters were chosen without these clients, {FIXED}"
    try:
        first = first_client(config, bench.method, data)
        clients = np.delete(clients, first)
    except PefllError:  # a user's own sampling, whose code is not here
        notes.append("Theorem 3.2 counts the client whose descriptor standardises the others as if it were fixed.")
    clients = _with_samples(data, clients, TRAIN)
    if len(clients) == 0:
        notes.append("Theorem 3.2 is left out: no seen client has training samples; train with at least two clients.")
        return []
    name, title = "theorem-3.2", "Theorem 3.2"
    try:
        check_equal(data, clients)
    except PefllError as unequal:
        notes.append(f"{unequal.args[0].partition(';')[0]}. So the version for unequal numbers is shown.")
        name, title = "theorem-3.2-unequal", "Theorem 3.2 for unequal numbers of samples"
    eta = bench.method.serving(server)
    centres = Centres(None, zero_model(bench.method, eta.hypernetwork))
    found = evaluated(bench, data, eta, centres, clients, delta, name)
    return [
        theorem_statement(found, len(clients), delta, "zero_one", (name, f"{title}, error"), who),
        theorem_statement(
            found, len(clients), delta, "cross_entropy", (f"{name}-cross-entropy", f"{title}, cross-entropy"), who
        ),
    ]


def prior_bounds(
    bench: PosteriorLosses,
    config: Config,
    data: Federation,
    server: Server,
    prior: Server,
    delta: float,
    notes: list[str],
) -> list[Statement]:
    """Return the bounds with a prior that some of the seen clients made; the others are the clients of the bounds."""
    method, n = bench.method, data.num_seen
    members = PriorPhase(config.prior_clients, config.prior_rounds).clients(config.seed, n)
    others = without_influence(members, n)
    start, final = method.serving(prior), method.serving(server)
    found = []
    trained = _with_samples(data, others, TRAIN)
    if len(trained):
        fixed = Posterior(start, 0.0, 0.0, Part(frozenset(), frozenset()))
        centres = Centres(start, bench.mean_model(fixed, _with_samples(data, members, TRAIN)))
        parts = evaluated(bench, data, final, centres, trained, delta, "prior-half")
        words = f"the clients of the bound had no influence on the prior, {NO_SEARCH}, {FIXED}"
        if not equal_samples(data, trained):
            words += "; their number of samples is the harmonic mean"
        names = "prior-half", "Theorem 3.2 with a prior from other clients"
        found.append(theorem_statement(parts, len(trained), delta, "zero_one", names, words, tight=True))
    tested = _with_samples(data, trained, TEST)
    if len(tested) == 0:
        notes.append("The bound on test samples is left out: no seen client has any; split the data with test samples.")
        return found
    count = data.count[:, tested].double().mean(dim=1)
    sizes = float(count[TRAIN]), float(count[TEST])
    return found + query_statements(QueryProblem(bench, start, final, tested, sizes, delta))


def first_client(config: Config, method: Method[Any], data: Federation) -> int:
    """Return the client whose first descriptor standardises all descriptors, by its number."""
    plan = round_plan_of(config, method)
    return int(sampled(plan, data, config.seed, 0, clients_per_round(config, data))[0])


def _with_samples(data: Federation, clients: Ids, split: int) -> Ids:
    return clients[data.count[split, clients].numpy() > 0]


def _clients_to_evaluate(method: PeFLL, data: Federation, run: Run) -> int:
    """Return about how many clients are evaluated, for the progress bar."""
    n, count = data.num_seen, data.count.double().mean(dim=1)
    train, test = float(count[TRAIN]), float(count[TEST])

    def of_theorem(clients: int) -> int:
        draws = number_of_draws(method, (train, train), clients, THEOREM_BUDGET)
        return clients * (draws + number_of_draws(method, (train, 0), clients, THEOREM_BUDGET / 4, most=8))

    if run.prior is None:
        return of_theorem(n)
    members = PriorPhase(run.config.prior_clients, run.config.prior_rounds).size(n)
    others = max(1, n - members)
    draws = number_of_draws(method, (train, test), others, QUERY_BUDGET)
    return of_theorem(n) + members + of_theorem(others) + others * (1 + draws * len(FAMILIES))
