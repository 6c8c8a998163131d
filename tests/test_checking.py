"""The checks of a method notice what they are there for."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from pefll.data.samples import TEST
from pefll.methods import FedAvg
from pefll.methods.averaging import Server
from pefll.methods.contract import everyone
from pefll.training import checking
from pefll.training.checking import CHECKS, check_method

QUICK = {"local_steps": 3, "batch_size": 4}


@dataclass
class Loose:
    """A dataclass that can be changed."""

    problem: object = None


@dataclass(frozen=True)
class Bare:
    """A dataclass without a method's functions."""

    problem: object
    local_steps: int = 3
    batch_size: int = 4


@dataclass(frozen=True)
class Gambler(FedAvg):
    """Draws random numbers of its own."""

    def round(self, server, cohort):
        theta = super().round(server, cohort).theta
        return Server(theta + 1e-3 * torch.randn_like(theta))


@dataclass(frozen=True)
class Padded(FedAvg):
    """Counts padding as samples."""

    def train(self, client, theta):
        update = super().train(client, theta)
        return update._replace(samples=torch.full_like(update.samples, client.capacity[0]))


@dataclass(frozen=True)
class Impatient(FedAvg):
    """Prefers whoever comes first."""

    def round(self, server, cohort):
        return Server(cohort.run(self.train, everyone(server.theta)).theta[0])


@dataclass(frozen=True)
class Careless(FedAvg):
    """Writes into the state that it was given."""

    def round(self, server, cohort):
        server.theta.copy_(super().round(server, cohort).theta)
        return server


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """Keeps something that matters outside of its state."""

    _seen = []  # noqa: RUF012

    def init(self, seed, cohort):
        self._seen.clear()
        return super().init(seed, cohort)

    def round(self, server, cohort):
        self._seen.append(1)
        return Server(super().round(server, cohort).theta * (1 + 0.01 * len(self._seen)))


@dataclass(frozen=True)
class Cheat(FedAvg):
    """Trains on held-out samples too."""

    def train(self, client, theta):
        return super().train(replace(client, offset=client.offset[[2, 1, 0]], count=client.count), theta)


@dataclass(frozen=True)
class Peeper(FedAvg):
    """Fits clients' models to the samples that they are scored on."""

    def personalize(self, server, cohort):
        return super().personalize(server, cohort) + 0.01 * cohort.run(self.peep)[:, None]

    def peep(self, client):
        return sum((batch.y * batch.weight).sum() for batch in client.everything(TEST))


@dataclass(frozen=True)
class Unwelcoming(FedAvg):
    """Has nothing for new clients."""

    def personalize(self, server, cohort):
        models = super().personalize(server, cohort)
        return models * torch.nan if cohort.is_new else models


@dataclass(frozen=True)
class Looker(FedAvg):
    """Decides in Python what a number on the device says."""

    def round(self, server, cohort):
        after = super().round(server, cohort)
        return after if after.theta.norm() > 0 else server


@dataclass(frozen=True)
class Lister(FedAvg):
    """Takes who is there to Python."""

    def round(self, server, cohort):
        return super().round(server, cohort) if cohort.ids.tolist() else server


@dataclass(frozen=True)
class Masker(FedAvg):
    """Takes those that a mask points at."""

    def round(self, server, cohort):
        update = cohort.run(self.train, everyone(server.theta))
        return Server(update.theta[update.samples > 0].mean(dim=0))


@dataclass(frozen=True)
class Carrier(FedAvg):
    """Brings numbers of the host along, when clients are scored."""

    def predict(self, client, theta, split):
        return super().predict(client, theta * torch.tensor(1.0, dtype=theta.dtype), split)


@dataclass(frozen=True)
class Nameless(FedAvg):
    """Asks clients for a function that only this process has."""

    def personalize(self, server, cohort):
        return cohort.run(lambda client, theta: theta, everyone(server.theta))


@dataclass(frozen=True)
class Numerous(FedAvg):
    """Replies with numbers of a kind that no message holds."""

    def train(self, client, theta):
        update = super().train(client, theta)
        return update._replace(samples=update.samples.to(torch.int32))


