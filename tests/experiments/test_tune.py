"""Grid search: what is chosen, by what, and that nothing is done twice."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

import pefll
from pefll.core.errors import PefllError
from pefll.core.signals import Stopped
from pefll.data.samples import TEST
from pefll.engines.vector import VectorEngine
from pefll.experiments.grid_search import Search, advice, parse_grid, run_search
from pefll.experiments.results import collect
from pefll.experiments.trials import Trials, trials_table, tuned_settings
from pefll.runs import federations
from pefll.runs.config import Config
from pefll.runs.record import RunFolder
from pefll.training import fitting
from tests.federations import ragged
from tests.tasks.labels import with_numbers

CONFIG = Config(
    method="fedavg", settings={"local_steps": 2}, rounds=4, eval_every=2, clients_per_round=3, engine="vector"
)
RATES = {"client_lr": (1e-4, 0.1)}


@pytest.fixture(autouse=True)
def federation(monkeypatch):
    monkeypatch.setattr(federations, "federation_of", lambda config, console: ragged(seed=config.seed))


def search(tmp_path, grid=RATES, seeds=(0, 1), at_once=3, to="results", hold_out=0.0, **changes):
    wanted = Search(dataclasses.replace(CONFIG, **changes), grid, seeds, hold_out)
    return run_search(wanted, tmp_path / "runs", tmp_path / to, at_once, Console(quiet=True))


def test_the_best_mean_over_seeds_is_chosen(tmp_path):
    trials = search(tmp_path)
    kept = json.loads(trials.path.read_text())
    assert trials.path.name == "digits-fedavg-n8.json"
    assert [(row["settings"]["client_lr"], row["seed"]) for row in kept["trials"]] == [
        (1e-4, 0),
        (1e-4, 1),
        (0.1, 0),
        (0.1, 1),
    ]
    scores = [row["seen_validation"] for row in kept["trials"]]
    assert sum(scores[2:]) > sum(scores[:2])
    assert kept["best"] == {
        "settings": {"local_steps": 2, "client_lr": 0.1},
        "seen_validation": pytest.approx(sum(scores[2:]) / 2),
        "seeds": [0, 1],
    }
    assert {row["lockstep"] for row in kept["trials"]} == {3, 1}  # three at once, then what was left
    assert advice(trials, Search(CONFIG, RATES, (0, 1))) == [
        "client_lr = 0.1 is the largest value tried; try larger ones"
    ]
    assert trials_table(trials, (0, 1)).rows[0].style == "bold"


def tried(*rows, **protocol) -> Trials:
    """What was tried, of settings and their accuracies for seeds 0, 1, ..."""
    notes = [
        {"settings": settings, "seed": seed, "seen_validation": score, "error": None}
        for settings, *scores in rows
        for seed, score in enumerate(scores)
    ]
    return Trials(Path("none.json"), {"method": "fedavg"} | protocol, notes)


def test_settings_that_are_equally_good_are_said_to_tie():
    low, middle, high = ({"client_lr": rate, "batch_size": 8} for rate in (0.1, 0.2, 0.3))
    wanted = Search(CONFIG, {"client_lr": (0.1, 0.2, 0.3)}, (0, 1))
    tie = "client_lr=0.1 and client_lr=0.2 tie; client_lr=0.1 is used"
    trials = tried((low, 0.1, 0.7), (middle, 0.7, 0.1), (high, 0.2, 0.2))
    assert trials.tied((0, 1)) == [low, middle]
    assert advice(trials, wanted) == [tie]
    # What they do not differ in is advised about as ever.
    other = {"client_lr": 0.3, "batch_size": 16}
    beyond = "batch_size = 8 is the smallest value tried; try smaller ones"
    assert advice(tried((low, 0.6, 0.6), (middle, 0.6, 0.6), (other, 0.2, 0.2)), wanted) == [tie, beyond]
    # A tie among those that are not the best is nobody's business.
    rows = ((high, 0.9, 0.8), (low, 0.6, 0.6), (middle, 0.6, 0.6))
    assert advice(tried(*rows), wanted) == ["client_lr = 0.3 is the largest value tried; try larger ones"]


def test_scores_are_those_of_the_best_round_on_seen_clients_validation(tmp_path):
    row = search(tmp_path, seeds=(0,)).rows[1]
    alone = fitting.fit(
        ragged(seed=0), "fedavg", rounds=4, eval_every=2, clients_per_round=3, engine="vector",
        local_steps=2, client_lr=0.1,
    )  # fmt: skip
    assert row["seen_validation"] == alone.evaluate("validation").seen.per_sample
    assert row["best_round"] == alone.summary["best_round"]


def test_local_which_has_no_rounds_is_tuned_too(tmp_path):
    trials = search(tmp_path, method="local", settings={"epochs": 2})
    assert trials.ranking((0, 1))[0][0]["client_lr"] == 0.1


OF_NEW_CLIENTS = {
    # A rate of 1e-9 leaves the embedding, or the global model, that every new client begins with.
    "pfedhn": ({"local_steps": 2, "embedding_size": 3, "hypernetwork": "S"}, (1e-9, 0.5)),
    "pfedme": ({"local_rounds": 2, "client_lr": 0.05, "personal_lr": 0.02}, (1e-9, 0.05)),
}


@pytest.mark.parametrize("method", OF_NEW_CLIENTS)
def test_what_new_clients_do_is_tuned_with_seen_clients_that_come_as_new_ones(tmp_path, method):
    settings, rates = OF_NEW_CLIENTS[method]
    trials = search(tmp_path, {"new_lr": rates}, method=method, settings=settings)
    seen, as_new = ([row[key] for row in trials.rows] for key in ("seen_validation", "as_new"))
    assert seen[:2] == seen[2:]  # the same training
    assert as_new[:2] != as_new[2:]
    better = int(sum(as_new[2:]) > sum(as_new[:2]))
    assert trials.best["settings"]["new_lr"] == rates[better]
    assert trials.best["as_new"] == pytest.approx(sum(as_new[2 * better : 2 * better + 2]) / 2)
    assert [column.header for column in trials_table(trials, (0, 1)).columns][-1] == "treated as new, %"
    alone = fitting.fit(
        ragged(seed=0), method, rounds=4, eval_every=2, clients_per_round=3, engine="vector", new_lr=rates[1],
        **settings,
    )  # fmt: skip
    clients = alone.evaluate_clients("validation", dataclasses.replace(ragged(seed=0), num_seen=0))
    first = clients[: ragged(seed=0).num_seen]
    assert trials.rows[2]["as_new"] == sum(one.correct for one in first) / sum(one.samples for one in first)


def test_settings_of_new_clients_are_chosen_within_the_best_training(tmp_path):
    def row(lr, new, seen, as_new=None):
        return {"settings": {"server_lr": lr, **new}, "seed": 0, "seen_validation": seen} | (
            {} if as_new is None else {"as_new": as_new}
        )

    rows = [
        row(0.1, {}, 0.80),  # tried before anybody looked at new clients
        row(0.1, {"new_lr": 0.3}, 0.79, as_new=0.6),  # the same training on another machine
        row(0.1, {"new_lr": 1.0}, 0.79, as_new=0.7),
        row(0.2, {"new_lr": 1.0}, 0.78, as_new=0.9),
        row(0.3, {}, None),
    ]
    trials = Trials(tmp_path / "t.json", {"method": "pfedhn"}, rows)
    ranked = [point for point, _ in trials.ranking((0,))]
    assert ranked == [rows[place]["settings"] for place in (2, 1, 0, 3, 4)]
    trials.choose((0,))
    assert trials.best == {"settings": rows[2]["settings"], "seen_validation": 0.79, "seeds": [0], "as_new": 0.7}
    # The same settings with another seed, said in another way: embedding_lr is what it is by default.
    again = row(0.1, {"new_lr": 1.0, "embedding_lr": 1e-2}, 0.79, as_new=0.5) | {"seed": 1}
    trials.rows.append(again)
    assert trials.as_new(rows[2]["settings"], (0, 1)) == [0.7, 0.5]


def test_settings_can_be_chosen_by_clients_that_are_held_out_of_training(tmp_path):
    trials = search(tmp_path, seeds=(0,), hold_out=0.3)
    whole = ragged(seed=0)
    assert trials.path.name == f"digits-fedavg-n{whole.num_clients}-holding-out-0.3.json"
    kept = json.loads(trials.path.read_text())
    assert (kept["hold_out"], kept["num_seen"]) == (0.3, whole.num_seen)
    part = whole.holding_out(0.3)
    for row in kept["trials"]:
        rest = {"local_steps": 2, "client_lr": row["settings"]["client_lr"]}
        alone = fitting.fit(part, "fedavg", rounds=4, eval_every=2, clients_per_round=3, engine="vector", **rest)
        wanted = alone.evaluate("validation")
        assert row["seen_validation"] == wanted.seen.per_sample
        assert row["held_out_validation"] == wanted.unseen.per_sample
    # By theirs, whatever the others say.
    trials.rows[0] |= {"held_out_validation": 0.9, "seen_validation": 0.1}
    trials.rows[1] |= {"held_out_validation": 0.8, "seen_validation": 1.0}
    trials.choose((0,))
    assert trials.best == {"settings": trials.rows[0]["settings"], "held_out_validation": 0.9, "seeds": [0]}
    assert "held out validation, %" in [column.header for column in trials_table(trials, (0,)).columns]
    trials.protocol["judge"] = "both"
    trials.choose((0,))
    assert trials.best["settings"] == trials.rows[1]["settings"]
    assert trials.best["held_out_and_seen_validation"] == pytest.approx(0.9)
    assert "held out and seen validation, %" in [column.header for column in trials_table(trials, (0,)).columns]
    n = whole.num_clients
    found = tuned_settings("fedavg", "digits", n, tmp_path / "results")
    assert found == (kept["best"]["settings"], f"tuned at n={n} for new clients")
    search(tmp_path, seeds=(0,))  # the same without, beside it
    assert tuned_settings("fedavg", "digits", n, tmp_path / "results") == found
    with pytest.raises(PefllError, match="PEFLL-D145"):
        search(tmp_path, seeds=(0,), hold_out=0.99, to="elsewhere")
    for share in (1.0, -0.1):
        with pytest.raises(PefllError, match="PEFLL-X012"):
            search(tmp_path, hold_out=share)
    with pytest.raises(PefllError, match="judge"):
        Search(CONFIG, RATES, judge="everybody")


def test_held_out_and_seen_clients_can_decide_together(tmp_path):
    wanted = Search(CONFIG, RATES, (0,), 0.3, "both")
    trials = run_search(wanted, tmp_path / "runs", tmp_path / "results", 3, Console(quiet=True))
    assert json.loads(trials.path.read_text())["judge"] == "both"
    score = {row["settings"]["client_lr"]: row["held_out_validation"] + row["seen_validation"] for row in trials.rows}
    assert trials.best["settings"]["client_lr"] == max(score, key=score.get)
    with pytest.raises(PefllError, match="PEFLL-X016"):
        search(tmp_path, seeds=(0,), hold_out=0.3)  # the same file, judged in another way


def test_test_samples_and_unseen_clients_change_nothing(tmp_path, monkeypatch):
    honest = search(tmp_path, to="honest")

    def poisoned(config, console):
        data = ragged(seed=config.seed)
        y = data.y.clone()
        for client in range(data.num_clients):
            for split in range(3):
                if split == TEST or client >= data.num_seen:
                    y[data.indices(client, split)] = 0
        return dataclasses.replace(data, y=y)

    monkeypatch.setattr(federations, "federation_of", poisoned)
    other = run_search(Search(CONFIG, RATES, (0, 1)), tmp_path / "other", tmp_path / "poisoned", 3, Console(quiet=True))
    assert [row["seen_validation"] for row in other.rows] == [row["seen_validation"] for row in honest.rows]


def test_what_was_tried_is_not_tried_again(tmp_path, monkeypatch):
    first = search(tmp_path)
    assert not list((tmp_path / "runs").rglob("*.safetensors"))  # nobody needs their weights
    ordered = []
    train_all = fitting.train_all
    monkeypatch.setattr(fitting, "train_all", lambda specs, **more: ordered.extend(specs) or train_all(specs, **more))
    again = search(tmp_path)
    assert (again.rows, ordered) == (first.rows, [])
    # The same settings, said in another way, and one more.
    more = search(tmp_path, {"client_lr": (0.1, 0.2), "local_steps": (2,)}, settings={})
    assert [order.config.settings["client_lr"] for order in ordered] == [0.2, 0.2]
    assert len(more.rows) == 6
    assert len(more.ranking((0, 1))) == 3
    assert more.ranking((0, 1, 2)) == []  # nothing was tried with all three


def test_a_search_that_fails_half_way_leaves_the_earlier_choice(tmp_path, monkeypatch):
    first = search(tmp_path)
    monkeypatch.setattr(fitting, "train_all", lambda specs, **more: [PefllError("the disk is full") for _ in specs])
    with pytest.raises(PefllError, match="the disk is full"):
        search(tmp_path, {"client_lr": (0.2,)})
    kept = json.loads(first.path.read_text())
    assert (kept["best"], kept["trials"]) == (first.best, first.rows)


def test_a_search_that_was_stopped_goes_on(tmp_path, monkeypatch):
    whole = search(tmp_path / "whole", seeds=(0,), at_once=1)
    advance = VectorEngine.advance
    started = []

    def interrupted(self, server, first, rounds):
        started.append(first)
        if len(started) > 3:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(self, server, first, rounds)

    with monkeypatch.context() as patch:
        patch.setattr(VectorEngine, "advance", interrupted)
        with pytest.raises(Stopped):
            search(tmp_path / "parts", seeds=(0,), at_once=1)
    kept = json.loads((tmp_path / "parts/results/digits-fedavg-n8.json").read_text())
    assert len(kept["trials"]) == 1
    assert kept["best"] is None  # half a search chooses nothing
    started.clear()
    monkeypatch.setattr(VectorEngine, "advance", lambda *given: started.append(given[2]) or advance(*given))
    resumed = search(tmp_path / "parts", seeds=(0,), at_once=1)
    assert started[0] > 0  # not from the first round
    assert [row["seen_validation"] for row in resumed.rows] == [row["seen_validation"] for row in whole.rows]


def test_settings_that_diverge_are_noted_and_not_chosen(tmp_path, monkeypatch):
    trials = search(tmp_path, {"client_lr": (1e30, 0.1)}, seeds=(0,))
    assert "PEFLL-E012" in trials.rows[0]["error"]
    assert [(point["client_lr"], len(values)) for point, values in trials.ranking((0,))] == [(0.1, 1), (1e30, 0)]
    monkeypatch.setattr(fitting, "train_all", None)
    assert search(tmp_path, {"client_lr": (1e30, 0.1)}, seeds=(0,)).rows == trials.rows
    nothing = Search(CONFIG, {"client_lr": (1e30,)}, (0,))
    monkeypatch.undo()
    monkeypatch.setattr(federations, "federation_of", lambda config, console: ragged(seed=config.seed))
    lost = run_search(nothing, tmp_path / "lost", tmp_path / "to", 1, Console(quiet=True))
    assert json.loads(lost.path.read_text())["best"] is None
    assert advice(lost, nothing) == []
    assert tuned_settings("fedavg", "digits", 8, tmp_path / "to") == ({}, "defaults")


def test_other_conditions_are_refused(tmp_path):
    search(tmp_path, seeds=(0,))
    with pytest.raises(PefllError, match=r"\brounds\b.*\b4\b.*\b6\b.*PEFLL-X016"):
        search(tmp_path, seeds=(0,), rounds=6)
    with pytest.raises(PefllError, match=r"is 0.*PEFLL-X017"):
        search(tmp_path, {"client_lr": (7.0,)}, seeds=(0,), at_once=0)


def test_tuned_runs_are_not_results(tmp_path):
    search(tmp_path, seeds=(0,))
    (folder,) = (tmp_path / "runs").glob("*/*client_lr_0.1/seed-0-*")
    with pytest.raises(PefllError, match="PEFLL-X008"):
        collect(RunFolder(folder), tmp_path / "to")


def test_what_a_cell_without_tuning_falls_back_to(tmp_path):
    def write(name: str, rate: float) -> None:
        content = {"best": {"settings": {"client_lr": rate}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    assert tuned_settings("fedavg", "cifar10", 500, tmp_path) == ({}, "defaults")
    write("cifar10-fedavg-n100", 0.1)
    write("cifar10-fedavg-n1000", 0.3)
    assert tuned_settings("fedavg", "cifar10", 500, tmp_path) == ({"client_lr": 0.3}, "tuned at n=1000")
    assert tuned_settings("fedavg", "cifar10", 300, tmp_path) == ({"client_lr": 0.1}, "tuned at n=100")
    assert tuned_settings("fedavg", "cifar100", 100, tmp_path).source == "defaults"
    write("cifar10-fedavg-n100-old", 0.7)  # files of other names are somebody else's
    write("cifar10-fedavg-mine-n500", 0.7)
    assert tuned_settings("fedavg", "cifar10", 500, tmp_path) == ({"client_lr": 0.3}, "tuned at n=1000")
    write("cifar10-fedavg-n500-holding-out-0.1", 0.5)  # by clients that do not train, for as many of them
    assert tuned_settings("fedavg", "cifar10", 500, tmp_path) == ({"client_lr": 0.5}, "tuned at n=500 for new clients")
    assert tuned_settings("fedavg", "cifar10", 600, tmp_path) == ({"client_lr": 0.3}, "tuned at n=1000")
    write("my[1]-fedavg-n20", 0.2)
    assert tuned_settings("fedavg", "my[1].csv", 20, tmp_path).source == "tuned at n=20"
    assert tuned_settings("fedavg", "cifar10", 1000, tmp_path) == ({"client_lr": 0.3}, "tuned at n=1000")
    assert tuned_settings("local", "cifar10", 100, tmp_path).source == "defaults"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "PEFLL-X015"),
        (["client_lr"], r"'client_lr'.*PEFLL-X013"),
        (["client_lr=1e-3,,1"], "PEFLL-X013"),
        (["client_rl=1"], r"did you mean 'client_lr'.*PEFLL-A101"),
        (["client_lr=fast"], "PEFLL-A014"),
        (["client_lr=1,1.0"], "PEFLL-X014"),
        (["client_lr=1", "client_lr=2"], "PEFLL-X014"),
    ],
)
def test_grids_that_are_none(words, part):
    with pytest.raises(PefllError, match=part):
        parse_grid("fedavg", words)


def test_a_grid_is_a_product_with_types():
    grid = parse_grid("fedavg", ["client_lr = 1e-3, 1e-2", "local_steps=5"])
    assert grid == {"client_lr": (1e-3, 1e-2), "local_steps": (5,)}
    with pytest.raises(PefllError, match="PEFLL-X011"):
        Search(CONFIG, grid)


def test_the_lowest_error_is_chosen_for_numbers(tmp_path):
    given = {"rounds": 3, "eval_every": 1, "clients_per_round": 3, "engine": "serial", "processes": 1}
    given |= {"out": tmp_path / "runs", "to": tmp_path / "to", "hold_out": 0.4}
    near = pefll.Metric("near", lambda output, y: (output[:, 0] - y).abs() < 1)  # has no name to be imported by
    data = with_numbers(1, clients=6, seen=5)
    trials = pefll.tune(
        data,
        pefll.FedAvg(local_steps=2),
        grid={"client_lr": [0.05, 1e-9]},
        task=pefll.Regression(extra=[near]),
        **given,
    )
    kept = json.loads(trials.path.read_text())
    assert (kept["metric"], kept["smaller_is_better"]) == ("rmse", True)
    assert "validation RMSE" in kept["what"]
    scores = {row["settings"]["client_lr"]: row["held_out_validation"] for row in kept["trials"]}
    assert scores[0.05] < scores[1e-9]
    assert kept["best"]["settings"] == {"local_steps": 2, "client_lr": 0.05}
    assert kept["best"]["held_out_validation"] == scores[0.05]
    alone = pefll.fit(
        data.holding_out(0.4), "fedavg", rounds=3, eval_every=1, clients_per_round=3, engine="serial", processes=1,
        client_lr=0.05, local_steps=2,
    )  # fmt: skip
    assert scores[0.05] == alone.evaluate("validation").unseen.rmse
    table = trials_table(trials, (0,))
    assert "RMSE" in table.title
    assert [column.header for column in table.columns][-1] == "held out validation"
    # Ties between errors are ranked by the error of seen clients that are treated as new.
    rows = [{"settings": {"new_lr": rate}, "seed": 0, "seen_validation": 2.0} for rate in (0.1, 0.2, 0.3)]
    rows[1]["as_new"], rows[2]["as_new"] = 5.0, 4.0
    errors = Trials(Path("none.json"), {"method": "pfedhn", "smaller_is_better": True}, rows)
    assert [point["new_lr"] for point, _ in errors.ranking((0,))] == [0.3, 0.2, 0.1]
    with pytest.raises(PefllError, match=r"task.*PEFLL-X016"):  # their figures are not comparable
        pefll.tune(data, "fedavg", grid={"client_lr": [0.05]}, task="regression loss_name=huber", **given)
    for grid, code in (({}, "X501"), ({"client_lr": []}, "X502"), ({"client_lr": [1, 1.0]}, "X502"), ([], "X501")):
        with pytest.raises(PefllError, match=f"PEFLL-{code}"):
            pefll.tune(data, "fedavg", grid=grid, **given)


def test_without_validation_samples_nothing_is_chosen(tmp_path):
    data = ragged()
    data.count[1] = 0
    with pytest.raises(PefllError, match="PEFLL-X500"):
        pefll.tune(data, "fedavg", grid={"client_lr": [0.1]}, out=tmp_path / "runs", to=tmp_path / "to", rounds=1)
    assert not (tmp_path / "to").exists()


def test_a_file_without_the_name_of_the_metric_has_accuracies(tmp_path):
    first = search(tmp_path, seeds=(0,))
    kept = json.loads(first.path.read_text())
    assert kept.pop("metric") == "per_sample"
    first.path.write_text(json.dumps(kept))  # as earlier versions wrote it
    again = search(tmp_path, seeds=(0,))
    assert (again.rows, again.best) == (first.rows, first.best)
    for path in sorted(Path("results/tune").glob("*.json")):
        protocol = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("best", "trials")}
        trials, best = Trials.read(path, protocol | {"metric": "per_sample"}), Trials.read(path, protocol).best
        trials.choose(best["seeds"])
        assert trials.best["settings"] == best["settings"], path.name
