"""The benchmark's own logic: that all do the same work, that rows are kept, and what is said of those not there."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.speed import __main__ as command
from benchmarks.speed import plain, plot, table
from benchmarks.speed.child import measured
from benchmarks.speed.contender import INSTALL, Contender, contenders
from benchmarks.speed.own_cnn import build
from benchmarks.speed.plan import GROUPS, Race, lstm, plan
from benchmarks.speed.processes import cpu_seconds, memory_bytes, tree
from benchmarks.speed.race import race, row_of, summarised
from benchmarks.speed.record import Record, code, file_name
from benchmarks.speed.setting import Setting, prepare
from pefll.core.errors import PefllError
from pefll.models import Network, check_model
from tests.data import layouts

TINY = Setting(model="cnn", clients=5, cohort=3, steps=3, batch=4, samples=8, shape=(3, 8, 8))
FEATURES = Setting(model="mlp", clients=6, cohort=2, steps=2, batch=3, samples=6, shape=(4,), descriptor=4)
HERE = contenders(cores=2, cuda=False)
FACTS = {"cpu": "a processor", "cores": 2, "gpu": None, "python": "3", "torch": "2"}


def named(name: str) -> Contender:
    return next(one for one in HERE if one.name == name)


def difference(a, b) -> float:
    return float((a - b).abs().max())


# Same model, same data, same steps.


@pytest.fixture(scope="module")
def by_hand():
    """Weights of the plain loop after three rounds."""
    return plain.run(prepare(TINY), [1, 2])


@pytest.mark.parametrize("name", ["fedavg-serial-1", "fedavg-serial-all", "fedavg-vector-cpu", "vmap-cpu"])
def test_all_end_where_the_plain_loop_ends(by_hand, name):
    weights = named(name).run(prepare(TINY), iter([2, 1]))  # turns cut the rounds in another place
    assert difference(weights, by_hand) < 1e-6
    assert difference(weights, prepare(TINY).theta()) > 1e-4


@pytest.mark.parametrize("change", [{"steps": 2}, {"batch": 3}, {"cohort": 2}])
def test_other_work_ends_elsewhere(by_hand, change):
    """So the comparison above would notice a step, a sample or a client too few."""
    assert difference(plain.run(prepare(replace(TINY, **change)), [3]), by_hand) > 1e-5


TEXTS = replace(lstm(2), clients=4, steps=2, batch=3, samples=6, shape=(4,))


@pytest.mark.parametrize("name", ["fedavg-serial-1", "fedavg-vector-cpu"])
def test_the_lstm_ends_where_torchs_own_ends(name):
    wanted = plain.run(prepare(TEXTS), [2])
    assert difference(named(name).run(prepare(TEXTS), [1, 1]), wanted) < 1e-6
    assert difference(wanted, prepare(TEXTS).theta()) > 1e-4


def test_pefll_runs_on_both_kinds_of_data():
    for setting in (TINY, FEATURES):
        assert named("pefll-serial-1").run(prepare(setting), [1]) is None


def test_pfl_ends_where_the_plain_loop_with_its_batches_ends():
    pytest.importorskip("pfl")
    setting = replace(TINY, clients=3, steps=4)
    work = prepare(setting)
    x, y = work.inputs()
    models = [work.module() for _ in range(3)]
    for client, model in enumerate(models):
        plain.train(model, x, y, work.in_order(client))
    wanted = torch.stack([work.flat(model) for model in models]).mean(dim=0)
    assert difference(named("pfl-cpu").run(work, [1]), wanted) < 1e-6


def test_flower_ends_where_the_plain_loop_ends():
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    setting = replace(TINY, clients=3)  # all of them in every round: Flower draws its own cohorts
    weights = named("flower-cpu").run(prepare(setting), [1, 1])
    assert difference(weights, plain.run(prepare(setting), [2])) < 1e-6


def test_real_pictures_are_used_where_they_are(tmp_path, monkeypatch):
    setting = replace(TINY, shape=(3, 32, 32))
    work = prepare(setting, tmp_path)
    assert work.federation.name == "made up"
    assert work.federation.count[0].tolist() == [8] * 5
    pixels = layouts.cifar10(tmp_path)
    layouts.sign_cifar10(tmp_path, monkeypatch)
    work = prepare(setting, tmp_path)
    assert work.federation.name == "cifar10"
    given = work.federation.x[work.federation.indices(1)].numpy()
    assert np.array_equal(given.reshape(8, -1), pixels[8:16])


def test_a_users_own_network_is_accepted():
    check_model(Network(build((3, 32, 30), 10)), (3, 32, 30), 10, tokens=False)


# A race.


def test_turns_are_counted_in_client_steps():
    out = io.StringIO()
    assert list(measured(["2\n", "1\n", "0\n", "7\n"], out, steps_per_round=6)) == [2, 1]
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["steps"] for line in lines] == [12, 6]
    assert all(line["seconds"] >= 0 and line["cpu_seconds"] >= 0 for line in lines)


def test_a_race_has_a_row_for_everybody_the_missing_and_the_failing_too():
    absent = Contender("absent", "not there", "peer_pfl", needs=("no_such_package",))
    broken = Contender("broken", "wrong", "plain", options={"nonsense": 1})
    ticks = []
    rows = race(
        FEATURES,
        [named("plain-cpu"), named("fedavg-serial-1"), absent, broken],
        turns=2,
        turn_seconds=0.01,
        tick=ticks.append,
    )
    by_name = {row["contender"]: row for row in rows}
    assert list(by_name) == ["plain-cpu", "fedavg-serial-1", "absent", "broken"]
    assert by_name["absent"]["error"] == INSTALL
    assert "nonsense" in by_name["broken"]["error"]
    for name in ("plain-cpu", "fedavg-serial-1"):
        row = by_name[name]
        assert len(row["turns"]) == 2
        assert all(turn["steps"] == turn["rounds"] * 4 for turn in row["turns"])
        assert row["finite"]
        assert row["peak_bytes"] > 1e7
        assert row["steps_per_second"]["median"] > 0
    assert by_name["plain-cpu"]["over"]["plain"]["steps_per_second"]["median"] == 1.0
    assert "pfl" not in by_name["plain-cpu"]["over"]
    assert len(ticks) == 4 * (4 + 2)


def turn(steps: float, seconds: float) -> dict[str, float]:
    return {"rounds": 1, "steps": steps, "seconds": seconds, "cpu_seconds": seconds}


def rows_of(**seconds: list[float]) -> list[dict]:
    """Rows of contenders that did 100 steps a turn in so many seconds."""
    rows = []
    for name, taken in seconds.items():
        one = named(name.replace("_", "-"))
        row = {"turns": [turn(100, value) for value in taken], "peak_bytes": 1, "gpu_peak_bytes": 0, "finite": True}
        rows.append(row_of(one, TINY) | row)
    return summarised(rows)


def test_ratios_are_taken_turn_by_turn():
    """A machine that is ten times slower in one turn changes no ratio."""
    ours, reference, peer = rows_of(
        fedavg_serial_1=[1.0, 10.0, 1.0], plain_cpu=[2.0, 20.0, 2.0], pfl_cpu=[4.0, 30.0, 4.0]
    )
    assert ours["over"]["plain"]["steps_per_second"] == {"median": 2.0, "least": 2.0, "most": 2.0}
    assert ours["over"]["pfl"]["steps_per_cpu_second"] == {"median": 4.0, "least": 3.0, "most": 4.0}
    assert ours["steps_per_second"] == {"median": 100.0, "least": 10.0, "most": 100.0}
    assert reference["over"]["plain"]["steps_per_cpu_second"]["median"] == 1.0
    assert peer["over"]["pfl"]["steps_per_second"]["median"] == 1.0


def test_rates_that_a_clock_of_ticks_cannot_tell_are_left_out():
    rate = {"median": 4.0, "least": 3.0, "most": 5.0}
    row = {"steps_per_cpu_second": rate, "steps_per_second": rate, "over": {"plain": {"steps_per_cpu_second": rate}}}
    for seconds, shown, ratio in ((0.01, "hardly any", ""), (0.3, "4 ±25%", "4.00")):
        timed = row | {"turns": [{"cpu_seconds": 0.5}, {"cpu_seconds": seconds}]}
        assert table._rate(timed, "steps_per_cpu_second") == shown
        assert table._ratio(timed, "plain", "steps_per_cpu_second") == ratio
        assert table._rate(timed, "steps_per_second") == "4 ±25%"


def test_processor_time_and_memory_of_what_a_process_started_count():
    busy = (
        "import time\nx = bytearray(50_000_000)\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    )
    child = subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    before = cpu_seconds(os.getpid())
    child.stdout.readline()
    try:
        if sys.platform == "linux":
            assert child.pid in tree(os.getpid())
            assert cpu_seconds(child.pid) >= 0.25
            assert memory_bytes(child.pid) > 50_000_000
            assert cpu_seconds(os.getpid()) >= before
    finally:
        child.communicate(b"\n")


# The plan.


def test_the_plan_covers_what_is_asked_of_it():
    races = plan(HERE, cores=2, cuda=False, quick=False)
    assert {one.group for one in races} == set(GROUPS)
    grown = {
        group: {getattr(one.setting, group) for one in races if one.group == group} for group in ("cohort", "clients")
    }
    assert {1, 200} <= grown["cohort"]
    assert {100, 1_000_000} <= grown["clients"]
    for one in races:
        assert "plain-cpu" in [contender.name for contender in one.contenders]
        assert one.setting.cohort <= one.setting.clients
    everybody = races[0]
    assert everybody.contenders == tuple(HERE)
    assert (everybody.setting.model, everybody.setting.batch, everybody.setting.steps) == ("lenet", 32, 50)
    for cores in (1, 2, 3, 16):
        (main, *_) = plan(HERE, cores=cores, cuda=False, quick=True)
        assert main.setting.cohort % cores == 0


def test_a_gpu_races_in_every_precision_and_at_both_sizes():
    there = contenders(cores=4, cuda=True)
    names = [one.name for one in there]
    assert len(set(names)) == len(names)
    assert {"fedavg-vector-float32", "pefll-vector-tf32", "plain-cuda", "vmap-cuda", "pfl-cuda"} <= set(names)
    assert "fedavg-vector-float64" not in names
    races = plan(there, cores=4, cuda=True, quick=False)
    assert [one.setting.cohort for one in races if one.group == "main"] == [5, 50]


def test_growth_leaves_room_for_whole_epochs():
    """pfl trains whole epochs, so everybody's setting must be made of them."""
    for quick in (True, False):
        for one in plan(HERE, cores=2, cuda=False, quick=quick):
            if any(contender.name == "pfl-cpu" for contender in one.contenders):
                assert one.setting.steps % (one.setting.samples // one.setting.batch) == 0


def test_a_choice_keeps_the_plain_loop_and_refuses_unknown_names():
    races = plan(HERE, cores=2, cuda=False, quick=False)
    (main,) = command.chosen(races, "main", "fedavg-serial-1")
    assert [one.name for one in main.contenders] == ["fedavg-serial-1", "plain-cpu"]
    with pytest.raises(PefllError, match=r"race 'mian'.*'main'.*PEFLL-A101"):
        command.chosen(races, "mian", None)
    with pytest.raises(PefllError, match=r"contender 'serail'.*PEFLL-A101"):
        command.chosen(races, None, "serail")


# The record.


def a_race(*names: str, group: str = "main", setting: Setting = TINY) -> Race:
    return Race(group, setting, tuple(named(name) for name in names))


def test_what_was_measured_is_not_measured_again(tmp_path):
    one = a_race("fedavg-serial-1", "plain-cpu")
    record = Record(tmp_path / "r.json", facts=FACTS, source="a")
    assert not record.has(one, 3, 1.0)
    record.add(one, 3, 1.0, rows_of(fedavg_serial_1=[1.0], plain_cpu=[2.0]))

    def again(facts=FACTS, source="a", fresh=False):
        return Record(tmp_path / "r.json", facts=facts, source=source, fresh=fresh)

    assert again().has(one, 3, 1.0)
    assert again().has(a_race("plain-cpu"), 3, 1.0)
    assert not again().has(a_race("plain-cpu", "vmap-cpu"), 3, 1.0)
    assert not again().has(a_race("plain-cpu", setting=replace(TINY, batch=2)), 3, 1.0)
    assert not again().has(one, 5, 1.0)
    assert not again(source="b").has(one, 3, 1.0)
    assert not again(facts=FACTS | {"cores": 4}).has(one, 3, 1.0)
    assert not again(fresh=True).has(one, 3, 1.0)


def test_a_peer_that_was_installed_since_is_measured(tmp_path, monkeypatch):
    one = a_race("plain-cpu", "pfl-cpu")
    record = Record(tmp_path / "r.json", facts=FACTS, source="a")
    missing = row_of(named("pfl-cpu"), TINY) | {"error": INSTALL}
    record.add(one, 3, 1.0, [*rows_of(plain_cpu=[2.0]), missing])
    monkeypatch.setattr(Contender, "missing", property(lambda self: bool(self.needs)))
    assert record.has(one, 3, 1.0)
    monkeypatch.setattr(Contender, "missing", False)
    assert not record.has(one, 3, 1.0)


def test_a_failure_is_tried_again(tmp_path):
    one = a_race("plain-cpu")
    record = Record(tmp_path / "r.json", facts=FACTS, source="a")
    record.add(one, 3, 1.0, [row_of(named("plain-cpu"), TINY) | {"error": "out of memory"}])
    assert not record.has(one, 3, 1.0)


def test_a_new_measurement_takes_the_old_ones_place(tmp_path):
    record = Record(tmp_path / "r.json", facts=FACTS, source="a")
    record.add(a_race("plain-cpu", "vmap-cpu"), 3, 1.0, rows_of(plain_cpu=[2.0], vmap_cpu=[1.0]))
    record.add(a_race("plain-cpu"), 3, 1.0, rows_of(plain_cpu=[3.0]))
    assert len(record.races) == 2
    record.add(a_race("plain-cpu", "vmap-cpu"), 3, 1.0, rows_of(plain_cpu=[4.0], vmap_cpu=[1.0]))
    assert [len(entry["rows"]) for entry in record.races] == [2]


def test_a_strange_file_is_refused(tmp_path):
    (tmp_path / "r.json").write_text('["something else"]')
    with pytest.raises(PefllError, match=str(tmp_path / "r.json")):
        Record(tmp_path / "r.json", facts=FACTS, source="a")


def test_names_and_hashes():
    assert file_name(FACTS) == "a-processor-2-cores"
    assert file_name(FACTS | {"gpu": "NVIDIA H200"}) == "nvidia-h200"
    assert len(code()) == 16


# The command.


@pytest.fixture
def counted(monkeypatch):
    """Races that are answered at once, and which were run."""
    run = []

    def at_once(setting, those, turns, seconds, data_dir, tick):
        run.append(setting)
        rows = []
        for one in those:
            row = {"turns": [turn(100, 1.0)] * turns, "peak_bytes": 10**9, "gpu_peak_bytes": 0, "finite": True}
            rows.append(row_of(one, setting) | (row if not one.needs else {"error": INSTALL}))
        return summarised(rows)

    monkeypatch.setattr(command, "race", at_once)
    monkeypatch.setattr(Contender, "missing", property(lambda one: bool(one.needs)))  # also where they are installed
    return run


def test_the_command_resumes_and_writes_table_record_and_picture(tmp_path, counted, capsys):
    arguments = ["--quick", "--only", "main,cohort,clients", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    first = len(counted)
    assert first == 5
    assert command.main(arguments) == 0
    assert len(counted) == first
    assert command.main(["--quick", "--only", "main,models,cohort,clients", "--out", str(tmp_path)]) == 0
    assert len(counted) == first + 3
    assert command.main([*arguments, "--fresh"]) == 0
    assert len(counted) == 2 * first + 3
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
    (report,) = tmp_path.glob("*.md")
    assert "ours, FedAvg, serial |" in report.read_text()
    assert INSTALL in report.read_text()
    assert "100 ±0%" in report.read_text()
    printed = capsys.readouterr().out
    assert "plain PyTorch loop" in printed
    assert "'.[bench]'" in printed


def test_the_command_says_what_is_wrong_in_one_sentence(tmp_path, capsys):
    assert command.main(["--only", "nothing", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("unknown race 'nothing'")
    with pytest.raises(SystemExit) as stop:
        command.main(["--turns", "0"])
    assert stop.value.code == 2
    assert not list(tmp_path.iterdir())


def test_the_command_lists_without_measuring(counted, capsys):
    assert command.main(["--list"]) == 0
    assert "fedavg-serial-1" in capsys.readouterr().out
    assert not counted


def test_tables_go_between_the_marks_of_a_document(tmp_path, counted):
    command.main(["--quick", "--only", "cohort", "--out", str(tmp_path / "speed")])
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    records = command.load(tmp_path / "speed")
    table.write_docs(document, records)
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "c = 20" in text
    table.write_docs(document, records)
    assert document.read_text() == text
    document.write_text("no marks")
    with pytest.raises(PefllError, match=rf"{document}.*{table.BEGIN}.*{table.END}"):
        table.write_docs(document, records)
    document.write_text(f"{table.BEGIN}{table.END}")
    with pytest.raises(PefllError, match="`make bench`"):
        table.write_docs(document, [])


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(PefllError, match="nothing to draw"):
        plot.draw([], tmp_path / "x.png")
    table.draw([], Console(file=io.StringIO()))
