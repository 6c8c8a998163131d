"""Personalized federated learning by learning to learn: a model for every client, also for those never seen.

import pefll

federation = pefll.federation_from_arrays(x, y, client)      # who has what
run = pefll.fit(federation, "pefll", rounds=500)             # train
print(run.evaluate())                                        # seen and unseen clients
model = run.personalize(x_new, y_new)                        # an nn.Module for a client never seen
"""

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
from pefll.errors import PefllError
from pefll.evaluation import Accuracy, Evaluation
from pefll.lockstep import Stopped
from pefll.methods import METHODS, FedAvg, Local, PeFLL
from pefll.personal import PersonalModel
from pefll.run import Run, RunsFailed, fit, fit_seeds, load
from pefll.version import __version__

__all__ = [
    "METHODS",
    "Accuracy",
    "Evaluation",
    "FedAvg",
    "Federation",
    "Local",
    "PeFLL",
    "PefllError",
    "PersonalModel",
    "Run",
    "RunsFailed",
    "Samples",
    "Stopped",
    "__version__",
    "by_class",
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
