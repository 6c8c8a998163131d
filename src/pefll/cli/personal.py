"""`pefll evaluate`, `personalize` and `predict`: the models that clients get."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from pefll import data as sources
from pefll import files, preparing, run
from pefll.cli.console import err, out
from pefll.cli.options import Force, Label, OwnMethod, OwnModel, RunPath, check_free
from pefll.cli.tables import accuracy_table
from pefll.errors import PefllError
from pefll.personal import PersonalModel
from pefll.progress import say
from pefll.record import MEASURES
from pefll.wording import counted, without_samples


def evaluate(
    path: RunPath,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    mask_labels: Annotated[
        bool, typer.Option("--mask-labels", help="Rule out classes that a client's training labels do not have.")
    ] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data lies now, if it moved.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    per_client: Annotated[
        Path | None,
        typer.Option(
            help="Also write a CSV with a row for each client: its samples, how many are right, how many are with "
            "classes that it lacks ruled out (masked), the sum of losses, the accuracy (masked with --mask-labels).",
            metavar="FILE.csv",
        ),
    ] = None,
    force: Force = False,
    model: OwnModel = None,
    method: OwnMethod = None,
) -> None:
    """Score the personal models of all clients of a run, seen and unseen, at its best round.

    For example:

    - `pefll evaluate runs/c10 --split test --mask-labels`

    - `pefll evaluate runs/c10 --per-client clients.csv`
    """
    check_free(per_client, "--per-client", force)
    trained = run.load(path, err, model, method)
    config = dataclasses.replace(trained.config, device=device)
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=str(data_dir))
    federation = preparing.federation_of(config, err)
    clients = dataclasses.replace(trained, config=config).evaluate_clients(split, federation, err)
    if per_client is not None:
        files.write_csv(per_client, (_client_row(one, mask_labels) for one in clients))
    empty = sum(not one.samples for one in clients)
    if empty:
        say(err, without_samples(empty, len(clients), split))
    result = run.evaluation_of_clients(clients)
    groups = {name: value._asdict() if value else None for name, value in result._asdict().items()}
    if as_json:
        typer.echo(json.dumps({"run": str(path), "split": split, **groups}, indent=2))
        return
    out.print(accuracy_table(groups, f"{split} accuracy", ("masked",) if mask_labels else MEASURES))


def personalize(
    path: RunPath,
    data: Annotated[
        Path, typer.Option(help="The client's samples: .npz with x and y, .csv, .parquet, or a folder class/*.png.")
    ],
    model: Annotated[Path, typer.Option("--out", help="The file to write, a .safetensors.")],
    label: Label = sources.LABEL,
    force: Force = False,
    architecture: OwnModel = None,
    method: OwnMethod = None,
) -> None:
    """Make a model for a client that was never seen. With PeFLL that is one forward pass: no training.

    For example: `pefll personalize runs/c10 --data my_samples.npz --out me.safetensors`
    """
    if model.suffix not in ("", ".safetensors"):
        raise PefllError(f"personal models are .safetensors files; write to {model.with_suffix('.safetensors')}")
    check_free(model, "--out", force)
    trained = run.load(path, err, architecture, method)
    x, y = _read_client(data, label, trained.facts, alone=True)
    if y is None and trained.method.uses_labels and data.suffix.lower() in sources.TABLES:
        raise PefllError(f"{data} has no column {label!r}; say with --label which one has the labels")
    personal = trained.personalize(x, y)
    files.make_folder(model.parent)
    personal.save(model, overwrite=force)
    say(out, f"{model}: a personal {trained.facts['model']} from {counted(len(x), 'sample')}")
    if y is not None:
        right, guess = float((personal.predict(x) == y).mean()), float(np.bincount(y).max() / len(y))
        say(out, f"It is right on {100 * right:.1f}% of the samples it was made from.")
        if right < guess:
            say(
                out,
                f"Always naming this client's most frequent class would be right on {100 * guess:.1f}%: the run has "
                "not learned to serve clients like this one. More clients, rounds, or other learning rates may help; "
                "compare with --method local.",
            )
    name = trained.facts["model"]
    of_own = f" --model {name}" if ":" in name else ""
    say(out, f"Next: pefll predict {model} --data more_samples.npz{of_own}")


def predict(
    model: Annotated[Path, typer.Argument(help="A file made by `pefll personalize`.", metavar="MODEL")],
    data: Annotated[Path, typer.Option(help="Samples: .npz with x (and y), .csv, .parquet, or a folder class/*.png.")],
    target: Annotated[
        Path | None, typer.Option("--out", help="Write a CSV with sample, class and probability.")
    ] = None,
    label: Label = sources.LABEL,
    architecture: Annotated[
        str | None, typer.Option("--model", help="your.module:function, for a model that is not the package's own.")
    ] = None,
    force: Force = False,
) -> None:
    """Classify samples with a personal model; says how many are right where the file has labels.

    For example: `pefll predict me.safetensors --data more_samples.npz --out answers.csv`
    """
    check_free(target, "--out", force)
    personal = PersonalModel.load(model, architecture=architecture)
    x, y = _read_client(data, label, personal.facts)
    if y is not None and len(y) and not 0 <= int(y.min()) <= int(y.max()) < personal.facts["classes"]:
        raise PefllError(
            f"{data}: labels are {y.min()} to {y.max()}; the model knows 0..{personal.facts['classes'] - 1}"
        )
    chances = personal.probabilities(x)
    classes = chances.argmax(axis=1)
    names = personal.facts["class_names"] or [str(number) for number in range(personal.facts["classes"])]
    if target is not None:
        answers = enumerate(classes)
        files.write_csv(
            target,
            ({"sample": row, "class": names[c], "probability": f"{chances[row, c]:.6f}"} for row, c in answers),
        )
        say(out, f"wrote {target}")
    else:
        for row, c in enumerate(classes[:20]):
            say(out, f"sample {row}: {names[c]} ({100 * chances[row, c]:.0f}%)")
        if len(classes) > 20:
            say(out, f"... and {len(classes) - 20} more; --out predictions.csv writes all")
    if y is not None:
        right = 100 * float((classes == y).mean())
        say(out, f"{right:.1f}% of {counted(len(y), 'sample')} {'is' if len(y) == 1 else 'are'} right")
    elif data.suffix.lower() in sources.TABLES:
        say(out, f"Nobody knows how many are right: there is no column {label!r}; --label names another.")


def _read_client(data: Path, label: str, facts: dict[str, Any], alone: bool = False) -> tuple[Any, Any]:
    """Read one client's samples as the data that a model was trained on."""
    return sources.read_client(
        data,
        label=label,
        class_names=facts["class_names"],
        tokens=facts["tokens"],
        features=facts["feature_names"],
        alone=alone,
    )


def _client_row(one: run.ClientScore, mask_labels: bool) -> dict[str, Any]:
    right = one.masked if mask_labels else one.correct
    accuracy = f"{right / one.samples:.6f}" if one.samples else ""
    return one._asdict() | {"seen": int(one.seen), "accuracy": accuracy}
