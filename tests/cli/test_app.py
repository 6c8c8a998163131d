"""The command as a whole: its help, real processes, names that are wrong, Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from pefll.cli.console import noting
from pefll.methods import METHODS
from pefll.runs.titles import TITLES, title_of
from pefll.training import fitting, run
from tests.cli.conftest import DIGITS, Said


def release(package: str) -> tuple[int, ...]:
    return tuple(map(int, version(package).split(".")[:2]))


def test_methods(pefll):
    said = pefll("methods")
    assert said.code == 0
    for name in ("pefll", "fedavg", "local", "lambda_theta", "client_lr", "epochs"):
        assert name in said.out
    assert "knn-per (kNN-Per): " in said.out
    assert "lambda_theta" not in pefll("methods", "fedavg").out


def test_every_method_has_a_title():
    assert TITLES.keys() == METHODS.keys()
    assert [title_of(name) for name in ("pefll-plus", "my.module:Mine")] == ["PeFLL+", "Mine"]


def test_version_and_help(pefll):
    assert pefll("--version").out.startswith("pefll 0.")
    said = pefll("--help").out
    assert "personalize" in said
    panels = [said.index(f"─ {panel} ─") for panel in ("Start here", "Runs", "Personal models", "Experiments")]
    assert panels == sorted(panels)
    assert "─ Commands ─" not in said, "every verb has its place"
    assert pefll("data", "summary", "--help").out.count("(from the data)") == 2, "and not 0, which means that"
    said = pefll()
    assert said.code == 2
    assert "personalize" in said.out
    assert said.err == ""


@pytest.mark.skipif(
    release("typer") < (0, 21) and release("click") >= (8, 5),
    reason="typer before 0.21 loses this help with click 8.5; requirements.lock has an older one",
)
def test_arguments_have_help_too(pefll):
    assert "A data set or a path" in pefll("data", "summary", "--help").out


def test_in_real_processes(tmp_path, client):
    def call(*arguments: object) -> Said:
        command = [sys.executable, "-m", "pefll", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        return Said(done.returncode, done.stdout, done.stderr)

    said = call("train", *DIGITS, "--engine", "serial", "--processes", 2, "--out", "r")
    assert said.code == 0, said.err
    assert call("personalize", "r", "--data", client, "--out", "m.safetensors").code == 0
    said = call("train", "--resume", "nowhere")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: nowhere ")
    assert said.err.endswith(" [PEFLL-R120]\n")


def test_verbs_and_names_that_are_wrong(refused, labelled, tmp_path):
    assert "'train'" in refused("trian")
    assert refused("reproduc", "table1").count("'reproduce'") == 1
    assert refused("data", "lst").count("'list'") == 1
    refused("check-method", "fedagv", match=r"method 'fedagv'.*'fedavg'.*PEFLL-A101")
    refused("methods", "fedavgg", match=r"method 'fedavgg'.*'fedavg'.*PEFLL-A101")
    refused("evaluate", labelled, "--split", "tset", match=r"split 'tset'.*'test'.*PEFLL-A101")
    refused("data", "get", "mnist", "--data-dir", tmp_path, match=r"data set 'mnist'.*PEFLL-A101")
    assert "PEFLL-C002" in refused("data", "check", tmp_path / "none")
    assert "PEFLL-R120" in refused("show", tmp_path)
    assert "PEFLL-R120" in refused("evaluate", tmp_path)
    assert "PEFLL-R120" in refused("personalize", tmp_path, "--data", tmp_path, "--out", tmp_path / "m")


def test_a_full_gpu_is_a_sentence(refused, monkeypatch, tmp_path):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 lines\nof\ntext")

    monkeypatch.setattr(fitting, "train_all", full)
    assert "the GPU's memory is full" in refused("train", *DIGITS, "--out", tmp_path / "r")


def test_ctrl_c_before_there_is_anything_to_save(pefll, monkeypatch, tmp_path):
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "load", interrupted)
    said = pefll("evaluate", tmp_path)
    assert (said.code, said.err) == (130, "stopped before there was anything to save\n")


def test_ctrl_c_while_libraries_are_loaded():
    stop = """
import builtins
import pefll_command
real = builtins.__import__
def load(name, *rest):
    if name == "pefll.cli":
        raise KeyboardInterrupt
    return real(name, *rest)
builtins.__import__ = load
pefll_command.main()
"""
    ended = subprocess.run([sys.executable, "-c", stop], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "stopped before anything was begun\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("verb", [("methods",), ("--version",)])
def test_an_output_that_is_full_is_one_sentence(verb):
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-m", "pefll", *verb], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (2, "error: the output cannot be written: no space left on device\n")


def test_an_output_that_is_closed_is_no_accident():
    ended = subprocess.run(f"{sys.executable} -m pefll --version >&-", shell=True, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_path_with_escape_codes_does_not_change_the_terminal(refused):
    said = refused("show", "runs/\x1b[2J\x1b]0;x\x07")
    assert "runs/[2J]0;x is not a run folder" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(("variable", "threads"), [(None, "1"), ("2", "2")])
def test_a_command_uses_one_thread_unless_the_user_says_otherwise(variable, threads):
    code = (
        "import sys, torch\nfrom pefll.cli.app import main\ntorch.set_num_threads(2)\nsys.argv[1:] = ['--version']\n"
        "try:\n    main()\nexcept SystemExit:\n    print(torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"OMP_NUM_THREADS": variable} if variable else {}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.split()[-1] == threads


def test_notes_are_about_the_users_data(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as Python does by default
        with noting():
            warnings.warn("from another library", DeprecationWarning, stacklevel=1)
            for _ in range(2):
                warnings.warn("check the units", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "note: check the units\n"
