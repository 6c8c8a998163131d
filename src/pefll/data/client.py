"""What one client sees of itself: its own samples, and its own random draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pefll.core import randomness
from pefll.data.federation import TRAIN, Federation

# Whole splits are visited in blocks of at most this many samples, so that memory does not grow with a client's data.
BLOCK = 512


class Batch(NamedTuple):
    """Samples of one client.

    Attributes:
        x: [b, ...] as the networks take it.
        y: int64 [b].
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
        if values.is_cuda:
            # Not as a product: cuBLAS chooses in which order to add by how many clients there are.
            return ((self.weight[:, None] if values.dim() > 1 else self.weight) * values).sum(dim=0)
        return torch.matmul(self.weight, values)


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of a client, one for each step; made when they are asked for.

    Attributes:
        federation: the arrays.
        rows: int64 [steps, b], whose samples.
        labels: int64 [steps, b].
        weight: [b].
        dtype: of the networks' inputs.
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
        """Return the batch of a step, int64 [], that is known only where the samples are."""
        rows, labels = (each.index_select(0, step.view(1)).squeeze(0) for each in (self.rows, self.labels))
        return Batch(self.federation.take(rows, self.dtype), labels, self.weight)


@dataclass(frozen=True, eq=False)
class Client:
    """One client in one round. Under `torch.func.vmap` its numbers are those of all clients of a cohort at once.

    Attributes:
        federation: the arrays; only the rows of this client are ever read.
        seed: of the run.
        id: int64 [], the client's number.
        round: int64 [].
        offset: int64 [3], where its rows start, for each split.
        count: int64 [3], how many they are.
        capacity: the most samples, for each split, that a client mapped together with this one has. Equal to `count`
            for a client on its own; larger counts are padded.
        dtype: of the networks' inputs.
    """

    federation: Federation
    seed: int
    id: Tensor
    round: Tensor
    offset: Tensor
    count: Tensor
    capacity: tuple[int, int, int]
    dtype: torch.dtype = torch.float32

    def batches(self, purpose: str, size: int | None, steps: int) -> Batches:
        """Return `steps` batches, each a fresh random choice of `size` different training samples.

        Args:
            purpose: names the draw; the same name in the same round gives the same batches again.
            size: samples per batch; None for the whole training split. A client with fewer gives all it has.
            steps: how many batches.
        """
        width = self.capacity[TRAIN] if size is None else min(size, self.capacity[TRAIN])
        place = torch.arange(width, device=self.count.device)
        weight = (place < self.count[TRAIN]).to(self.dtype)
        if size is None:
            chosen = torch.remainder(place, self.count[TRAIN]).expand(steps, width)
        else:
            draws = randomness.spread(randomness.key(self.seed, purpose, self.round, self.id), steps)
            chosen = randomness.choose(draws, self.count[TRAIN], width)
        rows = self._rows(self.offset[TRAIN] + chosen)
        labels = self.federation.y[rows]  # of all steps at once: they are small
        return Batches(self.federation, rows, labels, weight, self.dtype)

    def epochs(self, purpose: str, size: int, epochs: int) -> tuple[Batches, Tensor]:
        """Return batches for some passes over the training samples, and how many of them are this client's.

        Each batch is drawn afresh, as in `batches`; a pass has as many of them as hold all samples. Clients mapped
        together get as many batches as the largest of them needs, and stop each after its own number.

        Args:
            purpose: names the draw.
            size: samples per batch.
            epochs: how many passes.

        Returns:
            The batches, and int64 [].
        """
        most = -(-self.capacity[TRAIN] // size)
        own = (self.count[TRAIN] + size - 1) // size
        return self.batches(purpose, size, epochs * most), epochs * own

    def everything(self, split: int = TRAIN) -> Iterator[Batch]:
        """Yield all samples of a split in blocks."""
        for start in range(0, self.capacity[split], BLOCK):
            stop = min(start + BLOCK, self.capacity[split])
            place = torch.arange(start, stop, device=self.count.device)
            weight = (place < self.count[split]).to(self.dtype)
            inside = torch.minimum(place, (self.count[split] - 1).clamp(min=0))
            rows = self._rows(self.offset[split] + inside)
            yield Batch(self.federation.take(rows, self.dtype), self.federation.y[rows], weight)

    def has_class(self) -> Tensor:
        """Return which classes occur among the training labels, bool [classes]."""
        place = torch.arange(self.capacity[TRAIN], device=self.count.device)
        inside = torch.remainder(place, self.count[TRAIN])  # padding repeats labels that are there anyway
        labels = self.federation.y[self.federation.rows[self.offset[TRAIN] + inside]]
        names = torch.arange(self.federation.classes, device=self.count.device)
        return (labels[:, None] == names).any(dim=0)

    def label_shares(self) -> Tensor:
        """Return the share of each class among the training labels, [classes]; equal shares for a client without any.

        A sample without a label has -1.
        """
        place = torch.arange(self.capacity[TRAIN], device=self.count.device)
        weight = (place < self.count[TRAIN]).to(self.dtype)
        labels = self.federation.y[self._rows(self.offset[TRAIN] + torch.remainder(place, self.count[TRAIN]))]
        names = torch.arange(self.federation.classes, device=self.count.device)
        counts = torch.matmul(weight, (labels[:, None] == names).to(self.dtype))
        labelled = counts.sum()
        return torch.where(labelled > 0, counts / labelled.clamp(min=1), torch.ones_like(counts) / len(counts))

    def _rows(self, place: Tensor) -> Tensor:
        # Padding of a split that ends with the arrays may point past their end.
        return self.federation.rows[place.clamp(max=len(self.federation.rows) - 1)]
