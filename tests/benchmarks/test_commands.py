"""The commands that the documents name for the benchmarks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITTEN = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.py")]
TEXT = "\n".join(path.read_text() for path in WRITTEN)
NAMED = sorted(set(re.findall(r"python -m benchmarks\.([a-z_]+)", TEXT)))


def test_the_documents_name_benchmarks_in_the_way_in_which_they_can_be_started():
    assert len(NAMED) > 8
    assert not re.findall(r"python3? benchmarks/\S+", TEXT)  # they import each other


# One process for all of them: most of each would be the same imports.
START = """
import contextlib, io, runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, (name, end.code)
    assert "usage:" in said.getvalue(), name
"""


def test_they_start():
    names = [name for name in NAMED if name != "first_layers" or find_spec("triton")]
    command = [sys.executable, "-c", START, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def measured(name, *options):
    """Run a benchmark."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_users_networks_on_a_cpu(tmp_path):
    measured("cpu_networks", "--only", "linear", "mlp", "--turns", "2", "--seconds", "0.01", "--out", str(tmp_path))
    found = json.loads((tmp_path / "cpu_networks.json").read_text())
    assert list(found["networks"]) == ["linear", "mlp"]
    for one in found["networks"].values():
        assert one["ours"] > 0
        assert one["plain"] > 0


@pytest.mark.slow
def test_whole_runs_of_one_seed_and_of_several(tmp_path):
    options = ["--small", "--device", "cpu", "--precision", "float32", "--seeds", "2", "--thousand"]
    measured("whole_runs", *options, "--out", str(tmp_path))
    one, two = json.loads((tmp_path / "whole-runs.json").read_text())["runs"]
    assert [(run["turn"], run["seeds"]) for run in (one, two)] == [(0, 1), (0, 2)]
    assert two["over_one"] == pytest.approx(two["seconds"] / one["seconds"], abs=0.001)
    assert two["seen"][0] == one["seen"][0]


@pytest.mark.slow  # tests/backend/test_lstm.py tries the same kernels
def test_the_lstm_in_several_ways(tmp_path):
    measured("lstm", "--small", "--out", str(tmp_path / "lstm.json"))
    found = json.loads((tmp_path / "lstm.json").read_text())
    assert len(found["rows"]) >= 4
    assert all(row["steps_per_second"]["median"] > 0 for row in found["rows"])


def test_the_methods_page_has_the_table_of_the_results():
    """All methods are in it, each with what a new client pays."""
    from benchmarks.methods_on_digits import table
    from pefll.methods import METHODS

    rows = json.loads((ROOT / "results" / "methods_on_digits.json").read_text())["rows"]
    assert {row["method"] for row in rows} == set(METHODS)
    assert table(rows) in (ROOT / "docs" / "methods.md").read_text()


def test_the_data_page_has_the_table_of_the_results():
    from benchmarks.users_table import METHODS, table

    methods = json.loads((ROOT / "results" / "users_table.json").read_text())["methods"]
    assert {name: [run["seed"] for run in runs] for name, runs in methods.items()} == {
        name: [0, 1, 2] for name in METHODS
    }
    assert table(methods) in (ROOT / "docs" / "data.md").read_text()


def test_the_models_page_has_the_table_of_descriptor_sizes():
    from benchmarks.descriptor_size import markdown

    recorded = json.loads((ROOT / "results" / "descriptor_size_seeds.json").read_text())
    assert {(row["descriptor_size"], row["seed"]) for row in recorded["rows"]} >= {
        (size, seed) for size in (64, 1251) for seed in range(3)
    }
    assert "\n".join(markdown(recorded["rows"])) in (ROOT / "docs" / "models.md").read_text()


