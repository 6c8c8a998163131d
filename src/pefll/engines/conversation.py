"""A function that stops in the middle to ask for something, as a generator that yields what it asks for.

A generator can only stop in its own body, and a method's round asks deep inside a call. So the function runs in a
thread of its own, which works only while somebody waits for it: at any time one of the two goes on, never both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Executor
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Abandoned(BaseException):
    """Nobody waits for the answer any more; raised where it was asked for, so that the function ends."""


def conversation(function: Callable[[Callable[[Any], Any]], T], thread: Executor) -> Generator[Any, Any, T]:
    """Run `function(ask)` in a thread.

    Args:
        function: calls `ask(question)` as often as it likes, which returns the answer.
        thread: of one worker, with nothing else to do.

    Yields:
        Each question; what is sent back is the answer.

    Returns:
        What the function returned. What it raised is raised here.
    """
    questions: SimpleQueue[tuple[Any] | None] = SimpleQueue()  # None at the end
    answers: SimpleQueue[tuple[Any] | Abandoned] = SimpleQueue()

    def ask(question: Any) -> Any:
        questions.put((question,))
        answer = answers.get()
        if isinstance(answer, Abandoned):
            raise answer
        return answer[0]

    def whole() -> T:
        try:
            return function(ask)
        finally:
            questions.put(None)

    result = thread.submit(whole)
    ended = False
    try:
        while (asked := questions.get()) is not None:
            answers.put(((yield asked[0]),))
        ended = True
    finally:
        if not ended:  # closed, or interrupted while the thread was at work: wherever it is, it asks once more or ends
            answers.put(Abandoned())
            while questions.get() is not None:
                answers.put(Abandoned())
    return result.result()
