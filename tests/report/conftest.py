"""Run folders made by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pefll.runs.config import Config
from pefll.runs.record import RunFolder

MakeRun = Callable[..., RunFolder]


def measures(accuracy: float) -> dict[str, float]:
    """Measures that are all different, so that a table cannot mix them up."""
    return {
        "per_sample": accuracy,
        "per_client": accuracy + 0.001,
        "masked": accuracy + 0.02,
        "worst_tenth": accuracy - 0.3,
    }


def row(round_: int, seen: float, unseen: float | None, megabytes: float) -> dict[str, Any]:
    return {
        "round": round_,
        "seconds": round_ * 0.5,
        "bytes_down": int(megabytes * 0.75e6),
        "bytes_up": int(megabytes * 0.25e6),
        "seen": measures(seen) | {"loss": 1.0},
        "unseen": None if unseen is None else measures(unseen) | {"loss": 1.0},
    }


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(
        name: str = "run",
        *,
        method: str = "pefll",
        seed: int = 0,
        seen: float = 0.8,
        unseen: float | None = 0.7,
        settings: dict[str, Any] | None = None,
        finished: bool = True,
        evaluations: int = 10,
        descriptors: bool = False,
        asked: dict[str, Any] | None = None,
        **summary: Any,
    ) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir(parents=True)
        config = Config(
            method=method, seed=seed, data="cifar10", rounds=100, settings=settings or {}, data_sha256=f"of {seed}"
        )
        dataclasses.replace(config, **asked or {}).save(folder.config_file)
        for t in range(1, evaluations + 1):
            share = t / 10
            validation = None if unseen is None else share * unseen
            folder.append_history(row(10 * t, share * seen, validation, 40.0 * t))
        if finished:
            accuracy = {
                moment: {
                    "seen": measures(seen - drop),
                    "unseen": None if unseen is None else measures(unseen - drop),
                }
                for moment, drop in (("best", 0.0), ("final", 0.05))
            }
            usual: dict[str, Any] = {
                "method": method,
                "dataset": "CIFAR-10",
                "partition": "by-class 2",
                "num_clients": 100,
                "num_seen": 90,
                "num_unseen": 10,
                "rounds": 100,
                "seed": seed,
                "train_seconds": 3725.0,
                "client_steps_per_second": 8612.3,
                "bytes_down": 300_000_000,
                "bytes_up": 100_000_000,
                "best_round": 90,
                "accuracy": accuracy,
            }
            folder.summary_file.write_text(json.dumps(usual | summary))
        if descriptors:
            write_descriptors(folder)
        return folder

    return make


def write_descriptors(
    folder: RunFolder, n: int = 40, classes: int = 5, unseen: int = 4, names: tuple[str, ...] = ()
) -> None:
    random = np.random.default_rng(0)
    histograms = np.array([random.multinomial(100, p) for p in random.dirichlet([0.3] * classes, size=n)])
    v = (histograms / 100) @ random.normal(size=(classes, 7)) + 0.01 * random.normal(size=(n, 7))
    named = {"class_names": np.array(names, dtype=str)} if names else {}
    np.savez(folder.descriptors_file, descriptors=v, histograms=histograms, seen=np.arange(n) < n - unseen, **named)


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=80, file=open("/dev/null", "w"))


def printed(console: Console, *things: Any) -> str:
    for thing in things:
        console.print(thing)
    return console.export_text()