def test_the_table_of_users_is_as_raw_as_the_data_page_says():
    from benchmarks.users_table import users_table

    pandas = pytest.importorskip("pandas")
    recorded = json.loads((ROOT / "results" / "users_table.json").read_text())
    assert recorded["table"]["users"] == 5_000
    for method, runs in recorded["methods"].items():
        assert all(run["command"].startswith(f"pefll train --method {method} --data ./users.parquet") for run in runs)
    table = pandas.DataFrame(users_table(400))
    rows = table.groupby("user_id").size()
    assert (rows.min(), rows.max(), len(rows)) == (3, 2_000, 400)
    numbers = table.filter(like="number_")
    assert numbers.shape[1] == 30
    assert numbers.std().iloc[[0, -1]].to_numpy() == pytest.approx([0.01, 1000], rel=0.1)
    features = table.drop(columns=["user_id", "liked"])
    assert sorted(set(features) - set(numbers)) == ["city", "device", "plan"]
    assert features.isna().mean().between(0.04, 0.06).all()


@pytest.mark.parametrize(("name", "page"), [("diabetes", "LOG.md"), ("wages", "tasks.md")])
def test_the_documents_have_the_tables_of_the_real_regressions(name, page):
    from benchmarks.regressions import differences, table

    study = import_module(f"benchmarks.{name}").STUDY
    setups = json.loads((ROOT / "results" / f"{name}.json").read_text())["setups"]
    assert list(setups) == list(study.setups)
    for setup, methods in setups.items():
        chosen = study.setups[setup].methods
        assert list(methods) == list(chosen)
        for method, runs in methods.items():
            assert [run["seed"] for run in runs] == list(study.seeds)
            assert all(f"--set {setting} " in run["command"] for run in runs for setting in chosen[method])
    text = (ROOT / "docs" / page).read_text()
    assert table(study, setups) in text
    assert differences(study, setups) in text


def test_the_table_of_users_goes_on_where_it_was(tmp_path):
    """A second call trains nothing again, and an unfinished run is resumed."""
    out, work = tmp_path / "out.json", tmp_path / "work"
    words = ["--users", "30", "--seeds", "0,1", "--methods", "fedavg", "--work", str(work), "--out", str(out)]
    more = ["--", "--device", "cpu", "--clients-per-round", "3"]
    measured("users_table", *words, "--rounds", "2", *more)
    first = json.loads(out.read_text())
    assert [run["seed"] for run in first["methods"]["fedavg"]] == [0, 1]
    assert str(tmp_path) not in json.dumps(first["methods"])
    folder = work / "users-table-30"
    finished = (folder / "fedavg-0" / "summary.json").stat().st_mtime_ns
    (folder / "fedavg-1" / "summary.json").unlink()  # stopped in its test
    measured("users_table", *words, "--rounds", "2", *more)
    assert json.loads(out.read_text()) == first
    assert (folder / "fedavg-0" / "summary.json").stat().st_mtime_ns == finished


def test_methods_are_compared_on_the_digits_with_few_rounds(monkeypatch):
    from benchmarks import methods_on_digits

    monkeypatch.setattr(methods_on_digits, "RATES", (0.03,))
    row = methods_on_digits.measure("fedavg", seeds=1, rounds=1)
    assert row["settings"] == {"client_lr": 0.03, "local_steps": 10}
    assert 0 < row["unseen"][0] < 100
    assert (row["cost"]["exchanges"], row["cost"]["bytes_up"]) == (1, 0)


def test_the_sizes_of_descriptors_go_on_from_their_file(tmp_path):
    from benchmarks.descriptor_size import finished, markdown, measure

    row = measure(clients=60, taste=2, size=3, seed=0, rounds=2)
    assert row["bytes"] > 4 * 3
    other = row | {"seed": 1, "unseen": row["unseen"] + 0.02}
    out, record = tmp_path / "sizes.json", {"settings": {"rounds": 2}}
    assert finished(out, record) == finished(None, record) == []
    out.write_text(json.dumps(record | {"rows": [row, other]}))
    assert finished(out, record) == [row, other]
    with pytest.raises(SystemExit, match="other settings"):
        finished(out, {"settings": {"rounds": 3}})
    assert f"{100 * row['unseen'] + 1:.1f} ± 1.4" in markdown([row, other])[2]
