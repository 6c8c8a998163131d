"""Losses and metrics of all tasks against torch and scikit-learn, and settings that make no sense."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as reference

import pefll
from pefll.core.errors import PefllError
from pefll.data.client import Batch
from pefll.tasks import Classification, Metric, MultiLabel, Regression
from pefll.tasks.classification import is_cross_entropy
from pefll.tasks.names import name_of, task_of
from pefll.tasks.sums import layout_of, rows_of
from pefll.training.evaluation import Measure

RANDOM = torch.Generator().manual_seed(0)
SCORES = 2 * torch.randn(400, 3, generator=RANDOM)
CLASSES = torch.randint(0, 3, (400,), generator=RANDOM)
SETS = (torch.rand(400, 3, generator=RANDOM) < 0.3).long()
NUMBERS = 100 + 30 * torch.randn(400, 2, generator=RANDOM)
STANDARD = Regression(mean=(100.0, 90.0), deviation=(30.0, 20.0))


def figures(task, output, y, clients=4):
    """Return the metrics of a task, with sums added over batches and clients."""
    measure = Measure(task, layout_of(task, y, 3 if task.labels == "classes" else 0))
    known, rows = torch.ones(3, dtype=torch.bool), []
    for part in torch.arange(len(y)).chunk(clients):
        weight = (torch.rand(len(part), generator=RANDOM) < 2).float()  # all samples
        padded = Batch(part, torch.cat([y[part], y[:1]]), torch.cat([weight, torch.zeros(1)]))  # padding has no weight
        rows.append(
            rows_of([sum_[None] for sum_ in task.measure(torch.cat([output[part], output[:1]]), padded, known)])
        )
    return measure.group(torch.cat(rows).numpy())._asdict()


@pytest.mark.parametrize(
    ("task", "wanted"),
    [
        (
            Classification(3, label_smoothing=0.2),
            F.cross_entropy(SCORES, CLASSES, reduction="none", label_smoothing=0.2),
        ),
        (
            Classification(3, class_weights=[1, 2, 0.5]),
            F.cross_entropy(SCORES, CLASSES, reduction="none", weight=torch.tensor([1, 2, 0.5])),
        ),
        (
            Classification(3, focal=2.0),
            (1 - SCORES.softmax(1)[range(400), CLASSES]) ** 2 * F.cross_entropy(SCORES, CLASSES, reduction="none"),
        ),
        (Classification(3, own_loss=lambda scores, y: scores[:, 0] * y), SCORES[:, 0] * CLASSES),
    ],
)
def test_losses_of_classification(task, wanted):
    torch.testing.assert_close(task.loss(SCORES, CLASSES), wanted)
    torch.testing.assert_close(torch.vmap(task.loss)(SCORES[None], CLASSES[None])[0], wanted)
    assert not is_cross_entropy(task)  # so that no kernel of cross-entropy trains instead


def test_gaps_of_opposite_signs_do_not_cancel_in_the_calibration_error():
    """Two samples with confidence 0.6 are right, two with 0.9 are wrong: the gaps are 0.4 and 0.9."""
    confidence = torch.tensor([0.6, 0.6, 0.9, 0.9])
    scores = torch.stack([confidence, (1 - confidence) / 2, (1 - confidence) / 2], dim=1).log()
    found = figures(Classification(3, extra=["calibration_error"]), scores, torch.tensor([0, 0, 1, 2]), clients=2)
    assert found["calibration_error"] == pytest.approx((0.4 + 0.9) / 2, abs=1e-6)


def test_a_metric_with_several_values_per_sample_has_their_mean():
    distance = Metric("distance", lambda output, y: (output - y).abs(), smaller_is_better=True)
    task = Regression(extra=[distance], mean=STANDARD.mean, deviation=STANDARD.deviation)
    found = figures(task, SCORES[:, :2], NUMBERS)
    assert found["distance"] == pytest.approx(found["mae"], rel=1e-5)


def test_an_own_loss_replaces_that_of_numbers_and_of_sets():
    """A regression's function gets standardised numbers, that of sets gets floats."""
    regression = Regression(own_loss=lambda output, y: (output - y).abs()[:, 0], mean=(100.0, 90.0), deviation=(30, 20))
    wanted = (SCORES[:, 0] - (NUMBERS[:, 0] - 100) / 30).abs()
    torch.testing.assert_close(regression.loss(SCORES[:, :2], NUMBERS), wanted)
    sets = MultiLabel(3, own_loss=lambda output, y: (1 - (2 * y - 1) * output).clamp(min=0).sum(dim=1))
    hinge = F.relu(1 - torch.where(SETS > 0, SCORES, -SCORES)).sum(dim=1)
    torch.testing.assert_close(sets.loss(SCORES, SETS), hinge)


