"""Several clients' samples never become one model: they are refused, or each client gets its own."""

from __future__ import annotations

import dataclasses
import json
import os
import stat

import numpy as np
import pytest
import torch

from pefll import load, predict_each
from pefll.core.errors import PefllError
from pefll.core.files import safe_file_name
from pefll.data import federation_from_frame
from pefll.data.owners import find_owners
from pefll.runs import modelfile
from pefll.runs.model_folder import INDEX, file_name, held
from pefll.runs.personal import PersonalModel
from pefll.training import fitting
from pefll.training.personalizing import write_each
from pefll.training.run import ClientsFailed
from tests.cli.conftest import pefll, refused  # noqa: F401 - fixtures

pandas = pytest.importorskip("pandas")
FEATURES = [f"f{number}" for number in range(6)]
# Names that file systems take for something else, or for each other.
STRANGE = [
    "CON",
    "con",
    "../x",
    "a/b",
    "a:b",
    "Ann",
    "ann",
    "ünï",
    "x" * 300,
    "",
    " ",
    ".",
    "..",
    "nul.txt",
    "-rf",
    "a\nb",
]


def table(users, rows=12, seed=0):
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.asarray(users, dtype=object), rows)
    y = rng.integers(0, 3, len(owner))
    x = rng.normal(size=(len(owner), 6)) + 2 * np.eye(3, 6)[y]
    frame = pandas.DataFrame(x.astype(np.float32), columns=FEATURES)
    frame["label"] = np.array(["red", "green", "blue"])[y]
    frame["user_id"] = owner
    return frame.sample(frac=1, random_state=seed).reset_index(drop=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a table with a column user_id, by its folder."""
    folder = tmp_path_factory.mktemp("each") / "run"
    federation = federation_from_frame(table(range(10)), label="label", client="user_id")
    fitting.fit(federation, rounds=2, clients_per_round=3, local_steps=1, processes=1, out=folder)
    return folder


@pytest.fixture
def by_command(pefll, tmp_path):  # noqa: F811
    """The same from the command line, whose config names the column."""
    table(range(8)).to_csv(tmp_path / "train.csv", index=False)
    words = ("--client-column", "user_id", "--rounds", 2, "--clients-per-round", 2, "--processes", 1)
    options = ("--set", "local_steps=1", "--data-dir", tmp_path / "cache", "--out", tmp_path / "run")
    assert pefll("train", "--data", tmp_path / "train.csv", *words, *options).code == 0
    return tmp_path / "run"


def same(a: PersonalModel, b: PersonalModel) -> bool:
    left, right = a.network.state_dict(), b.network.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_table_of_several_clients_is_refused_or_each_gets_a_model(trained):
    run, frame = load(trained), table(["ann", "bob", "eve"])
    with pytest.raises(PefllError) as error:
        run.personalize(frame)
    assert error.value.code == "PEFLL-M037"
    assert "PEFLL-M037" in str(error.value)
    models = run.personalize_each(frame)
    assert list(models) == ["ann", "bob", "eve"]
    for user, model in models.items():
        mine = frame[frame.user_id == user]
        alone = run.personalize(mine[FEATURES].to_numpy(), mine.label.to_numpy())
        assert same(model, alone)
        assert model.spec.client == run.personalize(mine).spec.client == user
        assert same(model, run.personalize(mine)), "one client's table may have the column, which is no feature"
        assert same(model, run.personalize(mine[[*reversed(FEATURES), "label"]]))
    assert not same(models["ann"], models["bob"])
    assert run.certify(federation=frame, bounds=False).clients == 3
    arrays = run.personalize_each(frame[FEATURES].to_numpy(), frame.label.to_numpy(), frame.user_id.to_numpy())
    assert all(same(arrays[user], model) for user, model in models.items())
    mine = table([7])
    (seven,) = run.personalize_each(mine).values()
    floats = mine.assign(user_id=7.0)  # as in a table with gaps elsewhere
    assert run.personalize(floats).spec.client == seven.spec.client == "7"
    assert (seven.predict(floats) == seven.predict(mine)).all()
    lists = mine.assign(user_id=[["ann"]] * len(mine))
    assert run.personalize(lists).spec.client == "['ann']"
    with pytest.raises(PefllError, match="PEFLL-D111"):
        run.personalize_each(lists)
    numbered = run.personalize_each(table([7, -2]).rename(columns={"user_id": "who"}), client="who")
    assert list(numbered) == [-2, 7]
    with pytest.raises(PefllError) as error:
        run.personalize_each(np.zeros((4, 6)), np.zeros(4, dtype=int))
    assert error.value.code == "PEFLL-M035"
    with pytest.raises(PefllError) as error:
        run.personalize_each(frame.drop(columns="user_id"))
    assert error.value.code == "PEFLL-M033"


def test_one_clients_fault_is_not_the_others(trained):
    run, frame = load(trained), table(["ann", "bob", "eve", "max"])
    frame.loc[frame.index[frame.user_id == "bob"][0], "f2"] = np.inf
    frame.loc[frame.index[frame.user_id == "eve"][0], "label"] = "purple"
    with pytest.raises(ClientsFailed) as error:
        run.personalize_each(frame)
    assert set(error.value.models) == {"ann", "max"}
    assert set(error.value.errors) == {"bob", "eve"}
    assert "bob: " in str(error.value)
    assert "purple" in str(error.value)


def test_files_for_clients_with_strange_names():
    names = [file_name(name) for name in STRANGE]
    assert len({name.lower() for name in names}) == len(names), "also where capitals mean nothing"
    for name in names:
        assert "/" not in name
        assert "\\" not in name
        assert name.isascii()
        assert len(name) <= 100
        assert name.endswith(".safetensors")
        assert name.split(".")[0].lower() not in ("con", "nul", "", "aux")
        assert not name.startswith((".", "-", " "))
    assert file_name("ann") == "ann.safetensors"
    assert file_name(17) == "17.safetensors"
    assert file_name("Ann") == f"{safe_file_name('Ann')}.safetensors", "one set of rules"
    # A plain name can be no other name's, whatever somebody calls himself.
    assert file_name(file_name("Ann").removesuffix(".safetensors")) != file_name("Ann")


def test_one_file_for_each_client_and_going_on(pefll, refused, by_command, tmp_path):  # noqa: F811
    data, folder = tmp_path / "fifty.parquet", tmp_path / "models"
    frame = table(STRANGE)
    frame.to_parquet(data)
    said = refused("personalize", by_command, "--data", data, "--out", tmp_path / "m.safetensors")
    assert "--each" in said
    assert "PEFLL-M034" in said
    assert not (tmp_path / "m.safetensors").exists()
    assert pefll("personalize", by_command, "--data", data, "--each", "--out", folder).code == 0
    index = json.loads((folder / INDEX).read_text())["models"]
    assert {row["user"] for row in index} == set(STRANGE)
    assert {row["file"] for row in index} == {path.name for path in folder.glob("*.safetensors")}
    assert all(row["samples"] == 12 for row in index)
    run = load(by_command)
    for row in index:
        mine = frame[frame.user_id == row["user"]]
        assert same(PersonalModel.load(folder / row["file"]), run.personalize(mine))
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    gone = next(iter(before))
    gone.unlink()
    said = pefll("personalize", by_command, "--data", data, "--each", "--out", folder)
    assert said.code == 0
    assert "15 models of this run and data existed already" in said.out
    assert gone.is_file()
    assert all(path.stat().st_mtime_ns == at for path, at in before.items() if path != gone)
    assert len(json.loads((folder / INDEX).read_text())["models"]) == len(STRANGE)
    assert pefll("personalize", by_command, "--data", data, "--each", "--out", folder, "--force").code == 0
    assert all(path.stat().st_mtime_ns != at for path, at in before.items())


def test_models_of_other_samples_are_not_taken_for_these(pefll, refused, by_command, tmp_path):  # noqa: F811
    data, folder = tmp_path / "users.csv", tmp_path / "models"
    frame = table(["ann", "bob", "eve"])
    frame[frame.user_id != "eve"].to_csv(data, index=False)
    assert pefll("personalize", by_command, "--data", data, "--each", "--out", folder).code == 0
    frame.loc[frame.user_id == "bob", "f0"] += 1
    frame.loc[frame.user_id == "eve", "f1"] = np.inf
    frame.to_csv(data, index=False)
    words = ("personalize", by_command, "--data", data, "--each", "--out", folder)
    said = pefll(*words)
    assert said.code == 3
    head, bob, eve = said.err.splitlines()
    assert "2 of 3 clients got no model; 1 has an older one, which --update replaces; else " in head
    assert bob.startswith("  bob: ")
    assert eve.startswith("  eve: ")
    assert "Traceback" not in said.err
    frame[frame.user_id == "eve"].to_csv(data, index=False)
    refused(*words)  # nobody has a model: not "some"
    frame.loc[frame.user_id == "eve", "f1"] = 0.0
    frame.to_csv(data, index=False)
    before = {user: (folder / file_name(user)).stat().st_mtime_ns for user in ("ann", "bob")}
    assert pefll(*words, "--update").code == 0
    after = {user: (folder / file_name(user)).stat().st_mtime_ns for user in ("ann", "bob")}
    assert after["ann"] == before["ann"]
    assert after["bob"] > before["bob"]
    assert not predict_each(folder, frame).errors, "models.json names the new models"
    listed = (folder / INDEX).read_bytes()
    with held(folder):
        refused(*words, "--update", match="M065")
    assert (folder / INDEX).read_bytes() == listed
    ann, una = folder / file_name("ann"), folder / file_name("una")
    pandas.concat([frame, frame[frame.user_id == "ann"].assign(user_id="una")]).to_csv(data, index=False)
    assert pefll(*words).code == 0
    una.write_bytes(ann.read_bytes())  # a model of the same samples, but of another client
    assert pefll(*words).code == 3
    assert pefll(*words, "--update").code == 0
    assert not predict_each(folder, data).errors
    refused(*words[:4], "--update", "--out", tmp_path / "one", match="C642")


def test_damaged_models_are_made_again_with_a_note(pefll, by_command, tmp_path):  # noqa: F811
    data, folder = tmp_path / "users.csv", tmp_path / "models"
    table(["ann", "bob", "eve", "una"]).to_csv(data, index=False)
    words = ("personalize", by_command, "--data", data, "--each", "--out", folder)
    assert pefll(*words).code == 0
    whole = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    ann, bob = folder / "ann.safetensors", folder / "bob.safetensors"
    ann.write_bytes(whole[ann][:-1] + bytes([whole[ann][-1] ^ 1]))
    bob.write_bytes(whole[bob][:-9])
    una = folder / "una.safetensors"
    una.write_bytes(modelfile.to_bytes(PersonalModel.load(una).network.state_dict(), "{}"))  # with a right hash
    said = pefll(*words)
    assert said.code == 0
    assert said.err.count(".damaged-1 and made again") == 3
    assert (folder / "bob.safetensors.damaged-1").read_bytes() == whole[bob][:-9]
    assert "1 model of this run and data existed already" in said.out
    for path in whole:
        assert PersonalModel.load(path)


def test_the_list_of_models_keeps_earlier_clients(trained, tmp_path):
    run, folder = load(trained), tmp_path / "models"

    def listed(*users, rows=12):
        write_each(run, run._owned(table(users, rows), None, None), folder, force=True)
        return {row["user"]: row["samples"] for row in json.loads((folder / INDEX).read_text())["models"]}

    assert listed("ann", "amy") == {"ann": 12, "amy": 12}
    assert listed("bob") == {"ann": 12, "amy": 12, "bob": 12}
    assert listed("ann", rows=20) == {"ann": 20, "amy": 12, "bob": 12}
    (folder / "bob.safetensors").unlink()
    assert listed("eve") == {"ann": 20, "amy": 12, "eve": 12}
    for damaged in ("[", "5", '{"models": [5]}', '{"models": [{"user": [], "file": {}}]}'):
        (folder / INDEX).write_text(damaged)
        assert listed("max") == {"max": 12}
    assert len(list(folder.glob(f"{INDEX}.damaged-*"))) == 3


def test_the_manifest_says_what_failed_and_what_is_left(trained, tmp_path, monkeypatch):
    run, folder, users = load(trained), tmp_path / "models", ["amy", "bob", "eve"]
    frame = table(users)
    frame.loc[frame.index[frame.user_id == "bob"][0], "f2"] = np.inf
    owned = run._owned(frame, None, None)
    personalize = type(run).personalize

    def stop_at_the_last(self, x, y=None):
        if np.array_equal(x, owned[-1].x):
            raise KeyboardInterrupt
        return personalize(self, x, y)

    monkeypatch.setattr(type(run), "personalize", stop_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        write_each(run, owned, folder)
    found = json.loads((folder / INDEX).read_text())
    assert [row["user"] for row in found["models"]] == ["amy"]
    assert [row["user"] for row in found["failed"]] == ["bob"]
    assert not found["complete"]
    monkeypatch.undo()
    assert write_each(run, owned, folder)[:2] == (["eve"], ["amy"])
    found = json.loads((folder / INDEX).read_text())
    assert found["complete"]
    assert found["run"] == {"method": "pefll", "data": "frame", "seed": 0, "rounds": 2}
    assert {row["user"]: row["bytes"] for row in found["models"]} == {
        user: (folder / file_name(user)).stat().st_size for user in ("amy", "eve")
    }


def test_a_refused_call_changes_no_manifest(trained, tmp_path):
    run, folder, users = load(trained), tmp_path / "models", ["amy", "bob", "eve"]
    owned = run._owned(table(users), None, None)
    write_each(run, owned, folder)
    before = (folder / INDEX).read_bytes()
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, seed=1), summary={})
    written = write_each(other, owned, folder)
    assert {error.code for error in written.errors.values()} == {"PEFLL-M040"}
    assert (folder / INDEX).read_bytes() == before
    changed = [owned[0]._replace(x=owned[0].x + 1), *owned[1:]]
    assert set(write_each(run, changed, folder).errors) == {"amy"}
    assert (folder / INDEX).read_bytes() == before
    more = run._owned(table(["amy", "tom"], seed=4).replace({"label": {"red": "purple"}}), None, None)
    assert set(write_each(other, more, folder).errors) == {"amy", "tom"}
    found = json.loads((folder / INDEX).read_text())
    assert found["run"] == json.loads(before)["run"]
    assert [row["user"] for row in found["models"]] == users
    assert [row["user"] for row in found["failed"]] == ["tom"]
    (folder / "amy.safetensors").unlink()  # as the sentence says
    assert write_each(run, changed, folder)[:2] == (["amy"], ["bob", "eve"])


@pytest.mark.parametrize("as_text", [False, True])
def test_the_order_of_rows_is_no_change_and_any_other_label_is(trained, tmp_path, as_text):
    run, frame = load(trained), table(["amy", "bob"])
    folder = tmp_path / "models"

    def owned(frame):
        y = frame.label.to_numpy(dtype=str) if as_text else None
        return run._owned(frame, y, None)

    write_each(run, owned(frame), folder)
    shuffled = frame.sample(frac=1, random_state=5)
    assert write_each(run, owned(shuffled), folder)[:2] == ([], ["amy", "bob"])
    # Exchanging the labels of two rows keeps all columns as sets of values, but not the rows.
    mine = frame.index[frame.user_id == "bob"]
    first, other = mine[0], next(row for row in mine if frame.label[row] != frame.label[mine[0]])
    frame.loc[[first, other], "label"] = frame.loc[[other, first], "label"].to_numpy()
    assert write_each(run, owned(frame), folder, update=True)[:2] == (["bob"], ["amy"])


def test_equal_reasons_are_said_once(trained):
    run = load(trained)
    with pytest.raises(ClientsFailed) as error:
        run.personalize_each(table(["ann", "bob", "eve"]).assign(label="purple"))
    assert str(error.value).count("purple") == 1
    assert "(likewise bob and eve)" in str(error.value)


def test_a_full_disk_stops_at_once(trained, tmp_path, monkeypatch):
    run, tries = load(trained), []

    def full(self, path, *, overwrite=False):
        tries.append(path)
        raise PefllError("cannot write", code="PEFLL-A102")

    monkeypatch.setattr(PersonalModel, "save", full)
    with pytest.raises(PefllError, match="PEFLL-A102"):
        write_each(run, run._owned(table(["amy", "bob"]), None, None), tmp_path / "models")
    assert len(tries) == 1


@pytest.mark.parametrize("each", [False, True])
def test_one_client_with_its_column_is_one_client(pefll, by_command, tmp_path, each):  # noqa: F811
    table([3]).to_csv(tmp_path / "one.csv", index=False)
    words = ("--each", "--out", tmp_path / "m") if each else ("--out", tmp_path / "3.safetensors")
    assert pefll("personalize", by_command, "--data", tmp_path / "one.csv", *words).code == 0
    made = tmp_path / "m" / "3.safetensors" if each else tmp_path / "3.safetensors"
    spec = PersonalModel.load(made).spec
    assert (spec.feature_names, spec.client) == (tuple(FEATURES), "3")


def test_a_misspelt_client_column_is_refused(pefll, refused, by_command, tmp_path):  # noqa: F811
    frame = table(["ann", "bob"])
    frame.to_csv(tmp_path / "two.csv", index=False)
    frame.to_parquet(tmp_path / "two.parquet")
    numbers = frame.label.map({"red": 0, "green": 1, "blue": 2})
    owner = frame.user_id.to_numpy().astype(str)
    np.savez(tmp_path / "two.npz", x=frame[FEATURES].to_numpy(), y=numbers.to_numpy(), user_id=owner)
    target = tmp_path / "m.safetensors"
    for file, code in (("two.csv", "D177"), ("two.parquet", "D177"), ("two.npz", "D173")):
        words = ("personalize", by_command, "--data", tmp_path / file, "--client-column", "usr_id", "--out", target)
        assert f"PEFLL-{code}" in refused(*words)
        assert not target.exists()
    frame[frame.user_id == "ann"].drop(columns="user_id").to_csv(tmp_path / "one.csv", index=False)
    assert pefll("personalize", by_command, "--data", tmp_path / "one.csv", "--out", target).code == 0, (
        "nobody named it"
    )


def test_clients_in_an_index_or_under_the_usual_name_are_seen(pefll, refused, trained, by_command, tmp_path):  # noqa: F811
    run, frame = load(trained), table(["ann", "bob"])
    one = frame[frame.user_id == "ann"]
    assert same(run.personalize(one.set_index("user_id")), run.personalize(one))
    assert list(run.personalize_each(frame.set_index("user_id"))) == ["ann", "bob"]
    hidden = {
        "index": frame.set_index("user_id"),
        "levels": frame.assign(row=range(len(frame))).set_index(["row", "user_id"]),
        "usual": frame.rename(columns={"user_id": "client"}),
    }
    target = tmp_path / "m.safetensors"
    for name, other in hidden.items():
        with pytest.raises(PefllError, match="PEFLL-M037"):
            run.personalize(other)
        other.to_parquet(tmp_path / f"{name}.parquet")
        said = refused("personalize", by_command, "--data", tmp_path / f"{name}.parquet", "--out", target)
        assert "PEFLL-M034" in said
    numbers = frame.label.map({"red": 0, "green": 1, "blue": 2}).to_numpy()
    owner = frame.user_id.to_numpy().astype(str)
    np.savez(tmp_path / "usual.npz", x=frame[FEATURES].to_numpy(), y=numbers, client=owner)
    said = refused("personalize", by_command, "--data", tmp_path / "usual.npz", "--out", target)
    assert "PEFLL-M034" in said
    assert not target.exists()


@pytest.mark.parametrize("name", ["User_ID", " user_id", "USER ID", "userId", "Client", "\uff55ser_id"])
def test_a_client_column_of_a_similar_name_is_refused(refused, trained, by_command, tmp_path, name):  # noqa: F811
    run, frame = load(trained), table(["ann", "bob"]).rename(columns={"user_id": name})
    for other in (frame, frame.set_index(name)):
        with pytest.raises(PefllError, match="PEFLL-M064"):
            run.personalize(other)
    frame.to_csv(tmp_path / "two.csv", index=False)
    numbers = frame.label.map({"red": 0, "green": 1, "blue": 2}).to_numpy()
    np.savez(
        tmp_path / "two.npz", x=frame[FEATURES].to_numpy(), y=numbers, **{name: frame[name].to_numpy().astype(str)}
    )
    for file in ("two.csv", "two.npz"):
        said = refused("personalize", by_command, "--data", tmp_path / file, "--out", tmp_path / "m.safetensors")
        assert "PEFLL-M064" in said
        assert repr(name) in said


def test_a_feature_may_have_a_name_like_the_client_columns():
    frame = {"User_ID": [1.0, 2.0], "user": [1, 2]}
    assert find_owners(frame, ("user_id",), ("User_ID",), "a") is None
    name, values = find_owners(frame | {"Client": [1, 1]}, ("user", "client"), (), "a")
    assert (name, values.tolist()) == ("user", [1, 2])


@pytest.mark.parametrize("empty", [None, np.nan, pandas.NA])
def test_a_client_column_with_empty_entries_is_refused(refused, trained, by_command, tmp_path, empty):  # noqa: F811
    run, frame = load(trained), table(["ann"])
    partly = frame.astype({"user_id": object})
    partly.loc[3, "user_id"] = empty
    for place, other in enumerate((frame.assign(user_id=empty), partly)):
        with pytest.raises(PefllError, match="PEFLL-M061"):
            run.personalize(other)
        data = tmp_path / f"{place}.parquet"
        other.to_parquet(data)
        assert "PEFLL-M061" in refused("personalize", by_command, "--data", data, "--out", tmp_path / "m.safetensors")


def test_arrays_and_folders_of_several_clients(pefll, refused, tmp_path):  # noqa: F811
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for client in ("ann", "bob", "eve", "max"):
        for kind in ("cat", "dog"):
            (tmp_path / "pictures" / client / kind).mkdir(parents=True)
            for number in range(4):
                pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
                image.fromarray(pixels).save(tmp_path / "pictures" / client / kind / f"{number}.png")
    np.savez(
        tmp_path / "all.npz",
        x=rng.normal(size=(48, 6)),
        y=rng.integers(0, 3, 48),
        who=np.repeat(["ann", "bob", "eve", "max"], 12),
    )
    small = ("--rounds", 1, "--clients-per-round", 1, "--processes", 1, "--set", "local_steps=1", "--unseen", 0.25)
    for data, more in ((tmp_path / "pictures", ()), (tmp_path / "all.npz", ("--client-column", "who"))):
        run = tmp_path / f"run-{data.stem}"
        options = (*more, *small, "--data-dir", tmp_path / "cache", "--out", run)
        assert pefll("train", "--data", data, *options).code == 0
        assert "--each" in refused("personalize", run, "--data", data, "--out", tmp_path / "m")
        folder = tmp_path / f"models-{data.stem}"
        assert pefll("personalize", run, "--data", data, "--each", "--out", folder).code == 0
        assert {path.stem for path in folder.glob("*.safetensors")} == {"ann", "bob", "eve", "max"}


def test_writing_leaves_nothing_but_models_and_their_list(trained, tmp_path):
    run = load(trained)
    owned = run._owned(table(["ann", "bob"]), None, None)
    written = write_each(run, owned, tmp_path / "new" / "folder")
    assert (written.made, written.kept, written.errors) == (["ann", "bob"], [], {})
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == ["ann.safetensors", "bob.safetensors", INDEX]


def test_models_are_their_owners_alone_whatever_the_umask(trained, tmp_path):
    run, folder = load(trained), tmp_path / "models"
    before = os.umask(0)
    try:
        write_each(run, run._owned(table(["ann"]), None, None), folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_the_label_column_of_training_is_the_default(pefll, tmp_path):  # noqa: F811
    data, models = tmp_path / "users.parquet", tmp_path / "models"
    table(["a", "b", "c", "d"]).rename(columns={"label": "liked"}).to_parquet(data)
    given = ["--data", data, "--label", "liked", "--client-column", "user_id", "--unseen", "0.25", "--device", "cpu"]
    assert pefll("train", *given, "--rounds", 1, "--processes", 1, "--out", tmp_path / "run").code == 0
    assert pefll("personalize", tmp_path / "run", "--data", data, "--each", "--out", models).code == 0
    said = pefll("predict", models, "--data", data)
    assert "of 48 samples with a label are right" in said.out
