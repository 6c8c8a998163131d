"""Runs as tables for a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pefll.report.folding import Folded
from pefll.report.groups import SeedGroup, group_runs, labels_of, note_of_undefined
from pefll.report.runs import MISSING, StoredRun, in_per_cent, mean_std_text, number
from pefll.runs.record import GROUPS, TOOK_TURNS, metric_word, own_seconds


def _columns(run: StoredRun) -> tuple[tuple[str, str], ...]:
    """Return the moment and the measure of each column of metrics."""
    metric = run.metric
    other = "masked" if metric == "per_sample" else "per_client"
    return ("best", metric), ("final", metric), ("best", other), ("best", "worst_tenth")


def _undefined(runs: Sequence[StoredRun]) -> str:
    """Return a note about metrics in a table of runs that have no value; "" if there are none."""
    return note_of_undefined(runs, [measure for run in runs for _, measure in _columns(run)])


def metric_words(runs: Sequence[StoredRun]) -> str:
    """Return the name and the unit of the metric that chooses the best round of runs, such as `"accuracy in %"`."""
    if not runs:
        return "accuracy in %"
    name = metric_word(runs[0].metric)
    return f"{name} in %" if in_per_cent(runs) else name


def runs_table(runs: Sequence[StoredRun]) -> Table:
    """Return a table of test accuracies, one row per run; unfinished runs show their latest validation accuracy.

    A run's name is its method, and what sets it apart: settings, its seed, and else its folder.

    Accuracies are per sample, in per cent, as `seen / unseen`. Masked and worst tenth are at the best round. The runs
    of another task have its metric instead; all runs must have the same one.
    """
    other = "masked" if not runs or runs[0].metric == "per_sample" else "per\nclient"
    table = new_table(f"Test {metric_words(runs)}, seen / unseen clients")
    names = labels_of(runs)
    _add_name_column(table, "run", names)
    for heading in ("best\nround", "at best\nround", "at final\nround", other, "worst\ntenth"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run, name in zip(runs, names, strict=True):
        _add_row(table, Folded(name), *(_finished(run, runs) if run.finished else _unfinished(run, runs)))
    table.caption = (
        "masked: a client never predicts a class that is not in its training labels;\n"
        "worst tenth: the mean over the tenth of the clients with the lowest accuracy"
        if other == "masked"
        else f"per client: the mean over clients of {escape(runs[0].metric)};\n"
        "worst tenth: over the worst tenth of them"
    )
    if not all(run.finished for run in runs):
        latest = "validation accuracy" if other == "masked" else "validation metric"
        table.caption += f"\n* not finished: {latest} at the latest evaluation"
    if undefined := _undefined(runs):
        table.caption += f"\n{escape(undefined)}"
    table.caption_justify = "left"
    return table


def columns_table(run: StoredRun) -> Table | None:
    """Return a table of what was done to each column of a run's data; None if the data was no table."""
    rows = run.folder.columns()
    if not rows:
        return None
    table = new_table(f"Columns of {run.name}")
    for heading in ("column", "kind"):
        table.add_column(heading, overflow="fold")
    table.add_column("inputs", justify="right")
    table.add_column("missing", justify="right")
    table.add_column("what is done", overflow="fold")
    for row in rows:
        missing = number(row.get("missing"))
        share = MISSING if missing is None else f"{100 * missing:.1f}%"
        texts = [str(row.get(key, MISSING)) for key in ("column", "kind", "inputs", "done")]
        _add_row(table, texts[0], texts[1], texts[2], share, texts[3])
    return table


