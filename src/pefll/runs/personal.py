"""A personal model: an ordinary `nn.Module` that takes samples as the data stores them, and its file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pefll.core import arguments, tensorfile
from pefll.core.errors import PefllError
from pefll.core.files import write_whole
from pefll.core.plugins import allow, is_allowed
from pefll.core.tree import map_tree
from pefll.core.warning import warn
from pefll.core.wording import argument, counted, either
from pefll.data.arrays import as_array, inputs, labels_of
from pefll.data.client import Batch
from pefll.data.frames import columns, index_of, inputs_of, is_frame, label_names
from pefll.data.missing_labels import has_label, without_gaps
from pefll.data.normalise import other_scale
from pefll.data.owners import Name, clients_in
from pefll.data.samples import Normalise
from pefll.data.table_plan import Encoded, TablePlan, plan_of
from pefll.guarantees.held_out import accuracy_statement
from pefll.guarantees.intervals import checked_delta
from pefll.guarantees.statement import Statement
from pefll.models import MODELS, build_model, weights_of
from pefll.models.head import last_linear
from pefll.models.neighbours import NeighbourModel
from pefll.models.spec import ModelSpec
from pefll.runs import modelfile
from pefll.runs.model_folder import file_name
from pefll.runs.prediction_columns import data_frame, named, probability_columns
from pefll.tasks import Classification, Task
from pefll.tasks.names import allow_task, named_again, task_of
from pefll.tasks.own import predictions, probabilities
from pefll.tasks.sums import check_bounds, figures_of, layout_of, rows_of

Array = npt.NDArray[Any]
# A file may have any of these types for a floating-point weight. Other weights must have the architecture's type.
_FLOATS = ("F64", "F32", "F16", "BF16")
_LONGEST_SHOWN = 80  # characters of a client's name, which a stranger may have written


class PersonalModel(nn.Module):
    """A client's personal model.

    Attributes:
        network: the plain architecture with the client's weights; takes normalised samples.
        spec: the input, output and origin of the model.
        task: what its output means; None if that is the user's own code, which nobody has named.
    """

    def __init__(self, network: nn.Module, spec: ModelSpec, task: Task | None = None) -> None:
        super().__init__()
        self.network = network
        self.spec = spec
        self.task = task or _task_in(spec)
        self.eval()  # to train it further, call `train()` first

    def forward(self, x: Any) -> Tensor:
        """Return the scores [b, classes], or the task's outputs, of samples as the training data stores them.

        Args:
            x: [b, ...] uint8 pixels 0..255, float features, or tokens. A tensor must be on the model's device, and
                gradients reach its features. For other types see `predict`.
        """
        weight = next(part for part in self.network.parameters() if part.is_floating_point())
        if isinstance(x, Tensor):
            check_tensor(x, self.spec)
        else:
            x = torch.from_numpy(check_input(x, self.spec)).to(weight.device)
        if self.spec.tokens:
            return self.network(x.long())  # type: ignore[no-any-return]
        dtype = weight.dtype
        x = x.to(dtype)
        if normalise := self.spec.normalise:
            shape = (-1,) + (1,) * (x.dim() - 2)
            mean, std = (torch.tensor(value, dtype=dtype, device=x.device).reshape(shape) for value in normalise)
            x = (x / 255 - mean) / std
        return self.network(x)  # type: ignore[no-any-return]

    def of_client(self, name: Name) -> PersonalModel:
        """Return the model with the name of its client, which its file keeps; see `check_client`."""
        return PersonalModel(self.network, dataclasses.replace(self.spec, client=str(name)), self.task)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class, or of each output, in the order of `probabilities`; numbers without names."""
        return self.spec.class_names or tuple(map(str, range(self.spec.classes or self.spec.width)))

    def probabilities(self, x: Any) -> Array:
        """Return the probability of each class, or member of a set, for samples [N, ...], float [N, k]; see `predict`.

        Raises:
            PefllError: if the model predicts numbers, or if its task is your own and gives no probabilities.
        """
        task = self.known_task()
        if task.labels == "numbers":
            raise PefllError("this model predicts numbers, which have no probabilities; use predict", code="PEFLL-M500")

        def chances(output: Tensor) -> Tensor:
            found = probabilities(task, output)
            if found is None:
                raise PefllError(
                    f"the task {type(task).__name__} gives no probabilities; use predict, or define "
                    "probabilities(output) in the task",
                    code="PEFLL-M505",
                )
            return found

        return self._outputs(x, chances)

    def predict_with_probabilities(self, x: Any) -> tuple[Array, Array | None]:
        """Return what `predict` and `probabilities` return, with one pass; None without probabilities."""
        return predicted_with_probabilities(self.known_task(), torch.from_numpy(self.outputs(x)), self.spec.classes)

    def outputs(self, x: Any) -> Array:
        """Return the scores of classes, or the task's outputs, of samples [N, ...]; see `predict`."""
        return self._outputs(x, lambda output: output)

    @torch.no_grad()
    def _outputs(self, x: Any, function: Callable[[Tensor], Tensor]) -> Array:
        """Return a function of the outputs for samples [N, ...], as an array."""
        # A tensor, because `forward` does not check its values again.
        samples = torch.from_numpy(check_input(x, self.spec))
        device = next(self.network.parameters()).device
        # Layout and alignment change the rounding. Copies have the same ones, so equal samples give equal results.
        copies = (part.clone(memory_format=torch.contiguous_format) for part in torch.split(samples, 512))
        parts = [function(self(part.to(device))) for part in copies]
        return torch.cat(parts).cpu().numpy()

    def predict(self, x: Any, *, names: bool = False) -> Array:
        """Return the number of each sample's most likely class, int64 [N]; with `names` the class as in training, [N].

        A regression returns numbers, float [N] or [N, k], in the unit of the labels. A multi-label model returns which
        members are in each set, bool [N, k]; with `names` a tuple of names for each sample.

        Args:
            x: [N, ...] samples as an array, a list or a tensor; or a pandas or polars table with rows as they are. A
                table's columns are found by their names in the training data; other columns are ignored. For a model
                that was trained on a table, a tensor holds encoded inputs, as `Federation.x` does. An array holds raw
                values in the order of the table's columns, which must all be numbers.
            names: whether to return classes as the labels of training: texts, True and False, or whole numbers.
        """
        task = self.known_task()
        if type(task) is Classification:
            found: Array = self.probabilities(x).argmax(axis=1)
        else:
            found = self._outputs(x, partial(predictions, task, classes=self.spec.classes))
        if not names or task.labels == "numbers":
            return found
        if task.labels == "classes":
            return np.asarray(named(found, self.spec.named_classes))
        known = np.asarray(self.class_names)
        sets = np.empty(len(found), dtype=object)
        sets[:] = [tuple(known[row].tolist()) for row in found]
        return sets

    def predict_frame(self, x: Any) -> Any:
        """Return a pandas data frame with the columns predicted and probability, and the index of the table x.

        Classes are as the labels of training: texts, True and False, or whole numbers. Up to 20 classes also have a
        column each, such as `probability_yes`; for sets, `probability` has those of all members. See `predict`.
        """
        found, chances = self.predict_with_probabilities(x)
        classes = self.spec.named_classes
        columns = {"predicted": named(found, classes)} | probability_columns(chances, found, classes)
        return data_frame(columns, index_of(x) if is_frame(x) else None)

    @torch.no_grad()
    def metrics(self, x: Any, y: Any) -> dict[str, float]:
        """Return the task's metrics on samples [N, ...] with labels y, the most important one first.

        Samples without a label (None, NaN or an empty text) do not count.
        """
        task = self.known_task()
        there, labels = self._known_labels(y, "metrics")
        output = torch.from_numpy(self.outputs(x))
        if len(there) != len(output):
            raise PefllError(
                f"there are {len(output):,} samples but {len(there):,} labels; they must be equal", code="PEFLL-M501"
            )
        return metrics_of(task, output[torch.from_numpy(there)], torch.tensor(labels), self.spec.classes)

    def _known_labels(self, y: Any, where: str) -> tuple[Array, Array]:
        """Return which of a user's labels y [N] or [N, k] are there, bool [N], and these, see `labels_of`."""
        given = as_array(y, "y", where)
        there = has_label(given) if given.ndim else np.ones(0, dtype=bool)
        if len(there) and not there.any():
            raise PefllError(
                f"none of the {counted(len(there), 'sample')} has a label; give labels, or predict instead",
                "PEFLL-M504",
            )
        known = given if not len(there) or there.all() else without_gaps(given[there])
        kind = self.known_task().labels
        labels = labels_of(known, self.spec.class_names, "y", kind)
        if kind == "classes" and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.spec.classes:
            raise PefllError(
                f"y has labels from {labels.min()} to {labels.max()}, but the model knows 0 to "
                f"{self.spec.classes - 1}; leave other samples out",
                code="PEFLL-G131",
            )
        return there, labels

    def certify(self, x: Any, y: Any, delta: float = 0.05) -> Statement:
        """Return a bound below the model's accuracy on this client's data, which holds with confidence 1 - delta.

        It is exact for any number of samples (Clopper-Pearson). The samples must not have made the model.

        Args:
            x: [N, ...] samples of this client; see `predict`.
            y: [N] their labels, as in `metrics`.
            delta: the probability with which the bound fails, between 0 and 1.
        """
        checked_delta(delta)
        task = self.known_task()
        if task.labels != "classes":
            raise PefllError(
                f"this model predicts {task.labels}, not classes, so it has no accuracy that could be guaranteed; give "
                "a model of a classification",
                code="PEFLL-G130",
            )
        there, labels = self._known_labels(y, "certify")
        if not len(labels):
            return accuracy_statement(0, 0, delta)  # raises
        found = self.predict(x)
        if len(there) != len(found):
            raise PefllError(
                f"there are {len(found):,} samples but {len(there):,} labels; they must be equal", code="PEFLL-M501"
            )
        return accuracy_statement(int((found[there] == labels).sum()), len(labels), delta)

    def extra_repr(self) -> str:
        """Return what the model's text says beside its layers: its client, and the certificate of its run."""
        client = "" if self.spec.client is None else f"client: {self.spec.client[:_LONGEST_SHOWN]!r}"
        certificate = f"certificate: {self.spec.certificate}" if self.spec.certificate else ""
        return "\n".join(filter(None, (client, certificate)))

    def known_task(self) -> Task:
        """Return what the outputs mean; PefllError if that is the user's own code, which nobody has named."""
        if self.task is None:
            give = argument("task", self.spec.task or "")
            raise PefllError(
                f"the model's output means what your own code says; name this code with {give}", code="PEFLL-M502"
            )
        return self.task

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write weights and spec as one safetensors file; PefllError if it exists, unless `overwrite` allows it."""
        path = arguments.path(path)
        if path.is_file() and not overwrite:
            may = argument("overwrite", True, option="--force")
            raise PefllError(
                f"{path} is there already: choose another name, or replace it with {may}", code="PEFLL-R106"
            )
        tensors = self.network.state_dict()
        if bad := _not_finite(tensors):
            raise PefllError(
                f"cannot save the model as {path}: its weights {bad} have NaN or infinite values; train it anew",
                code="PEFLL-M015",
            )
        spec = json.dumps(self.spec.to_json())
        try:
            read = ModelSpec.from_json(json.loads(spec))
            plan_of(read.table, read.input_shape)
        except ValueError as error:
            raise PefllError(f"cannot save the model as {path}: {error}", code="PEFLL-M016") from None
        # Only its owner may read the file: a model reveals something of its samples, or even holds them as neighbours.
        write_whole(path, modelfile.to_bytes(tensors, spec), private=True)

    @classmethod
    def load(
        cls,
        path: Path | str,
        network: nn.Module | None = None,
        architecture: str | None = None,
        task: str | Task | None = None,
    ) -> PersonalModel:
        """Return a model that `save` wrote.

        Args:
            path: the file.
            network: the architecture, if the package cannot build it by name.
            architecture: the architecture's name, such as `lenet` or `package.module:function`.
            task: your own task, if the run was trained with one: a value, or its name `package.module:Class`.
        """
        path = arguments.path(path)
        if path.is_dir():
            raise PefllError(
                f"{path} is a folder; name a file in it, or make a model file from a run with `pefll personalize RUN`",
                code="PEFLL-R107",
            )
        if not path.is_file():
            own = path.with_name(file_name(path.stem))  # names of clients may have no safe file name
            there = f"; the model of client {path.stem} is {own}" if own != path and own.is_file() else ""
            raise PefllError(f"there is no file {path}{there}", code="PEFLL-R108")
        header = modelfile.read_header(path)
        spec = header.spec
        allow(architecture)
        allow_task(task)
        meaning = named_again(task, spec.task or f"classification classes={spec.classes}") if task is not None else None
        name = architecture or spec.model
        # A file must not choose the code that runs, so only the caller names functions.
        if network is None and architecture is None and name not in MODELS:
            give = argument("architecture", "module:function", option="--model")
            module = either("", "; or the module itself, as network")
            raise PefllError(
                f"{path} holds a model of your own: name the function that builds it with {give}{module}",
                code="PEFLL-M051",
            )
        shape, classes = spec.input_shape, spec.width
        # Checked before anything is built or read, so that a file cannot ask for a huge model.
        _check_fits(path, header, _weights_without_values(network, name, shape, classes))
        tensors = modelfile.read_tensors(path, header)
        if bad := _not_finite(tensors):
            raise modelfile.damaged(path, f"its weights {bad} have NaN or infinite values", "PEFLL-M018")
        if network is None:
            network = build_model(name, shape, classes)
            _check_fits(path, header, network.state_dict())
        if spec.neighbours:
            network = _with_neighbours(path, network, tensors, spec)
        try:
            network.load_state_dict(tensors)
        except RuntimeError as error:
            raise PefllError(
                f"{path} does not fit the architecture {type(network).__name__}", code="PEFLL-R109"
            ) from error
        if not header.checked:
            warn(
                f"{path} was written by an earlier version and has no SHA-256, so damage is not noticed; make it again "
                "with `pefll personalize`"
            )
        return cls(network, spec, meaning or _checked_task_in(path, spec))


def predicted_with_probabilities(task: Task, output: Tensor, classes: int) -> tuple[Array, Array | None]:
    """Return a task's predictions for outputs [N, outputs], and its probabilities [N, k]; None if it gives none.

    `classes` is the number of classes, or 0.
    """
    chances = probabilities(task, output)
    # As in `PersonalModel.predict`: rounding may make two probabilities equal.
    if type(task) is Classification and chances is not None:
        return chances.numpy().argmax(axis=1), chances.numpy()
    return np.asarray(predictions(task, output, classes)), None if chances is None else chances.numpy()


def metrics_of(task: Task, output: Tensor, labels: Tensor, classes: int) -> dict[str, float]:
    """Return a task's metrics on outputs [N, ...] and labels [N, ...], the most important one first.

    PefllError for a metric outside of its bounds, as in an evaluation.
    """
    layout, known = layout_of(task, labels, classes), torch.ones(classes, dtype=torch.bool) if classes else None
    sums = task.measure(output, Batch(output, labels, torch.ones(len(output))), known)
    rows = rows_of(map_tree(lambda part: part[None], sums)).numpy()
    check_bounds(task, layout, rows, lambda row: counted(len(output), "sample"))
    found = figures_of(task, sums)
    # The file does not know the loss of training, and nothing is masked. A task of one's own may have nothing else.
    return {name: value for name, value in found.items() if name not in ("loss", "masked")} or found


def _checked_task_in(path: Path, spec: ModelSpec) -> Task | None:
    """Return the task in the spec of a file; PefllError if it makes no sense."""
    try:
        task = _task_in(spec)
    except PefllError as error:
        raise modelfile.damaged(path, f"its task makes no sense: {error.args[0]}", "PEFLL-M503") from error
    if task is not None and task.outputs != spec.width:
        raise modelfile.damaged(path, f"its task has {task.outputs} outputs, but its model {spec.width}", "PEFLL-M503")
    return task


def _task_in(spec: ModelSpec) -> Task | None:
    """Return the task in a spec; None if it is a user's own code that may not run here."""
    if not spec.task:
        return Classification(spec.classes)
    own = spec.task.split()[0]
    return None if ":" in own and not is_allowed(own) else task_of(spec.task, for_predictions=True)


