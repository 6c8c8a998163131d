"""Compares hypernetworks with one, three and five hidden layers (the paper's `tab:hnet_size`)."""

from __future__ import annotations

from pefll.experiments.experiment import CIFAR10, CIFAR100, Compared, Experiment, Point, Row, Statement, all_views

CELLS = (*CIFAR10, *CIFAR100)
ROWS = tuple(Row(size, settings={"hypernetwork": size}) for size in "SML")
PAPER = {
    "S": ((88.7, 0.3), (88.2, 0.4), (87.7, 0.4), (57.9, 0.3), (51.9, 0.6), (47.4, 1.4)),
    "M": ((88.9, 0.7), (88.9, 0.3), (88.1, 0.3), (59.4, 0.2), (53.1, 0.4), (50.8, 0.5)),
    "L": ((88.7, 0.8), (88.8, 0.3), (88.2, 0.6), (59.8, 0.1), (53.8, 0.2), (52.6, 1.0)),
}
SIMILAR = 1.5  # percentage points; the paper's means on CIFAR-10 differ by up to 0.7


def _size(size: str, cell: int) -> Point:
    return Point(size, CELLS[cell], "seen", "masked")


EXPERIMENT = Experiment(
    name="hypernetwork-size",
    title="Hypernetworks of one (S), three (M) and five (L) hidden layers",
    about="PeFLL with the settings of Table 1 and different hypernetworks. The paper's figures use label masking: "
    "they equal the masked figures of the paper's label-masking table.",
    cells=CELLS,
    rows=ROWS,
    panels=all_views(CELLS, ROWS, PAPER),
    statements=(
        Statement(
            f"On CIFAR-10 the three sizes are similar (within {SIMILAR} points)",
            "tab:hnet_size",
            [
                Compared(_size(size, cell), _size("M", cell), -SIMILAR, SIMILAR)
                for cell in range(3)
                for size in ("S", "L")
            ],
        ),
        Statement(
            "On CIFAR-100 S is worse than M",
            "tab:hnet_size",
            [Compared(_size("M", cell), _size("S", cell)) for cell in range(3, 6)],
        ),
        Statement(
            "On CIFAR-100 L is better than M",
            "tab:hnet_size",
            [Compared(_size("L", cell), _size("M", cell)) for cell in range(3, 6)],
        ),
    ),
)
