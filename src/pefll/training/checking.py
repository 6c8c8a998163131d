"""Checks that every method must pass, the package's or a user's: `pefll check-method mymodule:MyMethod`.

Each check is a function of a `Subject`. It raises `Broken` with a sentence. The first line of its docstring is the rule
that users see. Clients have different numbers of samples, some fewer than a batch. Two clients are new.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pefll.core.errors import PefllError
from pefll.core.plugins import allow, fault
from pefll.core.tree import Tree, leaves, map_tree, named_leaves
from pefll.data.assembly import assemble
from pefll.data.federation import Federation
from pefll.data.samples import TEST, TRAIN, VALIDATION, Samples
from pefll.engines.cohort import Engine, Ledger
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method, hyperparameters, method_class
from pefll.methods.contract import BaseMethod, Method, Problem, each
from pefll.models import MLP, Network
from pefll.runs import checkpoint
from pefll.runs.progress import restore
from pefll.training.evaluation import Floats, client_scores, evaluate, scores_of

ROUNDS = 3
TOLERANCE = 1e-8  # largest difference in float64 after ROUNDS
MEMBERS = (
    "trains_in_rounds",
    "uses_labels",
    "trains_new_clients",
    "local_steps",
    "local_epochs",
    "batch_size",
    "init",
    "round",
    "personalize",
    "descriptors",
    "predict",
)


class Broken(Exception):
    """A method breaks a rule; the text says how."""


class NotTried(Exception):
    """A check needs a package that is not installed; the text says which."""


class Finding(NamedTuple):
    """The outcome of one check.

    Attributes:
        rule: what must hold.
        problem: a sentence if it does not hold.
        not_tried: a sentence if the check could not run.
    """

    rule: str
    problem: str | None
    not_tried: str | None = None


@dataclass(frozen=True)
class Subject:
    """A method to check: its name and the settings that make it quick."""

    name: str
    settings: dict[str, Any]

    @cached_property
    def federation(self) -> Federation:
        """Six seen clients and two new ones, with 2 to 14 training samples of 3 classes."""
        return _small_federation()

    def method(self, federation: Federation | None = None) -> Method[Any]:
        """Return the method for a federation."""
        data = federation or self.federation
        model = Network(MLP(data.input_shape, data.classes))
        problem = Problem(model, data.input_shape, data.classes, data.num_clients, num_seen=data.num_seen)
        return build_method(self.name, problem, self.settings)

    def engine(
        self,
        make: type[SerialEngine] | type[VectorEngine] = SerialEngine,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        federation: Federation | None = None,
    ) -> Engine:
        """Return an engine that trains the method with three clients a round."""
        data = federation or self.federation
        return make(data, self.method(data), seed, 3, dtype=dtype)


def check_method(name: str, settings: dict[str, Any] | None = None) -> list[Finding]:
    """Run every check on a method and return one finding per rule; only the first one if it is no method.

    Args:
        name: a key of METHODS, or `package.module:Class`.
        settings: hyper-parameters for the checks; few steps make them quick.
    """
    allow(name)
    subject = Subject(name, settings or {})
    findings = []
    for check in CHECKS:
        rule = (check.__doc__ or "").splitlines()[0].rstrip(".")
        problem = not_tried = None
        try:
            check(subject)
        except NotTried as error:
            not_tried = str(error)
        except (Broken, PefllError) as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - whatever a user's method does
            problem = fault(error) or f"{type(error).__name__}: {error}"
        findings.append(Finding(rule, problem, not_tried))
        if problem and check is is_a_method:
            break
    return findings


def is_a_method(subject: Subject) -> None:
    """It is a frozen dataclass with a problem, hyper-parameters with defaults, and all members of a method."""
    kind = method_class(subject.name)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise Broken(f"{subject.name} is not a dataclass")
    if not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise Broken("its values can be changed: write @dataclass(frozen=True)")
    if not issubclass(kind, BaseMethod) and "problem" not in {field.name for field in dataclasses.fields(kind)}:
        raise Broken("it does not extend BaseMethod, and has no field `problem`")
    missing = [key for key, default in hyperparameters(subject.name).items() if default is dataclasses.MISSING]
    if missing:
        raise Broken(f"no default for {', '.join(missing)}")
    method = subject.method()
    absent = [name for name in MEMBERS if not hasattr(method, name)]
    if absent:
        raise Broken(f"it lacks {', '.join(absent)}; see pefll.methods.contract.Method")


def a_seed_decides_everything(subject: Subject) -> None:
    """The same seed gives the same bytes, and another seed gives other bytes."""
    for make in (SerialEngine, VectorEngine):
        one, two, other = (_bytes(_trained(subject.engine(make, seed, torch.float32))) for seed in (4, 4, 5))
        if one != two:
            raise Broken(f"two runs with one seed differ on the {make.name} engine: its random numbers ignore the seed")
        if one == other:
            raise Broken(f"runs with different seeds are the same on the {make.name} engine")


def engines_agree(subject: Subject) -> None:
    """The serial engine and the vector engine, which pads clients, give the same state, models and scores."""
    found = []
    for make in (SerialEngine, VectorEngine):
        with closing(subject.engine(make)) as engine:
            server = engine.advance(engine.start(), 0, ROUNDS)
            crossed = (engine.ledger.down, engine.ledger.up, engine.ledger.exchanges)
            found.append((crossed, _flat(server), *_models_and_scores(engine, server)))
    (serial_bytes, *serial), (vector_bytes, *vector) = found
    for what, one, two in zip(("states", "models", "scores"), serial, vector, strict=True):
        if one.shape != two.shape:
            raise Broken(f"the {what} have shapes {tuple(one.shape)} and {tuple(two.shape)}")
        difference = float((one - two).abs().max()) if one.numel() else 0.0
        if not difference <= TOLERANCE:
            raise Broken(f"the {what} differ by {difference:.1e} in float64: padding or other clients change a result")
    if serial_bytes != vector_bytes:
        raise Broken(f"bytes sent and received differ: {serial_bytes} and {vector_bytes}")


def order_does_not_matter(subject: Subject) -> None:
    """A round with the same clients in another order is the same round."""
    with closing(subject.engine()) as engine:
        assert isinstance(engine, SerialEngine)
        server = engine.start()
        one, two = (
            _flat(engine.method.round(server, engine._cohort(np.array(ids), 0, Ledger())))
            for ids in ([0, 1, 4], [4, 0, 1])
        )
    difference = float((one - two).abs().max())
    if not difference <= TOLERANCE:
        raise Broken(f"states differ by {difference:.1e} after a round with the same clients in another order")


def states_are_not_written_to(subject: Subject) -> None:
    """Rounds and evaluations do not change the state that they are given."""
    for make in (SerialEngine, VectorEngine):
        with closing(subject.engine(make)) as engine:
            states = [engine.start()]
            before = [_bytes(states[0])]
            for t in range(ROUNDS):
                states.append(engine.advance(states[-1], t, 1))
                before.append(_bytes(states[-1]))
                evaluate(engine, engine.method, states[-1], TEST)
        if [_bytes(state) for state in states] != before:
            raise Broken("a state of an earlier round changed: write nothing in place (index_copy, not x[i] = y)")


def stopping_changes_nothing(subject: Subject) -> None:
    """A resumed run gives the same bytes as an uninterrupted run."""
    with closing(subject.engine(dtype=torch.float32)) as engine:
        server = engine.advance(engine.start(), 0, 2)
        try:
            tensors = {f"server.{name}": leaf for name, leaf in named_leaves(server)}
        except AttributeError as error:
            raise Broken("its state must be a NamedTuple of tensors, or of NamedTuples of tensors") from error
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(Path(folder), 2, tensors, {})
            saved = checkpoint.load(Path(folder) / "round-00000002").tensors
        again = restore(engine.start(), saved, "server")
        resumed, whole = engine.advance(again, 2, 2), engine.advance(server, 2, 2)
    if type(again) is not type(server) or _bytes(resumed) != _bytes(whole):
        raise Broken("a resumed run differs: keep everything that changes results in the state")


def everybody_gets_a_model(subject: Subject) -> None:
    """Every seen and every new client gets a model, one row per client, without NaN or infinite values."""
    with closing(subject.engine()) as engine, torch.no_grad():
        method: Method[Any] = engine.method
        server = engine.advance(engine.start(), 0, ROUNDS)
        for ids, cohort in engine.cohorts(np.arange(subject.federation.num_clients)):
            personal = method.personalize(server, cohort)
            for leaf in leaves(personal):
                if len(leaf) != len(ids) or not bool(torch.isfinite(leaf).all()):
                    kind = "new" if cohort.is_new else "seen"
                    raise Broken(f"{len(ids)} {kind} clients got models of shape {tuple(leaf.shape)}, or with NaN")
            scores = cohort.run(method.predict, each(personal), split=TEST)
            if scores.samples.tolist() != subject.federation.count[TEST][ids].tolist():
                raise Broken("some test samples have no score")


def held_out_data_is_not_looked_at(subject: Subject) -> None:
    """Training uses no held-out samples and no new clients, and no model depends on held-out samples.

    Held-out samples are the samples for validation and test. A new client's model may depend on its training samples.
    """
    clean = subject.federation
    poisoned, held_out = _poisoned(clean, new_clients=True), _poisoned(clean, new_clients=False)
    for make in (SerialEngine, VectorEngine):
        server, other = (_trained(subject.engine(make, federation=data)) for data in (clean, poisoned))
        if _bytes(server) != _bytes(other):
            raise Broken(f"held-out samples change the training on the {make.name} engine")
        models = []
        for data in (clean, held_out):
            with closing(subject.engine(make, federation=data)) as engine:
                models.append(_models_and_scores(engine, server)[0])
        if _bytes(models[0]) != _bytes(models[1]):
            raise Broken(f"held-out samples change the models of `personalize` on the {make.name} engine")


def a_gpu_can_record_it(subject: Subject) -> None:
    """A GPU can record rounds and evaluations and replay them: Python reads no numbers and makes no tensors of them.

    A CUDA graph repeats the same kernels on the same memory. If Python reads a number during recording, its value then
    holds for all rounds. A graph also cannot copy numbers from the host's memory. This check needs no GPU.
    """
    with closing(subject.engine(VectorEngine)) as engine:
        assert isinstance(engine, VectorEngine)
        server = engine.start()
        cohorts = [cohort for _, cohort in engine.cohorts(np.arange(subject.federation.num_clients))]
        for record in (nullcontext, recording):  # the first pass fills caches, as on a GPU
            t = torch.zeros((), dtype=torch.int64)
            with record():
                engine.checked_round(server, t)
                for cohort in cohorts:
                    scores_of(engine.method, server, cohort.anew(), TEST)


def real_clients_can_run_it(subject: Subject) -> None:
    """Clients on other machines, reached by Flower, get the same models as clients in one process."""
    if find_spec("flwr") is None:
        raise NotTried("Flower is not installed: pip install flwr==1.41.0")
    from pefll.engines.flower.client.app import PefllClientApp
    from pefll.engines.flower.inprocess import InProcessGrid, write_client
    from pefll.engines.flower.protocol.agreement import Agreement
    from pefll.engines.flower.protocol.names import client_name
    from pefll.engines.flower.server.engine import FlowerEngine
    from pefll.engines.flower.server.terms import Terms

    data = subject.federation
    names = [client_name(client) for client in range(data.num_clients)]
    seen, new = names[: data.num_seen], names[data.num_seen :]
    agreed = Agreement(subject.name, "mlp", data.input_shape, data.classes, len(seen), subject.settings)
    open_to_all = {"methods": subject.name, "min-samples": "0", "numbers-per-sample": "0"}
    trouble: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        nodes = {}
        for client, name in enumerate(names):
            path = Path(folder) / f"{name}.npz"
            write_client(data, client, path)
            nodes[1 + client] = {"name": name, "data": str(path), "state": str(path.with_suffix("")), **open_to_all}
        grid = InProcessGrid(PefllClientApp(), nodes, agreed.to_config())
        terms = Terms(pause_seconds=0.01, patience_seconds=0.1, weight_limit=0, norm_limit=0)
        try:
            with _flower_log(trouble):
                found = _scores(FlowerEngine(grid, agreed, seen, 3, terms, trouble.append, newcomers=new))
        except PefllError as error:
            raise Broken(trouble[0] if trouble else str(error)) from error
    if trouble:
        raise Broken(trouble[0])
    expected = _scores(SerialEngine(data, agreed.build(), agreed.seed, 3))
    if not np.allclose(found, expected, rtol=1e-4):
        raise Broken("clients on other machines get other scores than clients in one process")


@contextmanager
def _flower_log(lines: list[str]) -> Iterator[None]:
    """Append Flower's log inside the block to `lines`: only the log says why a client fails."""
    log, handler = logging.getLogger("flwr"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before, log.handlers = log.handlers, [handler]
    try:
        yield
    finally:
        log.handlers = before


@contextmanager
def recording() -> Iterator[None]:
    """Raise `Broken` inside the block if a CUDA graph cannot record it; works on a CPU and under `torch.func`."""
    with _CheckedFunctions(), _CheckedOperations():  # type: ignore[no-untyped-call]
        yield


class _CheckedFunctions(TorchFunctionMode):
    """Refuses functions that copy numbers to Python. `_CheckedOperations` does not see these."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__):
            raise Broken(f"it looks at numbers in Python: `{function.__name__}` cannot be recorded on a GPU")
        return function(*args, **(kwargs or {}))


class _CheckedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that a CUDA graph cannot record."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operation.overloadpacket.__name__
        if name == "_local_scalar_dense":
            raise Broken("it looks at a number in Python (`.item()`, `int(x)`, `if x > 0`): use torch.where")
        if name in _SIZED_BY_VALUES or (name in ("index", "index_put", "index_put_") and _has_mask(args[1])):
            raise Broken(f"the shape of a result depends on values (`{name}`, or a mask as an index): use torch.where")
        if name == "lift_fresh":
            raise Broken(
                "it makes a tensor from numbers of Python or NumPy: use torch.full or torch.arange, or make the tensor "
                "in `init` and keep it in the state"
            )
        return operation(*args, **(kwargs or {}))


# The size of these operations' results depends on values. A GPU would have to wait until the size is known.
_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


CHECKS: tuple[Callable[[Subject], None], ...] = (
    is_a_method,
    everybody_gets_a_model,
    a_seed_decides_everything,
    engines_agree,
    order_does_not_matter,
    states_are_not_written_to,
    stopping_changes_nothing,
    held_out_data_is_not_looked_at,
    a_gpu_can_record_it,
    real_clients_can_run_it,
)


def _trained(engine: Engine) -> Tree:
    """Return the server's state after some rounds, and close the engine."""
    with closing(engine):
        return engine.advance(engine.start(), 0, ROUNDS)


def _scores(engine: Engine) -> Floats:
    """Train, close the engine, and return the scores of all clients' models, [n, 4]."""
    with closing(engine):
        server = engine.advance(engine.start(), 0, ROUNDS)
        return client_scores(engine, engine.method, server, np.arange(engine.federation.num_clients), TEST)


@torch.no_grad()
def _models_and_scores(engine: Engine, server: Tree) -> tuple[Tensor, Tensor]:
    """Return the models of all clients [n, P] and their scores [n, 4], in float64 and in the order of the clients."""
    method: Method[Any] = engine.method
    models, scores = {}, {}
    for ids, cohort in engine.cohorts(np.arange(engine.federation.num_clients)):
        personal = method.personalize(server, cohort)
        score = cohort.run(method.predict, each(personal), split=TEST)
        for place, client in enumerate(ids.tolist()):
            models[client] = _flat(map_tree(lambda leaf, place=place: leaf[place], personal))
            scores[client] = torch.stack([part[place].double() for part in score])
    of_all, scored = ([found[client] for client in sorted(found)] for found in (models, scores))
    return torch.stack(of_all), torch.stack(scored)


def _bytes(tree: Tree) -> bytes:
    return b"".join(leaf.numpy().tobytes() for leaf in leaves(tree))


def _flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.reshape(-1).double() for leaf in leaves(tree)])


