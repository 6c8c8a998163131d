"""Tasks define the loss, the predictions and the metrics of a model's output."""

from pefll.tasks.classification import Classification, Score
from pefll.tasks.contract import BaseTask, Task
from pefll.tasks.metrics import Metric
from pefll.tasks.multilabel import MultiLabel
from pefll.tasks.names import TASKS
from pefll.tasks.regression import Regression

__all__ = ["TASKS", "BaseTask", "Classification", "Metric", "MultiLabel", "Regression", "Score", "Task"]
