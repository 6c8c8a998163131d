"""Tables are matched by the names of their columns, in Python as on the command line."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import pefll
from pefll.core.errors import PefllError
from pefll.data.missing_labels import as_names
from pefll.models.spec import ModelSpec
from pefll.runs.personal import PersonalModel

pandas = pytest.importorskip("pandas")
NAMES = ["width", "height", "weight", "age"]
CONTENT = {
    "model": "mlp",
    "input_shape": [4],
    "classes": 3,
    "normalise": None,
    "tokens": False,
    "class_names": ["ant", "bee", "cow"],
    "feature_names": NAMES,
    "num_clients": 2,
}
SPEC = ModelSpec.from_json(CONTENT)


class Columns:
    """What polars' data frames have in common with pandas': names, and columns by name."""

    def __init__(self, frame):
        self._frame = frame
        self.columns = list(frame.columns)

    def __getitem__(self, name):
        return self._frame[name].to_numpy()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return PersonalModel(pefll.models.MLP((4,), 3), SPEC)


@pytest.fixture
def frame():
    return pandas.DataFrame(np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32), columns=NAMES)


@pytest.mark.parametrize("kind", [lambda frame: frame, Columns, lambda frame: frame.to_dict("list")])
def test_columns_are_found_by_name(model, frame, kind):
    wanted = model.predict(frame.to_numpy())
    assert set(wanted.tolist()) == {0, 1, 2}
    assert not np.array_equal(model.predict(frame[NAMES[::-1]].to_numpy()), wanted), "the order does matter"
    more = frame[NAMES[::-1]].assign(label="ant", user_id=7, other="text")
    assert np.array_equal(model.predict(kind(frame)), wanted)
    assert np.array_equal(model.predict(kind(more)), wanted)
    assert np.array_equal(model.probabilities(kind(more)), model.probabilities(frame.to_numpy()))
    assert torch.equal(model(kind(more)), model(frame.to_numpy()))


def test_pyarrow_and_polars(model, frame):
    arrow = pytest.importorskip("pyarrow")
    assert np.array_equal(model.predict(arrow.Table.from_pandas(frame[NAMES[::-1]])), model.predict(frame))
    polars = pytest.importorskip("polars")
    assert np.array_equal(model.predict(polars.from_pandas(frame[NAMES[::-1]])), model.predict(frame))


def test_missing_and_double_columns_are_named(model, frame):
    with pytest.raises(PefllError, match=r"columns 'height' and 'age'.*add them.*PEFLL-M030") as error:
        model.predict(frame[["width", "weight"]])
    assert error.value.code == "PEFLL-M030"
    twice = pandas.concat([frame, frame[["age"]]], axis=1)
    with pytest.raises(PefllError, match=r"'age'.*PEFLL-M031") as error:
        model.predict(twice)
    assert error.value.code == "PEFLL-M031"
    with pytest.raises(PefllError, match=r"'age'.*PEFLL-D160"):
        model.predict(frame.assign(age="old"))


def test_a_model_without_names_takes_positions_and_says_so(frame, tmp_path):
    old = PersonalModel(nn.Linear(4, 3), replace(SPEC, feature_names=()))
    with pytest.warns(UserWarning, match="position"):
        assert np.array_equal(old.predict(frame), old.predict(frame.to_numpy()))
    content = {name: value for name, value in CONTENT.items() if name != "feature_names"} | {"model": ""}
    metadata = {"format": "pefll-personal-model-1", "facts": json.dumps(content)}
    (tmp_path / "old").write_bytes(safetensors.torch.save(old.network.state_dict(), metadata))
    with pytest.warns(UserWarning, match="SHA-256"):
        loaded = PersonalModel.load(tmp_path / "old", nn.Linear(4, 3))
    with pytest.warns(UserWarning, match="position"):
        assert np.array_equal(loaded.predict(frame), old.predict(frame.to_numpy()))


def test_names_of_classes_on_request(model, frame):
    numbers = model.predict(frame)
    assert model.class_names == ("ant", "bee", "cow")
    assert model.predict(frame, names=True).tolist() == [model.class_names[number] for number in numbers]
    assert model.probabilities(frame).shape == (50, 3)
    nameless = PersonalModel(model.network, replace(SPEC, class_names=()))
    assert nameless.predict(frame, names=True).tolist() == numbers.tolist()


def test_models_are_made_and_loaded_to_predict(frame, tmp_path):
    network = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    made = PersonalModel(network, SPEC)
    made.save(tmp_path / "m")
    again = PersonalModel.load(tmp_path / "m", nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3)))
    for model in (made, again):
        assert not model.training
        assert not any(part.training for part in model.modules())
        assert np.array_equal(model.probabilities(frame), made.probabilities(frame))


def test_no_note_where_there_is_nothing_to_say(model, frame, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save(tmp_path / "m")
        assert np.array_equal(PersonalModel.load(tmp_path / "m").predict(frame), model.predict(frame))


def test_a_run_trained_on_a_table_gives_models_that_know_its_columns(frame, tmp_path):
    table = frame.assign(kind=np.where(frame.width > 0, "ant", "bee"), who=np.arange(50) % 5)
    federation = pefll.federation_from_frame(table, label="kind", client="who")
    run = pefll.fit(federation, rounds=1, clients_per_round=2, local_steps=1, processes=1, out=tmp_path / "run")
    for each in (run, pefll.load(tmp_path / "run")):
        made = each.personalize(table[table.who == 2][["who", "kind", *NAMES[::-1]]])
        wanted = each.personalize(frame[table.who == 2].to_numpy(), table[table.who == 2].kind.to_numpy())
        assert np.array_equal(made.probabilities(frame), wanted.probabilities(frame))
        assert not made.training
        with pytest.raises(PefllError) as error:
            each.personalize(table[table.who == 2].drop(columns="age"))
        assert error.value.code == "PEFLL-M030"


def test_labels_of_another_type_are_matched_by_name_or_refused(frame):
    """Parquet may hold the texts "1" and "True" where a CSV is read as numbers and as booleans."""
    table, low = frame.assign(who=np.arange(50) % 5), frame.width > 0

    def with_labels(false, true, who=slice(None)):
        return table.assign(kind=np.where(low, true, false))[who]

    for false, true, others in (("False", "True", [(False, True), (0, 1)]), ("5", "7", [(5, 7), (5.0, 7.0)])):
        federation = pefll.federation_from_frame(with_labels(false, true), label="kind", client="who")
        run = pefll.fit(federation, rounds=1, clients_per_round=2, local_steps=1, processes=1)
        mine = table.who == 2
        wanted = run.personalize(with_labels(false, true, mine)).probabilities(frame)
        for other in others:
            assert np.array_equal(run.personalize(with_labels(*other, mine)).probabilities(frame), wanted)
            assert (
                run.federation_from(with_labels(*other)).y.tolist()
                == run.federation_from(with_labels(false, true)).y.tolist()
            )
        for wrong in ((0, 2), ("no", "yes"), (2.5, 3.5), ("false", "true")):
            with pytest.raises(PefllError) as error:
                run.personalize(with_labels(*wrong, mine))
            assert error.value.code == "PEFLL-D108"
    mixed = np.array([True, np.True_, np.int64(2), np.float32(3), None, "x"], dtype=object)
    assert as_names(mixed).tolist() == ["True", "True", "2", "3", None, "x"]


def test_metrics_count_the_samples_that_have_a_label(model, frame):
    y = np.resize(["ant", "bee", "cow"], len(frame)).astype(object)
    holes = np.where(np.arange(len(frame)) % 3 == 0, None, y)
    kept = [place for place in range(len(frame)) if place % 3]
    assert model.metrics(frame, holes) == model.metrics(frame.iloc[kept], y[kept])
    with pytest.raises(PefllError, match="PEFLL-M504"):
        model.metrics(frame, [None] * len(frame))
    with pytest.raises(PefllError, match="PEFLL-M501"):
        model.metrics(frame, holes[:7])
    spec = ModelSpec.from_json(
        CONTENT | {"classes": 0, "class_names": [], "outputs": 1, "task": "regression mean=3.0 deviation=2.0"}
    )
    regression = PersonalModel(pefll.models.MLP((4,), 1), spec)
    prices = np.where(np.arange(len(frame)) % 3 == 0, np.nan, np.arange(50.0))
    assert regression.metrics(frame, prices) == regression.metrics(frame.iloc[kept], np.arange(50.0)[kept])


def test_the_rmse_of_nan_is_nan():
    from pefll.tasks.metrics import rmse

    assert np.isnan(rmse(np.array(np.nan), 3.0))
    assert rmse(np.array(-1e-9), 3.0) == 0.0
