"""The examples of docs/data.md run as a reader would copy them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import pefll
from pefll.training.personalizing import write_each
from tests.data.test_partitioned import Partitioner
from tests.federations import flat

pandas = pytest.importorskip("pandas")
PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def names():
    rng = np.random.default_rng(0)
    client = np.repeat(["ann", "bob", "eve"], 4)
    x, y = rng.normal(size=(12, 3)).astype(np.float32), np.arange(12) % 2
    frame = pandas.DataFrame(x, columns=["age", "height", "income"]).assign(
        city=["Ulm", "Graz"] * 6, note="text", joined="2024-01-31", liked=y, user_id=client
    )
    images = Partitioner(img=[np.zeros((8, 8), dtype=np.uint8)] * 12, label=y)
    return {"pefll": pefll, "torch": torch, "x": x, "y": y, "client": client, "frame": frame, "partitioner": images}


def make_models(frame):
    """Make the folder of models that the page makes by a command."""
    run = pefll.fit(pefll.federation_from_frame(frame, "liked", "user_id", drop=["note", "joined"]), rounds=1)
    write_each(run, run._owned(frame, None, None), Path("models"))


@pytest.mark.parametrize("example", [each for each in EXAMPLES if "predict_each" not in each])
def test_an_example_runs(example, capsys):
    assert len(example.splitlines()) <= 15
    space = names()
    exec(example, space)
    assert space["federation"].num_unseen == (0 if "frame" in example else 1)
    assert ("age standardised" in capsys.readouterr().out) == ("columns_report(" in example)


def test_predictions_join_the_rows_that_they_are_of(tmp_path, monkeypatch, capsys):
    (example,) = [each for each in EXAMPLES if "predict_each" in each]
    monkeypatch.chdir(tmp_path)
    space = names()
    space["frame"].index += 100
    make_models(space["frame"])
    space["frame"] = space["frame"][::-1]
    exec(example, space)
    joined, found = space["joined"], space["found"]
    assert joined.drop(columns=["predicted", "probability"]).equals(space["frame"].loc[joined.index])
    assert (found.loc[joined.index, "user_id"] == joined.user_id).all()
    assert float(capsys.readouterr().out) == (found.predicted == space["frame"].liked).mean()


@pytest.mark.parametrize("word", ["by_indices", "from_partitioner", "from_dataset"])
def test_both_engines_reach_the_same_weights(word):
    """In float64, so that equal weights after training show equal gradients."""
    (code,) = [example for example in EXAMPLES if word in example]
    space = names()
    exec(code, space)
    settings = {"rounds": 2, "local_steps": 3, "clients_per_round": 1, "model": "mlp", "precision": "float64"}
    states = [
        flat(pefll.fit(space["federation"], "pefll", **settings, engine=engine, device="cpu", processes=1).final)
        for engine in ("serial", "vector")
    ]
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-11)


def test_all_examples_are_found():
    assert len(EXAMPLES) == PAGE.count("```") // 2 == 6
