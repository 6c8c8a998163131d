"""The two halves of a run, each usable alone: the embedder on a client, the generator on a server, and their files.

A client sends its samples to nobody. Its embedder turns them into a descriptor. The server's generator turns
descriptors into personal models. Both together give the bits of `Run.personalize`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from pefll.core import arguments
from pefll.core.errors import PefllError
from pefll.core.files import parse_json, write_whole
from pefll.core.plugins import allow
from pefll.core.wording import argument, counted
from pefll.data.owners import Columns
from pefll.data.table_plan import plan_of
from pefll.engines.serial import SerialEngine, aligned
from pefll.engines.settings import EngineSettings
from pefll.methods import METHODS, build_method, method_class, typed_settings, with_networks
from pefll.methods.contract import Method, Problem, TwoHalves
from pefll.models import MODELS, Network
from pefll.models.check import probe
from pefll.models.spec import ModelSpec, check_same_model
from pefll.runs import modelfile
from pefll.runs.new_client import check_labels, dtype_of, federation_of_new_client, read_new_client
from pefll.runs.personal import Array, PersonalModel
from pefll.runs.problem import build_checked_model, checked_networks, trained_task
from pefll.tasks import Task
from pefll.tasks.names import allow_task

EMBEDDER = modelfile.Kind("an embedder", ("pefll-embedder-1",), "run.embedder().save(path)", ("method",))
GENERATOR = modelfile.Kind("a generator", ("pefll-generator-1",), "run.generator().save(path)", ("method",))


class Origin(NamedTuple):
    """What a half's method is made from, and how its run called the columns of tables.

    Attributes:
        name: the method, a key of METHODS or `"package.module:Class"`.
        settings: the hyper-parameters that differ from their defaults.
        seed: seed of the run.
        precision: precision of the run.
        label: name of a table's column of labels.
        client: name of a table's column of clients.
    """

    name: str
    settings: dict[str, Any]
    seed: int
    precision: str
    label: str
    client: str

    @classmethod
    def of_file(cls, path: Path, header: modelfile.Header) -> Self:
        """Return the origin in a file's header; PefllError if it makes no sense."""
        try:
            content = parse_json(header.texts["method"].encode())
            origin = cls(**content)
        except (ValueError, TypeError) as error:
            raise modelfile.damaged(path, "its method makes no sense", kind=header.kind) from error
        types = (str, dict, int, str, str, str)
        if not all(type(value) is kind for value, kind in zip(origin, types, strict=True)) or origin.seed < 0:
            raise modelfile.damaged(path, "its method makes no sense", kind=header.kind)
        return origin

    def renamed(self, given: str | None, path: Path) -> Self:
        """Return the origin with the user's own name of the method, if the file's method is a user's own code."""
        if given in (None, self.name):
            return self
        if ":" in self.name and ":" in str(given):
            return self._replace(name=str(given))
        raise PefllError(
            f"{path} was made with the method {self.name}, not {given}; leave out {argument('method', given)}",
            code="PEFLL-T620",
        )


