from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import pefll
from pefll.core.errors import PefllError
from pefll.report.descriptors import (
    Descriptors,
    distances,
    mean_correlation,
    principal_plane,
    read_descriptors,
    spearman,
)
from pefll.report.plots import curves, descriptor_map
from pefll.runs.record import RunFolder
from pefll.training.plotting import PICTURES

from .conftest import MakeRun, write_descriptors


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 1000], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        # Ranks 1 2 3 4 5 and 2 1 4 3 5: squared differences sum to 4, so 1 - 6*4 / (5*24) = 0.8.
        ([1, 2, 3, 4, 5], [20, 10, 40, 30, 50], 0.8),
        # Ranks 1 2.5 2.5 4 and 1 2 3 4: covariance 4.5, variances 4.5 and 5, so 4.5 / sqrt(22.5).
        ([1, 7, 7, 9], [1, 2, 3, 4], 4.5 / np.sqrt(22.5)),
        # Ranks 1.5 1.5 3.5 3.5 and 1.5 3.5 1.5 3.5: nothing in common.
        ([0, 0, 1, 1], [0, 1, 0, 1], 0.0),
    ],
)
def test_spearman_by_hand(a: list[float], b: list[float], expected: float) -> None:
    assert spearman(np.array(a), np.array(b)) == pytest.approx(expected, abs=1e-12)


def test_spearman_as_scipy_with_many_ties() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        a, b = random.integers(0, 6, size=(2, 50))
        assert spearman(a, a + b) == pytest.approx(stats.spearmanr(a, a + b).statistic, abs=1e-12)


