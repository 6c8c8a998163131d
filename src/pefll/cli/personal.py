"""`pefll evaluate`, `personalize` and `predict`: scores, makes and uses personal models."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from pefll import data as sources
from pefll.cli.console import INTERRUPTED, SomeClientsFailed, err, noting, out
from pefll.cli.options import (
    Force,
    OwnMethod,
    OwnModel,
    OwnTask,
    PersonalSettings,
    RunPath,
    TrainedLabel,
    check_free,
    column_names,
    own_code,
    parse_settings,
)
from pefll.cli.predicting import class_cells, predict_folder
from pefll.cli.samples import label_in_training, samples_of_client
from pefll.cli.tables import accuracy_table
from pefll.core import files
from pefll.core.errors import PefllError
from pefll.core.files import check_folder
from pefll.core.progress import say
from pefll.core.wording import counted, reasons, without_samples
from pefll.data.federation import Federation
from pefll.data.frames import why_no_labels
from pefll.data.missing_labels import has_label, labelled, without_gaps
from pefll.data.owners import Name
from pefll.data.table_files import read_frame
from pefll.runs import federations
from pefll.runs.model_folder import INDEX
from pefll.runs.new_client import labelled_clients, unlabelled_words
from pefll.runs.personal import PersonalModel
from pefll.runs.record import figure_text
from pefll.tasks.sums import shares_of
from pefll.training import personalizing, run


def evaluate(
    path: RunPath,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    mask_labels: Annotated[
        bool, typer.Option("--mask-labels", help="Rule out classes that a client's training labels lack.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Other data, with the columns of the training data; all its clients count as unseen."),
    ] = None,
    label: TrainedLabel = None,
    client_column: Annotated[
        str | None,
        typer.Option(help="Name of the client column in --data.", show_default="the run's", callback=column_names),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The folder of data sets, if it has moved.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    per_client: Annotated[
        Path | None,
        typer.Option(
            help="Also write a CSV with a row per client: samples, correct samples, correct samples with missing "
            "classes ruled out (masked), summed loss, and accuracy (masked with --mask-labels); for other tasks, "
            "samples and the task's metrics.",
            metavar="FILE.csv",
        ),
    ] = None,
    settings: PersonalSettings = None,
    force: Force = False,
    model: OwnModel = None,
    method: OwnMethod = None,
    task: OwnTask = None,
) -> None:
    """Score the personal models of all clients of a run, at its best round.

    For example:

    - `pefll evaluate runs/c10 --split test --mask-labels`

    - `pefll evaluate runs/c10 --per-client clients.csv`

    - `pefll evaluate runs/c10 --set refine_steps=10 --set refine_lr=5e-4`

    - `pefll evaluate runs/users --data next_year.csv`
    """
    if data is None and (label or client_column):
        raise PefllError(
            f"{'--label' if label else '--client-column'} is about the columns of --data; add --data, or leave it out",
            code="PEFLL-C640",
        )
    check_free(per_client, "--per-client", force)
    changes = parse_settings(settings or [])
    trained = run.load(path, err, model, method, task=task).with_settings(**changes)
    if mask_labels and not trained.model_spec.classes:
        raise PefllError(
            "--mask-labels rules out classes, but the labels of this run are not classes; leave it out",
            code="PEFLL-C500",
        )
    config = dataclasses.replace(trained.config, device=device)
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=str(data_dir))
    if data is None:
        federation = federations.federation_of(config, err)
    else:
        federation = _other_data(trained, data, label or label_in_training(data, trained.columns.label), client_column)
    result, clients = dataclasses.replace(trained, config=config).scores(split, federation, err)
    if per_client is not None:
        files.write_csv(per_client, (_client_row(one, mask_labels) for one in clients))
    empty = sum(not one.samples for one in clients)
    if empty == len(clients):
        raise PefllError(
            f"no client has a {split} sample, so nothing can be scored; choose another --split, or give clients more "
            "samples",
            code="PEFLL-C641",
        )
    if empty:
        say(err, without_samples(empty, len(clients), split))
    groups = result.rows()
    if as_json:
        changed = {"settings": {name: getattr(trained.method, name) for name in changes}} if changes else {}
        source = {} if data is None else {"data": str(data)}
        typer.echo(json.dumps({"run": str(path), **source, "split": split, **changed, **groups}, indent=2))
        return
    what = "accuracy" if trained.model_spec.classes else "metrics"
    shares = shares_of(trained.method.problem.task)
    out.print(accuracy_table(groups, f"{split.capitalize()} {what}", ("masked",) if mask_labels else (), shares))


def _other_data(trained: run.Run, data: Path, label: str, client_column: str | None) -> Federation:
    """Return the federation of other data than the run's, with notes on what was left out."""
    with noting():
        federation = trained.federation_from(data, label=label, client=client_column)
    say(err, f"{data}: {counted(federation.num_clients, 'client')}, all of which count as unseen")
    return federation


