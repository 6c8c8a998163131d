"""The personal models of a federation's clients, seen or unseen, and their predictions of single samples."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pefll.core.arguments import shown
from pefll.core.errors import PefllError
from pefll.core.progress import Monitor
from pefll.core.tree import Tree, map_tree
from pefll.core.wording import counted, first_few
from pefll.data.federation import Federation
from pefll.data.samples import SPLITS
from pefll.engines.serial import SerialCohort, SerialEngine
from pefll.methods.contract import Method
from pefll.models.neighbours import NeighbourModel
from pefll.models.spec import ModelSpec
from pefll.runs.config import Config
from pefll.runs.new_client import dtype_of
from pefll.runs.personal import PersonalModel
from pefll.runs.prediction_columns import data_frame, named, probability_columns

Array = npt.NDArray[Any]
_WHOLE_NUMBER = re.compile("-?[0-9]+")


@dataclass(frozen=True, eq=False)
class Predictions:
    """What clients' personal models say about the clients' own samples, one entry per sample.

    Attributes:
        client: int64 [N], the client's number in the federation.
        sample: int64 [N], the sample's index into the federation's x and y.
        row: int64 [N], the sample's row in the data that the federation was made from, from 0.
        label: [N], the true labels.
        predicted: [N], the predictions.
        probabilities: [N, k], the probability of each class, or of each member of a set; None if the task gives none.
        names: the name of each client in the federation.
        class_names: the name of each class; empty if the data has no names.
        index: the index of the pandas data frame that the federation was made from; or None.
    """

    client: Array
    sample: Array
    row: Array
    label: Array
    predicted: Array
    probabilities: Array | None
    names: tuple[str, ...]
    class_names: tuple[str, ...]
    index: Any = None

    def __len__(self) -> int:
        return len(self.client)

    def __repr__(self) -> str:
        return f"<Predictions of {counted(len(self), 'sample')} of {counted(len(np.unique(self.client)), 'client')}>"

    def frame(self) -> Any:
        """Return a pandas data frame with the columns client, sample, label, predicted and probability.

        Its index is that of the data frame that the federation was made from, or else the row in the data from 0.
        Clients have their names. Classes are as the labels in the data: texts, True and False, or whole numbers. The
        probability is that of the predicted class; for sets, those of all members. Up to 20 classes also have a column
        each, such as `probability_yes`.
        """
        columns: dict[str, Any] = {
            "client": np.asarray(self.names)[self.client],
            "sample": self.sample,
            "label": named(self.label, self.class_names),
            "predicted": named(self.predicted, self.class_names),
        }
        columns |= probability_columns(self.probabilities, self.predicted, self.class_names)
        return data_frame(columns, self.row if self.index is None else self.index[self.row])


def personal_model(method: Method[Any], cohort: SerialCohort, theta: Tensor, spec: ModelSpec) -> PersonalModel:
    """Return the personal model of the only client of a cohort.

    Args:
        method: the method.
        cohort: a cohort of one client.
        theta: what `method.personalize` returned for it, [1, D].
        spec: of the run's models.
    """
    # The models of some methods are more than a network with weights.
    make = getattr(method, "personal_module", None)
    module = make(cohort, theta) if make else method.problem.model.with_parameters(theta[0])
    neighbours = module.settings if isinstance(module, NeighbourModel) else None
    return PersonalModel(module.eval(), dataclasses.replace(spec, neighbours=neighbours), method.problem.task)


def client_models(
    method: Method[Any], server: Tree, config: Config, spec: ModelSpec, federation: Federation, clients: Iterable[int]
) -> Generator[PersonalModel, None, None]:
    """Yield the personal model of each of some clients of a federation; seen clients use what they kept in training.

    Args:
        method: the trained method.
        server: the method's state.
        config: of the run.
        spec: of the run's models.
        federation: has the clients' samples.
        clients: numbers of clients.
    """
    if not len(federation.rows):
        raise PefllError(
            f"{federation.name}: the clients' samples are on other machines, so their models cannot be made here",
            code="PEFLL-T626",
        )
    engine = SerialEngine(federation, method, config.seed, 0, dtype_of(config.precision))
    with closing(engine), torch.no_grad():
        server = map_tree(engine.cast, server)
        for client in clients:
            ((_, cohort),) = engine.cohorts(np.array([client], dtype=np.int64))
            model = personal_model(method, cohort, method.personalize(server, cohort), spec)
            yield model.of_client(federation.name_of(client))


def predictions_of(
    models: Iterable[PersonalModel],
    federation: Federation,
    clients: Sequence[int],
    split: int,
    *,
    watch: Monitor,
) -> Predictions:
    """Return the predictions of clients' models for the clients' own samples of a split.

    Args:
        models: the model of each client.
        federation: has the samples.
        clients: the clients' numbers.
        split: number of the split.
        watch: gets the number of clients done.
    """
    rows, predicted, owner = list[Array](), list[Array](), list[Array]()
    chances = list[Any]()
    for done, (client, model) in enumerate(zip(clients, models, strict=True), start=1):
        mine = federation.indices(client, split).cpu()
        if len(mine):
            x = federation.x.cpu()[mine]  # a tensor: its columns are encoded already
            found, chance = model.predict_with_probabilities(x)
            predicted.append(found)
            chances.append(chance)
            rows.append(mine.numpy())
            owner.append(np.full(len(mine), client, dtype=np.int64))
        watch.at(done)
    if not rows:
        who = "the client has" if len(clients) == 1 else f"none of the {len(clients):,} clients has"
        missing = f"no {SPLITS[split]} sample" if len(clients) == 1 else f"a {SPLITS[split]} sample"
        raise PefllError(f"{federation.name}: {who} {missing}; choose another split", code="PEFLL-T628")
    sample = np.concatenate(rows)
    return Predictions(
        client=np.concatenate(owner),
        sample=sample,
        row=sample if federation.row is None else federation.row[sample],
        label=federation.y.cpu().numpy()[sample],
        predicted=np.concatenate(predicted),
        probabilities=None if any(each is None for each in chances) else np.concatenate(chances),
        names=tuple(map(federation.name_of, range(federation.num_clients))),
        class_names=federation.class_names if federation.labels == "classes" else (),
        index=federation.index,
    )


def numbers_of(federation: Federation, clients: Any) -> list[int]:
    """Return the numbers of clients: of one client, of a list of clients, or of all for None.

    A text is a client's name in the data. So is an integer, if the name of any client is a whole number. Otherwise, an
    integer is a client's number in the federation.
    """
    if clients is None:
        return list(range(federation.num_clients))
    listed = [clients] if isinstance(clients, str) or not hasattr(clients, "__iter__") else list(clients)
    names = {federation.name_of(one): one for one in range(federation.num_clients)} if listed else {}
    has_numbers = any(map(_WHOLE_NUMBER.fullmatch, names))
    return [_number_of(federation, one, names, has_numbers) for one in listed]


def _number_of(federation: Federation, client: Any, names: dict[str, int], has_numbers: bool) -> int:
    """Return the number of a client; `has_numbers` says whether any of the `names` is a whole number."""
    if isinstance(client, str):
        found, known = names.get(client), f"clients are called {first_few(names)}"
    else:
        client = _integer(client)
        if has_numbers:
            found = names.get(str(client))
            known = f"clients are called {first_few(names)}; federation.name_of(number) gives the name of a number"
        else:
            found = client if 0 <= client < federation.num_clients else None
            known = f"clients are called {first_few(names)}, or have the numbers 0..{federation.num_clients - 1}"
    if found is None:
        raise PefllError(f"{federation.name} has no client {client!r}; its {known}", code="PEFLL-T625")
    return found


def _integer(client: Any) -> int:
    given: Any = None if isinstance(client, bool) else client
    try:
        return operator.index(given)
    except TypeError as error:
        raise PefllError(
            f"the client is {shown(client)}; give its name as a text, or its number in the federation",
            code="PEFLL-T625",
        ) from error
