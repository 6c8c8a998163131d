"""One client's view of a federation: its own samples and its own random draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pefll.core import randomness
from pefll.core.reference import reference
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN

# Number of samples in a block of `Client.everything`. Blocks limit the memory for clients with much data.
BLOCK = 512


class Batch(NamedTuple):
    """Samples of one client.

    Attributes:
        x: [b, ...], inputs of the networks.
        y: [b] or [b, k], labels; see `Samples`.
        weight: [b], 1 for a sample and 0 for padding.
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of values [b] or [b, n] over the samples, without the padding."""
        return self.sum(values) / self.weight.sum()

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of values [b] or [b, n] over the samples, without the padding."""
        return weighted_sum(self.weight, values)


@reference
def weighted_sum(weight: Tensor, values: Tensor) -> Tensor:
    """Return the sum over b of values [b] or [b, n], weighted by `weight` [b]."""
    return torch.matmul(weight, values)


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of a client, one per step. A batch's inputs are gathered when the batch is read.

    Attributes:
        federation: has the arrays of samples.
        rows: int64 [steps, b], indices of the samples in these arrays.
        labels: [steps, b] or [steps, b, k].
        weight: [b], as in `Batch`.
        dtype: type of the networks' inputs.
    """

    federation: Federation
    rows: Tensor
    labels: Tensor
    weight: Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            yield Batch(self.federation.take(self.rows[step], self.dtype), self.labels[step], self.weight)

    def at(self, step: Tensor) -> Batch:
        """Return the batch of a step, given as a tensor int64 [] on the device of the samples."""
        rows, labels = (each.index_select(0, step.view(1)).squeeze(0) for each in (self.rows, self.labels))
        return Batch(self.federation.take(rows, self.dtype), labels, self.weight)


@dataclass(frozen=True, eq=False)
class Client:
    """One client in one round. Under `torch.func.vmap`, one such object stands for all clients of a cohort.

    Attributes:
        federation: has the arrays of samples; only this client's rows are read.
        seed: seed of the run.
        id: int64 [], the client's number.
        round: int64 [], number of the round.
        offset: int64 [3], start of the client's rows, per split.
        count: int64 [3], number of the client's samples, per split.
        capacity: the largest count per split among all clients of a `vmap`; a smaller client's samples are padded.
        dtype: type of the networks' inputs.
        lr_factor: factor of the learning rates in this round, a number or [] on the device; None for 1.
    """

    federation: Federation
    seed: int
    id: Tensor
    round: Tensor
    offset: Tensor
    count: Tensor
    capacity: tuple[int, int, int]
    dtype: torch.dtype = torch.float32
    lr_factor: float | Tensor | None = None

    def rate(self, lr: float) -> float | Tensor:
        """Return a learning rate in this round: `lr`, times the factor of the run's schedule."""
        return lr if self.lr_factor is None else lr * self.lr_factor

    def batches(self, purpose: str, size: int | None, steps: int) -> Batches:
        """Return `steps` batches, each a random choice of `size` different training samples.

        The same purpose in the same round gives the same batches. If size is None or exceeds the client's number of
        samples, each batch has all of them.
        """
        width = self.capacity[TRAIN] if size is None else min(size, self.capacity[TRAIN])
        place, weight = self._places(TRAIN, 0, width)
        if size is None:
            chosen = torch.remainder(place, self.count[TRAIN]).expand(steps, width)
        else:
            draws = randomness.spread(randomness.key(self.seed, purpose, self.round, self.id), steps)
            chosen = randomness.choose(draws, self.count[TRAIN], width)
        rows = self._rows(self.offset[TRAIN] + chosen)
        return Batches(self.federation, rows, self.federation.y[rows], weight, self.dtype)

    def epochs(self, purpose: str, size: int, epochs: int) -> tuple[Batches, Tensor]:
        """Return batches for `epochs` passes over the training samples, and how many the client must use, int64 [].

        Batches are drawn as in `batches`. All clients of a cohort get the number of batches that the largest client
        needs. Each client uses only the first ones, as many as it needs.
        """
        most = -(-self.capacity[TRAIN] // size)
        own = (self.count[TRAIN] + size - 1) // size
        return self.batches(purpose, size, epochs * most), epochs * own

    def everything(self, split: int = TRAIN) -> Iterator[Batch]:
        """Yield all samples of a split as batches of at most `BLOCK` samples."""
        for start in range(0, self.capacity[split], BLOCK):
            place, weight = self._places(split, start, min(start + BLOCK, self.capacity[split]))
            inside = torch.minimum(place, (self.count[split] - 1).clamp(min=0))
            rows = self._rows(self.offset[split] + inside)
            yield Batch(self.federation.take(rows, self.dtype), self.federation.y[rows], weight)

    def mean(self, values: Callable[[Batch], Tensor], split: int = TRAIN) -> Tensor:
        """Return the mean [n] of `values(batch)` [b, n] over all samples of a split, which must not be empty."""
        first, *rest = (batch.sum(values(batch)) for batch in self.everything(split))
        return sum(rest, start=first) / self.count[split]

    def has_class(self) -> Tensor:
        """Return which classes occur among the training labels, bool [classes]."""
        # Padding repeats the client's own labels, so it adds no class.
        return self._has_label()[0].any(dim=0)

    def label_shares(self) -> Tensor:
        """Return the share of each class among the training labels, [classes]; equal shares if all labels are -1."""
        has_label, weight = self._has_label()
        counts = torch.matmul(weight, has_label.to(self.dtype))
        labelled = counts.sum()
        return torch.where(labelled > 0, counts / labelled.clamp(min=1), torch.ones_like(counts) / len(counts))

    def _has_label(self) -> tuple[Tensor, Tensor]:
        """Return which class each training sample has, bool [capacity, classes], and the weights [capacity]."""
        place, weight = self._places(TRAIN, 0, self.capacity[TRAIN])
        labels = self.federation.y[self._rows(self.offset[TRAIN] + torch.remainder(place, self.count[TRAIN]))]
        return labels[:, None] == torch.arange(self.federation.classes, device=self.count.device), weight

    def _places(self, split: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the numbers start..stop-1, and the weight of each: 1 for a sample of the split, 0 for padding."""
        place = torch.arange(start, stop, device=self.count.device)
        return place, (place < self.count[split]).to(self.dtype)

    def _rows(self, place: Tensor) -> Tensor:
        # Padding of the last client may point past the end of the arrays.
        return self.federation.rows[place.clamp(max=len(self.federation.rows) - 1)]
