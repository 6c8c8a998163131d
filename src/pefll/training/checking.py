"""What must hold for every method, registered here or a user's own: `pefll check-method mymodule:MyMethod`.

Each check is a function of a `Subject` that raises `Broken` with a sentence. Clients have different numbers of samples,
some fewer than any batch, and some of them are new.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from pefll.data.federation import TEST, TRAIN, VALIDATION, Federation, Samples, assemble
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
TOLERANCE = 1e-8  # in float64, after ROUNDS
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
    """A method does not do what every method must; the text says what."""


class NotTried(Exception):
    """A check needs what is not installed; the text says what."""


class Finding(NamedTuple):
    """The outcome of one check.

    Attributes:
        rule: what must hold.
        problem: a sentence where it does not.
        not_tried: a sentence where nobody knows, for want of a package.
    """

    rule: str
    problem: str | None
    not_tried: str | None = None


@dataclass(frozen=True)
class Subject:
    """A method under examination: a key of METHODS or `module:Class`, with settings that make it quick."""

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
        return build_method(self.name, Problem(model, data.input_shape, data.classes, data.num_clients), self.settings)

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
    """Run every check on a method.

    Args:
        name: a key of METHODS, or `package.module:Class`.
        settings: hyper-parameters for the checks; few steps make them quick.

    Returns:
        One finding for each rule. After a method that is not one at all, nothing else is tried.
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
        raise Broken("it can be changed after it is made: write @dataclass(frozen=True)")
    if not issubclass(kind, BaseMethod) and "problem" not in {field.name for field in dataclasses.fields(kind)}:
        raise Broken("it is no BaseMethod, and has no field `problem`")
    missing = [key for key, default in hyperparameters(subject.name).items() if default is dataclasses.MISSING]
    if missing:
        raise Broken(f"no default for {', '.join(missing)}")
    method = subject.method()
    absent = [name for name in MEMBERS if not hasattr(method, name)]
    if absent:
        raise Broken(f"it lacks {', '.join(absent)}; see pefll.methods.contract.Method")


def a_seed_decides_everything(subject: Subject) -> None:
    """The same seed gives the same bytes, and another seed gives others."""
    for make in (SerialEngine, VectorEngine):
        one, two, other = (_trained(subject.engine(make, seed, torch.float32)) for seed in (4, 4, 5))
        if _bytes(one) != _bytes(two):
            raise Broken(f"two runs with one seed differ on the {make.name} engine: it draws random numbers of its own")
        if _bytes(one) == _bytes(other):
            raise Broken(f"runs with different seeds are the same on the {make.name} engine")


def engines_agree(subject: Subject) -> None:
    """One client after another, and all at once with padding, give the same state, models and scores."""
    serial, vector = (_journey(subject.engine(make)) for make in (SerialEngine, VectorEngine))
    for what, one, two in zip(("states", "models", "scores"), serial[:3], vector[:3], strict=True):
        if one.shape != two.shape:
            raise Broken(f"the {what} have shapes {tuple(one.shape)} and {tuple(two.shape)}")
        apart = float((one - two).abs().max()) if one.numel() else 0.0
        if not apart <= TOLERANCE:
            raise Broken(f"the {what} are {apart:.1e} apart in float64: something depends on padding or on neighbours")
    if serial[3] != vector[3]:
        raise Broken(f"bytes sent and received differ: {serial[3]} and {vector[3]}")


def order_does_not_matter(subject: Subject) -> None:
    """A round with the same clients in another order is the same round."""
    engine = subject.engine()
    assert isinstance(engine, SerialEngine)
    server = engine.start()
    states = [
        _flat(engine.method.round(server, engine._cohort(np.array(ids), 0, Ledger()))) for ids in ([0, 1, 4], [4, 0, 1])
    ]
    engine.close()
    apart = float((states[0] - states[1]).abs().max())
    if not apart <= TOLERANCE:
        raise Broken(f"states are {apart:.1e} apart after a round with the same clients in another order")