def _weights_without_values(
    network: nn.Module | None, name: str, shape: tuple[int, ...], classes: int
) -> dict[str, Tensor] | None:
    """Return an architecture's weights, perhaps without values; None if only a run of the user's code shows them."""
    if network is not None:
        return dict(network.state_dict())
    try:
        return weights_of(name, shape, classes)
    except (PefllError, RuntimeError, OverflowError, TypeError, ValueError):
        if name in MODELS:
            return {}  # the model cannot have these sizes, so no file fits it
        return None


def _check_fits(path: Path, header: modelfile.Header, weights: dict[str, Tensor] | None) -> None:
    """Raise PefllError if a file's tensors differ from an architecture's weights in names, shapes or types.

    Weights that are unknown (None) are not checked.
    """
    if weights is None:
        return
    spec, found = header.spec, header.tensors
    named = {f"network.{name}": weight for name, weight in weights.items()} if spec.neighbours else weights
    fits = found.keys() - named.keys() == ({"bank", "labels"} if spec.neighbours else set()) and all(
        name in found
        and found[name].shape == tuple(weight.shape)
        and found[name].dtype in (_FLOATS if weight.is_floating_point() else [tensorfile.TYPES.get(weight.dtype)])
        for name, weight in named.items()
    )
    if not fits:
        model = spec.model or "that was given"
        raise PefllError(
            f"{path} does not fit the architecture {model} for samples of shape {spec.input_shape} and "
            f"{spec.classes} classes: its weights have other names, shapes or types",
            code="PEFLL-M019",
        )


