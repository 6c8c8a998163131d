"""Shakespeare: predict the next character in the lines of a role. Each client is a role."""

from __future__ import annotations

import dataclasses
import functools
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pefll.core.errors import PefllError
from pefll.core.files import parse_json
from pefll.data import leaf
from pefll.data.samples import TEST, TRAIN, VALIDATION, Array, Samples

# LEAF's 80 characters; a token is the index of a character in this text.
VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80
_ROLES = Path("shakespeare") / "roles.jsonl"
# Characters that Unicode decomposition does not make plain, and their replacements.
_PLAIN = {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\u2010": "-", "\r": "\n"}


def load(data_dir: Path, stride: int = 1) -> Samples:
    """Return windows of 80 characters, uint8 tokens [N, 80], and the token that follows each.

    It reads LEAF's JSON in `shakespeare/{train,test}`, or else `shakespeare/roles.jsonl`. Of a role in roles.jsonl, the
    last tenth of the text is test. The last tenth before it is validation, if long enough. No window is in two splits,
    because neighbouring windows share most characters. Roles without a training and a test window are left out.

    Args:
        data_dir: the folder with `shakespeare/`.
        stride: characters between the starts of two windows; of LEAF's windows, every so many of a user's are kept.
    """
    if stride < 1:
        raise PefllError(f"shakespeare: stride is {stride}; it must be at least 1", code="PEFLL-D198")
    folder = data_dir / "shakespeare"
    if leaf.shards(folder):
        return _from_leaf(folder, stride)
    if not (data_dir / _ROLES).is_file():
        raise PefllError(
            f"shakespeare: there is no {data_dir / _ROLES}; see `pefll data get shakespeare`", code="PEFLL-D199"
        )
    return _from_roles(data_dir / _ROLES, stride)


def load_tenth(data_dir: Path) -> Samples:
    """Return every tenth window of `load`: neighbouring windows share 79 of 80 characters."""
    return dataclasses.replace(load(data_dir, stride=10), name="shakespeare_tenth")


def found(data_dir: Path) -> list[Path]:
    """Return the files that `load` would read."""
    roles = data_dir / _ROLES
    return leaf.shards(data_dir / "shakespeare") or ([roles] if roles.is_file() else [])


def encode(text: str) -> Array:
    """Return the tokens of a text, uint8 [len(text)]; é becomes e, ’ becomes ', other unknown characters a space."""
    # UTF-32 gives the number of each character, an index into the table. Lone surrogates become spaces.
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    tokens: Array = _token_table()[points]
    return tokens


@functools.cache
def _token_table() -> Array:
    """Return the token of every Unicode character, uint8 [0x110000]."""
    table = np.full(0x110000, VOCABULARY.index(" "), dtype=np.uint8)
    for point in range(0x3000):
        character = chr(point)
        plain = _PLAIN.get(character, unicodedata.normalize("NFKD", character)[:1])
        if plain in VOCABULARY:
            table[point] = VOCABULARY.index(plain)
    return table


def _cuts(length: int) -> tuple[tuple[int, int, int], ...]:
    """Return (split, start, stop) for each split of a role's text; () if the text is too short."""
    test = length * 9 // 10
    if length - test <= LENGTH or test <= LENGTH:
        return ()
    validation = test * 9 // 10
    if test - validation <= LENGTH or validation <= LENGTH:
        return (TRAIN, 0, test), (TEST, test, length)
    return (TRAIN, 0, validation), (VALIDATION, validation, test), (TEST, test, length)


def _from_roles(path: Path, stride: int) -> Samples:
    names: list[str] = []
    parts: list[tuple[int, int, Array]] = []
    for name, text in _roles(path):
        cuts = _cuts(len(text))
        if cuts:
            tokens = encode(text)
            parts += [(len(names), split, tokens[start:stop]) for split, start, stop in cuts]
            names.append(name)
    if not names:
        raise PefllError(
            f"{path} has no role with enough text; a role needs {LENGTH + 1} characters in its last tenth",
            code="PEFLL-D200",
        )
    windows = [sliding_window_view(tokens, LENGTH + 1)[::stride] for _, _, tokens in parts]
    sizes = [len(each) for each in windows]
    return _samples(
        x=np.concatenate([each[:, :LENGTH] for each in windows]),
        y=np.concatenate([each[:, LENGTH] for each in windows]).astype(np.int64),
        split=np.repeat(np.asarray([split for _, split, _ in parts], dtype=np.int8), sizes),
        client=np.repeat(np.asarray([role for role, _, _ in parts], dtype=np.int64), sizes),
        names=names,
    )


def _samples(x: Array, y: Array, split: Array, client: Array, names: Iterable[str]) -> Samples:
    return Samples(
        x=x,
        y=y,
        classes=len(VOCABULARY),
        split=split,
        client=client,
        name="shakespeare",
        class_names=tuple(VOCABULARY),
        client_names=tuple(names),
        tokens=True,
    )


def _roles(path: Path) -> list[tuple[str, str]]:
    """Return (user, text) of each role; texts of the same user are joined."""
    texts: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PefllError(f"{path} cannot be read as text: {error}", code="PEFLL-D201") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            role = parse_json(line.encode())
        except ValueError:
            raise PefllError(f"{path} is damaged: line {number} is not JSON", code="PEFLL-D004") from None
        if not isinstance(role, dict) or not isinstance(role.get("user"), str) or not isinstance(role.get("text"), str):
            raise PefllError(f"{path} is damaged: line {number} has no texts 'user' and 'text'", code="PEFLL-D202")
        texts[role["user"]] = texts.get(role["user"], "") + role["text"]
    return list(texts.items())


def _from_leaf(folder: Path, stride: int) -> Samples:
    """Return LEAF's windows. The last tenth of a user's training windows becomes validation."""
    clients: dict[str, int] = {}
    x, y, split, owner = [], [], [], []
    for user in leaf.users(folder):
        if not all(isinstance(text, str) and len(text) == LENGTH for text in user.x):
            raise PefllError(
                f"{user.where} is damaged: x of user {user.name!r} are not texts of {LENGTH} characters",
                code="PEFLL-D203",
            )
        if not all(isinstance(text, str) and len(text) == 1 for text in user.y):
            raise PefllError(
                f"{user.where} is damaged: y of user {user.name!r} are not single characters", code="PEFLL-D204"
            )
        kept = user.y[::stride]
        count = len(kept)
        x.append(encode("".join(user.x[::stride])).reshape(count, LENGTH))
        y.append(encode("".join(kept)).astype(np.int64))
        kind = np.full(count, user.split, dtype=np.int8)
        if user.split == TRAIN:
            kind[count - count // 10 :] = VALIDATION
        split.append(kind)
        owner.append(np.full(count, clients.setdefault(user.name, len(clients)), dtype=np.int64))
    if not x:
        raise PefllError(f"{folder} has LEAF files without users; make them again", code="PEFLL-D205")
    return _samples(np.concatenate(x), np.concatenate(y), np.concatenate(split), np.concatenate(owner), clients)
