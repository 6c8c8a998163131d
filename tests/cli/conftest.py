"""The command line, called as from a shell, with small runs and small files for it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pefll.cli import main
from pefll.data import load_samples

SMALL = [
    "--clients",
    "8",
    "--clients-per-round",
    "2",
    "--rounds",
    "4",
    "--eval-every",
    "2",
    "--processes",
    "1",
    "--set",
    "local_steps=2",
]
DIGITS = ["--data", "digits", "--model", "mlp", *SMALL]


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def pefll(monkeypatch, capsys):
    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["pefll", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return Said(end.value.code or 0, out, err)

    return call


@pytest.fixture
def refused(pefll):
    """Call, expect exit code 2 and exactly one sentence, in which the pattern `match` is found, and return it."""

    def call(*arguments: object, match: str = "") -> str:
        said = pefll(*arguments)
        assert said.code == 2, said
        assert said.err.count("\n") == 1, said.err
        assert said.err.startswith("error: ")
        assert "Traceback" not in said.err + said.out
        assert re.search(match, said.err), said.err
        return said.err.removeprefix("error: ").rstrip("\n")

    return call


def trained(tmp_path_factory, name: str, *more: str) -> Path:
    folder = tmp_path_factory.mktemp("runs") / name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pefll", "train", *DIGITS, *more, "--out", str(folder)])
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    return folder


@pytest.fixture(scope="session")
def labelled(tmp_path_factory):
    return trained(tmp_path_factory, "labelled", "--checkpoint-every", "2")


@pytest.fixture(scope="session")
def unlabelled(tmp_path_factory):
    return trained(tmp_path_factory, "unlabelled", "--set", "embedding=mlp-unlabeled")


@pytest.fixture
def client(tmp_path):
    samples = load_samples("digits", Path("data"))
    path = tmp_path / "client.npz"
    np.savez(path, x=samples.x[:25], y=samples.y[:25])
    return path


def npz(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


def features(path: Path, clients: int = 8, **changed: object) -> Path:
    """Samples of six features with their clients; parts can be replaced."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(clients * 12, 6)),
        "y": rng.integers(0, 3, clients * 12),
        "client": np.repeat(np.arange(clients), 12),
    }
    return npz(path, **arrays | changed)
