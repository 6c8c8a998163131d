"""Answers messages on a client: it runs tasks of the method on the client's samples, and nothing else."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from inspect import signature
from itertools import islice
from logging import ERROR, INFO
from typing import Any

from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.tree import Tree, leaves
from pefll.engines.flower.client.client_store import ClientStore
from pefll.engines.flower.client.member import Member, node_name
from pefll.engines.flower.client.policy import Refusal
from pefll.engines.flower.protocol.message import (
    BadMessage,
    all_finite,
    header_of,
    pack,
    printable,
    read_numbers,
    tensors_of,
    write_numbers,
)
from pefll.engines.flower.protocol.names import ECHO, HELLO, KEPT, SENT, SHARED
from pefll.engines.settings import EngineSettings
from pefll.engines.wire import build
from pefll.methods.contract import ClientState, Method

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common.logger import log
except ImportError:
    raise PefllError("real clients need Flower: pip install flwr==1.41.0", code="PEFLL-F401") from None

# Keys in Flower's state of a node: the name of the cache, and the cached tensors.
_CACHE, _CACHED = "pefll.cache", "pefll.cached"

Trees = list[Tree]
Extra = Callable[[Member, dict[str, Any], Trees], dict[str, Any]]


class PefllClientApp(ClientApp):  # type: ignore[misc]
    """The ClientApp of all methods. Message types are train.TASK, query.TASK and evaluate.TASK.

    Args:
        extras: tasks that no method defines, by name. Each returns header fields for the reply.
    """

    def __init__(self, extras: Mapping[str, Extra] | None = None) -> None:
        super().__init__()
        self._extras = dict(extras or {})

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message."""
        return answer(message, context, self._extras)


class _SettingsHolder:
    """Stands for an open engine in `EngineSettings` while a message is answered."""


def answer(message: Message, context: Context, extras: Mapping[str, Extra] | None = None) -> Message:
    """Return the reply to a message.

    A ClientApp's process may end after one message, so it remembers nothing. Tensors that the client keeps are in its
    folder. Tensors that it caches for this round or evaluation are in Flower's context. Random numbers depend only on
    (seed, purpose, round, client). The client's own log has the full text of every error. The server learns only that
    there was an error, because the text may quote data.
    """
    header: dict[str, Any] = {}
    settings = _SettingsHolder()
    try:
        header = header_of(message.content, "client")
        member = Member.from_context(context)
        if header.get("agreement") != member.agreement.sha256:
            raise Refusal("was set up for another agreement than the server's", code="PEFLL-P012")
        member.policy.check_method(member.agreement.method)  # before the method's code is imported
        echo = {key: header[key] for key in ECHO} | {"name": member.name}
        EngineSettings.take(settings, keep_memory=False)  # one thread, so that sums have the same bits everywhere
        if header["task"] == HELLO:
            return Message(pack(echo | _hello(member), {}), reply_to=message)
        trees, missing, kept = _arguments(header, message.content, context.state, member)
        if missing:
            return Message(pack(echo | {"missing": missing}, {}), reply_to=message)
        if extras and header["task"] in extras:
            return Message(pack(echo | extras[header["task"]](member, header, trees), {}), reply_to=message)
        reply = run_task(member, header, trees, kept)
        return Message(pack(echo, {str(place): leaf for place, leaf in enumerate(reply)}), reply_to=message)
    except BadMessage as error:
        log(ERROR, "the server %s", error)
        return _refusal(message, context, f"could not read the request: the server {error}")
    except Refusal as error:
        log(ERROR, "this client %s%s", error, error.detail and f" ({error.detail})")
        return _refusal(message, context, str(error))
    except PefllError as error:
        log(ERROR, "%s", error)
        return _refusal(message, context, f"could not do {header.get('task')}; its own log says why")
    except Exception as error:  # noqa: BLE001 - Flower would send the text of the error to the server
        log(ERROR, "%s", traceback.format_exc())
        return _refusal(message, context, f"failed in {header.get('task')} with {type(error).__name__}")
    finally:
        EngineSettings.give_back(settings)


def task_of(method: Method[Any], name: str) -> Callable[..., Tree]:
    """Return a method's function for one client; BadMessage if `name` is not such a function."""
    # If a method has the list `client_tasks`, a server can ask only for those functions. Another function may return
    # private data: kNN-Per's `remember` returns features and labels of all samples.
    listed = name in getattr(method, "client_tasks", (name,))
    task = getattr(method, name, None) if listed and name.isidentifier() and not name.startswith("_") else None
    if not callable(task) or _first_parameter(getattr(task, "__func__", task), hasattr(task, "__self__")) != "client":
        raise BadMessage(f"asked for {name!r}, but {type(method).__name__} has no such client task")
    return task  # type: ignore[no-any-return]


def check_kept_arguments(method: Method[Any], task: Callable[..., Tree], kept: Collection[int]) -> None:
    """Raise Refusal if a kept tensor is used for an argument that the method's `kept_arguments` does not name.

    Otherwise a server could get a kept tensor: pFedMe's `train` of a kept model would send a model much like it.

    Args:
        method: the method of the agreement.
        task: a function of the method.
        kept: indices of the arguments with kept tensors; 0 is the first argument after the client.
    """
    names = list(signature(task).parameters)[1:]
    allowed = getattr(method, "kept_arguments", {}).get(task.__name__, ())
    for place in sorted(kept):
        name = names[place] if place < len(names) else str(place)
        if name not in allowed:
            raise Refusal(
                f"refuses to use kept tensors as {name!r} of {task.__name__!r}: {type(method).__name__} does not name "
                "this argument in `kept_arguments`",
                code="PEFLL-P013",
            )


