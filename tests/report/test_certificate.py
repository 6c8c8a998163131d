"""The page, the card and the figures of a certificate."""

from __future__ import annotations

import io
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.guarantees.statement import Statement, rounded_up
from pefll.report import certificate as report
from pefll.report import plots
from pefll.report.certificate import (
    bound_text,
    bounds_over_training,
    certificate_markdown,
    certificate_picture,
    model_card,
    print_certificate,
)
from pefll.report.plots import check_drawable, drawing

COUNTS = {"unseen": {"samples": [10] * 60, "correct": [*range(5, 11)] * 10}}
SUMMARY = {
    "method": "pefll",
    "dataset": "made up",
    "partition": "natural",
    "seed": 3,
    "num_clients": 90,
    "num_seen": 30,
    "num_unseen": 60,
    "best_round": 7,
    "rounds": 9,
    "model": "mlp",
    "client_counts": COUNTS,
    "accuracy": {"best": {"seen": {"per_sample": 0.8}, "unseen": {"per_sample": 0.75}}},
}
BOUND = Statement("pac-bayes", "error, PAC-Bayes", 0.25, 0.4301, False, 0.95, "It is at most 43.1%.", "Own words.")
VACUOUS = BOUND._replace(name="theorem", title="error, to the letter", bound=337.2)


@pytest.fixture
def certificate():
    from pefll.training.certificate import certify_summary

    return certify_summary(SUMMARY, "a run", more=[BOUND, VACUOUS], notes=["A note."]).to_json()


def test_the_page_has_every_statement_within_80_columns(certificate):
    text = io.StringIO()
    print_certificate(certificate, Console(file=text, width=200), "runs/x")
    page = text.getvalue()
    assert max(map(len, page.splitlines())) <= 80
    words = " ".join(page.replace("│", " ").split())
    for expected in ("≤ 43.1%", "≤ 337", "vacuous", "Own words.", "- A note.", "finite population", "Least numbers"):
        assert expected in words
    assert "hold together with confidence 75% at least" in words  # betting, two shares, two bounds