@dataclass(frozen=True, eq=False)
class Embedder:
    """The client's half of a run: it turns a client's samples into a descriptor. Threads may share it.

    Attributes:
        method: the run's method.
        tensors: all that the method needs on a client.
        spec: the input and output of the run's models.
        origin: what the method is made from.
    """

    method: Method[Any]
    tensors: dict[str, Tensor]
    spec: ModelSpec
    origin: Origin

    def __repr__(self) -> str:
        return f"Embedder({self.origin.name}: samples of shape {self.spec.input_shape} to {self.size} numbers)"

    @property
    def size(self) -> int:
        """l, the number of numbers in a descriptor."""
        return halves_of(self.method).sent_size

    @property
    def uses_labels(self) -> bool:
        """Whether a client needs labels for its descriptor."""
        return self.method.uses_labels

    def describe(self, x: Any, y: Any = None) -> Array:
        """Return a client's descriptor [l]. The client sends it to the server, and nothing else.

        Args:
            x: [m, ...] the client's samples, as in the training data; or a table of pandas or polars.
            y: [m] the client's labels; None for a client without labels, or for labels in the table.
        """
        spec = self.spec
        plan = plan_of(spec.table, spec.input_shape)
        features, origin = plan.names if plan else spec.feature_names, self.origin
        columns = Columns(features, origin.label, origin.client, plan, class_names=spec.named_classes)
        instead = "describe each alone: [embedder.describe(rows) for _, rows in frame.groupby({!r})]"
        client = read_new_client(x, y, columns, spec, self.method.uses_labels, instead)
        check_labels(client, self.method, spec)
        one = federation_of_new_client(client.x, client.y, spec, self.method.problem.task)
        dtype = dtype_of(self.origin.precision)
        engine = SerialEngine(one, self.method, self.origin.seed, 0, dtype)
        with closing(engine), torch.no_grad():
            ((_, cohort),) = engine.cohorts(np.zeros(1, dtype=np.int64))
            v = halves_of(self.method).describe_with(self.tensors, cohort)
        return v[0].numpy().copy()

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the embedder as one safetensors file for clients; PefllError if it exists, unless `overwrite`."""
        _save(self, path, EMBEDDER, overwrite)

    @classmethod
    def load(
        cls, path: Path | str, method: str | None = None, task: str | Task | None = None, **networks: Any
    ) -> Embedder:
        """Return an embedder that `save` wrote.

        Args:
            path: the file.
            method: your own method, `package.module:Class`, if the run was trained with one.
            task: your own task, or the task with your own loss or metric, if the run was trained with one.
            networks: your own embedding network, if the run was trained with one, such as `embedding=MyNet()`.
        """
        path, header, origin = _open(path, EMBEDDER, method)
        known = _task_of(header, task, path)
        # A descriptor does not depend on the client's model, so this machine does not build it.
        learner = _method(path, header, origin, lambda: Network(nn.Module(), may_be_empty=True), known, networks)
        tensors = _read(path, header, dtype_of(origin.precision), lambda half: half.client_half_shapes(), learner)
        return cls(learner(), tensors, header.spec, origin)


@dataclass(frozen=True, eq=False)
class Generator:
    """The server's half of a run: it turns descriptors into personal models. Threads may share it.

    Attributes:
        method: the run's method.
        tensors: all that the method needs on the server.
        spec: the input and output of the models.
        origin: what the method is made from.
    """

    method: Method[Any]
    tensors: dict[str, Tensor]
    spec: ModelSpec
    origin: Origin

    def __repr__(self) -> str:
        models = self.spec.model or "a model of your own"
        return f"Generator({self.origin.name}: descriptors of {self.size} numbers to {models})"

    @property
    def size(self) -> int:
        """l, the number of numbers in a descriptor."""
        return halves_of(self.method).sent_size

    def generate(self, descriptors: Any) -> list[PersonalModel]:
        """Return a personal model for each of n descriptors [n, l]."""
        return list(self.each(descriptors))

    def each(self, descriptors: Any) -> Iterator[PersonalModel]:
        """Yield the models of `generate` one by one, so that thousands of them need not fit into memory."""
        rows = self._checked(descriptors)  # at once, not when the first model is asked for
        return (self._model(row) for row in rows)

    def _model(self, row: Array) -> PersonalModel:
        """Return the model of one descriptor [l].

        A product of one row and a matrix may round differently from a product of many rows. So each descriptor goes
        through the hypernetwork alone, as in `Run.personalize`, and its model does not depend on other clients.
        """
        with _as_an_engine(), torch.no_grad():
            v = torch.tensor(row, dtype=dtype_of(self.origin.precision))[None]
            theta = halves_of(self.method).generate_with(self.tensors, v)
            if not bool(theta.isfinite().all()):
                raise PefllError(
                    f"a descriptor with values up to {np.abs(row).max():.3g} gives a model with NaN or infinite "
                    "weights; the client must send it again",
                    code="PEFLL-T629",
                )
            module = self.method.problem.model.with_parameters(theta[0])
        return PersonalModel(module.eval(), dataclasses.replace(self.spec, neighbours=None), self.method.problem.task)

    def _checked(self, descriptors: Any) -> Array:
        """Return descriptors as an array [n, l]; PefllError if they cannot be descriptors of this run."""
        try:
            rows = np.asarray(descriptors.numpy(force=True) if isinstance(descriptors, Tensor) else descriptors)
        except ValueError as error:  # rows of different length
            raise _no_descriptors(f"rows of different length; give an array [n, {self.size}]") from error
        if rows.dtype.kind not in "iuf":
            raise _no_descriptors(f"of type {rows.dtype}; give numbers")
        if rows.shape == (self.size,):
            raise _no_descriptors(f"one descriptor of shape ({self.size},), without rows: write v[None]")
        if rows.ndim != 2 or rows.shape[1] != self.size:
            raise _no_descriptors(f"of shape {rows.shape}; this run's are [n, {self.size}]")
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            raise PefllError(
                f"descriptor {int(finite.argmin())} of {counted(len(rows), 'descriptor')} has a NaN or infinite "
                "value; the client must send it again",
                code="PEFLL-T622",
            )
        return rows

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write the generator as one safetensors file for the server; PefllError if it exists, unless `overwrite`."""
        _save(self, path, GENERATOR, overwrite)

    @classmethod
    def load(
        cls,
        path: Path | str,
        model: nn.Module | str | None = None,
        method: str | None = None,
        task: str | Task | None = None,
        **networks: Any,
    ) -> Generator:
        """Return a generator that `save` wrote.

        Args:
            path: the file.
            model: your own model, if the run was trained on one: `package.module:function`, or an `nn.Module`.
            method: your own method, `package.module:Class`, if the run was trained with one.
            task: your own task, or the task with your own loss or metric, if the run was trained with one.
            networks: your own networks, if the run was trained with them, such as `hypernetwork=MyNet()`.
        """
        path, header, origin = _open(path, GENERATOR, method)
        known = _task_of(header, task, path)
        spec = header.spec
        if model is not None and not isinstance(model, nn.Module | str):
            raise PefllError(
                f"the model must be an instance of torch.nn.Module, or a name, not {model!r}", code="PEFLL-M050"
            )
        allow(model)
        if model is None and spec.model not in MODELS:
            raise PefllError(
                f"{path} makes models of your own: give the function that builds one, or a module, as model",
                code="PEFLL-M621",
            )

        def network() -> Network:
            if isinstance(model, nn.Module):
                return Network(model)
            name = model or spec.model
            with torch.device("cpu") if ":" in name else nullcontext():  # a user's code may not know the meta device
                return Network(build_checked_model(name, spec.input_shape, spec.width))

        learner = _method(path, header, origin, network, known, networks)
        tensors = _read(path, header, dtype_of(origin.precision), lambda half: half.server_half_shapes(), learner)
        made = learner()
        found = made.problem.model
        scores = probe(found, spec.input_shape, spec.tokens)
        check_same_model(spec, dataclasses.replace(spec, weights=found.size, probe=scores), str(path))
        return cls(made, tensors, spec, origin)