def _not_finite(tensors: dict[str, Tensor]) -> str:
    """Return the name of the first tensor with a NaN or infinite value; empty if there is none."""
    floats = ((name, value) for name, value in tensors.items() if value.is_floating_point())
    return next((name for name, value in floats if not bool(value.isfinite().all())), "")


def _with_neighbours(path: Path, network: nn.Module, tensors: dict[str, Tensor], spec: ModelSpec) -> NeighbourModel:
    """Return a network with the client's samples that a file holds beside its weights."""
    bank, labels = tensors["bank"], tensors["labels"]
    last = network.get_submodule(last_linear(network))
    fits = (
        bank.is_floating_point()
        and bank.dim() == 2
        and labels.shape == bank.shape[:1]
        and labels.dtype == torch.int64
        and len(labels) > 0
        and 0 <= int(labels.min()) <= int(labels.max()) < spec.classes
        and bank.shape[1] == getattr(last, "in_features", -1)
    )
    if not fits:
        raise modelfile.damaged(path, "its samples do not fit its network", "PEFLL-M020")
    return NeighbourModel(network, bank, labels, spec.neighbours or {})


def check_input(x: Any, spec: ModelSpec) -> Array:
    """Return samples [N, ...] in the type and layout of the training data; PefllError if they do not fit it."""
    expected, plan = spec.input_shape, plan_of(spec.table, spec.input_shape)
    if is_frame(x):
        x = _matrix(x, spec, plan)
    elif plan and not isinstance(x, Encoded | Tensor):
        x = plan.encode_array(as_array(x, "x", "the samples"), "the samples")
    listed = isinstance(x, list | tuple)
    x = as_array(x, "x", "the samples")
    if x.shape == expected and expected[:1] != (1,):  # (1, h, w) may also be one image in a batch, without channels
        raise _wrong_shape(x.shape, expected)
    if listed and spec.normalise and x.dtype.kind == "i" and x.size and 0 <= x.min() <= x.max() <= 255:
        x = x.astype(np.uint8)  # a list has no dtype
    if tuple(x.shape[1:]) != expected or x.dtype.kind not in "uif" or spec.tokens:
        # Converts other layouts of images, and raises PefllError for arrays that cannot be samples.
        x = inputs(x, "the samples", tokens=spec.tokens)
    if len(x) == 0:
        raise PefllError("there are no samples", code="PEFLL-R110")
    if tuple(x.shape[1:]) != expected:
        raise _wrong_shape(x.shape, expected)
    if spec.normalise and x.dtype != np.uint8:
        raise PefllError(
            f"the run was trained on uint8 pixels 0..255, but these samples are {x.dtype}; scale them to 0..255 and "
            "convert them",
            code="PEFLL-R111",
        )
    if spec.normalise and (note := other_scale(x, Normalise(*spec.normalise))):
        warn(note)
    if spec.tokens and spec.model == "lstm" and int(x.max()) >= spec.classes:
        raise PefllError(
            f"the samples have a token {int(x.max())}, but the run knows only {spec.classes} characters",
            code="PEFLL-R112",
        )
    if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
        bad = int(np.isfinite(x).reshape(len(x), -1).all(axis=0).argmin())
        where = f" in {spec.feature_names[bad]!r}" if spec.feature_names else ""
        raise PefllError(f"the samples have a NaN or infinite value{where}; remove or fill it", code="PEFLL-R113")
    if plan:
        plan.check_encoded(x)
    return np.ascontiguousarray(x if spec.normalise or spec.tokens else x.astype(np.float32))