def states_are_not_written_to(subject: Subject) -> None:
    """Rounds and evaluations leave the state that they are given as it was."""
    for make in (SerialEngine, VectorEngine):
        engine = subject.engine(make)
        kept = [engine.start()]
        before = [_bytes(kept[0])]
        for t in range(ROUNDS):
            kept.append(engine.advance(kept[-1], t, 1))
            before.append(_bytes(kept[-1]))
            evaluate(engine, engine.method, kept[-1], TEST)
        engine.close()
        if [_bytes(state) for state in kept] != before:
            raise Broken("a state of an earlier round changed: write nothing in place (index_copy, not x[i] = y)")


def stopping_changes_nothing(subject: Subject) -> None:
    """A state saved to a file, read again and trained on gives the same bytes as training in one go."""
    engine = subject.engine(dtype=torch.float32)
    server = engine.advance(engine.start(), 0, 2)
    try:
        tensors = {f"server.{name}": leaf for name, leaf in named_leaves(server)}
    except AttributeError as error:
        raise Broken("its state must be a NamedTuple of tensors, or of such NamedTuples") from error
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder), 2, tensors, {})
        saved = checkpoint.load(Path(folder) / "round-00000002").tensors
    again = restore(engine.start(), saved, "server")
    resumed, whole = engine.advance(again, 2, 2), engine.advance(server, 2, 2)
    engine.close()
    if type(again) is not type(server) or _bytes(resumed) != _bytes(whole):
        raise Broken("a resumed run differs: something that matters is not in the state")


def everybody_gets_a_model(subject: Subject) -> None:
    """Seen clients and new ones get finite models, one row for each client."""
    engine = subject.engine()
    method: Method[Any] = engine.method
    server = engine.advance(engine.start(), 0, ROUNDS)
    with torch.no_grad():
        for ids, cohort in engine.cohorts(np.arange(subject.federation.num_clients)):
            personal = method.personalize(server, cohort)
            for leaf in leaves(personal):
                if len(leaf) != len(ids) or not bool(torch.isfinite(leaf).all()):
                    kind = "new" if cohort.is_new else "seen"
                    raise Broken(f"{len(ids)} {kind} clients got {tuple(leaf.shape)}, or NaN")
            scores = cohort.run(method.predict, each(personal), split=TEST)
            if scores.samples.tolist() != subject.federation.count[TEST][ids].tolist():
                raise Broken("scores are not of all test samples")
    engine.close()


def held_out_data_is_not_looked_at(subject: Subject) -> None:
    """No byte of training depends on validation or test samples, or on anything of new clients; no model on the former.

    A new client's model may depend on its training samples, and on nothing else of it.
    """
    clean = subject.federation
    poisoned, held_out = _poisoned(clean, new_clients=True), _poisoned(clean, new_clients=False)
    for make in (SerialEngine, VectorEngine):
        one, two = (_trained(subject.engine(make, federation=data)) for data in (clean, poisoned))
        if _bytes(one) != _bytes(two):
            raise Broken(f"held-out samples change what is learned on the {make.name} engine")
        mine, theirs = (_models(subject.engine(make, federation=data), one) for data in (clean, held_out))
        if _bytes(mine) != _bytes(theirs):
            raise Broken(f"held-out samples change what `personalize` makes on the {make.name} engine")


def a_gpu_can_record_it(subject: Subject) -> None:
    """Rounds and evaluations can be recorded once and replayed on a GPU: the host neither looks nor brings anything.

    A CUDA graph repeats the same kernels on the same memory. Numbers that Python reads while it records would decide
    for all rounds, and memory of the host cannot be copied from. No GPU is needed to see such a thing.
    """
    engine = subject.engine(VectorEngine)
    assert isinstance(engine, VectorEngine)
    server = engine.start()
    everybody = np.arange(subject.federation.num_clients)
    cohorts = [cohort for _, cohort in engine.cohorts(everybody)]
    for record in (nullcontext, Recording):  # a GPU, too, does everything once before it records: caches are filled
        t = torch.zeros((), dtype=torch.int64)
        with record():
            engine.checked_round(server, t)
            for cohort in cohorts:
                scores_of(engine.method, server, cohort.anew(), TEST)
    engine.close()


