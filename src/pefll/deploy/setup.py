"""Makes the agreement of a federation from an example of its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.plugins import allow
from pefll.core.wording import argument, counted
from pefll.data import CLIENT, LABEL, Normalise, load_samples, natural, with_channel_stats
from pefll.data.federation import Samples
from pefll.deploy.plan import check_names
from pefll.engines.flower.client.policy import MIN_SAMPLES
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.names import client_name
from pefll.methods import typed_settings
from pefll.models import resolve_model

MOST_MADE_UP = 10_000  # each needs a key


def client_names(text: str) -> tuple[str, ...]:
    """Return the names of clients, from their number or from a list with commas."""
    if text.strip().isdecimal():
        if not 1 <= int(text) <= MOST_MADE_UP:
            raise PefllError(
                f"{argument('clients', text)}: give a number from 1 to {MOST_MADE_UP:,}, or names with commas",
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
) -> Agreement:
    """Return an agreement for data like an example.

    Args:
        like: a data set's name, or a path to a file or folder.
        data_dir: folder of data sets.
        method: a key of METHODS, or package.module:Class.
        pairs: hyper-parameters, each NAME=VALUE.
        model: of the clients, or auto.
        num_clients: how many train.
        seed: of everything random.
        label: see `load_samples`.
        client: see `load_samples`; a table's column of clients is no feature.
    """
    allow(method, model)
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise PefllError(f"{argument('pairs', option='--set')} takes NAME=VALUE, not {pair!r}", code="PEFLL-F426")
        settings[name.strip()] = value.strip()
    samples = load_samples(like, data_dir, label=label, client=client)
    agreed = Agreement(
        method=method,
        settings=typed_settings(method, settings),
        model=resolve_model(model, tuple(samples.x.shape[1:]), samples.tokens),
        input_shape=tuple(samples.x.shape[1:]),
        classes=samples.classes,
        num_clients=num_clients,
        seed=seed,
        tokens=samples.tokens,
        normalise=statistics(samples),
        class_names=samples.class_names,
        feature_names=samples.feature_names,
        dataset=samples.name,
    )
    agreed.build()  # raises PefllError for wrong settings, before any file is written
    return _with_small_descriptor(agreed)


def _with_small_descriptor(agreed: Agreement) -> Agreement:
    """Return it with descriptors of at most as many numbers as samples, unless the settings have a size.

    The paper's size, 1 + n/4, exceeds its batch of 32 from 128 clients on, and clients refuse that.
    """
    batch, numbers = _descriptor(agreed)
    size = batch - (numbers - getattr(agreed.build(), "descriptor", 0))
    if batch < MIN_SAMPLES or numbers <= batch or size < 1 or "descriptor_size" in agreed.settings:
        return agreed
    return replace(agreed, settings=agreed.settings | {"descriptor_size": size})


def refused_by_default(agreed: Agreement) -> list[str]:
    """Return sentences about what clients would refuse unless their owners allow it."""
    method = agreed.build()
    batch, numbers = _descriptor(agreed)
    sentences = []
    if batch and numbers > batch:
        sentences.append(
            f"Clients refuse to describe {counted(batch, 'sample')} by {counted(numbers, 'number')}: make "
            "descriptor_size smaller or descriptor_batch larger, or let owners start with --numbers-per-sample"
        )
    small = [name for name in ("batch_size", "descriptor_batch") if 0 < getattr(method, name, 0) < MIN_SAMPLES]
    return sentences + [
        f"Clients refuse to reply from fewer than {MIN_SAMPLES} samples: make {name} larger than "
        f"{getattr(method, name)}, or let owners start with --min-samples"
        for name in small
    ]


def _descriptor(agreed: Agreement) -> tuple[int, int]:
    """Return the number of samples behind a descriptor in training, 0 for all, and its number of values."""
    method: Any = agreed.build()
    shares = agreed.classes if getattr(method, "histogram", False) else 0
    return getattr(method, "descriptor_batch", 0), getattr(method, "descriptor", 0) + shares


def statistics(samples: Samples) -> Normalise | None:
    """Return the channel statistics of an example's training samples; None if they are not pixels."""
    if samples.normalise is not None:
        return samples.normalise
    alone = replace(samples, client=np.zeros(len(samples.x), dtype=np.int64), client_names=())
    return with_channel_stats(natural(alone, 0, unseen=0.0)).normalise
