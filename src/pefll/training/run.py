"""A trained run: its scores, and personal models made with it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from pefll.core import arguments
from pefll.core.errors import PefllError
from pefll.core.plugins import allow
from pefll.core.progress import monitor, say
from pefll.core.tree import Tree, map_tree
from pefll.core.warning import warn
from pefll.core.wording import argument, counted, either, first_few, reasons
from pefll.data.arrays import blank_labels
from pefll.data.federation import Federation, check_is_federation
from pefll.data.frames import is_frame, joined_names
from pefll.data.owners import (
    Columns,
    Name,
    Owned,
    by_client,
    from_frame,
)
from pefll.data.samples import Samples
from pefll.data.table_plan import plan_of
from pefll.engines.device_queue import queue_of
from pefll.engines.hardware import open_engine, pick_hardware
from pefll.engines.serial import SerialEngine
from pefll.methods import given_networks, typed_settings, with_networks
from pefll.methods.contract import Method, Problem
from pefll.models import Network, own
from pefll.models.check import probe
from pefll.models.own import Choice
from pefll.models.spec import ModelSpec, check_same_model, spec_of_checkpoint
from pefll.runs import checkpoint
from pefll.runs.client_names import ClientNames, names_in, names_in_summary
from pefll.runs.config import Config
from pefll.runs.federations import federation_of
from pefll.runs.halves import Embedder, Generator, Origin, halves_of
from pefll.runs.new_client import (
    check_labels,
    dtype_of,
    federation_of_new_client,
    labelled_clients,
    one_client,
    read_new_client,
)
from pefll.runs.other_data import encoded_federation, is_raw
from pefll.runs.personal import PersonalModel, warn_of_positions
from pefll.runs.prediction_columns import data_frame
from pefll.runs.problem import build_checked_method, build_checked_model, checked_networks, trained_task
from pefll.runs.progress import check_progress, restore, restore_prior
from pefll.runs.record import CERTIFICATE, GROUPS, RunFolder, headline_of, last_round, rounds_of
from pefll.tasks import Score, Task
from pefll.tasks.names import allow_task, other_settings, with_labels_of
from pefll.tasks.own import ask
from pefll.training.client_models import (
    Predictions,
    client_models,
    numbers_of,
    personal_model,
    predictions_of,
)
from pefll.training.evaluation import Measure, client_scores, split_number
from pefll.training.figures import Evaluation
from pefll.training.summary import counting

if TYPE_CHECKING:
    from pefll.training.certificate import Certificate


class ClientScore(NamedTuple):
    """How good a client's personal model is on one split of the client's samples.

    Attributes:
        client: the client's number in the federation.
        name: the client's name in the data.
        seen: whether the client took part in training.
        samples: number of samples.
        correct: number of samples that the model classifies correctly.
        masked: like `correct`, but the model may not choose classes that the client's training labels lack.
        loss: the sum of the samples' cross-entropies.
    """

    client: int
    name: str
    seen: bool
    samples: int
    correct: int
    masked: int
    loss: float

    @property
    def accuracy(self) -> float:
        """The share of correct samples; NaN if there are no samples."""
        return self.correct / self.samples if self.samples else math.nan


class ClientMetrics(NamedTuple):
    """How good a client's personal model is, for a task with other sums than those of a `ClientScore`.

    Attributes:
        client: the client's number in the federation.
        name: the client's name in the data.
        seen: whether the client took part in training.
        samples: number of samples.
        metrics: the task's metrics by name; NaN if they are not defined, as without samples.
    """

    client: int
    name: str
    seen: bool
    samples: int
    metrics: dict[str, float]


def _client_result(measure: Measure, sums: Any, client: int, data: Federation) -> ClientScore | ClientMetrics:
    """Return the result of one client from its sums [width]."""
    name, seen = data.name_of(client), client < data.num_seen
    if measure.layout.kind is Score:
        samples, correct, masked, loss = sums
        return ClientScore(client, name, seen, int(samples), int(correct), int(masked), float(loss))
    return ClientMetrics(client, name, seen, int(sums[0]), measure.client(sums))


class ClientsFailed(PefllError):
    """Some clients got no model.

    Attributes:
        models: the models of the other clients, by client.
        errors: the errors, by client.
    """

    def __init__(self, models: dict[Name, PersonalModel], errors: dict[Name, PefllError]) -> None:
        total = counted(len(models) + len(errors), "client")
        super().__init__(f"{len(errors):,} of {total} got no model{reasons(errors)}", code="PEFLL-M038")
        self.models, self.errors = models, errors

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.models, self.errors)


@dataclass(frozen=True, eq=False)
class Run:
    """A trained method that makes personal models.

    Attributes:
        config: the run's settings.
        method: the method, with its hyper-parameters.
        server: the method's state at the best round.
        final: the method's state after the last round.
        model_spec: the input, output and origin of the run's models.
        summary: results, as in summary.json; empty if the run is not finished.
        federation: the data; None for a run loaded from its folder, which has the names of its `clients` alone.
        history: evaluations during training, oldest first, as in history.jsonl.
        prior: the method's state after the rounds that only `prior_clients` of the seen clients took part in; None
            for a run without such rounds.
    """

    config: Config
    method: Method[Any]
    server: Tree
    final: Tree
    model_spec: ModelSpec
    summary: dict[str, Any]
    federation: Federation | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    prior: Tree | None = None

    def __repr__(self) -> str:
        return f"Run({self.config.method} on {self.config.data}, best of {self.summary.get('rounds', '?')} rounds)"

    def with_settings(self, **settings: Any) -> Run:
        """Return this run with other hyper-parameters of personalisation, such as `refine_steps=10`.

        Nothing is trained again; summary and history do not change, but a certificate is about other models and goes.

        Raises:
            PefllError: for a hyper-parameter that training has used already.
        """
        if not settings:
            return self
        may_change = getattr(self.method, "personal_settings", ())
        typed = typed_settings(self.config.method, settings)
        for name, value in typed.items():
            if name not in may_change and value != self.config.settings.get(name):
                names = " and ".join(may_change) or "nothing"
                raise PefllError(
                    f"training has used {name} already; of {self.config.method}, {names} may change afterwards",
                    code="PEFLL-T131",
                )
        config = dataclasses.replace(self.config, settings=self.config.settings | typed)
        settings = with_networks(config.settings, given_networks(self.method))
        method = build_checked_method(config.method, self.method.problem, settings)
        same = all(getattr(method, name, value) == getattr(self.method, name, value) for name, value in typed.items())
        summary = {name: value for name, value in self.summary.items() if same or name != CERTIFICATE}
        return dataclasses.replace(self, config=config, method=method, summary=summary)

    def evaluate(self, split: str = "test", federation: Any = None, console: Console | None = None) -> Evaluation:
        """Return the metrics of all clients' personal models on one split of the clients' own samples.

        Args:
            split: train, validation or test.
            federation: other data with the same labels and columns: a federation, or a table or a path, which
                `federation_from` reads; None for the data that the run was trained on.
            console: shows progress; None for silence.
        """
        return self._scores("evaluate", split, federation, console)[0]

    def evaluate_clients(
        self, split: str = "test", federation: Any = None, console: Console | None = None
    ) -> list[ClientScore] | list[ClientMetrics]:
        """Return each client's own score, seen clients first; see `evaluate`. Other tasks give `ClientMetrics`."""
        return self._scores("evaluate_clients", split, federation, console)[1]

    def scores(
        self, split: str = "test", federation: Any = None, console: Console | None = None
    ) -> tuple[Evaluation, list[Any]]:
        """Return what `evaluate` and `evaluate_clients` return, with one pass over the samples."""
        return self._scores("scores", split, federation, console)

    def _scores(self, asked: str, split: str, federation: Any, console: Console | None) -> tuple[Evaluation, list[Any]]:
        """Return what `scores` does; `asked` is the function that the user has called."""
        number = split_number(split)
        data = self._data(federation, console, f"{asked}(federation=...)")
        config = self.config
        hardware = pick_hardware(self.method.problem, config.device, config.engine, config.precision, config.processes)
        with (
            open_engine(hardware, data, self.method, config.seed, 0) as engine,
            queue_of(engine).turn(),
            monitor(console, "evaluating", data.num_clients) as watch,
        ):
            server = map_tree(lambda leaf: leaf.to(engine.device), self.server)
            everyone = np.arange(data.num_clients)
            sums = client_scores(engine, self.method, server, everyone, number, counting(watch))
        measure = Measure.of(self.method, data)
        clients = [_client_result(measure, row, client, data) for client, row in enumerate(sums)]
        return measure.evaluation(sums, data.num_seen), clients

    def certify(
        self,
        delta: float = 0.05,
        share: float | None = None,
        *,
        width: float = 0.1,
        federation: Any = None,
        bounds: bool = True,
        console: Console | None = None,
    ) -> Certificate:
        """Return what the run promises about new clients, with confidence 1 - delta for each statement.

        The certificate is kept in `summary`, and personal models that are made afterwards carry its first line. Write
        it into a run's folder with its `write`.

        Args:
            delta: the probability with which a statement fails, between 0 and 1.
            share: the share of new clients in statements about quantiles. None for 0.9, or for none of these
                statements if there are too few unseen clients.
            width: the width of a client's own interval, for the least number of samples.
            federation: other data to measure on, as in `evaluate`; None for the test figures in `summary`. If these are
                of other personal settings than the run's, see `with_settings`, they are measured again.
            bounds: whether PAC-Bayes bounds are computed, too. Without unseen clients, they are all there is.
            console: shows progress; None for silence.
        """
        from pefll.training.certificate import certify

        if federation is not None and is_raw(federation):
            federation = self.federation_from(federation)
        return certify(self, delta, share, width, federation, bounds, console)

    def federation_from(
        self,
        data: Any,
        *,
        label: str | Sequence[str] | None = None,
        client: str | None = None,
        validation: float = 0.1,
        test: float = 0.2,
    ) -> Federation:
        """Return a federation of other data, whose columns are encoded with the run's plan and not with one of its own.

        A value that training never saw counts as one of the others, and a missing value is filled as in training. All
        clients count as unseen. Rows without a label are left out with a warning. If the run has a column of times,
        each client's samples are split by their time, as in training.

        Args:
            data: a table with the columns of the training data, or the path of a file or folder; see `data.read_each`.
            label: name of the column of labels, or several names; None for the run's.
            client: name of the column of clients; None for the run's.
            validation: fraction of each client's training samples that become validation samples.
            test: fraction of each client's samples that become test samples, if `data` has no column `split`.
        """
        known = self.columns
        time = self.model_spec.time_column
        columns = known._replace(
            label=known.label if label is None else arguments.text(joined_names(label), "label", "y"),
            client=known.client if client is None else arguments.text(client, "client", "user"),
            time=self.config.time_column if time is None else time,
        )
        labels = self.method.problem.task.labels
        return encoded_federation(
            data, columns, self.model_spec, labels, seed=self.config.seed, validation=validation, test=test
        )

    def _data(self, federation: Any, console: Console | None, call: str) -> Federation:
        """Return a federation, by default that of the run; PefllError if it does not fit the run's models.

        `call` is how the user gives a federation, for the error if the run's data is not here.
        """
        if federation is not None and is_raw(federation):
            federation = self.federation_from(federation)
        if federation is not None:
            check_is_federation(federation)
        spec, task = self.model_spec, self.method.problem.task
        data = with_labels_of(task, federation or self.federation or federation_of(self.config, console, call))
        self._check_columns(data)  # before the shape, because another plan may have another number of inputs
        if data.input_shape != spec.input_shape or data.classes != spec.classes:
            raise PefllError(
                f"the run was trained on {spec.classes} classes and samples of shape {spec.input_shape}, "
                f"but {data.name} has {data.classes} classes and samples of shape {data.input_shape}",
                code="PEFLL-T121",
            )
        ask(task, "check", data)
        if (
            self.method.trains_new_clients
            and federation is not None
            and federation.fingerprint() != self.config.data_sha256
        ):
            data = dataclasses.replace(data, num_seen=0)  # no client here took part in training
        return data

    def _check_columns(self, data: Federation) -> None:
        """Raise PefllError if a federation's columns, or its classes, mean something else than those of the run."""
        spec = self.model_spec
        plan = json.loads(json.dumps(data.table.to_json())) if data.table is not None else None
        if (plan is not None or spec.table is not None) and plan != json.loads(json.dumps(spec.table)):
            raise PefllError(
                f"the columns of {data.name} were encoded by another plan than those of the run: a plan depends on the "
                "rows that it is made from; encode other rows with the run's plan: run.federation_from(table)",
                code="PEFLL-T580",
            )
        if data.class_names and spec.class_names and data.class_names != spec.class_names:
            raise PefllError(
                f"the classes of {data.name} are {first_few(data.class_names)}, but those of the run are "
                f"{first_few(spec.class_names)}; give data with the same classes in the same order",
                code="PEFLL-T581",
            )

    def model_of(self, client: int | str, federation: Any = None) -> PersonalModel:
        """Return the personal model of a client of the federation, as `evaluate` scores it on a CPU.

        A seen client uses what it and the server kept of it in training, such as its head or its embedding.

        Args:
            client: the client's name in the data. If no name there is a whole number, an integer is the client's
                number in the federation.
            federation: as in `evaluate`.
        """
        data = self._data(federation, None, f"model_of({client!r}, federation=...)")
        (model,) = client_models(
            self.method, self.server, self.config, self.model_spec, data, numbers_of(data, [client])
        )
        return model

    def predictions(
        self,
        clients: Any = None,
        split: str = "test",
        federation: Any = None,
        console: Console | None = None,
    ) -> Predictions:
        """Return the predictions of clients' personal models for each of their own samples; see `model_of`.

        Args:
            clients: a client, or a list of clients, as in `model_of`; None for all.
            split: train, validation or test.
            federation: as in `evaluate`.
            console: shows progress; None for silence.
        """
        number, data = split_number(split), self._data(federation, console, "predictions(federation=...)")
        chosen = numbers_of(data, clients)
        models = client_models(self.method, self.server, self.config, self.model_spec, data, chosen)
        with monitor(console, "predicting", len(chosen)) as watch, closing(models):
            return predictions_of(models, data, chosen, number, watch=watch)

    def history_frame(self) -> Any:
        """Return `history` as a pandas data frame: a row for each evaluation, with columns such as `seen_per_sample`.

        A group that was not evaluated has missing values.
        """
        scores = [row[group] for row in self.history for group in GROUPS if row.get(group)]
        measures = list(dict.fromkeys(name for score in scores for name in score))
        rows = []
        for row in self.history:
            of_groups = {
                f"{group}_{name}": (row.get(group) or {}).get(name, math.nan) for group in GROUPS for name in measures
            }
            rows.append({name: value for name, value in row.items() if name not in GROUPS} | of_groups)
        return data_frame(rows)

    def plot(self, out: str | Path, what: str = "curves", federation: Any = None) -> Path:
        """Draw a picture as `pefll show` does, and return the file; threads may draw at once.

        It needs matplotlib, from the extra `plot`.

        Args:
            out: the file; its ending, .png, .pdf or .svg, chooses the format.
            what: "curves", of the metric that chooses the best round; or "descriptors", a map of the clients.
            federation: for the map, as in `evaluate`.
        """
        from pefll.training.plotting import check_picture, plot_curves, plot_descriptors

        file = arguments.path(out)
        check_picture(file, arguments.text(what, "the picture", "curves"))
        if what == "curves":
            plot_curves(self.config, self.history, self.summary, file)
            return file
        data = self._data(federation, None, f"plot({str(out)!r}, 'descriptors', federation=...)")
        plot_descriptors(self.method, self.server, self.config, data, file)
        return file

    @property
    def clients(self) -> ClientNames:
        """The names of the seen and the unseen clients; a loaded run has them from its summary."""
        return names_in_summary(self.summary) if self.federation is None else names_in(self.federation)

    @property
    def columns(self) -> Columns:
        """The names of columns in tables like those that the run was trained on."""
        spec, config = self.model_spec, self.config
        label, client = spec.label_column or config.label, spec.client_column or config.client_column
        plan = plan_of(spec.table, spec.input_shape)
        features = plan.names if plan else spec.feature_names
        return Columns(features, label, client, plan, class_names=spec.named_classes)

    def personalize(self, x: Any, y: Any = None) -> PersonalModel:
        """Return a model for a new client; with PeFLL, this is one forward pass and no training.

        Args:
            x: [m, ...] the client's samples, as in the training data; or a table of pandas or polars with rows as they
                are, whose columns are found by name. A column of clients in it must name one client only. For a run on
                a table, see `PersonalModel.predict` about tensors and arrays.
            y: [m] the client's labels; None for a client without labels, or for labels in the table.
        """
        spec = self.model_spec
        instead = "make a model for each with run.personalize_each(frame, client={!r})"
        client = read_new_client(x, y, self.columns, spec, self.method.uses_labels, instead)
        if client.y is None and self.method.uses_labels:
            self._check_refining()
        check_labels(client, self.method, spec)
        one = federation_of_new_client(client.x, client.y, spec, self.method.problem.task)
        spec = dataclasses.replace(spec, certificate=headline_of(self.summary))
        engine = SerialEngine(one, self.method, self.config.seed, 0, dtype_of(self.config.precision))
        with closing(engine), torch.no_grad():
            ((_, cohort),) = engine.cohorts(np.zeros(1, dtype=np.int64))
            theta = self.method.personalize(map_tree(engine.cast, self.server), cohort)
            model = personal_model(self.method, cohort, theta, spec)
        return model if client.name is None else model.of_client(client.name)

    def embedder(self) -> Embedder:
        """Return the client's half of the run, which turns a client's samples into a descriptor.

        Raises:
            PefllError: if the method has no descriptors.
        """
        return Embedder(self.method, self._half("client_half"), self.model_spec, self._origin())

    def generator(self) -> Generator:
        """Return the server's half of the run, which turns descriptors into personal models; see `embedder`."""
        return Generator(self.method, self._half("server_half"), self.model_spec, self._origin())

    def generate(self, descriptors: Any) -> list[PersonalModel]:
        """Return a personal model for each of n descriptors [n, l], which clients made with the `embedder`.

        A model has the same bits as that of `personalize` with the samples of the descriptor.
        """
        return self.generator().generate(descriptors)

    def _half(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a half on the CPU, in the precision of personal models."""
        dtype = dtype_of(self.config.precision)
        found: dict[str, Tensor] = getattr(halves_of(self.method), name)(self.server)
        return {key: value.detach().to("cpu", dtype) for key, value in found.items()}

    def _origin(self) -> Origin:
        config, columns = self.config, self.columns
        return Origin(config.method, config.settings, config.seed, config.precision, columns.label, columns.client)

    def _check_refining(self) -> None:
        """Raise PefllError if clients need labels for nothing but steps on their device."""
        if getattr(self.method, "refine_steps", 0) and not self.with_settings(refine_steps=0).method.uses_labels:
            words = either("--set refine_steps=0", "run.with_settings(refine_steps=0)")
            raise PefllError(
                f"this run needs labels for its refine_steps on the device; leave these steps out with {words}",
                code="PEFLL-T132",
            )

    def personalize_each(self, x: Any, y: Any = None, client: Any = None) -> dict[Name, PersonalModel]:
        """Return a model for each of several new clients, by the clients' names in the data.

        Args:
            x: [N, ...] the samples of all clients; or a table, see `personalize`, with a column of clients.
            y: [N] the clients' labels; None for clients without labels, or for labels in the table.
            client: [N] the client of each sample; for a table, the name of its column of clients, None for the run's.

        Raises:
            ClientsFailed: if some clients' samples are faulty. It holds the models of the other clients.
        """
        models: dict[Name, PersonalModel] = {}
        errors: dict[Name, PefllError] = {}
        owned, note = labelled_clients(self._owned(x, y, client), self.method.uses_labels)
        if note:
            warn(note)
        for one in owned:
            try:
                if one.fault:
                    raise one.fault
                models[one.client] = self.personalize(one.x, one.y).of_client(one.client)
            except PefllError as error:
                errors[one.client] = error
        if errors:
            raise ClientsFailed(models, errors)
        return models

    def _owned(self, x: Any, y: Any, client: Any) -> list[Owned]:
        """Return each client's samples, from arrays or from a table."""
        if not is_frame(x):
            if client is None:
                raise PefllError(
                    "the client of each sample is unknown: give client=[N], or a table with a column of clients",
                    code="PEFLL-M035",
                )
            return by_client(x, y, client, "the samples")
        if client is not None and not isinstance(client, str):
            raise PefllError(
                f"client must be the name of the table's column of clients, not a {type(client).__name__}",
                code="PEFLL-M036",
            )
        columns = self.columns._replace(client=client) if client else self.columns
        if not columns.features:
            warn_of_positions()
        return from_frame(x, columns, y, tokens=self.model_spec.tokens)


def load(
    path: str | Path,
    console: Console | None = None,
    model: nn.Module | str | None = None,
    method: str | None = None,
    task: str | Task | None = None,
    **networks: Choice,
) -> Run:
    """Return the run in a folder, with the state of its best round and without data.

    Args:
        path: the folder.
        console: shows notes about damaged checkpoints and about a run that is not finished; None for warnings instead.
        model: your own model, if the run was trained on one: its name, `package.module:function`, or an `nn.Module`.
            Its buffers and frozen parameters must be the same as in training: the run does not store them. A model
            that gives other scores for a test input is refused.
        method: your own method, `package.module:Class`, if the run was trained with one.
        task: your own task, or the task with your own loss or metric, if the run was trained with one: an object, or
            its whole text, such as "classification own_loss=module:function".
        networks: your own embedding network or hypernetwork, if the run was trained with one, such as
            `embedding=MyNet()`; see `model`.
    """
    if model is not None and not isinstance(model, nn.Module | str):
        raise PefllError(
            f"the model must be an instance of torch.nn.Module, or a name, not {model!r}", code="PEFLL-M050"
        )
    if "federation" in networks:
        raise PefllError(
            "pefll.load takes no data; give it to the functions that need it, as in run.evaluate(federation=...), "
            "run.predictions(federation=...) or run.model_of(3, federation=...)",
            code="PEFLL-T139",
        )
    allow(model, method, *networks.values())
    allow_task(task)
    folder = RunFolder(arguments.path(path))
    folder.check_is_run()
    config = Config.load(folder.config_file, folder.trained_with())

    def note(sentence: str) -> None:
        if console:
            say(console, sentence)
        else:
            warn(sentence)

    if age := folder.note_of_age():
        note(age)
    saved = checkpoint.latest(folder.checkpoints, note, folder.run_id())
    check_progress(saved.metadata, path)
    spec = spec_of_checkpoint(saved.metadata, path)
    try:
        plan_of(spec.table, spec.input_shape)
    except ValueError as error:
        raise PefllError(
            f"the newest checkpoint of {path} is damaged: {error}; restore it from a copy", code="PEFLL-R580"
        ) from None
    summary = folder.summary() or {}
    if saved.round < max(last_round(summary, config.rounds), rounds_of(summary)):
        best = saved.metadata["progress"]["best_round"]
        note(f"{path} is at round {saved.round} of {config.rounds}; the best round so far, {best}, is used")
    elif not summary:
        note(f"{path} has no summary.json: it was never tested, or the file is gone; {folder.going_on} makes it")
    if model is None and not spec.model:
        raise PefllError(
            f"{path} was trained on a model given in Python; load it in Python: pefll.load(path, model=...)",
            code="PEFLL-T123",
        )
    if model is None or isinstance(model, str):
        module = build_checked_model(model or spec.model, spec.input_shape, spec.width)
    else:
        module = model
    known = trained_task(spec, task, path)
    if task is not None and (names := other_settings(known, spec.task or "")):
        note(
            f"{path} was trained with the task {spec.task or 'classification'!r}, and the given one has other "
            f"{first_few(names)}: metrics and losses are those of the given task"
        )
    problem = Problem(Network(module), spec.input_shape, spec.classes, spec.num_clients, spec.tokens, known)
    learned_with = _method_of(config, method, path)
    settings = with_networks(config.settings, checked_networks(config.settings, learned_with, networks, path))
    learner = build_checked_method(learned_with, problem, settings)
    template = method_template(learner, config, spec.label_columns)
    best, final = (restore(template, saved.tensors, part) for part in ("best", "server"))
    # After `restore`, which has a clearer sentence for a model of another size.
    scores = probe(problem.model, problem.input_shape, problem.tokens)
    of_networks = {name: own.probe(one) for name, one in own.own_networks(learner).items()}
    found = dataclasses.replace(spec, weights=problem.model.size, probe=scores, networks=of_networks)
    check_same_model(spec, found, str(path))
    try:
        history = folder.history()
    except PefllError as error:  # personal models need no history
        note(str(error))
        history = []
    prior = restore_prior(template, saved.tensors)
    return Run(config, learner, best, final, spec, summary, history=history, prior=prior)


def _method_of(config: Config, given: str | None, path: str | Path) -> str:
    """Return the name of a run's method; `given` replaces it if a user's own method has moved to another module."""
    if given in (None, config.method):
        return config.method
    if ":" in config.method and ":" in str(given):
        return str(given)
    raise PefllError(
        f"{path} was trained with the method {config.method}, not {given}; leave out {argument('method', given)}",
        code="PEFLL-M002",
    )


def method_template(method: Method[Any], config: Config, label_columns: int | None = None) -> Tree:
    """Return a state with the method's shapes and types, made with one made-up client."""
    problem = method.problem
    kind = np.int64 if problem.tokens else np.float32
    samples = Samples(
        x=np.zeros((2, *problem.input_shape), dtype=kind),
        y=blank_labels(problem.task.labels, 2, label_columns),
        classes=problem.classes,
        tokens=problem.tokens,
    )
    with closing(SerialEngine(one_client(samples, num_seen=1), method, 0, 1, dtype_of(config.precision))) as engine:
        return engine.start()
