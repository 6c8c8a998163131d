"""Pictures and summaries of federations whose labels are numbers or sets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("matplotlib")

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import pefll
from pefll.core.errors import PefllError
from pefll.data.federation import Federation
from pefll.data.summary import client_means, label_names, summarise
from pefll.report import federation_picture, print_federation
from pefll.report.descriptors import distances, read_descriptors
from pefll.report.federation_plots import MOST_SHOWN
from pefll.report.plots import SEEN, UNSEEN, curves, descriptor_map
from pefll.runs.record import RunFolder

from .conftest import MakeRun

QUICK: dict[str, Any] = {"rounds": 2, "clients_per_round": 2, "local_steps": 1, "processes": 1, "engine": "serial"}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn."""
    drawn: list[Figure] = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: drawn.append(self) or savefig(self, *args, **more)
    )
    return drawn


def federation_of(y: np.ndarray, client: np.ndarray, **more: Any) -> Federation:
    x = np.random.default_rng(0).normal(size=(len(y), 3)).astype(np.float32)
    made = pefll.federation_from_arrays(x, y, client, test=0.0, validation=0.0, unseen=0.25, **more)
    return dataclasses.replace(made, class_names=more.pop("names", ()))


def numbers(columns: int = 1, factor: float = 1.0) -> Federation:
    """Four clients with 20, 30, 40 and 50 samples; client k's labels are around 100 k."""
    client = np.repeat(np.arange(4), [20, 30, 40, 50])
    y = 100.0 * client + np.random.default_rng(1).normal(size=len(client))
    return federation_of(np.stack([factor * y + 0.5, *[y + k for k in range(1, columns)]], 1), client)


def sets(labels: int = 3) -> Federation:
    """Four clients; all samples have label 0, those of client 3 have label 1, and nobody has the others."""
    client = np.repeat(np.arange(4), [20, 30, 40, 50])
    y = np.zeros((len(client), labels), dtype=int)
    y[:, 0], y[:, 1] = 1, client == 3
    return dataclasses.replace(
        federation_of(y, client), class_names=("all", "some", "none", *map(str, range(3, labels)))[:labels]
    )


def words_of(figure: Figure) -> str:
    axes = figure.axes
    ticks = [tick.get_text() for each in axes for tick in each.get_yticklabels()]
    return "\n".join(w for each in axes for w in (each.get_title("left"), each.get_xlabel(), each.get_ylabel())) + str(
        ticks
    )


def test_numbers_are_drawn_as_the_spread_of_each_client(tmp_path: Path, figures: list[Figure]) -> None:
    data = dataclasses.replace(numbers(), label_column="price")
    federation_picture(data, tmp_path / "a.svg")
    left, right = figures[0].axes
    assert (left.get_title("left"), left.get_ylabel()) == ("Labels of 4 clients, arrays", "price")
    assert "class" not in words_of(figures[0])
    dots = np.asarray(left.collections[-1].get_offsets())
    expected = [np.median(data.y[data.indices(client)]) for client in range(4)]
    order = [*np.argsort(expected[:3]), 3]
    np.testing.assert_allclose(dots[:, 1], np.array(expected)[order], rtol=1e-5)
    assert [to_hex(colour).upper() for colour in left.collections[-1].get_facecolors()] == [*[SEEN] * 3, UNSEEN]
    assert sum(bar.get_height() for bar in right.patches) == 4
    assert "least 20" in right.get_xlabel()
    assert left.get_yscale() == "linear"


def test_skewed_numbers_have_a_log_axis_and_each_column_a_panel(tmp_path: Path, figures: list[Figure]) -> None:
    client = np.repeat(np.arange(4), 30)
    y = np.exp(3.0 * client + np.random.default_rng(0).normal(size=120))
    federation_picture(federation_of(np.stack([y, -y], 1), client), tmp_path / "a.svg")
    first, second, _ = figures[0].axes
    assert (first.get_yscale(), second.get_yscale()) == ("log", "linear")
    assert (first.get_ylabel(), second.get_ylabel()) == ("label 0 (log scale)", "label 1")
    assert "median of label 0" in second.get_xlabel()
    federation_picture(numbers(6), tmp_path / "a.svg")
    assert len(figures[1].axes) == 5
    assert "the first 4 of 6 columns" in figures[1].axes[0].get_title("left")


def test_of_many_clients_some_are_drawn(tmp_path: Path, figures: list[Figure]) -> None:
    client = np.repeat(np.arange(200), 3)
    federation_picture(federation_of(np.random.default_rng(0).normal(size=600), client), tmp_path / "a.svg")
    assert len(figures[0].axes[0].collections[-1].get_offsets()) == MOST_SHOWN
    assert "60 of 200 clients" in figures[0].axes[0].get_title("left")


def test_sets_are_drawn_as_shares_of_a_clients_samples(tmp_path: Path, figures: list[Figure]) -> None:
    data = sets()
    federation_picture(data, tmp_path / "a.svg")
    left, right = figures[0].axes
    assert "Share of samples with each label" in left.get_title("left")
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["all (100%)", "some (36%)", "none (0%)"]
    areas = left.collections[0].get_sizes()
    assert len(areas) == 5, "four clients have the first label, one has the second, nobody the third"
    assert np.ptp(areas) == 0, "all samples of the client have both"
    sizes = data.count[0].tolist()
    assert f"least {min(sizes)}" in right.get_xlabel(), "samples, not members"
    assert f"most {max(sizes)}" in right.get_xlabel()
    federation_picture(sets(30), tmp_path / "a.svg")
    assert "share of the client's samples, %" in words_of(figures[1])


