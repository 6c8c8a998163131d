"""`pefll certify`: what a run promises about new clients, and what a personal model promises to its client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pefll.cli.console import err, noting, out
from pefll.cli.options import Force, OwnMethod, OwnModel, OwnTask, TrainedLabel, check_free
from pefll.cli.samples import label_in_training, samples_of_client
from pefll.core.errors import PefllError
from pefll.core.files import check_folder, make_folder, write_json, write_whole
from pefll.core.progress import say
from pefll.core.wording import counted
from pefll.data.missing_labels import has_label
from pefll.guarantees.binomial import least_samples
from pefll.guarantees.held_out import at_least, percent
from pefll.guarantees.intervals import checked_delta, checked_share
from pefll.runs import modelfile
from pefll.runs.checkpoint import NO_CHECKPOINT
from pefll.runs.personal import PersonalModel
from pefll.runs.record import CERTIFICATE, RunFolder
from pefll.runs.unseen import TooFewUnseen, read_result, unseen_figures
from pefll.training import run
from pefll.training.certificate import WIDTH, Certificate, certify_summary, finished_summary, neither
from pefll.training.certificate import certify as certify_run

_FILES = {"--out": ".json", "--card": ".md"}
# A model's file must not tell of its client, so it holds neither the samples that made it nor hashes of them.
_CANNOT_CHECK = (
    "the bound from {data} holds only if none of its samples made this model. pefll cannot check that, because the "
    "model's file does not list the samples that made it. With such samples, the bound would be too high."
)


def certify(
    path: Annotated[
        Path,
        typer.Argument(
            help="A run folder, a result file of `pefll results add`, or a personal model's .safetensors.",
            metavar="RUN",
        ),
    ],
    delta: Annotated[float, typer.Option(help="The probability with which each statement may fail.")] = 0.05,
    share: Annotated[
        float | None, typer.Option(help="The share of new clients that quantiles are about.", show_default="0.9")
    ] = None,
    width: Annotated[
        float | None,
        typer.Option(help="Width of a client's own interval, for the least number of samples.", show_default="0.1"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="For a personal model: labelled samples of its client that did not make the model."),
    ] = None,
    label: TrainedLabel = None,
    bounds: Annotated[
        bool, typer.Option("--bounds/--no-bounds", help="For a run folder: also bounds from training, with its data.")
    ] = True,
    target: Annotated[Path | None, typer.Option("--out", help="Also write the certificate as JSON.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the bounds and the unseen clients: .png, .pdf or .svg.")
    ] = None,
    card: Annotated[Path | None, typer.Option("--card", help="Also write a model card of the run as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a page.")] = False,
    force: Force = False,
    model: OwnModel = None,
    method: OwnMethod = None,
    task: OwnTask = None,
) -> None:
    """Say what a run promises about new clients, with a stated confidence and what that assumes.

    For a run folder, the certificate is also kept in its summary.json. Personal models made afterwards carry its first
    line.

    For example:

    - `pefll certify runs/c10`

    - `pefll certify runs/c10 --share 0.8 --plot bounds.png --card CARD.md`

    - `pefll certify me.safetensors --data more_samples.npz`
    """
    checked_delta(delta)
    if share is not None:
        checked_share(share, "the share of clients")
    for option, file in (("--out", target), ("--plot", picture), ("--card", card)):
        check_free(file, option, force)
        if file is not None:
            check_folder(file.parent)
        if file is not None and file.suffix != _FILES.get(option, file.suffix):
            raise PefllError(f"{option} writes a {_FILES[option]} file, not {file.name}; rename it", code="PEFLL-G141")
    if picture is not None:
        from pefll.report.plots import check_drawable

        check_drawable(picture)
    if not path.exists():
        raise PefllError(f"there is no {path}; name a run folder, a result file or a personal model", code="PEFLL-G142")
    if _is_model(path):
        if share is not None or picture or card:
            raise PefllError(
                f"{path} is a personal model, but --share, --plot and --card are about runs; leave them out",
                code="PEFLL-G143",
            )
        _certify_model(path, delta, width, data, label, target, as_json, model, task)
        return
    if data is not None or label is not None:
        raise PefllError(
            f"--data and --label are about a personal model, but {path} is a run; leave them out, or name the model's "
            "file",
            code="PEFLL-G144",
        )
    width = WIDTH if width is None else checked_share(width, "the width")
    if path.is_dir():
        folder = RunFolder(path)
        summary = finished_summary(folder)
        certificate = _of_run(folder, summary, delta, share, width, bounds, model, method, task)
    else:
        summary = read_result(path)
        certificate = certify_summary(summary, path, delta, share, width)
    found = certificate.to_json()
    page = ""
    if card is not None:
        from pefll.report.certificate import model_card

        page = model_card(summary, found)
    _show(found, path, as_json)
    if path.is_dir():
        certificate.write(RunFolder(path))
        say(err, f"wrote {CERTIFICATE} into {RunFolder(path).summary_file}")
    _write(found, target)
    if card is not None:
        make_folder(card.parent)
        write_whole(card, page.encode())
        say(err, f"wrote {card}")
    if picture is not None:
        from pefll.report.certificate import certificate_picture

        certificate_picture(found, _values(summary, path), picture)
        say(err, f"wrote {picture}")


def _of_run(
    folder: RunFolder,
    summary: dict[str, object],
    delta: float,
    share: float | None,
    width: float,
    bounds: bool,
    model: str | None,
    method: str | None,
    task: str | None,
) -> Certificate:
    """Return the certificate of a run folder, from its summary alone if it cannot be loaded."""
    notes, reason = [], ""
    if bounds:
        try:
            trained = run.load(folder.path, err, model, method, task=task)
        except PefllError as error:
            gone = f"the checkpoints in {folder.checkpoints} are gone, and they hold the trained networks"
            reason = gone if error.code == NO_CHECKPOINT else error.args[0]
            notes.append(f"There is no bound from training: {reason}.")
        else:
            return certify_run(trained, delta, share, width, console=err, where=folder.path)
    try:
        return certify_summary(summary, folder.path, delta, share, width, notes=notes)
    except TooFewUnseen as error:
        if not notes or share is not None:
            raise
        raise neither(folder.path, error, reason) from error


def _values(summary: dict[str, object], path: Path) -> list[float]:
    """Return the figure of each unseen client; none if there are too few of them."""
    try:
        return unseen_figures(summary, path).values
    except TooFewUnseen:
        return []


def _show(certificate: dict[str, object], path: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"run": str(path), CERTIFICATE: certificate}, indent=2))
        return
    from pefll.report.certificate import print_certificate

    print_certificate(certificate, out, str(path))


def _write(content: dict[str, object], target: Path | None) -> None:
    if target is not None:
        make_folder(target.parent)
        write_json(target, content)
        say(err, f"wrote {target}")


def _is_model(path: Path) -> bool:
    """Return whether a path is a personal model's file, and not a folder or JSON; PefllError for other files."""
    if path.is_dir():
        return False
    if not path.is_file():  # reading a pipe might never end
        raise PefllError(f"{path} is a pipe or a device, not a file; name a file", code="PEFLL-G150")
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise PefllError(f"{path} cannot be read: {error.strerror}", code="PEFLL-G145") from error
    if head.lstrip().startswith((b"{", b"[")):
        return False
    if path.suffix != ".safetensors" and not modelfile.may_be(head):
        raise PefllError(
            f"{path} is neither a run folder, nor the JSON of a result, nor a personal model; name one of these",
            code="PEFLL-G148",
        )
    return True


