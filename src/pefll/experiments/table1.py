"""Table 1 of the paper: its methods, its federations, their settings, and the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pefll.runs.titles import TITLES as METHOD_TITLES

if TYPE_CHECKING:
    from pefll.training.callbacks import Callback
    from pefll.training.run import Run

ROUNDS, SEEDS = 5000, (0, 1, 2)


class Cell(NamedTuple):
    """One federation, which is a column of the table."""

    data: str
    clients: int  # number of seen and unseen clients
    partition: str
    title: str  # heading of the column
    train_samples: int  # number of all clients' training samples, for estimates of the training time
    clients_per_round: int = 0  # 0 for 5% of all clients
    model: str = "lenet"
    tag: str = ""  # distinguishes cells with the same data and number of clients
    rounds: int = 0  # of training, if fewer than in other cells; 0 for as many
    prior_clients: float = 0.0  # share of the seen clients in the first half of the rounds; 0 for all

    @property
    def name(self) -> str:
        """The name on the command line, for example cifar10-100."""
        return f"{self.data}-{self.clients}{self.tag and '-'}{self.tag}"

    @property
    def cohort(self) -> int:
        """The number of clients in a round."""
        return self.clients_per_round or math.ceil(self.clients / 20)

    def rounds_of(self, rounds: int) -> int:
        """Return the rounds of a run here, if other cells have `rounds`."""
        return min(rounds, self.rounds or rounds)


class Measure(Protocol):
    """An additional measurement of a run; the result file stores it under `measured`."""

    @property
    def name(self) -> str:
        """Key of the measurement in the result file."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Fields of `Config` that the measured runs need."""

    def callbacks(self) -> Sequence[Callback]:
        """Return callbacks for the training of the measured runs."""

    def of(self, run: Run, folder: Path) -> Any:
        """Return the measurement of a finished run as a JSON value; `folder` is the run's folder."""

    def written(self, folder: Path) -> None:
        """Delete what the measurement needed in the run's folder; it is called after the result file is written."""


class Row(NamedTuple):
    """A method with some settings, run in the cells of an experiment.

    Attributes:
        name: on the command line and in tables; without spaces, commas and slashes in Table 1.
        method: its method.
        settings: changes to the settings of Table 1 in the same cell.
        data: the only data set or cell to run in; "" for all.
        title: in Table 1, and in figures; "" for `name` in figures.
        seeds: the only seeds to run; () for all.
    """

    name: str
    method: str = "pefll"
    settings: Mapping[str, Any] = {}
    data: str = ""
    title: str = ""
    seeds: tuple[int, ...] = ()

    def runs_in(self, cell: Cell) -> bool:
        """Return whether the row is run in a cell."""
        return self.data in ("", cell.data, cell.name)


class Job(NamedTuple):
    """One training run, and the results that are made from it.

    Attributes:
        method: its name.
        cell: the federation.
        seed: of everything random.
        settings: hyper-parameters of training that differ from the defaults.
        source: of the settings, as text.
        measures: additional measurements of the run as trained.
        evaluations: personal hyper-parameters, such as steps on the device. The trained run is evaluated with each of
            them, and each has its own result. {} is the run as trained.
        experiments: names of those that need the run.
    """

    method: str
    cell: Cell
    seed: int
    settings: dict[str, Any]
    source: str
    measures: tuple[Measure, ...] = ()
    evaluations: tuple[dict[str, Any], ...] = ({},)
    experiments: tuple[str, ...] = ()


# The paper uses 5% of the clients per round, but 5 clients for FEMNIST. Here both data sets of writers use 5 clients.
CELLS: tuple[Cell, ...] = (
    *(Cell("cifar10", n, "by-class 2", f"CIFAR-10, n={n}", 40_000) for n in (100, 500, 1000)),
    *(Cell("cifar100", n, "by-class 10", f"CIFAR-100, n={n}", 40_000) for n in (100, 500, 1000)),
    Cell("femnist", 328, "natural", "FEMNIST subset, 328 writers", 43_532, clients_per_round=5),
    Cell("mnist_writers", 836, "natural", "MNIST, 836 writers", 50_391, clients_per_round=5),
)

TEN_STEPS = ", ten steps on the device"

# The rows, in the paper's order. Those after PeFLL are not in the paper.
ROWS: tuple[Row, ...] = (
    Row("local", "local", title=METHOD_TITLES["local"]),
    Row("fedavg", "fedavg", title=METHOD_TITLES["fedavg"]),
    Row("per-fedavg", "per-fedavg", title=METHOD_TITLES["per-fedavg"]),
    Row("fedrep", "fedrep", title=METHOD_TITLES["fedrep"]),
    Row("pfedme", "pfedme", title=METHOD_TITLES["pfedme"]),
    Row("knn-per", "knn-per", title=METHOD_TITLES["knn-per"]),
    Row("pfedhn", "pfedhn", title=METHOD_TITLES["pfedhn"]),
    Row("pefll", "pefll", title=METHOD_TITLES["pefll"]),
    Row("pefll-ten-steps", "pefll", {"refine_steps": 10}, title=f"{METHOD_TITLES['pefll']}{TEN_STEPS}"),
    Row("pefll-prior", "pefll-prior", title=METHOD_TITLES["pefll-prior"]),
    Row("pefll-plus", "pefll-plus", title=METHOD_TITLES["pefll-plus"]),
    Row("pefll-plus-ten-steps", "pefll-plus", {"refine_steps": 10}, title=f"{METHOD_TITLES['pefll-plus']}{TEN_STEPS}"),
)
TITLES = {row.name: row.title for row in ROWS}
OURS = tuple(row.name for row in ROWS if row.method.startswith("pefll"))  # everything else is a baseline


