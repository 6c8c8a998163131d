"""A function that stops in the middle to ask for something, as a generator that yields what it asks for.

A generator can only stop in its own body, and a method's round asks deep inside a call. So the function runs in a
thread of its own, which works only while somebody waits for it: at any time one of the two goes on, never both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from pefll.engines.settings import AT_WORK

T = TypeVar("T")
Jobs = SimpleQueue[Callable[[], None] | None]


class Abandoned(BaseException):
    """Nobody waits for the answer any more; raised where it was asked for, so that the function ends."""


@contextmanager
def worker() -> Iterator[Jobs]:
    """Yield the queue of a thread that does one job after another; it ends with the block.

    A bare thread, and not an executor's: Ctrl-C may come at any time, also in the middle of what an executor does with
    its locks, and then nobody could end it any more.
    """
    jobs: Jobs = SimpleQueue()

    def work() -> None:
        AT_WORK.set()  # a new thread has torch's default settings, whatever the engine's thread has
        while (job := jobs.get()) is not None:
            job()

    thread = Thread(target=work, daemon=True)
    try:
        thread.start()
        yield jobs
    finally:
        jobs.put(None)
        if thread.ident is not None:
            thread.join()


def conversation(function: Callable[[Callable[[Any], Any]], T], jobs: Jobs) -> Generator[Any, Any, T]:
    """Run `function(ask)` in a thread.

    Args:
        function: calls `ask(question)` as often as it likes, which returns the answer.
        jobs: of a `worker` with nothing else to do.

    Yields:
        Each question; what is sent back is the answer.

    Returns:
        What the function returned. What it raised is raised here.
    """
    said: SimpleQueue[tuple[str, Any]] = SimpleQueue()  # "asks", "returned" or "raised", and what
    answers: SimpleQueue[tuple[Any] | None] = SimpleQueue()  # None where nobody waits any more

    def ask(question: Any) -> Any:
        said.put(("asks", question))
        answer = answers.get()
        if answer is None:
            answers.put(None)  # for whatever is asked on the way out
            raise Abandoned
        return answer[0]

    def whole() -> None:
        try:
            returned = function(ask)
        except BaseException as error:  # noqa: BLE001 (raised again by who waits)
            said.put(("raised", error))
        else:
            said.put(("returned", returned))

    context = copy_context()
    try:
        jobs.put(lambda: context.run(whole))
        while True:
            how, what = said.get()
            if how == "asks":
                answers.put(((yield what),))
            elif how == "raised":
                raise what
            else:
                return what  # type: ignore[no-any-return]
    finally:
        # Closed, or interrupted wherever it was: nothing is waited for here, and the function finds this at the latest
        # when it asks again.
        answers.put(None)
