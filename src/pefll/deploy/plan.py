"""The settings of a federation, which its folder stores in pyproject.toml.

my-federation/
  pyproject.toml        the Flower app: settings, and the names of this package's apps
  README.md             what to do next
  server/               ca.crt, ca.key, server.crt, server.key; secrets of the server's machine
  keys/NAME.pub         the public key of each client
  clients/NAME/         for the client: ca.crt, node.key, client.toml; remove it here when the client has it
  run/                  config, history, checkpoints, summary: an ordinary run folder
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pefll.core.arguments import number, text, whole_number
from pefll.core.errors import PefllError, first_line
from pefll.core.files import check_file_name, write_whole
from pefll.engines.flower.protocol.agreement import Agreement, bad_run_config, config_value, read_json_value
from pefll.engines.flower.server.terms import Terms

# Flower has the same rule for the names of apps.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,62}")
CONNECTION = "deployment"
# A federation that was made before these settings existed gets their defaults.
_LATER_TERMS = ("weight_limit", "choice_limit", "sample_limit")
_LATER = {"sampling": "uniform", "lr-schedule": "constant", "server-lr-schedule": "constant"}
SERVER_APP, CLIENT_APP = "pefll.deploy.apps:server", "pefll.deploy.apps:client"


@dataclass(frozen=True)
class Plan:
    """All settings of a federation: the agreement, the clients, the length of training and the terms.

    Attributes:
        agreement: settings that server and clients share.
        names: names of the training clients; a client's number is its index here.
        folder: the federation's folder on the server's machine; "" to save nothing.
        rounds: number of training rounds.
        clients_per_round: number of clients in a round, c; 0 for 5% of all.
        sampling: which clients a round has; see `Config`.
        lr_schedule: schedule of the clients' learning rates; see `Config`.
        server_lr_schedule: schedule of the server's learning rates; see `Config`.
        eval_every: number of rounds between evaluations.
        checkpoint_every: number of rounds between checkpoints.
        wait_clients: number of clients that must be connected before training starts; 0 for all.
        wait_seconds: number of seconds to wait for these clients.
        task: "train", or "personalize" to make a model for every connected client and send it.
        simulation_data: folder with NAME.npz for each client, for Flower's simulation.
        terms: deadlines, quorum and limits.
    """

    agreement: Agreement
    names: tuple[str, ...]
    folder: str = ""
    rounds: int = 100
    clients_per_round: int = 0
    eval_every: int = 10
    checkpoint_every: int = 1
    wait_clients: int = 0
    wait_seconds: float = 600.0
    task: str = "train"
    simulation_data: str = ""
    terms: Terms = field(default_factory=Terms)
    sampling: str = "uniform"
    lr_schedule: str = "constant"
    server_lr_schedule: str = "constant"

    def __post_init__(self) -> None:
        if self.task not in ("train", "personalize"):
            raise PefllError(f"the task is {self.task!r}; it must be train or personalize", code="PEFLL-F410")
        check_names(self.names)

    @property
    def run(self) -> Path:
        """The run folder."""
        return Path(self.folder) / "run"

    def to_config(self) -> dict[str, str | int | float | bool]:
        """Return the plan as a Flower run config, which is a flat table."""
        own = {
            item.name.replace("_", "-"): getattr(self, item.name)
            for item in fields(self)
            if item.name not in ("agreement", "names", "terms")
        }
        terms = {name.replace("_", "-"): value for name, value in asdict(self.terms).items()}
        return {"names": json.dumps(list(self.names)), **own, **terms, **self.agreement.to_config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Plan:
        """Read a plan from a Flower run config."""
        agreement = Agreement.from_config(config)
        later = _LATER | {name.replace("_", "-"): getattr(Terms(), name) for name in _LATER_TERMS}
        wanted = [*_CHECKS, *(item.name for item in fields(Terms)), "names"]
        given = {name: config_value(later | dict(config), name) for name in wanted}
        try:
            own = {name: check(given[name], name) for name, check in _CHECKS.items()}
            terms = {item.name: _not_nan(given[item.name], item.name) for item in fields(Terms)}
            names = read_json_value(given["names"], "names")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError("its names are not a list of texts")
        except (PefllError, ValueError) as error:
            raise bad_run_config(error) from None
        return cls(agreement=agreement, names=tuple(names), terms=Terms(**terms), **own)


def _count(value: Any, name: str) -> int:
    return whole_number(value, name, 0)


def _not_nan(value: Any, name: str) -> float:
    """Return a value that is a finite number or infinity (to wait for ever); PefllError for anything else."""
    return value if value in (math.inf, -math.inf) else number(value, name)


_COUNTS = ("rounds", "clients_per_round", "eval_every", "checkpoint_every", "wait_clients")
_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(_COUNTS, _count),
    **dict.fromkeys(("folder", "task", "simulation_data", "sampling", "lr_schedule", "server_lr_schedule"), text),
    "wait_seconds": _not_nan,
}


def check_names(names: Sequence[str]) -> None:
    """Raise PefllError for names that cannot be file names, or that occur twice."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise PefllError(
                f"{name!r} cannot be a name: use letters, digits and hyphens, beginning with a letter",
                code="PEFLL-F413",
            )
        check_file_name(name, "a name")
    if len(set(names)) < len(names):
        raise PefllError("two clients have the same name", code="PEFLL-F414")


def write_app(folder: Path, name: str, plan: Plan, server: str = SERVER_APP, client: str = CLIENT_APP) -> None:
    """Write the pyproject.toml of a Flower app: its name, its settings, and its server and client app (module:name)."""
    lines = [
        "# A Flower app made by `pefll flower init`. Change the settings below before the first run; all clients get",
        "# them from the server with the app. `pefll flower run --run-config rounds=9` overrides one.",
        "[project]",
        f"name = {_toml(name)}",
        'version = "1.0.0"',
        'description = "Personalized federated learning with pefll"',
        'license = "Apache-2.0"',
        "dependencies = []",
        "",
        "[tool.flwr.app]",
        'publisher = "pefll"',
        "# Only this file and the README travel: not the run, not the keys.",
        'fab-include = ["README.md"]',
        "",
        "[tool.flwr.app.components]",
        f"serverapp = {_toml(server)}",
        f"clientapp = {_toml(client)}",
        "",
        "[tool.flwr.app.config]",
        *(f"{key} = {_toml(value)}" for key, value in plan.to_config().items()),
    ]
    write_whole(folder / "pyproject.toml", ("\n".join(lines) + "\n").encode())


def renew_app(folder: Path) -> None:
    """Correct the client app's name in the pyproject.toml of a federation that an earlier version made."""
    path = folder / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    renewed = text.replace('clientapp = "pefll_node:client"', f"clientapp = {_toml(CLIENT_APP)}")
    if renewed != text:
        write_whole(path, renewed.encode())


def no_federation(folder: Path) -> PefllError:
    """Return the error for a folder that is not a federation's folder."""
    return PefllError(f"{folder} is not a federation: make one with `pefll flower init {folder}`", code="PEFLL-F207")


def read_app(folder: Path) -> Plan:
    """Read the plan from a federation's folder."""
    path = folder / "pyproject.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        config = content["tool"]["flwr"]["app"]["config"]
    except FileNotFoundError:
        raise no_federation(folder) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # the last: too many nested tables
        raise PefllError(f"{path} is damaged: {first_line(error)}", code="PEFLL-F203") from None
    return Plan.from_config(config)


def _toml(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
