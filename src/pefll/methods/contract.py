"""The interface of a method, and the interface through which a method reaches clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from pefll.core import randomness
from pefll.core.derivatives import gradient
from pefll.core.errors import PefllError, unknown
from pefll.core.reference import reference
from pefll.core.tree import map_tree
from pefll.data.client import Batch, Client
from pefll.data.samples import VALIDATION
from pefll.models.network import Network, Parameters
from pefll.tasks import Classification, Task
from pefll.tasks import Score as Score  # return type of a method's `predict` in classification
from pefll.tasks.sums import no_sums

State = TypeVar("State", bound=tuple[Any, ...])
Tree = Any  # a tensor, or a NamedTuple of trees
# Most bytes that all clients may keep in a state. Memory has several states at once: the best, the newest, a copy.
MOST_KEPT_BYTES = 1 << 34


class Everyone(NamedTuple):
    """A value that every client of a cohort gets."""

    value: Tree


class Each(NamedTuple):
    """A value whose first axis is the clients of a cohort; every client gets its own slice."""

    value: Tree


class ClientState(NamedTuple):
    """A value that stays on its client and is never sent.

    As an argument of `Cohort.run`, it has one row for each client of the federation, and a client gets its own row.
    In a reply, it is the value that the client keeps, with one row for each client of the cohort. `Cohort.keep` writes
    these rows into the arrays of the federation. A simulation stores these arrays in the server's state, so that they
    are saved and restored with it.
    """

    value: Tree


def everyone(value: Tree) -> Everyone:
    """Broadcast: every client gets `value`."""
    return Everyone(value)


def each(value: Tree) -> Each:
    """Scatter: client i of the cohort gets `value[i]`."""
    return Each(value)


def client_state(value: Tree) -> ClientState:
    """Client i of the federation uses `value[i]`, which it kept; nothing is sent."""
    return ClientState(value)


class Cohort(Protocol):
    """The clients of one round, simulated or on other machines. A method reaches clients only through a cohort."""

    @property
    def size(self) -> int:
        """Number of clients."""
        ...

    @property
    def ids(self) -> Tensor:
        """The clients' numbers in the federation, int64 [c], on the server's device."""
        ...

    @property
    def is_new(self) -> bool:
        """Whether these clients never took part in training. This is the same for all clients of a cohort."""
        ...

    def run(self, task: Callable[..., Tree], *arguments: Everyone | Each | ClientState, **static: int) -> Tree:
        """Run `task(client, *arguments)` on every client; return the replies, whose first axis is the clients."""
        ...

    def keep(self, memory: Tree, kept: ClientState) -> Tree:
        """Return `memory`, with one row per client of the federation, after replacing this cohort's rows by `kept`."""
        ...

    def client_rate(self, lr: float) -> float | Tensor:
        """Return a client's learning rate in this round: `lr`, times the factor of the run's schedule."""
        ...

    def server_rate(self, lr: float) -> float | Tensor:
        """Return a learning rate of the server in this round: `lr`, times the factor of the run's schedule."""
        ...


@dataclass(frozen=True, eq=False)
class Problem:
    """The learning problem, which is the same for every method.

    Attributes:
        model: the clients' network, which maps samples to the outputs of the task, such as one score per class.
        input_shape: shape of one sample.
        classes: number of classes; 0 if labels are not classes.
        num_clients: number of all clients of the federation; the default size of PeFLL's descriptor depends on it.
        tokens: whether samples are tokens.
        task: defines loss and metrics of the model's output; classification by default.
        num_seen: number of clients that take part in training; 0 for all.
    """

    model: Network
    input_shape: tuple[int, ...]
    classes: int
    num_clients: int
    tokens: bool = False
    task: Task = None  # type: ignore[assignment]
    num_seen: int = 0

    def __post_init__(self) -> None:
        if not self.num_seen:
            object.__setattr__(self, "num_seen", self.num_clients)
        if self.task is None:
            object.__setattr__(self, "task", Classification(self.classes))

    @property
    def encoded(self) -> int:
        """Number of values of a label that an embedding network gets: one per class, or `Task.encoded`."""
        return self.task.encoded

    def embedded(self, y: Tensor) -> Tensor:
        """Return labels [b, ...] as an embedding network gets them: classes [b], or encoded labels [b, e].

        Embedding networks encode classes themselves, because they can select weights faster than multiply by zeros.
        """
        return self.task.encode(y) if self.encodes else y

    @property
    def encodes(self) -> bool:
        """Whether an embedding network gets encoded labels, not classes."""
        return type(self.task).encode is not Classification.encode

    def loss(self, theta: Parameters, batch: Any) -> Tensor:
        """Return the mean loss [] of a model on a batch; theta is a vector [D] or tensors by name."""
        return mean_loss(self.task, self.model(theta, batch.x), batch)

    def gradient(self, theta: Tensor, batch: Any) -> Tensor:
        """Return the gradient [D] of the loss on a batch at theta [D]."""
        return gradient(self.loss, theta, batch)


