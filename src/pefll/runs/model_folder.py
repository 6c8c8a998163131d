"""A folder with a personal model for each of many clients, and `models.json`, the list of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from pefll.core import locking
from pefll.core.errors import PefllError
from pefll.core.files import read_json, safe_file_name
from pefll.data.owners import Name
from pefll.models.spec import ModelSpec

INDEX = "models.json"
ENDING = ".safetensors"


def file_name(client: Name) -> str:
    """Return the file name of a client's model: safe on every system, and different for every client."""
    return safe_file_name(str(client)) + ENDING


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a folder inside the block, where the system can; PefllError if another process makes models in it."""
    handle = -1
    try:
        handle = os.open(folder, os.O_RDONLY)
        locking.lock(handle, wait=False)
    except BlockingIOError as error:
        os.close(handle)
        raise PefllError(
            f"another process makes models in {folder}; wait for it, or stop it with Ctrl-C first", code="PEFLL-M065"
        ) from error
    except OSError:  # Windows, or a file system without locks
        pass
    try:
        yield
    finally:
        if handle >= 0:
            with suppress(OSError):  # closing is not enough: forked processes may have copies of the handle
                locking.unlock(handle)
            os.close(handle)


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `models.json`, without entries whose files are gone.

    Raises:
        PefllError: if there is none, or it is damaged.
    """
    path = folder / INDEX
    if not path.is_file():
        raise PefllError(
            f"{folder} has no {INDEX}, the list of its models; name a folder that `pefll personalize --each` made",
            code="PEFLL-M043",
        )
    content: dict[str, Any] = read_json(path)
    try:
        # A list from somewhere else must not name files outside of the folder.
        own = [row for row in content["models"] if row["file"] == file_name(row["user"])]
        return content | {"models": [row for row in own if (folder / row["file"]).is_file()]}
    except (KeyError, TypeError) as error:
        raise PefllError(
            f"{path} is damaged: it is no list of models; make it again with `pefll personalize --each`",
            code="PEFLL-M044",
        ) from error


class ModelFile(NamedTuple):
    """The file of a client's model in a folder.

    Attributes:
        path: the file.
        client: the client's name as a text.
        made_from: `ModelSpec.made_from` of the model that was written there; None if models.json does not say it.
    """

    path: Path
    client: str
    made_from: str | None

    def check_is(self, found: ModelSpec) -> None:
        """Raise PefllError if the file has the model of another client, by its spec."""
        if found.client not in (None, self.client) or (
            self.made_from is not None and found.made_from not in (None, self.made_from)
        ):
            raise PefllError(
                f"{self.path} is not the model that {INDEX} names: it is of another client, or was made again from "
                "other samples or by another run; run `pefll personalize --each --update` again",
                code="PEFLL-M057",
            )


def files_of(folder: Path) -> dict[str, ModelFile]:
    """Return the file of each client's model in a folder, by the client's name as a text."""
    rows = read_index(folder)["models"]
    files = (ModelFile(folder / row["file"], str(row["user"]), _text(row.get("made_from"))) for row in rows)
    return {file.client: file for file in files}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
