"""All ways to give data: they take the same arguments, and make the same federation."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.data import TEST, TRAIN
from tests.cli.conftest import pefll as command  # noqa: F401

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

N, USERS = 60, 6
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 2)).astype(np.float32), RNG.integers(0, 2, N)
USER = np.array([f"u{row % USERS}" for row in range(N)])
USER[:3] = "x"
DAY = np.datetime64("2024-01-01") + RNG.permutation(N).astype("m8[D]")
FRAME = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "label": Y, "client": USER, "day": DAY.astype(str)})
WANTED = {"min_samples": 4, "unseen_clients": ["u1", "u4"]}


class Partitioner:
    num_partitions = USERS + 1

    def load_partition(self, place):
        name = sorted(set(USER.tolist()))[place]
        return FRAME[FRAME.client == name].drop(columns="client")


def in_file(folder, kind):
    path = folder / f"mine.{kind}"
    if kind == "npz":
        np.savez(path, x=X, y=Y, client=USER, day=DAY if folder.name.endswith("0") else DAY.astype(str))
    elif kind == "csv":
        FRAME.to_csv(path, index=False)
    else:
        FRAME.to_parquet(path)
    return path


WAYS = {
    "npz": lambda folder: pefll.federation_from_file(in_file(folder, "npz"), time="day", **WANTED),
    "csv": lambda folder: pefll.federation_from_file(in_file(folder, "csv"), time="day", encode="none", **WANTED),
    "parquet": lambda folder: pefll.federation_from_file(in_file(folder, "parquet"), time="day", **WANTED),
    "frame": lambda _: pefll.federation_from_frame(FRAME, "label", "client", time="day", **WANTED),
    "arrays": lambda _: pefll.federation_from_arrays(X, Y, USER, time=DAY, **WANTED),
    "dataset": lambda _: pefll.federation_from_dataset(
        torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y)), USER, time=DAY.astype(str), **WANTED
    ),
    "partitioner": lambda _: pefll.federation_from_partitioner(
        Partitioner(), time="day", min_samples=4, unseen_clients=[2, 5]
    ),
    "natural": lambda _: pefll.make_federation(
        pefll.samples_from_arrays(X, Y, USER, time=DAY), partition="natural", clients=None, **WANTED
    ),
    "indices": lambda _: pefll.by_indices(
        pefll.samples_from_arrays(X, Y, time=DAY),
        {name: np.flatnonzero(name == USER) for name in sorted(set(USER.tolist()) - {"x"})},
        unseen_clients=["u1", "u4"],
    ),
}


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_splits_by_time_and_names_unseen_clients(way, tmp_path):
    """An .npz, arrays and a Dataset could not be split by time, and arrays could not name unseen clients."""
    made = WAYS[way](tmp_path)
    names = [str(made.name_of(client)) for client in range(made.num_clients)]
    unseen = {"2", "5"} if way == "partitioner" else {"u1", "u4"}
    assert set(names[made.num_seen :]) == unseen
    assert len(names) == USERS
    assert "x" not in names
    for client, name in enumerate(names):
        own = np.flatnonzero((sorted(set(USER.tolist()))[int(name)] if way == "partitioner" else name) == USER)
        late = own[np.argsort(DAY[own])][-int(made.count[TEST, client]) :]
        found = made.y[made.indices(client, TEST)].tolist()
        assert sorted(found) == sorted(Y[late].tolist())
        assert int(made.count.sum(dim=0)[client]) == len(own)
        assert int(made.count[TRAIN, client]) >= 1


def test_a_run_on_an_npz_with_times_by_commands(command, tmp_path):  # noqa: F811
    path, run = in_file(tmp_path, "npz"), tmp_path / "run"
    words = ["--data", path, "--data-dir", tmp_path, "--min-samples", 4, "--unseen-clients", "u1,u4"]
    small = ["--rounds", 1, "--clients-per-round", 2, "--processes", 1, "--set", "local_steps=1"]
    said = command("train", *words, "--time-column", "day", *small, "--out", run)
    assert said.code == 0, said.err
    assert json.loads((run / "summary.json").read_text())["num_unseen"] == 2
    assert command("evaluate", run).code == 0, "the same split again"
    assert command("evaluate", run, "--data", path).code == 0
    other = pefll.load(run).federation_from(path)
    client = [other.name_of(each) for each in range(other.num_clients)].index("u3")
    own = np.flatnonzero(USER == "u3")
    late = own[np.argsort(DAY[own])][-int(other.count[TEST, client]) :]
    np.testing.assert_array_equal(
        np.sort(other.x[other.indices(client, TEST)].numpy(), axis=0), np.sort(X[late], axis=0)
    )
    np.savez(tmp_path / "undated.npz", x=X, y=Y, client=USER)
    for verb in (["evaluate", run, "--data"], ["train", "--time-column", "day", "--out", tmp_path / "no", "--data"]):
        said = command(*verb, tmp_path / "undated.npz")
        assert said.code == 2
        assert re.search(r"day.*PEFLL-(T642|D173)", said.err), said.err
    said = command("train", "--data", path, "--drop", "a", "--out", tmp_path / "no")
    assert "PEFLL-D598" in said.err


@pytest.mark.filterwarnings("ignore:.*left out")
def test_summaries_and_searches_have_the_options_of_training(command, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.csv"
    answer = pandas.Series(np.where(Y, "yes", "no")).astype(object)
    FRAME.assign(label=answer.where(np.arange(N) % 7 > 0)).to_csv(path, index=False)
    (tmp_path / "new.txt").write_text("u1\nu4\n")
    words = ["--data-dir", tmp_path, "--time-column", "day", "--unseen-clients", "new.txt", "--min-samples", 4]
    more = [*words, "--missing", "drop-unlabelled"]
    said = command("data", "summary", path, *more)
    assert said.code == 0, said.err
    assert "2 unseen" in said.out
    assert said.err.count("fewer than 4 samples") == 1
    small = ["--rounds", 1, "--clients-per-round", 2, "--processes", 1, "--grid", "client_lr=0.1"]
    said = command("tune", "--method", "fedavg", "--data", path, *more, *small)
    assert said.code == 0, said.err
    (found,) = json.loads(next((tmp_path / "results" / "tune").glob("*.json")).read_text())["trials"]
    same = pefll.federation_from_file(path, time="day", missing="drop-unlabelled", **WANTED)
    assert found["data_sha256"] == same.fingerprint()


def test_the_page_has_the_arguments_of_each_function():
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    lines = page[page.index("| argument | option |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    functions = [name.strip("`") for name in rows[0][2:]]
    assert set(functions) >= {name for name in pefll.__all__ if name.startswith("federation_from")}
    known = {name: set(inspect.signature(getattr(pefll, name)).parameters) for name in functions}
    listed = {argument for row in rows[2:] for argument in re.findall(r"`(\w+)`", row[0])}
    for row in rows[2:]:
        for argument in re.findall(r"`(\w+)`", row[0]):
            has = [name for name in functions if argument in known[name]]
            assert has == [name for name, cell in zip(functions, row[2:], strict=True) if cell == "•"], argument
    data = {"path", "frame", "x", "y", "dataset", "partitioner", "samples", "clients", "partition", "name"}
    for name in functions:
        assert known[name] <= listed | data, name
    from pefll.cli.training import train

    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(train).parameters}
    assert {option for row in rows[2:] for option in re.findall(r"`(--[\w-]+)`", row[1])} <= options


def test_times_that_are_wrong(tmp_path):
    for time, code in (([1, 2], "D135"), (np.zeros((N, 2)), "D110"), (np.full(N, np.nan), "D595"), (["?"] * N, "D586")):
        with pytest.raises(PefllError, match=f"PEFLL-{code}"):
            pefll.federation_from_arrays(X, Y, USER, time=time)
    with pytest.raises(PefllError, match="PEFLL-D603"):
        pefll.federation_from_arrays(X, Y, USER, time=DAY, split=np.arange(N) % 3)
    samples = pefll.samples_from_arrays(X, Y)
    with pytest.raises(PefllError, match=r"min_samples.*PEFLL-D606"):
        pefll.make_federation(samples, partition="by-class 1", clients=3, min_samples=3)
    FRAME.drop(columns="client").to_csv(tmp_path / "plain.csv", index=False)
    with pytest.raises(PefllError, match="PEFLL-D617"):
        pefll.federation_from_file(tmp_path / "plain.csv", drop=["day"])
