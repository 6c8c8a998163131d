"""Runs that cannot fit into memory are refused before anything large is made, and no others are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pefll
from pefll.core import machine
from pefll.engines.hardware import Hardware, check_memory
from pefll.engines.memory import MemoryPlan, check_fits, free_memory, networks_of, parts_of
from pefll.methods import FedAvg, Problem
from pefll.models import Network
from tests.federations import flat

X = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
FEDERATION = pefll.federation_from_arrays(X, np.arange(60) % 3, np.repeat(np.arange(6), 10))
GB = 10**9
ROOT = Path(__file__).parents[1]


@pytest.fixture
def eight_gigabytes(monkeypatch):
    monkeypatch.setattr("pefll.engines.memory.available_memory", lambda: 8 * GB)


ABSURD = [
    ("pefll", {"descriptor_size": 100_000_000}, "descriptor_size"),
    ("pfedhn", {"embedding_size": 100_000_000}, "embedding_size"),
    ("pefll", {"local_steps": 10**9}, "local steps"),
    ("fedavg", {"local_steps": 10**9}, "local steps"),
    ("pefll", {"model": nn.Sequential(nn.Linear(8, 200_000), nn.ReLU(), nn.Linear(200_000, 3))}, "weights"),
]


@pytest.mark.parametrize(("method", "settings", "part"), ABSURD)
def test_absurd_sizes_are_refused(eight_gigabytes, method, settings, part):
    with pytest.raises(pefll.PefllError, match=part) as error:
        pefll.fit(FEDERATION, method, rounds=1, **settings)
    assert error.value.code == "PEFLL-L006"
    assert "8.0 GB" in str(error.value)


# In a process of its own: the most memory that a process ever had would hide what this takes.
TAKEN = """
import resource
import pefll, pefll.engines.memory
from tests.test_memory import ABSURD, FEDERATION
pefll.engines.memory.available_memory = lambda: 8 * 10**9
pefll.fit(FEDERATION, "pefll", rounds=1, local_steps=1)
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for method, settings, _ in ABSURD:
    try:
        pefll.fit(FEDERATION, method, rounds=1, **settings)
    except pefll.PefllError:
        continue
    raise SystemExit("it was not refused")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most)
"""


def test_absurd_sizes_are_refused_before_they_are_made():
    done = subprocess.run([sys.executable, "-c", TAKEN], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 400_000 * (1024 if sys.platform == "darwin" else 1)  # kB; bytes on a Mac


def test_what_would_fit_is_said_and_does_fit(eight_gigabytes):
    def plan(weights: int) -> MemoryPlan:
        return MemoryPlan(weights, 101 * weights, 1, 1, 50, 32, 64)

    with pytest.raises(pefll.PefllError, match=r"1,100,000 weights.*6,300,000.*PEFLL-L006"):
        check_fits(plan(6_300_000), "pefll")
    check_fits(plan(1_100_000), "pefll")


def test_many_runs_at_once_need_as_many_times_the_memory(eight_gigabytes):
    one = MemoryPlan(100_000, 10_100_000, 5, 5, 50, 32, 64)
    assert sum(parts_of(one._replace(runs=3))) == 3 * sum(parts_of(one))
    check_fits(one, "pefll")
    with pytest.raises(pefll.PefllError, match=r"\b20 runs.*PEFLL-L006"):
        check_fits(one._replace(runs=20), "pefll")


def test_a_model_by_name_is_weighed_before_it_is_made(monkeypatch):
    monkeypatch.setattr("pefll.engines.memory.available_memory", lambda: 10_000)
    with pytest.raises(pefll.PefllError) as error:
        pefll.fit(FEDERATION, "fedavg", model="mlp", rounds=1)
    assert error.value.code == "PEFLL-L007"


def test_a_finished_run_is_read_where_it_could_not_be_trained(monkeypatch, tmp_path):
    def fit(out):
        return pefll.fit(FEDERATION, rounds=1, clients_per_round=2, local_steps=1, processes=1, model="tiny", out=out)

    made = fit(tmp_path / "run")
    monkeypatch.setattr("pefll.engines.memory.available_memory", lambda: 100_000)
    with pytest.raises(pefll.PefllError) as error:
        fit(tmp_path / "other")
    assert error.value.code == "PEFLL-L006"
    assert torch.equal(flat(fit(tmp_path / "run").server), flat(made.server))


def test_nothing_is_refused_where_nobody_knows(monkeypatch):
    monkeypatch.setattr("pefll.engines.memory.available_memory", lambda: None)
    check_fits(MemoryPlan(10**9, 10**11, 1, 1, 1, 1, 1), "pefll")


def test_a_sketch_leaves_the_method_as_it_is(eight_gigabytes):
    run = pefll.fit(FEDERATION, "pefll", rounds=1, local_steps=1)
    assert not any(part.is_meta for part in run.method.h.module.parameters())
    assert torch.isfinite(run.server.hypernetwork).all()


@dataclass(frozen=True)
class ReadsNumbers(FedAvg):
    """Reads the numbers of a tensor as it is made, which a tensor without memory does not have."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", torch.linspace(0, 1, 5).tolist())


