"""Table 1 of the paper: its methods, its federations, their settings, and the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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

    @property
    def name(self) -> str:
        """The name on the command line, for example cifar10-100."""
        return f"{self.data}-{self.clients}{self.tag and '-'}{self.tag}"

    @property
    def cohort(self) -> int:
        """The number of clients in a round."""
        return self.clients_per_round or math.ceil(self.clients / 20)


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


class Job(NamedTuple):
    """One run of a table."""

    method: str
    cell: Cell
    seed: int
    settings: dict[str, Any]  # hyper-parameters that differ from the defaults
    source: str  # text that says where the settings come from
    measures: tuple[Measure, ...] = ()


# The paper uses 5% of the clients per round, but 5 clients for FEMNIST. Here both data sets of writers use 5 clients.
CELLS: tuple[Cell, ...] = (
    *(Cell("cifar10", n, "by-class 2", f"CIFAR-10, n={n}", 40_000) for n in (100, 500, 1000)),
    *(Cell("cifar100", n, "by-class 10", f"CIFAR-100, n={n}", 40_000) for n in (100, 500, 1000)),
    Cell("femnist", 328, "natural", "FEMNIST subset, 328 writers", 43_532, clients_per_round=5),
    Cell("mnist_writers", 836, "natural", "MNIST, 836 writers", 50_391, clients_per_round=5),
)

# The titles of the rows, in the paper's order. The paper does not have the last row.
ROWS: dict[str, str] = {
    "local": "Local",
    "fedavg": "FedAvg",
    "per-fedavg": "Per-FedAvg",
    "fedrep": "FedRep",
    "pfedme": "pFedMe",
    "knn-per": "kNN-Per",
    "pfedhn": "pFedHN",
    "pefll": "PeFLL",
    "pefll-prior": "PeFLL + label prior",
}
OURS = ("pefll", "pefll-prior")  # everything else is a baseline


def recipe(method: str, cell: Cell) -> dict[str, Any]:
    """Return the settings that the paper fixes for a method in a cell.

    PeFLL embeds labels with a linear layer on CIFAR-100, and samples with a convolutional network elsewhere.
    """
    if method in OURS:
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
