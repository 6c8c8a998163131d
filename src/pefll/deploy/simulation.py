"""Simulates the first rounds of a federation's run on one machine; real clients continue the same run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.core.wording import argument, counted
from pefll.data import LABEL
from pefll.data.federation import Federation
from pefll.deploy.plan import Plan, read_app
from pefll.deploy.server_app import cohort_size, config_of, round_plan
from pefll.engines.flower.client.member import Member
from pefll.engines.flower.client.policy import NO_LIMITS
from pefll.engines.serial import SerialEngine
from pefll.runs import manifest
from pefll.runs.progress import check_progress
from pefll.runs.record import RunFolder
from pefll.training import fitting
from pefll.training.run import Run

KINDS = (".npz", ".csv", ".parquet", "")  # suffixes of files with clients' data; "" for a folder


def simulate(folder: Path, data: Path, rounds: int, console: Console | None = None, label: str = LABEL) -> Run:
    """Train the first rounds of a federation's run on this machine, with other data in place of the clients' data.

    `pefll flower run` continues the run, with the same settings, seed and client numbers. If `data` is the data of the
    real clients, the run has the same bits as one with real clients. The summary, the history and the log say which
    rounds were simulated.

    Args:
        folder: folder of the federation.
        data: folder with data for each client: NAME.npz, NAME.csv, NAME.parquet or NAME/class/*.png.
        rounds: the last round to simulate; an earlier simulation is continued.
        console: console for progress; None for silence.
        label: name of the labels, which are a column of a table or an array of an .npz file.
    """
    plan = read_app(folder)
    if not 1 <= rounds < plan.rounds:
        raise PefllError(
            f"{argument('rounds')} is {rounds:,}; the federation trains for {counted(plan.rounds, 'round')}, so 1 to "
            f"{plan.rounds - 1:,} can be simulated",
            code="PEFLL-F110",
        )
    if any(text.startswith("cosine") for text in (plan.lr_schedule, plan.server_lr_schedule)):
        raise PefllError(
            "a federation with a cosine schedule cannot be simulated first, because its rate ends with the last round; "
            "use a step schedule",
            code="PEFLL-F550",
        )
    run = RunFolder(replace(plan, folder=str(folder.resolve())).run)
    newest = manifest.newest(run.checkpoints)
    if newest is not None:
        check_progress(newest.metadata, run.path)
    engines = newest.metadata["progress"].get("engines", []) if newest is not None else []
    if any(name != SerialEngine.name for name, _ in engines):
        raise PefllError(
            f"real clients have trained in {run.path} already; a simulation comes before them: make another federation",
            code="PEFLL-F112",
        )
    federation = join_members(plan, [_member(plan, name, data, label) for name in plan.names])
    # One checkpoint at the end is enough, because a crashed simulation can be repeated in seconds.
    config = replace(config_of(plan), engine=SerialEngine.name, rounds=rounds, checkpoint_every=rounds)
    agreed = plan.agreement
    engine = SerialEngine(
        federation, agreed.build(), agreed.seed, cohort_size(plan), agreed.dtype, plan=round_plan(plan)
    )
    try:
        # No maps: their descriptors would come from simulated clients, and real clients would not replace them.
        return fitting.fit_on(engine, config, run.path, console, maps=False)
    finally:
        engine.close()


def join_members(plan: Plan, members: list[Federation]) -> Federation:
    """Return one federation that has the clients of `members`, one client each, in the order of the plan's names."""
    first, agreed = members[0], plan.agreement
    rows, offsets, samples, before = [], [], 0, 0
    for own in members:
        rows.append(own.rows + samples)
        offsets.append(own.offset + before)
        samples, before = samples + len(own.x), before + len(own.rows)
    return replace(
        first,
        x=torch.cat([own.x for own in members]),
        y=torch.cat([own.y for own in members]),
        rows=torch.cat(rows),
        offset=torch.cat(offsets, dim=1),
        count=torch.cat([own.count for own in members], dim=1),
        num_seen=len(members),
        name=agreed.dataset,
        partition="their own",
        feature_names=agreed.feature_names,
        table=agreed.plan,
        keys=None,
        names=plan.names,
    )


def _member(plan: Plan, name: str, data: Path, label: str) -> Federation:
    """Read one client's samples, as the client itself would."""
    for kind in KINDS:
        if (place := data / f"{name}{kind}").exists():
            return Member(name, place, label, None, True, None, NO_LIMITS, plan.agreement).federation()
    raise PefllError(
        f"{data} has no data for the client {name}: put {name}.npz, {name}.csv, {name}.parquet or a folder there",
        code="PEFLL-F111",
    )
