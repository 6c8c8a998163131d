"""Bounds on the error of future clients during training, beside the error of the unseen clients."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from pefll.core.errors import PefllError
from pefll.core.files import make_folder, write_whole
from pefll.experiments.evidence import FAILS, HOLDS, NOTHING, Evidence, Verdict
from pefll.experiments.experiment import CIFAR10, Experiment, Point, Row, panel
from pefll.experiments.pages import markdown_table
from pefll.experiments.table1 import CELLS as TABLE1
from pefll.experiments.table1 import Cell
from pefll.methods.optim import NoMean
from pefll.report.certificate import bounds_over_training
from pefll.report.runs import MISSING
from pefll.runs.checkpoint import TENSORS
from pefll.training.callbacks import ActiveRun, Callback
from pefll.training.meta_bounds import meta_bounds
from pefll.training.run import Run

DELTA = 0.05
WRITERS = tuple(cell for cell in TABLE1 if cell.partition == "natural")
PLAIN = (*CIFAR10, *WRITERS)
WITH_PRIOR = tuple(
    cell._replace(prior_clients=0.5, tag="prior", title=f"{cell.title}, with a prior")
    for cell in (*CIFAR10[1:], *WRITERS)
)
ROW = Row("PeFLL", "pefll")
STATES = "states"  # a folder in the run's folder
KEPT = ("hypernetwork", "embedder", "shift", "scale")
USEFUL = 0.5
THEOREM, UNEQUAL, HALF, QUERY = "theorem-3.2", "theorem-3.2-unequal", "prior-half", "query"
SHOWN = {
    THEOREM: "Theorem 3.2",
    UNEQUAL: "Theorem 3.2, unequal numbers of samples",
    HALF: "prior from half of the clients",
    QUERY: "one term per client, the best",
}


class KeepStates(Callback):
    """Copies what makes personal models from every scheduled checkpoint, because old checkpoints are deleted.

    The copies are deleted when the run's result has been written.
    """

    def on_checkpoint(self, run: ActiveRun, round_: int) -> None:
        """Write the state's parts to the run's folder of states."""
        config, folder = run.spec.config, run.spec.folder
        if folder is None or (round_ % config.checkpoint_every and round_ != config.rounds):
            return
        content = io.BytesIO()
        with safetensors.safe_open(folder.checkpoints / f"round-{round_:08d}" / TENSORS, framework="numpy") as tensors:
            np.savez(content, **{name: tensors.get_tensor(f"server.{name}") for name in KEPT})
        make_folder(folder.path / STATES)
        write_whole(folder.path / STATES / f"round-{round_:08d}.npz", content.getvalue())


@dataclass(frozen=True)
class BoundsInTraining:
    """Measures the bounds and the error of unseen clients at each scheduled checkpoint."""

    name: str = "certificates"
    config: dict[str, Any] = field(default_factory=lambda: {"checkpoint_every": 625}, hash=False)

    def callbacks(self) -> Sequence[Callback]:
        """Return the callback that copies the states."""
        return [KeepStates()]

    def of(self, run: Run, folder: Path) -> dict[str, Any]:
        """Return the bounds by name and the unseen clients' mean error at each state, and the last statements."""
        points: list[dict[str, Any]] = []
        last: list[dict[str, Any]] = []
        paths = sorted((folder / STATES).glob("*.npz"))
        if not paths:
            raise PefllError(
                f"{folder} has no {STATES} any more, because they are deleted when a result is written; delete the "
                "folder to train the run again",
                code="PEFLL-X018",
            )
        for path in paths:
            at = int(path.stem.removeprefix("round-"))
            with np.load(path) as parts:
                kept = {name: torch.from_numpy(parts[name]) for name in KEPT}
            server = run.final._replace(**kept, average=NoMean())
            known = run.prior if at > run.config.prior_rounds else None
            state = dataclasses.replace(run, server=server, prior=known)
            statements = meta_bounds(state, DELTA)
            last = [one.row() for one in statements]
            points.append(
                {
                    "round": at,
                    "unseen_error": unseen_error(state),
                    "bounds": {one.name: round(one.bound, 5) for one in statements},
                }
            )
        prior = None if run.prior is None else unseen_error(dataclasses.replace(run, server=run.prior))
        return {"delta": DELTA, "points": points, "statements": last, "prior_unseen_error": prior}

    def written(self, folder: Path) -> None:
        """Delete the states, about 50 MB each, which only the measurement needs."""
        shutil.rmtree(folder / STATES, ignore_errors=True)


def unseen_error(run: Run) -> float:
    """Return the mean over unseen clients of their shares of wrong predictions on test samples."""
    return round(1 - float(run.evaluate("test").unseen.per_client), 5)


def _measured(evidence: Evidence, cell: Cell) -> list[dict[str, Any]]:
    """Return the measurements of a cell, one per seed."""
    return [one["measured"]["certificates"] for one in evidence.results(ROW.name, cell.name)]


