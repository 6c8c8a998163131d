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
    by_indices,
    dirichlet,
    federation_from_arrays,
    federation_from_dataset,
    federation_from_file,
    federation_from_frame,
    federation_from_partitioner,
    load_samples,
    make_federation,
    natural,
    read_samples,
    samples_from_arrays,
    summarise,
)
from pefll.experiments.tuning import tune
from pefll.methods import (
    APFL,
    METHODS,
    ODPFLHN,
    BaseMethod,
    Ditto,
    FedAvg,
    FedBABU,
    FedPer,
    FedProx,
    FedRep,
    KNNPer,
    LGFedAvg,
    Local,
    PeFLL,
    PeFLLPlus,
    PeFLLPrior,
    PerFedAvg,
    PFedHN,
    PFedMe,
    Scaffold,
)
from pefll.models import replace_batchnorm
from pefll.report.comparison import Comparison, compare
from pefll.runs.halves import Embedder, Generator
from pefll.runs.personal import PersonalModel
from pefll.tasks import TASKS, BaseTask, Classification, Metric, MultiLabel, Regression, Task
from pefll.training.callbacks import Callback, EarlyStopping
from pefll.training.checking import check_method
from pefll.training.client_models import Predictions
from pefll.training.cost import Cost, cost_of_new_client
from pefll.training.figures import Accuracy, Evaluation
from pefll.training.fitting import RunsFailed, fit, fit_seeds
from pefll.training.predicting import EachPredictions, predict_each
from pefll.training.run import ClientsFailed, Run, load
from pefll.training.tensorboard import TensorBoard
from pefll.training.trackio import Trackio
from pefll.training.wandb import WandB
from pefll.version import __version__

__all__ = [
    "APFL",
    "METHODS",
    "ODPFLHN",
    "TASKS",
    "Accuracy",
    "BaseMethod",
    "BaseTask",
    "Callback",
    "Classification",
    "ClientsFailed",
    "Comparison",
    "Cost",
    "Ditto",
    "EachPredictions",
    "EarlyStopping",
    "Embedder",
    "Evaluation",
    "FedAvg",
    "FedBABU",
    "FedPer",
    "FedProx",
    "FedRep",
    "Federation",
    "Generator",
    "KNNPer",
    "LGFedAvg",
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
    "Predictions",
    "Regression",
    "Run",
    "RunsFailed",
    "Samples",
    "Scaffold",
    "Stopped",
    "Task",
    "TensorBoard",
    "Trackio",
    "WandB",
    "__version__",
    "by_class",
    "by_indices",
    "check_method",
    "compare",
    "cost_of_new_client",
    "dirichlet",
    "federation_from_arrays",
    "federation_from_dataset",
    "federation_from_file",
    "federation_from_frame",
    "federation_from_partitioner",
    "fit",
    "fit_seeds",
    "load",
    "load_samples",
    "make_federation",
    "natural",
    "predict_each",
    "read_samples",
    "replace_batchnorm",
    "samples_from_arrays",
    "summarise",
    "tune",
]