def personalize(
    path: RunPath,
    data: Annotated[
        Path,
        typer.Option(
            help="The client's samples: .npz with x and y, .csv, .parquet, or a folder `class/*.png`. With --each, the "
            "samples of several clients; as a folder, `client/class/*.png`."
        ),
    ],
    target: Annotated[Path, typer.Option("--out", help="The file to write, a .safetensors; with --each, a folder.")],
    each: Annotated[
        bool,
        typer.Option("--each", help="Make one model for each client in the data; keep models that exist already."),
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update", help="With --each: replace models of earlier samples or of another run, and keep the others."
        ),
    ] = False,
    label: TrainedLabel = None,
    client_column: Annotated[
        str | None,
        typer.Option(
            help="Name of the client column in a table or .npz.", show_default="the run's", callback=column_names
        ),
    ] = None,
    settings: PersonalSettings = None,
    force: Force = False,
    architecture: OwnModel = None,
    method: OwnMethod = None,
    task: OwnTask = None,
) -> None:
    """Make a model for a new client. With PeFLL this takes one forward pass and no training.

    For example:

    - `pefll personalize runs/c10 --data my_samples.npz --out me.safetensors`

    - `pefll personalize runs/c10 --data all_users.parquet --each --out models`

    - `pefll personalize runs/c10 --data all_users_today.parquet --each --update --out models`

    The exit code is 3 if some clients got no model and the others have theirs.
    """
    if update and not each:
        raise PefllError(
            "--update is about the models of several clients; add --each, or replace one model with --force",
            code="PEFLL-C642",
        )
    if each:
        check_folder(target)
    elif target.suffix not in ("", ".safetensors"):
        raise PefllError(
            f"personal models are .safetensors files; write to {target.with_suffix('.safetensors')}", code="PEFLL-M052"
        )
    else:
        check_free(target, "--out", force)
    changes = parse_settings(settings or [])
    trained = run.load(path, err, architecture, method, task=task).with_settings(**changes)
    label = label or label_in_training(data, trained.columns.label)
    if each:
        _personalize_each(trained, data, target, label, client_column, force, update)
        return
    instead = "make one model for each with --each --out FOLDER"
    client, named = client_column or trained.columns.client, bool(client_column)
    names = list[Name]()  # of the client, if the data has it
    x, y = samples_of_client(
        data,
        label,
        trained.model_spec,
        client=client,
        client_named=named,
        alone=True,
        instead=instead,
        of_client=lambda _, name: names.append(name),
    )
    _check_labels(y is not None, trained, data, label)
    x, y, left_out = labelled(x, y, trained.method.uses_labels)
    if left_out:
        say(err, f"note: {unlabelled_words(left_out, left_out + len(x))}")
    with noting():
        personal = trained.personalize(x, y)
        said = "" if y is None else _on_its_samples(personal, x, y)
    for name in names:
        personal = personal.of_client(name)
    files.make_folder(target.parent)
    personal.save(target, overwrite=force)
    whose = f" of client {personal.spec.client!r}" if names else ""
    say(out, f"{target}: a personal {trained.model_spec.model}{whose} from {counted(len(x), 'sample')}")
    if said:
        say(out, said)
    if personal.spec.certificate:
        say(out, f"By its run: {personal.spec.certificate}.")
    own = own_code(model=trained.model_spec.model, task=(trained.model_spec.task or "").partition(" ")[0])
    say(out, f"Next: pefll predict {target} --data {_more_like(data)}{own}")


def _on_its_samples(personal: PersonalModel, x: Any, y: Any) -> str:
    """Return how well a model fits the labelled samples that it was made from, with a warning if it is only a guess."""
    if not personal.spec.classes:
        return f"On the samples it was made from: {_metrics_text(personal.metrics(x, y), personal.task)}."
    right, guess = float((personal.predict(x) == y).mean()), float(np.bincount(y).max() / len(y))
    found = f"It is right on {100 * right:.1f}% of the samples it was made from."
    if right > guess or guess == 1:
        return found
    return (
        f"{found} This is no better than a guess: always answering the most frequent class is right on "
        f"{100 * guess:.1f}%. Check that the samples are on the scale of the training data. If they are, the run has "
        "not learned to serve clients like this one: more clients, more rounds or other learning rates may help; "
        "compare with --method local."
    )


