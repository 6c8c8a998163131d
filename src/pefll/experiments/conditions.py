"""What trials of a search share beside the protocol of their file: other settings, the data and the code."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, dataclass, fields
from typing import Any

from pefll.runs.config import MAY_CHANGE, OF_TABLES, Config
from pefll.runs.fingerprints import Fingerprints, differing_part
from pefll.training.resolve import RunSpec

# Settings that the protocol, a row's settings and seed, or the fingerprint of the data say.
_SAID = {"method", "settings", "seed", "model", "task", "rounds", "clients_per_round"}
_OF_DATA = {"data", "partition", "clients", "unseen", "label", "client_column", *OF_TABLES}
_DECIDING = [each for each in fields(Config) if each.name not in MAY_CHANGE | _SAID | _OF_DATA]


@dataclass(frozen=True)
class Conditions:
    """What decides the result of a trial, beside the protocol of its file, its settings and its seed.

    Attributes:
        conditions: settings of the run that differ from their defaults, such as its schedules.
        fingerprints: those of its code, see `runs.fingerprints`.
        data_sha256: fingerprint of its federation.
    """

    conditions: dict[str, Any]
    fingerprints: Fingerprints
    data_sha256: str

    @classmethod
    def of(cls, spec: RunSpec) -> Conditions:
        """Return the conditions of a run."""
        config = spec.config
        given = {each.name: (getattr(config, each.name), each.default) for each in _DECIDING}
        conditions = {name: value for name, (value, usual) in given.items() if usual is MISSING or value != usual}
        return cls(conditions, spec.fingerprints(config.rounds), config.data_sha256)

    def are_those_of(self, row: dict[str, Any]) -> bool:
        """Return whether a trial had the same conditions, as far as its row says. Rows of earlier versions say less."""
        return (
            row.get("conditions", self.conditions) == self.conditions
            and not differing_part(row.get("fingerprints"), self.fingerprints)
            and row.get("data_sha256", self.data_sha256) in ("", self.data_sha256)
        )

    @property
    def sha256(self) -> str:
        """A SHA-256 of all conditions."""
        return hashlib.sha256(json.dumps(vars(self), sort_keys=True).encode()).hexdigest()
