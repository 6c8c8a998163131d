"""Measures during training whether similar clients have similar descriptors (the paper's `fig:rank_corr`)."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import torch

from pefll.core.files import make_folder, write_whole
from pefll.core.tree import map_tree
from pefll.engines.device_queue import queue_of
from pefll.engines.hardware import open_engine, pick_hardware
from pefll.experiments.evidence import NOTHING, Evidence, Gap, Verdict, gap_over_seeds, judged
from pefll.experiments.experiment import Experiment, Point, Row, panel
from pefll.experiments.pages import markdown_table
from pefll.experiments.table1 import Cell
from pefll.methods.optim import NoMean
from pefll.methods.pefll import PeFLL
from pefll.report import mean_and_std
from pefll.report.descriptors import Descriptors, distances, mean_correlation, principal_plane
from pefll.report.plots import CLASSES, LINES, MARKERS, drawing
from pefll.report.runs import MISSING
from pefll.runs.checkpoint import TENSORS
from pefll.training.callbacks import ActiveRun, Callback
from pefll.training.evaluation import descriptors
from pefll.training.run import Run

Array = npt.NDArray[Any]
CELLS = tuple(
    Cell("cifar10", n, "dirichlet 0.1", f"CIFAR-10, Dirichlet 0.1, n={n}", 40_000, tag="dirichlet-0.1")
    for n in (100, 500, 1000)
)
ROW = Row("PeFLL", "pefll")
PAPER = 0.93  # the paper's correlation at the end of training, with 1000 clients
ABOUT = 0.05  # a correlation is "about" the paper's if it is at most this much smaller
GRID = 1000  # the map's coordinates are stored as integers from -GRID to GRID


class KeepEmbedders(Callback):
    """Copies the embedding network of every checkpoint, because old checkpoints are deleted."""

    def on_checkpoint(self, run: ActiveRun, round_: int) -> None:
        """Write the network's parameters to the run's folder `embedders`."""
        assert run.spec.folder is not None
        state = run.spec.folder.checkpoints / f"round-{round_:08d}" / TENSORS
        with safetensors.safe_open(state, framework="numpy") as tensors:
            content = io.BytesIO()
            np.save(content, tensors.get_tensor("server.embedder"))
        target = run.spec.folder.path / "embedders"
        make_folder(target)
        write_whole(target / f"round-{round_:08d}.npy", content.getvalue())


@dataclass(frozen=True)
class DescriptorCorrelation:
    """Measures Spearman's correlation between descriptor distances and class-proportion distances during training."""

    name: str = "descriptors"
    config: dict[str, Any] = field(default_factory=lambda: {"checkpoint_every": 250}, hash=False)

    def callbacks(self) -> Sequence[Callback]:
        """Return the callback that copies the embedding networks."""
        return [KeepEmbedders()]

    def written(self, folder: Path) -> None:
        """Delete nothing."""

    def of(self, run: Run, folder: Path) -> dict[str, Any]:
        """Return the correlations before training and at each checkpoint, and the descriptor map at the end."""
        data, method, config = run.federation, run.method, run.config
        assert data is not None
        assert isinstance(method, PeFLL)
        kept = {int(path.stem.removeprefix("round-")): path for path in sorted((folder / "embedders").glob("*.npy"))}
        embedders = {0: method.phi.init(config.seed, "embedder")}
        embedders |= {round_: torch.from_numpy(np.load(path)) for round_, path in kept.items()}
        hardware = pick_hardware(method.problem, config.device, config.engine, config.precision, config.processes)
        histograms, seen = data.histograms(), np.arange(data.num_clients) < data.num_seen
        found: list[Array] = []
        with open_engine(hardware, data, method, config.seed, 0) as engine, queue_of(engine).turn():
            server = map_tree(lambda leaf: leaf.to(engine.device), run.final)._replace(average=NoMean())
            for eta_v in embedders.values():
                v = descriptors(engine, method, server._replace(embedder=eta_v.to(server.embedder)))
                assert v is not None
                found.append(v)
        plane, shares = principal_plane(found[-1])
        plane = np.rint(GRID * plane / max(float(np.abs(plane).max()), 1e-12)).astype(int)
        return {
            "rounds": list(embedders),
            "correlation": [round(mean_correlation(*distances(Descriptors(v, histograms, seen))), 5) for v in found],
            "plane_x": plane[:, 0].tolist(),
            "plane_y": plane[:, 1].tolist(),
            "variance": [round(float(share), 4) for share in shares],
            "main_class": histograms.argmax(axis=1).tolist(),
            "num_seen": data.num_seen,
        }


def _measured(evidence: Evidence, cell: Cell) -> list[dict[str, Any]]:
    """Return the measurements of a cell, one per seed."""
    return [one["measured"]["descriptors"] for one in evidence.results(ROW.name, cell.name)]


def _over_rounds(measured: Sequence[dict[str, Any]]) -> dict[int, list[float]]:
    """Return, for each round that all seeds have, the correlations of all seeds."""
    if not measured:
        return {}
    rounds = sorted(set.intersection(*(set(one["rounds"]) for one in measured)))
    return {at: [one["correlation"][one["rounds"].index(at)] for one in measured] for at in rounds}


