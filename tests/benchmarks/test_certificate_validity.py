"""The count of failed certificates: it must find wrong ones and pass right ones."""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.certificate_validity.__main__ import command_of
from benchmarks.certificate_validity.certifiers import CERTIFIERS, held_out
from benchmarks.certificate_validity.counting import counts, gap_of, markdown, row_of
from benchmarks.certificate_validity.measuring import rows_of, world_row
from benchmarks.certificate_validity.trained import Judged, Truth, mean_of, reached_by, train_world
from pefll import PefllError
from pefll.guarantees.intervals import betting_lower
from pefll.guarantees.statement import Statement

ROOT = Path(__file__).parents[2]
DELTA = 0.05


def statement(name, bound, lower=True):
    return Statement(name, name, 0.5, bound, lower, 1 - DELTA, "", "")


def made_up_rows(worlds=300):
    """Worlds of 40 clients whose accuracies are Beta(8, 2): mean 0.8."""
    rows = []
    for world in range(worlds):
        values = np.random.default_rng(world).beta(8, 2, 40)
        spread = values.std(ddof=1) / 40**0.5
        truth = Truth(0.8, 0.0)
        judged = [
            Judged(statement("right", betting_lower(values, DELTA)), truth),
            Judged(statement("too optimistic", float(values.mean() - spread)), truth),
            Judged(statement("upper", float(values.mean() + spread), lower=False), truth),
        ]
        rows.append({"world": world, "certificates": {one.statement.name: row_of(one) for one in judged}})
    return rows


def test_it_finds_certificates_that_promise_too_much():
    found = {one.name: one for one in counts(made_up_rows(), DELTA)}
    assert found["right"].valid
    assert found["right"].violated <= 0.05 * 300
    # One standard error holds in 84% of worlds only.
    for name in ("too optimistic", "upper"):
        assert not found[name].valid
        assert 25 < found[name].violated < 75
        assert found[name].upper > 0.1
    assert found["right"].median > found["too optimistic"].median > 0


def test_a_rate_of_delta_is_valid_and_one_above_is_not():
    def of(violated, worlds=1000):
        rows = [
            {"certificates": {"a": row_of(Judged(statement("a", 0.6 if world < violated else 0.4), Truth(0.5, 0.06)))}}
            for world in range(worlds)
        ]
        return counts(rows, DELTA)[0]

    assert of(50).valid
    assert of(60).valid  # by chance in 9% of such counts
    assert not of(80).valid
    assert of(80).clear == 0  # all within two standard errors of the truth
    assert of(0).upper == pytest.approx(1 - 0.05 ** (1 / 1000), rel=1e-9)


def test_gaps_are_positive_where_a_bound_holds():
    assert gap_of(row_of(Judged(statement("a", 0.4), Truth(0.5, 0)))) == pytest.approx(0.1)
    assert gap_of(row_of(Judged(statement("a", 0.4, lower=False), Truth(0.5, 0)))) == pytest.approx(-0.1)


def test_what_a_share_of_clients_reaches():
    values = np.arange(1, 101) / 100
    assert reached_by(values, 0.9).value == 0.11  # 90 of 100 values are at least 0.11
    assert mean_of(values).value == pytest.approx(0.505)
    assert mean_of(values).error == pytest.approx(values.std(ddof=1) / 10)


@pytest.fixture(scope="module")
def trained():
    return train_world(0, 4, DELTA)


def test_a_world_has_a_trained_run_and_the_truth(trained):
    assert trained.run.federation.num_unseen == 60
    # Both samples of new clients estimate one expectation.
    first, second = mean_of(trained.measured), mean_of(trained.true)
    assert abs(first.value - second.value) < 4 * (first.error**2 + second.error**2) ** 0.5
    assert first.error < 0.005
    found = held_out(trained)
    assert {one.statement.name for one in found} >= {"mean-betting", "mean-hoeffding", "share-measured", "share-true"}
    assert {one.truth for one in found if one.statement.name.startswith("mean")} == {first}