def costs_table(runs: Sequence[StoredRun]) -> Table:
    """Return a table of the cost of each run, and of its data; data that all runs have are in the title."""
    data, names = [_data(run) for run in runs], labels_of(runs)
    alike = len(set(data)) == 1
    table = new_table(f"Cost, on {', '.join(data[0].splitlines())}" if alike else "Data and cost")
    _add_name_column(table, "run", names)
    if not alike:
        table.add_column("data", overflow="fold")
    for heading in ("seen +\nunseen", "rounds", "seed", "train\ntime", "client\nsteps/s", "MB\ndown", "MB\nup"):
        table.add_column(heading, justify="right", no_wrap=True)
    notes = (
        (_shared, "* trained together with other runs, which slowed it down"),
        (_in_turns, "‡ took turns with other runs: the time includes only its own turns"),
        (_untrained, "† no rounds: clients train during the test; this is the time of the test"),
    )
    table.caption = "\n".join(note for mark, note in notes if any(mark(run) for run in runs)) or None
    table.caption_justify = "left"
    for run, name, its_data in zip(runs, names, data, strict=True):
        latest = run.history[-1] if run.history else {}
        sent = [number((run.value if run.finished else latest.get)(key)) for key in ("bytes_down", "bytes_up")]
        _add_row(
            table,
            Folded(name),
            *(() if alike else (its_data,)),
            _clients(run),
            _whole(run.value("rounds")) if run.finished else _progress(run),
            run.text("seed"),
            _time(run) + _shared(run) + _in_turns(run) + _untrained(run),
            _short(run.value("client_steps_per_second")),
            *(_short(None if bytes_ is None else bytes_ / 1e6) for bytes_ in sent),
        )
    return table


def _time(run: StoredRun) -> str:
    """Return the training time, or the training time so far."""
    if not run.finished:
        return duration(run.history[-1].get("seconds") if run.history else None)
    return duration(run.value("test_seconds" if _untrained(run) else "train_seconds"))


def _untrained(run: StoredRun) -> str:
    """Return the mark of a run without rounds. With the method Local, clients train only during the test."""
    return "†" if run.finished and number(run.value("rounds")) == 0 else ""


def _shared(run: StoredRun) -> str:
    """Return the mark of a run that shared its device with other runs."""
    summary = run.summary or {}
    if "timing" in summary:
        return "" if own_seconds(summary) else "*"
    return "*" if (number(run.value("lockstep")) or 1) > 1 else ""


def _in_turns(run: StoredRun) -> str:
    """Return the mark of a run that took turns with others; its time includes only its own turns."""
    return "‡" if str(run.value("timing")).startswith(TOOK_TURNS) else ""


def grouped_table(runs: Sequence[StoredRun]) -> Table | None:
    """Return a table of means ± standard deviations over seeds; None if no two finished runs differ only by seed."""
    groups = group_runs([run for run in runs if run.finished])
    if all(len(group.runs) < 2 for group in groups):
        return None
    first = groups[0].runs[0]
    other = "masked" if first.metric == "per_sample" else "per\nclient"
    data = {", ".join(_data(group.runs[0]).splitlines()) for group in groups}
    what = f"Test {metric_words([group.runs[0] for group in groups])}"
    where = f", on {data.pop()}" if len(data) == 1 else ""
    table = new_table(f"{what}, mean ± standard deviation over n seeds{where}")
    _add_name_column(table, "runs", [group.label for group in groups])
    for heading in ("n", "", "at best\nround", "at final\nround", other, "worst\ntenth"):
        table.add_column(heading, justify="right", no_wrap=True)
    every = [run for group in groups for run in group.runs]
    notes = []
    for group in groups:
        unseen = any(run.accuracy("best", "unseen", run.metric) is not None for run in group.runs)
        shown = GROUPS if unseen else GROUPS[:1]
        columns = _columns(group.runs[0])
        cells = [
            [_over_seeds(group, moment, who, measure, in_per_cent(every)) for who in shown]
            for moment, measure in columns
        ]
        if any("(" in line for cell in cells for line in cell):
            notes = ["(k): only k of the n seeds have a value"]
        lines = ["\n".join(cell) for cell in (list(shown), *cells)]
        _add_row(table, Folded(group.label), str(len(group.runs)), *lines)
    if undefined := _undefined(every):
        notes.append(escape(undefined))
    table.caption = "\n".join(notes) or None
    table.caption_justify = "left"
    return table


