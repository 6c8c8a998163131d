"""Names of methods as papers write them."""

from __future__ import annotations

TITLES = {
    "pefll": "PeFLL",
    "pefll-prior": "PeFLL + label prior",
    "pefll-plus": "PeFLL+",
    "odpfl-hn": "ODPFL-HN",
    "pfedhn": "pFedHN",
    "knn-per": "kNN-Per",
    "pfedme": "pFedMe",
    "ditto": "Ditto",
    "apfl": "APFL",
    "fedrep": "FedRep",
    "fedper": "FedPer",
    "lg-fedavg": "LG-FedAvg",
    "fedbabu": "FedBABU",
    "per-fedavg": "Per-FedAvg",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "local": "Local",
}


def title_of(method: str) -> str:
    """Return the title of a method; of a user's own, `"package.module:Class"`, the name of the class."""
    return TITLES.get(method, method.rpartition(":")[2])
