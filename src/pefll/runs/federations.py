"""The federation of a config: its data, split among clients."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pefll.core.arguments import in_utf8
from pefll.core.errors import PefllError
from pefll.core.progress import say
from pefll.core.wording import argument, either
from pefll.data import DATASETS, classes_without_samples, load_samples, make_federation
from pefll.data.column_use import Use, use_of
from pefll.data.federation import Federation
from pefll.data.samples import Samples
from pefll.data.selecting import selected
from pefll.runs.config import Config
from pefll.tasks.names import labels_for

_MOST_PATH = 4_096  # a longer text is no path of a file

# Settings that decide which samples are read.
_OF_SAMPLES = (
    *("data", "data_dir", "label", "client_column", "features", "drop", "treat", "encode", "time_column"),
    *("missing", "min_samples"),
)
_CALL = "evaluate(federation=...)"


def federation_of(config: Config, console: Console | None, call: str = _CALL) -> Federation:
    """Return the federation of a config; PefllError if its data cannot be read, or has changed.

    `call` is how a user of Python gives other data, for these errors.
    """
    return federations_of([config], console, call)[0]


def federations_of(configs: Sequence[Config], console: Console | None, call: str = _CALL) -> list[Federation]:
    """Return the federation of each config; federations of the same data share its samples."""
    known: dict[tuple[str, ...], Samples] = {}
    federations = []
    for config in configs:
        source = (*(str(getattr(config, name)) for name in _OF_SAMPLES), labels_for(config.task))
        if source not in known:
            known[source] = _samples_of(config, console, call)
        federations.append(_partitioned(known[source], config, call))
    return federations


def use_of_columns(config: Config) -> Use:
    """Return how the columns of a table are used."""
    pairs = [(name.strip(), equals, rule.strip()) for name, equals, rule in map(_pair, names_in(config.treat))]
    if wrong := [name for name, equals, rule in pairs if not (name and equals and rule)]:
        raise PefllError(
            f"{argument('treat', config.treat)} has no rule for {wrong[0]!r}; write NAME=RULE, such as joined=date",
            code="PEFLL-C580",
        )
    return use_of(
        names_in(config.features),
        names_in(config.drop),
        {name: rule for name, _, rule in pairs},
        # Data without columns, and named data sets, ignore it.
        config.encode,
        config.time_column,
        config.missing,
    )


def _pair(text: str) -> tuple[str, str, str]:
    return text.rpartition("=")


def names_in(text: str) -> tuple[str, ...]:
    """Return names with commas between them. A name with a comma is in quotation marks, as in a CSV file."""
    if not text.strip():
        return ()
    names = (name.strip() for row in csv.reader(text.splitlines(), skipinitialspace=True) for name in row)
    return tuple(name for name in names if name)


def data_of_python(config: Config) -> bool:
    """Return whether a run's data was given in Python: the data has a name, but no file."""
    return _is_gone(config) and not Path(config.data).suffix and len(Path(config.data).parts) == 1


def kept_names(text: str) -> str:
    """Return names of clients as a run keeps them: a file by its whole path, so that commands elsewhere find it."""
    return str(Path(text).resolve()) if text and len(text) <= _MOST_PATH and Path(text).is_file() else text


def _unseen_clients(text: str) -> tuple[str, ...]:
    """Return the names of unseen clients, from a text with commas between them or from a file with one per line."""
    path = Path(text).expanduser()
    if not text or len(text) > _MOST_PATH or not path.is_file():
        return names_in(in_utf8(text))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise PefllError(
            f"{path} cannot be read as a list of clients: {error}; write one name per line, in UTF-8", code="PEFLL-C581"
        ) from None
    names = tuple(line.strip() for line in lines if line.strip())
    if not names:
        raise PefllError(f"{path} names no client; write one name per line", code="PEFLL-C582")
    return names


def _is_gone(config: Config) -> bool:
    return config.data not in DATASETS and config.data_sha256 != "" and not Path(config.data).exists()


def _samples_of(config: Config, console: Console | None, call: str) -> Samples:
    if data_of_python(config):
        raise PefllError(
            f"the run was trained on data given in Python ({config.data}), which the run's folder does not have; give "
            f"{either('a file to evaluate on with --data', f'this data, or other data, with {call}')}",
            code="PEFLL-T117",
        )
    if _is_gone(config):
        raise PefllError(
            f"the run was trained on {config.data}, which does not exist any more; put it back", code="PEFLL-T118"
        )
    samples = load_samples(
        config.data,
        config.data_dir,
        lambda sentence: say(console, sentence) if console else None,
        label=config.label,
        client=config.client_column,
        use=use_of_columns(config),
        labels=labels_for(config.task),
    )
    is_first = config.data_sha256 == ""
    samples, notes = selected(samples, config.missing, config.min_samples)
    if console and is_first:
        for note in notes:
            say(console, note)
    # Only at the start of a run. After that, its config has a fingerprint.
    is_new = config.data not in DATASETS and not config.data_sha256
    if console and is_new and (gaps := classes_without_samples(samples)):
        largest, classes = samples.classes - 1, samples.classes
        say(console, f"{samples.name}: the largest label is {largest}, so there are {classes} classes, but {gaps}")
    return samples


def _partitioned(samples: Samples, config: Config, call: str) -> Federation:
    source = DATASETS.get(config.data)
    partition = config.partition or (source.partition if source else "")
    if not partition:
        if samples.client is None:
            raise PefllError(
                f"{config.data} does not name the client of each sample; name their column with "
                f"{argument('client', option='--client-column')}, or let pefll make clients with "
                f"{argument('partition', 'by-class 2')} and {argument('clients', 50)}",
                code="PEFLL-T119",
            )
        partition = "natural"
    natural_number = partition == "natural" and not config.clients
    clients = None if natural_number else config.clients or (source.clients if source else None)
    federation = make_federation(
        samples,
        partition=partition,
        clients=clients,
        seed=config.seed,
        unseen=config.unseen,
        unseen_clients=_unseen_clients(config.unseen_clients),
    )
    if config.data_sha256 and federation.fingerprint() != config.data_sha256:
        where = config.data_dir if source else config.data
        other = either("--data FILE", call)
        raise PefllError(
            f"the data in {where} is not what the run was trained on; restore it, or give other data with {other}",
            code="PEFLL-T120",
        )
    return federation
