"""Our engines, opened in the same way as by `pefll train`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from benchmarks.speed.setting import CLIP, DECAY, LEARNING_RATE, MOMENTUM, Setting, Work
from pefll.engines.hardware import make_engine, pick_hardware
from pefll.methods import build_method
from pefll.runs.config import Config


def settings(method: str, setting: Setting) -> dict[str, float]:
    """Return a method's hyper-parameters; both methods have the same local SGD."""
    chosen: dict[str, float] = {
        "local_steps": setting.steps,
        "batch_size": setting.batch,
        "client_momentum": MOMENTUM,
        "client_clip": CLIP,
    }
    if method == "fedavg":
        return chosen | {"client_lr": LEARNING_RATE, "weight_decay": DECAY}
    # PeFLL keeps its own learning rate: it does not change the time, and with random labels another might diverge.
    return chosen | {"lambda_theta": DECAY / 2, "descriptor_size": setting.descriptor}


def run(
    work: Work,
    turns: Iterable[int],
    method: str = "fedavg",
    engine: str = "serial",
    device: str = "cpu",
    precision: str = "float32",
    processes: int = 1,
) -> Tensor | None:
    """Run rounds on one of our engines; see `Config` for the options."""
    config = Config(engine=engine, device=device, precision=precision, processes=processes)
    learner = build_method(method, work.problem, settings(method, work.setting))
    hardware = pick_hardware(work.problem, config.device, config.engine, config.precision, config.processes)
    reach = make_engine(hardware, work.federation, learner, work.seed, work.setting.cohort)
    try:
        server, done = reach.start(), 0
        for rounds in turns:
            server = reach.advance(server, done, rounds)
            done += rounds
        return server.theta.cpu() if method == "fedavg" else None
    finally:
        reach.close()
