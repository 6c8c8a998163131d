"""Natural guesses in Python: every call of a public function works, or says in one sentence what is wrong."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

import pefll
from pefll.core import arguments
from pefll.runs.config import Config
from tests.data.test_partitioned import Partitioner

N = 60
CLIENT = np.repeat(np.arange(6), 10)
Y = np.arange(N) % 3
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
SAMPLES = pefll.samples_from_arrays(X, Y, CLIENT)
FEDERATION = pefll.federation_from_arrays(X, Y, CLIENT, unseen=0.2)
FRAME = pd.DataFrame(X, columns=list("abcd")).assign(y=Y, c=CLIENT)
DATASET = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))

# What people give where something else is meant; every function gets all of them for every argument.
GUESSES = [
    *(None, True, -1, 0, 3, 3.0, 2.5, float("nan"), float("inf"), 10**30, 2**70, 1j, "3", "x", "", "a\0b", b"x"),
    *([], [3, 5], (1, 2), {}, {"a": X}, {1, 2}, range(2), object(), int, len, Path("nowhere"), X, X.tolist()[:2]),
    *(np.int64(3), np.float32(0.1), np.bool_(True), np.array(3), np.array([3]), np.str_("x"), np.datetime64("2020")),
    *(torch.tensor(3), torch.tensor(0.1), torch.tensor([3.0]), torch.empty((), device="meta"), torch.nn.Linear(2, 2)),
    *(pd.Series(Y, index=np.arange(N) * 7), FRAME, DATASET, torch.utils.data.DataLoader(DATASET), SAMPLES, Console),
]


@pytest.fixture(scope="module")
def run() -> pefll.Run:
    return pefll.fit(FEDERATION, "fedavg", rounds=1, local_steps=1)


def sentence_of(call: Callable[[], object]) -> str:
    """Return what a call says where it refuses; "" where it works. Any other error is a failure."""
    try:
        call()
    except pefll.PefllError as error:
        return str(error)
    return ""


FUNCTIONS = {
    "samples_from_arrays": (pefll.samples_from_arrays, {"x": X, "y": Y, "client": CLIENT}),
    "federation_from_arrays": (pefll.federation_from_arrays, {"x": X, "y": Y, "client": CLIENT}),
    "federation_from_frame": (pefll.federation_from_frame, {"frame": FRAME, "label": "y", "client": "c"}),
    "make_federation": (
        pefll.make_federation,
        {"samples": SAMPLES, "partition": "by-class 2", "clients": 4, "seed": 0, "unseen": 0.25},
    ),
    "by_class": (pefll.by_class, {"samples": SAMPLES, "clients": 4, "classes_per_client": 2, "seed": 0}),
    "dirichlet": (pefll.dirichlet, {"samples": SAMPLES, "clients": 4, "alpha": 0.5, "seed": 0}),
    "natural": (pefll.natural, {"samples": SAMPLES, "seed": 0}),
    "by_indices": (pefll.by_indices, {"samples": SAMPLES, "clients": [[0, 1], [2, 3]], "unseen": 0.5}),
    "federation_from_file": (pefll.federation_from_file, {"path": "nowhere.csv"}),
    "federation_from_dataset": (pefll.federation_from_dataset, {"dataset": DATASET, "client": CLIENT}),
    "federation_from_partitioner": (pefll.federation_from_partitioner, {"partitioner": Partitioner(a=Y, label=Y)}),
    "load_samples": (pefll.load_samples, {"name_or_path": "nowhere.csv"}),
    "read_samples": (pefll.read_samples, {"path": "nowhere.npz"}),
    "summarise": (pefll.summarise, {"federation": FEDERATION}),
    "load": (pefll.load, {"path": "nowhere"}),
}
CALLBACKS = {("load_samples", "report"), ("load", "console"), ("load", "model")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, each) for name, (call, _) in FUNCTIONS.items() for each in inspect.signature(call).parameters],
)
def test_every_argument_of_every_function_takes_every_guess(name, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, right = FUNCTIONS[name]
    for guess in GUESSES if (name, argument) not in CALLBACKS else [None]:
        said = sentence_of(lambda guess=guess: call(**(right | {argument: guess})))
        assert "\n" not in said, guess
        assert len(said) < 500, guess


FIT = [
    *("method", "model", "rounds", "seed", "out", "console", "config", "clients_per_round", "local_steps", "client_lr"),
    *(
        "device",
        "engine",
        "precision",
        "processes",
        "eval_every",
        "eval_clients",
        "checkpoint_every",
        "label",
        "unseen",
    ),
    *("settings", "batch_size", "nonsense"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("argument", FIT)
def test_every_argument_of_fit_takes_every_guess(argument, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pefll.training.fitting.train_all", lambda specs, *rest, **more: [run for _ in specs])
    for guess in GUESSES:
        for call, more in ((pefll.fit, {}), (pefll.fit_seeds, {"seeds": [0, 1]})):
            if argument in ("seed", "config") and call is pefll.fit_seeds:
                continue
            given = {"method": "fedavg"} | more | {argument: guess}
            assert "\n" not in sentence_of(lambda call=call, given=given: call(FEDERATION, **given)), guess


@pytest.mark.filterwarnings("ignore")
def test_fit_takes_no_guess_for_a_federation_or_seeds(run, monkeypatch):
    monkeypatch.setattr("pefll.training.fitting.train_all", lambda specs, *rest, **more: [run for _ in specs])
    for guess in GUESSES:
        if not callable(guess):
            with pytest.raises(pefll.PefllError, match="PEFLL-A019"):
                pefll.fit(guess, rounds=1)
        sentence_of(lambda guess=guess: pefll.fit_seeds(FEDERATION, "fedavg", seeds=guess))


@pytest.mark.filterwarnings("ignore")
def test_a_run_takes_every_guess(run):
    for guess in GUESSES:
        for call in (
            lambda guess=guess: run.evaluate(guess),
            lambda guess=guess: run.evaluate(federation=guess),
            lambda guess=guess: run.personalize(guess),
            lambda guess=guess: run.personalize(X, guess),
            lambda guess=guess: run.personalize(X).predict(guess),
            lambda guess=guess: pefll.cost_of_new_client(guess, run.method, run.server, 5),
            lambda guess=guess: pefll.cost_of_new_client(FEDERATION, run.method, run.server, guess),
            lambda guess=guess: pefll.cost_of_new_client(FEDERATION, run.method, run.server, 5, guess),
        ):
            assert "\n" not in sentence_of(call), guess


@pytest.mark.parametrize("method", [pefll.FedAvg, "FedAvg", "fedavg", np.str_("fedavg")])
def test_a_method_is_named_by_its_class_too(method):
    assert pefll.fit(FEDERATION, method, rounds=0).config.method == "fedavg"


def test_other_classes_are_no_methods():
    for guess in (int, Config, object()):
        with pytest.raises(pefll.PefllError, match="PEFLL-A013"):
            pefll.fit(FEDERATION, guess, rounds=0)


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path):
    out = tmp_path / "run"
    made = pefll.fit(
        FEDERATION,
        pefll.FedAvg,
        rounds=np.int64(1),
        seed=torch.tensor(2),
        clients_per_round=np.array(2),
        eval_every=np.uint8(1),
        local_steps=np.int32(1),
        client_lr=torch.tensor(0.125),
        weight_decay=np.float32(0.25),
        out=str(out),
    )
    plain = pefll.fit(
        FEDERATION, "fedavg", rounds=1, seed=2, clients_per_round=2, eval_every=1, local_steps=1, client_lr=0.125,
        weight_decay=0.25,
    )  # fmt: skip
    assert torch.equal(made.server.theta, plain.server.theta)
    written = tomllib.loads((out / "config.toml").read_text())
    assert (written["rounds"], written["seed"], written["clients_per_round"]) == (1, 2, 2)
    assert written["settings"] == {"local_steps": 1, "client_lr": 0.125, "weight_decay": 0.25}
    assert json.loads((out / "summary.json").read_text())["rounds"] == 1
    assert pefll.load(out).config == Config.load(out / "config.toml")


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: Config(rounds=10**18), "PEFLL-A003"),
        (lambda: Config(seed=2**70), "PEFLL-A003"),
        (lambda: Config(seed=-1), "PEFLL-A002"),
        (lambda: Config(rounds=3.0), "PEFLL-A001"),
        (lambda: Config(clients_per_round="5"), "PEFLL-A001"),
        (lambda: Config(rounds=True), "PEFLL-A001"),
        (lambda: pefll.make_federation(SAMPLES, partition=["by-class 2"], clients=4, seed=0), "PEFLL-A016"),
        (
            lambda: pefll.make_federation(SAMPLES, partition="natural", clients=None, seed=0, unseen=[3, 5]),
            "PEFLL-A006",
        ),
        (lambda: pefll.make_federation(SAMPLES, partition="by-class 2", clients=10**9, seed=0), "PEFLL-L001"),
        (lambda: pefll.make_federation(SAMPLES, partition="dirichlet 1", clients=10**9, seed=0), "PEFLL-L001"),
        (lambda: pefll.fit(FEDERATION, "fedavg", client_lr=True), "PEFLL-A014"),
        (lambda: pefll.fit(FEDERATION, "fedavg", local_steps=float("inf")), "PEFLL-A014"),
        (lambda: pefll.federation_from_arrays(DATASET, Y, CLIENT), "PEFLL-A021"),
        (lambda: pefll.federation_from_arrays({"a": X}, Y, CLIENT), "PEFLL-A022"),
        (lambda: pefll.federation_from_arrays(np.ma.array(X, mask=X > 1), Y, CLIENT), "PEFLL-D007"),
        (lambda: pefll.federation_from_arrays(X, [10**400, *Y[1:].tolist()], CLIENT), "PEFLL-D008"),
        (lambda: pefll.federation_from_arrays(X, np.full(N, 2**63, dtype=np.uint64), CLIENT), "PEFLL-D008"),
        (lambda: pefll.federation_from_arrays(X, ["9" * 5000, *["0"] * (N - 1)], CLIENT), "PEFLL-D009"),
    ],
)
def test_codes(call, code):
    with pytest.raises(pefll.PefllError) as error:
        call()
    assert error.value.code == code


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"num_rounds": 1}, "rounds"),
        ({"verbose": True}, "console"),
        ({"lr": 0.1}, "client_lr"),
        ({"client_per_round": 2}, "clients_per_round"),
    ],
)
def test_fit_suggests_its_own_arguments_too(given, meant):
    with pytest.raises(pefll.PefllError, match=f"did you mean '{meant}'"):
        pefll.fit(FEDERATION, "fedavg", **given)


def test_a_value_is_shown_in_few_words():
    assert arguments.shown(10**5000) == "a whole number of 5,001 digits"
    assert arguments.shown(np.zeros((1000, 1000))) == "a ndarray"
    assert arguments.shown([X] * 3) == "a list"
    assert arguments.shown("x\ny") == r"'x\ny'"
    assert arguments.shown([3, 5]) == "[3, 5]"
    assert arguments.shown(FRAME) == "a DataFrame"


def test_what_a_call_can_do_without():
    for made, seeded in (
        (pefll.by_class(SAMPLES, 4, 2), pefll.by_class(SAMPLES, 4, 2, 0)),
        (pefll.dirichlet(SAMPLES, 4, 0.5), pefll.dirichlet(SAMPLES, 4, 0.5, 0)),
        (pefll.natural(SAMPLES), pefll.natural(SAMPLES, 0)),
        (
            pefll.make_federation(SAMPLES, partition="by-class 2", clients=4),
            pefll.make_federation(SAMPLES, partition="by-class 2", clients=4, seed=0),
        ),
        (
            pefll.federation_from_frame(FRAME, "y", "c"),
            pefll.federation_from_frame(FRAME, label="y", client="c"),
        ),
    ):
        assert made.fingerprint() == seeded.fingerprint()


@pytest.mark.parametrize("method", [pefll.PeFLL, pefll.FedAvg, pefll.PeFLLPlus])
def test_a_method_names_what_it_takes(method):
    with pytest.raises(pefll.PefllError, match=r"did you mean 'client_lr'\?.*PEFLL-A101"):
        method(client_Lr=3)
    assert method(client_lr=0.5).client_lr == 0.5


@pytest.mark.parametrize("path", [".", "/"])
def test_a_model_is_not_saved_as_a_folder(run, path):
    with pytest.raises(pefll.PefllError, match="PEFLL-A109"):
        run.personalize(X[:10], Y[:10]).save(path)