@reference
def mean_loss(task: Task, output: Tensor, batch: Batch) -> Tensor:
    """Return the mean [] of a task's loss over the samples of a batch, for outputs [b, ...]."""
    return batch.mean(task.loss(output, batch.y))


def undrawn_network(build: Callable[..., nn.Module], *arguments: Any) -> Network:
    """Return the network of the module `build(*arguments)`; its weights must be drawn with `init`."""
    with randomness.initial_weights(0, "architecture"):  # so that torch's random state does not change
        return Network(build(*arguments))


def require(condition: bool, sentence: str, code: str) -> None:
    """Raise PefllError with a sentence and a code unless the condition is true."""
    if not condition:
        raise PefllError(sentence, code=code)


def check_kept(clients: int, numbers: int, advice: str) -> None:
    """Raise PefllError if a state with `numbers` numbers for each of `clients` clients is too large.

    Args:
        clients: number of clients.
        numbers: amount of numbers per client.
        advice: end of the error sentence: what a user can do.
    """
    needed = 4 * clients * numbers
    require(
        needed <= MOST_KEPT_BYTES,
        f"{numbers} numbers for each of {clients} clients are {needed / 1e9:.0f} GB in the state, but the limit is "
        f"{MOST_KEPT_BYTES / 1e9:.0f} GB; {advice}",
        code="PEFLL-S004",
    )


class Method(Protocol[State]):
    """A federated learning algorithm: a frozen dataclass whose fields are its hyper-parameters.

    Functions that run on clients have a `Client` as first argument, and are written for one client.

    Optional attributes:
        personal_module(cohort, theta): returns the personal model of the only client of a cohort as an `nn.Module`.
            It is needed if that model is more than the network with personal weights; see `knn_per`.
        client_tasks: names of the functions that real clients agree to run; without this attribute, all functions.
        describing_tasks: names of the functions whose replies real clients check against the limits of their owner.
        kept_arguments: for each function, the arguments that may be tensors a client kept; real clients refuse others.
        client_rates: names of the clients' learning rates that follow a schedule, through `client.rate(lr)`.
        server_rates: names of the server's learning rates that follow a schedule, through `cohort.server_rate(lr)`.
        personal_settings: names of the hyper-parameters that only `personalize` reads. They may change after training.
            The first is a number of steps. If it is 0, the others have no effect.
        network_settings: names of the hyper-parameters that choose a network. Beside a name, they may be a user's own
            `nn.Module` or function; see `pefll.models.own`.
        settings_for(problem, given): a class method. It returns hyper-parameters that a new run of this problem takes
            in place of the class's defaults, if the user gives others alone. The run stores them.

    The server weights a reply by its field `samples`, if it has one.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def problem(self) -> Problem:
        """The learning problem."""
        ...

    @property
    def trains_in_rounds(self) -> bool:
        """Whether `round` learns anything; otherwise all training happens in `personalize`."""
        ...

    @property
    def uses_labels(self) -> bool:
        """Whether a client needs labels to get a personal model."""
        ...

    @property
    def trains_new_clients(self) -> bool:
        """Whether a new client must train before it has a model.

        This takes long, and the choice of the best round ignores new clients. So they are scored only after training.
        """
        ...

    @property
    def local_steps(self) -> int:
        """Number of batch gradients that a client computes in a round; 0 if `local_epochs` gives the amount of work."""
        ...

    @property
    def local_epochs(self) -> int:
        """Number of gradients per sample that a client computes in a round; 0 if `local_steps` gives the amount."""
        ...

    @property
    def batch_size(self) -> int:
        """Number of samples per step; 0 for all samples."""
        ...

    def init(self, seed: int, cohort: Cohort) -> State:
        """Return the server's state before the first round; `cohort` is the cohort of the first round."""
        ...

    def round(self, server: State, cohort: Cohort) -> State:
        """Return the server's state after one round with the clients of `cohort`."""
        ...

    def personalize(self, server: State, cohort: Cohort) -> Tensor:
        """Return a personal model for every client of the cohort, [c, D]."""
        ...

    def descriptors(self, server: State, cohort: Cohort) -> Tensor | None:
        """Return the descriptors of the cohort's clients, [c, l]; None if the method has none."""
        ...

    def predict(self, client: Client, theta: Tensor, split: int) -> Any:
        """Return the task's sums, such as a `Score`, of a client's personal model on its own samples."""
        ...


