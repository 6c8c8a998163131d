"""Tasks: loss, prediction and metrics of a model's output."""

from pefll.tasks.classification import Classification, Score
from pefll.tasks.contract import Task

__all__ = ["Classification", "Score", "Task"]
