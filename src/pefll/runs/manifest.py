"""The manifests of checkpoints: which files each has, their SHA-256, its round and its run. Tensors are not read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from pefll.core.errors import PefllError
from pefll.core.files import parse_json
from pefll.runs.checksums import digest

MANIFEST = "manifest.json"
OTHER_ROUND, OTHER_RUN = "PEFLL-R005", "PEFLL-R006"
_NAME = re.compile(r"round-[0-9]{8,}")


class Manifest(NamedTuple):
    """What a checkpoint says about itself.

    Attributes:
        round: rounds done.
        files: for the name of each of its files, `bytes` and `sha256`.
        facts: what the writer added; `run` has the run's number `id`, its settings `config` as TOML, and `history`, the
            check of the last evaluation that every longer run has too. Earlier versions wrote no `run`.
    """

    round: int
    files: dict[str, dict[str, Any]]
    facts: dict[str, Any]

    @property
    def run(self) -> dict[str, str]:
        """What it says about its run; {} where an earlier version wrote it."""
        found: dict[str, str] = self.facts.get("run", {})
        return found


def folder_of(checkpoints: Path, round_: int) -> Path:
    """Return the folder of the checkpoint after a round."""
    return checkpoints / f"round-{round_:08d}"


def newest_first(checkpoints: Path) -> list[Path]:
    """Return the folders of all checkpoints, whole or not."""
    found = [path for path in checkpoints.glob("round-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name[6:]), reverse=True)


def write(round_: int, files: dict[str, dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a manifest, with a SHA-256 of itself."""
    manifest = {"round": round_, "files": files, "facts": facts}
    return manifest | {"sha256": digest(manifest)}


def read(path: Path, run: str = "") -> Manifest:
    """Read a checkpoint's manifest.

    Args:
        path: the checkpoint's folder.
        run: the number of the run that it should be of; empty where that is not known.

    Raises:
        PefllError: where it is damaged, of another round than its folder's name says, or of another run.
    """
    try:
        content = parse_json((path / MANIFEST).read_bytes())
        if content.pop("sha256") != digest(content):
            raise ValueError("its SHA-256 is wrong")
        found = Manifest(content["round"], content["files"], content["facts"])
        _check(found)
    except FileNotFoundError as error:
        raise PefllError(
            f"the checkpoint {path} is incomplete: {error.filename} is missing", code="PEFLL-R004"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise PefllError(
            f"the checkpoint {path} is damaged: its manifest cannot be read ({error})", code="PEFLL-R004"
        ) from error
    wanted = folder_of(path.parent, found.round).name
    if path.name != wanted:
        raise PefllError(
            f"the checkpoint {path} is of round {found.round}: folders were renamed or exchanged; call it {wanted}",
            code=OTHER_ROUND,
        )
    if run and found.run.get("id", run) != run:
        raise PefllError(
            f"the checkpoint {path} is of another run than config.toml; put back the one that was here",
            code=OTHER_RUN,
        )
    return found


def _check(found: Manifest) -> None:
    """Raise ValueError where a manifest, whose SHA-256 anybody can compute, holds what none was written with."""
    if type(found.round) is not int or found.round < 0:
        raise ValueError("its round is no whole number")
    if not isinstance(found.files, dict) or not isinstance(found.facts, dict):
        raise ValueError("its files or its facts are no tables")
    for name, wanted in found.files.items():
        if Path(name).name != name or "\0" in name:  # what lies elsewhere is none of its files
            raise ValueError(f"{name!r} is no name of a file in its folder")
        if (
            not isinstance(wanted, dict)
            or type(wanted.get("bytes")) is not int
            or type(wanted.get("sha256")) is not str
        ):
            raise ValueError(f"it does not say how many bytes {name} has, and their SHA-256")
    if not isinstance(found.run, dict) or not all(isinstance(value, str) for value in found.run.values()):
        raise ValueError("what it says about its run is no table of texts")
    tomllib.loads(found.run.get("config", ""))


def newest(checkpoints: Path, run: str = "") -> Manifest | None:
    """Return the newest manifest that is whole; None where there is none."""
    for path in newest_first(checkpoints):
        try:
            return read(path, run)
        except PefllError:
            continue
    return None
