"""What a method is, and the one door through which it reaches clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from pefll.core.derivatives import gradient
from pefll.core.errors import PefllError
from pefll.core.reference import reference
from pefll.data.client import Batch, Client
from pefll.data.federation import VALIDATION
from pefll.models.network import Network, Parameters
from pefll.tasks import Classification, Task
from pefll.tasks import Score as Score  # what a method's `predict` returns

State = TypeVar("State", bound=tuple[Any, ...])
Tree = Any  # a tensor, or a NamedTuple of such
# What all clients keep may be this large in a state, of which several exist at once: the best, the newest, a copy.
MOST_KEPT_BYTES = 1 << 34


class Everyone(NamedTuple):
    """A value that every client of a cohort gets."""

    value: Tree


class Each(NamedTuple):
    """A value with a leading client axis, of which every client gets its own slice."""

    value: Tree


class Own(NamedTuple):
    """What clients keep to themselves: it never crosses the network.

    As an argument of `Cohort.run`, an array (or tree of arrays) with one row for each client of the federation, of
    which a client finds its own. In a reply, what the client keeps; what comes back has a row for each client of the
    cohort, and `Cohort.keep` puts these rows where they belong. A simulation holds all of it in the server's state, so
    that it is saved and resumed with everything else.
    """

    value: Tree


def everyone(value: Tree) -> Everyone:
    """Broadcast: every client gets `value`."""
    return Everyone(value)


def each(value: Tree) -> Each:
    """Scatter: client i of the cohort gets `value[i]`."""
    return Each(value)


def own(value: Tree) -> Own:
    """Remember: client i of the federation has `value[i]` already, and nothing is sent."""
    return Own(value)


class Cohort(Protocol):
    """The clients of one round, wherever they are. This is the only door to them."""

    @property
    def size(self) -> int:
        """How many clients there are."""
        ...

    @property
    def ids(self) -> Tensor:
        """Who they are: their numbers in the federation, int64 [c], on the server's device."""
        ...

    @property
    def is_new(self) -> bool:
        """Whether they are clients that never took part in training; a cohort is all new or not at all."""
        ...

    def run(self, task: Callable[..., Tree], *arguments: Everyone | Each | Own, **static: int) -> Tree:
        """Run `task(client, *arguments)` on every client and return the replies with a leading client axis."""
        ...

    def keep(self, memory: Tree, kept: Own) -> Tree:
        """Return what all clients of the federation keep, with the rows of this cohort replaced by its replies."""
        ...


@dataclass(frozen=True, eq=False)
class Problem:
    """What there is to learn: the same for every method.

    Attributes:
        model: what clients run; maps samples to one score per class.
        input_shape: of one sample.
        classes: the number of classes.
        num_clients: all clients of the federation; PeFLL's descriptor size follows it.
        tokens: whether samples are tokens.
        task: what the model's output means; classification where nothing is given.
    """

    model: Network
    input_shape: tuple[int, ...]
    classes: int
    num_clients: int
    tokens: bool = False
    task: Task = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.task is None:
            object.__setattr__(self, "task", Classification(self.classes))

    def loss(self, theta: Parameters, batch: Any) -> Tensor:
        """Return the mean loss of a model, a vector [D] or tensors by name, on a batch, []."""
        return mean_loss(self.task, self.model(theta, batch.x), batch)

    def gradient(self, theta: Tensor, batch: Any) -> Tensor:
        """Return the gradient of the loss at theta [D] on a batch, [D]."""
        return gradient(self.loss, theta, batch)


@reference
def mean_loss(task: Task, output: Tensor, batch: Batch) -> Tensor:
    """Return a task's loss for outputs [b, ...], averaged over the samples of a batch, []."""
    return batch.mean(task.loss(output, batch.y))


def check_kept(clients: int, numbers: int, advice: str) -> None:
    """Raise PefllError where a state with some numbers for each client would not fit into memory.

    Args:
        clients: n.
        numbers: how many for each.
        advice: what a user can do, as the end of the sentence.
    """
    needed = 4 * clients * numbers
    if needed > MOST_KEPT_BYTES:
        raise PefllError(
            f"{numbers} numbers for each of {clients} clients are {needed / 1e9:.0f} GB in a state, and more than "
            f"{MOST_KEPT_BYTES / 1e9:.0f} GB would not fit into memory; {advice}",
            code="PEFLL-S004",
        )


