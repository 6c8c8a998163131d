"""Device, engine and precision of a run: what `auto` means, and how the engine is opened."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pefll.backend.flops import FlopCounter
from pefll.core.errors import PefllError
from pefll.core.wording import argument
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN
from pefll.engines.cohort import Engine
from pefll.engines.cuda_queue import one_thread
from pefll.engines.memory import MemoryPlan, check_fits, networks_of, sample_values
from pefll.engines.round_plan import UNIFORM, RoundPlan
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.engines.workers import can_fork
from pefll.methods import build_method, hyperparameters, typed_settings
from pefll.methods.contract import Method, Problem

SMALL_FLOPS = 10_000_000  # with fewer operations, the serial engine spends most of its time in Python


class Hardware(NamedTuple):
    """Device, engine and precision of a run, where `auto` is already replaced.

    Attributes:
        device: cpu or a GPU.
        engine: serial, vector or flower.
        precision: float32, tf32, bf16 or float64.
        processes: largest number of processes that the serial engine starts.
    """

    device: torch.device
    engine: str
    precision: str
    processes: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and inputs."""
        return torch.float64 if self.precision == "float64" else torch.float32


TO_READ = Hardware(torch.device("cpu"), "serial", "float32")  # for a finished run, which computes nothing


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the first GPU, or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PefllError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:1", code="PEFLL-T110") from error
    if device.type not in ("cpu", "cuda"):
        raise PefllError(f"the device {name!r} is not supported: use auto, cpu, cuda or cuda:1", code="PEFLL-T111")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise PefllError(
                f"CUDA was asked for, but torch sees no CUDA device here; use {argument('device', 'cpu')}",
                code="PEFLL-T112",
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise PefllError(
                f"{name} was asked for, but there are only {torch.cuda.device_count()} CUDA devices", code="PEFLL-T113"
            )
    return device


def pick_engine(device: torch.device, problem: Problem) -> str:
    """Return the fastest engine, for `auto`: vector on a GPU and for small models, else serial."""
    small = device.type == "cpu" and forward_flops(problem) < SMALL_FLOPS
    return "vector" if device.type == "cuda" or small else "serial"


def pick_precision(name: str, device: torch.device) -> str:
    """Return a precision that the device supports. `auto` is tf32 on a GPU; a CPU has only float32 and float64."""
    if device.type != "cuda" and name != "float64":
        return "float32"
    return "tf32" if name == "auto" else name


def forward_flops(problem: Problem) -> int:
    """Count the floating point operations of the client model on a batch of 32; every machine counts the same."""
    kind = torch.int64 if problem.tokens else torch.float32
    with torch.no_grad(), FlopCounter() as counter:
        problem.model.module(torch.zeros((32, *problem.input_shape), dtype=kind))
    return int(counter.total)


def pick_hardware(problem: Problem, device: str, engine: str, precision: str, processes: int) -> Hardware:
    """Return a run's device, engine and precision; PefllError if this machine does not have them.

    `auto` is decided here, by the machine and the size of the model. Only the serial engine uses `processes`; 0 is one
    per core. The vector engine ignores it, so that a run of another machine can be evaluated here.
    """
    place = pick_device(device)
    engine = engine if engine != "auto" else pick_engine(place, problem)
    if engine == "flower":
        raise PefllError(
            "only a Flower app reaches clients on other machines; see `pefll flower --help`", code="PEFLL-T114"
        )
    if engine == "vector":
        return Hardware(place, engine, pick_precision(precision, place))
    if device != "auto" and place.type == "cuda":
        raise PefllError(
            f"the serial engine runs on the CPU; use {argument('engine', 'vector')} for CUDA", code="PEFLL-T115"
        )
    place = torch.device("cpu")
    return Hardware(place, engine, pick_precision(precision, place), (processes or cores()) if can_fork() else 1)


def check_memory(
    hardware: Hardware,
    method: str,
    settings: dict[str, Any],
    problem: Problem,
    federation: Federation,
    clients_per_round: int,
    runs: int = 1,
) -> None:
    """Raise PefllError if `runs` simultaneous runs clearly need too much memory. The check allocates no weights.

    `settings` are the method's hyper-parameters that differ from the defaults.
    """
    values = {**hyperparameters(method), **typed_settings(method, settings)}
    clients = min(clients_per_round, federation.num_seen)
    most = int(federation.count[TRAIN].max())
    plan = MemoryPlan(
        weights=problem.model.size,
        networks=networks_of(lambda: build_method(method, problem, settings)),
        clients=clients if hardware.engine == "vector" else min(hardware.processes, clients),
        round_clients=clients,
        steps=int(values.get("local_steps") or 1),
        batch=min(int(values.get("batch_size") or most), most),
        values=sample_values(problem),
        runs=runs,
        device=hardware.device,
    )
    check_fits(plan, method)


def place_data(hardware: Hardware, federation: Federation, copies: dict[object, Tensor] | None = None) -> Federation:
    """Return the federation on its engine's device; for `copies` see `Federation.to`."""
    if hardware.engine != "vector":
        return federation
    with one_thread(hardware.device):
        return federation.to(hardware.device, copies)


def make_engine(
    hardware: Hardware,
    federation: Federation,
    method: Method[Any],
    seed: int,
    clients_per_round: int,
    plan: RoundPlan = UNIFORM,
) -> Engine:
    """Return a new engine; with `clients_per_round=0` it only evaluates."""
    device, _, precision, processes = hardware
    if hardware.engine == "vector":
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        return VectorEngine(federation, method, seed, clients_per_round, device, hardware.dtype, precision, plan)
    processes = min(processes, max(1, clients_per_round))
    return SerialEngine(federation, method, seed, clients_per_round, hardware.dtype, processes, plan)


@contextmanager
def open_engine(
    hardware: Hardware,
    federation: Federation,
    method: Method[Any],
    seed: int,
    clients_per_round: int,
    copies: dict[object, Tensor] | None = None,
    plan: RoundPlan = UNIFORM,
) -> Iterator[Engine]:
    """Call `place_data` and `make_engine`, and close the engine after the block."""
    engine = make_engine(hardware, place_data(hardware, federation, copies), method, seed, clients_per_round, plan)
    try:
        yield engine
    finally:
        engine.close()


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: of the engine's tensors on a GPU, else of this process; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not a Unix system
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the number of cores."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({cores()} cores)"
