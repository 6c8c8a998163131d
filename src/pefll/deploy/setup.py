"""Makes an agreement, the settings that server and clients share, from example data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.plugins import allow
from pefll.core.wording import argument, counted
from pefll.data import CLIENT, LABEL, Normalise, load_samples, natural
from pefll.data.federation import Federation
from pefll.data.samples import Samples
from pefll.deploy.plan import check_names
from pefll.engines.flower.client.policy import MIN_SAMPLES
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.names import client_name
from pefll.methods import typed_settings
from pefll.models import resolve_model
from pefll.tasks.checking import bound_task
from pefll.tasks.names import allow_task, checked_task, inferred, labels_for, name_of

MOST_GENERATED_NAMES = 10_000  # more would take long, because each client gets a key


def client_names(text: str) -> tuple[str, ...]:
    """Return the names of clients, from their number or from names separated by commas."""
    if text.strip().isdecimal():
        if not 1 <= int(text) <= MOST_GENERATED_NAMES:
            raise PefllError(
                f"{argument('clients', text)}: give the number of clients, 1 to {MOST_GENERATED_NAMES:,}, or their "
                "names, separated by commas",
                code="PEFLL-F425",
            )
        return tuple(client_name(number) for number in range(int(text)))
    names = tuple(name.strip() for name in text.split(","))
    check_names(names)
    return names


def agreement_like(
    like: str,
    data_dir: Path,
    *,
    method: str,
    pairs: list[str],
    model: str,
    num_clients: int,
    seed: int = 0,
    label: str = LABEL,
    client: str = CLIENT,
    task: str = "",
) -> Agreement:
    """Return an agreement for clients whose data has the same form as the example `like`.

    Args:
        like: name of a data set, or path of a file or folder.
        data_dir: folder of data sets.
        method: a key of METHODS, or package.module:Class.
        pairs: hyper-parameters, each NAME=VALUE.
        model: a client model's name, package.module:function, or auto.
        num_clients: number of clients that take part in training.
        seed: seed of all random draws.
        label: see `load_samples`.
        client: name of the column with the client, which is not used as a feature.
        task: the task and its settings, as text; "" for the one that fits the labels. A regression takes the mean and
            the deviation of labels from the example.
    """
    allow_task(task)
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise PefllError(f"{argument('pairs', option='--set')} takes NAME=VALUE, not {pair!r}", code="PEFLL-F426")
        settings[name.strip()] = value.strip()
    allow(method, model, *settings.values())
    samples = load_samples(like, data_dir, label=label, client=client, labels=labels_for(task))
    # Clients cannot learn together what to do to the columns of a table, so the example's rows decide.
    example = _one_client(samples)
    learned = bound_task(checked_task(task) or inferred(example), _one_client(samples, validation=0.0, test=0.0))
    agreed = Agreement(
        method=method,
        settings=typed_settings(method, settings),
        model=resolve_model(model, example.input_shape, samples.tokens),
        input_shape=example.input_shape,
        classes=samples.classes,
        num_clients=num_clients,
        seed=seed,
        tokens=samples.tokens,
        normalise=example.normalise,
        class_names=samples.class_names,
        feature_names=example.feature_names,
        table=example.table.to_json() if example.table else None,
        dataset=samples.name,
        learns=name_of(learned),
        label_columns=samples.y.shape[1] if samples.y.ndim > 1 else 0,
    )
    agreed.build()  # raises PefllError for wrong settings, before any file is written
    return _with_small_descriptor(agreed)


def _with_small_descriptor(agreed: Agreement) -> Agreement:
    """Return the agreement with a descriptor that has at most as many numbers as its batch has samples.

    Clients refuse longer descriptors. The paper has 1 + n/4 numbers for n clients, and batches of 32 samples: from
    n = 128 on, this is too long. If the settings contain `descriptor_size`, the agreement stays the same.
    """
    batch, numbers = _descriptor(agreed)
    size = batch - (numbers - getattr(agreed.build(), "descriptor", 0))
    if batch < MIN_SAMPLES or numbers <= batch or size < 1 or "descriptor_size" in agreed.settings:
        return agreed
    return replace(agreed, settings=agreed.settings | {"descriptor_size": size})


def refused_by_default(agreed: Agreement) -> list[str]:
    """Return warnings about settings that clients refuse by default."""
    method = agreed.build()
    batch, numbers = _descriptor(agreed)
    sentences = []
    if batch and numbers > batch:
        sentences.append(
            f"Clients refuse a descriptor of {counted(numbers, 'number')} from {counted(batch, 'sample')}: it has more "
            "numbers than samples. Make descriptor_size smaller or descriptor_batch larger, or ask the clients' "
            "owners for a larger --numbers-per-sample"
        )
    small = [name for name in ("batch_size", "descriptor_batch") if 0 < getattr(method, name, 0) < MIN_SAMPLES]
    return sentences + [
        f"Clients refuse batches of fewer than {MIN_SAMPLES} samples: {name} is {getattr(method, name)}; make it at "
        f"least {MIN_SAMPLES}, or ask the clients' owners for a smaller --min-samples"
        for name in small
    ]


def _descriptor(agreed: Agreement) -> tuple[int, int]:
    """Return the number of samples behind a descriptor in training (0 for all), and the length of the descriptor."""
    method: Any = agreed.build()
    shares = agreed.classes if getattr(method, "histogram", False) else 0
    return getattr(method, "descriptor_batch", 0), getattr(method, "descriptor", 0) + shares


def statistics(samples: Samples) -> Normalise | None:
    """Return the channel statistics of an example's training samples; None if the samples are not images."""
    return samples.normalise or _one_client(samples).normalise


def _one_client(samples: Samples, **shares: Any) -> Federation:
    """Return the samples as those of one client, with the statistics of its training samples; see `natural`."""
    alone = replace(samples, client=np.zeros(len(samples.x), dtype=np.int64), client_names=(), client_keys=None)
    return natural(alone, 0, unseen=0.0, **shares)
