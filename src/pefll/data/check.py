"""A check of a data folder: which data sets are complete, missing or damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from pefll.core.errors import PefllError
from pefll.core.wording import counted
from pefll.data import cache
from pefll.data.download import ARCHIVES, part_of
from pefll.data.sources import DATASETS, Source
from pefll.data.summary import classes_without_samples


class Finding(NamedTuple):
    """The state of one data set in a folder, and a sentence about it."""

    name: str
    state: Literal["ok", "missing", "damaged"]
    sentence: str


def check(data_dir: Path | str, report: cache.Report | None = None) -> list[Finding]:
    """Read all files of each known data set in a folder, and return one finding per data set.

    It removes cache entries with a wrong SHA-256. It calls `report` with a sentence before each data set.
    """
    data_dir = Path(data_dir).expanduser()
    if not data_dir.is_dir():
        raise PefllError(f"there is no folder {data_dir}; name the one with your data", code="PEFLL-D117")
    findings = []
    for source in DATASETS.values():
        if report is not None:
            report(f"checking {source.name}")
        findings.append(_check_one(source, data_dir))
    return findings


def holds_any(data_dir: Path | str) -> bool:
    """Return whether a folder has a file of a known data set, even an unfinished download."""
    data_dir = Path(data_dir).expanduser()
    return any(source.found(data_dir) or _unfinished_download(source, data_dir) for source in DATASETS.values())


def _unfinished_download(source: Source, data_dir: Path) -> Path | None:
    """Return the file of an unfinished download, or None."""
    part = part_of(ARCHIVES[source.name], data_dir) if source.name in ARCHIVES else None
    return part if part is not None and part.is_file() else None


def _check_one(source: Source, data_dir: Path) -> Finding:
    part = _unfinished_download(source, data_dir)
    half = f"the download {part} is not complete; go on with `pefll data get {source.name}`"
    if not source.embedded and not source.found(data_dir):
        if part:
            return Finding(source.name, "damaged", half)
        return Finding(source.name, "missing", f"not in {data_dir}: {source.files}")
    try:
        samples = source.load(data_dir)
    except PefllError as error:
        return Finding(source.name, "damaged", f"{error}; {half}" if part else str(error))
    sentence = f"{counted(len(samples.x), 'sample')}, {counted(samples.classes, 'class')}"
    absent = classes_without_samples(samples)
    if absent:
        sentence += f" ({absent})"
    if samples.client is not None:
        sentence += f", {counted(int(samples.client.max()) + 1, 'client')}"
    if cache.intact(source.name, data_dir) is False:
        cache.discard(source.name, data_dir)
        sentence += "; its cache was damaged or out of date and is removed"
    if part:
        sentence += f"; {part} is left over from a download and can be deleted"
    return Finding(source.name, "ok", sentence)
