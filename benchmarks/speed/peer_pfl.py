"""FedAvg on Apple's pfl-research: its simulated backend and PyTorch model in one process, as in its own benchmarks.

There is no evaluation and no output of metrics. It has one thread, with which it is fastest per CPU-second. Samples are
prepared once, on the device that trains, which is the fastest choice for its data sets. A user takes its samples in
order. We set the number of epochs so that they make k steps, because pfl's own step limit ends with the first epoch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.setting import CLIP, DECAY, LEARNING_RATE, MOMENTUM, Work
from pefll.core.errors import PefllError

NEVER = 1 << 30


class WithLoss(nn.Module):
    """A client's model with the functions that pfl calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        scores: Tensor = self.module(x)
        return scores

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Return the loss; pfl calls this only in the first round, which is never timed."""
        from pfl.metrics import Weighted

        return {"loss": Weighted(float(self.loss(x, y).detach()) * len(y), len(y))}


def run(work: Work, turns: Iterable[int], device: str = "cpu") -> Tensor:
    """Run rounds; after each round pfl asks a callback whether to continue, and there a turn can end."""
    os.environ["PFL_PYTORCH_DEVICE"] = device
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    logging.getLogger("pfl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    setting = work.setting
    per_epoch = -(-setting.samples // setting.batch)
    if setting.steps > per_epoch and setting.steps % per_epoch:
        raise PefllError(f"pfl trains whole epochs of {per_epoch} steps, and {setting.steps} steps are not")
    epochs = setting.steps // per_epoch if setting.steps > per_epoch else None
    x, y = work.inputs(device)

    def dataset(user: int) -> Any:
        rows = work.federation.indices(user).to(device)
        return PyTorchTensorDataset((x[rows], y[rows]), user_id=str(user))

    users = FederatedDataset(dataset, get_user_sampler("minimize_reuse", range(setting.clients)))
    module = WithLoss(work.module())
    model = PyTorchModel(
        model=module,
        local_optimizer_create=lambda parameters, lr: torch.optim.SGD(parameters, lr, MOMENTUM, weight_decay=DECAY),
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )

    class Turns(TrainingProcessCallback):  # type: ignore[misc, unused-ignore]
        """Continues while there are turns."""

        def __init__(self, rounds: Iterator[int]) -> None:
            self.rounds = rounds
            self.left = next(rounds, 0)

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            """Count the round; at the end of a turn, wait for the next turn."""
            del aggregate_metrics, model, central_iteration
            self.left -= 1
            if self.left == 0:
                self.left = next(self.rounds, 0)
            return self.left == 0, Metrics()

    callback = Turns(iter(turns))
    if not callback.left:
        return work.flat(module)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=NEVER,
            evaluation_frequency=NEVER,
            train_cohort_size=setting.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        model,
        NNTrainHyperParams(
            local_batch_size=setting.batch,
            local_num_epochs=epochs,
            local_num_steps=None if epochs else setting.steps,
            local_learning_rate=LEARNING_RATE,
            local_max_grad_norm=CLIP,
        ),
        callbacks=[callback],
        send_metrics_to_platform=False,
    )
    return work.flat(module)
