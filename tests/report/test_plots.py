from __future__ import annotations

import io
import itertools
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.report.federation_plots import _draw_sizes, _sample_clients, class_picture
from pefll.report.groups import group_runs
from pefll.report.plots import CLASSES, LINES, MARKERS, SEEN, UNSEEN, _apart, _kinds, curves, descriptor_map, drawing
from pefll.report.runs import read_run, read_runs
from pefll.report.show import show
from pefll.report.text import run_plot
from pefll.runs.record import RunFolder

from .conftest import MakeRun, row, write_descriptors


def pixels(path: Path, colour: str, alpha: float = 1.0) -> int:
    """Count pixels of a colour drawn on white."""
    wanted = alpha * np.array(to_rgb(colour)) + (1 - alpha)
    return int((np.abs(imread(path)[..., :3] - wanted).max(axis=-1) < 0.012).sum())


def share_of_ink(path: Path) -> float:
    return float((imread(path)[..., :3].min(axis=-1) < 0.98).mean())


def test_curves_have_a_colour_per_group_and_a_band_over_seeds(make_run: MakeRun, tmp_path: Path) -> None:
    out = tmp_path / "new" / "curves.png"
    one = [make_run("a0", seed=0), make_run("b", method="fedavg", seen=0.5, unseen=None)]
    curves(one, out)
    image = imread(out)
    assert image.shape[1] == 10.5 * 160
    assert 0.01 < share_of_ink(out) < 0.3
    assert pixels(out, LINES[0]) > 1500
    assert pixels(out, LINES[1]) > 1000
    assert pixels(out, LINES[2]) == 0
    assert pixels(out, LINES[0], alpha=0.14) < 300, "no more than the soft edges of the lines"
    curves([*one, make_run("a1", seed=1, seen=0.7, unseen=0.5)], out)
    assert pixels(out, LINES[0], alpha=0.14) > 3000, "the band"
    assert pixels(out, LINES[2]) == 0, "a second seed is no second line"


def test_the_console_says_which_unseen_clients_have_no_line(make_run: MakeRun, tmp_path: Path) -> None:
    out, sentence = tmp_path / "curves.svg", "have no curve, because they were not evaluated during training."
    both = make_run("both")
    curves([both], out)
    assert sentence not in out.read_text()
    alone = make_run("alone", method="ditto", unseen=None, num_unseen=10)
    curves([both, alone], out)
    assert sentence not in out.read_text(), "a figure for papers has no notes"
    said = Console(width=200, file=io.StringIO(), record=True)
    show([both.path, alone.path], None, said)
    assert f"Unseen clients of alone {sentence}" in said.export_text()
    assert f"Unseen clients {sentence}" in run_plot(read_run(alone)).plain


def test_curves_of_different_data_say_so(make_run: MakeRun, tmp_path: Path) -> None:
    out = tmp_path / "curves.svg"
    mine = make_run("mine")
    curves([mine, make_run("seed", seed=1)], out)
    assert "different data" not in out.read_text()
    other = make_run("set", asked={"data": "cifar100", "data_sha256": "x"}, dataset="CIFAR-100")
    curves([mine, other], out)
    assert (
        "These runs have different data and cannot be compared: CIFAR-10, by-class 2, 100 clients; CIFAR-100, "
        "by-class 2, 100 clients" in out.read_text()
    )
    bare = make_run("bare", evaluations=0, asked={"data": "digits", "data_sha256": "y"}, dataset="digits")
    curves([mine, bare], out)
    assert "different data" not in out.read_text(), "only what is drawn counts"


