"""Names in the cells of a terminal's tables: folded at spaces, and within a long word only after punctuation."""

from __future__ import annotations

import re

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

MOST = 14  # a word of more characters may be divided; "classification" may not
_PIECES = re.compile(r"[^=:/_.,-]*[=:/_.,-]+|[^=:/_.,-]+")


class Folded:
    """A text for a cell of a table."""

    def __init__(self, text: str) -> None:
        self._text = text

    @staticmethod
    def least(text: str) -> int:
        """Return the number of columns that a text needs."""
        return min(MOST, max(map(len, text.split()), default=0))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [line for part in self._text.split("\n") for line in fold(part, max(1, options.max_width))]
        yield Text("\n".join(lines))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.least(self._text), max(map(len, self._text.split("\n"))))


def fold(text: str, width: int) -> list[str]:
    """Return a text as lines of at most `width` characters; a part between commas stays together if it fits."""
    parts = [f"{part}," for part in text.split(", ")]
    parts[-1] = parts[-1][:-1]
    lines: list[str] = []
    for word in (word for part in parts for word in ([part] if len(part) <= width else part.split()) if word):
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for part in [word] if len(word) <= width else _PIECES.findall(word):
            for at in range(0, len(part), width):
                piece = part[at : at + width]
                if len(lines[-1]) + len(piece) <= width:
                    lines[-1] += piece
                else:
                    lines.append(piece)
    return lines or [""]
