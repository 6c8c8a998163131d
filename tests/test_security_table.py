"""The table of attacks names tests that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_table_names_is_there():
    named = []
    file = ""
    for words in re.findall(r"`((?:tests/|benchmarks/|::)[^`]+)`", (ROOT / "docs/security.md").read_text()):
        place, _, name = words.partition("::")
        file = place or file
        named.append((file, name.split("::")[-1]))
    assert len(named) > 40
    for place, name in named:
        assert (ROOT / place).is_file(), place
        assert re.search(rf"(def|class) {name}\b", (ROOT / place).read_text()) or not name, (place, name)


def test_every_repeated_attack_has_figures_without_a_silent_acceptance():
    campaigns = json.loads((ROOT / "results/faults.json").read_text())["campaigns"]
    tried = {"kills": 500, "run folders": 10_000, "damaged personal models": 10_000, "malformed replies": 300}
    for name, least in (tried | {"threads": 100_000}).items():
        found = campaigns[name]
        assert found["tried"] >= least, name
        assert (found["accepted_silently"], found["tracebacks"]) == (0, 0), name
