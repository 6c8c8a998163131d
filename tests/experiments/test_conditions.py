"""A search counts trials of its own data, settings and code only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import pefll
from pefll.core.errors import PefllError
from pefll.experiments.grid_search import Search
from pefll.experiments.trials import Trials, tuned_settings
from pefll.runs.config import Config
from tests.federations import ragged
from tests.test_fingerprints import LOSSES, network

WIDTH = int(np.prod(ragged().input_shape))
RATES = {"client_lr": [1e-3, 0.1]}
QUICK: dict[str, Any] = {"grid": RATES, "rounds": 4, "clients_per_round": 3, "eval_every": 2, "engine": "vector"}


class Embedding(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.net, self.factor = nn.Linear(WIDTH, 4), factor

    def forward(self, x):
        return self.factor * self.net(x.flatten(1))


def other_data(seed: int = 0):
    data = ragged(seed=seed)
    return dataclasses.replace(data, x=data.x.flip(0))


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data": ({}, {"federation": other_data()}),
    "loss": ({"task": LOSSES["one"]}, {"task": LOSSES["other"]}),
    "model": ({"model": network(8)}, {"model": network(16)}),
    "embedding": (
        {"method": "pefll", "embedding": Embedding(1.0), "local_steps": 2},
        {"method": "pefll", "embedding": Embedding(3.0), "local_steps": 2},
    ),
    "lr_schedule": ({}, {"lr_schedule": "cosine"}),
    "function": ({"lr_schedule": lambda t: 0.5**t}, {"lr_schedule": lambda t: 0.1}),
    "sampling": ({}, {"sampling": "samples"}),
    "eval_every": ({}, {"eval_every": 1}),
    "precision": ({}, {"precision": "float64"}),
    "local_steps": ({}, {"local_steps": 1}),
}


def tuned(folder: Path, federation: Any = None, method: Any = "fedavg", **given: Any) -> Trials:
    data = ragged() if federation is None else federation
    return pefll.tune(data, method, out=folder / "runs", to=folder / "to", **QUICK | given)


@pytest.mark.parametrize("change", CHANGES)
def test_trials_of_another_search_do_not_count(tmp_path, change):
    first, second = CHANGES[change]
    mine = tuned(tmp_path / "shared", **first)
    theirs = tuned(tmp_path / "shared", **second)
    alone = tuned(tmp_path / "alone", **second)
    assert len(theirs.rows) == 4, "both searches have their trials in the file"
    assert theirs.best == alone.best
    assert theirs.ranking((0,)) == alone.ranking((0,))
    again = tuned(tmp_path / "shared", **first)
    assert again.rows == theirs.rows, "nothing is tried again"
    assert again.best == mine.best


def test_more_values_of_what_is_searched_join_the_earlier_ones(tmp_path):
    tuned(tmp_path)
    more = tuned(tmp_path, grid={"client_lr": [0.2]})
    assert [point["client_lr"] for point, _ in more.ranking((0,))] != [0.2]
    assert len(more.ranking((0,))) == 3
    fixed = Search(Config(method="fedavg", settings={"local_steps": 3}), {"client_lr": (0.1,)})
    assert fixed.includes({"client_lr": 0.7, "local_steps": 3})
    assert not fixed.includes({"client_lr": 0.1})


def test_rows_of_earlier_versions_count(tmp_path):
    first = tuned(tmp_path)
    kept = json.loads(first.path.read_text())
    for row in kept["trials"]:
        del row["conditions"], row["fingerprints"]
    first.path.write_text(json.dumps(kept))
    again = tuned(tmp_path)
    assert (again.rows, again.best) == (kept["trials"], first.best)
    assert tuned_settings("fedavg", "arrays", 8, tmp_path / "to").settings == first.best["settings"]


def test_a_search_has_no_callbacks(tmp_path):
    with pytest.raises(PefllError, match="PEFLL-X503"):
        tuned(tmp_path, callbacks=[pefll.EarlyStopping()])