def _personalize_each(
    trained: run.Run, data: Path, folder: Path, label: str, client_column: str | None, force: bool, update: bool
) -> None:
    """Write one model for each client in a file or folder; an error at the end if some clients got none."""
    columns = trained.columns._replace(label=label, client=client_column or trained.columns.client)
    with noting():
        owned = sources.read_each(data, columns, tokens=trained.model_spec.tokens)
    _check_labels(owned[0].y is not None, trained, data, label)
    owned, note = labelled_clients(owned, trained.method.uses_labels)
    if note:
        say(err, f"note: {note}")
    try:
        with noting():
            written = personalizing.write_each(trained, owned, folder, force=force, update=update, console=err)
    except KeyboardInterrupt:
        say(err, f"Stopped: the models in {folder} are kept, and the same command continues from there.")
        sys.exit(INTERRUPTED)
    if written.kept:
        say(out, f"{folder}: {counted(len(written.kept), 'model')} of this run and data existed already")
    if written.made:
        index = folder / INDEX
        say(out, f"{folder}: {counted(len(written.made), 'personal model')}; {index} names the client of each file")
        own = own_code(model=trained.model_spec.model, task=(trained.model_spec.task or "").partition(" ")[0])
        say(out, f"Next: pefll predict {folder} --data {_more_like(data)} --out predictions.csv{own}")
    if written.errors:
        kind = SomeClientsFailed if written.made or written.kept else PefllError
        raise kind(
            f"{len(written.errors):,} of {counted(len(owned), 'client')} got no model; {_what_to_do(written.errors)}"
            f"{reasons(written.errors)}",
            code="PEFLL-M041",
        )


def _what_to_do(errors: dict[Name, PefllError]) -> str:
    """Return what a user does for clients that got no model: some may have an older one."""
    old = sum(error.code == personalizing.OLDER for error in errors.values())
    correct = "correct the data and give the command again"
    if not old:
        return correct
    has = "has" if old == 1 else "have"
    return f"{old:,} {has} an older one, which --update replaces" + (f"; else {correct}" if old < len(errors) else "")


def _more_like(data: Path) -> str:
    """Return a name for more data of the same kind."""
    return "more_samples" if data.is_dir() else f"more_samples{data.suffix}"


