"""The page, the card and the figures of a certificate."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.guarantees.statement import Statement
from pefll.report.certificate import bounds_over_training, certificate_picture, model_card, print_certificate

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


def test_figures(certificate, tmp_path):
    pytest.importorskip("matplotlib")
    counts = COUNTS["unseen"]
    values = [k / m for k, m in zip(counts["correct"], counts["samples"], strict=True)]
    certificate_picture(certificate, values, tmp_path / "c.svg")
    assert (tmp_path / "c.svg").stat().st_size > 5_000
    rows = [{"round": r, "unseen_error": 1 / (r + 2), "bounds": {"a": 40 / (r + 1), "b": None}} for r in (20, 0, 10)]
    bounds_over_training(rows, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(PefllError, match="PEFLL-G140"):
        bounds_over_training([], tmp_path / "none.png")
