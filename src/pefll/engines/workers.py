"""Processes of the serial engine: forked once, so that the data is shared and nothing of it is ever copied or sent."""

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
from pefll.methods.contract import Each, Everyone, Method, Own

# The clients of a cohort are dealt out in up to so many shares for each process.
SHARES = 4
PROGRESS_SECONDS = 0.5  # so often somebody who waits for replies looks up, if asked to

# The ends of all pipes that this process holds: a process that is forked gets a copy of each, also of those that other
# threads have opened. Changed, as processes are forked, under `process.lock`.
_held: set[Connection] = set()

RunHere = Callable[[Callable[..., Tree], Ids, int, "list[Everyone | Each]", dict[str, int]], Tree]


def can_fork() -> bool:
    """Whether processes can be forked here: the platform must, and CUDA must not have started."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class Workers:
    """A fixed set of processes, each with the federation and the method as they were when it was forked.

    Args:
        run_here: runs a task on some clients in the process that calls it.
        method: whose functions are the tasks.
        processes: how many.
    """

    def __init__(self, run_here: RunHere, method: Method[Any], processes: int) -> None:
        # Its first use imports for seconds; once, here, instead of in every process.
        torch.func.grad(torch.square)(torch.zeros(()))
        pooled.works()  # likewise, and so that all processes have the same answer
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            with process.lock:
                mine, theirs = context.Pipe()
                _held.add(mine)
                self._pipes.append(mine)
                worker = context.Process(
                    target=_serve, args=(theirs, run_here, method), daemon=True, name="pefll-worker"
                )
                worker.start()
                theirs.close()
            self._processes.append(worker)
        # Runs before multiprocessing waits for its processes, which ignore its SIGTERM.
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
        """Run a method's task on clients, shared out among the processes, and return the replies in order.

        Whoever is done gets the next few clients: some clients have more to do than others, and some cores less time.
        With `on_progress` they are given out one by one, so that it hears of each; see `BaseCohort`.
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

        replies = self._hand_out([partial(message, share) for share in shares], on_progress)
        return map_tree(lambda *parts: torch.cat(parts), *replies)

    def _hand_out(self, messages: list[Callable[[], bytes]], on_progress: Callable[[bool], None] | None) -> list[Tree]:
        """Send each message to the next process that is free, and return the replies in the messages' order."""
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
                        on_progress(isinstance(replies[place], Own))
        except Exception:
            for pipe in at_work:  # a reply to this call must not be taken for one to the next
                with suppress(EOFError, OSError):
                    pipe.recv_bytes()
            raise
        except BaseException:  # Ctrl-C: nobody wants the replies, which may be minutes away
            self._kill()
            raise
        return [replies[place] for place in range(len(messages))]

    def close(self) -> None:
        """End the processes."""
        atexit.unregister(self.close)
        with process.lock:
            for pipe in self._pipes:
                pipe.close()
            _held.difference_update(self._pipes)
        try:
            ends = time.monotonic() + 5
            for worker in self._processes:
                worker.join(timeout=max(0.0, ends - time.monotonic()))
        finally:
            self._kill()

    def _kill(self) -> None:
        """End processes that are at work."""
        for worker in self._processes:
            worker.kill()
        for worker in self._processes:
            worker.join()

    def _send(self, pipe: Connection, message: bytes) -> None:
        try:
            pipe.send_bytes(message)
        except OSError as error:
            raise _died() from error

    def _receive(self, pipe: Connection) -> Tree:
        try:
            header, trees = unpack(pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise _died() from error
        if "sentence" in header:
            raise PefllError(header["sentence"], code=header["code"])
        if "traceback" in header:
            text = f"a client's process failed:\n{header['traceback']}"
            raise RuntimeError(text) from (OwnCodeFailed(header["fault"]) if header["fault"] else None)
        return trees[0]


def _died() -> PefllError:
    return PefllError(
        f"a worker process ended unexpectedly (out of memory?); resume the run, or use {argument('processes', 1)}",
        code="PEFLL-E013",
    )


def _serve(pipe: Connection, run_here: RunHere, method: Method[Any]) -> None:
    # Copies of other workers' pipes came along with the fork; open, they would hide the server's end from them.
    for other in _held:
        other.close()
    # Ctrl-C, SIGTERM of a batch system and the end of a terminal reach the whole group; the server decides when to
    # stop, and when it is gone, however it went, the pipe ends.
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
        except Exception as error:  # noqa: BLE001 - the server re-raises it with this text
            reply = pack(traceback=traceback.format_exc(), fault=fault(error))
        try:
            pipe.send_bytes(reply)
        except OSError:
            return
