"""Code of the same name: what tells losses, networks and schedules apart, in reports and when a run is resumed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from torch import nn

import pefll
from pefll.core.errors import PefllError
from pefll.core.schedules import sha256_of
from pefll.engines.round_plan import RoundPlan
from pefll.report import show
from pefll.runs.fingerprints import differing_part
from pefll.tasks.checking import probe
from tests.federations import ragged
from tests.tasks.labels import with_numbers, with_sets

QUICK: dict[str, Any] = {
    "clients_per_round": 2, "local_steps": 1, "eval_every": 2, "rounds": 4, "processes": 1, "device": "cpu",
}  # fmt: skip
LOSSES = {
    name: pefll.Classification(own_loss=loss)
    for name, loss in {
        "one": lambda scores, y: nn.functional.cross_entropy(scores, y, reduction="none"),
        "other": lambda scores, y: 100 * nn.functional.cross_entropy(scores, y, reduction="none"),
    }.items()
}
FLAT = int(np.prod(ragged().input_shape))


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(FLAT, width), nn.ReLU(), nn.Linear(width, ragged().classes))


class Quits(pefll.Callback):
    def on_evaluation(self, run, row):
        raise ValueError


def stopped(out: Path, **given: Any) -> None:
    with pytest.raises(PefllError, match="PEFLL-T550"):
        pefll.fit(ragged(), "fedavg", out=out, callbacks=[Quits()], **QUICK | given)


@pytest.mark.parametrize("given", [{"task": LOSSES}, {"model": {"one": network(8), "other": network(16)}}])
def test_runs_with_other_code_of_the_same_name_are_other_rows(tmp_path, given):
    ((argument, values),) = given.items()
    for name, value in values.items():
        for seed in (0, 1):
            out = tmp_path / name / f"seed-{seed}"
            pefll.fit(ragged(seed=seed), "fedavg", seed=seed, out=out, **QUICK | {argument: value})
    found = pefll.compare(tmp_path)
    assert [len(row.runs.runs) for row in found.rows] == [2, 2]
    assert {row.runs.label for row in found.rows} == {"fedavg (one/seed-0)", "fedavg (other/seed-0)"}
    assert "Left out" not in found.note


def test_a_repeated_seed_is_named(tmp_path):
    for name in ("a", "b"):
        pefll.fit(ragged(), "fedavg", task=LOSSES["one"], out=tmp_path / name, **QUICK)
    found = pefll.compare(tmp_path)
    assert [len(row.runs.runs) for row in found.rows] == [1]
    assert found.note.endswith("Left out, as the same settings and seed as another run: b.")
    console = Console(record=True, width=200, file=io.StringIO())
    show([tmp_path / "a", tmp_path / "b"], tmp_path, console=console)
    assert "the same settings and seed as another run: b." in console.export_text()


def test_seeds_with_other_partitions_have_one_fingerprint(tmp_path):
    """A regression takes the mean and the deviation of labels from the data, which a seed divides."""
    tasks = [pefll.Regression(own_loss=lambda output, y: (output - y).square().mean(dim=1)) for _ in range(2)]
    probes = [probe(task, with_numbers(seed=seed)) for seed, task in enumerate(tasks)]
    assert probes[0]
    assert probes[0] == probes[1]


def test_every_kind_of_task_has_a_fingerprint():
    for task, data in (
        (pefll.Classification(extra=["macro_f1", "auc"]), ragged()),
        (pefll.Regression(), with_numbers()),
        (pefll.MultiLabel(), with_sets()),
    ):
        assert len(probe(task, data)) > 12
    huber, far = (probe(pefll.Regression(loss_name="huber", delta=delta), with_numbers()) for delta in (1, 20))
    assert differing_part({"task": huber}, {"task": far}) == "task", "which differ for large errors only"


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"task": (LOSSES["one"], LOSSES["other"])}, "loss or metrics of the task are"),
        ({"lr_schedule": (lambda t: 0.9**t, lambda t: 0.1)}, "lr_schedule is"),
        ({"sampling": (lambda t, n, c, rng: range(c), lambda t, n, c, rng: range(1, c + 1))}, "sampling is"),
    ],
)
def test_a_run_is_not_resumed_with_other_code_of_the_same_name(tmp_path, given, part, finished):
    ((argument, (first, second)),) = given.items()
    if finished:
        pefll.fit(ragged(), "fedavg", out=tmp_path / "a", **QUICK | {argument: first})
    else:
        stopped(tmp_path / "a", **{argument: first})
    with pytest.raises(PefllError, match=f"a: the {part} not what the run was started with") as error:
        pefll.fit(ragged(), "fedavg", out=tmp_path / "a", **QUICK | {argument: second})
    assert error.value.code == "PEFLL-R123"
    pefll.fit(ragged(), "fedavg", out=tmp_path / "a", **QUICK | {argument: first})


def test_an_extended_run_has_the_same_schedule_in_its_first_rounds(tmp_path):
    schedule = lambda t: 0.9**t  # noqa: E731
    pefll.fit(ragged(), "fedavg", out=tmp_path / "a", lr_schedule=schedule, **QUICK)
    pefll.fit(ragged(), "fedavg", out=tmp_path / "a", lr_schedule=schedule, **QUICK | {"rounds": 6})
    plans = [RoundPlan(schedule).fingerprints(rounds, 5, 2) for rounds in (4, 6)]
    assert plans[0] != plans[1]
    assert plans[0] == {"lr_schedule": sha256_of(schedule, 4)}


def test_a_checkpoint_of_an_earlier_version_is_resumed(tmp_path):
    stopped(tmp_path / "a", task=LOSSES["one"])
    (manifest,) = (tmp_path / "a" / "checkpoints").glob("*/manifest.json")
    from pefll.runs import manifest as files

    found = files.read(manifest.parent)
    metadata = {name: value for name, value in found.metadata.items() if name != "fingerprints"}
    manifest.write_text(json.dumps(files.write(*found._replace(metadata=metadata))))
    assert pefll.fit(ragged(), "fedavg", task=LOSSES["one"], out=tmp_path / "a", **QUICK).summary["rounds"] == 4


def test_numbers_are_compared_up_to_rounding():
    one: dict[str, Any] = {"model": [3, 1.0, None], "lr_schedule": "ab"}
    assert differing_part(one, {"model": [3, 1.0001, None]}) == ""
    assert differing_part(one, {"model": [3, 1.01, None]}) == "model"
    assert differing_part(one, {"model": [3, 1.0, 0.0]}) == "model"
    assert differing_part(one, {"model": [3, 1.0]}) == "model"
    assert differing_part(one, {"model": [10**400, 1.0, None]}) == "model"
    assert differing_part(one, {"lr_schedule": "cd"}) == "lr_schedule"
    assert differing_part(one, {"task": [1.0]}) == differing_part(one, None) == ""
