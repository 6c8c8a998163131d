"""Accuracy on new clients whose class proportions differ from training clients' (the paper's `fig:ood_clients`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pefll.data.assembly import assemble
from pefll.data.class_partition import dirichlet
from pefll.data.federation import Federation
from pefll.data.samples import TEST, TRAIN, VALIDATION, Samples
from pefll.experiments.descriptors import CELLS as DIRICHLET_CELLS
from pefll.experiments.evidence import NOTHING, Evidence, Gap, Verdict, gap_over_seeds, judged, signed
from pefll.experiments.experiment import Experiment, Row
from pefll.experiments.pages import markdown_table
from pefll.experiments.results import Result
from pefll.report import mean_and_std, mean_std_text
from pefll.report.plots import LINES, drawing
from pefll.report.significance import Pair, paired_bootstrap
from pefll.training.callbacks import Callback
from pefll.training.run import Run

Array = npt.NDArray[Any]
CELL = DIRICHLET_CELLS[0]
ALPHAS = tuple(round(0.1 * step, 1) for step in range(1, 11))
GROUP = 25  # new clients for each α, with about 370 training samples each; a training client has 400
# PeFLL, Local, and the baselines of Table 1 that are best on CIFAR-10.
ROWS = (
    *(Row("PeFLL", "pefll"), Row("kNN-Per", "knn-per"), Row("Per-FedAvg", "per-fedavg")),
    *(Row("pFedMe", "pfedme"), Row("FedRep", "fedrep"), Row("Local", "local")),
)
BASELINES = tuple(row.name for row in ROWS if row.name not in ("PeFLL", "Local"))
PLACE = "fig:ood_clients"


def new_clients(trained: Federation, seed: int, alphas: Sequence[float] = ALPHAS, group: int = GROUP) -> Federation:
    """Return a federation of new clients, sorted by group. Nobody has trained on their samples.

    The new clients' training samples are the validation samples of the trained federation. These were used only to
    choose the best round. The new clients' test samples are the test samples of the trained federation.

    Args:
        trained: the federation used for training.
        seed: seed of the random partition.
        alphas: Dirichlet concentration of each group.
        group: number of clients in a group.
    """
    rows = {split: _rows(trained, split) for split in (VALIDATION, TEST)}
    pool = np.concatenate(list(rows.values()))
    samples = Samples(
        x=trained.x[pool].numpy(force=True),
        y=trained.y[pool].numpy(force=True),
        classes=trained.classes,
        split=np.repeat(np.array([TRAIN, TEST], dtype=np.int8), [len(some) for some in rows.values()]),
        normalise=trained.normalise,
        name=trained.name,
    )
    owners: list[Array] = []
    splits: list[Array] = []
    taken: list[Array] = []
    for place, alpha in enumerate(alphas):
        parts = dirichlet(samples, group, alpha, seed, unseen=0.0, validation=0.0)
        for client in range(group):
            for split in (TRAIN, TEST):
                own = parts.indices(client, split).numpy(force=True)
                taken.append(own)
                owners.append(np.full(len(own), place * group + client))
                splits.append(np.full(len(own), split, dtype=np.int8))
    words = f"dirichlet {', '.join(f'{alpha:g}' for alpha in alphas)}"
    owner, split_, own = (np.concatenate(parts) for parts in (owners, splits, taken))
    made = assemble(samples, owner, split_, len(alphas) * group, words, rows=own)
    return dataclasses.replace(made, num_seen=0, normalise=trained.normalise)


def _rows(federation: Federation, split: int) -> Array:
    """Return the indices of all clients' samples in a split, each index once."""
    every = [federation.indices(client, split).numpy(force=True) for client in range(federation.num_clients)]
    return np.unique(np.concatenate(every))


@dataclass(frozen=True)
class NewClientAccuracy:
    """Measures test accuracy on groups of new clients that differ more and more from the training clients."""

    alphas: tuple[float, ...] = ALPHAS
    group: int = GROUP
    name: str = "extrapolation"

    @property
    def config(self) -> Mapping[str, Any]:
        """No fields, because these runs need no special settings."""
        return {}

    def callbacks(self) -> Sequence[Callback]:
        """Return no callbacks."""
        return ()

    def written(self, folder: Path) -> None:
        """Delete nothing."""

    def of(self, run: Run, folder: Path) -> dict[str, Any]:
        """Return the numbers of samples and of correct predictions of each new client, at the best round."""
        del folder
        assert run.federation is not None
        data = new_clients(run.federation, run.config.seed, self.alphas, self.group)
        scores: list[Any] = run.evaluate_clients("test", data)
        groups = [scores[at : at + self.group] for at in range(0, len(scores), self.group)]
        return {
            "alphas": list(self.alphas),
            "samples": [[one.samples for one in group] for group in groups],
            "correct": [[one.correct for one in group] for group in groups],
            "masked": [[one.masked for one in group] for group in groups],
        }


def _counts(result: Result, alpha: float, what: str) -> Array:
    measured = result["measured"]["extrapolation"]
    return np.array(measured[what][measured["alphas"].index(alpha)], dtype=np.int64)


