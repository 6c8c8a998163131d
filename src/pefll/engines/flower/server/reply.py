"""Checks of replies. The server uses no number of a reply before these checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pefll.core.tree import Tree, leaves, map_tree
from pefll.core.wording import counted
from pefll.data.assembly import assemble
from pefll.data.client import Client
from pefll.data.samples import Samples
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.message import (
    HEADER_BYTES,
    BadMessage,
    bytes_of,
    header_of,
    tensors_of,
)
from pefll.methods.contract import ClientState, Each, Everyone, Score
from pefll.tasks import Task

_MOST_SAMPLES = 1 << 40  # limit for the number of samples in a split
_FEWEST_FOR_A_MEDIAN = 3


class Reply(NamedTuple):
    """A valid reply of a client.

    Attributes:
        tensors: the numbers of the reply. They share the memory of the message and are read-only.
        norms: norm of each tensor. It is 0 for integers and booleans, and for single numbers, which are counts.
    """

    tensors: list[Tensor]
    norms: list[float]


class Missing(NamedTuple):
    """A client's reply that it lacks some cached tensors. `digests` are the hashes of these tensors."""

    digests: list[str]


class ReplyForms:
    """Finds the types and shapes that a task's reply must have, and remembers them."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._forms: dict[object, Tree] = {}

    def form_of_reply(
        self, task: Callable[..., Tree], arguments: Sequence[Everyone | Each], static: dict[str, int]
    ) -> Tree:
        """Return a reply of the right types and shapes. The task runs once, on an invented client with two samples."""
        zeros = [
            map_tree(
                lambda leaf, argument=argument: torch.zeros_like(leaf[0] if isinstance(argument, Each) else leaf),
                argument.value,
            )
            for argument in arguments
        ]
        shapes = tuple((leaf.shape, leaf.dtype) for tree in zeros for leaf in leaves(tree))
        key = (task.__name__, tuple(sorted(static.items())), shapes)
        if key not in self._forms:
            self._forms[key] = task(self._made_up_client(), *zeros, **static)
        return self._forms[key]

    def _made_up_client(self) -> Client:
        agreed = self._agreement
        kind = np.int64 if agreed.tokens else np.uint8 if agreed.normalise else np.float32
        zeros = np.zeros(2, dtype=np.int64)
        x = np.zeros((2, *agreed.input_shape), dtype=kind)
        y = agreed.blank_labels(2)
        samples = Samples(x=x, y=y, classes=agreed.classes, normalise=agreed.normalise, tokens=agreed.tokens)
        made_up = assemble(samples, zeros, zeros.astype(np.int8), 1, "made up")
        return Client(
            federation=made_up,
            seed=0,
            id=torch.tensor(0),
            round=torch.tensor(0),
            offset=made_up.offset[:, 0],
            count=made_up.count[:, 0],
            capacity=(2, 0, 0),
            dtype=agreed.dtype,
        )


def reply_header(content: Any) -> dict[str, Any]:
    """Return the header of a reply; BadMessage if the reply is a refusal."""
    header = header_of(content)
    if "refusal" in header:
        raise BadMessage(str(header["refusal"])[:300])
    return header


def hello_of(content: Any) -> dict[str, Any]:
    """Return the header of a reply to `hello`; BadMessage if it is invalid. Its `counts` are None or three counts."""
    size = bytes_of(content)
    if size > HEADER_BYTES:
        raise BadMessage(f"sent {size:,} bytes, but at most {HEADER_BYTES:,} are allowed")
    header = reply_header(content)
    match header.get("counts"):
        case None:
            return header
        case [int(), int(), int()] as counts if all(type(n) is int and 0 <= n < _MOST_SAMPLES for n in counts):
            return header
    raise BadMessage("sent impossible numbers of samples")


def read_reply(content: Any, says: dict[str, Any], form: Tree) -> Reply | Missing:
    """Return a checked reply; BadMessage if its header, size, types or shapes are wrong, or a number is not finite.

    Args:
        content: content of the reply.
        says: fields that the reply's header must have.
        form: a reply of the right types and shapes.
    """
    expected = list(leaves(form, but=ClientState))
    size, most = bytes_of(content), sum(leaf.nbytes for leaf in expected) + HEADER_BYTES
    if size > most:
        raise BadMessage(f"sent {size:,} bytes, but at most {most:,} are allowed")
    header = reply_header(content)
    for key, value in says.items():
        if header.get(key) != value:
            raise BadMessage(f"answered with {key} {header.get(key)!r} instead of {value!r}")
    if "missing" in header:
        return Missing(header["missing"])
    tensors = tensors_of(content)
    if set(tensors) != {str(place) for place in range(len(expected))}:
        raise BadMessage(f"sent {counted(len(tensors), 'tensor')} instead of {len(expected):,}")
    reply = Reply([tensors[str(place)] for place in range(len(expected))], [])
    for leaf, like in zip(reply.tensors, expected, strict=True):
        if leaf.dtype != like.dtype or leaf.shape != like.shape:
            raise BadMessage(f"sent {_type_and_shape(leaf)} instead of {_type_and_shape(like)}")
        norm = norm_of(leaf)
        if not isfinite(norm) and not torch.isfinite(leaf).all():
            raise BadMessage(f"sent NaN or infinity in {says['task']}")
        reply.norms.append(norm if leaf.numel() > 1 else 0.0)
    return reply


def check_sums(reply: Reply, form: Any, task: Task, declared: int | None) -> None:
    """Raise BadMessage for sums of a task that are impossible; see `check_score`.

    Args:
        reply: the client's reply.
        form: sums of the right types and shapes, a NamedTuple.
        task: the task; `Task.bounds` says what one sample can add to a sum.
        declared: how many samples the client says it has; None if it does not say.
    """
    if form._fields[:4] == Score._fields:
        check_score(reply, declared)
    samples = float(reply.tensors[0])
    if samples < 0 or not samples.is_integer():
        raise BadMessage(f"sent sums over {samples:g} samples, which is not a count")
    if declared is not None and samples > declared:
        raise BadMessage(f"sent sums over {samples:g} samples, but said that it has {declared:,}")
    bounds = task.bounds()
    for name, found in zip(form._fields, reply.tensors, strict=True):
        least, most = bounds.get(name, (-inf, inf))
        slack = 1e-3 * samples  # sums are rounded
        if (
            found.numel()
            and samples
            and not (float(found.min()) >= least * samples - slack and float(found.max()) <= most * samples + slack)
        ):
            raise BadMessage(f"sent a sum {name} that {samples:g} samples cannot have")


def check_score(reply: Reply, declared: int | None) -> None:
    """Raise BadMessage for a score that is impossible, such as more correct samples than samples.

    The loss is not checked. It may be any finite number, and the choice of the best round does not use it.

    Args:
        reply: begins with the four tensors of a `Score`, each of shape [].
        declared: how many samples the client says it has; None if it does not say.
    """
    score = Score(*reply.tensors[:4])
    samples, correct, masked = (float(part) for part in (score.samples, score.correct, score.masked))
    for name, value in (("samples", samples), ("correct", correct), ("correct among its own classes", masked)):
        if value < 0 or not value.is_integer():
            raise BadMessage(f"sent a score with {value:g} {name}, which is not a count")
    if max(correct, masked) > samples:
        raise BadMessage(f"sent a score with {max(correct, masked):g} correct among {samples:g} samples")
    if declared is not None and samples > declared:
        raise BadMessage(f"sent a score of {samples:g} samples, but said that it has {declared:,}")


def count_place(form: Tree) -> int | None:
    """Return the index of the tensor with the number of samples, which is the reply's weight; None if there is none.

    This tensor is the field `samples` of the reply's NamedTuple, as in FedAvg's `Update`.
    """
    if "samples" not in getattr(form, "_fields", ()):
        return None
    before = [leaf for part in form[: form._fields.index("samples")] for leaf in leaves(part, but=ClientState)]
    return len(before) if isinstance(form.samples, Tensor) and form.samples.numel() == 1 else None


def check_count(reply: Reply, place: int, declared: int | None) -> None:
    """Raise BadMessage for an impossible number of samples, or for more than the client says it has.

    Args:
        reply: the client's reply.
        place: index of the number of samples among the reply's tensors.
        declared: how many training samples the client says it has; None if it does not say.
    """
    leaf = reply.tensors[place]
    samples = float(leaf)
    if samples < 1 or not samples.is_integer():
        raise BadMessage(f"sent an update made from {samples:g} samples, which is not a count")
    if declared is not None and samples > float(torch.tensor(declared, dtype=leaf.dtype)):
        raise BadMessage(f"sent an update made from {samples:g} samples, but said that it has {declared:,}")


def norm_outliers(replies: dict[int, Reply], limit: float) -> dict[int, str]:
    """Return the clients with a vector more than `limit` times as long as the cohort's median vector; 0 for no limit.

    For an even number of replies, the median is the lower of the two middle values. With fewer than three replies no
    client is returned. Of two replies, nobody knows which one is wrong: a client could send a tiny vector to have the
    other client left out.
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
    """Return the norm of a tensor; 0 for integers and booleans. It is finite only if all numbers are finite."""
    if not leaf.is_floating_point():
        return 0.0
    norm = float(torch.linalg.vector_norm(leaf))
    return norm if isfinite(norm) else float(torch.linalg.vector_norm(leaf.double()))  # the square overflowed


def _type_and_shape(leaf: Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
