"""A client's store on its own disk: one small file for each exchange in which the client keeps tensors.

The server never sees these files.
"""

from __future__ import annotations

import re
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.files import sentences_for_disk_errors, write_whole

_NAME = re.compile(r"(round|evaluation)-[0-9a-f]+-[0-9]+")


class ClientStore:
    """A folder of tensors that a client keeps. The first `put` makes the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, leaves: list[Tensor]) -> None:
        """Keep tensors under a name. If the name is `evaluation-...`, remove the tensors of earlier evaluations."""
        path = self._path(name)
        with sentences_for_disk_errors(str(path)):
            self._folder.mkdir(parents=True, exist_ok=True)
            if name.startswith("evaluation-"):
                evaluation = name.rpartition("-")[0]
                for prefix in ("evaluation", "visit"):  # earlier versions wrote `visit-...`
                    for old in self._folder.glob(f"{prefix}-*.safetensors"):
                        if not old.name.startswith(f"{evaluation}-"):
                            old.unlink(missing_ok=True)
        named = {str(place): leaf.detach().contiguous().clone() for place, leaf in enumerate(leaves)}
        write_whole(path, safetensors.torch.save(named))

    def get(self, name: str) -> list[Tensor]:
        """Return the tensors that were kept under a name."""
        path = self._path(name)
        try:
            tensors = safetensors.torch.load(path.read_bytes())
        except (OSError, safetensors.SafetensorError):
            raise PefllError(f"{path}, which this client kept, is gone or damaged", code="PEFLL-F440") from None
        # Cloned, because sums at unaligned addresses are rounded differently.
        return [tensors[str(place)].clone() for place in range(len(tensors))]

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):  # the server chooses the name, and it becomes a file name here
            raise PefllError("the server asked for kept tensors by an invalid name", code="PEFLL-F441")
        return self._folder / f"{name}.safetensors"