def _check_labels(has_labels: bool, trained: run.Run, data: Path, label: str) -> None:
    """Raise PefllError if a table lacks the labels that a run needs."""
    if not has_labels and trained.method.uses_labels and data.suffix.lower() in sources.TABLES:
        raise PefllError(
            f"{data} {why_no_labels(read_frame(data.expanduser()), label)}, but this run needs labels; fill them in, "
            "or name the column of labels with --label",
            code="PEFLL-M053",
        )


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            help="A file made by `pefll personalize`, or a folder made by `pefll personalize --each`.", metavar="MODEL"
        ),
    ],
    data: Annotated[Path, typer.Option(help="Samples: .npz with x (and y), .csv, .parquet, or a folder class/*.png.")],
    target: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Write the predictions as a CSV: for classes with probabilities, else numbers or sets."
        ),
    ] = None,
    label: TrainedLabel = None,
    client_column: Annotated[
        str | None,
        typer.Option(
            help="Name of the client column in a table or .npz.", show_default="the run's", callback=column_names
        ),
    ] = None,
    architecture: Annotated[
        str | None, typer.Option("--model", help="your.module:function, if the model is your own code.")
    ] = None,
    any_client: Annotated[
        bool, typer.Option("--any-client", help="Use a model file for the rows of another client, too.")
    ] = False,
    each_class: Annotated[
        bool | None,
        typer.Option(
            "--each-class/--no-each-class",
            help="Whether --out has a column with the probability of each class. [default: for up to 20 classes]",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
    task: Annotated[str | None, typer.Option(help="your.module:Class, if the run's task is your own code.")] = None,
) -> None:
    """Predict with a personal model; with labels in the file, also print the accuracy or the task's metrics.

    With a folder of models, the rows of each client are predicted by the client's own model.

    For example:

    - `pefll predict me.safetensors --data more_samples.npz --out answers.csv`

    - `pefll predict models --data rows_of_all_users.parquet --out answers.csv`

    The exit code is 3 if some clients have no predictions and the others have theirs.
    """
    check_free(target, "--out", force)
    if model.is_dir():
        if any_client:
            raise PefllError(
                "--any-client is about one model, but a folder has a model for each client; leave it out, or name a "
                "file in the folder",
                code="PEFLL-C643",
            )
        predict_folder(model, data, target, client_column, label, architecture, task, each_class)
        return
    with noting():
        personal = PersonalModel.load(model, architecture=architecture, task=task)
    label = label or label_in_training(data, personal.spec.label_column)
    instead = "predict with the models of all: pefll predict FOLDER, as `pefll personalize --each` made it"
    column = {"client": client_column, "client_named": True} if client_column else {}
    anyway = "" if any_client else "use this model anyway with --any-client"
    x, y = samples_of_client(data, label, personal.spec, anyway, alone=True, instead=instead, **column)
    if not personal.spec.classes:
        _predict_others(personal, x, y, target)
        return
    there = np.ones(len(x), dtype=bool) if y is None else has_label(y)
    y = None if y is None else without_gaps(y[there])
    if y is not None and len(y) and not 0 <= int(y.min()) <= int(y.max()) < personal.spec.classes:
        raise PefllError(
            f"{data}: labels are {y.min()} to {y.max()}; the model knows 0..{personal.spec.classes - 1}",
            code="PEFLL-C013",
        )
    with noting():
        classes, chances = personal.predict_with_probabilities(x)
    names = personal.class_names
    if target is not None:
        answers = class_cells(classes, chances, names, each_class)
        files.write_csv(target, ({"sample": row} | cells for row, cells in enumerate(answers)))
        say(out, f"wrote {target}")
    else:
        for row, c in enumerate(classes[:20]):
            say(out, f"sample {row}: {names[c]}" + ("" if chances is None else f" ({100 * chances[row, c]:.0f}%)"))
        if len(classes) > 20:
            say(out, f"... and {len(classes) - 20} more; --out predictions.csv writes all")
    if y is not None:
        right = 100 * float((classes[there] == y).mean())
        of = "" if there.all() else " with a label"
        say(out, f"{right:.1f}% of {counted(len(y), 'sample')}{of} {'is' if len(y) == 1 else 'are'} right")
    elif data.suffix.lower() in sources.TABLES:
        why = why_no_labels(read_frame(data.expanduser()), label)
        say(out, f"The accuracy is unknown: {data.name} {why}; --label names another.")


def _predict_others(personal: PersonalModel, x: Any, y: Any, target: Path | None) -> None:
    """Print or write the predictions of a model for numbers or sets, and its metrics if there are labels."""
    there = np.zeros(len(x), dtype=bool) if y is None else has_label(y)
    with noting():
        found = np.asarray(personal.predict(x))
        metrics = personal.metrics(x[there], without_gaps(y[there])) if there.any() else {}
    found = found.reshape(len(found), -1)
    names = (
        personal.class_names if len(personal.class_names) == found.shape[1] else tuple(map(str, range(found.shape[1])))
    )
    names = ("predicted",) if found.shape[1] == 1 else names
    cells = found.astype(int) if found.dtype == bool else found
    if target is not None:
        rows = (dict(zip(names, row.tolist(), strict=True)) for row in cells)
        files.write_csv(target, ({"sample": number} | row for number, row in enumerate(rows)))
        say(out, f"wrote {target}")
    else:
        for number, row in enumerate(found[:20]):
            say(out, f"sample {number}: {_prediction_text(row, names)}")
        if len(found) > 20:
            say(out, f"... and {len(found) - 20} more; --out predictions.csv writes all")
    if metrics:
        say(out, f"{counted(int(there.sum()), 'sample')} with labels: {_metrics_text(metrics, personal.task)}")


def _prediction_text(row: Any, names: tuple[str, ...]) -> str:
    if row.dtype == bool:
        return ", ".join(name for name, there in zip(names, row, strict=True) if there) or "none"
    if len(row) == 1:
        return f"{row[0]:.6g}"
    return ", ".join(f"{name} {value:.6g}" for name, value in zip(names, row, strict=True))


def _metrics_text(metrics: dict[str, float], task: Any) -> str:
    return ", ".join(f"{name} {figure_text(metrics, name, shares_of(task))}" for name in metrics)


def _client_row(one: run.ClientScore | run.ClientMetrics, mask_labels: bool) -> dict[str, Any]:
    """Return a client's row in the file that --per-client names."""
    if isinstance(one, run.ClientMetrics):
        figures = {name: "" if np.isnan(value) else f"{value:.6g}" for name, value in one.metrics.items()}
        return {"client": one.client, "name": one.name, "seen": int(one.seen), "samples": one.samples} | figures
    right = one.masked if mask_labels else one.correct
    accuracy = f"{right / one.samples:.6f}" if one.samples else ""
    return one._asdict() | {"seen": int(one.seen), "accuracy": accuracy}
