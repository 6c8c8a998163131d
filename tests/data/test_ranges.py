"""Values that spoil training: refused or told of, with the client, the column and the range."""

from __future__ import annotations

import io
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

import pefll
from pefll.core.errors import Diverged
from pefll.data import out_of_proportion
from pefll.data.client_files import read_member
from pefll.engines.cohort import client_to_blame, first_to_blame
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import FedAvg, build_method
from pefll.methods.contract import Each, Everyone
from tests.federations import problem_of

CLIENTS, EACH = 8, 20
NAMES = np.repeat([f"ward-{number}" for number in range(CLIENTS)], EACH)


def arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, CLIENTS * EACH)
    return rng.normal(size=(CLIENTS * EACH, 3)) + 2 * y[:, None], y


def frame(column: np.ndarray) -> pd.DataFrame:
    x, y = arrays()
    return pd.DataFrame({"age": x[:, 0], "dose": column, "y": y, "ward": NAMES})


def federation_of(column: np.ndarray, encode: str = "auto") -> pefll.Federation:
    return pefll.federation_from_frame(frame(column), label="y", client="ward", unseen=0.0, encode=encode)


@pytest.mark.parametrize(
    ("value", "code", "part"),
    [(1e30, "PEFLL-D011", "1e+30"), (-1e16, "PEFLL-D011", "-1e+16"), (np.nan, "PEFLL-D010", "NaN"),
     (np.inf, "PEFLL-D010", "infinite")],
)  # fmt: skip
def test_values_that_end_every_training_are_refused(tmp_path, value, code, part):
    column = arrays()[0][:, 1].copy()
    column[3 * EACH + 4] = value
    table = frame(column)
    table.to_csv(tmp_path / "a.csv", index=False)
    x = np.stack([arrays()[0][:, 0], column], axis=1)
    for call, where in (
        (lambda: pefll.federation_from_frame(table, label="y", client="ward"), "column 'dose'"),
        (lambda: pefll.read_samples(tmp_path / "a.csv", label="y", client="ward"), "column 'dose'"),
        (lambda: pefll.federation_from_arrays(x, arrays()[1], NAMES), "feature 1"),
    ):
        if np.isnan(value) and "column" in where:
            continue  # in a table, the value is missing
        with pytest.raises(pefll.PefllError) as error:
            call()
        assert error.value.code == code
        for word in ("client ward-3", "sample 64", where, part):
            assert word in str(error.value)


def test_a_real_client_checks_its_own_data(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.full((4, 2), 1e30), y=np.zeros(4, dtype=np.int64))
    with pytest.raises(pefll.PefllError, match="PEFLL-D011"):
        read_member(tmp_path / "mine.npz", classes=2)


def test_pixels_of_float_pictures_are_named():
    x = np.zeros((4, 1, 3, 3))
    x[2, 0, 1, 2] = 1e20
    with pytest.raises(pefll.PefllError, match=r"sample 2\b.*1e\+20.*\[0, 1, 2\].*PEFLL-D011"):
        pefll.samples_from_arrays(x, [0, 1, 0, 1])


@pytest.mark.parametrize("value", [1e10, -1e10, 5e3])
def test_one_client_out_of_proportion_is_named(value):
    column = arrays()[0][:, 1].copy()
    column[3 * EACH : 4 * EACH] = value
    federation = federation_of(column)
    (sentence,) = out_of_proportion(federation)
    assert "client ward-3 has column 'dose' from" in sentence
    assert f"{value:.3g}" in sentence
    with pytest.warns(UserWarning, match="client ward-3 has column 'dose'"):
        pefll.fit(federation, "fedavg", rounds=0)
    console = Console(record=True, width=300, file=io.StringIO())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pefll.fit(federation, "fedavg", rounds=0, console=console)
    assert "client ward-3 has column 'dose'" in console.export_text()


def test_ordinary_data_is_not_complained_of():
    rng = np.random.default_rng(1)
    total = CLIENTS * EACH
    rare = np.zeros(total)
    rare[7] = 1  # one sample of one client has it
    for column in (
        rng.normal(size=total),
        np.exp(2 * rng.normal(size=total)),  # skewed
        (2e6 * np.exp(rng.normal(size=total))).round(),  # incomes, in cents
        rng.uniform(0, 1e6, total),
        np.repeat(rng.uniform(0, 1e6, CLIENTS), EACH),  # every client elsewhere
        1e-6 * rng.normal(size=total) + rare,
        rare,
        100 * rare,
        np.full(total, 7.0),
        rng.integers(0, 65_536, total),
    ):
        assert out_of_proportion(federation_of(np.asarray(column, dtype=float))) == []


def test_a_column_that_is_large_for_all_is_to_be_scaled():
    (sentence,) = out_of_proportion(federation_of(1.7e9 + 1e5 * arrays()[0][:, 1], encode="none"))
    assert "column 'dose'" in sentence
    assert "scale" in sentence
    assert "client ward" not in sentence


def test_pixels_and_tokens_are_left_alone():
    x = np.full((CLIENTS * EACH, 1, 8, 8), 255, dtype=np.uint8)
    assert out_of_proportion(pefll.federation_from_arrays(x, arrays()[1], NAMES)) == []
    x = np.full((CLIENTS * EACH, 5), 10**6)
    assert out_of_proportion(pefll.federation_from_arrays(x, arrays()[1], NAMES, tokens=True)) == []