def test_mean_curve_and_band_are_right(make_run: MakeRun) -> None:
    from pefll.report.plots import _curve

    folders = [make_run(f"a{seed}", seed=seed, seen=seen) for seed, seen in enumerate((0.8, 0.6, 0.73))]
    folders[1].append_history(row(110, 0.9, 0.9, 500.0))  # a round that the others do not have
    folders.append(make_run("a9", seed=9, evaluations=1, finished=False))
    (group,) = group_runs(read_runs(folders))
    curve = _curve(group)
    assert curve.label == "PeFLL (n=3)", "a seed that has just begun does not cut the others short"
    assert curve.rounds.tolist() == list(range(10, 101, 10))
    assert curve.mean["seen"][-1] == pytest.approx(100 * np.mean([0.8, 0.6, 0.73]))
    assert curve.std is not None
    assert curve.std["seen"][-1] == pytest.approx(100 * np.std([0.8, 0.6, 0.73], ddof=1))
    assert curve.megabytes[-1] == pytest.approx(400.0)
    assert curve.best == 9
    (alone,) = group_runs(read_runs(folders[:1]))
    assert _curve(alone).best == 8, "one run's best round is its summary's"


def test_curves_of_one_evaluation_of_silent_runs_and_of_many_runs(make_run: MakeRun, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    curves([make_run("new", finished=False, evaluations=1)], out)
    assert pixels(out, LINES[0]) > 50
    quiet = make_run("quiet")
    rows = [old | {"bytes_down": 0, "bytes_up": 0} for old in quiet.history()]
    quiet.history_file.unlink()
    for each in rows:
        quiet.append_history(each)
    curves([quiet], out)
    assert pixels(out, LINES[0]) > 1000
    curves([make_run(f"m{k}", settings={"lr": 0.1 * k}, seen=0.5 + 0.02 * k) for k in range(12)], out)
    assert all(pixels(out, colour) > 500 for colour in LINES)


def test_long_names_are_in_the_legend(make_run: MakeRun, tmp_path: Path) -> None:
    """Beside the ends of their lines they were on top of each other, and left no place for the curves."""
    folders = [make_run(f"{k}", settings={"local_steps": k, "client_lr": k / 10}, seen=0.8 + k / 1e4) for k in (1, 2)]
    curves(folders, tmp_path / "long.svg")
    curves([make_run("a"), make_run("b", method="fedavg")], tmp_path / "short.svg")
    long, short = ((tmp_path / f"{name}.svg").read_text() for name in ("long", "short"))
    legend = long.index('id="legend_1"')
    assert all(long.index(f"PeFLL, client_lr {k / 10}, local_steps {k}") > legend for k in (1, 2))
    assert "<!-- seen clients -->" in short
    assert "<!-- FedAvg -->" not in short, "beside its line, where text is an outline"


def test_nothing_to_draw_is_a_sentence(make_run: MakeRun, tmp_path: Path) -> None:
    empty = make_run("empty", evaluations=0)
    unmeasured = make_run("unmeasured", evaluations=0)
    unmeasured.append_history({"round": 10, "seen": None, "unseen": None})
    for folders in ([empty], [empty, unmeasured]):
        with pytest.raises(PefllError, match="PEFLL-O006"):
            curves(folders, tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_places_are_moved_apart_as_little_as_needed() -> None:
    assert _apart([10, 20, 30], 5, 0, 100) == [10, 20, 30]
    np.testing.assert_allclose(_apart([20, 10, 21], 5, 0, 100), [18, 10, 23])
    for places, low, high in (([50, 50, 50, 51], 0, 100), ([99, 100], 0, 100), ([0, 0.5], 0, 100)):
        moved = _apart(places, 5, low, high)
        assert np.diff(np.sort(moved)).min() >= 5 - 1e-9
        assert min(moved) >= low - 1e-9
        assert max(moved) <= high + 1e-9


def test_descriptor_map_shows_classes_seen_and_unseen(make_run: MakeRun, tmp_path: Path) -> None:
    folder, out = make_run(descriptors=True), tmp_path / "map.png"
    descriptor_map(folder, out)
    main = np.load(folder.descriptors_file)["histograms"].argmax(axis=1)
    for k in range(5):
        drawn = pixels(out, CLASSES[k]) + pixels(out, CLASSES[k], alpha=0.85)
        assert (drawn > 60) == bool((main == k).any())


def test_an_unseen_client_hides_no_seen_one(make_run: MakeRun, tmp_path: Path) -> None:
    """A class in the legend had no visible point: a larger mark of an unseen client was on top of it."""
    folder, out, drawn = make_run(), tmp_path / "map.png", []
    histograms = np.array([[9, 0, 0], [9, 0, 0], [0, 9, 0], [0, 0, 9], [0, 9, 0]])
    places = np.array([[0.0, 0.0], [1.0, 0.2], [0.0, 0.9], [0.6, 0.6], [0.6, 0.6]])
    for unseen in (0, 1):
        seen = np.arange(5) < 5 - unseen
        np.savez(folder.descriptors_file, descriptors=places, histograms=histograms, seen=seen)
        descriptor_map(folder, out)
        drawn.append([pixels(out, CLASSES[k], alpha=0.85) for k in range(3)])
    assert drawn[1][2] > 60, "the seen client is visible within the mark of an unseen one"
    assert drawn[1][2] >= drawn[0][2], "more than below another seen client"


def test_descriptor_map_names_classes(make_run: MakeRun, tmp_path: Path) -> None:
    folder, out = make_run(), tmp_path / "map.svg"
    write_descriptors(folder, names=("ant", "bee", "cat", "dog", "eel & <x>"))
    descriptor_map(folder, out)
    main = np.load(folder.descriptors_file)["histograms"].argmax(axis=1)
    for k, name in enumerate(("ant", "bee", "cat", "dog")):
        assert (f"<!-- {name} -->" in out.read_text()) == bool((main == k).any())
    write_descriptors(folder, names=("one", "too", "few"))
    with pytest.raises(PefllError, match="PEFLL-O622"):
        descriptor_map(folder, out)


def test_rare_ones_of_many_classes_are_one_kind() -> None:
    main = np.array([7] * 5 + [3] * 4 + list(range(20, 40)))
    kinds = _kinds(np.eye(100)[main], [f"class {k}" for k in range(100)])
    assert kinds.names[:2] == ["class 7", "class 3"]
    assert kinds.names[-1] == "11 other classes"
    assert len(set(kinds.colours)) == len(kinds.names) == len(CLASSES)
    assert kinds.of_client.tolist() == [0] * 5 + [1] * 4 + list(range(2, 11)) + [11] * 11
    few = _kinds(np.eye(3)[[0, 2]], ())
    assert (few.names, few.of_client.tolist()) == (["0", "1", "2"], [0, 2])


def test_where_clients_overlap_their_density_is_drawn(make_run: MakeRun, tmp_path: Path) -> None:
    folder, random, n = make_run(), np.random.default_rng(0), 2000
    main = random.integers(0, 2, n)
    v = 0.1 * random.normal(size=(n, 3)) + 4 * np.eye(3)[main]
    seen = np.arange(n) < n - 5
    np.savez(folder.descriptors_file, descriptors=v, histograms=np.eye(2, dtype=int)[main], seen=seen)
    descriptor_map(folder, tmp_path / "map.svg")
    text = (tmp_path / "map.svg").read_text()
    assert "(darker: more" in text
    assert text.count("<use") < 1500, "no mark for each client"
    descriptor_map(folder, tmp_path / "map.png")
    shades = [pixels(tmp_path / "map.png", CLASSES[k], alpha) for k in (0, 1) for alpha in (0.3, 1.0)]
    assert min(shades) > 20, "both groups, from one client to many"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn."""
    drawn = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: drawn.append(self) or savefig(self, *args, **more)
    )
    return drawn


@pytest.mark.parametrize("n", [10, 2000])
def test_every_axis_and_picture_says_what_it_shows(
    make_run: MakeRun, tmp_path: Path, figures: list[Figure], n: int
) -> None:
    folder, histograms = make_run(), np.random.default_rng(0).integers(1, 60, (n, 30))
    write_descriptors(folder, n, 30, 3)
    curves([folder], tmp_path / "c.svg")
    descriptor_map(folder, tmp_path / "d.svg")
    class_picture(histograms, n - 3, tmp_path / "f.svg")
    class_picture(histograms[:, :5], n - 3, tmp_path / "f.svg")
    assert len(figures) == 4
    for figure in figures:
        for axes in figure.axes:
            shared = axes in figure.axes[1:] and figure is figures[0]  # the second panel has the first one's y axis
            is_bar = axes.get_label() == "<colorbar>"
            assert axes.get_ylabel() or shared
            assert axes.get_xlabel() or is_bar
            assert axes.get_title(loc="left") or is_bar


def test_skewed_counts_have_log_axes(make_run: MakeRun, tmp_path: Path, figures: list[Figure]) -> None:
    sizes = np.concatenate([np.arange(3, 40), [900, 2000]])
    for histograms, kind in ((sizes[:, None], "log"), (sizes[:37, None], "linear")):
        class_picture(histograms, len(histograms), tmp_path / "f.svg")
        axes = figures[-1].axes[1]
        assert axes.get_xscale() == kind
        assert sum(bar.get_height() for bar in axes.patches) == len(histograms), "nobody is left out"
    runs = [make_run("a"), make_run("b", method="fedavg"), make_run("silent", method="local", evaluations=0)]
    for method, factor in (("knn-per", 2), ("pfedhn", 50)):
        more = make_run(method, method=method, evaluations=0)
        for one in runs[0].history():
            more.append_history(one | {"bytes_down": factor * one["bytes_down"]})
        runs.append(more)
        curves(runs, tmp_path / "c.svg")
        assert figures[-1].axes[1].get_xscale() == ("log" if factor == 50 else "linear")


def as_seen(colours: Sequence[str], eyes: Sequence[Sequence[float]]) -> np.ndarray:
    """Colours in OKLab, where distances are differences as people see them, [n, 3]; eyes act on linear RGB."""
    rgb = np.array([to_rgb(colour) for colour in colours])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    cones = np.clip(linear @ np.array(eyes).T, 0, 1) @ np.array(TO_CONES).T
    return np.cbrt(cones) @ np.array(TO_OKLAB).T


TO_CONES = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
TO_OKLAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
# Machado, Oliveira and Fernandes 2009, the most severe kinds.
EYES = {
    "most": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
}


@pytest.mark.parametrize(("eyes", "least"), [("most", 0.13), ("deuteranopia", 0.085), ("protanopia", 0.085)])
def test_classes_can_be_told_apart(eyes: str, least: float) -> None:
    seen = as_seen(CLASSES, EYES[eyes])
    apart = np.linalg.norm(seen[:, None] - seen, axis=-1)
    for a, b in itertools.combinations(range(len(CLASSES)), 2):
        same_marker = a % len(MARKERS) == b % len(MARKERS)
        assert apart[a, b] > (0.24 if same_marker else least), (a, b)


def test_no_class_is_grey_nor_too_light_for_white() -> None:
    lightness, *hue = as_seen(CLASSES, EYES["most"]).T
    assert np.hypot(*hue).min() > 0.05
    assert lightness.max() < 0.87


@pytest.mark.parametrize(("n", "classes", "unseen"), [(400, 40, 40), (1, 3, 1), (2, 3, 0), (30, 12, 30), (5, 13, 5)])
def test_descriptor_map_of_any_size(make_run: MakeRun, tmp_path: Path, n: int, classes: int, unseen: int) -> None:
    folder, out = make_run(), tmp_path / "map.png"
    write_descriptors(folder, n, classes, unseen)
    descriptor_map(folder, out)
    assert 0.005 < share_of_ink(out) < 0.5


@pytest.mark.parametrize("classes", [10, 62])
def test_federation_picture(tmp_path: Path, classes: int) -> None:
    random, out = np.random.default_rng(0), tmp_path / "who.png"
    histograms = np.array([random.multinomial(random.integers(20, 200), [1 / classes] * classes) for _ in range(300)])
    class_picture(histograms, 270, out, title="digits")
    assert pixels(out, SEEN, alpha=0.8) > 5000
    assert pixels(out, UNSEEN, alpha=0.8) > 500
    unseen = pixels(out, UNSEEN, alpha=0.8)
    class_picture(histograms, 300, out)
    assert pixels(out, UNSEEN, alpha=0.8) == 0 < unseen


def test_federation_picture_of_equal_clients_and_of_one(tmp_path: Path) -> None:
    out = tmp_path / "who.svg"
    class_picture(np.full((4, 2), 50), 3, out, class_names=("cat", "dog"))
    text = out.read_text()
    assert "<!-- 100 -->" in text, "one number instead of one bar"
    assert "<!-- cat -->" in text
    class_picture(np.array([[3, 0, 1]]), 1, tmp_path / "one.png")
    assert share_of_ink(tmp_path / "one.png") > 0.005


def test_sizes_have_a_bar_per_number_where_they_are_few() -> None:
    axes = Figure().subplots()
    _draw_sizes(axes, np.array([37, 38, 38, 39, 39, 39, 40]), num_seen=5)
    heights = np.array([bar.get_height() for bar in axes.patches]).reshape(2, 4)
    assert heights.tolist() == [[1, 2, 2, 0], [0, 0, 1, 1]]


def test_federation_picture_of_nobody_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PefllError, match="PEFLL-O007"):
        class_picture(np.zeros((0, 10)), 0, tmp_path / "who.png")


@pytest.mark.parametrize(
    ("n", "seen"), [(10, 9), (60, 60), (1000, 900), (1000, 999), (1000, 1), (100, 0), (10**6, 10**6)]
)
def test_shown_clients(n: int, seen: int) -> None:
    shown = _sample_clients(n, seen)
    assert len(shown) == min(n, 60) == len(set(shown.tolist()))
    assert (np.diff(shown) > 0).all()
    assert shown.min() >= 0
    assert shown.max() < n
    assert (shown < seen).any() == (seen > 0)
    assert (shown >= seen).any() == (seen < n)


def test_the_ending_of_the_name_decides_the_format(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run()
    curves([folder], tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    curves([folder], tmp_path / "plain")
    assert (tmp_path / "plain").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(PefllError, match=r"a\.xyz.*PEFLL-O009"):
        curves([folder], tmp_path / "a.xyz")


def test_no_global_state_is_left(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run()
    script = f"""
import sys, matplotlib
from pathlib import Path
from pefll.runs.record import RunFolder
from pefll.report.plots import curves
def settings():  # without "backend": reading it imports pyplot
    return {{key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}}
before = settings()
curves([RunFolder(Path({str(folder.path)!r}))], Path({str(tmp_path / "a.png")!r}))
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").exists()


def test_disk_errors_are_sentences(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PefllError, match="PEFLL-A102"):
        curves([make_run()], tmp_path / "file" / "a.png")


def test_without_matplotlib_there_is_one_sentence(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder: RunFolder = make_run(descriptors=True)
    for draw in (
        lambda: curves([folder], tmp_path / "a.png"),
        lambda: descriptor_map(folder, tmp_path / "a.png"),
        lambda: class_picture(np.ones((2, 2)), 1, tmp_path / "a.png"),
    ):
        with pytest.raises(PefllError, match=r"pip install matplotlib \[PEFLL-O008\]$"):
            draw()


def test_threads_that_draw_at_once_leave_the_users_style(tmp_path: Path) -> None:
    """The second thread begins while the first one draws, and ends after it."""
    import matplotlib

    before = dict(matplotlib.rcParams)
    drawn, second_draws, first_is_done = (threading.Event() for _ in range(3))

    def first() -> None:
        with drawing(tmp_path / "a.svg", (1, 1)):
            drawn.set()
            second_draws.wait(0.3)
        first_is_done.set()

    def second() -> None:
        drawn.wait(5)
        with drawing(tmp_path / "b.svg", (1, 1)):
            second_draws.set()
            first_is_done.wait(5)

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(first), pool.submit(second)]:
            job.result()
    changed = {name for name, value in before.items() if matplotlib.rcParams[name] != value}
    matplotlib.rcParams.update(before)
    assert not changed
