"""Table 1 from results: the paper's numbers, seeds, bold print, and leads over baselines."""

from __future__ import annotations

from pefll.experiments.comparison import compare, latex, markdown, rows
from pefll.experiments.table1 import CELLS, PAPER, ROWS, TITLES


def test_the_papers_numbers():
    assert PAPER["cifar10", 100]["pefll"] == (89.0, 0.8, 89.3, 2.2)
    assert PAPER["cifar100", 100]["knn-per"] == (42.2, 0.9, 41.8, 1.2)
    assert PAPER["cifar10", 1000]["pfedhn"] == (66.0, 1.1, 57.8, 2.0)
    assert PAPER["femnist", 3597]["local"] == (62.2, 0.1, 62.1, 0.2)
    for column in PAPER.values():
        assert list(column) == list(TITLES)[:8]
    # PeFLL is ahead of all baselines everywhere but on unseen clients of CIFAR-100 at n=100.
    for key, column in PAPER.items():
        ahead = [column["pefll"][place] >= max(row[place] for row in column.values()) for place in (0, 2)]
        assert ahead == [True, key != ("cifar100", 100)]


def test_the_papers_femnist_never_stands_beside_the_subset():
    table = compare({}, CELLS, 5000, range(3))
    for entry in table.entries.values():
        assert (entry.paper is None) == (
            entry.cell.data in ("femnist", "mnist_writers") or entry.method in list(TITLES)[8:]
        )
    assert "90.1" not in markdown(table) + latex(table)
    assert "| PeFLL | — (89.0 ± 0.8) |" in markdown(table)
    assert len(rows(table)) == 2 * len(ROWS) * 8


def fake(method="pefll", seed=0, seen=0.9, counts=None, **more):
    both = {group: {"per_sample": seen} for group in ("seen", "unseen")}
    return {"method": method, "seed": seed, "accuracy": {"best": both}, "client_counts": counts, **more}


def test_bold_seeds_and_missing_tests():
    name = CELLS[0].name
    found = {("pefll", name): [fake(seen=0.9), fake(seed=1, seen=0.8)], ("local", name): [fake("local", seen=0.86)]}
    table = compare(found, CELLS[:1], 5000, range(2))
    text = markdown(table)
    assert "| PeFLL | 85.0 ± 7.1 (89.0 ± 0.8) |" in text
    assert "| Local | **86.0** [1 of 2 seeds] (82.2 ± 0.6) |" in text
    assert text.count("| *seeds* | 2 |") == 2
    assert (
        "| seen | CIFAR-10, n=100 | PeFLL | Local | -1.0 | not tested: no counts for the same clients |  |  |  |"
        in text
    )
    assert "No baseline has results yet." in markdown(compare({}, CELLS[:1], 5000, range(2)))
    assert [(row["lead"], row["p"]) for row in rows(table) if row["method"] == "pefll"] == [("-1.00", "")] * 2
    assert "Local & \\textbf{86.0} [1 of 2 seeds] (82.2 $\\pm$ 0.6) \\\\" in latex(table)
    assert latex(table).count("\nseeds & 2 \\\\\n") == 2


def test_methods_with_more_seeds_are_compared_among_themselves():
    name = CELLS[0].name

    def results(method, accuracies):
        group = {"samples": [100], "correct": [0]}
        return [
            fake(method, seed, right, {"unseen": group | {"correct": [round(100 * right)]}}, data_sha256=str(seed))
            for seed, right in enumerate(accuracies)
        ]

    found = {
        ("pefll", name): results("pefll", [0.7, 0.8, 0.96]),
        ("local", name): results("local", [0.8, 0.82, 0.81]),
        ("fedavg", name): results("fedavg", [0.75]),  # of one seed only
    }
    table = compare(found, CELLS[:1], 5000, [0])
    assert [(method, entry.seeds, round(entry.mean)) for (_, method, _), entry in table.more.items()] == 2 * [
        ("local", 3, 81),
        ("pefll", 3, 82),
    ]
    (column,) = [lead for lead in table.leads if lead.group == "unseen"]
    assert (column.baseline, round(column.points)) == ("local", -10)
    (longer,) = [lead for lead in table.more_leads if lead.group == "unseen"]
    assert (longer.baseline, round(longer.points), longer.difference.seeds) == ("local", 1, 3)
    text = markdown(table)
    assert "| CIFAR-10, n=100 | PeFLL | 3 | **82.0 ± 13.1** (89.0 ± 0.8) | **82.0 ± 13.1** (89.3 ± 2.2) |" in text
    assert "| Local | **80.0** (82.2 ± 0.6) |" in text
    # To be ahead of others than the best says little.
    table = compare(found | {("fedavg", name): results("fedavg", [0.85])}, CELLS[:1], 5000, [0])
    assert (len(table.more), table.more_leads) == (4, [])
    # A seed that all methods have belongs to the column, whether it was wanted or not; who has none is not asked.
    everyone = {(method, name): results(method, [0.7, 0.8]) for method in TITLES if method != "pfedme"}
    table = compare(everyone, CELLS[:1], 5000, [0])
    assert {(entry.seeds, entry.method == "pfedme") for entry in table.entries.values()} == {(2, False), (0, True)}
    assert (table.more, table.more_leads) == ({}, [])
    assert "With more seeds" not in markdown(table)


def test_only_results_on_the_same_clients_are_paired():
    name = CELLS[0].name
    group = {"samples": [10, 10], "correct": [9, 8]}
    counts = {"seen": group, "unseen": group}

    def leads(data: str) -> int:
        found = {
            ("pefll", name): [fake(counts=counts, data_sha256="a")],
            ("local", name): [fake("local", counts=counts, data_sha256=data)],
        }
        return sum(lead.difference is not None for lead in compare(found, CELLS[:1], 5000, range(1)).leads)

    assert leads("a") == 2
    assert leads("b") == 0