def accuracies(results: Sequence[Result], alpha: float) -> dict[int, float]:
    """Return, for each seed, the accuracy in per cent on the new clients of one concentration."""
    return {
        one["seed"]: 100 * float(_counts(one, alpha, "correct").sum() / _counts(one, alpha, "samples").sum())
        for one in results
    }


def gap(ours: Sequence[Result], at: float, theirs: Sequence[Result], other: float) -> Gap | None:
    """Return how far `ours` at concentration `at` is ahead of `theirs` at `other`; None without common seeds.

    If the concentrations are equal, the interval is from pairs of clients. Otherwise it is from pairs of seeds.
    """
    mine, yours = accuracies(ours, at), accuracies(theirs, other)
    seeds = sorted(mine.keys() & yours.keys())
    if not seeds:
        return None
    if at != other:
        return gap_over_seeds([mine[seed] - yours[seed] for seed in seeds])
    by_seed = [{one["seed"]: one for one in results} for results in (ours, theirs)]
    pairs = [
        Pair(
            _counts(by_seed[0][seed], at, "samples"),
            _counts(by_seed[0][seed], at, "correct"),
            _counts(by_seed[1][seed], at, "correct"),
        )
        for seed in seeds
    ]
    tested = paired_bootstrap(pairs)
    return Gap(tested.points, tested.low, tested.high, "clients", len(seeds))


def _judge(evidence: Evidence) -> list[Verdict]:
    def results(row: str) -> list[Result]:
        return evidence.results(row, CELL.name)

    def verdict(text: str, first: str, at: float, second: str, other: float) -> Verdict:
        where = f"{first} at α = {at:g} − {second} at α = {other:g}"
        found = gap(results(first), at, results(second), other)
        if found is None:
            return Verdict(text, PLACE, where, "", "", NOTHING)
        return Verdict(text, PLACE, where, signed(found.points), found.interval, judged(found, 0.0, None))

    return [
        verdict("With larger α the problem is harder: Local's accuracy falls", "Local", 0.1, "Local", 1.0),
        *(
            verdict("At α = 1 PeFLL is better than other methods at smaller α", "PeFLL", 1.0, row, alpha)
            for row in BASELINES
            for alpha in (0.5, 0.9)
        ),
        verdict("At α = 1 PeFLL is far better than Local", "PeFLL", 1.0, "Local", 1.0),
        *(
            verdict("PeFLL is better than all baselines at any α", "PeFLL", alpha, row, alpha)
            for row in BASELINES
            for alpha in (0.1, 0.5, 1.0)
        ),
    ]


def _sections(evidence: Evidence) -> list[str]:
    body = []
    for row in ROWS:
        results = evidence.results(row.name, CELL.name)
        values = [mean_std_text(list(accuracies(results, alpha).values())) for alpha in ALPHAS]
        body.append([row.name, str(len(results)), *values])
    headings = ["", "seeds", *(f"α = {alpha:g}" for alpha in ALPHAS)]
    title = f"## New clients with other class proportions, {GROUP} for each α"
    return [title, "", *markdown_table(headings, body)]


def _draw(evidence: Evidence, folder: Path) -> list[Path]:
    found = {row.name: evidence.results(row.name, CELL.name) for row in ROWS}
    shown = {name: results for name, results in found.items() if results}
    if not shown:
        return []
    path = folder / f"{EXPERIMENT.file_stem}.png"
    with drawing(path, (6.5, 4.2)) as figure:
        axes = figure.subplots()
        axes.set_title("Test accuracy of new clients, %")
        axes.grid(axis="y")
        for (name, results), colour in zip(shown.items(), LINES, strict=False):
            parts = [mean_and_std(list(accuracies(results, alpha).values())) for alpha in ALPHAS]
            mean = np.array([part[0] for part in parts])
            std = np.array([part[1] or 0.0 for part in parts])
            axes.plot(ALPHAS, mean, color=colour, marker="o", markersize=3, label=name)
            axes.fill_between(ALPHAS, mean - std, mean + std, color=colour, alpha=0.14, linewidth=0)
        axes.set_xlabel("α of new clients; training clients have 0.1")
        axes.legend(loc="best", ncols=2)
    return [path]


EXPERIMENT = Experiment(
    name="extrapolation",
    title="New clients unlike those of training",
    about="CIFAR-10 with 100 clients, of which 90 train. Their class proportions are drawn from a Dirichlet "
    f"distribution with α = 0.1. For each α, there are {GROUP} new clients. A new client has about 370 training "
    "samples; a training client has 400. The settings are those of Table 1. No new client has a sample that was used "
    "for training. Their training samples come from the validation split, which only chose the best round. Their "
    "test samples come from the test split. Clients of a group may share samples. The paper has a figure without "
    "numbers.",
    cells=(CELL,),
    rows=ROWS,
    measure=NewClientAccuracy(),
    judge=_judge,
    sections=_sections,
    draw=_draw,
)
