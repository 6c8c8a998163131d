"""What a run was asked to do. Every field has a type and a default; a misspelt key is refused."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pefll.core.arguments import plain, share, shown, text, whole_number
from pefll.core.errors import PefllError, unknown
from pefll.core.files import write_whole
from pefll.core.wording import argument, counted, for_the_command_line
from pefll.runs.checksums import read_first_line, with_first_line

PRECISIONS = ("auto", "float32", "tf32", "bf16", "float64")
ENGINES = ("auto", "serial", "vector", "flower")
# What may differ when a run is resumed: where things are and how fast they go. Another engine or device computes the
# same, but rounds differently.
MAY_CHANGE = {"rounds", "data_dir", "device", "engine", "processes", "checkpoint_every", "data_sha256"}

# No run of more rounds would end in a lifetime, at a ten thousandth of a second for each.
MOST_ROUNDS = 10**12

# What does not belong into the command that makes a run again elsewhere.
SILENT = {"data_dir", "device", "processes", "checkpoint_every", "data_sha256"}
MOST_CHARACTERS = 16_384  # of a file of settings


@dataclass(frozen=True)
class Config:
    """A run's settings.

    Attributes:
        method: a key of METHODS, or package.module:Class.
        settings: the method's hyper-parameters that differ from its defaults.
        data: a data set's name, or a path to one's own data; "arrays" for data given in Python.
        data_dir: where data sets lie.
        partition: "by-class K", "dirichlet A", "dirichlet A/B", "natural", or "" for the data set's own.
        clients: how many clients to make; 0 for the data set's own number.
        unseen: the share of clients that never take part in training.
        model: what clients run: auto, lenet, cnn, resnet20, mlp, or package.module:function.
        rounds: of training.
        clients_per_round: c; 0 for 5% of all clients.
        seed: of everything random.
        engine: auto, serial, vector; flower for a run whose clients are on other machines.
        device: auto, cpu, cuda, cuda:1, ...
        precision: auto, float32, tf32 or bf16 (products of float32 numbers rounded for a GPU's tensor cores), float64;
            auto is tf32 on a GPU.
        processes: of the serial engine; 0 for one per core.
        eval_every: rounds between evaluations.
        eval_clients: how many clients evaluations during training use; 0 for as many as cost little beside training.
            The final test always uses all.
        checkpoint_every: rounds between checkpoints (one is also made every five minutes).
        label: the label's column, for data in a table, or array, in an .npz, where "label" stands for y.
        client_column: the client's column, for data in a table, or array, in an .npz.
        data_sha256: fingerprint of the federation, so that a run is never resumed on other data.
    """

    method: str = "pefll"
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = "digits"
    data_dir: str = "data"
    partition: str = ""
    clients: int = 0
    unseen: float = 0.1
    model: str = "auto"
    rounds: int = 1000
    clients_per_round: int = 0
    seed: int = 0
    engine: str = "auto"
    device: str = "auto"
    precision: str = "auto"
    processes: int = 0
    eval_every: int = 30
    eval_clients: int = 0
    checkpoint_every: int = 1000
    label: str = "label"
    client_column: str = "client"
    data_sha256: str = ""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            self._check_type(each.name, str(each.type).partition("[")[0])
        if self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)

    def toml(self) -> str:
        """Return the settings as TOML."""
        plain = dataclasses.asdict(self)
        settings = plain.pop("settings")
        lines = [f"{key} = {_toml(value)}" for key, value in plain.items()]
        lines += ["", "[settings]", *(f"{key} = {_toml(value)}" for key, value in settings.items())]
        return "\n".join(lines) + "\n"

    def save(self, path: Path, run: str = "") -> None:
        """Write the settings as TOML.

        Args:
            path: the file.
            run: the number of the run; with it the file gets a first line that checks the others.
        """
        text = self.toml()
        write_whole(path, (with_first_line(text, run) if run else text).encode())

    @classmethod
    def load(cls, path: Path, trained: str | None = None) -> Config:
        """Read settings from TOML; see `read_settings`."""
        values = read_settings(path, trained)
        known = {each.name for each in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise unknown(f"setting in {path}", key, known)
        try:
            with for_the_command_line(False):  # the file has names of fields
                return cls(**values)
        except PefllError as error:
            raise PefllError(f"{path}: {error.args[0]}", error.code) from error

    def _check_type(self, name: str, kind: str) -> None:
        value: Any = plain(getattr(self, name))
        if kind == "int":
            least = 1 if name in ("eval_every", "checkpoint_every") else 0
            value = whole_number(value, argument(name), least, **({"most": MOST_ROUNDS} if name == "rounds" else {}))
        elif kind == "float":
            value = share(value, argument(name))  # the only one is `unseen`
        elif kind == "str":
            value = text(value, argument(name))
        elif not isinstance(value, dict):
            raise PefllError(f"{name} is {shown(value)}; it must be a dictionary", code="PEFLL-A012")
        object.__setattr__(self, name, value)  # a number of NumPy is Python's own from here on

    def command(self) -> str:
        """Return the command that makes this run again: the data, and all settings that differ from their defaults."""
        words = ["pefll", "train"]
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            # `pefll train` asks for the data: what it trains on is never left to a default.
            if each.name in SILENT or (value == each.default and each.name != "data"):
                continue
            if each.name == "settings":
                words += [word for key, setting in value.items() for word in ("--set", f"{key}={setting}")]
            else:
                words += [f"--{each.name.replace('_', '-')}", str(value)]
        return shlex.join(words)

    def check_same(self, other: Config) -> None:
        """Raise PefllError where `other`, asked for on resuming, would compute something else."""
        advice = f"start a new run in another folder, with {argument('out')}"
        for each in dataclasses.fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name == "data_sha256" and mine and theirs and mine != theirs:
                raise PefllError(f"the data is not what the run was started on; {advice}", code="PEFLL-R103")
            if each.name not in MAY_CHANGE and mine != theirs:
                was = f"settings {mine!r}" if each.name == "settings" else argument(each.name, mine)
                raise PefllError(
                    f"the run was started with {was}, and cannot be resumed with {theirs!r}; {advice}",
                    code="PEFLL-R104",
                )
        if other.rounds < self.rounds:
            rounds = counted(self.rounds, "round")
            raise PefllError(
                f"the run was started for {rounds}; it can be extended but not shortened: {advice}", code="PEFLL-R105"
            )


def read_settings(path: Path, trained: str | None = None) -> dict[str, Any]:
    """Return what a file of settings holds, where that is what was written and what its run was trained with.

    Args:
        path: the file.
        trained: the settings in the run's newest checkpoint, as TOML; empty where it has none, and None for a file that
            is no run's.

    Raises:
        PefllError: where the file is damaged, or was changed by hand.
    """
    try:
        text = path.read_bytes().decode()
        if len(text) > MOST_CHARACTERS:  # tables inside each other take time and memory with the square of their depth
            raise ValueError(f"it has {len(text):,} characters, and settings have at most {MOST_CHARACTERS:,}")
        values = tomllib.loads(text)
        if _depth(values) > 4:
            raise RecursionError
        if trained is not None and not values:
            raise ValueError("it is empty")
    except FileNotFoundError as error:
        raise PefllError(f"there is no {path}", code="PEFLL-R022") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = "it has too many brackets inside each other" if isinstance(error, RecursionError) else error
        advice = "; its newest checkpoint's manifest.json has a copy, facts.run.config: put it back" if trained else ""
        raise PefllError(f"{path} is damaged: {reason}{advice}", code="PEFLL-R001") from error
    new_run = f"start a new run with another {argument('out')}"
    differing = _differences(values, tomllib.loads(trained)) if trained else {}
    for name, (mine, was) in differing.items():
        if name not in MAY_CHANGE or (name == "data_sha256" and mine and was):
            raise PefllError(
                f"{path} has {name} = {mine}, but the run was trained with {name} = {was}; put it back, or {new_run}",
                code="PEFLL-R002",
            )
    if read_first_line(text)[1] is False and (differing or not trained):
        changed = "".join(f": {name} = {mine}, and was {was}" for name, (mine, was) in differing.items())
        raise PefllError(
            f"{path} was changed since pefll wrote it{changed}; put it back and give what may change to "
            f"{argument('resume')}, or {new_run}",
            code="PEFLL-R003",
        )
    return values


def _differences(values: dict[str, Any], trained: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return both values, in words, of each setting that differs; a setting of a later version had its default."""
    defaults = {
        each.name: each.default for each in dataclasses.fields(Config) if each.default is not dataclasses.MISSING
    }
    flat = [
        {key: value for key, value in one.items() if key != "settings"}
        | {f"settings.{key}": value for key, value in _table(one.get("settings")).items()}
        for one in (values, defaults | trained)
    ]
    found = {}
    for name in dict.fromkeys([*flat[1], *flat[0]]):
        mine, was = ([each[name]] if name in each else [] for each in flat)
        if mine != was and (name in flat[0] or name in trained or name.startswith("settings.")):
            words = [_toml(each[0]) if each else "nothing" for each in (mine, was)]
            found[name.removeprefix("settings.")] = (words[0], words[1])
    return found


def _depth(value: Any) -> int:
    """Return how many tables and lists are inside each other."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's basic strings have JSON's escapes, and want DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # of a date too, which a file may have
