"""The certificate of a run: what its unseen clients, and its training, promise about new clients."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.core.wording import all_harmless, argument, counted, first_few
from pefll.guarantees import held_out
from pefll.guarantees.binomial import least_samples
from pefll.guarantees.held_out import at_least, percent
from pefll.guarantees.intervals import checked_delta, checked_share, least_clients
from pefll.guarantees.statement import Statement
from pefll.runs.record import CERTIFICATE, RunFolder
from pefll.runs.unseen import TooFewUnseen, UnseenFigures, unseen_figures
from pefll.training.meta_bounds import meta_bounds

if TYPE_CHECKING:
    from pefll.data.federation import Federation
    from pefll.training.run import Run

DELTA, SHARE = 0.05, 0.9
MARGIN, WIDTH = 0.05, 0.1
_FORMAT = 1
_OTHER_ENVIRONMENT = (
    "Unseen clients have other class proportions than seen ones. Statements from unseen clients are about clients like "
    "these, and bounds over training about clients like the seen ones."
)
_RUN = ("method", "dataset", "partition", "seed", "num_clients", "num_seen", "num_unseen", "best_round")


@dataclass(frozen=True)
class Certificate:
    """Statements about new clients of a run, with what they assume. `print` shows the first one, and `page` all.

    Attributes:
        run: what was trained, as in the run's summary.
        metric: the metric in words.
        delta: the probability with which a statement fails.
        clients: number of unseen clients that were used.
        statements: the certificate for the mean first; without unseen clients, bounds over training alone.
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
    def headline(self) -> str | None:
        """The certificate in half a sentence, for the files of personal models.

        None without unseen clients: bounds over training are about other networks than those of personal models.
        """
        if not self.clients:
            return None
        bound, confidence = at_least(self.statements[0].bound), percent(1 - self.delta)
        return f"expected {self.metric} of a new client at least {bound} with confidence {confidence}"

    def __str__(self) -> str:
        first, others = self.statements[0], len(self.statements) - 1
        measured = f" Measured: {first.measured:.1%}, mean of {counted(self.clients, 'unseen client')}."
        return (
            f"{first}{measured if self.clients else ''} print(certificate.page()) shows what this assumes, "
            f"{counted(others, 'other statement')} and {counted(len(self.notes), 'note')}."
        )

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.statements)
        return f"<Certificate: {self.headline or 'bounds over training'}; statements {names}>"

    def page(self) -> str:
        """Return what `pefll certify` prints: all statements, what they assume, notes and least numbers."""
        from pefll.report.certificate import WIDTH, print_certificate

        text = io.StringIO()
        print_certificate(self.to_json(), Console(file=text, width=WIDTH, color_system=None))
        return text.getvalue()

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
    delta = checked_delta(delta)
    held = _from_unseen(summary, where, delta, share)
    plan = _plan(held, delta, width)
    stored, told = _stored_statements(summary, where, delta)
    if isinstance(held, TooFewUnseen) and told and not stored:
        raise neither(where, held, told[0].rstrip("."))
    return _certificate(summary, held, plan, delta, [*stored, *more], [*told, *notes])


class FromUnseen(NamedTuple):
    """What unseen clients say.

    Attributes:
        figures: of the unseen clients.
        statements: the certificate for the mean first.
        left_out: notes about statements that need more clients.
    """

    figures: UnseenFigures
    statements: list[Statement]
    left_out: list[str]


def _from_unseen(
    summary: Mapping[str, Any], where: object, delta: float, share: float | None
) -> FromUnseen | TooFewUnseen:
    """Return the statements from unseen clients, or why there are none. A share that is asked for needs them."""
    if share is not None:
        checked_share(share, "the share of clients")
    try:
        found = unseen_figures(summary, where)
    except TooFewUnseen as error:
        if share is not None:
            raise
        return error
    shares, left_out = _shares(found, delta, share)
    statements = held_out.mean_statements(found.values, delta, found.metric)
    return FromUnseen(found, [*statements, *shares], left_out)


def _certificate(
    summary: Mapping[str, Any],
    held: FromUnseen | TooFewUnseen,
    plan: Sequence[Mapping[str, Any]],
    delta: float,
    more: Sequence[Statement],
    notes: Sequence[str],
) -> Certificate:
    """Return the certificate of statements from unseen clients and of others, of which there must be one."""
    sampling = str(summary.get("sampling", "uniform"))
    if isinstance(held, TooFewUnseen):
        if not more:
            raise held
        metric, clients, kept = "accuracy", 0, [*more]
        assumptions = _of_data(summary)
        told = [
            f"This run has {held.having}, so it has no bound from unseen clients, which needs at least 2 with test "
            "samples. All statements are bounds over training. Personal models carry none of them."
        ]
    else:
        found = held.figures
        metric, clients, kept = found.metric, len(found.values), [*held.statements, *more]
        assumptions = _assumptions(found, summary)
        told = [
            "The certificate of the mean is the betting interval, which was named before any result was seen. The "
            "other two intervals are shown for comparison."
        ]
    names = {one.name for one in kept}
    told += _confidence(names, delta)
    if not isinstance(held, TooFewUnseen):
        told += [*_tests(held.figures, names), *held.left_out]
    return Certificate(
        run={key: summary[key] for key in _RUN if key in summary},
        metric=metric,
        delta=delta,
        clients=clients,
        statements=tuple(kept),
        assumptions=tuple(assumptions),
        notes=(*told, *_sampling_notes(sampling, names), *notes),
        plan=tuple(plan),
    )


