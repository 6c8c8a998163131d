"""A client's policy: its owner decides what a server may ask for. No server can change these settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.wording import counted
from pefll.data.client import Batch, Batches, Client
from pefll.data.samples import SPLITS, TRAIN

METHODS = ("pefll",)  # allowed if the owner names no methods
MIN_SAMPLES = 8


class Refusal(PefllError):
    """Raised when a client refuses a request. The server gets the sentence.

    Args:
        sentence: the end of a sentence that begins with the client's name. It must say nothing that the owner may want
            to hide from the server, such as the number of samples.
        code: see `PefllError`.
        detail: a text that only the client's own log gets.
    """

    def __init__(self, sentence: str = "", code: str = "", detail: str = "") -> None:
        super().__init__(sentence, code)
        self.detail = detail


class Draw(NamedTuple):
    """A record of samples that a task has used.

    Attributes:
        split: split of the samples.
        size: from how many samples each number is computed; the size of one batch if there are several batches.
    """

    split: int
    size: int


@dataclass(frozen=True, eq=False)
class WatchedClient(Client):
    """A client that records in `draws` how many samples a task uses."""

    draws: list[Draw] = field(default_factory=list)

    def batches(self, purpose: str, size: int | None, steps: int) -> Batches:
        """Return batches of training samples, as `Client` does."""
        batches = super().batches(purpose, size, steps)
        self.draws.append(Draw(TRAIN, batches.rows.shape[1]))
        return batches

    def everything(self, split: int = TRAIN) -> Iterator[Batch]:
        """Yield all samples of a split in blocks, as `Client` does."""
        self.draws.append(Draw(split, int(self.count[split])))
        return super().everything(split)

    def label_shares(self) -> Tensor:
        """Return the share of each class among the training labels, as `Client` does."""
        self.draws.append(Draw(TRAIN, int(self.count[TRAIN])))
        return super().label_shares()


@dataclass(frozen=True)
class Policy:
    """What the owner of a client allows.

    Attributes:
        methods: names of the methods that the client takes part in; None for all, as in a simulation.
        min_samples: the client sends and keeps no result of a batch with fewer samples; 0 for no limit.
        allow_few: whether a batch may have fewer samples if it is a whole split.
        numbers_per_sample: a descriptor of n samples has at most n times this many numbers; 0 for no limit.
    """

    methods: tuple[str, ...] | None = METHODS
    min_samples: int = MIN_SAMPLES
    allow_few: bool = False
    numbers_per_sample: float = 1.0

    def __post_init__(self) -> None:
        if self.min_samples < 0 or not self.numbers_per_sample >= 0:
            raise PefllError(
                f"min-samples is {self.min_samples} and numbers-per-sample {self.numbers_per_sample:g}; "
                "both must be 0 or more",
                code="PEFLL-P002",
            )

    @classmethod
    def of_node(cls, node: Mapping[str, Any]) -> Policy:
        """Read a policy from a node's config. Nodes of Flower's simulation have numbers, no names, and no limits."""
        if "partition-id" in node and "name" not in node:
            return NO_LIMITS
        try:
            return cls(
                tuple(name.strip() for name in str(node.get("methods", ",".join(METHODS))).split(",") if name.strip()),
                int(node.get("min-samples", MIN_SAMPLES)),
                str(node.get("allow-few", False)).lower() == "true",
                float(node.get("numbers-per-sample", 1.0)),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise PefllError(
                f"the client's own limits cannot be read: {error}; correct client.toml or the options",
                code="PEFLL-P007",
            ) from None

    def tightened(self, other: Policy) -> Policy:
        """Return a policy with the stricter value of each limit, and with the methods of `other`."""
        ratios = [policy.numbers_per_sample for policy in (self, other) if policy.numbers_per_sample]
        return Policy(
            other.methods,
            max(self.min_samples, other.min_samples),
            self.allow_few and other.allow_few,
            min(ratios, default=0.0),
        )

    def to_node(self) -> dict[str, str | bool]:
        """Return the policy as part of a node's config, for `of_node`."""
        return {
            "methods": ",".join(self.methods or ()),
            "min-samples": str(self.min_samples),
            "allow-few": self.allow_few,
            "numbers-per-sample": f"{self.numbers_per_sample:g}",
        }

    @property
    def sentence(self) -> str:
        """The policy in one sentence, for the client's owner."""
        numbers = f", or a descriptor of more than {self.numbers_per_sample:g} numbers for each sample"
        return (
            f"It takes part in {', '.join(self.methods or ())} only, and sends nothing made from fewer than "
            f"{counted(self.min_samples, 'sample')}{' unless it has fewer' if self.allow_few else ''}"
            f"{numbers if self.numbers_per_sample else ''}"
        )

    def check_method(self, method: str) -> None:
        """Raise Refusal for a method that the owner has not named."""
        if self.methods is not None and method not in self.methods:
            raise Refusal(
                f"refuses to take part in {method!r}: its owner has named {', '.join(self.methods) or 'no method'}; "
                "`pefll flower client --methods` names others",
                code="PEFLL-P003",
            )

    def check_reply(self, client: WatchedClient, numbers: int, describes: bool) -> None:
        """Raise Refusal for a reply that tells too much about too few samples.

        Args:
            client: has recorded the samples that the reply was computed from.
            numbers: how many numbers the reply has.
            describes: whether the reply is a descriptor.
        """
        for split, size in client.draws:
            few = 0 < size < self.min_samples
            if few and not (self.allow_few and size == int(client.count[split])):
                raise Refusal(
                    f"refuses to reply from so few {SPLITS[split]} samples: its owner asks for at least "
                    f"{self.min_samples:,}; see `--min-samples` and `--allow-few`",
                    code="PEFLL-P004",
                    detail=f"the reply is made from {counted(size, 'sample')}",
                )
        samples = min((draw.size for draw in client.draws), default=0)
        if describes and self.numbers_per_sample and numbers > self.numbers_per_sample * samples:
            raise Refusal(
                f"refuses to describe its samples by {counted(numbers, 'number')}: its owner allows "
                f"{self.numbers_per_sample:g} for each sample; see `--numbers-per-sample`",
                code="PEFLL-P005",
                detail=f"the descriptor is made from {counted(samples, 'sample')}",
            )


NO_LIMITS = Policy(methods=None, min_samples=0, allow_few=True, numbers_per_sample=0.0)  # for clients of a simulation