def spoilt(value: float, client: int) -> pefll.Federation:
    """A federation with one client's values made huge after all checks, as by an overflow in somebody's own code."""
    federation = pefll.federation_from_arrays(*arrays(), NAMES, unseen=0.0)
    x = federation.x.clone()
    for split in range(3):
        x[federation.indices(client, split)] = value
    return replace(federation, x=x)


@pytest.mark.parametrize(
    ("method", "value"),
    [("pefll", 1e30), ("per-fedavg", 1e30), ("pefll", np.nan), ("fedavg", np.nan), ("fedrep", np.nan)],
)
@pytest.mark.parametrize("engine", [SerialEngine, VectorEngine])
def test_the_client_whose_data_it_is_gets_the_blame(engine, method, value):
    bad = 5
    federation = spoilt(value, bad)
    learner = build_method(method, problem_of(federation), {})
    made = engine(federation, learner, 0, CLIENTS)
    try:
        with pytest.raises(Diverged, match=rf"client {federation.name_of(bad)}\b.*PEFLL-E012"):
            made.advance(made.start(), 0, 3)
    finally:
        made.close()


class Padded(NamedTuple):
    """A reply with a part that has no numbers, [0]."""

    nothing: torch.Tensor
    theta: torch.Tensor
    samples: torch.Tensor


class SendsAnEmptyPart(FedAvg):
    def train(self, client, theta):
        return Padded(theta.new_zeros(0), *super().train(client, theta))


@pytest.mark.parametrize("engine", [SerialEngine, VectorEngine])
@pytest.mark.parametrize(("value", "blamed"), [(1.0, False), (np.nan, True)])
def test_replies_may_have_empty_parts(engine, value, blamed):
    federation = spoilt(value, 5)
    made = engine(federation, SendsAnEmptyPart(local_steps=1).bind(problem_of(federation)), 0, CLIENTS)
    match = rf"client {federation.name_of(5)}\b.*PEFLL-E012"
    try:
        with pytest.raises(Diverged, match=match) if blamed else nullcontext():
            made.advance(made.start(), 0, 1)
    finally:
        made.close()


def test_the_first_client_that_is_not_itself_sent_bad_numbers_is_blamed():
    ids, bad = torch.tensor([7, 3, 9]), torch.tensor([[0.0], [torch.nan], [torch.inf]])
    empty = torch.zeros(3, 0)
    assert int(client_to_blame((empty, bad), ids, [Everyone(torch.ones(4)), Each(empty)])) == 3
    assert int(client_to_blame(bad, ids, [Each(torch.tensor([1.0, torch.nan, 2.0]))])) == 9
    assert int(client_to_blame(bad, ids, [Each(bad)])) == -1
    assert int(client_to_blame(bad, ids, [Everyone(torch.tensor(torch.inf))])) == -1
    assert int(client_to_blame(torch.zeros(3), ids, [])) == -1
    assert int(client_to_blame((torch.arange(3), torch.tensor([1.0, 2.0, -torch.inf])), ids, [])) == 9


def test_the_client_of_the_first_bad_exchange_is_blamed():
    ids, sent = torch.tensor([7, 3, 9]), torch.tensor([[True, True, True], [True, True, False]])
    assert int(first_to_blame(torch.tensor([[True, True, False], [False, True, False]]), sent, ids)) == 9
    assert int(first_to_blame(torch.tensor([[True, True, True], [True, False, False]]), sent, ids)) == 3
    assert int(first_to_blame(torch.tensor([[True, True, True], [True, True, False]]), sent, ids)) == -1


def test_several_seeds_at_once_blame_it_too():
    federation = spoilt(1e30, 5)
    with pytest.warns(UserWarning, match="client ward-"), pytest.raises(pefll.RunsFailed) as failed:
        pefll.fit_seeds(federation, "pefll", seeds=[0, 1], rounds=3, clients_per_round=8, engine="vector", device="cpu")
    assert list(failed.value.errors) == [0, 1]
    for error in failed.value.errors.values():
        assert error.code == "PEFLL-E012"
        assert str(error).startswith(f"client {federation.name_of(5)} ")


def test_a_server_that_overflows_blames_nobody():
    federation = pefll.federation_from_arrays(*arrays(), NAMES, unseen=0.0)
    learner = build_method("fedavg", problem_of(federation), {})
    for engine in (SerialEngine, VectorEngine):
        made = engine(federation, learner, 0, CLIENTS)
        try:
            broken = made.start()._replace(theta=torch.full((learner.problem.model.size,), torch.inf))
            with pytest.raises(Diverged, match=r"^a client .*PEFLL-E012"):
                made.advance(broken, 0, 1)
        finally:
            made.close()


def test_what_diverges_on_bad_data_says_so():
    column = arrays()[0][:, 1].copy()
    column[3 * EACH : 4 * EACH] = 1e14
    federation = federation_of(column, encode="none")
    with (
        pytest.warns(UserWarning, match="ward-3"),
        pytest.raises(Diverged, match=r"client ward-3 .*1e\+14.*PEFLL-E012"),
    ):
        pefll.fit(federation, "fedavg", rounds=20, client_lr=1e30, client_clip=0.0, clients_per_round=8)