def _matrix(frame: Any, spec: ModelSpec, plan: TablePlan | None) -> Any:
    """Return the inputs from a table, whose columns are found by name, or by position if the model has no names."""
    if plan or spec.feature_names:
        _check_one_client(frame, spec, plan.names if plan else spec.feature_names)
        return inputs_of(frame, spec.feature_names, plan, "the table", tokens=spec.tokens)
    warn_of_positions()
    if not isinstance(frame, dict):
        return frame
    parts = [np.asarray(column) for column in frame.values()]
    if len({part.shape for part in parts}) != 1:
        raise PefllError("the table must have columns, all of the same length", code="PEFLL-M042")
    return np.stack(parts, axis=1)


def _check_one_client(frame: Any, spec: ModelSpec, features: Sequence[str]) -> None:
    """Raise PefllError for a table with rows of other clients than the model's, or of several."""
    if not spec.client_column or spec.client_column in features:
        return
    labels = label_names(spec.label_column, columns(frame)) if spec.label_column else ()
    column, clients = clients_in(frame, (spec.client_column,), (*features, *labels), "the table")
    if len(clients) > 1:
        raise PefllError(
            f"the table holds the samples of {len(clients):,} clients, by its column {column!r}, but this is the model "
            "of one client; give this client's rows, or use the model of each with pefll.predict_each(folder, table)",
            code="PEFLL-M039",
        )
    for client in clients:
        check_client(spec, column, client, "the table", "leave this column out to use this model")


