"""Accuracy on new clients without labels (the paper's `tab:unlabeled`)."""

from __future__ import annotations

from pefll.experiments.experiment import CIFAR10, CIFAR100, FEMNIST, Compared, Experiment, Point, Row, Statement, panel

CELLS = (*CIFAR10, *CIFAR100, *FEMNIST)
ROWS = (Row("FedAvg", "fedavg"), Row("PeFLL", settings={"embedding": "convnet-unlabeled"}))
# The paper's FEMNIST has 3,597 writers, so its figures are not compared with our 328.
PAPER = {
    "FedAvg": ((48.6, 0.3), (49.6, 1.0), (51.7, 0.7), (17.1, 0.9), (19.3, 2.0), (20.5, 1.0), None),
    "PeFLL": ((84.5, 0.6), (83.6, 1.0), (81.5, 0.7), (26.3, 0.4), (28.2, 0.6), (30.3, 0.6), None),
}

EXPERIMENT = Experiment(
    name="unlabeled",
    title="New clients without labels",
    about="PeFLL with the settings of Table 1, but with an embedding network that does not use labels "
    "(`convnet-unlabeled`). FedAvg is that of Table 1. Labels of new clients are used only to compute test accuracy.",
    cells=CELLS,
    rows=ROWS,
    panels=[
        panel(
            "Clients that were never seen",
            CELLS,
            {row.name: Point(row.name, CELLS[0], "unseen") for row in ROWS},
            PAPER,
        ),
        panel(
            "Clients that took part in training", CELLS, {row.name: Point(row.name, CELLS[0], "seen") for row in ROWS}
        ),
    ],
    statements=(
        Statement(
            "Without labels PeFLL is better than FedAvg in all cases",
            "tab:unlabeled",
            [Compared(Point("PeFLL", cell, "unseen"), Point("FedAvg", cell, "unseen")) for cell in CELLS],
        ),
    ),
)