@pytest.mark.parametrize("name", ["mse", "huber"])
def test_losses_of_regression_are_of_standardised_numbers(name):
    task = Regression(loss_name=name, delta=0.7, mean=STANDARD.mean, deviation=STANDARD.deviation)
    wanted = (NUMBERS - torch.tensor([100.0, 90.0])) / torch.tensor([30.0, 20.0])
    reference_loss = F.mse_loss if name == "mse" else lambda *given, **more: F.huber_loss(*given, **more, delta=0.7)
    expected = reference_loss(SCORES[:, :2], wanted, reduction="none").mean(1)
    torch.testing.assert_close(task.loss(SCORES[:, :2], NUMBERS), expected)
    torch.testing.assert_close(task.encode(NUMBERS), wanted)
    torch.testing.assert_close(task.predict(wanted), NUMBERS)


def test_losses_of_sets():
    weights = torch.tensor([1.0, 3.0, 2.0])
    wanted = F.binary_cross_entropy_with_logits(SCORES, SETS.float(), pos_weight=weights, reduction="none").mean(1)
    torch.testing.assert_close(MultiLabel(3, positive_weights=weights.numpy()).loss(SCORES, SETS), wanted)
    assert MultiLabel(3).predict(SCORES).equal(SCORES > 0)


def test_metrics_of_classification():
    found = figures(Classification(3, extra=["macro_f1", "auc", "calibration_error"]), SCORES, CLASSES)
    right = SCORES.argmax(1) == CLASSES
    assert list(found)[:5] == ["per_sample", "per_client", "masked", "worst_tenth", "loss"]
    assert found["per_sample"] == pytest.approx(float(right.float().mean()))
    assert found["macro_f1"] == pytest.approx(reference.f1_score(CLASSES, SCORES.argmax(1), average="macro"))
    # The log-odds of each class against the others rank samples as its probability does.
    area = reference.roc_auc_score(CLASSES, SCORES.softmax(1), average="macro", multi_class="ovr")
    assert found["auc"] == pytest.approx(area, abs=3e-3)
    sure = SCORES.softmax(1).max(1).values
    group = (sure * 15).long()
    gaps = [abs(float((sure - right.float())[group == each].sum())) for each in range(15)]
    assert found["calibration_error"] == pytest.approx(sum(gaps) / 400, rel=1e-4)


def test_metrics_of_sets():
    found = figures(MultiLabel(3, extra=["auc"]), SCORES, SETS)
    chosen = (SCORES > 0).long()
    for average in ("micro", "macro"):
        assert found[f"{average}_f1"] == pytest.approx(reference.f1_score(SETS, chosen, average=average))
    assert found["accuracy"] == pytest.approx(float((chosen == SETS).float().mean()))
    assert found["auc"] == pytest.approx(reference.roc_auc_score(SETS, SCORES), abs=3e-3)