def check_client(spec: ModelSpec, column: str, client: Name, where: str, anyway: str) -> None:
    """Raise PefllError if data holds the samples of another client than the model's.

    Args:
        spec: of the model; without a name of its client, nothing is checked.
        column: name of the column of clients.
        client: the client in that column.
        where: name of the data.
        anyway: end of the error: what a user does to use the model anyway.
    """
    if spec.client in (None, str(client)):
        return
    mine, other = (str(name)[:_LONGEST_SHOWN] for name in (spec.client, client))
    raise PefllError(
        f"{where} holds the samples of client {other!r}, by its column {column!r}, but this is the model of client "
        f"{mine!r}; give the samples of {mine!r}, or {anyway}",
        code="PEFLL-M058",
    )


def warn_of_positions() -> None:
    """Warn that the columns of a table are taken by position, not by name."""
    warn("the model does not know the names of its columns, so the table's columns are taken by position")


def check_tensor(x: Tensor, spec: ModelSpec) -> None:
    """Raise PefllError if a tensor does not have the shape [b, ...] and type of samples; values are not checked."""
    expected = spec.input_shape
    if x.dim() == 0 or tuple(x.shape[1:]) != expected:
        raise _wrong_shape(x.shape, expected)
    if spec.normalise and x.dtype != torch.uint8:
        raise PefllError(
            f"the run was trained on uint8 pixels 0..255, but these samples are {x.dtype}; scale them to 0..255 and "
            "convert them, or give normalised samples to model.network",
            code="PEFLL-R114",
        )
    if x.is_complex() or x.dtype == torch.bool or (spec.tokens and x.is_floating_point()):
        wanted = "whole numbers, which are tokens" if spec.tokens else "numbers"
        raise PefllError(
            f"the run was trained on {wanted}, but these samples are {x.dtype}; convert them", code="PEFLL-R115"
        )


def _wrong_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> PefllError:
    """Return the error for samples of a wrong shape, or for one sample without the axis of samples."""
    if tuple(found) == expected:
        return PefllError(f"x has the shape of one sample, {expected}, without rows: write x[None]", code="PEFLL-R116")
    rows, shape = ", ".join(map(str, ("N", *expected))), tuple(found[1:])
    return PefllError(
        f"the samples have shape {shape}, but the run was trained on {expected}; N samples are an array [{rows}]",
        code="PEFLL-R117",
    )
