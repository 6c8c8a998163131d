"""Replies: each is checked before any number of it is used."""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pefll.core.tree import Tree, leaves
from pefll.core.wording import counted
from pefll.engines.flower.protocol.message import (
    HEADER_BYTES,
    BadMessage,
    bytes_of,
    header_of,
    tensors_of,
)
from pefll.methods.contract import Own, Score

_MOST_SAMPLES = 1 << 40  # of a split
_FEWEST_FOR_A_MEDIAN = 3


class Reply(NamedTuple):
    """What a client has replied.

    Attributes:
        tensors: in the memory of the message, to be stacked and not to be changed.
        norms: of the tensors that are vectors of numbers; 0 for all others, as single numbers are counts.
    """

    tensors: list[Tensor]
    norms: list[float]


class Missing(NamedTuple):
    """A client's reply that it does not remember tensors, named by their hashes."""

    digests: list[str]


def reply_header(content: Any) -> dict[str, Any]:
    """Return the header of a reply; BadMessage where it is a refusal."""
    header = header_of(content)
    if "refusal" in header:
        raise BadMessage(str(header["refusal"])[:300])
    return header


def hello_of(content: Any) -> dict[str, Any]:
    """Return what a node says of itself: a header and no numbers, with three counts of samples or none."""
    size = bytes_of(content)
    if size > HEADER_BYTES:
        raise BadMessage(f"sent {size:,} bytes where {HEADER_BYTES:,} are the most")
    header = reply_header(content)
    match header.get("counts"):
        case None:
            return header
        case [int(), int(), int()] as counts if all(type(n) is int and 0 <= n < _MOST_SAMPLES for n in counts):
            return header
    raise BadMessage("sent numbers of samples that cannot be")


def read_reply(content: Any, says: dict[str, Any], form: Tree) -> Reply | Missing:
    """Return a reply that has the right header, sizes, types, shapes, and finite numbers only.

    Args:
        content: of the reply.
        says: what its header must say.
        form: a reply of the right shapes.
    """
    expected = list(leaves(form, but=Own))
    size, most = bytes_of(content), sum(leaf.nbytes for leaf in expected) + HEADER_BYTES
    if size > most:
        raise BadMessage(f"sent {size:,} bytes where {most:,} are the most")
    header = reply_header(content)
    for key, value in says.items():
        if header.get(key) != value:
            raise BadMessage(f"answered for {key} {header.get(key)!r} and not {value!r}")
    if "missing" in header:
        return Missing(header["missing"])
    tensors = tensors_of(content)
    if set(tensors) != {str(place) for place in range(len(expected))}:
        raise BadMessage(f"sent {counted(len(tensors), 'tensor')} instead of {len(expected):,}")
    reply = Reply([tensors[str(place)] for place in range(len(expected))], [])
    for leaf, like in zip(reply.tensors, expected, strict=True):
        if leaf.dtype != like.dtype or leaf.shape != like.shape:
            raise BadMessage(f"sent {_words(leaf)} instead of {_words(like)}")
        norm = norm_of(leaf)
        if not isfinite(norm) and not torch.isfinite(leaf).all():
            raise BadMessage(f"sent NaN or infinity in {says['task']}")
        reply.norms.append(norm if leaf.numel() > 1 else 0.0)
    return reply


def check_score(reply: Reply, declared: int | None) -> None:
    """Raise BadMessage for a score that no samples can have.

    The loss is left alone: it may be any finite number, and nothing is chosen by it.

    Args:
        reply: its tensors are the four [] of a `Score`.
        declared: how many samples the client has said to have; None where it keeps that to itself.
    """
    score = Score(*reply.tensors)
    samples, correct, masked = (float(part) for part in (score.samples, score.correct, score.masked))
    for name, value in (("samples", samples), ("right", correct), ("right among its own classes", masked)):
        if value < 0 or not value.is_integer():
            raise BadMessage(f"sent a score with {value:g} {name}, which is no count")
    if max(correct, masked) > samples:
        raise BadMessage(f"sent a score of {max(correct, masked):g} right among {samples:g} samples")
    if declared is not None and samples > declared:
        raise BadMessage(f"sent a score of {samples:g} samples, having said that it has {declared:,}")


def count_place(form: Tree) -> int | None:
    """Return which tensor of a reply is the number of samples by which a method weights it; None where none is.

    It is the field called `samples` of the reply's NamedTuple, as FedAvg's `Update` has it.
    """
    if isinstance(form, Score) or "samples" not in getattr(form, "_fields", ()):
        return None
    before = [leaf for part in form[: form._fields.index("samples")] for leaf in leaves(part, but=Own)]
    return len(before) if isinstance(form.samples, Tensor) and form.samples.numel() == 1 else None


def check_count(reply: Reply, place: int, declared: int | None) -> None:
    """Raise BadMessage for a number of samples that cannot be, or is more than the client has said to have.

    Args:
        reply: has it.
        place: among its tensors.
        declared: how many training samples the client has said to have; None where it keeps that to itself.
    """
    leaf = reply.tensors[place]
    samples = float(leaf)
    if samples < 1 or not samples.is_integer():
        raise BadMessage(f"sent an update made from {samples:g} samples, which is no count")
    if declared is not None and samples > float(torch.tensor(declared, dtype=leaf.dtype)):
        raise BadMessage(f"sent an update made from {samples:g} samples, having said that it has {declared:,}")


def norm_outliers(replies: dict[int, Reply], limit: float) -> dict[int, str]:
    """Return the clients with a vector that is far longer than the median of the cohort's.

    Of an even number of replies the lower median is taken. Of two replies nobody knows which is the wrong one: with a
    tiny vector one client could have the other left out. So nobody is found among fewer than three.

    Args:
        replies: of the clients of a cohort.
        limit: how many times as long is too long; 0 for no limit.
    """
    faults: dict[int, str] = {}
    if not limit or len(replies) < _FEWEST_FOR_A_MEDIAN:
        return faults
    for norms in zip(*(reply.norms for reply in replies.values()), strict=True):
        median = sorted(norms)[(len(norms) - 1) // 2]
        for client, norm in zip(replies, norms, strict=True):
            if norm > limit * median > 0:
                faults[client] = f"sent a vector {norm / median:.3g} times as long as the median of the round"
    return faults


def norm_of(leaf: Tensor) -> float:
    """Return the norm of a tensor of numbers, which is finite only if they are; 0 for whole numbers and truths."""
    if not leaf.is_floating_point():
        return 0.0
    norm = float(torch.linalg.vector_norm(leaf))
    return norm if isfinite(norm) else float(torch.linalg.vector_norm(leaf.double()))  # its square was too large


def _words(leaf: Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
