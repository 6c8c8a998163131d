"""The size of clients' descriptors, which methods with an embedding network share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pefll.methods.contract import Problem

# A new run with more clients than this takes descriptors of MANY_SIZE numbers, and not the paper's 1 + n / 4. They are
# cheaper to send, and enough unless clients differ in many ways: docs/models.md, results/descriptor_size_seeds.json.
MANY_CLIENTS, MANY_SIZE = 1000, 64


class DescriptorSize:
    """A method whose clients have descriptors. A subclass has these attributes as fields.

    Attributes:
        problem: what is learned.
        descriptor_size: l, size of a descriptor; 0 for int(1 + n / 4) with n clients.
    """

    problem: Problem
    descriptor_size: int

    @classmethod
    def settings_for(cls, problem: Problem, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the descriptor's size for many clients, which `fit` takes where the user gives none."""
        del given
        return {"descriptor_size": MANY_SIZE} if problem.num_clients > MANY_CLIENTS else {}

    @cached_property
    def descriptor(self) -> int:
        """l, the size of a descriptor."""
        return self.descriptor_size or int(1 + self.problem.num_clients / 4)
