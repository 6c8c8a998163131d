"""Result files, which are small JSON files about finished runs with their provenance; and tables of results."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pefll.core.errors import PefllError
from pefll.core.files import make_folder, read_json, write_json
from pefll.core.wording import counted
from pefll.experiments.table1 import PAPER
from pefll.methods import METHODS, hyperparameters, personal_settings
from pefll.models import MODELS
from pefll.report import mean_and_std, mean_std_text
from pefll.report.runs import StoredRun, number, read_run
from pefll.runs.config import MAY_CHANGE, Config
from pefll.runs.fingerprints import differing_part
from pefll.runs.record import GROUPS, RunFolder, figures_in, is_share, metric_word, own_seconds

Result = dict[str, Any]  # the content of a result file, or a run's summary
# Results that agree in these fields and in the options of their commands differ only by seed.
SAME = (
    *("dataset", "partition", "num_clients", "num_seen", "clients_per_round", "rounds"),
    *("method", "settings", "model", "precision", "prior_clients", "task"),
)
# Options of a command that other fields of a result say better: what "auto" and defaults mean, and the seed.
_SAID = {"method", "partition", "clients", "unseen", "model", "precision", "clients_per_round", "prior_clients", "seed"}
TOLD = (MAY_CHANGE - {"encode"}) | _SAID  # options that do not set results apart, or need not

_UNSAFE = re.compile(r"[^\w.-]+")  # what a file name must not have
_USUAL_MODELS = ("auto", "lenet", "cnn", "mlp", "lstm")  # those that --model auto chooses


def collect(
    folder: RunFolder, target: Path, measured: dict[str, Any] | None = None, evaluated: Result | None = None
) -> Path:
    """Write the summary and the validation curves of a finished run as one JSON file, and return its path.

    `file_name` says what its name has. A file of another run is never overwritten; the new file gets a longer name.

    Args:
        folder: of the run.
        target: the folder of results.
        measured: measurements of experiments, by name; those in an existing file of the same run are kept.
        evaluated: the run's summary with other personal hyper-parameters; None for the run as trained.
    """
    run = read_run(folder)
    summary = run.summary if evaluated is None else evaluated
    if summary is None:
        raise PefllError(f"{folder.path} is not finished; continue it with {folder.going_on}", code="PEFLL-X001")
    if summary.get("split", "test") != "test":
        raise PefllError(
            f"{folder.path} is a run of `pefll tune` and has no test accuracy; give a training run", code="PEFLL-X008"
        )
    config = Config.load(folder.config_file, folder.trained_with())
    history = [
        {"round": row["round"]} | {group: _rounded(row[group], run.metric) for group in GROUPS if row.get(group)}
        for row in run.history
    ]
    # Methods, models and data of experiments have names, so that they need no fingerprints. Clients may be people.
    content = {name: value for name, value in summary.items() if name != "client_names"}
    if not _has_own_code(config, summary):
        content.pop("fingerprints", None)
    if not summary["command"]:  # no command makes data again that was given in Python
        content["options"] = _options(config.command())
    make_folder(target)
    path = _place(target, file_name(config, summary), content)
    known = read_json(path).get("measured", {}) if path.exists() else {}
    measured = known | (measured or {})
    write_json(path, content | {"validation": history} | ({"measured": measured} if measured else {}))
    return path


def _rounded(figures: dict[str, Any], metric: str) -> float | None:
    value = number(figures.get(metric))
    if value is None:
        return None
    return round(value, 4) if metric == "per_sample" else float(f"{value:.6g}")


def _has_own_code(config: Config, summary: Result) -> bool:
    """Return whether a run may have code of the user's, which others of the same name may differ from."""
    texts = [config.task, config.lr_schedule, config.server_lr_schedule, config.sampling]
    texts += [str(value) for value in summary["settings"].values()]
    named = config.method in METHODS and config.model in ("auto", *MODELS)
    return not named or any(":" in text or "<" in text or "given in Python" in text for text in texts)


def file_name(config: Config, summary: Result) -> str:
    """Return the name of a run's result file, without its ending.

    It has the data, method, clients, settings and seed. It also has a Dirichlet partition, a model that is not chosen
    by default, and schedules, sampling and settings of the task that are not the default.
    """
    name = "-".join(str(summary[key]) for key in ("dataset", "method")) + f"-n{summary['num_clients']}"
    if summary["partition"].startswith("dirichlet"):  # not the usual partition of the data set
        name += "-" + re.sub(r"[^\w.]+", "_", summary["partition"])
    if summary["model"] not in _USUAL_MODELS:
        name += "-" + re.sub(r"[^\w.]+", "_", summary["model"])
    if summary.get("prior_clients"):
        name += f"-prior_{summary['prior_clients']}"
    # A method of one's own has a colon in its name, and settings may have other letters that file systems refuse.
    name = _UNSAFE.sub("_", f"{name}-{_changes(config, summary)}seed{summary['seed']}")
    # File systems take at most 255 bytes.
    return name if len(name) <= 200 else f"{name[:160]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _place(target: Path, name: str, result: Result) -> Path:
    """Return the path for a result: `name`, with a suffix if this name is taken by the result of another run."""
    endings = itertools.chain(["", f"-rounds{result['rounds']}"], (f"-{number}" for number in itertools.count(2)))
    paths = (target / f"{name}{ending}.json" for ending in endings)
    return next(path for path in paths if not path.exists() or _is_same_run(read_json(path), result))