def certify(
    run: Run,
    delta: float = DELTA,
    share: float | None = None,
    width: float = WIDTH,
    federation: Federation | None = None,
    bounds: bool = True,
    console: Console | None = None,
    where: object = "the run",
) -> Certificate:
    """Return the certificate of a trained run, and keep it in `run.summary`; see `Run.certify`.

    Errors call the run `where`.
    """
    delta, summary = checked_delta(delta), dict(run.summary)
    notes: list[str] = []
    if run.config.sampling != "uniform":  # summaries of earlier versions do not say it
        summary["sampling"] = run.config.sampling
    if run.config.unseen_clients:
        summary["named_unseen"] = True
    others = _other_settings(run)
    if others:
        notes.append(f"Test figures were measured now, with {others}: those in the run's summary are of other models.")
    figures = summary.get("num_unseen") == 0 or summary.get("client_counts") or summary.get("client_metrics")
    if federation is not None or others or not figures:
        summary |= _counts(run, federation, console)
    # Bad input is found before bounds are computed, which takes minutes.
    held = _from_unseen(summary, where, delta, share)
    plan = _plan(held, delta, width)
    more: list[Statement] = []
    if bounds:
        try:
            more = meta_bounds(run, delta, console, federation, notes)
        except PefllError as error:
            if isinstance(held, TooFewUnseen):
                raise neither(where, held, error.args[0]) from error
            notes.append(f"There is no bound from training: {error.args[0]}.")
    found = _certificate(summary, held, plan, delta, more, notes)
    run.summary[CERTIFICATE] = found.to_json()
    return found


def neither(where: object, held: TooFewUnseen, reason: str) -> PefllError:
    """Return the error for a run with too few unseen clients, and without bounds over training for a `reason`."""
    why = reason.partition(";")[0]
    return PefllError(
        f"{where} has {held.having}, and there is no bound over training: {why}; train with "
        f"unseen clients, such as {argument('unseen', 0.1)}",
        code="PEFLL-G128",
    )


def _other_settings(run: Run) -> str:
    """Return the settings of personalisation that the run's test figures were not measured with; "" for none."""
    measured, names = run.summary.get("settings", {}), getattr(run.method, "personal_settings", ())
    now = {name: getattr(run.method, name) for name in names if name in measured}
    return first_few(f"{name}={value}" for name, value in now.items() if value != measured[name])


def _stored_statements(summary: Mapping[str, Any], where: object, delta: float) -> tuple[list[Statement], list[str]]:
    """Return the bounds in a result file that `pefll reproduce certificates` made, with notes about them."""
    measured = summary.get("measured")
    stored = measured.get("certificates") if isinstance(measured, Mapping) else None
    if stored is None:
        return [], []
    try:
        made_for, found = float(stored["delta"]), [Statement.from_row(row) for row in stored["statements"]]
        last = int(stored["points"][-1]["round"]) if stored["points"] else None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise PefllError(
            f"{where} is damaged: its bounds over training make no sense ({error!r}); make it again with `pefll "
            "reproduce certificates`",
            code="PEFLL-G127",
        ) from error
    if not found:
        return [], []
    if not math.isclose(made_for, delta):
        return [], [
            f"The {counted(len(found), 'bound')} over training in this file are left out, because they were made for "
            f"δ = {made_for:g}, which {argument('delta', made_for)} asks for."
        ]
    after = f"after round {last:,}, the last one" if last is not None else "after the last round"
    return found, [
        f"The bounds over training are those that `pefll reproduce certificates` stored. They are about the networks "
        f"{after}, and those called query about networks near the prior. The test figures of unseen clients are those "
        "of the best round."
    ]


def _counts(run: Run, federation: Federation | None, console: Console | None) -> dict[str, Any]:
    """Return the figures of a summary about unseen clients, measured now."""
    scores: list[Any] = list(run.evaluate_clients("test", federation, console))
    unseen = [one for one in scores if not one.seen]
    found: dict[str, Any] = {"split": "test", "num_seen": len(scores) - len(unseen), "num_unseen": len(unseen)}
    if federation is not None:
        found |= {"dataset": federation.name, "partition": federation.partition}
        found |= {"named_unseen": federation.named_unseen, "tests_last": federation.tests_last}
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