def halves_of(method: Method[Any]) -> TwoHalves:
    """Return a method as one with two halves; PefllError if it has none, or if clients finish their models."""
    if not isinstance(method, TwoHalves):
        raise PefllError(
            f"{type(method).__name__} has no descriptors, so it has no embedder and no generator; use "
            "run.personalize(x, y), or train a method with descriptors, such as pefll",
            code="PEFLL-T621",
        )
    if steps := getattr(method, "refine_steps", 0):
        raise PefllError(
            f"this run's clients refine their models in {counted(steps, 'step')} on their own samples, which neither "
            "half does; leave that out with run.with_settings(refine_steps=0), or use run.personalize(x, y)",
            code="PEFLL-T624",
        )
    return method


def _no_descriptors(what: str) -> PefllError:
    return PefllError(f"the descriptors are {what}", code="PEFLL-T623")


@contextmanager
def _as_an_engine() -> Iterator[None]:
    """Use torch's settings of an open engine inside the block, so that results have the bits of an engine."""
    user = _User()
    EngineSettings.take(user, keep_memory=False)
    try:
        yield
    finally:
        EngineSettings.give_back(user)


class _User:
    """Stands for an engine in `EngineSettings`."""


def _save(half: Embedder | Generator, path: Path | str, kind: modelfile.Kind, overwrite: bool) -> None:
    path = arguments.path(path)
    if path.is_file() and not overwrite:
        raise PefllError(
            f"{path} is there already: choose another name, or replace it with {argument('overwrite', True)}",
            code="PEFLL-R620",
        )
    if bad := _not_finite(half.tensors):
        raise PefllError(
            f"cannot save {path}: its {bad} has NaN or infinite values, because the run has diverged; train it anew",
            code="PEFLL-M624",
        )
    spec = json.dumps(half.spec.to_json())
    try:
        ModelSpec.from_json(json.loads(spec))
    except ValueError as error:
        raise PefllError(f"cannot save {path}: {error}", code="PEFLL-M620") from None
    method = json.dumps(half.origin._asdict())
    write_whole(path, modelfile.to_bytes(half.tensors, spec, {"method": method}, kind))