def _judge(evidence: Evidence) -> list[Verdict]:
    ends: dict[str, list[float]] = {}
    verdicts = []
    for cell in CELLS:
        curve = list(_over_rounds(_measured(evidence, cell)).values())
        ends[cell.name] = curve[-1] if curve else []
        rises = [last - first for first, last in zip(curve[0], curve[-1], strict=True)] if curve else []
        verdicts.append(_verdict("The rank correlation rises in training", cell.title, rises, 0.0))
    for cell in CELLS:
        text = f"It reaches about {PAPER} (at least {PAPER - ABOUT:.2f})"
        verdicts.append(_verdict(text, cell.title, ends[cell.name], PAPER - ABOUT))
    for few, many in itertools.pairwise(CELLS):
        both = zip(ends[many.name], ends[few.name], strict=False)
        where = f"{many.title} − {few.title}"
        more = [a - b for a, b in both]
        verdicts.append(
            _verdict("More clients bring a higher correlation", where, more, 0.0, "fig:correlation_1000_sup")
        )
    return verdicts


def _verdict(text: str, where: str, values: Sequence[float], least: float, place: str = "fig:rank_corr") -> Verdict:
    if not values:
        return Verdict(text, place, where, "", "", NOTHING)
    gap = gap_over_seeds(values)
    return Verdict(text, place, where, f"{gap.points:.3f}", _interval(gap), judged(gap, least, None))


def _interval(gap: Gap) -> str:
    return "one seed" if gap.low is None else f"{gap.low:.3f} to {gap.high:.3f} (seeds)"


def _sections(evidence: Evidence) -> list[str]:
    curves = {cell: _over_rounds(_measured(evidence, cell)) for cell in CELLS}
    rounds = sorted(set().union(*curves.values()))
    body = []
    for at in rounds:
        row = [f"{at:,}"]
        for curve in curves.values():
            if at not in curve:
                row.append(MISSING)
                continue
            mean, std = mean_and_std(curve[at])
            row.append(f"{mean:.3f}" if std is None else f"{mean:.3f} ± {std:.3f}")
        body.append(row)
    headings = ["round", *(f"{cell.title} ({len(_measured(evidence, cell))} seeds)" for cell in CELLS)]
    return ["## Rank correlation over training", "", *markdown_table(headings, body)]


def _draw(evidence: Evidence, folder: Path) -> list[Path]:
    curves = {cell: _over_rounds(_measured(evidence, cell)) for cell in CELLS}
    shown = {cell: curve for cell, curve in curves.items() if curve}
    if not shown:
        return []
    paths = [folder / "descriptors.png", folder / "descriptors_map.png"]
    with drawing(paths[0], (6.5, 4.0)) as figure:
        axes = figure.subplots()
        axes.set_title("Rank correlation of descriptor and class-proportion distances")
        axes.grid(axis="y")
        for (cell, curve), colour in zip(shown.items(), LINES, strict=False):
            values = np.array(list(curve.values()))
            mean = values.mean(axis=1)
            axes.plot(list(curve), mean, color=colour, label=f"n={cell.clients} ({values.shape[1]} seeds)")
            if values.shape[1] > 1:
                std = values.std(axis=1, ddof=1)
                axes.fill_between(list(curve), mean - std, mean + std, color=colour, alpha=0.14, linewidth=0)
        axes.axhline(PAPER, color="#8a8a8a", linestyle=":", label=f"the paper at n=1000, about {PAPER}")
        axes.set_xlabel("round")
        axes.legend(loc="lower right")
    with drawing(paths[1], (4.6 * len(shown), 4.6)) as figure:
        panels = figure.subplots(1, len(shown), squeeze=False)
        for axes, cell in zip(panels[0], shown, strict=True):
            _draw_map(axes, _measured(evidence, cell)[0], f"{cell.clients} clients, by their main class")
    return paths


def _draw_map(axes: Any, one: dict[str, Any], title: str) -> None:
    x, y, main = (np.array(one[name]) for name in ("plane_x", "plane_y", "main_class"))
    seen = np.arange(len(x)) < one["num_seen"]
    for label in np.unique(main).tolist():
        for who, edge in ((seen, "none"), (~seen, "black")):
            which = (main == label) & who
            look = {"color": CLASSES[label % len(CLASSES)], "marker": MARKERS[label % len(MARKERS)], "s": 14}
            axes.scatter(x[which], y[which], edgecolors=edge, linewidths=0.8, **look)
    axes.set_title(title)
    axes.set_xticks([])
    axes.set_yticks([])


EXPERIMENT = Experiment(
    name="descriptors",
    title="Similar clients have similar descriptors",
    about="PeFLL on CIFAR-10; each client's class proportions are drawn from a Dirichlet distribution with "
    "concentration 0.1. From each unseen client to each other client we compute two distances: between descriptors, "
    "and between class proportions of training samples. The figure is Spearman's rank correlation of the two "
    "distances, as a mean over unseen clients. The map shows the first seed at the end of training; unseen clients "
    "have a black edge. Clients may share training samples.",
    cells=CELLS,
    rows=(ROW,),
    panels=[
        panel(
            "Test accuracy",
            CELLS,
            {f"PeFLL, {group}": Point(ROW.name, CELLS[0], group) for group in ("seen", "unseen")},
        )
    ],
    measure=DescriptorCorrelation(),
    judge=_judge,
    sections=_sections,
    draw=_draw,
)