def test_the_card_is_markdown(certificate):
    card = model_card(SUMMARY, certificate)
    assert card.startswith("# pefll on made up\n")
    assert "| error, PAC-Bayes | ≤ 43.1% | 25.0% | 95% | It is at most 43.1%. |" in card
    assert "- unseen clients: accuracy 75.0%" in card
    assert card.endswith("\n")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, also as files."""
    pytest.importorskip("matplotlib")
    figures = []

    @contextmanager
    def keeping(*given):
        with drawing(*given) as figure:
            figures.append(figure)
            yield figure

    monkeypatch.setattr(report, "drawing", keeping)
    return figures


def bars(axes):
    """The length of each bar by the words beside it, from top to bottom."""
    words = [label.get_text().replace("\n", " ").replace("\u00a0", " ") for label in axes.get_yticklabels()]
    return dict(zip(words, [round(bar.get_width(), 2) for bar in axes.patches], strict=True))


def test_the_figure_has_upper_bounds_on_the_error(certificate, drawn, tmp_path):
    certificate_picture(certificate, [0.5, 0.75], tmp_path / "c.svg")
    below = drawn[0].axes[1]
    found = bars(below)
    assert found["error, PAC-Bayes ≤ 43.1%"] == 56.99
    assert found["error, to the letter ≤ 337 (vacuous)"] == 0
    assert next(iter(found)).startswith("mean accuracy, betting interval ≥")
    assert 75 in [line.get_xdata()[0] for line in below.get_lines()]  # the measured error of 25%
    assert "100% minus the error" in below.get_xlabel()

    entropy = Statement("theorem-3.2-cross-entropy", "cross-entropy", 0.2, 0.3, False, 0.95, "", "")
    other = certificate | {"metric": "micro F1", "statements": [BOUND.row(), entropy.row()]}
    certificate_picture(other, [0.5], tmp_path / "other.svg")
    assert bars(drawn[1].axes[1]) == {}  # an error says nothing about micro F1
    certificate_picture(other | {"metric": "accuracy"}, [], tmp_path / "none.svg")  # no unseen clients
    (alone,) = drawn[2].axes
    assert bars(alone) == {"error, PAC-Bayes ≤ 43.1%": 56.99}


def test_a_bound_that_prints_as_all_or_nothing_is_vacuous(certificate):
    for bound, lower, vacuous in (
        (0.9996, False, True),
        (0.999, False, False),
        (0.0004, True, True),
        (0.001, True, False),
    ):
        row = BOUND._replace(bound=bound, lower=lower).row()
        assert row["vacuous"] is vacuous
        assert (bound_text(row) in ("≤ 100.0%", "≥ 0.0%")) is vacuous
    full = BOUND._replace(bound=0.99998).row()
    text = io.StringIO()
    print_certificate(certificate | {"statements": [full]}, Console(file=text, width=80))
    assert "vacuous" in text.getvalue()
    assert "≤ 100.0% (vacuous)" in certificate_markdown(certificate | {"statements": [full]})


@pytest.mark.parametrize(("bound", "text"), [(0.3454, "0.346"), (0.345, "0.345"), (1.0, "1"), (41.96, "42")])
def test_upper_bounds_are_rounded_up(bound, text):
    assert rounded_up(bound) == text


def test_figures(certificate, drawn, tmp_path):
    counts = COUNTS["unseen"]
    values = [k / m for k, m in zip(counts["correct"], counts["samples"], strict=True)]
    certificate_picture(certificate, values, tmp_path / "c.svg")
    assert (tmp_path / "c.svg").stat().st_size > 5_000
    rows = [{"round": r, "unseen_error": 1 / (r + 2), "bounds": {"a": 40 / (r + 1), "b": None}} for r in (20, 0, 10)]
    bounds_over_training({"one": rows}, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    lines = {line.get_label(): line for line in drawn[1].axes[0].get_lines()}
    assert lines["a"].get_xdata().tolist() == [0, 10, 20]
    assert "b" not in lines  # it has no value
    assert [label.get_text() for label in drawn[1].axes[0].get_yticklabels()][:3] == ["0.01", "0.1", "1"]
    bounds_over_training({"one": rows, "two": rows[:1]}, tmp_path / "b.png", {"a": "the bound"}, "the truth")
    assert [axes.get_title(loc="left") for axes in drawn[2].axes] == ["one", "two"]
    assert {"the bound", "the truth"} <= {line.get_label() for line in drawn[2].axes[1].get_lines()}
    with pytest.raises(PefllError, match="PEFLL-G140"):
        bounds_over_training({"one": []}, tmp_path / "none.png")


@pytest.mark.parametrize("name", ["c.xyz", "c.jpeg.txt"])
def test_a_figure_without_a_format_is_refused_before_it_is_drawn(name, monkeypatch):
    with pytest.raises(PefllError, match="PEFLL-O009"):
        check_drawable(Path(name))
    check_drawable(Path("c.PNG"))
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(PefllError, match="PEFLL-O008"):
        check_drawable(Path("c.png"))


def test_a_card_shows_a_strangers_texts_as_they_are(certificate):
    evil = "<script>`x`|\n# [y](http://z)"
    hostile = SUMMARY | {"command": evil, "model": evil}
    named = certificate | {"run": certificate["run"] | {"method": evil, "dataset": evil}}
    named["statements"] = [certificate["statements"][0] | {"title": evil, "promise": evil}]
    card = model_card(hostile, named)
    assert "- Command: `` <script>`x`| # [y](http://z) ``" in card
    text = card.replace("`` <script>`x`| # [y](http://z) ``", "")
    assert "\\<script\\>\\`x\\`\\| # \\[y\\]" in text
    assert not re.search(r"(?<!\\)[<`\[]", text)
    assert text.count("\n# ") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"accuracy": {"best": [1]}},
        {"accuracy": {"best": {"seen": "x"}}},
        {"accuracy": {"best": {"seen": {"per_sample": 10**400}}}},
        {"accuracy": {"best": {"seen": {"per_sample": {}}}}},
    ],
)
def test_a_card_of_a_damaged_summary_is_refused(certificate, wrong):
    with pytest.raises(PefllError, match="damaged") as refused:
        model_card(SUMMARY | wrong, certificate)
    assert refused.value.code == "PEFLL-G149"
    with pytest.raises(PefllError):
        model_card(SUMMARY, certificate | {"run": certificate["run"] | {"num_seen": None}})


def test_a_name_in_a_picture_is_no_formula(certificate, tmp_path):
    rows = [certificate["statements"][0] | {"title": "$x^$"}]
    certificate_picture(certificate | {"statements": rows}, [0.5, 0.7], tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 0