def _open(path: Path | str, kind: modelfile.Kind, method: str | None) -> tuple[Path, modelfile.Header, Origin]:
    """Return the header of a half's file, and its origin."""
    path = arguments.path(path)
    if not path.is_file():
        raise PefllError(f"there is no file {path}; make {kind.name} with {kind.maker}", code="PEFLL-R621")
    header = modelfile.read_header(path, kind)
    allow(method)
    return path, header, Origin.of_file(path, header).renamed(method, path)


def _task_of(header: modelfile.Header, given: Any, path: Path) -> Task:
    allow_task(given)
    return trained_task(header.spec, given, path)


def _method(
    path: Path,
    header: modelfile.Header,
    origin: Origin,
    network: Callable[[], Network],
    task: Task,
    networks: dict[str, Any],
) -> Callable[[], Method[Any]]:
    """Return a function that builds a file's method; the method is not checked, so that no network is built yet.

    `networks` are those that the user gave.
    """
    spec = header.spec
    kind: Any = method_class(origin.name) if ":" in origin.name or origin.name in METHODS else None
    if kind is None:
        raise modelfile.damaged(path, f"its method {origin.name!r} is unknown", kind=header.kind)
    allow(*networks.values())
    given = checked_networks(origin.settings, origin.name, networks, path)
    try:
        settings = typed_settings(origin.name, with_networks(origin.settings, given))
    except PefllError as error:
        raise modelfile.damaged(path, error.args[0], kind=header.kind) from error

    def build() -> Method[Any]:
        problem = Problem(network(), spec.input_shape, spec.classes, spec.num_clients, spec.tokens, task)
        if not hasattr(kind, "bind"):
            return build_method(origin.name, problem, settings)
        return dataclasses.replace(kind(**settings), bound_to=problem)

    return build


def _read(
    path: Path,
    header: modelfile.Header,
    dtype: torch.dtype,
    shapes_of: Callable[[TwoHalves], dict[str, tuple[int, ...]]],
    build: Callable[[], Method[Any]],
) -> dict[str, Tensor]:
    """Return the tensors of a file; PefllError if they do not fit the method's networks or are not finite.

    The shapes are those of networks on the meta device, so a file that asks for huge networks costs nothing.
    """
    try:
        with torch.device("meta"):
            wanted = shapes_of(halves_of(build()))
    except PefllError as error:
        if not error.code.startswith("PEFLL-N") or error.code == "PEFLL-N535":
            raise  # N535 asks for the user's own network
        # A wrong size is the file's fault.
        raise modelfile.damaged(path, error.args[0], kind=header.kind) from error
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise modelfile.damaged(path, "its sizes make no sense", kind=header.kind) from error
    name = {torch.float32: "F32", torch.float64: "F64"}[dtype]
    if header.tensors != {key: modelfile.TensorSpec(name, shape) for key, shape in wanted.items()}:
        raise PefllError(
            f"{path} does not fit the networks of its method: its tensors have other names, shapes or types",
            code="PEFLL-M622",
        )
    tensors = modelfile.read_tensors(path, header)
    if bad := _not_finite(tensors):
        raise modelfile.damaged(path, f"its {bad} has NaN or infinite values", "PEFLL-M623", header.kind)
    return {key: aligned(value) for key, value in tensors.items()}


def _not_finite(tensors: dict[str, Tensor]) -> str:
    """Return the name of the first tensor with a NaN or infinite value; empty if there is none."""
    return next((name for name, value in tensors.items() if not bool(value.isfinite().all())), "")
