"""The server's app: it trains with real clients in the usual loop, or makes a personal model for each client."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.core.progress import say
from pefll.core.tree import Tree, map_tree
from pefll.deploy.plan import Plan
from pefll.deploy.shutdown import exit_with_parent
from pefll.engines.flower.server.engine import FlowerEngine
from pefll.engines.round_plan import UNIFORM, RoundPlan
from pefll.runs.config import Config
from pefll.runs.record import RunFolder
from pefll.training import fitting, run
from pefll.training.resolve import round_plan_of
from pefll.training.run import Run

Report = Callable[[str], None]


def main(grid: Any, context: Any) -> None:
    """Do the task that the run config names, train or personalize, with the clients of Flower's grid."""
    console = Console(stderr=True, soft_wrap=True)
    plan = Plan.from_config(context.run_config)
    try:
        # A simulation may outlive the shell that started it.
        deployed = Path(sys.argv[0]).name == "flwr-serverapp"
        with exit_with_parent(_reporter(console)) if deployed else nullcontext():
            if plan.task == "personalize":
                personalize(grid, plan, console)
            else:
                train(grid, plan, console)
    except PefllError as error:
        say(console, f"error: {error}")
        # Flower logs that the run failed, and exits. The filter removes the traceback: the sentence above is enough.
        logging.getLogger("flwr").addFilter(_without(error))
        raise


def _without(error: PefllError) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not (isinstance(record.exc_info, tuple) and record.exc_info[1] is error)


def train(grid: Any, plan: Plan, console: Console | None = None) -> Run:
    """Train with the clients of a grid; a run with a checkpoint in the federation's folder resumes from it."""
    agreed = plan.agreement
    config = config_of(plan)
    folder = RunFolder(plan.run) if plan.folder else None
    resumes = folder is not None and any(folder.checkpoints.glob("round-*"))
    # A resumed run needs only the shapes of the state. A made-up client gives them, so that no real client is asked.
    template = run.method_template(agreed.build(), config, agreed.label_columns or None) if resumes else None
    engine = _engine(grid, plan, _reporter(console), template)
    try:
        engine.roster.wait_for(plan.wait_clients or len(plan.names), plan.wait_seconds)
        return fitting.fit_on(engine, config, folder.path if folder else None, console)
    finally:
        engine.close()


def personalize(grid: Any, plan: Plan, console: Console | None = None) -> list[str]:
    """Make a model for every connected client, send it, and return the names of the clients that have received it.

    Clients that did not train get a model, too. PeFLL needs two exchanges: the client sends a descriptor, and the
    server sends a model. The client writes the model to its disk.
    """
    report = _reporter(console)
    trained = run.load(plan.run, console)
    listing = _engine(grid, plan, lambda sentence: None, trained.server, c=0)
    listing.roster.present()
    newcomers = sorted(set(listing.roster.unknown_nodes.values()) - set(plan.names))
    listing.close()
    engine = FlowerEngine(
        grid, plan.agreement, plan.names, 0, plan.terms, report, template=trained.server, newcomers=newcomers
    )
    done: list[str] = []
    try:
        there = np.array(engine.roster.present(), dtype=np.int64)
        if not len(there):
            raise PefllError(
                "no client is connected; start `pefll flower client` on the clients' machines", code="PEFLL-F421"
            )
        server = map_tree(engine.cast, trained.server)
        for ids, cohort in engine.cohorts(there):
            with torch.no_grad():
                theta = engine.method.personalize(server, cohort)
            failed = engine.deliver(cohort, theta)
            for client in ids.tolist():
                name = engine.federation.name_of(client)
                if client in failed:
                    report(f"{name} has no model: it {failed[client]}")
                else:
                    done.append(name)
                    report(f"{name} has its model{'' if client < len(plan.names) else ', and did not train'}")
    finally:
        engine.close()
    return done


def config_of(plan: Plan) -> Config:
    """Return the settings of the run that a plan describes."""
    agreed = plan.agreement
    return Config(
        method=agreed.method,
        settings=agreed.settings,
        data=agreed.dataset,
        partition="their own",
        clients=agreed.num_clients,
        unseen=0.0,
        model=agreed.model,
        rounds=plan.rounds,
        clients_per_round=plan.clients_per_round,
        sampling=plan.sampling,
        lr_schedule=plan.lr_schedule,
        server_lr_schedule=plan.server_lr_schedule,
        seed=agreed.seed,
        engine="flower",
        device="cpu",
        precision=agreed.precision,
        eval_every=plan.eval_every,
        checkpoint_every=plan.checkpoint_every,
        data_sha256=agreed.sha256,
    )


def _engine(grid: Any, plan: Plan, report: Report, template: Tree | None, c: int | None = None) -> FlowerEngine:
    size = cohort_size(plan) if c is None else c
    rounds = round_plan(plan) if size else UNIFORM
    return FlowerEngine(grid, plan.agreement, plan.names, size, plan.terms, report, template=template, plan=rounds)


def round_plan(plan: Plan) -> RoundPlan:
    """Return the sampling and the schedules of a federation's rounds."""
    return round_plan_of(config_of(plan), plan.agreement.build())


def cohort_size(plan: Plan) -> int:
    """Return the number of clients per round: the plan's, or 5% of all."""
    return plan.clients_per_round or -(-len(plan.names) // 20)


def _reporter(console: Console | None) -> Report:
    return lambda sentence: say(console, sentence) if console else None
