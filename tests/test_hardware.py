"""Which device and which engine."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pefll.core.errors import PefllError
from pefll.engines import hardware
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from pefll.runs import claim, problem
from pefll.training import resolve
from pefll.training.fitting import fit
from tests.federations import problem_of, ragged


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_devices_by_name(two_gpus):
    assert hardware.pick_device("auto") == torch.device("cuda")
    assert hardware.pick_device("cpu") == torch.device("cpu")
    assert hardware.pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(PefllError, match=r"\b2 CUDA.*PEFLL-T113"):
        hardware.pick_device("cuda:2")
    with pytest.raises(PefllError, match=r"device 'gpu'.*PEFLL-T110"):
        hardware.pick_device("gpu")
    with pytest.raises(PefllError, match="PEFLL-T111"):
        hardware.pick_device("mps")


def test_without_a_gpu_auto_is_the_cpu(no_gpu):
    assert hardware.pick_device("auto") == torch.device("cpu")
    with pytest.raises(PefllError, match="PEFLL-T112"):
        hardware.pick_device("cuda")
    assert hardware.device_name(torch.device("cpu")).startswith("cpu (")
    assert hardware.peak_memory_bytes(torch.device("cpu")) > 1e7


def make(**settings):
    federation = ragged()
    method = build_method("fedavg", problem_of(federation), {})
    asked = {"device": "auto", "engine": "auto", "precision": "auto", "processes": 0} | settings
    picked = hardware.pick_hardware(method.problem, **asked)
    engine = hardware.make_engine(picked, federation, method, 0, 3)
    engine.close()
    return engine


def test_the_engine_that_was_asked_for(no_gpu):
    assert isinstance(make(engine="serial", processes=1), SerialEngine)
    assert isinstance(make(engine="vector"), VectorEngine)
    assert make(engine="vector", precision="float64").dtype == torch.float64
    assert make(engine="serial", processes=1, precision="tf32").dtype == torch.float32


def test_the_serial_engine_does_not_run_on_a_gpu(two_gpus):
    with pytest.raises(PefllError, match="PEFLL-T115"):
        make(engine="serial", device="cuda")


def test_no_more_processes_than_clients_and_none_where_nothing_can_fork(no_gpu, monkeypatch):
    started = []

    class Counted(SerialEngine):
        def __init__(self, *arguments) -> None:
            started.append(arguments[5])
            super().__init__(*arguments[:5])

    monkeypatch.setattr(hardware, "SerialEngine", Counted)
    make(engine="serial", processes=8)
    make(engine="serial", processes=2)
    monkeypatch.setattr(hardware, "can_fork", lambda: False)
    make(engine="serial", processes=2)
    assert started == [3, 2, 1]


@pytest.mark.parametrize(
    ("asked", "gpu", "cpu"),
    [("auto", "tf32", "float32"), ("tf32", "tf32", "float32"), ("bf16", "bf16", "float32"),
     ("float32", "float32", "float32"), ("float64", "float64", "float64")],
)  # fmt: skip
def test_rounded_products_are_for_gpus(asked, gpu, cpu):
    assert hardware.pick_precision(asked, torch.device("cuda")) == gpu
    assert hardware.pick_precision(asked, torch.device("cpu")) == cpu


def test_auto_counts_the_models_work(no_gpu):
    device = torch.device("cpu")
    tiny = problem_of(ragged(shape=(6,)))
    assert hardware.forward_flops(tiny) == 2 * 32 * (6 * 64 + 64 * 3)
    assert hardware.pick_engine(device, tiny) == "vector"
    large = problem_of(ragged(clients=3, shape=(3, 32, 32), sizes=(2,)), "lenet")
    assert hardware.pick_engine(device, large) == "serial"
    assert hardware.pick_engine(torch.device("cuda"), large) == "vector"


def test_the_processor_has_a_name(monkeypatch):
    assert hardware.processor()
    monkeypatch.setattr(hardware.Path, "read_text", lambda _, **__: "model name : one\nmodel name : two\n")
    assert hardware.processor() == "one"


def test_auto_is_the_cpu_for_the_serial_engine(two_gpus):
    picked = hardware.pick_hardware(problem_of(ragged()), "auto", "serial", "auto", 1)
    assert picked == hardware.Hardware(torch.device("cpu"), "serial", "float32", 1)


def test_what_auto_means_is_asked_once_in_a_run(monkeypatch):
    asked = []
    for module, name in ((hardware, "pick_device"), (hardware, "pick_engine"), (problem, "resolve_model")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, real=real, name=name: asked.append(name) or real(*given))
    run = fit(ragged(), "fedavg", rounds=2, clients_per_round=2, local_steps=1, processes=1)
    assert sorted(asked) == ["pick_device", "pick_engine", "resolve_model"]
    assert (run.summary["model"], run.summary["engine"], run.summary["precision"]) == ("mlp", "vector", "float32")


def test_a_folder_is_checked_twice_before_anything_is_opened_and_once_under_its_lock(tmp_path, monkeypatch):
    looked = []
    for module in (resolve, claim):
        real = module.check_claim
        monkeypatch.setattr(module, "check_claim", lambda *given, real=real: looked.append(given[0]) or real(*given))
    fit(ragged(), "local", epochs=1, processes=1, out=tmp_path / "run")
    assert len(looked) == 3


def test_a_finished_run_needs_no_device(tmp_path, two_gpus, monkeypatch):
    settings = {"rounds": 2, "clients_per_round": 2, "local_steps": 1, "processes": 1, "out": tmp_path / "run"}
    trained = fit(ragged(), "fedavg", device="cpu", **settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fit(ragged(), "fedavg", device="cuda", **settings).summary == trained.summary


def test_a_run_with_one_client_at_a_time_needs_no_compiler_of_torch():
    """Importing torch's compiler takes more than a second of a command's start."""
    script = (
        "import sys, pefll, torch\n"
        "from pefll.data import load_samples, make_federation\n"
        "data = make_federation(load_samples('digits'), partition='by-class 2', clients=8, seed=0)\n"
        "pefll.fit(data, 'pefll', rounds=1, local_steps=1, engine='serial', processes=1, clients_per_round=1)\n"
        "problem, _ = pefll.runs.problem.describe_problem(data, 'mlp')\n"
        "pefll.engines.hardware.pick_engine(torch.device('cpu'), problem)\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