@pytest.mark.parametrize("pair", [([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [0, 0, 0]), ([1], [2]), ([], [])])
def test_spearman_without_an_order_is_nan(pair: tuple[list[float], list[float]]) -> None:
    assert np.isnan(spearman(np.array(pair[0]), np.array(pair[1])))


def test_correlation_is_over_unseen_clients_and_others_only() -> None:
    random = np.random.default_rng(1)
    histograms, v = random.integers(1, 30, size=(12, 4)), random.normal(size=(12, 3))
    seen = np.arange(12) < 9
    pi = histograms / histograms.sum(axis=1, keepdims=True)

    def mean_over(clients: range) -> float:
        each = []
        for i in clients:
            others = [j for j in range(12) if j != i]
            d_v = [float(np.sqrt(((v[i] - v[j]) ** 2).sum())) for j in others]
            d_pi = [float(np.sqrt(((pi[i] - pi[j]) ** 2).sum())) for j in others]
            each.append(stats.spearmanr(d_v, d_pi).statistic)
        return float(np.mean(each))

    assert mean_correlation(*distances(Descriptors(v, histograms, seen))) == pytest.approx(mean_over(range(9, 12)))
    everyone = Descriptors(v, histograms, np.ones(12, dtype=bool))
    assert mean_correlation(*distances(everyone)) == pytest.approx(mean_over(range(12)))


def test_descriptors_that_are_the_label_distribution_correlate_perfectly() -> None:
    random = np.random.default_rng(2)
    histograms = np.array([random.multinomial(50, p) for p in random.dirichlet([0.2] * 5, size=30)])
    found = Descriptors(3.0 * histograms / 50, histograms, np.arange(30) < 25)
    # Not exactly 1: descriptors' distances are not rounded, so a tie may be broken in the last bit.
    assert mean_correlation(*distances(found)) == pytest.approx(1.0, abs=0.01)


def test_equal_distances_are_ties_in_spite_of_rounding() -> None:
    histograms = np.array([[3, 7, 0, 0], [0, 3, 7, 0], [0, 0, 3, 7], [7, 0, 0, 3], [3, 0, 7, 0], [1, 1, 1, 7]])
    _, d_pi = distances(Descriptors(np.zeros((6, 2)), histograms, np.ones(6, dtype=bool)))
    pi = histograms / 10
    exact = {tuple(sorted(np.round(np.abs(pi[0] - pi[j]), 6))) for j in range(1, 6)}
    assert len(set(d_pi[0])) <= len(exact)


def test_many_clients_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pefll.report.descriptors.MOST_CLIENTS", 50)
    monkeypatch.setattr("pefll.report.descriptors.MOST_PROBES", 7)
    random = np.random.default_rng(3)
    found = Descriptors(random.normal(size=(500, 3)), random.integers(1, 9, size=(500, 4)), np.arange(500) < 400)
    assert [array.shape for array in distances(found)] == [(7, 49), (7, 49)]
    # One unseen client that even spacing leaves out.
    lonely = Descriptors(found.descriptors, found.histograms, np.arange(500) != 3)
    d_v, _ = distances(lonely)
    assert d_v.shape == (1, 49)
    assert d_v[0, 0] == pytest.approx(np.linalg.norm(found.descriptors[3] - found.descriptors[0]))


def test_principal_plane_finds_the_directions() -> None:
    random = np.random.default_rng(4)
    flat = random.normal(size=(200, 2)) * [5.0, 1.0]
    turn, _ = np.linalg.qr(random.normal(size=(6, 6)))
    points = np.pad(flat, ((0, 0), (0, 4))) @ turn + 3.0
    plane, shares = principal_plane(points)
    assert shares.sum() == pytest.approx(1.0)
    variance = np.linalg.eigvalsh(np.cov(flat.T))[::-1]
    np.testing.assert_allclose(shares, variance / variance.sum())
    distance = np.linalg.norm(plane[:, None] - plane[None], axis=-1)
    np.testing.assert_allclose(distance, np.linalg.norm(flat[:, None] - flat[None], axis=-1), atol=1e-9)
    again, _ = principal_plane(points.copy())
    np.testing.assert_array_equal(plane, again)


@pytest.mark.parametrize("shape", [(1, 5), (2, 5), (5, 1), (3, 3)])
def test_principal_plane_of_almost_nothing(shape: tuple[int, int]) -> None:
    plane, shares = principal_plane(np.random.default_rng(5).normal(size=shape))
    assert plane.shape == (shape[0], 2)
    assert np.isfinite(plane).all()
    assert shares.sum() == pytest.approx(1.0 if shape[0] > 1 else 0.0)


def test_reading(make_run: MakeRun) -> None:
    folder = make_run()
    with pytest.raises(PefllError, match="PEFLL-O001"):
        read_descriptors(folder)
    write_descriptors(folder, n=11, classes=3, unseen=2)
    found = read_descriptors(folder)
    assert (found.descriptors.shape, found.histograms.shape, int(found.seen.sum())) == ((11, 7), (11, 3), 9)


def arrays(path: Path, **changes: np.ndarray | None) -> None:
    content = {"descriptors": np.ones((4, 2)), "histograms": np.ones((4, 3), int), "seen": np.ones(4, bool)}
    np.savez(path, **{key: value for key, value in (content | changes).items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seen": None}, r"\bseen\b.*PEFLL-O002"),
        ({"histograms": np.ones((5, 3))}, "PEFLL-O004"),
        ({"descriptors": np.ones(4)}, "PEFLL-O004"),
        ({"descriptors": np.full((4, 2), np.nan)}, "PEFLL-O005"),
        ({"descriptors": np.array([["a", "b"]] * 4)}, "PEFLL-O003"),
        ({"seen": np.array([{}] * 4, dtype=object)}, "PEFLL-O003"),
    ],
)
def test_wrong_arrays_are_one_sentence(make_run: MakeRun, changes: dict[str, np.ndarray], sentence: str) -> None:
    folder = make_run()
    arrays(folder.descriptors_file, **changes)
    with pytest.raises(PefllError, match=sentence) as caught:
        read_descriptors(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [0, 3, 100, -30])
def test_a_cut_off_file_is_one_sentence(make_run: MakeRun, cut: int) -> None:
    folder = make_run(descriptors=True)
    folder.descriptors_file.write_bytes(folder.descriptors_file.read_bytes()[:cut])
    with pytest.raises(PefllError, match="PEFLL-O003"):
        read_descriptors(folder)


def test_a_run_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    y = np.array(["ant", "bee", "cat"] * 20)
    x = np.random.default_rng(0).normal(size=(60, 4))
    federation = pefll.federation_from_arrays(x, y, np.arange(60) // 10)
    settings = {"rounds": 1, "local_steps": 1, "clients_per_round": 2, "processes": 1, "model": "tiny"}
    pefll.fit(federation, **settings, out=tmp_path / "run")
    assert read_descriptors(RunFolder(tmp_path / "run")).class_names == ("ant", "bee", "cat")
    numbers = pefll.federation_from_arrays(x, np.arange(60) % 3, np.arange(60) // 10)
    pefll.fit(numbers, **settings, out=tmp_path / "numbers")
    assert read_descriptors(RunFolder(tmp_path / "numbers")).class_names == ()


def test_a_run_in_python_draws_the_pictures_of_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    federation = pefll.federation_from_arrays(rng.normal(size=(60, 4)), rng.normal(size=60), np.arange(60) // 10)
    quick = {"rounds": 2, "local_steps": 1, "clients_per_round": 2, "processes": 1, "model": "tiny"}
    run = pefll.fit(federation, **quick, out=tmp_path / "run")
    curves([RunFolder(tmp_path / "run")], tmp_path / "curves.png")
    descriptor_map(RunFolder(tmp_path / "run"), tmp_path / "descriptors.png")
    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(run.plot, tmp_path / f"my-{what}.png", what) for what in PICTURES]:
            job.result()
    assert pefll.load(tmp_path / "run").plot(tmp_path / "loaded.png") == tmp_path / "loaded.png"
    for mine, drawn in (("my-curves", "curves"), ("loaded", "curves"), ("my-descriptors", "descriptors")):
        assert (tmp_path / f"{mine}.png").read_bytes() == (tmp_path / f"{drawn}.png").read_bytes()
    with pytest.raises(PefllError, match="PEFLL-A101"):
        run.plot(tmp_path / "a.png", "losses")
    with pytest.raises(PefllError, match="PEFLL-A008"):
        run.plot(tmp_path / "a.png", None)  # type: ignore[arg-type]
    with pytest.raises(PefllError, match="PEFLL-O009"):
        run.plot(tmp_path / "a.bmp")
    with pytest.raises(PefllError, match="PEFLL-T635"):
        pefll.fit(federation, "fedavg", **quick).plot(tmp_path / "a.png", "descriptors")