def test_metrics_of_regression_are_in_the_unit_of_the_labels():
    near = Metric("near", lambda output, y: (output - y).abs().max(dim=1).values < 40, bounds=(0, 1))
    task = Regression(mean=STANDARD.mean, deviation=STANDARD.deviation, extra=[near])
    output = SCORES[:, :2] / 4
    found, numbers = figures(task, output, NUMBERS), task.predict(output)
    assert next(iter(found)) == "rmse"
    assert found["rmse"] == pytest.approx(reference.mean_squared_error(NUMBERS, numbers) ** 0.5)
    assert found["mae"] == pytest.approx(reference.mean_absolute_error(NUMBERS, numbers))
    assert found["r2"] == pytest.approx(reference.r2_score(NUMBERS, numbers), abs=1e-3)
    assert found["near"] == pytest.approx(float(((numbers - NUMBERS).abs().max(1).values < 40).float().mean()))
    each = [float((numbers - NUMBERS)[part].square().mean().sqrt()) for part in torch.arange(400).chunk(4)]
    assert found["per_client"] == pytest.approx(np.mean(each))
    assert found["worst_tenth"] == pytest.approx(max(each))  # an error: the worst client has the largest


def test_a_metric_that_is_not_defined_is_null_in_records():
    task = Regression(mean=(0.0,), deviation=(1.0,))
    measure = Measure(task, layout_of(task, torch.zeros(1), 0))
    sums = rows_of(
        [part[None] for part in task.measure(torch.ones(1, 1), Batch(None, torch.ones(1), torch.ones(1)), None)]
    )
    assert measure.evaluation(sums.numpy(), 1).rows()["seen"]["r2"] is None
    assert measure.evaluation(sums.numpy(), 1).rows()["unseen"] is None


def module_loss(output, y):
    return (output - y).abs().mean(dim=1)


@pytest.mark.parametrize(
    "task",
    [
        Regression(),
        Regression(loss_name="huber", delta=0.25, mean=[1 / 3], deviation=[2.0]),
        Regression(own_loss=module_loss, standardise=False),
        Classification(3, label_smoothing=0.1, class_weights=[1, 2, 3], extra=["auc", "macro_f1"]),
        MultiLabel(4, threshold=0.3),
    ],
)
def test_a_task_comes_back_from_its_text(task):
    pefll.core.plugins.allow("tests.tasks.test_losses:module_loss")
    assert task_of(name_of(task)) == task


def test_what_cannot_be_named_cannot_be_read_back():
    assert name_of(Classification(7)) == ""  # as runs of earlier versions
    with pytest.raises(PefllError, match=r"own_loss.*task=.*PEFLL-S516"):
        task_of(name_of(Regression(own_loss=lambda output, y: y)))


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: Classification(3, label_smoothing=1.0), "PEFLL-S511"),
        (lambda: Classification(3, focal=-1), "PEFLL-S511"),
        (lambda: Classification(3, class_weights="1,2"), "PEFLL-S510"),
        (lambda: Classification(3, own_loss=3), "PEFLL-S512"),
        (lambda: Classification(3, own_loss=module_loss, focal=1.0), "PEFLL-S504"),
        (lambda: Classification(3, extra=["rmse"]), "PEFLL-A101"),
        (lambda: Classification(3, extra=[print]), "PEFLL-S501"),
        (lambda: Classification(3, extra=3), "PEFLL-S513"),
        (lambda: Regression(loss_name="l7"), "PEFLL-A101"),
        (lambda: Regression(mean=[1.0], deviation=[0.0]), "PEFLL-S506"),
        (lambda: Regression(delta=float("nan")), "PEFLL-A005"),
        (lambda: MultiLabel(threshold=0), "PEFLL-S511"),
        (lambda: task_of("regresion"), "regression.*PEFLL-A101"),
        (lambda: task_of("regression delta"), "PEFLL-S515"),
        (lambda: task_of("regression delta=much"), "PEFLL-S517"),
        (lambda: task_of("regression gamma=2"), "PEFLL-A101"),
        (lambda: task_of("os:getcwd"), "PEFLL-M001"),
    ],
)
def test_settings_that_make_no_sense(make, code):
    with pytest.raises(PefllError, match=code):
        make()
