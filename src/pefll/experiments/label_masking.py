"""Label masking: a client predicts only classes of its training samples (the paper's `tab:label_masking`)."""

from __future__ import annotations

from pefll.experiments.experiment import CIFAR10, CIFAR100, Compared, Experiment, Point, Row, Statement, panel
from pefll.experiments.table1 import PAPER as TABLE1

CELLS = (*CIFAR10, *CIFAR100)
ROWS = (Row("PeFLL", "pefll"), Row("FedAvg", "fedavg"))
GROUPS = {"seen": "Clients that took part in training", "unseen": "Clients that were never seen"}
MASKED = {
    "seen": ((88.9, 0.7), (88.9, 0.3), (88.4, 0.4), (59.5, 0.7), (53.2, 0.6), (51.4, 0.3)),
    "unseen": ((88.9, 2.4), (88.2, 0.9), (87.4, 1.3), (55.6, 1.6), (53.4, 0.1), (51.1, 0.2)),
}
MINOR = 1.5  # percentage points; the paper's differences on CIFAR-10 are up to 1.1


def _plain(group: str, method: str) -> list[tuple[float, float]]:
    place = 0 if group == "seen" else 2
    figures = [TABLE1[cell.data, cell.clients][method] for cell in CELLS]
    return [(figure[place], figure[place + 1]) for figure in figures]


def _mask(row: str, group: str) -> Point:
    return Point(row, CELLS[0], group, "masked")


EXPERIMENT = Experiment(
    name="label-masking",
    title="Label masking",
    about="The runs of Table 1. With the mask (LM) a client never predicts a class that its training samples do not "
    "have: the logit of such a class is -inf. The paper's table has only PeFLL; we add FedAvg.",
    cells=CELLS,
    rows=ROWS,
    panels=[
        panel(
            heading,
            CELLS,
            {
                "PeFLL": Point("PeFLL", CELLS[0], group),
                "PeFLL + LM": _mask("PeFLL", group),
                "FedAvg": Point("FedAvg", CELLS[0], group),
                "FedAvg + LM": _mask("FedAvg", group),
            },
            {
                "PeFLL": _plain(group, "pefll"),
                "PeFLL + LM": MASKED[group],
                "FedAvg": _plain(group, "fedavg"),
            },
        )
        for group, heading in GROUPS.items()
    ],
    statements=(
        Statement(
            f"On CIFAR-10 the mask has minor effects (within {MINOR} points)",
            "tab:label_masking",
            [
                Compared(Point("PeFLL", cell, group, "masked"), Point("PeFLL", cell, group), -MINOR, MINOR)
                for cell in CIFAR10
                for group in GROUPS
            ],
        ),
        Statement(
            "On CIFAR-100 the mask is a clear gain",
            "tab:label_masking",
            [
                Compared(Point("PeFLL", cell, group, "masked"), Point("PeFLL", cell, group))
                for cell in CIFAR100
                for group in GROUPS
            ],
        ),
    ),
)
