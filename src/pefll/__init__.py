"""Personalized federated learning by learning to learn: a model for every client, also for unseen ones.

import pefll

federation = pefll.federation_from_arrays(x, y, client)      # one client per value of `client`
run = pefll.fit(federation, "pefll", rounds=500)             # train
print(run.evaluate())                                        # seen and unseen clients
model = run.personalize(x_new, y_new)                        # an nn.Module for an unseen client
"""

from pefll.core.errors import PefllError
from pefll.core.signals import Stopped
from pefll.data import (
    Federation,
    Samples,
    by_class,
    dirichlet,
    federation_from_arrays,
    federation_from_frame,
    load_samples,
    make_federation,
    natural,
    read_samples,
    samples_from_arrays,
    summarise,
)
from pefll.methods import (
    METHODS,
    BaseMethod,
    FedAvg,
    FedRep,
    KNNPer,
    Local,
    PeFLL,
    PeFLLPlus,
    PeFLLPrior,
    PerFedAvg,
    PFedHN,
    PFedMe,
)
from pefll.runs.personal import PersonalModel
from pefll.tasks import TASKS, BaseTask, Classification, Metric, MultiLabel, Regression, Task
from pefll.training.callbacks import Callback, EarlyStopping
from pefll.training.checking import check_method
from pefll.training.cost import Cost, cost_of_new_client
from pefll.training.evaluation import Accuracy, Evaluation
from pefll.training.fitting import RunsFailed, fit, fit_seeds
from pefll.training.run import ClientsFailed, Run, load
from pefll.training.tensorboard import TensorBoard
from pefll.version import __version__

__all__ = [
    "METHODS",
    "TASKS",
    "Accuracy",
    "BaseMethod",
    "BaseTask",
    "Callback",
    "Classification",
    "ClientsFailed",
    "Cost",
    "EarlyStopping",
    "Evaluation",
    "FedAvg",
    "FedRep",
    "Federation",
    "KNNPer",
    "Local",
    "Metric",
    "MultiLabel",
    "PFedHN",
    "PFedMe",
    "PeFLL",
    "PeFLLPlus",
    "PeFLLPrior",
    "PefllError",
    "PerFedAvg",
    "PersonalModel",
    "Regression",
    "Run",
    "RunsFailed",
    "Samples",
    "Stopped",
    "Task",
    "TensorBoard",
    "__version__",
    "by_class",
    "check_method",
    "cost_of_new_client",
    "dirichlet",
    "federation_from_arrays",
    "federation_from_frame",
    "fit",
    "fit_seeds",
    "load",
    "load_samples",
    "make_federation",
    "natural",
    "read_samples",
    "samples_from_arrays",
    "summarise",
]
