"""Loads data sets by name, and makes federations by the name of a partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pefll.core.arguments import listed, plain, shown, text, whole_number
from pefll.core.arguments import path as as_path
from pefll.core.errors import PefllError, unknown
from pefll.core.wording import argument
from pefll.data import cifar, digits, femnist, frames, leaf, mnist_writers, shakespeare, user_files
from pefll.data.cache import Report, cached, stamp_of
from pefll.data.class_partition import by_class, dirichlet
from pefll.data.column_use import AS_IT_IS, Use, refuse_use, use_of
from pefll.data.federation import Federation
from pefll.data.owners import CLIENT, SPLIT
from pefll.data.partition import natural
from pefll.data.samples import Samples, check_is_samples
from pefll.data.seen_clients import names_of_clients
from pefll.data.user_arrays import federation_of_clients

PARTITIONS = "'by-class K', 'dirichlet A', 'dirichlet A/B' (B for new clients) or 'natural'"


@dataclass(frozen=True)
class Source:
    """A data set that users load by name."""

    name: str
    about: str  # description
    origin: str  # origin and licence
    files: str  # description of the files in the data folder; empty if no file is needed
    partition: str  # default partition
    clients: int | None  # default number of clients; None for all natural clients
    load: Callable[[Path], Samples]  # takes the data folder
    found: Callable[[Path], list[Path]]  # takes the data folder; returns the existing files of the data set

    @property
    def embedded(self) -> bool:
        """Whether the data set needs no file."""
        return not self.files


DATASETS: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="digits",
            about="1,797 handwritten digits of 8x8 pixels, 10 classes; needs no file",
            origin="UCI Optical Recognition of Handwritten Digits, CC BY 4.0, as embedded in scikit-learn",
            files="",
            partition="by-class 3",
            clients=50,
            load=digits.load,
            found=lambda data_dir: [],
        ),
        Source(
            name="cifar10",
            about="60,000 colour images of 32x32 pixels, 10 classes",
            origin="Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html; its makers state no licence",
            files="cifar-10-batches-py/ or cifar-10-python.tar.gz",
            partition="by-class 2",
            clients=100,
            load=cifar.load_cifar10,
            found=lambda data_dir: cifar.found(cifar.CIFAR10, data_dir),
        ),
        Source(
            name="cifar100",
            about="60,000 colour images of 32x32 pixels, 100 classes",
            origin="Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html; its makers state no licence",
            files="cifar-100-python/ or cifar-100-python.tar.gz",
            partition="by-class 10",
            clients=100,
            load=cifar.load_cifar100,
            found=lambda data_dir: cifar.found(cifar.CIFAR100, data_dir),
        ),
        Source(
            name="femnist",
            about="handwritten characters by writer, 62 classes",
            origin="NIST Special Database 19 by https://github.com/TalwalkarLab/leaf, which is BSD-2-Clause",
            files="femnist/train/*.json and femnist/test/*.json",
            partition="natural",
            clients=None,
            load=femnist.load,
            found=lambda data_dir: leaf.shards(data_dir / "femnist"),
        ),
        Source(
            name="mnist_writers",
            about="MNIST's 70,000 digits by writer, 10 classes",
            origin="MNIST joined with the writers of QMNIST, https://github.com/facebookresearch/qmnist; BSD-style",
            files=str(mnist_writers.FILE),
            partition="natural",
            clients=None,
            load=mnist_writers.load,
            found=mnist_writers.found,
        ),
        Source(
            name="shakespeare",
            about="the next character in the lines of a role, 80 classes",
            origin="the plays as LEAF takes them from the 1994 etext, whose header allows personal use only",
            files="shakespeare/roles.jsonl, or shakespeare/train/*.json and shakespeare/test/*.json",
            partition="natural",
            clients=None,
            load=shakespeare.load,
            found=shakespeare.found,
        ),
        Source(
            name="shakespeare_tenth",
            about="every tenth sample of shakespeare",
            origin="as shakespeare",
            files="as shakespeare",
            partition="natural",
            clients=None,
            load=shakespeare.load_tenth,
            found=shakespeare.found,
        ),
    )
}


def load_samples(
    name_or_path: str | Path,
    data_dir: Path | str = "data",
    report: Report | None = None,
    *,
    label: str = user_files.LABEL,
    client: str = CLIENT,
    use: Use = AS_IT_IS,
    labels: str = "auto",
) -> Samples:
    """Return the samples of a named data set, or those in a user's file or folder.

    Args:
        name_or_path: a key of `DATASETS`, or a path to an `.npz`, CSV or Parquet file or a folder of images.
        data_dir: the folder of the named data sets and of the cache.
        report: is called with a sentence before slow steps.
        label: name of the column or array of labels in a user's file.
        client: name of the column or array of clients in a user's file; the default name may be absent.
        use: how the columns of a user's table are used.
        labels: what labels in a user's file are, see `samples_from_arrays`.
    """
    data_dir = as_path(data_dir, "data_dir").expanduser()
    label = frames.joined_names(label)
    label, client = text(label, "label", user_files.LABEL), text(client, "client", CLIENT)
    source = DATASETS.get(name_or_path) if isinstance(name_or_path, str) else None
    if source is None:
        path = as_path(name_or_path, "the data set's name or path").expanduser()
        # A single word is a misspelt name of a data set. Everything else is a path.
        if path.exists() or path.suffix or len(path.parts) > 1:
            return user_files.load(path, data_dir, report, label=label, client=client, use=use, labels=labels)
        raise unknown("data set", str(name_or_path), DATASETS)
    user_files.refuse_columns(source.name, label, client)
    refuse_use(use, source.name)
    found = source.found(data_dir)
    if not found:
        return source.load(data_dir)
    return cached(source.name, data_dir, stamp_of(found, data_dir), lambda: source.load(data_dir), report)


def make_federation(
    samples: Samples,
    *,
    partition: str,
    clients: int | None,
    seed: int = 0,
    unseen: float = 0.1,
    unseen_clients: Sequence[int | str] = (),
    min_samples: int = 1,
    validation: float | None = None,
    test: float | None = None,
) -> Federation:
    """Return a federation with the given partition of samples among clients.

    Args:
        samples: samples to give to clients.
        partition: 'by-class K', 'dirichlet A', 'dirichlet A/B' (B for new clients) or 'natural'.
        clients: number of clients; with 'natural', they are chosen at random, and None takes all.
        seed: seed of all random draws.
        unseen: fraction of clients that never take part in training.
        unseen_clients: names of the clients that never take part in training, which replace `unseen`; with 'natural'.
        min_samples: clients of the data with fewer samples are left out; with 'natural'.
        validation: share of validation samples, see `natural` and `by_class`; None for the partition's default.
        test: share of test samples if the data is not split; None for the partition's default.
    """
    check_is_samples(samples)
    kind, numbers = _parse(partition)
    least = whole_number(min_samples, argument("min_samples"), 1)
    parts = {name: part for name, part in (("validation", validation), ("test", test)) if part is not None}
    if kind == "natural":
        more: dict[str, Any] = {"unseen": unseen, "clients": clients, "unseen_clients": unseen_clients, **parts}
        if least > 1:
            return federation_of_clients(samples, min_samples=least, seed=seed, **more)
        return natural(samples, seed, **more)
    named = names_of_clients(unseen_clients)
    if named or samples.time is not None or least > 1:
        given = argument("time", option="--time-column")
        if named or least > 1:
            given = argument("unseen_clients" if named else "min_samples")
        raise PefllError(
            f"{given} is for the clients of the data, but {partition!r} makes other clients; leave it out, or use "
            f"{argument('partition', 'natural')}",
            code="PEFLL-D606",
        )
    if clients is None:
        raise PefllError(
            f"the partition {partition!r} needs a number of clients: add {argument('clients', 50)}", code="PEFLL-D206"
        )
    if kind == "by-class":
        return by_class(samples, clients, int(numbers[0]), seed, unseen=unseen, **parts)
    other = numbers[1] if len(numbers) == 2 else None
    return dirichlet(samples, clients, numbers[0], seed, alpha_unseen=other, unseen=unseen, **parts)


def federation_from_file(
    path: str | Path,
    label: str | Sequence[str] = user_files.LABEL,
    client: str = CLIENT,
    *,
    split: str = SPLIT,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    treat: Mapping[str, str] | None = None,
    missing: str = "impute",
    encode: str = "auto",
    min_samples: int = 1,
    time: str | None = None,
    unseen: float = 0.1,
    unseen_clients: Sequence[int | str] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    labels: str = "auto",
) -> Federation:
    """Return a federation of the clients that a file or folder names.

    `federation_from_frame` explains the arguments that are not here. `features`, `drop`, `treat` and `encode` are for
    tables.

    Args:
        path: an `.npz` with x, y and client; a CSV or Parquet table; or a folder `client/class/*.png`.
        label: name of the column or array of labels; in an `.npz`, the default name also finds y.
        client: name of the column or array of clients.
        split: name of the column or array with train, validation, test; it may be absent.
        features: names of the columns that are features; by default all others.
        drop: names of columns that are not used.
        treat: rules for columns, by their names.
        missing: what happens to rows with missing values.
        encode: "auto", or "none" to use numbers as they are.
        min_samples: clients with fewer samples are left out.
        time: name of a column or array of dates or numbers, which orders each client's samples.
        unseen: fraction of clients that never take part in training.
        unseen_clients: the clients that never take part in training, by name; they replace `unseen`.
        validation: fraction of each client's training samples that become validation samples.
        test: fraction of each client's samples that become test samples, if the data is not split.
        seed: seed of the random splits and of the order of clients.
        classes: number of classes; by default the largest label + 1.
        labels: what labels are, see `samples_from_arrays`.
    """
    chosen, dropped = (
        tuple(text(each, what) for each in listed(() if given is None else given, what, "['age']"))
        for what, given in (("features", features), ("drop", drop))
    )
    use = use_of(chosen, dropped, treat, encode, "" if time is None else time, missing)
    samples = user_files.read_samples(
        path, label=label, client=client, split=split, classes=classes, use=use, labels=labels
    )
    if samples.client is None:
        raise PefllError(
            f"{path} does not name the client of each sample; name its column or array with client=..., or give "
            "samples to clients with pefll.make_federation(pefll.read_samples(path), ...)",
            code="PEFLL-D617",
        )
    return federation_of_clients(
        samples,
        missing,
        min_samples,
        seed=seed,
        unseen=unseen,
        unseen_clients=unseen_clients,
        validation=validation,
        test=test,
    )


def _parse(partition: str) -> tuple[str, list[float]]:
    """Return the first word of a partition's name, and its numbers."""
    given = plain(partition)
    if not isinstance(given, str):
        raise PefllError(f"the partition is {shown(partition)}; write {PARTITIONS}", code="PEFLL-A016")
    kind, _, rest = given.strip().partition(" ")
    try:
        if kind == "natural" and not rest:
            return kind, []
        if kind == "by-class":
            return kind, [int(rest)]
        if kind == "dirichlet":
            numbers = [float(number) for number in rest.split("/")]
            if len(numbers) <= 2:
                return kind, numbers
    except ValueError:
        pass
    raise PefllError(f"unknown partition {partition!r}: write {PARTITIONS}", code="PEFLL-D207")