def recipe(method: str, cell: Cell) -> dict[str, Any]:
    """Return the settings of a method in a cell that no search has to choose.

    PeFLL embeds labels with a linear layer on CIFAR-100, and samples with a convolutional network elsewhere.
    """
    if method in ("pefll", "pefll-prior"):
        return {"embedding": "linear" if cell.data == "cifar100" else "convnet"}
    return {}


# The paper's Table 1, in per cent: (dataset, clients) -> method -> (seen mean, seen std, unseen mean, unseen std).
# The paper's FEMNIST has 3,597 writers, so its numbers are not compared with our subset of 328 writers.
_DATA = (
    ("cifar10", 100),
    ("cifar10", 500),
    ("cifar10", 1000),
    ("cifar100", 100),
    ("cifar100", 500),
    ("cifar100", 1000),
    ("femnist", 3597),
)
_SEEN = {
    "local": ((82.2, 0.6), (70.9, 0.5), (65.5, 0.7), (39.4, 0.2), (19.7, 0.2), (11.3, 0.1), (62.2, 0.1)),
    "fedavg": ((47.5, 0.5), (50.4, 0.6), (51.9, 0.7), (16.4, 0.4), (20.2, 0.1), (20.2, 0.2), (82.1, 0.2)),
    "per-fedavg": ((79.1, 2.1), (76.9, 0.9), (76.6, 0.3), (40.0, 0.3), (31.5, 0.2), (20.5, 0.1), (82.7, 0.9)),
    "fedrep": ((84.6, 0.8), (79.2, 0.6), (77.3, 0.3), (42.7, 0.8), (35.5, 0.7), (30.8, 0.5), (83.6, 0.8)),
    "pfedme": ((83.9, 1.2), (79.0, 2.0), (80.4, 0.9), (39.6, 0.5), (40.5, 0.4), (34.6, 0.2), (85.9, 0.8)),
    "knn-per": ((84.0, 0.3), (82.0, 0.5), (79.9, 0.7), (42.2, 0.9), (38.1, 0.4), (34.5, 0.5), (85.2, 0.3)),
    "pfedhn": ((87.8, 0.5), (77.4, 1.3), (66.0, 1.1), (53.6, 0.2), (25.5, 0.3), (20.0, 1.2), (83.8, 0.3)),
    "pefll": ((89.0, 0.8), (88.9, 0.4), (87.8, 0.4), (56.0, 0.3), (43.2, 0.8), (40.9, 0.6), (90.1, 0.1)),
}
_UNSEEN = {
    "local": ((81.6, 0.7), (70.6, 1.8), (65.5, 0.5), (38.7, 0.9), (19.9, 1.1), (11.0, 0.5), (62.1, 0.2)),
    "fedavg": ((48.6, 0.3), (49.6, 1.0), (51.7, 0.7), (17.1, 0.9), (19.3, 2.0), (20.5, 1.0), (81.9, 0.4)),
    "per-fedavg": ((77.6, 1.9), (69.0, 2.5), (67.3, 0.8), (35.6, 1.5), (30.6, 0.4), (20.5, 0.5), (81.1, 1.5)),
    "fedrep": ((81.8, 1.0), (77.4, 1.7), (76.0, 0.3), (38.6, 1.1), (35.9, 1.5), (31.8, 1.6), (82.8, 0.7)),
    "pfedme": ((78.4, 2.2), (74.3, 1.4), (72.3, 1.7), (31.1, 1.4), (32.3, 0.5), (28.9, 0.2), (86.1, 0.4)),
    "knn-per": ((82.4, 0.7), (80.8, 1.5), (78.4, 1.1), (41.8, 1.2), (37.2, 2.0), (33.7, 0.7), (84.6, 0.6)),
    "pfedhn": ((63.3, 3.7), (60.9, 2.4), (57.8, 2.0), (24.1, 1.2), (21.5, 1.4), (20.8, 1.2), (82.5, 0.1)),
    "pefll": ((89.3, 2.2), (88.9, 0.6), (88.5, 0.3), (35.2, 1.4), (38.1, 0.4), (38.4, 0.9), (90.7, 0.2)),
}
PAPER: dict[tuple[str, int], dict[str, tuple[float, float, float, float]]] = {
    key: {method: (*_SEEN[method][place], *_UNSEEN[method][place]) for method in _SEEN}
    for place, key in enumerate(_DATA)
}