def _is_same_run(one: Any, other: Result) -> bool:
    """Return whether two results are of the same run, as far as they tell; a file may hold anything else."""
    if not isinstance(one, dict) or "method" not in one or "seed" not in one:
        return False
    same = all(one.get(key) == other.get(key) for key in ("command", "seed", "evaluation"))
    return same and _experiment(one) == _experiment(other) and _is_alike(one, other)


def _experiment(result: Result) -> str:
    """Return a text that results have in common if they differ only by seed, by the data and by nameless code."""
    said = {key: result.get(key) for key in SAME} | {"settings": _settings(result)}
    # An earlier result of data given in Python does not tell its options, and is like no new one.
    known = bool(result.get("command")) or "options" in result
    options = {key: value for key, value in options_of(result).items() if key not in TOLD} if known else None
    return json.dumps([said, options], sort_keys=True, default=str)


def _is_alike(one: Result, other: Result) -> bool:
    """Return whether nothing shows that results of an experiment had other data, or other code of the same names.

    The seed decides the partition, so the data of other seeds has another fingerprint.
    """
    data = [result.get("data_sha256") for result in (one, other)]
    same_data = one.get("seed") != other.get("seed") or not all(data) or data[0] == data[1]
    return same_data and not differing_part(one.get("fingerprints"), other.get("fingerprints"))


def options_of(result: Result) -> dict[str, str]:
    """Return the options of the command of a result, by the names of the settings, without hyper-parameters."""
    command, options = result.get("command"), result.get("options")
    return _options(str(command)) if command else dict(options) if isinstance(options, dict) else {}


def _options(command: str) -> dict[str, str]:
    """Return the options of a `pefll train` command by the names of the settings, without hyper-parameters."""
    words = shlex.split(command)[2:]
    pairs = zip(words[::2], words[1::2], strict=False)
    return {name.removeprefix("--").replace("-", "_"): value for name, value in pairs if name != "--set"}


def _changes(config: Config, summary: Result) -> str:
    """Return hyper-parameters and settings of training that differ from the defaults, for a file name."""
    defaults = _defaults(config.method)
    # The summary may be of an evaluation with other settings than those of training.
    personal = _personal(config.method)
    settings = config.settings | {key: value for key, value in summary["settings"].items() if key in personal}
    changes = [f"{key}_{value}-" for key, value in settings.items() if value != defaults.get(key)]
    kind, *of_task = str(summary.get("task") or "classification").split()
    changes += [f"{word}-" for word in ([kind] if ":" in kind else []) + of_task]
    of_rounds = {"lr_schedule": "constant", "server_lr_schedule": "constant", "sampling": "uniform"}
    changes += [f"{key}_{value}-" for key, usual in of_rounds.items() if (value := getattr(config, key)) != usual]
    if config.precision not in ("auto", "tf32"):  # tf32 is the default of a GPU
        changes.append(f"{config.precision}-")
    return "".join(changes)


def _defaults(method: str) -> dict[str, Any]:
    """Return the default hyper-parameters of a method; empty for an unknown method."""
    try:
        return hyperparameters(method)
    except PefllError:
        return {}


def _personal(method: str) -> tuple[str, ...]:
    """Return the hyper-parameters that may differ from those of training; empty for an unknown method."""
    try:
        return personal_settings(method)
    except PefllError:
        return ()


def _settings(result: Result) -> dict[str, Any]:
    """Return all hyper-parameters of a result; those that it does not name have their defaults."""
    named: dict[str, Any] = result.get("settings", {})
    return _defaults(str(result.get("method", ""))) | named


def read_results(source: Path) -> list[Result]:
    """Return all results in a folder, sorted by file name."""
    found = [read_json(path) for path in sorted(source.glob("*.json"))]
    return [one for one in found if isinstance(one, dict) and {"method", "seed"} <= one.keys() and figures_in(one)]


def of_experiments(results: Sequence[Result]) -> list[list[Result]]:
    """Return results in groups that differ only by seed, in the order of their first result.

    Of results that do not even differ by seed, the first one counts.
    """
    alike: dict[str, list[list[Result]]] = {}
    groups: list[list[Result]] = []
    for result in results:
        known = alike.setdefault(_experiment(result), [])
        same = next((group for group in known if all(_is_alike(result, other) for other in group)), None)
        if same is None:
            known.append([result])
            groups.append(known[-1])
        elif result["seed"] not in [other["seed"] for other in same]:
            same.append(result)
    return groups


