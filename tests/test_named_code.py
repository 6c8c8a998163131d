"""Code that a file names is not run: a run folder, a result or a federation's settings may come from a stranger."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pefll
from pefll import training
from pefll.core import plugins
from pefll.core.errors import PefllError
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.models import build_model
from pefll.runs.config import Config
from pefll.runs.federations import federation_of
from tests.federations import ragged

MODEL = """
from pathlib import Path
from torch import nn
Path("ran").touch()

def build(input_shape, classes):
    return nn.Linear(input_shape[0], classes)
"""
METHOD = """
from dataclasses import dataclass
from pathlib import Path
from pefll.methods import FedAvg
Path("ran").touch()

@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""
NAMES = {"model": "evilmodel:build", "method": "evilmethod:Mine"}


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A folder with code in it and two runs that name it; nobody has named it in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_allowed", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "evilmodel.py").write_text(MODEL)
    (tmp_path / "evilmethod.py").write_text(METHOD)
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(8), 12)
    np.savez("data.npz", x=rng.normal(size=(96, 6)), y=rng.integers(0, 3, 96), client=client)
    np.savez("one.npz", x=rng.normal(size=(12, 6)), y=rng.integers(0, 3, 12))
    for what, name in NAMES.items():
        words = ["train", "--data", "data.npz", "--rounds", "2", "--clients-per-round", "2", "--processes", "1"]
        assert not call(*words, "--set", "local_steps=1", f"--{what}", name, "--out", what)
    forget()
    return tmp_path


def forget() -> None:
    plugins._allowed.clear()
    for name in ("evilmodel", "evilmethod"):
        sys.modules.pop(name, None)
    Path("ran").unlink(missing_ok=True)


def call(*words: str) -> int:
    from pefll.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pefll", *words])
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code or 0


@pytest.mark.parametrize("what", NAMES)
def test_no_command_runs_code_that_only_a_run_names(evil, capsys, what):
    own = (f"--{what}", NAMES[what])
    for words in (
        ("personalize", what, "--data", "one.npz", "--out", "m.safetensors"),
        ("evaluate", what),
        ("train", "--resume", what, "--rounds", "3"),
        ("cost", what),
    ):
        forget()
        capsys.readouterr()
        assert call(*words) == 2, words
        said = capsys.readouterr().err
        assert "PEFLL-M001" in said
        assert " ".join(own) in said
        assert not Path("ran").exists(), words
        assert call(*words, *own) == 0, (words, capsys.readouterr())
        assert Path("ran").exists(), words
    forget()
    for words in (("show", what), ("results", "add", what)):
        assert call(*words) == 0
        assert not Path("ran").exists(), words


@pytest.mark.parametrize("what", NAMES)
def test_python_runs_it_only_when_it_is_named_there(evil, what):
    with pytest.raises(PefllError) as refused:
        pefll.load(what)
    assert refused.value.code == "PEFLL-M001"
    assert f"{what}={NAMES[what]!r}" in str(refused.value)
    assert not Path("ran").exists()
    pefll.load(what, **{what: NAMES[what]})
    assert Path("ran").exists()
    with pytest.raises(PefllError) as refused:
        pefll.load(what, method="local")
    assert refused.value.code == "PEFLL-M002"


@pytest.mark.parametrize("what", NAMES)
def test_settings_from_a_file_do_not_choose_code_for_fit(evil, what):
    config = Config.load(Path(what, "config.toml"))
    federation = federation_of(config, None)
    with pytest.raises(PefllError) as refused:
        pefll.fit(federation, config=config)
    assert refused.value.code == "PEFLL-M001"
    assert not Path("ran").exists()
    assert pefll.fit(federation, config=config, **{what: NAMES[what]})
    assert Path("ran").exists()


def test_a_process_of_its_own_in_the_folder_of_a_stranger(evil):
    """As the attack was: `cd evil && pefll personalize .`."""
    words = [sys.executable, "-m", "pefll_command", "personalize", ".", "--data", "../one.npz", "--out", "m"]
    (evil / "model" / "evilmodel.py").write_text(MODEL)
    for name in ("torch", "numpy", "pandas", "mlp"):  # what shadows a name changes nothing either
        (evil / "model" / f"{name}.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # the program `pefll` does not look in the current folder
    environment.pop(plugins.CODE, None)
    said = subprocess.run(words, cwd=evil / "model", env=environment, capture_output=True, text=True, timeout=120)
    assert said.returncode == 2, said.stderr
    assert "--model evilmodel:build" in said.stderr
    assert "Traceback" not in said.stderr
    assert not (evil / "model" / "ran").exists()
    for name in ("torch", "numpy", "pandas", "mlp"):
        (evil / "model" / f"{name}.py").unlink()
    words += ["--model", "evilmodel:build"]
    said = subprocess.run(words, cwd=evil / "model", env=environment, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert (evil / "model" / "ran").exists()


def test_results_and_federations_that_name_code(evil, capsys):
    assert call("results", "add", "method", "--to", "kept") == 0
    assert call("cost", "kept") == 2
    assert "PEFLL-M001" in capsys.readouterr().err
    for what, name in NAMES.items():
        chosen = {"method": "fedavg", "model": "mlp"} | {what: name}
        sent = json.loads(json.dumps(Agreement(**chosen, input_shape=(6,), classes=3, num_clients=2).to_config()))
        with pytest.raises(PefllError) as refused:
            Agreement.from_config(sent).build()
        assert refused.value.code == "PEFLL-M001"
        assert not Path("ran").exists()


def test_the_environment_names_code_for_processes_that_others_start(evil, monkeypatch):
    monkeypatch.setenv(plugins.CODE, f"other:thing,{NAMES['model']}")
    assert pefll.load("model").model_spec.model == NAMES["model"]
    assert Path("ran").exists()


def test_names_of_the_packages_own_models_never_lead_to_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp.py").write_text("raise RuntimeError\n")
    (tmp_path / "fedavg.py").write_text("raise RuntimeError\n")
    assert build_model("mlp", (6,), 3)
    assert pefll.fit(ragged(), "fedavg", model="mlp", rounds=1, clients_per_round=2, local_steps=1, processes=1)


def test_the_place_of_an_error_is_the_users_line_not_ours():
    with pytest.raises(ValueError, match="bad shape") as raised:
        exec(compile("raise ValueError('bad shape')", training.__file__, "exec"))
    assert plugins.fault(raised.value).startswith(f"ValueError in {__file__}, line ")


@pytest.mark.parametrize(
    ("what", "given", "setting", "advice"),
    [
        ("task", "mine:GCE(q=0.4)", False, "write task='mine:GCE q=0.4'"),
        ("task", "mine:GCE(q=0.4, k=2)", False, "write task='mine:GCE q=0.4 k=2'"),
        ("model", "mine:build()", False, "write model='mine:build'"),
        ("embedding", "mine:Net(3)", True, "write embedding='mine:Net'"),
    ],
)
def test_a_call_is_no_name(what, given, setting, advice):
    with pytest.raises(PefllError, match=f"is a call, not a name; {re.escape(advice)} "):
        plugins.import_name(given, what, setting=setting)
