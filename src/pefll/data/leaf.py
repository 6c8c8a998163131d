"""Reads users from LEAF's JSON files: {users, num_samples, user_data: {user: {x: [...], y: [...]}}}."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pefll.core.errors import PefllError, first_line
from pefll.core.files import parse_json
from pefll.data.limits import check_growth
from pefll.data.samples import TEST, TRAIN

FOLDERS = {"train": TRAIN, "test": TEST}
# Bytes of memory per byte of a file. "1.0, " takes 8 bytes in a list, 24 as a number, and the text itself.
EXPANSION = 8


class User(NamedTuple):
    """One user's samples in one file; x and y have one entry per sample."""

    name: str
    split: int
    x: list[Any]
    y: list[Any]
    where: str  # the file, for errors


def shards(folder: Path) -> list[Path]:
    """Return the JSON files in `folder`'s train and test folders, sorted, without pipes and devices."""
    return [path for name in FOLDERS for path in sorted((folder / name).glob("*.json")) if path.is_file()]


def users(folder: Path) -> Iterator[User]:
    """Yield the users of all files. Only one file at a time is in memory."""
    for path in shards(folder):
        try:
            stored = path.stat().st_size
            check_growth(str(path), stored, EXPANSION * stored)
            content = parse_json(path.read_bytes())
        except (ValueError, OSError) as error:
            raise PefllError(
                f"{path} is damaged: it is not JSON ({first_line(error)}); make or download it again", code="PEFLL-D004"
            ) from None
        yield from _users_of_shard(content, path)


def _users_of_shard(content: Any, path: Path) -> Iterator[User]:
    if not isinstance(content, dict):
        raise PefllError(
            f"{path} is not a LEAF file: its top level must be an object with users and user_data", code="PEFLL-D164"
        )
    for key, kind in (("users", list), ("num_samples", list), ("user_data", dict)):
        if not isinstance(content.get(key), kind):
            raise PefllError(f"{path} is not a LEAF file: it has no {key!r} of the right kind", code="PEFLL-D165")
    names, sizes, data = content["users"], content["num_samples"], content["user_data"]
    if len(names) != len(sizes):
        raise PefllError(
            f"{path} is damaged: it has {len(names):,} users but {len(sizes):,} entries of num_samples",
            code="PEFLL-D166",
        )
    for name, size in zip(names, sizes, strict=True):
        # `pop` removes the user's lists here, so that their memory is freed after the caller made an array of them.
        own = data.pop(name, None) if isinstance(name, str) else None
        if not isinstance(own, dict) or not isinstance(own.get("x"), list) or not isinstance(own.get("y"), list):
            raise PefllError(f"{path} is damaged: user {name!r} has no lists x and y in user_data", code="PEFLL-D167")
        x, y = own.pop("x"), own.pop("y")
        if not len(x) == len(y) == size:
            raise PefllError(
                f"{path} is damaged: user {name!r} has {len(x)} x and {len(y)} y, but num_samples says {size}",
                code="PEFLL-D168",
            )
        yield User(str(name), FOLDERS[path.parent.name], x, y, str(path))
