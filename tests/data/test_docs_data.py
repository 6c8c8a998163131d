"""The examples of docs/data.md run as a reader would copy them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import pefll
from tests.data.test_partitioned import Partitioner

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


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example, capsys):
    assert len(example.splitlines()) <= 15
    space = names()
    exec(example, space)
    assert space["federation"].num_unseen == (0 if "frame" in example else 1)
    assert ("age standardised" in capsys.readouterr().out) == ("report()" in example)


def test_all_examples_are_found():
    assert len(EXAMPLES) == PAGE.count("```") // 2 == 5
