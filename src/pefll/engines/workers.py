"""Worker processes of the serial engine. They are forked once, so that they share the data without copies."""

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

SHARES = 4  # a cohort is split into at most this many shares per process
PROGRESS_SECONDS = 0.5  # seconds between two calls of `on_progress` while no reply comes

# The server's ends of all pipes, also of pipes that other threads made. A forked process gets a copy of each.
# `process.lock` guards changes and forks.
_open_pipes: set[Connection] = set()

RunHere = Callable[..., Tree]  # see `SerialEngine.run_here`


def can_fork() -> bool:
    """Whether processes can be forked: the platform must support it, and CUDA must not have started."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class Workers:
    """A fixed set of processes. Each has a copy of the federation and of the method from the time of its fork.

    Args:
        run_here: runs a task on clients in the calling process.
        method: its functions are the tasks.
        processes: number of processes.
    """

    def __init__(self, run_here: RunHere, method: Method[Any], processes: int) -> None:
        pooled.works()  # compiles once, and all processes get the same answer
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
        # At exit, multiprocessing sends SIGTERM and waits. The workers ignore SIGTERM, so end them before that.
        atexit.register(self.close)

    def run(
        self,
        task: str,
        ids: Ids,
        round_: int,
        arguments: list[Everyone | Each],
        static: dict[str, int],
        on_progress: Callable[[bool], None] | None = None,
        lr_factor: float | None = None,
    ) -> Tree:
        """Run a method's task on clients, shared among the processes, and return the replies in order.

        An idle process gets the next few clients, because clients and cores differ in speed. With `on_progress` (see
        `BaseCohort`) a process gets one client at a time, so that each client is reported.
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
            return pack(*values, **header, lr_factor=lr_factor)

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
            for pipe in at_work:  # else the next call would read replies to this call
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
    # The fork copied the pipes of other workers. Those workers would not notice that the server has ended while a copy
    # is open.
    for other in _open_pipes:
        other.close()
    # Ctrl-C, SIGTERM and the end of a terminal reach all processes of the group. Only the server decides when to stop.
    # When the server ends, for any reason, the pipe closes.
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
            reply = pack(run_here(task, ids, header["round"], arguments, header["static"], None, header["lr_factor"]))
        except PefllError as error:
            reply = pack(sentence=error.args[0], code=error.code)
        except Exception as error:  # noqa: BLE001 - the server raises it again with this text
            reply = pack(traceback=traceback.format_exc(), fault=fault(error))
        try:
            pipe.send_bytes(reply)
        except OSError:
            return
