"""Tasks define the loss, the predictions and the metrics of a model's output."""

from pefll.tasks.classification import Classification, Score
from pefll.tasks.contract import Task

__all__ = ["Classification", "Score", "Task"]