@pytest.mark.parametrize(
    ("name", "rule", "sentence"),
    [
        ("Loose", "is_a_method", "frozen=True"),
        ("Bare", "is_a_method", "it lacks trains_in_rounds"),
        ("QUICK", "is_a_method", "is not a dataclass"),
        ("Gambler", "a_seed_decides_everything", "random numbers ignore the seed"),
        ("Padded", "engines_agree", "padding or other clients"),
        ("Impatient", "order_does_not_matter", "in another order"),
        ("Careless", "states_are_not_written_to", "write nothing in place"),
        ("Forgetful", "stopping_changes_nothing", "in the state"),
        ("Cheat", "held_out_data_is_not_looked_at", "held-out samples change"),
        ("Peeper", "held_out_data_is_not_looked_at", "change the models of `personalize`"),
        ("Unwelcoming", "everybody_gets_a_model", "new clients got"),
        ("Looker", "a_gpu_can_record_it", "looks at a number"),
        ("Lister", "a_gpu_can_record_it", "`tolist` cannot be recorded"),
        ("Masker", "a_gpu_can_record_it", "a mask as an index"),
        ("Carrier", "a_gpu_can_record_it", "makes a tensor from numbers of Python"),
    ],
)
def test_each_check_notices_its_fault(name, rule, sentence):
    findings = check_method(f"{__name__}:{name}", QUICK if name not in ("Loose", "QUICK") else {})
    place = [check.__name__ for check in CHECKS].index(rule)
    assert findings[place].problem is not None
    assert sentence in findings[place].problem
    assert (len(findings) == 1) == (rule == "is_a_method")


@pytest.mark.parametrize(("name", "sentence"), [("Nameless", "make <lambda> one of them"), ("Numerous", "int32")])
def test_what_real_clients_cannot_run_is_noticed(name, sentence):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install flwr==1.41.0")
    assert sentence in check_method(f"{__name__}:{name}", QUICK)[-1].problem


def test_without_flower_it_is_said_that_it_was_not_tried(monkeypatch):
    find = checking.find_spec
    monkeypatch.setattr(checking, "find_spec", lambda name: None if name == "flwr" else find(name))
    last = check_method("fedavg", QUICK)[-1]
    assert last.problem is None
    assert "pip install flwr==1.41.0" in last.not_tried


def test_a_method_without_faults_has_none():
    findings = check_method("fedavg", QUICK)
    assert len(findings) == len(CHECKS)
    assert not any(finding.problem for finding in findings)


def run_cli(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pefll", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_documents_own_method(tmp_path):
    """The method of docs/methods.md, as a reader would copy it: checked, trained, and used."""
    page = (Path(__file__).parent.parent / "docs" / "methods.md").read_text()
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "class Ditto" in code]
    assert sum(bool(line.strip()) for line in block.splitlines()) < 55
    (tmp_path / "mine.py").write_text(textwrap.dedent(block))
    checked = run_cli("check-method", "mine:Ditto", "--set", "local_steps=3", folder=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("yes") == len(CHECKS)
    options = ["--method", "mine:Ditto", "--data", "digits", "--rounds", "4", "--set", "local_steps=3"]
    trained = run_cli("train", *options, "--device", "cpu", "--out", "run", folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "run" / "summary.json").is_file()


def test_the_command_line_tells_what_failed(tmp_path):
    (tmp_path / "mine.py").write_text("x = 3\n")
    wrong = run_cli("check-method", "mine:x", folder=tmp_path)
    assert wrong.returncode == 1
    assert "is not a dataclass" in wrong.stdout
    missing = run_cli("check-method", "mine:y", folder=tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("error: cannot import the method 'mine:y'")


@pytest.mark.parametrize(
    "options",
    [pytest.param(["--engine", "vector"], marks=pytest.mark.slow), ["--engine", "serial", "--processes", "2"]],
)
def test_a_method_that_raises_is_a_sentence_with_the_place(tmp_path, options):
    lines = [
        "from dataclasses import dataclass",
        "from pefll.methods import FedAvg",
        "@dataclass(frozen=True)",
        "class Mine(FedAvg):",
        "    def train(self, client, theta):",
        "        raise ValueError('boom')",
    ]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    words = ["train", "--method", "mine:Mine", "--data", "digits", "--rounds", "2", "--device", "cpu", *options]
    said = run_cli(*words, folder=tmp_path)
    assert said.returncode == 2
    assert f"error: ValueError in {tmp_path / 'mine.py'}, line 6: boom" in said.stderr
    assert "Traceback" not in said.stderr
    if "vector" in options:
        checked = run_cli("check-method", "mine:Mine", folder=tmp_path)
        assert checked.returncode == 1
        assert "mine.py, line 6: boom" in "".join(checked.stdout.split("\n"))
