"""Processes of the serial engine: forked once, so that they share the data without copies."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from pefll.backend.native import pooled
from pefll.core import process
from pefll.core.errors import PefllError
from pefll.core.plugins import OwnCodeFailed, fault
from pefll.core.tree import Tree, map_tree
from pefll.core.wording import argument
from pefll.engines.cohort import Ids
from pefll.engines.settings import keep_freed_memory, set_for_engines
from pefll.engines.wire import pack, unpack
from pefll.methods.contract import ClientState, Each, Everyone, Method

SHARES = 4  # of a cohort's clients, at most, for each process
PROGRESS_SECONDS = 0.5  # between two calls of `on_progress` while no reply comes

# This process's ends of all pipes. A forked process gets a copy of each, also of those of other threads. `process.lock`
# guards changes and forks.
_open_pipes: set[Connection] = set()

RunHere = Callable[[Callable[..., Tree], Ids, int, "list[Everyone | Each]", dict[str, int]], Tree]


def can_fork() -> bool:
    """Whether processes can be forked: the platform must support it, and CUDA must not have started."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class Workers:
    """A fixed set of processes, each with the federation and the method at the time of its fork.

    Args:
        run_here: runs a task on clients in the calling process.
        method: its functions are the tasks.
        processes: their number.
    """

    def __init__(self, run_here: RunHere, method: Method[Any], processes: int) -> None:
        # The first use imports for seconds: once here, not in every process.
        torch.func.grad(torch.square)(torch.zeros(()))
        pooled.works()  # likewise, and all processes get the same answer
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            with process.lock:
                mine, theirs = context.Pipe()
                _open_pipes.add(mine)
                self._pipes.append(mine)
                worker = context.Process(
                    target=_serve, args=(theirs, run_here, method), daemon=True, name="pefll-worker"
                )
                worker.start()
                theirs.close()
            self._processes.append(worker)
        # Runs before multiprocessing waits for its processes: these ignore its SIGTERM.
        atexit.register(self.close)

    def run(
        self,
        task: str,
        ids: Ids,
        round_: int,
        arguments: list[Everyone | Each],
        static: dict[str, int],
        on_progress: Callable[[bool], None] | None = None,
    ) -> Tree:
        """Run a method's task on clients, shared among the processes, and return the replies in order.

        An idle process gets the next few clients: clients and cores differ in speed. With `on_progress` it gets one
        client at a time, so that each is reported; see `BaseCohort`.
        """
        kinds = ["each" if isinstance(argument, Each) else "everyone" for argument in arguments]
        number = len(ids) if on_progress is not None else min(len(ids), SHARES * len(self._pipes))
        shares = np.array_split(np.arange(len(ids)), number)

        def message(share: Ids) -> bytes:
            part = slice(int(share[0]), int(share[-1]) + 1)
            values = [
                map_tree(lambda leaf: leaf[part], argument.value) if isinstance(argument, Each) else argument.value
                for argument in arguments
            ]
            header = {"task": task, "ids": ids[share].tolist(), "round": round_, "kinds": kinds, "static": static}
            return pack(*values, **header)

        replies = self._send_all([partial(message, share) for share in shares], on_progress)
        return map_tree(lambda *parts: torch.cat(parts), *replies)

    def _send_all(self, messages: list[Callable[[], bytes]], on_progress: Callable[[bool], None] | None) -> list[Tree]:
        """Send each message to the next idle process and return the replies in the messages' order."""
        patience = None if on_progress is None else PROGRESS_SECONDS
        waiting = list(enumerate(messages))[::-1]
        replies: dict[int, Tree] = {}
        at_work: dict[Connection, int] = {}
        idle = list(self._pipes)
        try:
            while waiting or at_work:
                for pipe in idle[: len(waiting)]:
                    place, message = waiting.pop()
                    self._send(pipe, message())
                    at_work[pipe] = place
                idle = [pipe for pipe in wait(list(at_work), patience) if isinstance(pipe, Connection)]
                if on_progress is not None and not idle:
                    on_progress(False)
                for pipe in idle:
                    place = at_work.pop(pipe)
                    replies[place] = self._receive(pipe)
                    if on_progress is not None:
                        on_progress(isinstance(replies[place], ClientState))
        except Exception:
            for pipe in at_work:  # the next call must not read replies to this one
                with suppress(EOFError, OSError):
                    pipe.recv_bytes()
            raise
        except BaseException:  # Ctrl-C: do not wait for replies, which may take minutes
            self._kill()
            raise
        return [replies[place] for place in range(len(messages))]

    def close(self) -> None:
        """End the processes."""
        atexit.unregister(self.close)
        with process.lock:
            for pipe in self._pipes:
                pipe.close()
            _open_pipes.difference_update(self._pipes)
        try:
            ends = time.monotonic() + 5
            for worker in self._processes:
                worker.join(timeout=max(0.0, ends - time.monotonic()))
        finally:
            self._kill()

    def _kill(self) -> None:
        """Kill all processes."""
        for worker in self._processes:
            worker.kill()
        for worker in self._processes:
            worker.join()

    def _send(self, pipe: Connection, message: bytes) -> None:
        try:
            pipe.send_bytes(message)
        except OSError as error:
            raise _worker_died() from error

    def _receive(self, pipe: Connection) -> Tree:
        try:
            header, trees = unpack(pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise _worker_died() from error
        if "sentence" in header:
            raise PefllError(header["sentence"], code=header["code"])
        if "traceback" in header:
            text = f"a client's process failed:\n{header['traceback']}"
            raise RuntimeError(text) from (OwnCodeFailed(header["fault"]) if header["fault"] else None)
        return trees[0]


def _worker_died() -> PefllError:
    return PefllError(
        f"a worker process ended unexpectedly (out of memory?); resume the run, or use {argument('processes', 1)}",
        code="PEFLL-E013",
    )


def _serve(pipe: Connection, run_here: RunHere, method: Method[Any]) -> None:
    # The fork copied other workers' pipes. While these copies are open, those workers do not notice the server's end.
    for other in _open_pipes:
        other.close()
    # Ctrl-C, SIGTERM of a batch system and the end of a terminal reach the whole group. The server decides when to
    # stop; when it ends, for whatever reason, the pipe closes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_for_engines("float32")
    keep_freed_memory(True)
    kinds: dict[str, Callable[[Tree], Everyone | Each]] = {"each": Each, "everyone": Everyone}
    while True:
        try:
            header, trees = unpack(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        arguments: list[Everyone | Each] = [
            kinds[kind](tree) for kind, tree in zip(header["kinds"], trees, strict=True)
        ]
        ids = np.asarray(header["ids"], dtype=np.int64)
        try:
            task = getattr(method, header["task"])
            reply = pack(run_here(task, ids, header["round"], arguments, header["static"]))
        except PefllError as error:
            reply = pack(sentence=error.args[0], code=error.code)
        except Exception as error:  # noqa: BLE001 - the server raises it again with this text
            reply = pack(traceback=traceback.format_exc(), fault=fault(error))
        try:
            pipe.send_bytes(reply)
        except OSError:
            return