def _assumptions(found: UnseenFigures, summary: Mapping[str, Any]) -> list[str]:
    """Return what the statements from unseen clients assume."""
    partition = str(summary.get("partition", ""))
    same = [
        "New clients come from the environment that the unseen clients are an independent random sample of. Numbers "
        "of training samples belong to it: a client with fewer samples may get a worse model.",
        "Nothing was chosen with the unseen clients: neither the round, which seen clients choose, nor the settings, "
        "nor this run among runs with other seeds.",
        "A client's test samples were used for nothing else, so its descriptor is made from other samples.",
        *_of_data(summary),
    ]
    if isinstance(stopped := summary.get("stopped"), Mapping):
        same.append(
            f"{stopped.get('by')} ended training after round {stopped.get('after_round')}, and it did not watch unseen "
            "clients. If it did, as EarlyStopping(group='unseen') does, they chose the round, and no statement holds."
        )
    if summary.get("named_unseen"):
        same.append(
            "The unseen clients of this run were chosen by name, not at random. The statements hold only for new "
            "clients that are chosen in the same way."
        )
    elif partition.partition(" ")[0] == "natural":
        same.append("Unseen clients were chosen at random among the clients of the data, which is a finite population.")
    if found.left_out:
        clients, verb = counted(found.left_out, "unseen client"), "is" if found.left_out == 1 else "are"
        same.append(f"{clients} without a test figure {verb} left out; the statements are about others.")
    return same


def _of_data(summary: Mapping[str, Any]) -> list[str]:
    """Return what all statements assume of how clients got their samples."""
    found = _dealt(str(summary.get("partition", "")))
    if summary.get("tests_last"):
        found.append(
            "Each client's test samples are its last ones in time. The statements are about such later samples. Those "
            "about true accuracies take them as independent, which samples over time may not be."
        )
    return found


def _dealt(partition: str) -> list[str]:
    """Return what a partition of one pool of samples means for statements that take clients as independent."""
    kind = partition.partition(" ")[0]
    others = "The statements take clients as independent; they say nothing about other samples of the pool."
    if kind == "by-class":
        return [
            f"The partition ({partition}) deals classes and samples out to all clients. A client's classes are a "
            "random set, but all classes get equally many clients, so the clients are not independent. "
            f"{others}"
        ]
    if kind == "dirichlet":
        return [
            f"The partition ({partition}) deals one pool of samples out to all clients, so clients are only nearly "
            f"independent: their class proportions are independent, their samples are not. {others}",
            *([_OTHER_ENVIRONMENT] if "/" in partition else []),
        ]
    return []


def _confidence(names: set[str], delta: float) -> list[str]:
    """Return a note about the confidence of all statements together; none for a single statement."""
    # Two intervals are not used, and all query bounds hold together with one δ.
    used = len(names - {"mean-bernstein", "mean-hoeffding"} - {name for name in names if name.startswith("query")})
    used += any(name.startswith("query") for name in names)
    if used < 2:
        return []
    joint, but = percent(max(0.0, 1 - used * delta)), " but the two for comparison" if "mean-betting" in names else ""
    return [
        f"Each line holds with confidence {percent(1 - delta)}. All lines{but} hold together with confidence {joint} "
        "at least."
    ]


def _tests(found: UnseenFigures, names: set[str]) -> list[str]:
    """Return a note about the test samples of unseen clients, if a statement is about as many."""
    if "share-measured" not in names:
        return []
    low, high = min(found.samples), max(found.samples)
    tests = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return [f"The unseen clients have {tests} test samples each."]


def _sampling_notes(sampling: str, names: set[str]) -> list[str]:
    """Return what the choice of the clients of a round means for the statements; nothing for a uniform choice."""
    if sampling == "uniform":
        return []
    if sampling != "samples":
        return [
            f"Training chose clients by a function ({sampling}). The statements assume that it knows nothing about "
            "unseen clients, and in the prior's rounds nothing about the clients of the bounds."
        ]
    note = (
        "Training drew clients in proportion to their numbers of samples. In every statement each client counts once, "
        "so a new client is not one drawn by its size."
    )
    if any(name.startswith(("query", "prior")) for name in names):
        note += " The prior's clients were chosen at random without regard to size, so its bounds hold as they are."
    if any(name.startswith("theorem-3.2-unequal") for name in names):
        note += (
            " Theorem 3.2 leaves out the client whose descriptor standardises the others. Here it was drawn by its "
            "size, so the clients that are left are not quite a random sample: large ones are a little rarer."
        )
    return [note]


def _plan(held: FromUnseen | TooFewUnseen, delta: float, width: float) -> list[dict[str, Any]]:
    """Return the least numbers of clients and samples for wanted bounds."""
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
    if isinstance(held, TooFewUnseen) or held.figures.correct is None:
        return rows
    mean = float(np.mean(held.figures.values))
    if 0 < mean < 1:
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
    found: dict[str, Any] = all_harmless(summary)
    return found