@pytest.mark.parametrize("make", [numbers, sets])
def test_every_axis_has_a_name(tmp_path: Path, figures: list[Figure], make: Any) -> None:
    data = make(2)
    federation_picture(data, tmp_path / "f.svg")
    pefll.fit(data, "pefll", out=tmp_path / "r", **QUICK)
    descriptor_map(RunFolder(tmp_path / "r"), tmp_path / "d.svg")
    assert len(figures) == 2
    for figure in figures:
        bottom = min(axes.get_position().y0 for axes in figure.axes)
        for axes in figure.axes:
            is_bar = axes.get_label() == "<colorbar>"
            assert axes.get_ylabel()
            assert axes.get_xlabel() or is_bar or axes.get_position().y0 > bottom + 0.1, "only below the last panel"
        assert figure.axes[0].get_title("left")


def test_the_map_of_a_regression_has_the_clients_means(tmp_path: Path, figures: list[Figure]) -> None:
    data = dataclasses.replace(numbers(2), class_names=("price", "rent"))
    pefll.fit(data, "pefll", out=tmp_path / "r", **QUICK)
    found = read_descriptors(RunFolder(tmp_path / "r"))
    assert (found.labels, found.label_name, found.class_names) == ("numbers", "price", ())
    np.testing.assert_allclose(found.means, client_means(data)[:, 0])
    np.testing.assert_allclose(found.means, [data.y[data.indices(k), 0].mean() for k in range(4)], rtol=1e-5)
    descriptor_map(RunFolder(tmp_path / "r"), tmp_path / "d.svg")
    words = words_of(figures[-1])
    assert "mean price of a client" in words
    assert "(price in ten groups of equal size)" in words
    assert "most frequent" not in (tmp_path / "d.svg").read_text()


def test_the_map_of_a_multilabel_run_has_the_names_of_labels(tmp_path: Path) -> None:
    data = sets()
    pefll.fit(data, "pefll", out=tmp_path / "r", **QUICK)
    found = read_descriptors(RunFolder(tmp_path / "r"))
    assert (found.labels, found.class_names) == ("sets", ("all", "some", "none"))
    assert sorted(found.distributions.tolist()) == [[1, 0, 0]] * 3 + [[1, 1, 0]]
    _, d_pi = distances(dataclasses.replace(found, seen=np.zeros(4, bool)))
    assert sorted(d_pi.ravel().tolist()) == [0.0] * 6 + [1.0] * 6, "one client has one label more"
    descriptor_map(RunFolder(tmp_path / "r"), tmp_path / "d.svg")
    text = (tmp_path / "d.svg").read_text()
    assert "<!-- all -->" in text
    assert "<!-- label -->" in text
    assert "<!-- class -->" not in text


def test_the_map_of_many_clients_with_numbers_is_drawn_as_cells(
    make_run: MakeRun, tmp_path: Path, figures: list[Figure]
) -> None:
    folder, random, n = make_run(), np.random.default_rng(0), 2000
    v = random.normal(size=(n, 3))
    of_labels = {"labels": "numbers", "samples": np.full(n, 9), "means": np.exp(3 * v[:, 0]), "label_name": "rent"}
    histograms, seen = random.integers(0, 9, (n, 10)), np.arange(n) < n - 5
    np.savez(folder.descriptors_file, descriptors=v, histograms=histograms, seen=seen, **of_labels)
    descriptor_map(folder, tmp_path / "d.svg")
    assert "mean rent of a client, mean of a\ncell (log scale)" in words_of(figures[0])
    cells, dots = figures[0].axes[0].collections
    assert isinstance(cells, PolyCollection)
    assert len(dots.get_offsets()) == 5, "only unseen clients have a mark"


@pytest.mark.parametrize(
    "change",
    [{"labels": "boxes"}, {"samples": np.ones(3, int)}, {"means": np.full(8, np.nan)}, {"means": np.ones(3)}],
)
def test_a_file_whose_labels_make_no_sense_is_damaged(make_run: MakeRun, change: dict[str, Any]) -> None:
    folder = make_run()
    good = {"labels": "numbers", "samples": np.full(8, 9), "means": np.ones(8), "label_name": ""}
    arrays = {"descriptors": np.eye(8), "histograms": np.eye(8, dtype=int), "seen": np.ones(8, bool)}
    np.savez(folder.descriptors_file, **arrays, **good)
    assert read_descriptors(folder).labels == "numbers"
    np.savez(folder.descriptors_file, **arrays, **(good | change))
    with pytest.raises(PefllError, match=r"damaged.*PEFLL-O660"):
        read_descriptors(folder)


def test_rounds_are_whole_numbers(make_run: MakeRun, tmp_path: Path, figures: list[Figure]) -> None:
    folder = make_run(evaluations=2)
    curves([folder], tmp_path / "c.svg")
    ticks = figures[0].axes[0].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks)
    assert 10 in ticks


def test_the_summary_of_sets_has_shares_of_samples(console: Console) -> None:
    print_federation(summarise(sets()), console)
    text = console.export_text()
    rows = [line.split() for line in text.splitlines()]
    assert "sets of 3, with 1.4 members on average" in text
    assert "Samples with each label" in text
    assert ["all", "140", "0", "0", "100.0%", "█" * 20] in rows
    assert ["some", "50", "0", "0", "35.7%", "█" * 7] in rows


def test_the_summary_of_numbers_has_the_means_of_clients(console: Console) -> None:
    data = dataclasses.replace(numbers(), label_column="price")
    assert label_names(data) == ("price",)
    print_federation(summarise(data), console)
    text = console.export_text()
    means = np.sort(client_means(data)[:, 0])
    assert "Means of clients" in text
    wanted = ["price", *(f"{value:.4g}" for value in (means[0], np.median(means), means[-1]))]
    assert wanted in [line.split() for line in text.splitlines()]
    assert len(label_names(numbers(2))) == 0