def _last(measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the statements at the end of training, by name."""
    return {one["name"]: one for one in measured["statements"]}


def _theorem(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return Theorem 3.2 at the end of training, for equal or unequal numbers of samples."""
    found = _last(measured)
    return found.get(THEOREM) or found[UNEQUAL]


def _largest_part(statement: Mapping[str, Any]) -> str:
    """Return the largest part of Theorem 3.2, with its value."""
    terms = statement["terms"]
    parts = {
        "‖η_h‖² term": (terms["kl_hypernetwork"] / (2 * terms["clients"])) ** 0.5,
        "‖η_v‖² term": (terms["kl_embedder"] / (2 * terms["clients"])) ** 0.5,
        "‖θ‖² term": terms["models_term"],
        "loss": terms["loss_bound"],
    }
    name = max(parts, key=lambda part: parts[part])
    return f"{name} {parts[name]:.3g}"


def _judge(evidence: Evidence) -> list[Verdict]:
    verdicts = []
    for cell in PLAIN:
        found = [_theorem(one) for one in _measured(evidence, cell)]
        text = "The bound of Theorem 3.2 is above 1, so it says nothing at this scale"
        least = min((one["bound"] for one in found), default=0.0)
        part = _largest_part(found[0]) if found else ""
        verdicts.append(_verdict(text, cell, found, f"{least:.3g}", f"largest part: {part}", least >= 1))
    for cell in WITH_PRIOR:
        found = [_last(one)[QUERY] for one in _measured(evidence, cell)]
        text = f"With a prior from half of the clients, a bound is below {USEFUL}"
        worst = max((one["bound"] for one in found), default=0.0)
        verdicts.append(_verdict(text, cell, found, f"{worst:.3f}", "the largest over seeds", worst < USEFUL))
    for cell in WITH_PRIOR:
        known = _measured(evidence, cell)
        gaps = [_last(one)["query-prior"]["bound"] - one["prior_unseen_error"] for one in known]
        text = "The bound of the prior's models is above their error on unseen clients"
        least = min(gaps, default=0.0)
        verdicts.append(_verdict(text, cell, known, f"{least:+.3f}", "the smallest difference over seeds", least >= 0))
    return verdicts


def _verdict(text: str, cell: Cell, found: Sequence[Any], figure: str, interval: str, holds: bool) -> Verdict:
    place = "thm:pacbayes"
    if not found:
        return Verdict(text, place, cell.title, "", "", NOTHING)
    return Verdict(text, place, cell.title, figure, interval, HOLDS if holds else FAILS)


def _sections(evidence: Evidence) -> list[str]:
    headings = ["federation", "seed", "unseen error", "Theorem 3.2", "largest part", "prior: half", "its unseen error"]
    headings += ["query: prior", "query: best"]
    body = []
    for cell in (*PLAIN, *WITH_PRIOR):
        for result in evidence.results(ROW.name, cell.name):
            measured = result["measured"]["certificates"]
            last, theorem = _last(measured), _theorem(measured)
            prior = measured["prior_unseen_error"]
            body.append(
                [
                    cell.title,
                    str(result["seed"]),
                    f"{measured['points'][-1]['unseen_error']:.3f}",
                    f"{theorem['bound']:.4g}",
                    _largest_part(theorem),
                    *(_bound(last, name) for name in (HALF,)),
                    MISSING if prior is None else f"{prior:.3f}",
                    *(_bound(last, name) for name in ("query-prior", QUERY)),
                ]
            )
    return ["## Bounds at the end of training", "", *markdown_table(headings, body)]


def _bound(statements: Mapping[str, Mapping[str, Any]], name: str) -> str:
    return f"{statements[name]['bound']:.3f}" if name in statements else MISSING


def _draw(evidence: Evidence, folder: Path) -> list[Path]:
    shown = {cell: one[0] for cell in (*PLAIN, *WITH_PRIOR) if (one := _measured(evidence, cell))}
    if not shown:
        return []
    path = folder / "certificates.png"
    panels = {cell.title: measured["points"] for cell, measured in shown.items()}
    bounds_over_training(panels, path, SHOWN, "unseen clients' error")
    return [path]


EXPERIMENT = Experiment(
    name="certificates",
    title="Bounds on the error of future clients",
    about="PeFLL with the settings of Table 1. At each of eight states in training we compute Theorem 3.2 with "
    f"confidence {1 - DELTA:.0%}, and beside it the mean error of the unseen clients, which had no influence. In runs "
    "with a prior, half of the seen clients take part in the first half of the rounds; the other half gives the "
    "bounds. The bounds called query are about a client's test samples and have no term for its training samples. "
    "docs/theory.md has the derivations.",
    cells=(*PLAIN, *WITH_PRIOR),
    rows=(ROW,),
    panels=[
        panel("Test accuracy", PLAIN, {f"PeFLL, {who}": Point(ROW.name, PLAIN[0], who) for who in ("seen", "unseen")}),
        panel(
            "Test accuracy of runs with a prior",
            WITH_PRIOR,
            {f"PeFLL, {who}": Point(ROW.name, WITH_PRIOR[0], who) for who in ("seen", "unseen")},
        ),
    ],
    measure=BoundsInTraining(),
    judge=_judge,
    sections=_sections,
    draw=_draw,
    question="What the bounds say",
)