@lru_cache(maxsize=64)
def _first_parameter(function: Callable[..., Any], bound: bool) -> str:
    return next(islice(signature(function).parameters, int(bound), None), "")


def run_task(member: Member, header: dict[str, Any], trees: Trees, kept: Collection[int] = ()) -> list[Tensor]:
    """Run a task on this client's samples, store the tensors that the client keeps, and return those that it sends.

    It raises Refusal, and stores nothing, if the owner does not allow the reply. The same happens if
    `check_kept_arguments` does not allow the indices `kept`.
    """
    method = member.method()
    task = task_of(method, header["task"])
    check_kept_arguments(method, task, kept)
    static = {str(name): int(value) for name, value in header["static"].items()}
    client = member.client(int(header["client"]), int(header["round"]), task_factor(header))
    reply = task(client, *trees, **static)
    sent = list(leaves(reply, but=ClientState))
    # Check this even if the client keeps all of the reply: the server can ask for scores of a kept model.
    describes = header["task"] in getattr(method, "describing_tasks", ())
    member.policy.check_reply(client, sum(leaf.numel() for leaf in sent), describes)
    own = [leaf for part in client_states(reply) for leaf in leaves(part)]
    if own:
        member.store().put(header["keep"], own)
    return sent


def task_factor(header: dict[str, Any]) -> float | None:
    """Return the factor of the learning rates in a request, or None for 1; BadMessage if it is no such factor."""
    value = header.get("lr_factor")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise BadMessage("sent a factor of learning rates that is not a finite number, 0 or more")
    return float(value)


def client_states(tree: Tree) -> list[ClientState]:
    """Return the parts of a reply that the client keeps, in the order of `leaves`."""
    if isinstance(tree, ClientState):
        return [tree]
    return [part for branch in tree for part in client_states(branch)] if isinstance(tree, tuple) else []


def _refusal(message: Message, context: Context, sentence: str) -> Message:
    # A refusal repeats no field of the request, because the request may be unreadable.
    return Message(pack({"name": node_name(context), "refusal": printable(sentence, 400)}, {}), reply_to=message)


def _hello(member: Member) -> dict[str, Any]:
    """Return the header fields of a reply to `hello`: the numbers of samples, if the owner tells them."""
    own = member.federation()  # read now, so that unusable data is found before training
    agreed = member.agreement
    if names := agreed.plan.names if agreed.plan else agreed.feature_names:
        log(INFO, "the server chose these columns of a table: %s", ", ".join(names))
    return {"counts": own.count[:, 0].tolist() if member.tells_counts else None}


def _arguments(
    header: dict[str, Any], content: RecordDict, state: RecordDict, member: Member
) -> tuple[Trees, list[str], set[int]]:
    """Return a task's arguments, the hashes of tensors that the cache lacks, and the indices of kept arguments.

    Args:
        header: says where each tensor is, in the field `places`; see `names.SENT` and the constants beside it.
        content: content of the message.
        state: Flower's state of this node, with a cache of shared tensors for this round or evaluation.
        member: this client.
    """
    if _CACHE in state and state[_CACHE]["name"] != header["cache"]:
        del state[_CACHE], state[_CACHED]
    sent = tensors_of(content)
    kept: dict[str, list[Tensor]] = {}
    values: list[Tensor] = []
    missing: list[str] = []
    store: ClientStore | None = None
    try:
        # Flower copies the state for every message, so it stays empty until there is something to cache.
        if _CACHE not in state and any(kind == SHARED for kind, _ in header["places"]):
            state[_CACHE], state[_CACHED] = ConfigRecord({"name": header["cache"]}), ConfigRecord()
        cached = state.get(_CACHED, {})
        for kind, what in header["places"]:
            if kind == SHARED:
                listed, numbers = write_numbers({what: sent[what]})
                cached[what] = [listed.encode(), numbers]
            if kind in (SENT, SHARED):
                values.append(sent[what].clone())
            elif kind == KEPT:
                store = store or member.store()
                name, _, place = what.partition(":")
                if name not in kept:
                    kept[name] = store.get(name)
                values.append(kept[name][int(place)])
            elif what in cached:
                listed, numbers = cached[what]
                values.append(read_numbers(listed.decode(), numbers)[what].clone())
            else:
                missing.append(what)
        if missing:
            return [], missing, set()
        for value in values:
            if not all_finite(value):
                raise BadMessage("sent NaN or infinity")
        each = iter(values)
        trees = [build(structure, each) for structure in header["trees"]]
        own = {id(value) for value, (kind, _) in zip(values, header["places"], strict=True) if kind == KEPT}
        return trees, [], {place for place, tree in enumerate(trees) if any(id(leaf) in own for leaf in leaves(tree))}
    except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
        raise BadMessage(f"sent arguments that do not fit together ({type(error).__name__})") from None
