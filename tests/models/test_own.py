"""A user's own embedding networks and hypernetworks."""

from __future__ import annotations

import math
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pefll
from pefll.cli import main
from pefll.core.errors import PefllError
from pefll.core.tree import leaves
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from tests.federations import flat, problem_of, ragged
from tests.models.own_networks import Embedding, Softer, hypernetwork

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
FEW = {"local_steps": 2, "batch_size": 4, "rounds": 2, "clients_per_round": 2, "model": "tiny", "device": "cpu"}
FEDERATION = ragged(clients=5, sizes=(4, 9))


def own(size: int = 4) -> Embedding:
    torch.manual_seed(0)
    return Embedding((6,), 3, size)


def last_of(method_settings: dict, make, federation=FEDERATION) -> list[torch.Tensor]:
    """The server's state after a round of plain SGD in float64, whose steps are the gradients."""
    settings = {"local_steps": 2, "batch_size": 4, "server_optimizer": "sgd"} | method_settings
    method = build_method("pefll", problem_of(federation, "tiny"), settings)
    engine = make(federation, method, seed=0, clients_per_round=3, dtype=torch.float64)
    return list(leaves(engine.advance(engine.start(), 0, 1)))


@pytest.mark.parametrize("setting", ["embedding", "hypernetwork"])
def test_examples_of_the_page_run_on_both_engines_with_equal_gradients(setting):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (code,) = [block for block in blocks if f"{setting}=My" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    names = {"torch": torch, "math": math, "pefll": pefll, "federation": FEDERATION}
    definition, call = code.split("\n\n\nrun = ")
    exec(definition, names)
    choice = names["MyEmbedding" if setting == "embedding" else "MyHypernetwork"]
    torch.manual_seed(0)
    fixed = {"embedding": lambda *_: choice((6,), 3, 5), "hypernetwork": choice}[setting]
    if setting == "hypernetwork":  # one module, because its first weights are not drawn by layers
        fixed = choice(2, problem_of(FEDERATION, "tiny").model.size)
    settings = {setting: fixed, "descriptor_size": 5 if setting == "embedding" else 2}
    serial, vector = (last_of(settings, make) for make in (SerialEngine, VectorEngine))
    for mine, other in zip(serial, vector, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-13)
    assert f"pefll.PeFLL({setting}=My" in call
    assert pefll.fit(FEDERATION, pefll.PeFLL(**{setting: choice}), **FEW).evaluate().unseen


def test_an_own_network_equals_the_one_of_the_package():
    """The wrapper changes nothing: the same layers get the same first weights and the same gradients."""

    class Same(nn.Module):
        def __init__(self, input_shape, classes, size):
            super().__init__()
            self.classes, self.linear = classes, nn.Linear(classes, size)

        def forward(self, x, y):
            return self.linear(nn.functional.one_hot(y, self.classes).to(x))

    ours, theirs = (last_of({"embedding": choice}, SerialEngine) for choice in ("linear", Same))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_the_output_of_a_module_sets_the_size_of_descriptors():
    run = pefll.fit(FEDERATION, pefll.PeFLL(embedding=own(7)), **FEW)
    assert run.config.settings == {
        "embedding": "Embedding (given in Python)",
        "descriptor_size": 7,
        "local_steps": 2,
        "batch_size": 4,
    }
    assert run.method.h.shapes[0][1] == 7


@pytest.mark.parametrize("method", ["pefll", "pefll-prior", "pefll-plus", "pfedhn"])
def test_every_method_with_these_networks_takes_them(method):
    settings = {"hypernetwork": hypernetwork} | ({} if method == "pfedhn" else {"embedding": own()})
    run = pefll.fit(FEDERATION, method, **settings, **FEW | {"rounds": 1})
    assert run.method.h.size == sum(value.numel() for value in run.method.h.module.parameters())
    assert run.config.settings["hypernetwork"] == "hypernetwork (given in Python)"


def test_a_run_needs_its_networks_again(tmp_path):
    out = tmp_path / "run"
    trained = pefll.fit(FEDERATION, pefll.PeFLL(embedding=own(), hypernetwork=hypernetwork), out=out, **FEW)
    settings = tomllib.loads((out / "config.toml").read_text())["settings"]
    assert settings["embedding"] == "Embedding (given in Python)"
    x, y = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32), np.arange(8) % 3
    wanted = trained.personalize(x, y).state_dict()
    given = {"embedding": own(), "hypernetwork": hypernetwork}
    for loaded in (pefll.load(out, **given), pefll.load(out, **given).with_settings(refine_steps=0)):
        found = loaded.personalize(x, y).state_dict()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    again = pefll.fit(FEDERATION, pefll.PeFLL(**given), out=out, **FEW)  # finished already
    assert torch.equal(flat(again.server), flat(trained.server))
    for wrong, code in [
        ({}, "PEFLL-N535"),
        ({"embedding": own()}, "PEFLL-N535"),
        (given | {"embedding": Softer((6,), 3, 4)}, "PEFLL-N547"),
        (given | {"embedding": own(5)}, "PEFLL-N543"),
        (given | {"embedding": 5}, "PEFLL-N549"),
        (given | {"projector": own()}, "PEFLL-N548"),
    ]:
        with pytest.raises(PefllError) as error:
            pefll.load(out, **wrong)
        assert error.value.code == code, wrong


