"""The certificate of a run: what its unseen clients, and its training, promise about new clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.guarantees import held_out
from pefll.guarantees.binomial import least_samples
from pefll.guarantees.held_out import at_least, percent
from pefll.guarantees.intervals import checked_delta, checked_share, least_clients
from pefll.guarantees.statement import Statement
from pefll.runs.record import CERTIFICATE, RunFolder
from pefll.runs.unseen import UnseenFigures, unseen_figures
from pefll.training.meta_bounds import meta_bounds

if TYPE_CHECKING:
    from rich.console import Console

    from pefll.data.federation import Federation
    from pefll.training.run import Run

DELTA, SHARE = 0.05, 0.9
MARGIN, WIDTH = 0.05, 0.1
_FORMAT = 1
_RUN = ("method", "dataset", "partition", "seed", "num_clients", "num_seen", "num_unseen", "best_round")


@dataclass(frozen=True)
class Certificate:
    """Statements about new clients of a run, with what they assume.

    Attributes:
        run: what was trained, as in the run's summary.
        metric: the metric in words.
        delta: the probability with which a statement fails.
        clients: number of unseen clients that were used.
        statements: the certificate for the mean first.
        assumptions: what must be true, in sentences.
        notes: what a reader should know, in sentences.
        plan: rows with `what` is wanted and the `least` number for it.
    """

    run: Mapping[str, Any]
    metric: str
    delta: float
    clients: int
    statements: tuple[Statement, ...]
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    plan: tuple[Mapping[str, Any], ...]

    @property
    def headline(self) -> str:
        """The certificate in half a sentence, for the files of personal models."""
        bound, confidence = at_least(self.statements[0].bound), percent(1 - self.delta)
        return f"{self.metric} of a new client at least {bound} with confidence {confidence}"

    def __getitem__(self, name: str) -> Statement:
        """Return the statement of a name; KeyError if there is none."""
        return {one.name: one for one in self.statements}[name]

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as JSON."""
        return {
            "format": _FORMAT,
            "headline": self.headline,
            "run": dict(self.run),
            "metric": self.metric,
            "delta": self.delta,
            "clients": self.clients,
            "statements": [one.row() for one in self.statements],
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "plan": [dict(row) for row in self.plan],
        }

    def write(self, folder: RunFolder) -> None:
        """Write the certificate into the run's summary.json, where it replaces an earlier one."""
        with folder.held():
            summary = folder.summary()
            if summary is None:
                raise _unfinished(folder)
            folder.write_summary(summary | {CERTIFICATE: self.to_json()})


def certify_summary(
    summary: Mapping[str, Any],
    where: object,
    delta: float = DELTA,
    share: float | None = None,
    width: float = WIDTH,
    more: Sequence[Statement] = (),
    notes: Sequence[str] = (),
) -> Certificate:
    """Return the certificate of a run from its summary alone, without data or checkpoint.

    Args:
        summary: the run's summary, or the content of a committed result file.
        where: the run or the file, for errors.
        delta: the probability with which a statement fails.
        share: the share of new clients in statements about quantiles. None for 0.9, or for none of these statements if
            there are too few clients.
        width: the width of a client's own interval, for the plan.
        more: further statements, such as PAC-Bayes bounds.
        notes: further notes.
    """
    delta, found = checked_delta(delta), unseen_figures(summary, where)
    statements = held_out.mean_statements(found.values, delta, found.metric)
    shares, left_out = _shares(found, delta, share)
    kept = [*statements, *shares, *more]
    run = {key: summary[key] for key in _RUN if key in summary}
    return Certificate(
        run=run,
        metric=found.metric,
        delta=delta,
        clients=len(found.values),
        statements=tuple(kept),
        assumptions=tuple(_assumptions(found, str(summary.get("partition", "")))),
        notes=(*_notes(found, delta, kept), *left_out, *notes),
        plan=tuple(_plan(found, delta, width)),
    )


def certify(
    run: Run,
    delta: float = DELTA,
    share: float | None = None,
    width: float = WIDTH,
    federation: Federation | None = None,
    bounds: bool = True,
    console: Console | None = None,
) -> Certificate:
    """Return the certificate of a trained run, and keep it in `run.summary`; see `Run.certify`."""
    delta, summary = checked_delta(delta), dict(run.summary)
    if federation is not None or not (summary.get("client_counts") or summary.get("client_metrics")):
        summary |= _counts(run, federation, console)
    unseen_figures(summary, run)  # bad input is found before bounds are computed
    more: list[Statement] = []
    notes: list[str] = []
    if bounds:
        try:
            more = _training_statements(run, delta, console, federation, notes)
        except PefllError as error:
            notes.append(f"There is no bound from training: {error.args[0]}.")
    found = certify_summary(summary, run, delta, share, width, more, notes)
    run.summary[CERTIFICATE] = found.to_json()
    return found


def _training_statements(
    run: Run, delta: float, console: Console | None, federation: Federation | None, notes: list[str]
) -> list[Statement]:
    """Return PAC-Bayes bounds from the seen clients. `notes` gets a sentence for each bound that is left out."""
    return meta_bounds(run, delta, console, federation, notes)