def _certify_model(
    path: Path,
    delta: float,
    width: float | None,
    data: Path | None,
    label: str | None,
    target: Path | None,
    as_json: bool,
    model: str | None,
    task: str | None,
) -> None:
    with noting():
        personal = PersonalModel.load(path, architecture=model, task=task)
    if data is None and width is None and not personal.spec.certificate:
        raise PefllError(
            f"{path} needs labelled samples of its client that did not make it; give them with --data",
            code="PEFLL-G146",
        )
    if data is not None and not as_json:
        say(out, f"Note: {_CANNOT_CHECK.format(data=data)}")
    if personal.spec.certificate and not as_json:
        say(out, f"By its run: {personal.spec.certificate}.")
    if width is not None:
        needed = least_samples(width, delta)
        words = f"for an interval of width {width:g} with confidence {percent(1 - delta)}, at any accuracy"
        if not as_json:
            say(out, f"Least number: {counted(needed, 'labelled sample')} {words}.")
    if data is None:
        return
    label = label or label_in_training(data, personal.spec.label_column)
    x, y = samples_of_client(data, label, personal.spec, "leave this column out to use this model", alone=True)
    if y is None or not has_label(y).any():
        raise PefllError(
            f"{data} has no labelled sample; add labels, or name their column with --label", code="PEFLL-G147"
        )
    found = personal.certify(x, y, delta)
    if as_json:
        notes = [_CANNOT_CHECK.format(data=data)]
        typer.echo(json.dumps({"model": str(path), "notes": notes, **found.row()}, indent=2))
    else:
        terms = found.terms
        low, high = terms["two_sided_lower"], terms["two_sided_upper"]
        say(out, f"{found.promise[:-1]}, with confidence {percent(1 - delta)}.")
        say(out, f"Measured: {100 * found.measured:.1f}% of {counted(int(terms['samples']), 'sample')}.")
        say(out, f"Both sides: {at_least(low)} to {100 - 100 * _floor(1 - high):.1f}%, with the same confidence.")
        say(out, f"Assumes: {found.assumes}")
    _write(found.row(), target)


def _floor(share: float) -> float:
    return int(1000 * share) / 1000