def no_results(source: Path) -> PefllError:
    """Return the error for a folder without results."""
    return PefllError(f"there are no results in {source}; add some with `pefll results add RUN`", code="PEFLL-X009")


def accuracies(results: Sequence[Result], group: str) -> list[float]:
    """Return the test accuracy at the best round in per cent, for each result that has this group of clients."""
    scores = [result["accuracy"]["best"][group] for result in results]
    return [100 * score["per_sample"] for score in scores if score]


def metric_of(result: Result) -> str:
    """Return the metric that chose the best round of a result: per_sample, or the first one of another task."""
    return StoredRun(RunFolder(Path()), {}, [], result).metric


def figures(results: Sequence[Result], group: str) -> list[float]:
    """Return the metric at the best round for each result that has one of a group of clients; shares in per cent."""
    found = []
    for result in results:
        metric = metric_of(result)
        value = number((figures_in(result)["best"].get(group) or {}).get(metric))
        if value is not None:
            found.append(100 * value if in_per_cent(result) else value)
    return found


def in_per_cent(result: Result) -> bool:
    """Return whether the metric of a result is a share."""
    metric = metric_of(result)
    return is_share(metric, metric, result.get("shares") or ())


def heading(result: Result, group: str) -> str:
    """Return the heading of a column with the metric of results: `"seen, %"` or `"seen, RMSE"`."""
    metric = metric_of(result)
    words = [] if metric == "per_sample" else [metric_word(metric)]
    return ", ".join([group, *words, *(["%"] if in_per_cent(result) else [])])


def by_metric(results: Sequence[Result]) -> list[list[Result]]:
    """Return results in groups with the same metric, accuracies first."""
    found: dict[str, list[Result]] = {"per_sample": []}
    for result in results:
        found.setdefault(metric_of(result), []).append(result)
    return [group for group in found.values() if group]


def markdown_table(results: Sequence[Result]) -> str:
    """Return Markdown tables, one for each metric: one row per setting, with the mean ± std over seeds.

    A table of accuracies has the paper's numbers, too.
    """
    repeated = len(results) - sum(map(len, of_experiments(results)))
    notes = [f"Left out, as the same settings, data and seed as another: {counted(repeated, 'result')}."] * bool(
        repeated
    )
    return "\n\n".join([*map(_table, by_metric(results)), *notes])


def _table(results: Sequence[Result]) -> str:
    has_paper = metric_of(results[0]) == "per_sample"
    columns = [text for group in GROUPS for text in (heading(results[0], group), *(["paper"] if has_paper else []))]
    headings = ["data, clients", "method", "seeds", *columns, "seconds", "command (and `--seed N`)"]
    lines = [" | ".join(headings), " | ".join(["---"] * len(headings))]
    rows = [(group, min(map(_command, group), key=len)) for group in of_experiments(results)]
    for group, command in sorted(rows, key=lambda row: (row[0][0]["dataset"], row[0][0]["num_clients"], len(row[1]))):
        one = group[0]
        paper = PAPER.get((one["dataset"], one["num_clients"]), {}).get(one["method"])
        cells = [f"{one['dataset']}, {one['num_clients']}", one["method"], str(len(group))]
        for place, who in enumerate(GROUPS):
            cells.append(mean_std_text(figures(group, who), in_per_cent(one)))
            if has_paper:
                cells.append(f"{paper[2 * place]:.1f} ± {paper[2 * place + 1]:.1f}" if paper else "")
        # The time counts only runs that did not share the device with others.
        own = [_seconds(one) for one in group if own_seconds(one)]
        time = f"{mean_and_std(own)[0]:.0f}" if own else ""
        lines.append(" | ".join([*cells, time, "`" + command.replace("|", "\\|") + "`"]))
    return "\n".join(f"| {line} |" for line in lines)


def _seconds(result: Result) -> float:
    """Return the training time. A method without rounds (Local) trains clients during the test."""
    parts = ("test_seconds",) if result.get("rounds") == 0 else ("train_seconds", "eval_seconds")
    return math.fsum(result[part] for part in parts)


def _command(result: Result) -> str:
    """Return the command of a result, without the seed and without default settings."""
    command = (str(result["command"]) or _call(result)).replace(f" --seed {result['seed']}", "")
    for name, value in _defaults(result["method"]).items():
        command = command.replace(f" --set {name}={value} ", " ")
    command = command.replace(" --precision tf32", "")  # the default of a GPU
    return f"{command}; {result['evaluation']}" if "evaluation" in result else command


def _call(result: Result) -> str:
    """Return what tells a run on data given in Python from others: its settings that are not the default."""
    defaults = _defaults(result["method"])
    told = {key: value for key, value in options_of(result).items() if key not in ("data", "method", "seed")}
    told |= {key: value for key, value in result["settings"].items() if value != defaults.get(key)}
    return f"in Python: {', '.join([result['method'], *(f'{key}={value}' for key, value in told.items())])}"
