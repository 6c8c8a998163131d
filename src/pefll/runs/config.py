"""The settings of a run. Every setting has a type and a default; unknown names are errors."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pefll.core.arguments import in_utf8, number, plain, share, shown, text, whole_number
from pefll.core.errors import PefllError, unknown
from pefll.core.files import read_limited, write_whole
from pefll.core.wording import argument, counted, for_the_command_line
from pefll.runs.checksums import read_first_line, with_first_line

PRECISIONS = ("auto", "float32", "tf32", "bf16", "float64")
ENGINES = ("auto", "serial", "vector", "flower")
# Settings that may differ when a run is resumed: they change where, how fast and how long it runs. Another engine or
# device changes results only by rounding. Whether a table was encoded shows in `data_sha256`.
MAY_CHANGE = {
    "rounds",
    "data_dir",
    "device",
    "engine",
    "processes",
    "checkpoint_every",
    "checkpoint_minutes",
    "encode",
    "data_sha256",
}

# Settings that are shares of clients.
SHARES = ("unseen", "prior_clients")

# At 0.1 ms per round this takes three years.
MOST_ROUNDS = 10**12

# Settings that files of earlier versions lack, where the default would mean something else: columns were not encoded.
EARLIER = {"encode": "none"}

# Settings that say how a table becomes a federation.
OF_TABLES = ("features", "drop", "treat", "encode", "missing", "min_samples", "time_column", "unseen_clients")

# Settings that `Config.command` leaves out, because they depend on the machine.
SILENT = {"data_dir", "device", "processes", "checkpoint_every", "checkpoint_minutes", "data_sha256"}
MOST_CHARACTERS = 16_384  # in a settings file
MOST_BYTES = 4 * MOST_CHARACTERS  # UTF-8 needs at most 4 per character
# Settings that name columns of a table.
_COLUMNS = ("label", "client_column", "features", "drop", "treat", "time_column")


@dataclass(frozen=True)
class Config:
    """A run's settings.

    Attributes:
        method: a key of METHODS, or package.module:Class.
        settings: the method's hyper-parameters that differ from its defaults.
        data: a data set's name, or a path to a user's data; "arrays" for data given in Python.
        data_dir: the folder of data sets.
        partition: "by-class K", "dirichlet A", "dirichlet A/B", "natural", or "" for the data set's own.
        clients: number of clients; 0 for the data set's own number.
        unseen: the share of clients that never take part in training.
        model: the clients' model: auto, lenet, cnn, resnet20, mlp, or package.module:function.
        task: the task and its settings, such as "regression loss_name=huber" or "package.module:Class"; "" for
            classification, or for the task that fits the labels.
        rounds: number of training rounds.
        clients_per_round: number of clients in a round; 0 for 5% of all clients.
        sampling: which clients a round has: uniform, samples (in proportion to their numbers of training samples), or
            package.module:function.
        prior_clients: share of the seen clients that take part in the first rounds; their state is kept as the prior
            of PAC-Bayes bounds. 0 for no prior.
        prior_rounds: number of these first rounds; 0 for half of the rounds.
        lr_schedule: schedule of the clients' learning rates: constant, cosine, "cosine LAST", "step ROUNDS FACTOR", or
            package.module:function.
        server_lr_schedule: schedule of the server's learning rates.
        seed: seed of all random numbers.
        engine: auto, serial, vector; flower for clients on other machines.
        device: auto, cpu, cuda, cuda:1, ...
        precision: auto (tf32 on a GPU), float32, float64, tf32 or bf16; with tf32 and bf16, a GPU rounds products.
        processes: processes of the serial engine; 0 for one per core.
        eval_every: rounds between evaluations.
        eval_clients: clients per evaluation during training; 0 for as many as take little time. The final test uses
            all clients.
        checkpoint_every: rounds between checkpoints.
        checkpoint_minutes: a checkpoint is also written if the last one is older than this.
        label: a table's column of labels, or an array in an .npz. In an .npz, "label" means the array y.
        client_column: a table's column of clients, or an array in an .npz.
        features: a table's columns that are features, with commas between them; "" for all others.
        drop: a table's columns that are not used, with commas between them.
        treat: rules for a table's columns, such as "joined=date,zip=category".
        encode: auto, or none to take a table's columns as they are.
        missing: what to do with missing values in a table: impute, drop, drop-unlabelled or refuse.
        min_samples: clients with fewer samples are left out.
        time_column: a table's column, or an array in an .npz, that orders each client's samples, so that the last are
            for the test.
        unseen_clients: names of the clients that never take part in training, with commas between them; "" for a
            random share `unseen`.
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
    task: str = ""
    rounds: int = 1000
    clients_per_round: int = 0
    sampling: str = "uniform"
    prior_clients: float = 0.0
    prior_rounds: int = 0
    lr_schedule: str = "constant"
    server_lr_schedule: str = "constant"
    seed: int = 0
    engine: str = "auto"
    device: str = "auto"
    precision: str = "auto"
    processes: int = 0
    eval_every: int = 30
    eval_clients: int = 0
    checkpoint_every: int = 1000
    checkpoint_minutes: float = 5.0
    label: str = "label"
    client_column: str = "client"
    features: str = ""
    drop: str = ""
    treat: str = ""
    encode: str = "auto"
    missing: str = "impute"
    min_samples: int = 1
    time_column: str = ""
    unseen_clients: str = ""
    data_sha256: str = ""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            self._check_type(each.name, str(each.type).partition("[")[0])
        for name in _COLUMNS:
            object.__setattr__(self, name, in_utf8(getattr(self, name)))
        if self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)

    def toml(self) -> str:
        """Return the settings as TOML, which UTF-8 can hold also if the locale cannot decode a path in them."""
        plain = dataclasses.asdict(self)
        settings = plain.pop("settings")
        lines = [f"{key} = {_toml(value)}" for key, value in plain.items()]
        lines += ["", "[settings]", *(f"{key} = {_toml(value)}" for key, value in settings.items())]
        text = "\n".join(lines) + "\n"
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def save(self, path: Path, run: str = "") -> None:
        """Write the settings as TOML; with a run's ID, the first line checks the others."""
        text = self.toml()
        write_whole(path, (with_first_line(text, run) if run else text).encode())

    @classmethod
    def load(cls, path: Path, trained: str | None = None) -> Config:
        """Return the settings in a TOML file; see `read_settings`."""
        values = read_settings(path, trained)
        known = {each.name for each in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise unknown(f"setting in {path}", key, known)
        try:
            with for_the_command_line(False):  # the file has names of fields, not options
                return cls(**EARLIER | {name: _as_given(value) for name, value in values.items()})
        except PefllError as error:
            raise PefllError(f"{path}: {error.args[0]}", error.code) from error

    def _check_type(self, name: str, kind: str) -> None:
        value: Any = plain(getattr(self, name))
        if kind == "int":
            least = 1 if name in ("eval_every", "checkpoint_every", "min_samples") else 0
            value = whole_number(value, argument(name), least, **({"most": MOST_ROUNDS} if name == "rounds" else {}))
        elif kind == "float":
            value = share(value, argument(name)) if name in SHARES else _minutes(value, argument(name))
        elif kind == "str":
            value = text(value, argument(name))
        elif not isinstance(value, dict):
            raise PefllError(f"{name} is {shown(value)}; it must be a dictionary", code="PEFLL-A012")
        object.__setattr__(self, name, value)  # NumPy's numbers have become Python's

    def command(self) -> str:
        """Return the command that repeats this run: the data, and all settings that differ from their defaults."""
        words = ["pefll", "train"]
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            # `pefll train` has no default for the data.
            if each.name in SILENT or (value == each.default and each.name != "data"):
                continue
            if each.name == "encode" and Path(self.data).suffix.lower() in ("", ".npz"):  # it is about tables alone
                continue
            if each.name == "settings":
                words += [word for key, setting in value.items() for word in ("--set", f"{key}={setting}")]
            else:
                words += [f"--{each.name.replace('_', '-')}", str(value)]
        return shlex.join(words)

    def check_same(self, other: Config) -> None:
        """Raise PefllError if resuming with `other` would give other results."""
        advice = f"start a new run in another folder, with {argument('out')}"
        for each in dataclasses.fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name == "data_sha256" and mine and theirs and mine != theirs:
                raise PefllError(f"this data is not the data of the run; {advice}", code="PEFLL-R103")
            if each.name not in MAY_CHANGE and mine != theirs:
                was, now = (_with(each.name, value) for value in (mine, theirs))
                raise PefllError(
                    f"the run was started {was}, and cannot be resumed {now}; {advice}",
                    code="PEFLL-R104",
                )
        if other.rounds < self.rounds:
            rounds = counted(self.rounds, "round")
            raise PefllError(
                f"the run was started for {rounds}; it can be extended but not shortened: {advice}", code="PEFLL-R105"
            )
        cosine = [name for name in ("lr_schedule", "server_lr_schedule") if getattr(self, name).startswith("cosine")]
        if cosine and other.rounds > self.rounds:
            raise PefllError(
                f"the run cannot be extended: with {argument(cosine[0], getattr(self, cosine[0]))}, its learning rate "
                f"ends at round {self.rounds:,}; {advice}",
                code="PEFLL-R550",
            )


def _with(name: str, value: Any) -> str:
    """Return words for a run's setting, such as "with task='regression'" or "without label"."""
    if name == "settings":
        return f"with settings {value!r}"
    if name == "task" and value == "":
        value = "classification"  # the text of plain classification is empty
    return f"without {argument(name)}" if value == "" else f"with {argument(name, value)}"


def _as_given(value: Any) -> Any:
    """Return a setting as Python gives it to a program: a text in the encoding of the locale's file names."""
    return os.fsdecode(value.encode()) if isinstance(value, str) else value


def _minutes(value: Any, name: str) -> float:
    found = number(value, name)
    if found <= 0:
        raise PefllError(f"{name} is {found}; it must be more than 0", code="PEFLL-A554")
    return found


def read_settings(path: Path, trained: str | None = None) -> dict[str, Any]:
    """Return the content of a settings file; PefllError if it is damaged or was changed by hand.

    Args:
        path: the file.
        trained: the settings in the run's newest checkpoint, as TOML; empty without a checkpoint. None for a file
            outside a run.
    """
    try:
        text = read_limited(path, MOST_BYTES).decode()
        if len(text) > MOST_CHARACTERS:  # nested tables cost time and memory quadratic in their depth
            raise ValueError(f"it has {len(text):,} characters, but settings have at most {MOST_CHARACTERS:,}")
        values = tomllib.loads(text)
        if _depth(values) > 4:
            raise RecursionError
        if trained is not None and not values:
            raise ValueError("it is empty")
    except FileNotFoundError as error:
        raise PefllError(f"there is no {path}", code="PEFLL-R022") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = "it has too many levels of brackets" if isinstance(error, RecursionError) else error
        advice = "; put back the copy at facts.run.config in the newest checkpoint's manifest.json" if trained else ""
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
            f"{path} was changed since pefll wrote it{changed}; undo the change and give new settings to "
            f"{argument('resume')}, or {new_run}",
            code="PEFLL-R003",
        )
    return values


def _differences(values: dict[str, Any], trained: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return both values of each setting that differs, as TOML. A setting that `trained` lacks had its default."""
    defaults = {
        each.name: each.default for each in dataclasses.fields(Config) if each.default is not dataclasses.MISSING
    }
    defaults |= EARLIER
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
    """Return the levels of nested tables and lists."""
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
        # TOML strings have JSON's escapes, and also escape DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # also for dates, which a user may have written into the file