def test_a_method_that_cannot_be_made_without_memory_is_trained(eight_gigabytes):
    run = pefll.fit(FEDERATION, f"{__name__}:ReadsNumbers", rounds=1, local_steps=1)
    assert run.method.grid == [0, 0.25, 0.5, 0.75, 1]


def test_an_error_that_a_user_can_mend_is_not_hidden_by_the_sketch():
    def build():
        raise pefll.PefllError("descriptor_size must be positive")

    with pytest.raises(pefll.PefllError, match="descriptor_size"):
        networks_of(build)


def test_what_torch_keeps_of_a_gpu_for_later_is_left(monkeypatch):
    sizes = {"memory_reserved": 5 * GB, "memory_allocated": 2 * GB, "mem_get_info": (GB, 8 * GB)}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    assert free_memory(torch.device("cuda")) == 4 * GB


def test_memory_of_linux(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("MEMINFO", "OWN_CGROUP", "CGROUPS"):
        monkeypatch.setattr(machine, name, tmp_path / name)
    machine.MEMINFO.write_text("MemTotal: 16000 kB\nMemAvailable:    8000 kB\nodd\n")
    assert machine.total_memory() == 16_000 * 1024
    assert machine.available_memory() == 8000 * 1024
    # A container of the second version, within a group that has no limit.
    machine.OWN_CGROUP.write_text("0::/box/inner\n")
    inner = machine.CGROUPS / "box" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("5000000\n")
    (inner / "memory.current").write_text("4000000\n")
    (inner / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    (inner.parent / "memory.max").write_text("max\n")
    assert machine.available_memory() == 1_500_000
    # The first version, whose own folder is not mounted in the container.
    machine.OWN_CGROUP.write_text("4:cpu,memory:/docker/abc\n")
    (machine.CGROUPS / "memory").mkdir()
    (machine.CGROUPS / "memory" / "memory.limit_in_bytes").write_text("3000000")
    (machine.CGROUPS / "memory" / "memory.usage_in_bytes").write_text("1000000")
    assert machine.available_memory() == 2_000_000
    (machine.CGROUPS / "memory" / "memory.limit_in_bytes").write_text(str((1 << 63) - 4096))
    assert machine.available_memory() == 8000 * 1024


def test_memory_of_others(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}[name])
    monkeypatch.setattr(machine, "_left_in_cgroups", list)
    assert machine.available_memory() == 4_096_000


def test_hypernetworks_for_large_models_fit_where_the_usual_one_does_not(eight_gigabytes):
    model = nn.Sequential(nn.Linear(8, 3_000), nn.ReLU(), nn.Linear(3_000, 3_300), nn.ReLU(), nn.Linear(3_300, 3))

    def check(hypernetwork: str) -> None:
        settings = {"hypernetwork": hypernetwork}
        problem = Problem(Network(model), (8,), 3, 6)
        place = Hardware(torch.device("cpu"), "serial", "float32")
        check_memory(place, "pefll", settings, problem, FEDERATION, 1)

    assert sum(parameter.numel() for parameter in model.parameters()) > 9_900_000
    with pytest.raises(pefll.PefllError, match="chunked") as error:
        check("M")
    assert error.value.code == "PEFLL-L006"
    check("low-rank")
    check("chunked")