@runtime_checkable
class TwoHalves(Protocol):
    """A method that makes a model in two halves: a descriptor on the client, then a model on the server.

    Each half is a dictionary of tensors, which is all that its machine needs.
    """

    @property
    def sent_size(self) -> int:
        """Number of numbers in the descriptor that a client sends."""
        ...

    def client_half(self, server: Any) -> dict[str, Tensor]:
        """Return what a client needs for its descriptor."""
        ...

    def client_half_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `client_half`, without the client's model."""
        ...

    def server_half(self, server: Any) -> dict[str, Tensor]:
        """Return what a server needs to make models from descriptors."""
        ...

    def server_half_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `server_half`."""
        ...

    def describe_with(self, half: dict[str, Tensor], cohort: Cohort) -> Tensor:
        """Return the descriptors [c, l] of a cohort's clients, made with the half for clients."""
        ...

    def generate_with(self, half: dict[str, Tensor], v: Tensor) -> Tensor:
        """Return models [c, D] for descriptors [c, l], made with the half for servers."""
        ...


@dataclass(frozen=True)
class BaseMethod:
    """Defaults that most methods share. A method is a frozen dataclass of hyper-parameters; it needs no data.

    `fit` binds a method to a problem. A subclass defines `init`, `round`, `personalize`, functions for one client, and
    the names of these functions in `client_tasks`. It overrides other defaults as needed.
    """

    bound_to: Problem | None = field(default=None, kw_only=True, repr=False, compare=False)

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Raise PefllError for an argument that the method does not take."""
        taken = signature(cls.__init__).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            for name in given.keys() - taken.keys():
                raise unknown(f"hyper-parameter of {cls.__name__}", name, taken.keys() - {"self", "bound_to"})
        return super().__new__(cls)

    trains_in_rounds: ClassVar[bool] = True
    client_rates: ClassVar[tuple[str, ...]] = ()
    server_rates: ClassVar[tuple[str, ...]] = ()

    @property
    def problem(self) -> Problem:
        """The learning problem."""
        if self.bound_to is None:
            raise PefllError(
                f"{type(self).__name__} has no problem yet: give it to pefll.fit, or call its bind(problem)",
                code="PEFLL-S021",
            )
        return self.bound_to

    @property
    def trains_new_clients(self) -> bool:
        """Whether a new client must train before it has a model."""
        return False

    @property
    def uses_labels(self) -> bool:
        """Whether a client needs labels to get a personal model."""
        return True

    @property
    def local_steps(self) -> int:
        """Number of batch gradients that a client computes in a round; 0 if `local_epochs` gives the amount of work."""
        return 0

    @property
    def local_epochs(self) -> int:
        """Number of gradients per sample that a client computes in a round; 0 if `local_steps` gives the amount."""
        return 0

    def bind(self, problem: Problem) -> Self:
        """Return a copy of the method that is bound to a problem; PefllError if method and problem do not fit."""
        bound = replace(self, bound_to=problem)
        bound.check()
        return bound

    def check(self) -> None:
        """Raise PefllError if the hyper-parameters do not fit the problem."""

    def descriptors(self, server: Any, cohort: Cohort) -> Tensor | None:
        """Return None: clients have no descriptors."""

    def predict(self, client: Client, theta: Tensor, split: int) -> Any:
        """Return the task's sums, such as a `Score`, of a client's personal model on its own samples."""
        return score(self.problem, client, theta, split)


def score(problem: Problem, client: Client, theta: Tensor, split: int = VALIDATION) -> Any:
    """Return the task's sums, such as a `Score`, of a model [D] on one split of one client."""
    return sum_scores(problem, client, lambda x: problem.model(theta, x), split)


def sum_scores(
    problem: Problem, client: Client, outputs_of: Callable[[Tensor], Tensor], split: int = VALIDATION
) -> Any:
    """Return the task's sums, such as a `Score`, of the outputs of a function, on one split of one client.

    Args:
        problem: has the task.
        client: has the samples.
        outputs_of: maps samples [b, ...] to outputs; for classification, logarithms of probabilities up to a constant.
        split: the split of the client's samples.
    """
    known = client.has_class() if client.federation.classes else None
    total: Any = None
    for batch in client.everything(split):
        sums = problem.task.measure(outputs_of(batch.x), batch, known)
        total = sums if total is None else map_tree(torch.add, total, sums)
    if total is None:  # no client has samples of the split
        return no_sums(problem.task, client.federation.y, client.federation.classes, client.dtype)
    return total
