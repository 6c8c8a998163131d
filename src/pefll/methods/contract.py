"""What a method is, and the one door through which it reaches clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pefll.backend import client_axis, vectors
from pefll.backend.alone import gradient, gradients, is_constant
from pefll.backend.blocks import cross_entropy
from pefll.core.errors import PefllError
from pefll.data.client import Client
from pefll.data.federation import VALIDATION
from pefll.models.network import Network, Parameters

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
    """

    model: Network
    input_shape: tuple[int, ...]
    classes: int
    num_clients: int
    tokens: bool = False

    def loss(self, theta: Parameters, batch: Any) -> Tensor:
        """Return the mean cross-entropy of a model, a vector [D] or tensors by name, on a batch."""
        return cross_entropy(self.model(theta, batch.x), batch.y, batch.weight)

    def gradient(self, theta: Tensor, batch: Any) -> Tensor:
        """Return the gradient of the loss at theta [D] on a batch, [D]."""
        if is_constant(theta) or not client_axis.available(theta):
            return gradient(self.loss, theta, batch)
        (of_theta,) = self._pulled_back(theta, batch)
        return of_theta  # type: ignore[no-any-return]

    def gradients(self, theta: Tensor, batch: Any) -> Tensor | tuple[Tensor, ...]:
        """Return the same for a step of SGD, which need not have it joined.

        Args:
            theta: [D].
            batch: of one client.

        Returns:
            Parts, shaped as the model's parameters and in their order, where the step takes them; else [D].
        """
        model = self.model
        if is_constant(theta):
            return gradients(self.loss, model.in_parts(theta), batch)
        if not vectors.splits(theta, len(model.names)):
            return self.gradient(theta, batch)
        (of_parts,) = self._pulled_back(model.in_parts(theta), batch)
        return tuple(of_parts[name] for name in model.names)

    def _pulled_back(self, parameters: Parameters, batch: Any) -> Any:
        # From the scores back. From the loss back would begin with a one for each client, and with a product by it.
        scores, pull_back = torch.func.vjp(lambda at: self.model(at, batch.x), parameters)  # type: ignore[misc]
        return pull_back(client_axis.cross_entropy_gradient(scores, batch.y, batch.weight))


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


class Score(NamedTuple):
    """What a client tells about a model on one of its splits: sums, so that groups of clients can be added up.

    Attributes:
        samples: [] how many.
        correct: [] how many were right.
        masked: [] how many were right when scores of classes absent from its training labels are minus infinity.
        loss: [] the summed cross-entropy.
    """

    samples: Tensor
    correct: Tensor
    masked: Tensor
    loss: Tensor


class Method(Protocol[State]):
    """A federated learning algorithm: a frozen dataclass whose fields are its hyper-parameters.

    Functions that run on clients take a `Client` first and are written for one client. A method whose personal models
    are more than the network with other weights also has `personal_module(cohort, theta)`, which returns the model of
    the one client of a cohort as an `nn.Module`; see `knn_per`. Real clients answer only for the functions named in
    `client_tasks`, where a method has that, and compare what those in `describing_tasks` return with their owner's
    limits. A reply's field called `samples` is the number of samples by which the server weights it.
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


def score(problem: Problem, client: Client, theta: Tensor, split: int = VALIDATION) -> Score:
    """Score a model on one split of one client.

    Args:
        problem: gives the model.
        client: whose samples.
        theta: [D].
        split: which samples.
    """
    return tally(client, lambda x: problem.model(theta, x), split)


def tally(client: Client, scores_of: Callable[[Tensor], Tensor], split: int = VALIDATION) -> Score:
    """Score any function from samples to one score per class on one split of one client.

    Args:
        client: whose samples.
        scores_of: maps samples [b, ...] to scores [b, classes], the logarithms of probabilities up to a constant.
        split: which samples.
    """
    absent = ~client.has_class()
    zero = torch.zeros((), dtype=client.dtype, device=client.count.device)
    total = Score(zero, zero, zero, zero)
    for batch in client.everything(split):
        scores = scores_of(batch.x)
        right = (scores.argmax(dim=1) == batch.y).to(zero.dtype)
        masked = (scores.masked_fill(absent, -torch.inf).argmax(dim=1) == batch.y).to(zero.dtype)
        loss = scores.logsumexp(dim=1) - scores.gather(1, batch.y[:, None]).squeeze(1)
        block = Score(batch.weight.sum(), batch.sum(right), batch.sum(masked), batch.sum(loss))
        total = Score(*(a + b for a, b in zip(total, block, strict=True)))
    return total