class Method(Protocol[State]):
    """A federated learning algorithm: a frozen dataclass whose fields are its hyper-parameters.

    Functions that run on clients take a `Client` first and are written for one client. A method whose personal models
    are more than the network with other weights also has `personal_module(cohort, theta)`, which returns the model of
    the one client of a cohort as an `nn.Module`; see `knn_per`. Real clients answer only for the functions named in
    `client_tasks`, where a method has that, and compare what those in `describing_tasks` return with their owner's
    limits. `kept_arguments` names, for each such function, the arguments that may be something a client kept; real
    clients refuse to use it as any other. A reply's field called `samples` is the number of samples by which the server
    weights it.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def problem(self) -> Problem:
        """What there is to learn."""
        ...

    @property
    def trains_in_rounds(self) -> bool:
        """Whether `round` learns anything; otherwise all training happens in `personalize`."""
        ...

    @property
    def uses_labels(self) -> bool:
        """Whether a client needs labels to be personalised."""
        ...

    @property
    def trains_new_clients(self) -> bool:
        """Whether a client that was never seen has to train before it has a model.

        That takes long, and which round is best does not depend on such clients: they are scored after training only.
        """
        ...

    @property
    def local_steps(self) -> int:
        """How many gradients of a batch a client computes in a round; 0 where `local_epochs` says it."""
        ...

    @property
    def local_epochs(self) -> int:
        """How many gradients of each sample a client computes in a round; 0 where `local_steps` says it."""
        ...

    @property
    def batch_size(self) -> int:
        """How many samples a step takes; 0 for all."""
        ...

    def init(self, seed: int, cohort: Cohort) -> State:
        """Return the server's state before the first round; `cohort` is the first round's."""
        ...

    def round(self, server: State, cohort: Cohort) -> State:
        """Return the server's state after one round with the clients of `cohort`."""
        ...

    def personalize(self, server: State, cohort: Cohort) -> Tensor:
        """Return a personal model for every client of the cohort, [c, D]."""
        ...

    def descriptors(self, server: State, cohort: Cohort) -> Tensor | None:
        """Return what the clients of the cohort look like to the server, [c, l]; None where it does not matter."""
        ...

    def predict(self, client: Client, theta: Tensor, split: int) -> Score:
        """Score a client's personal model on its own samples."""
        ...


@dataclass(frozen=True)
class BaseMethod:
    """What most methods share. A method is a frozen dataclass of hyper-parameters, a value made before any data.

    `fit` binds it to a problem. A subclass writes `init`, `round`, `personalize`, its functions for one client, and
    the names of those in `client_tasks`; it changes what differs of the rest.
    """

    bound_to: Problem | None = field(default=None, kw_only=True, repr=False, compare=False)

    trains_in_rounds: ClassVar[bool] = True
    trains_new_clients: ClassVar[bool] = False

    @property
    def problem(self) -> Problem:
        """What there is to learn."""
        if self.bound_to is None:
            raise PefllError(
                f"{type(self).__name__} knows no data yet: give it to pefll.fit, or bind it to a problem",
                code="PEFLL-S021",
            )
        return self.bound_to

    @property
    def uses_labels(self) -> bool:
        """Whether a client needs labels to be personalised."""
        return True

    @property
    def local_steps(self) -> int:
        """How many gradients of a batch a client computes in a round; 0 where `local_epochs` says it."""
        return 0

    @property
    def local_epochs(self) -> int:
        """How many gradients of each sample a client computes in a round; 0 where `local_steps` says it."""
        return 0

    def bind(self, problem: Problem) -> Self:
        """Return the same method for a problem; PefllError where it does not fit."""
        bound = replace(self, bound_to=problem)
        bound.check()
        return bound

    def check(self) -> None:
        """Raise PefllError where the hyper-parameters do not fit the problem."""

    def descriptors(self, server: Any, cohort: Cohort) -> Tensor | None:
        """Return nothing: clients are not described."""

    def predict(self, client: Client, theta: Tensor, split: int) -> Score:
        """Score a client's personal model on its own samples."""
        return score(self.problem, client, theta, split)


def score(problem: Problem, client: Client, theta: Tensor, split: int = VALIDATION) -> Score:
    """Return what a task measures of a model [D] on one split of one client."""
    return measured(problem, client, lambda x: problem.model(theta, x), split)


def measured(
    problem: Problem, client: Client, outputs_of: Callable[[Tensor], Tensor], split: int = VALIDATION
) -> Score:
    """Return what a task measures of any function from samples to outputs on one split of one client.

    Args:
        problem: gives the task.
        client: whose samples.
        outputs_of: maps samples [b, ...] to outputs; for classification, logarithms of probabilities up to a constant.
        split: which samples.
    """
    known = client.has_class()
    zero = torch.zeros((), dtype=client.dtype, device=client.count.device)
    total = [zero] * len(Score._fields)
    for batch in client.everything(split):
        sums = problem.task.measure(outputs_of(batch.x), batch, known)
        total = [a + b for a, b in zip(total, sums, strict=True)]
    return Score(*total)
