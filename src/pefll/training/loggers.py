"""Loggers by name, as `pefll train --log tensorboard,trackio,wandb` gives them."""

from __future__ import annotations

from collections.abc import Callable

from pefll.core.errors import unknown
from pefll.training.callbacks import Callback
from pefll.training.logger import Logger
from pefll.training.tensorboard import TensorBoard
from pefll.training.trackio import Trackio
from pefll.training.wandb import WandB

LOGGERS: dict[str, Callable[[], Logger]] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WandB}


def loggers_of(names: str) -> list[Callback]:
    """Return the loggers of a text with names and commas; PefllError for an unknown name or a missing package."""
    wanted = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    for name in wanted:
        if name not in LOGGERS:
            raise unknown("logger", name, LOGGERS)
    return [LOGGERS[name]() for name in wanted]
