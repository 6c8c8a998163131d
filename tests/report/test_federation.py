from __future__ import annotations

import re

import numpy as np
from rich.console import Console

from pefll.data.assembly import assemble
from pefll.data.samples import Samples
from pefll.data.summary import Spread, Summary, summarise
from pefll.report import print_federation


def summary_of(classes: int, names: tuple[str, ...] = ()) -> Summary:
    return Summary(
        name="CIFAR-10",
        partition="by-class 2",
        num_clients=1000,
        num_seen=900,
        num_unseen=100,
        num_untested=0,
        classes=classes,
        class_names=names,
        samples=(40000, 10000, 9000),
        samples_per_client=(Spread(40, 40.0, 40), Spread(10, 10.5, 12), Spread(9, 9.0, 1234)),
        class_table=tuple((100 * (k + 1), 10, 5) for k in range(classes)),
        classes_per_client=Spread(1, 2.0, 3),
    )


def test_the_numbers_are_there(console: Console) -> None:
    print_federation(summary_of(3, ("cat", "[dog]", "ship")), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "CIFAR-10, by-class 2"
    assert lines[2] == "", "everybody has test samples"
    text = " ".join(" ".join(lines).split())
    assert "1,000 clients: 900 seen, 100 unseen; 3 classes, 1 to 3 (median 2) per client" in text
    rows = [line.split() for line in lines]
    assert ["train", "40,000", "40", "40", "40"] in rows
    assert ["validation", "10,000", "10", "10.5", "12"] in rows
    assert ["test", "9,000", "9", "9", "1,234"] in rows
    assert ["[dog]", "200", "10", "5", "33.3%", "█" * 13] in rows
    assert ["ship", "300", "10", "5", "50.0%", "█" * 20] in rows


def test_of_many_classes_the_extremes_are_listed(console: Console) -> None:
    print_federation(summary_of(62), console)
    text = console.export_text()
    listed = [int(match) for match in re.findall(r"^(\d+) +[\d,]+ +10 +5 ", text, flags=re.MULTILINE)]
    assert listed == [*range(61, 51, -1), *range(9, -1, -1)]
    assert "…" in text


def test_of_a_real_federation(console: Console) -> None:
    samples = Samples(x=np.zeros((6, 2), np.float32), y=np.array([0, 1, 1, 0, 1, 1]), classes=2, name="tiny")
    owner, split = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 2, 0, 1, 2], dtype=np.int8)
    print_federation(summarise(assemble(samples, owner, split, 1, "by hand")), console)
    text = console.export_text()
    assert "test sample" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["train", "3", "1", "1.5", "2"] in rows
    assert ["1", "1", "1", "2", "33.3%", "█" * 10] in rows


def test_clients_without_test_samples(console: Console) -> None:
    samples = Samples(x=np.zeros((5, 2), np.float32), y=np.zeros(5, np.int64), classes=1, name="tiny")
    owner, split = np.array([0, 0, 1, 2, 2]), np.array([0, 2, 0, 0, 1], dtype=np.int8)
    federation = assemble(samples, owner, split, 2, "by hand")
    print_federation(summarise(federation), console)
    assert "2 of 3 clients have no test sample: accuracies are those of the others.\n" in console.export_text()
    assert "3 clients (2 seen, 1 unseen, 2 without test samples)" in repr(federation)