def test_a_stopped_run_goes_on_with_the_same_network_only(tmp_path):
    out, few = tmp_path / "run", FEW | {"out": tmp_path / "run"}
    pefll.fit(FEDERATION, pefll.PeFLL(embedding=own()), **few)
    with pytest.raises(PefllError) as error:
        pefll.fit(FEDERATION, pefll.PeFLL(embedding=Softer((6,), 3, 4)), **few | {"rounds": 3})
    assert error.value.code == "PEFLL-R104"  # another class
    other = type("Embedding", (Softer,), {"__qualname__": "Embedding"})
    with pytest.raises(PefllError) as error:
        pefll.fit(FEDERATION, pefll.PeFLL(embedding=other((6,), 3, 4)), **few | {"rounds": 3})
    assert error.value.code == "PEFLL-N547"  # a class of this name that computes something else
    longer = pefll.fit(FEDERATION, pefll.PeFLL(embedding=own()), **few | {"rounds": 3})
    straight = pefll.fit(FEDERATION, pefll.PeFLL(embedding=own()), **FEW | {"rounds": 3})
    assert torch.equal(flat(longer.final), flat(straight.final))
    assert pefll.load(out, embedding=own()).summary["rounds"] == 3


class Strange(nn.Module):
    """An embedding network that does one thing wrong."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong, self.linear = wrong, nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))
        if wrong == "half":
            self.linear.half()
        if wrong == "norm":
            self.norm = nn.BatchNorm1d(6)
        if wrong == "dropout":
            self.norm = nn.Dropout()

    def forward(self, x, y):
        if self.wrong == "raises":
            raise ValueError("no")
        if self.wrong == "buffer":
            self.calls += 1
        if self.wrong == "input":
            x -= 1
        z = self.linear(x)
        if self.wrong == "random":
            z = z + torch.randn_like(z)
        if self.wrong == "NaN":
            z = z * torch.nan
        if self.wrong == "mixes":
            z = z - z.mean(0)
        if self.wrong == "mode":
            z = z * (1 + self.training)
        if self.wrong == "vector":
            z = z[:, 0]
        if self.wrong == "detached":
            with torch.no_grad():
                return self.linear(x).numpy()
        return z


WRONG = {
    "half": "N539",
    "raises": "N540",
    "buffer": "N541",
    "input": "N542",
    "vector": "N543",
    "detached": "N543",
    "random": "N544",
    "NaN": "N572",
    "mixes": "N545",
    "mode": "N545",
    "norm": "N028",
    "dropout": "N029",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_work_is_said_before_the_run(wrong, tmp_path):
    with pytest.raises(PefllError) as error:
        pefll.fit(FEDERATION, pefll.PeFLL(embedding=Strange(wrong)), out=tmp_path / "run", **FEW)
    assert error.value.code == f"PEFLL-{WRONG[wrong]}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"hypernetwork": nn.Linear(2, 5)}, "N543"),  # as many weights as the client model has are needed
        ({"hypernetwork": nn.Linear(9, 5)}, "N540"),  # descriptors have two numbers
        ({"embedding": own(4), "descriptor_size": 5}, "N543"),
        ({"embedding": lambda *_: 5}, "N538"),
        ({"embedding": lambda size: own(size)}, "N537"),
        ({"embedding": "tests.models.own_networks:NUMBER"}, "N536"),
        ({"embedding": "Net (given in Python)"}, "N535"),
        ({"embedding": 5}, "A014"),
        ({"client_lr": own()}, "A014"),
    ],
)
def test_wrong_choices_are_said(settings, code):
    with pytest.raises(PefllError) as error:
        pefll.fit(FEDERATION, "pefll", **settings, **FEW)
    assert error.value.code == f"PEFLL-{code}"


def test_only_the_vector_engine_refuses_what_it_cannot_map():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x):
            return self.linear(x) * (2 if float(x.sum()) > 1e9 else 1)

    assert pefll.fit(FEDERATION, pefll.PeFLL(embedding=Reads()), **FEW, engine="serial").summary
    with pytest.raises(PefllError) as error:
        pefll.fit(FEDERATION, pefll.PeFLL(embedding=Reads()), **FEW, engine="vector")
    assert error.value.code == "PEFLL-E530"


def test_a_network_of_samples_alone_needs_no_labels():
    run = pefll.fit(FEDERATION, pefll.PeFLL(embedding=nn.Sequential(nn.Linear(6, 4), nn.Tanh())), **FEW)
    assert not run.method.uses_labels
    assert run.personalize(np.zeros((3, 6), dtype=np.float32))
    assert pefll.fit(FEDERATION, pefll.PeFLL(embedding=own()), **FEW).method.uses_labels


def test_names_work_on_the_command_line(tmp_path, capsys, monkeypatch):
    def command(*words: object) -> object:
        monkeypatch.setattr("pefll.core.plugins._allowed", set())  # as in a new process
        monkeypatch.setattr(sys, "argv", ["pefll", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    rng = np.random.default_rng(0)
    data, mine, out, made = (tmp_path / name for name in ("table.npz", "me.npz", "run", "me.safetensors"))
    np.savez(data, x=rng.normal(size=(60, 6)).astype(np.float32), y=np.arange(60) % 3, client=np.arange(60) // 10)
    np.savez(mine, x=np.zeros((4, 6), dtype=np.float32), y=np.arange(4) % 3)
    named = ["--set", "embedding=tests.models.own_networks:Embedding"]
    few = ["--rounds", 1, "--set", "local_steps=1", "--clients-per-round", 2, "--model", "tiny", "--device", "cpu"]
    assert not command("train", "--data", data, "--out", out, *named, *few)
    assert tomllib.loads((out / "config.toml").read_text())["settings"]["embedding"] == named[1].partition("=")[2]
    capsys.readouterr()
    personalize = ["personalize", out, "--data", mine, "--out", made]
    assert command(*personalize) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "PEFLL-M001" in words
    assert " ".join(named) in words
    assert not command(*personalize, *named)
    assert made.exists()