def real_clients_can_run_it(subject: Subject) -> None:
    """Clients on other machines, reached by Flower, make the same models as clients in one process."""
    if find_spec("flwr") is None:
        raise NotTried("Flower is not installed: pip install 'pefll[flower]'")
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
            with _logged(trouble):
                found = _scores(FlowerEngine(grid, agreed, seen, 3, terms, trouble.append, newcomers=new))
        except PefllError as error:
            raise Broken(trouble[0] if trouble else str(error)) from error
    if trouble:
        raise Broken(trouble[0])
    expected = _scores(SerialEngine(data, agreed.build(), agreed.seed, 3))
    if not np.allclose(found, expected, rtol=1e-4):
        raise Broken("clients on other machines get other scores than those in one process")


@contextmanager
def _logged(said: list[str]) -> Iterator[None]:
    """Collect what Flower's clients log inside the block: the server is not told why a client fails."""
    log, handler = logging.getLogger("flwr"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    before, log.handlers = log.handlers, [handler]
    try:
        yield
    finally:
        log.handlers = before


class _Looks(TorchFunctionMode):
    """Refuses what copies numbers to Python without an operation that `Recording` would see."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__):
            raise Broken(f"it looks at numbers in Python: `{function.__name__}` cannot be recorded on a GPU")
        return function(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """Refuses, on a CPU, what a CUDA graph could not record, under transforms of `torch.func` too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._looks = _Looks()

    def __enter__(self) -> Recording:
        self._looks.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._looks.__exit__(*error)  # type: ignore[no-untyped-call]

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
                "it makes a tensor from numbers of Python or NumPy: use torch.full, torch.arange or another operation, "
                "or make it in `init` and keep it in the state"
            )
        return operation(*args, **(kwargs or {}))


# Operations whose results have as many elements as the values decide, for which a GPU would have to wait.
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
    server = engine.advance(engine.start(), 0, ROUNDS)
    engine.close()
    return server


def _scores(engine: Engine) -> Floats:
    """Train, then score everybody's model."""
    try:
        server = engine.advance(engine.start(), 0, ROUNDS)
        return client_scores(engine, engine.method, server, np.arange(engine.federation.num_clients), TEST)
    finally:
        engine.close()


def _models(engine: Engine, server: Tree) -> Tree:
    """Make everybody's model."""
    with torch.no_grad():
        everybody = engine.cohorts(np.arange(engine.federation.num_clients))
        models = tuple(engine.method.personalize(server, cohort) for _, cohort in everybody)
    engine.close()
    return models


def _journey(engine: Engine) -> tuple[Tensor, Tensor, Tensor, tuple[int, int, int]]:
    """Train, then make and score everybody's model: state [S], models [n, ...], scores [n, 4], bytes."""
    method: Method[Any] = engine.method
    server = engine.advance(engine.start(), 0, ROUNDS)
    models, scores = {}, {}
    with torch.no_grad():
        for ids, cohort in engine.cohorts(np.arange(engine.federation.num_clients)):
            personal = method.personalize(server, cohort)
            score = cohort.run(method.predict, each(personal), split=TEST)
            for place, client in enumerate(ids.tolist()):
                models[client] = _flat(map_tree(lambda leaf, place=place: leaf[place], personal))
                scores[client] = torch.stack([part[place].double() for part in score])
    engine.close()
    everybody = range(engine.federation.num_clients)
    crossed = (engine.ledger.down, engine.ledger.up, engine.ledger.exchanges)
    return (
        _flat(server),
        torch.stack([models[client] for client in everybody]),
        torch.stack([scores[client] for client in everybody]),
        crossed,
    )


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
    """Change held-out samples of everybody, and with `new_clients` all else of those who take no part in training."""
    rows = [federation.indices(c, s) for c in range(federation.num_clients) for s in (VALIDATION, TEST)]
    if new_clients:
        rows += [federation.indices(c, TRAIN) for c in range(federation.num_seen, federation.num_clients)]
    chosen = torch.cat(rows)
    x, y = federation.x.clone(), federation.y.clone()
    x[chosen] = -5 * x[chosen] + 3
    y[chosen] = (y[chosen] + 1) % federation.classes
    return dataclasses.replace(federation, x=x, y=y)
