"""FedAvg on Flower's simulation (Ray), with Flower's FedAvg strategy; clients train with the plain loop.

Each core has one actor. There is no evaluation and no log. Every actor reads the data once and keeps it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed import plain
from benchmarks.speed.setting import DATA_VARIABLE, Setting, Work, prepare


@lru_cache(maxsize=1)
def at_hand(setting: Setting, device: str) -> tuple[Work, nn.Module, Tensor, Tensor]:
    """Return the objects that an actor needs for every client; they are made for its first client."""
    torch.set_num_threads(1)
    folder = os.environ.get(DATA_VARIABLE)
    work = prepare(setting, Path(folder) if folder else None)
    return (work, work.module().to(device), *work.inputs(device))


def run(work: Work, turns: Iterable[int], device: str = "cpu", actors: int = 1) -> Tensor:
    """Run rounds; each turn is one call of the strategy."""
    # Flower reads these settings when it is imported.
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    setting = work.setting
    server_app, client_app = ServerApp(), ClientApp()

    @client_app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Message, context: Context) -> Message:
        mine, module, x, y = at_hand(setting, device)
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        config = message.content["config"]
        round_ = int(config["done"]) + int(config["server-round"]) - 1
        plain.train(module, x, y, mine.batches(round_, int(context.node_config["partition-id"])).to(device))
        reply = RecordDict(
            {
                "arrays": ArrayRecord({name: value.cpu() for name, value in module.state_dict().items()}),
                "metrics": MetricRecord({"num-examples": setting.samples}),
            }
        )
        return Message(content=reply, reply_to=message)

    weights: dict[str, Any] = {}

    @server_app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        del context
        strategy = FedAvg(
            fraction_train=setting.cohort / setting.clients,
            fraction_evaluate=0.0,
            min_train_nodes=setting.cohort,
            min_available_nodes=setting.clients,
        )
        arrays, done = ArrayRecord(work.module().state_dict()), 0
        for rounds in turns:
            config = ConfigRecord({"done": done})
            arrays = strategy.start(grid, arrays, num_rounds=rounds, train_config=config).arrays
            done += rounds
        weights.update(arrays.to_torch_state_dict())

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=setting.clients,
        backend_config={
            "init_args": {"num_cpus": actors, "log_to_driver": False, "logging_level": logging.ERROR},
            "client_resources": {"num_cpus": 1, "num_gpus": 1 / actors if device == "cuda" else 0.0},
        },
    )
    return work.problem.model.flatten([weights[name] for name in work.problem.model.names])
