"""Warnings at the line of a user's code, and not at one of this package."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def warn(sentence: str) -> None:
    """Give a UserWarning whose source is the line outside of this package that called it.

    Its own functions may lie between torch's, as with `torch.no_grad`, so the outermost of them counts.
    """
    frame: FrameType | None = sys._getframe()
    level = outermost = 1  # as in `warnings.warn`: 1 is this function
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            outermost = level
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, stacklevel=outermost + 1)
