"""Where commands print: results to the standard output, notes and progress to the standard error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.segment import Segment

from pefll.core.errors import PefllError
from pefll.core.progress import say
from pefll.core.wording import harmless

# Exit codes. 1 is a failed check, or an error of this package.
REFUSED = 2  # an error that the user can correct
SOME_FAILED = 3  # some clients have no result, but the others have
INTERRUPTED = 130  # after Ctrl-C; typer uses it too


class SomeClientsFailed(PefllError):
    """Some clients have no result, but the others have."""


class _Harmless(Console):
    """A console that prints texts without control characters; its own colours and bars stay."""

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """Yield the segments of something printable. Names in it may come from a stranger's file."""
        for one in super().render(*args, **options):
            yield one if one.control else one._replace(text=harmless(one.text))


@contextmanager
def noting() -> Iterator[None]:
    """Inside the block, warnings to users are kept; at its end, each is printed once as a note.

    Warnings to developers, such as another library's DeprecationWarning, follow the usual filters.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for sentence in dict.fromkeys(str(one.message) for one in caught):
                say(err, f"note: {sentence}")


out, err = _Harmless(soft_wrap=True), _Harmless(stderr=True, soft_wrap=True)