def _counts(run: Run, federation: Federation | None, console: Console | None) -> dict[str, Any]:
    """Return the figures of a summary about unseen clients, measured now."""
    scores: list[Any] = list(run.evaluate_clients("test", federation, console))
    unseen = [one for one in scores if not one.seen]
    found: dict[str, Any] = {"split": "test", "num_seen": len(scores) - len(unseen), "num_unseen": len(unseen)}
    if federation is not None:
        found |= {"dataset": federation.name, "partition": federation.partition}
    found["num_clients"] = len(scores)
    counts: dict[str, list[Any]] = {"samples": [one.samples for one in unseen]}
    if all(hasattr(one, "correct") for one in unseen):
        counts["correct"] = [one.correct for one in unseen]
        return found | {"client_counts": {"unseen": counts}, "client_metrics": None}
    for name in unseen[0].metrics if unseen else ():
        counts[name] = [None if np.isnan(one.metrics[name]) else one.metrics[name] for one in unseen]
    return found | {"client_counts": None, "client_metrics": {"unseen": counts}}


def _shares(found: UnseenFigures, delta: float, share: float | None) -> tuple[list[Statement], list[str]]:
    """Return the statements about a share of clients, and notes about those that need more clients."""
    if share is not None:
        checked_share(share, "the share of clients")
    share_of = SHARE if share is None else share
    wanted: list[Callable[[], Statement]] = [
        lambda: held_out.measured_share(found.values, delta, share_of, found.metric)
    ]
    if (correct := found.correct) is not None:
        wanted.append(lambda: held_out.true_share(found.samples, correct, delta, share_of))
    statements: list[Statement] = []
    for make in wanted:
        try:
            statements.append(make())
        except PefllError as error:
            if share is not None and not statements:
                raise
            kind = "true" if statements else "measured"
            return statements, [f"No line about the {kind} {found.metric}: {error.args[0].partition(';')[0]}."]
    return statements, []


def _assumptions(found: UnseenFigures, partition: str) -> list[str]:
    """Return what the statements from unseen clients assume."""
    kind = partition.partition(" ")[0]
    same = [
        "New clients come from the environment that the unseen clients are an independent random sample of.",
        "Nothing was chosen with the unseen clients: neither the round, which seen clients choose, nor the settings.",
        "A client's test samples were used for nothing else, so its descriptor is made from other samples.",
    ]
    if kind in ("by-class", "dirichlet"):
        same.append(
            f"The partition ({partition}) deals one pool of samples out to all clients, so clients are only nearly "
            "independent. The statements take them as independent; they say nothing about other samples of the pool."
        )
    elif kind == "natural":
        same.append("Unseen clients were chosen at random among the clients of the data, which is a finite population.")
    if found.left_out:
        same.append(
            f"{found.left_out:,} unseen clients without a test figure are left out; the statements are about others."
        )
    return same


def _notes(found: UnseenFigures, delta: float, statements: Sequence[Statement]) -> list[str]:
    names = {one.name for one in statements}
    # Two intervals are not used, and all query bounds hold together with one δ.
    used = len(names - {"mean-bernstein", "mean-hoeffding"} - {name for name in names if name.startswith("query")})
    used += any(name.startswith("query") for name in names)
    joint = max(0.0, 1 - used * delta)
    notes = [
        "The certificate of the mean is the betting interval, which was named before any result was seen. The other "
        "two intervals are shown for comparison.",
    ]
    if used > 1:
        notes.append(
            f"Each line holds with confidence {percent(1 - delta)}. All lines but the two for comparison hold together "
            f"with confidence {percent(joint)} at least."
        )
    if "share-measured" in names:
        low, high = min(found.samples), max(found.samples)
        tests = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        notes.append(f"The unseen clients have {tests} test samples each.")
    return notes


def _plan(found: UnseenFigures, delta: float, width: float) -> list[dict[str, Any]]:
    """Return the least numbers of clients and samples for wanted bounds."""
    mean = float(np.mean(found.values))
    rows: list[dict[str, Any]] = [
        {
            "what": f"Unseen clients whose mean is within {100 * MARGIN:g} points, by Hoeffding",
            "least": least_clients(MARGIN, delta),
        },
        {
            "what": f"Samples of a client for a Clopper-Pearson interval of width {width:g}, at any accuracy",
            "least": least_samples(width, delta),
        },
    ]
    if found.correct is not None and 0 < mean < 1:
        known = percent(round(mean, 3))
        rows.append(
            {"what": f"Such samples if {known} of them are correct", "least": least_samples(width, delta, mean)}
        )
    return rows


def _unfinished(folder: RunFolder) -> PefllError:
    return PefllError(
        f"{folder.path} is not finished, so it has no test figures; continue it with {folder.going_on}",
        code="PEFLL-G126",
    )


def finished_summary(folder: RunFolder) -> dict[str, Any]:
    """Return the summary of a finished run; PefllError otherwise."""
    folder.check_is_run()
    summary = folder.summary()
    if summary is None:
        raise _unfinished(folder)
    return summary