def duration(seconds: Any) -> str:
    """Return a time in at most two units, for example `"1 h 02 m"`; an em dash for None."""
    value = number(seconds)
    if value is None:
        return MISSING
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60:02d} m"


def percent(accuracy: float | None) -> str:
    """Return an accuracy in 0..1 in per cent, with one digit; an em dash for None."""
    return MISSING if accuracy is None else f"{100 * accuracy:.1f}"


def metric_text(value: float | None, per_cent: bool) -> str:
    """Return a metric as text, in per cent or with four digits; an em dash for None."""
    return percent(value) if per_cent or value is None else f"{value:.4g}"


def new_table(title: str) -> Table:
    """Return an empty table in this package's style."""
    return Table(
        title=escape(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def _add_name_column(table: Table, heading: str, names: Sequence[str]) -> None:
    """Add a column of names, which are folded at spaces."""
    table.add_column(heading, min_width=max(map(Folded.least, names), default=0))


def _add_row(table: Table, *cells: str | Folded) -> None:
    """Add a row without markup: a run's name may contain square brackets."""
    table.add_row(*(cell if isinstance(cell, Folded) else Text(cell) for cell in cells))


def _pair(seen: float | None, unseen: float | None, per_cent: bool) -> str:
    if seen is None and unseen is None:
        return MISSING
    # Padding aligns the slashes of a column.
    return f"{metric_text(seen, per_cent)} / {metric_text(unseen, per_cent):>4}"


def _finished(run: StoredRun, runs: Sequence[StoredRun]) -> list[str]:
    share = in_per_cent(runs)
    found = [[run.accuracy(moment, who, measure) for who in GROUPS] for moment, measure in _columns(run)]
    pairs = [_pair(seen, unseen, share) for seen, unseen in found]
    return [_whole(run.best_round), *pairs]


def _unfinished(run: StoredRun, runs: Sequence[StoredRun]) -> list[str]:
    if not run.history:
        return [MISSING] * 5
    measures = [measure for moment, measure in _columns(run) if moment == "best"]
    found = [[number(run.validation(who, measure)[-1]) for who in GROUPS] for measure in measures]
    latest = [_pair(seen, unseen, in_per_cent(runs)) for seen, unseen in found]
    return [MISSING, MISSING, *(cell if cell == MISSING else f"{cell}*" for cell in latest)]


def _over_seeds(group: SeedGroup, moment: str, who: str, measure: str, share: bool) -> str:
    found = [run.accuracy(moment, who, measure) for run in group.runs]
    values = [100 * value if share else value for value in found if value is not None]
    fewer_than_n = f" ({len(values)})" if 0 < len(values) < len(group.runs) else ""
    return mean_std_text(values, share) + fewer_than_n


def _data(run: StoredRun) -> str:
    partition = run.value("partition")
    return run.text("dataset") if partition is None else f"{run.text('dataset')}\n{partition}"


def _clients(run: StoredRun) -> str:
    seen, unseen = number(run.value("num_seen")), number(run.value("num_unseen"))
    if seen is None or unseen is None:
        return _whole(run.value("num_clients"))
    return f"{seen:.0f}+{unseen:.0f}"


def _progress(run: StoredRun) -> str:
    done = str(run.history[-1]["round"]) if run.history else "0"
    planned = number(run.value("rounds"))
    return f"{done} of\n{planned:.0f}" if planned is not None else done


def _whole(value: Any) -> str:
    found = number(value)
    return MISSING if found is None else f"{found:.0f}"


def _short(value: float | None) -> str:
    found = number(value)
    if found is None:
        return MISSING
    return f"{found:,.0f}" if found >= 100 or found == 0 else f"{found:.3g}"
