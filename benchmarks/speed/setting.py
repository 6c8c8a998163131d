"""The setting of a race: the model, the clients' samples, and the clients and batches of each round."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pefll.core import randomness
from pefll.core.plugins import allow
from pefll.data import DATASETS, Federation, Samples, load_samples
from pefll.data.assembly import assemble
from pefll.data.samples import TRAIN, Normalise
from pefll.engines.cohort import sample_cohort
from pefll.methods import Problem
from pefll.runs.problem import describe_problem

CLASSES = 10
CHARACTERS = 80  # of texts, as in LEAF's Shakespeare
# Where CIFAR-10 may lie, for processes that a contender's own process starts.
DATA_VARIABLE = "PEFLL_SPEED_DATA"
# Clients' images are drawn from a pool of this size; the number of different images does not change the work.
POOL = 10_000
PICTURE_STATISTICS = Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))

# Local SGD of every contender: FedAvg's defaults.
LEARNING_RATE, MOMENTUM, DECAY, CLIP = 1e-2, 0.9, 5e-5, 50.0


@dataclass(frozen=True)
class Setting:
    """The numbers of a race.

    Attributes:
        model: name of the clients' model.
        clients: n, number of all clients.
        cohort: c, number of clients in a round.
        steps: k, local steps of a client in a round.
        batch: samples in a step.
        samples: training samples of a client.
        shape: of a sample; three numbers make pictures, one makes features, or texts for the model lstm.
        descriptor: PeFLL's l; 0 for the paper's, which follows n.
    """

    model: str = "lenet"
    clients: int = 100
    cohort: int = 5
    steps: int = 50
    batch: int = 32
    samples: int = 320
    shape: tuple[int, ...] = (3, 32, 32)
    descriptor: int = 0

    @property
    def steps_per_round(self) -> int:
        """Client steps in a round, ck."""
        return self.cohort * self.steps

    def plain(self) -> dict[str, Any]:
        """Return the setting as a JSON object."""
        return dataclasses.asdict(self) | {"shape": list(self.shape)}

    @classmethod
    def from_plain(cls, numbers: dict[str, Any]) -> Setting:
        """Return the setting from the output of `plain`."""
        return cls(**(numbers | {"shape": tuple(numbers["shape"])}))


@dataclass(frozen=True, eq=False)
class Work:
    """A setting with its data: the input of a contender.

    Attributes:
        setting: the numbers.
        federation: the clients and their samples, which are all for training.
        seed: seed of the initial weights, the cohorts and the batches.
    """

    setting: Setting
    federation: Federation
    seed: int = 0

    @cached_property
    def problem(self) -> Problem:
        """The learning problem."""
        allow(self.setting.model)
        problem, _ = describe_problem(self.federation, self.setting.model)
        return problem

    def theta(self) -> Tensor:
        """Return the initial weights of FedAvg [D], which are the same as in our engines."""
        return self.problem.model.init(self.seed, "model")

    def module(self) -> nn.Module:
        """Return the client's model as an ordinary module, with the initial weights."""
        return self.problem.model.with_parameters(self.theta())

    def flat(self, module: nn.Module) -> Tensor:
        """Return a model's weights as one vector [D]."""
        return self.problem.model.flatten([value.detach().cpu() for value in module.parameters()])

    def cohort(self, round_: int) -> list[int]:
        """Return the clients of a round, which are the same as in our engines."""
        drawn: list[int] = sample_cohort(self.federation, self.seed, torch.tensor(round_), self.setting.cohort).tolist()
        return drawn

    def batches(self, round_: int, client: int) -> Tensor:
        """Return the samples of a client's steps, int64 [k, b], which are the same as in our FedAvg."""
        key = randomness.key(self.seed, "train", torch.tensor(round_), torch.tensor(client))
        keys = randomness.spread(key, self.setting.steps)
        count = self.federation.count[TRAIN, client]
        chosen = randomness.choose(keys, count, min(self.setting.batch, int(count)))
        return self.federation.rows[self.federation.offset[TRAIN, client] + chosen]

    def in_order(self, client: int) -> Tensor:
        """Return the samples of a client's steps if it takes its samples in order, int64 [k, b]."""
        rows = self.federation.indices(client)
        places = torch.arange(self.setting.steps * self.setting.batch) % len(rows)
        return rows[places].reshape(self.setting.steps, self.setting.batch)

    def inputs(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """Return all samples as inputs of the model, and their labels; other simulators also prepare samples once."""
        x = self.federation.prepare(self.federation.x, torch.float32)
        return x.to(device), self.federation.y.to(device)


def prepare(setting: Setting, data_dir: Path | None = None) -> Work:
    """Return a setting with its data.

    Args:
        setting: the numbers.
        data_dir: folder that may contain CIFAR-10; without it, random images of the same shape are used.
    """
    if len(setting.shape) == 3:
        samples, rows = _pictures(setting, data_dir)
    elif setting.model == "lstm":
        samples, rows = _texts(setting), np.arange(setting.clients * setting.samples) % POOL
    else:
        samples, rows = _features(setting), None
    owner = np.repeat(np.arange(setting.clients), setting.samples)
    split = np.zeros(len(owner), dtype=np.int8)
    return Work(setting, assemble(samples, owner, split, setting.clients, "equal shares", rows=rows))


def _pictures(setting: Setting, data_dir: Path | None) -> tuple[Samples, Any]:
    if data_dir is not None and setting.shape == (3, 32, 32) and DATASETS["cifar10"].found(data_dir):
        whole = load_samples("cifar10", data_dir)
        x, y, name = whole.x[:POOL], whole.y[:POOL], "cifar10"
    else:
        random = np.random.default_rng(0)
        x = random.integers(0, 256, size=(POOL, *setting.shape), dtype=np.uint8)
        y, name = random.integers(0, CLASSES, size=POOL), "made up"
    channels = setting.shape[0]
    statistics = Normalise(*((part * channels)[:channels] for part in PICTURE_STATISTICS))
    samples = Samples(x=x, y=y, classes=CLASSES, normalise=statistics, name=name)
    return samples, np.arange(setting.clients * setting.samples) % len(x)


def _texts(setting: Setting) -> Samples:
    random = np.random.default_rng(0)
    x = random.integers(0, CHARACTERS, size=(POOL, *setting.shape))
    y = random.integers(0, CHARACTERS, size=POOL)
    return Samples(x=x, y=y, classes=CHARACTERS, tokens=True, name="made up")


def _features(setting: Setting) -> Samples:
    # Filled in place, so that a million clients need no second array of this size.
    random = np.random.default_rng(0)
    x = np.empty((setting.clients * setting.samples, math.prod(setting.shape)), dtype=np.float32)
    random.standard_normal(dtype=np.float32, out=x)
    y = random.integers(0, CLASSES, size=len(x))
    return Samples(x=x, y=y, classes=CLASSES, name="made up")
