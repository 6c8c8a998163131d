"""`pefll.tune`: a grid search on a federation that was made in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from pefll.core import arguments
from pefll.core.errors import PefllError
from pefll.core.schedules import Schedule
from pefll.core.wording import argument
from pefll.data.federation import Federation, check_is_federation
from pefll.engines.round_plan import Sampling
from pefll.experiments.grid_search import Search, run_search
from pefll.experiments.trials import TUNED, Trials
from pefll.methods import BaseMethod, typed_settings
from pefll.tasks import Task
from pefll.tasks.names import allow_task, checked_task
from pefll.training.fitting import checked_arguments, config_on, names_and_functions


def tune(
    federation: Federation | Callable[[int], Federation],
    method: str | type | BaseMethod = "pefll",
    *,
    grid: Mapping[str, Sequence[Any]],
    model: str | nn.Module = "auto",
    task: str | type | Task | None = None,
    rounds: int = 1000,
    seeds: Sequence[int] = (0,),
    hold_out: float = 0.0,
    judge: str = "held-out",
    out: str | Path = "runs/tune",
    to: str | Path = TUNED,
    at_once: int = 1,
    console: Console | None = None,
    lr_schedule: str | Schedule = "constant",
    server_lr_schedule: str | Schedule = "constant",
    sampling: str | Sampling = "uniform",
    **settings: Any,
) -> Trials:
    """Try all combinations of a grid's values and return the trials; `trials.best["settings"]` are the best settings.

    The best settings have the best first metric of the task on seen clients' validation samples: the highest accuracy,
    or the lowest error. Test samples and unseen clients take no part. Trials are kept in a file and not repeated.
    Those with other data, settings or code stay in the file, but do not count. Trials have no callbacks.

    Args:
        federation: one federation for all seeds, or a function that makes the federation of a seed.
        method: see `pefll.fit`.
        grid: the values to try of each hyper-parameter, such as {"client_lr": [1e-3, 1e-2]}.
        model: see `pefll.fit`.
        task: see `pefll.fit`.
        rounds: number of rounds of each run.
        seeds: seeds with which each setting is tried.
        hold_out: share of the seen clients that do not train, and whose metric decides; 0 for none.
        judge: with `hold_out`: "held-out", or "both" for the mean of their metric and that of the clients that train.
        out: folder for runs; stopped runs are resumed.
        to: folder of the trial file, DATA-METHOD-nCLIENTS.json.
        at_once: number of runs that share the device.
        console: shows progress; None for silence.
        lr_schedule: see `pefll.fit`.
        server_lr_schedule: see `pefll.fit`.
        sampling: see `pefll.fit`.
        settings: settings that all trials share; see `pefll.fit`.
    """
    numbers = arguments.listed(seeds, "seeds", "[0, 1, 2]")
    seeds = tuple(arguments.whole_number(seed, "a seed", 0) for seed in numbers)
    if not seeds or len(set(seeds)) < len(seeds):
        raise PefllError("seeds must differ from each other; give at least one seed", code="PEFLL-T104")
    if "callbacks" in settings:
        raise PefllError(
            "a search has no callbacks, because its trials must depend on their settings alone; leave out callbacks, "
            "and choose the number of rounds with rounds",
            code="PEFLL-X503",
        )
    given = _federations(federation)
    named, functions = names_and_functions(lr_schedule, server_lr_schedule, sampling)
    allow_task(task)
    value = checked_task(task)
    name, settings, networks, _, _ = checked_arguments(method, model, settings, None, console, ())
    config = config_on(given(seeds[0]), name, model, rounds, seeds[0], settings | named)
    search = Search(
        config,
        _typed(config.method, grid),
        seeds,
        arguments.number(hold_out, "hold_out"),
        arguments.text(judge, "judge"),
        federation=given,
        task=value,
        model=model if isinstance(model, nn.Module) else None,
        networks=networks,
        functions=functions,
    )
    folder, target = arguments.path(out, "out"), arguments.path(to, "to")
    return run_search(
        search, folder, target, arguments.whole_number(at_once, "at_once", 1), console or Console(quiet=True)
    )


def _federations(federation: Any) -> Callable[[int], Federation]:
    """Return a function that makes the federation of a seed, and each of them once."""
    made: dict[int, Federation] = {}

    def of_seed(seed: int) -> Federation:
        if seed not in made:
            made[seed] = federation(seed) if callable(federation) else federation
            check_is_federation(made[seed])
        return made[seed]

    return of_seed


def _typed(method: str, grid: Any) -> dict[str, tuple[Any, ...]]:
    """Return a grid given in Python, with the types of the method's settings; PefllError for another object."""
    if not isinstance(grid, Mapping) or not grid:
        raise PefllError(
            f"{argument('grid')} is {arguments.shown(grid)}; give the values to try of each hyper-parameter, such as "
            "grid={'client_lr': [1e-3, 1e-2]}",
            code="PEFLL-X501",
        )
    found = {}
    for name, values in grid.items():
        listed = arguments.listed(values, f"grid[{name!r}]", "[1e-3, 1e-2]")
        typed = tuple(typed_settings(method, {name: value})[name] for value in listed)
        if not typed or any(typed.index(value) != place for place, value in enumerate(typed)):
            raise PefllError(
                f"grid[{name!r}] is {arguments.shown(values)}; list different values, at least one", code="PEFLL-X502"
            )
        found[name] = typed
    return found