def test_every_certificate_of_a_world_has_a_truth():
    row = json.loads(json.dumps(world_row(1, 0, DELTA, [*CERTIFIERS])))
    names = set(row["certificates"])
    assert names >= {"mean-betting", "client-accuracy", "theorem-3.2", "prior-half", "query", "query-prior"}
    for one in row["certificates"].values():
        assert 0 <= one["truth"] <= 1
        assert one["error"] < 0.02
    assert row["certificates"]["query"]["truth"] in [
        one["truth"] for name, one in row["certificates"].items() if name.startswith("query-")
    ]
    again = world_row(1, 0, DELTA, ["held-out"])["certificates"]["mean-betting"]
    assert again == row["certificates"]["mean-betting"]


def test_a_stopped_measurement_goes_on(tmp_path):
    out = tmp_path / "validity.json"
    lines = tmp_path / "new" / "worlds.jsonl"
    command = [sys.executable, "-m", "benchmarks.certificate_validity", "--only", "held-out", "--resume", str(lines)]

    def run(worlds):
        given = [*command, "--worlds", str(worlds), "--out", str(out)]
        done = subprocess.run(given, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    assert run(1)["certificates"][0]["worlds"] == 1
    first = lines.read_text()
    lines.write_text(first + '{"how": {"se')  # killed while it wrote
    record = run(3)
    assert record["certificates"][0]["worlds"] == 3
    assert lines.read_text().startswith(first)
    assert sorted(json.loads(line)["world"] for line in lines.read_text().splitlines()) == [0, 1, 2]
    assert "How often certificates fail" in "\n".join(markdown(record))
    assert out.with_suffix(".png").stat().st_size > 5_000
    how = json.loads(first)["how"]
    assert sorted(rows_of(lines, how)) == [0, 1, 2]
    for other in ({"seed": 1}, {"delta": 0.1}, {"only": ["pac-bayes"]}, {"settings": {}}, {"commit": "0" * 12}):
        with pytest.raises(PefllError, match=f"another {next(iter(other))}.*name another file"):
            rows_of(lines, how | other)


def test_the_recorded_command_has_what_is_not_the_default():
    plain = argparse.Namespace(worlds=7, seed=1, delta=0.05, only=[*CERTIFIERS])
    assert command_of(plain) == "python -m benchmarks.certificate_validity --worlds 7 --seed 1"
    plain.delta, plain.only = 0.1, ["held-out"]
    assert command_of(plain).endswith("--worlds 7 --seed 1 --delta 0.1 --only held-out")


def test_the_page_has_the_counts_of_the_results():
    page = (ROOT / "docs" / "theory-convergence.md").read_text()
    record = json.loads((ROOT / "results" / "certificate_validity.json").read_text())
    assert record["command"].endswith("--worlds 1000 --seed 0")
    found = {one["name"]: one for one in record["certificates"]}
    rows = re.findall(r"^\| [^|]*\(`([a-z0-9.-]+)`\) \| (.*) \|$", page, flags=re.MULTILINE)
    assert len(rows) == 11
    for name, cells in rows:
        one = found[name]
        assert cells == f"{one['worlds']:,} | {one['violated']} | {one['upper']:.3f} | {one['median']:.3f}", name
    assert all(one["upper"] <= record["delta"] for one in found.values())


def children_of(process):
    found = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in found.split()]


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow  # the test above stops a measurement between two worlds
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_killed_measurement_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "benchmarks.certificate_validity", "--only", "held-out", "--worlds", "400"]
    out = tmp_path / "validity.json"
    lines = tmp_path / "worlds.jsonl"
    command += ["--out", str(out), "--resume", str(lines)]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (lines.exists() and lines.read_text()) and time.monotonic() < deadline:
            time.sleep(0.2)
        workers = children_of(running.pid)
        assert len(workers) >= 2
    finally:
        running.terminate()
    assert running.wait(timeout=60) == 143
    deadline = time.monotonic() + 30
    while any(is_running(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(is_running(worker) for worker in workers)