def _small_federation() -> Federation:
    rng = np.random.default_rng(0)
    owner: list[int] = []
    split: list[int] = []
    for client in range(8):
        train = (2, 5, 9, 14)[client % 4]
        for number, amount in enumerate((train, 1 + train // 3, 1 + train // 2)):
            owner += [client] * amount
            split += [number] * amount
    y = rng.integers(0, 3, len(owner))
    x = rng.normal(size=(3, 6))[y] + rng.normal(size=(len(owner), 6))
    samples = Samples(x=x, y=y, classes=3)
    return assemble(samples, np.array(owner), np.array(split, dtype=np.int8), 6, "eight clients")


def _poisoned(federation: Federation, *, new_clients: bool) -> Federation:
    """Return the federation with changed held-out samples; with `new_clients`, new clients' training samples too."""
    rows = [federation.indices(c, s) for c in range(federation.num_clients) for s in (VALIDATION, TEST)]
    if new_clients:
        rows += [federation.indices(c, TRAIN) for c in range(federation.num_seen, federation.num_clients)]
    chosen = torch.cat(rows)
    x, y = federation.x.clone(), federation.y.clone()
    x[chosen] = -5 * x[chosen] + 3
    y[chosen] = (y[chosen] + 1) % federation.classes
    return dataclasses.replace(federation, x=x, y=y)
