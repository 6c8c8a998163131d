from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from pefll.report.runs import read_run, read_runs
from pefll.report.text import braille_plot, run_plot, sparkline, sparklines

from .conftest import MakeRun, printed


def test_sparkline_rises_with_its_values() -> None:
    assert sparkline(np.arange(8.0), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.arange(16.0)[::-1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline(np.array([0.5, np.nan, 1.0]), 10, low=0.0, high=1.0) in ("▅ █", "▄ █")
    assert sparkline(np.array([2.0, 2.0]), 10) == "▁▁"
    assert sparkline(np.array([np.nan]), 10) == ""
    assert len(sparkline(np.arange(1000.0), 33)) == 33


def dots(text: str, width: int) -> np.ndarray:
    """Decode a braille plot into a bitmap by the Unicode standard's numbering of dots."""
    lines = [line[7:].ljust(width) for line in text.splitlines()[:-2]]
    bitmap = np.zeros((4 * len(lines), 2 * width), dtype=bool)
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]
    for i, line in enumerate(lines):
        for j, character in enumerate(line[:width]):
            bits = 0 if character == " " else ord(character) - 0x2800
            for bit, (down, right) in enumerate(places):
                bitmap[4 * i + down, 2 * j + right] = bool(bits >> bit & 1)
    return bitmap


def test_braille_plot_draws_the_diagonal() -> None:
    x = np.array([0.0, 100.0])
    text = braille_plot({"seen": (x, np.array([0.25, 0.75]))}, width=10, height=5).plain
    bitmap = dots(text, 10)
    np.testing.assert_array_equal(bitmap, np.eye(20, dtype=bool)[::-1])
    lines = text.splitlines()
    assert lines[0].startswith(" 75.0 ┤")
    assert lines[2].startswith(" 50.0 ┤")
    assert lines[4].startswith(" 25.0 ┤")
    assert lines[-1].split() == ["0", "round", "100"]


def test_braille_plot_of_one_point_and_of_nothing() -> None:
    one = braille_plot({"seen": (np.array([5.0]), np.array([0.5]))}, width=4, height=3).plain
    assert dots(one, 4).sum() == 1
    assert braille_plot({"seen": (np.array([1.0]), np.array([np.nan]))}, 4, 3).plain == ""


def test_run_plot_shows_both_groups(make_run: MakeRun) -> None:
    text = run_plot(read_run(make_run(seen=0.8, unseen=0.6)), width=40)
    assert text.plain.startswith("Validation accuracy in %: seen 80.0  unseen 60.0")
    assert max(len(line) for line in text.plain.splitlines()[1:]) <= 48
    colours = {str(span.style) for span in text.spans}
    assert {"cyan", "yellow"} <= colours
    assert "unseen" not in run_plot(read_run(make_run("alone", unseen=None))).plain
    assert run_plot(read_run(make_run("new", finished=False, evaluations=0))).plain == ""


@pytest.mark.parametrize("unseen", [0.4, None])
def test_sparklines_share_one_scale(make_run: MakeRun, console: Console, unseen: float | None) -> None:
    folders = [make_run("high[er]", seen=0.8, unseen=unseen), make_run("low", seen=0.4, unseen=unseen)]
    lines = printed(console, sparklines(read_runs(folders))).splitlines()
    assert lines[0].strip() == "Validation accuracy in %, from 4.0 (▁) to 80.0 (█)"
    high = next(line for line in lines if line.startswith("pefll (high[er])")).split()[1:]
    low = next(line for line in lines if line.startswith("pefll (low)")).split()[1:]
    assert high[1] == low[1] == "seen"
    assert high[2][-1] == "█"
    assert low[2][-1] in "▄▅"
    assert (high[3], low[3]) == ("80.0", "40.0")
    assert sum("unseen" in line for line in lines) == (2 if unseen else 0)
