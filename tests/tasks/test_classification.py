"""Classification as a task: labels, loss, sums and what is made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pefll.core.errors import PefllError
from pefll.data.client import Batch
from pefll.data.samples import Samples
from pefll.tasks import Classification

SCORES = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 5.0], [9.0, 0.0, 0.0]])
LABELS = torch.tensor([0, 2, 2, 1])
BATCH = Batch(torch.zeros(4, 1), LABELS, torch.tensor([1.0, 1.0, 1.0, 0.0]))  # the last one is padding


def test_the_loss_is_cross_entropy_alone_and_mapped():
    task, wanted = Classification(3), F.cross_entropy(SCORES, LABELS, reduction="none")
    torch.testing.assert_close(task.loss(SCORES, LABELS), wanted)
    torch.testing.assert_close(torch.vmap(task.loss)(SCORES[None], LABELS[None])[0], wanted)


def test_sums_leave_padding_out_and_masking_keeps_to_known_classes():
    sums = Classification(3).measure(SCORES, BATCH, torch.tensor([True, False, True]))
    assert (float(sums.samples), float(sums.correct), float(sums.masked)) == (3, 2, 3)
    torch.testing.assert_close(sums.loss, F.cross_entropy(SCORES[:3], LABELS[:3], reduction="sum"))
    figures = Classification(3).metrics(sums)
    assert next(iter(figures)) == "accuracy"  # the first one chooses the best round
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert figures["masked"] == 1


def test_labels_are_encoded_and_predicted():
    task = Classification(3)
    assert task.outputs == 3
    assert task.encode(torch.tensor([2, 0, -1])).tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert task.predict(SCORES).tolist() == [0, 1, 2, 0]


def test_samples_of_other_classes_are_refused():
    samples = Samples(x=np.zeros((4, 2), dtype=np.float32), y=np.arange(4) % 2, classes=2)
    Classification(2).check(samples)
    with pytest.raises(PefllError, match="PEFLL-S020"):
        Classification(3).check(samples)
