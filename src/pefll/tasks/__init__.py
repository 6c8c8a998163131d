"""What a model's output means: its loss, its prediction, the sums behind its metrics."""

from pefll.tasks.classification import Classification, Score
from pefll.tasks.contract import Task

__all__ = ["Classification", "Score", "Task"]
