"""Manifests of checkpoints: each names its run, its round and its files. Reading one reads no tensors."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from pefll.core.errors import PefllError
from pefll.core.files import parse_json, read_limited
from pefll.runs.checksums import digest

MANIFEST, HISTORY = "manifest.json", "history.jsonl"
# Enough for any manifest: it may name a hundred thousand columns, each on its own line.
MOST_BYTES = 1 << 25
OTHER_ROUND, OTHER_RUN, NO_RUN = "PEFLL-R005", "PEFLL-R006", "PEFLL-R023"
_NAME = re.compile(r"round-[0-9]{8,}")


class Manifest(NamedTuple):
    """The content of a manifest.

    Attributes:
        round: number of rounds done.
        files: `bytes` and `sha256` of each file, by name.
        metadata: what the writer added. `run` has the run's ID `id`, its settings `config` as TOML, and `history`, the
            check of the last evaluation due by `eval_every`. Earlier versions wrote no `run`.
    """

    round: int
    files: dict[str, dict[str, Any]]
    metadata: dict[str, Any]

    @property
    def run(self) -> dict[str, str]:
        """The metadata about its run; {} in a manifest of an earlier version."""
        found: dict[str, str] = self.metadata.get("run", {})
        return found

    @property
    def names_run(self) -> bool:
        """Whether it has the ID of its run; False in a manifest of an earlier version."""
        return "id" in self.run


def folder_of(checkpoints: Path, round_: int) -> Path:
    """Return the folder of the checkpoint after a round."""
    return checkpoints / f"round-{round_:08d}"


def newest_first(checkpoints: Path) -> list[Path]:
    """Return the folders of all checkpoints, damaged ones included."""
    found = [path for path in checkpoints.glob("round-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name[6:]), reverse=True)


def write(round_: int, files: dict[str, dict[str, Any]], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a manifest, with a SHA-256 of itself."""
    manifest = {"round": round_, "files": files, "facts": metadata}
    return manifest | {"sha256": digest(manifest)}


def damaged(path: Path, how: str) -> PefllError:
    """Return the error for a damaged checkpoint."""
    return PefllError(f"the checkpoint {path} is damaged: {how}", code="PEFLL-R004")


def read_file(path: Path, name: str, most: int) -> bytes:
    """Return the content of a checkpoint's file; PefllError if it cannot be read or has more than `most` bytes."""
    try:
        return read_limited(path / name, most)
    except ValueError as error:
        raise damaged(path, f"{name} cannot be read ({error})") from error
    except FileNotFoundError as error:
        raise damaged(path, f"{name} is missing") from error
    except OSError as error:
        raise damaged(path, f"{name} cannot be read ({error.strerror})") from error


def read(path: Path, run: str = "") -> Manifest:
    """Return the manifest of a checkpoint's folder; PefllError if it is damaged, or of another round or run.

    It must belong to the run with the ID `run`; empty for any run.
    """
    content = read_file(path, MANIFEST, MOST_BYTES)
    try:
        values = parse_json(content)
        if values.pop("sha256") != digest(values):
            raise ValueError("its SHA-256 is wrong")
        found = Manifest(values["round"], values["files"], values["facts"])
        _check(found)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(path, f"its manifest cannot be read ({error})") from error
    wanted = folder_of(path.parent, found.round).name
    if path.name != wanted:
        raise PefllError(
            f"the checkpoint {path} is of round {found.round}: folders were renamed or exchanged; call it {wanted}",
            code=OTHER_ROUND,
        )
    if run and found.run.get("id", run) != run:
        raise PefllError(
            f"the checkpoint {path} belongs to another run than config.toml; put back the original one",
            code=OTHER_RUN,
        )
    if run and not found.names_run and ("run" in found.metadata or HISTORY in found.files):
        raise PefllError(
            f"the checkpoint {path} does not name its run, although this version of pefll wrote it; put back the "
            "original one",
            code=NO_RUN,
        )
    return found


def _check(found: Manifest) -> None:
    """Raise ValueError if a manifest has content that `write` never writes: anybody can compute its SHA-256."""
    if type(found.round) is not int or found.round < 0:
        raise ValueError("its round is not a whole number")
    if not isinstance(found.files, dict) or not isinstance(found.metadata, dict):
        raise ValueError("its files or its metadata are not a table")
    for name, entry in found.files.items():
        if Path(name).name != name or "\0" in name:  # no file outside of the folder
            raise ValueError(f"{name!r} is not the name of a file in its folder")
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or type(entry.get("sha256")) is not str:
            raise ValueError(f"it does not give the size and the SHA-256 of {name}")
    if not isinstance(found.run, dict) or not all(isinstance(value, str) for value in found.run.values()):
        raise ValueError("its metadata of the run are not texts")
    tomllib.loads(found.run.get("config", ""))


def newest(checkpoints: Path, run: str = "") -> Manifest | None:
    """Return the newest manifest that is not damaged; None if there is none."""
    for path in newest_first(checkpoints):
        try:
            return read(path, run)
        except PefllError:
            continue
    return None
