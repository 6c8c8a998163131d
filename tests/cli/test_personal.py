"""`pefll personalize`, `predict` and `evaluate --per-client`: clients with their own files, good and bad ones."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from pefll.data import load_samples
from pefll.runs.personal import PersonalModel
from pefll.training import run
from tests.cli.conftest import SMALL, features, npz


def test_personalize_and_predict_by_files_are_the_python_api(pefll, refused, labelled, tmp_path, client):
    model, table = tmp_path / "me.safetensors", tmp_path / "p.csv"
    said = pefll("personalize", labelled, "--data", client, "--out", model)
    assert said.code == 0
    assert "a personal mlp from 25 samples" in said.out
    said = pefll("predict", model, "--data", client, "--out", table)
    assert said.code == 0
    with np.load(client) as arrays:
        x, y = arrays["x"], arrays["y"]
    chances = run.load(labelled).personalize(x, y).probabilities(x)
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [int(row["sample"]) for row in rows] == list(range(25))
    assert [int(row["predicted"]) for row in rows] == chances.argmax(1).tolist()
    np.testing.assert_allclose([float(row["probability"]) for row in rows], chances.max(1), atol=1e-6)
    assert f"{100 * (chances.argmax(1) == y).mean():.1f}% of 25 samples are right" in said.out
    np.testing.assert_array_equal(PersonalModel.load(model).probabilities(x), chances)
    steps = ("--set", "refine_steps=5", "--set", "refine_lr=0.1")
    assert pefll("personalize", labelled, "--data", client, "--out", tmp_path / "refined", *steps).code == 0
    refined = run.load(labelled).with_settings(refine_steps=5, refine_lr=0.1).personalize(x, y).probabilities(x)
    np.testing.assert_array_equal(PersonalModel.load(tmp_path / "refined").probabilities(x), refined)
    assert np.abs(refined - chances).max() > 1e-3
    said = pefll("predict", model, "--data", client)
    assert said.out.count("sample ") == 20
    assert "and 5 more" in said.out
    np.savez(tmp_path / "other.npz", x=x, y=np.where(y == 0, 12, y))
    refused("predict", model, "--data", tmp_path / "other.npz", match=r"\b12\b.*\b0\.\.9\b.*PEFLL-C013")


def test_class_names_with_commas_and_brackets(pefll, tmp_path):
    names = np.array(["plain", "with, comma", 'with "quotes"', "[bold]"])
    path = features(tmp_path / "named.npz", y=names[np.random.default_rng(0).integers(0, 4, 96)])
    out = tmp_path / "run[x]"
    said = pefll("train", "--data", path, *SMALL[2:], "--out", out)
    assert said.code == 0
    assert f"Next: pefll show {out}" in said.out
    assert "samples of 8 clients" in pefll("personalize", out, "--data", path, "--out", tmp_path / "m").err
    with np.load(path) as arrays:
        mine = arrays["client"] == arrays["client"][0]
        one = npz(tmp_path / "one.npz", x=arrays["x"][mine], y=arrays["y"][mine])
        path = npz(tmp_path / "all.npz", x=arrays["x"], y=arrays["y"])
    assert pefll("personalize", out, "--data", one, "--out", tmp_path / "m").code == 0
    assert pefll("predict", tmp_path / "m", "--data", path, "--out", tmp_path / "p.csv").code == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    model = PersonalModel.load(tmp_path / "m")
    with np.load(path) as arrays:
        wanted = [model.class_names[c] for c in model.predict(arrays["x"].astype(np.float32))]
    assert [row["predicted"] for row in rows] == wanted
    assert {row["predicted"] for row in rows} <= set(names.tolist())
    shown = pefll("predict", tmp_path / "m", "--data", path).out
    assert f"sample 0: {wanted[0]} (" in shown


def test_personal_models_are_ordinary_modules(labelled, client):
    with np.load(client) as arrays:
        x, y = arrays["x"], arrays["y"]
    model = run.load(labelled).personalize(x, y)
    assert isinstance(model, torch.nn.Module)
    (mean,), (std,) = model.spec.normalise
    plain = (x / 255 - mean) / std
    scores = model.network(torch.from_numpy(plain).float()).softmax(1)
    np.testing.assert_allclose(scores.detach().numpy(), model.probabilities(x), atol=1e-5)


def test_a_client_without_labels(pefll, refused, labelled, unlabelled, tmp_path):
    x = load_samples("digits", Path("data")).x[:9]
    bare = npz(tmp_path / "bare.npz", x=x)
    sentence = refused("personalize", labelled, "--data", bare, "--out", tmp_path / "m")
    assert "PEFLL-T122" in sentence
    assert "--set embedding=convnet-unlabeled" in sentence
    assert not (tmp_path / "m").exists()
    said = pefll("personalize", unlabelled, "--data", bare, "--out", tmp_path / "m")
    assert said.code == 0
    assert "right" not in said.out
    # And labels would not have made a difference.
    full = npz(tmp_path / "full.npz", x=x, y=np.arange(9))
    assert pefll("personalize", unlabelled, "--data", full, "--out", tmp_path / "n").code == 0
    a, b = (safetensors.torch.load_file(tmp_path / name) for name in "mn")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_scores_of_each_client(pefll, refused, labelled, tmp_path):
    said = pefll("evaluate", labelled, "--json", "--per-client", tmp_path / "c.csv")
    groups = json.loads(said.out)
    rows = list(csv.DictReader((tmp_path / "c.csv").open()))
    assert [row["client"] for row in rows] == [row["name"] for row in rows] == [str(number) for number in range(8)]
    for seen, group in (("1", "seen"), ("0", "unseen")):
        mine = [row for row in rows if row["seen"] == seen]
        for column, measure in (("correct", "per_sample"), ("masked", "masked"), ("loss", "loss")):
            total = sum(float(row[column]) for row in mine) / sum(int(row["samples"]) for row in mine)
            assert total == pytest.approx(groups[group][measure])
    assert float(rows[0]["accuracy"]) == pytest.approx(int(rows[0]["correct"]) / int(rows[0]["samples"]), abs=1e-6)
    assert pefll("evaluate", labelled, "--mask-labels", "--per-client", tmp_path / "m.csv").code == 0
    masked = list(csv.DictReader((tmp_path / "m.csv").open()))
    assert float(masked[0]["accuracy"]) == pytest.approx(int(rows[0]["masked"]) / int(rows[0]["samples"]), abs=1e-6)
    assert "PEFLL-A102" in refused("evaluate", labelled, "--per-client", tmp_path / "no" / "c.csv")


def test_samples_unlike_the_training_data(refused, labelled, tmp_path):
    y = np.zeros(4, dtype=np.int64)
    wrong = {
        "other channels": (
            np.zeros((4, 3, 8, 8), np.uint8),
            y,
            r"\(3, 8, 8\).*\(1, 8, 8\).*PEFLL-R117",
        ),
        "other size": (np.zeros((4, 1, 9, 8), np.uint8), y, r"\(1, 9, 8\).*PEFLL-R117"),
        "floats": (np.zeros((4, 1, 8, 8)), y, "PEFLL-R111"),
        "no such class": (np.zeros((4, 1, 8, 8), np.uint8), y + 10, r"label 10\b.*PEFLL-D139"),
        "more labels": (
            np.zeros((4, 1, 8, 8), np.uint8),
            np.zeros(5, dtype=np.int64),
            r"\b4 samples.*\by\b.*\b5\b.*PEFLL-D135",
        ),
    }
    for name, (x, labels, part) in wrong.items():
        path = npz(tmp_path / f"{name}.npz", x=x, y=labels)
        refused("personalize", labelled, "--data", path, "--out", tmp_path / "m", match=part)
    assert not (tmp_path / "m").exists()


def test_images_on_another_scale_get_a_note_and_a_guess_is_called_one(pefll, labelled, client, tmp_path, monkeypatch):
    with np.load(client) as arrays:
        x, y = arrays["x"], arrays["y"]
    dark = npz(tmp_path / "dark.npz", x=x // 16, y=y)
    notes = {}
    for data in (client, dark):
        model = tmp_path / f"{data.stem}.safetensors"
        for words in (("personalize", labelled, "--data", data, "--out", model), ("predict", model, "--data", data)):
            said = pefll(*words)
            assert said.code == 0
            notes[data.stem, words[0]] = said.err.count("up to 15,")
    assert notes == {("client", each): 0 for each in ("personalize", "predict")} | {
        ("dark", each): 1 for each in ("personalize", "predict")
    }
    half = npz(tmp_path / "half.npz", x=x[:4], y=np.array([3, 1, 3, 1]))
    monkeypatch.setattr(PersonalModel, "predict", lambda self, x: np.full(len(x), 3))
    said = pefll("personalize", labelled, "--data", half, "--out", tmp_path / "half.safetensors").out
    assert said.count("50.0%") == 2, "its accuracy, and that of the guess"
    assert "guess" in said
    one = npz(tmp_path / "one.npz", x=x[:4], y=np.full(4, 3))
    said = pefll("personalize", labelled, "--data", one, "--out", tmp_path / "one.safetensors").out
    assert said.count("100.0%") == 1, "a client of one class cannot be better than a guess"


def test_personalising_into_a_folder_that_is_not_there_yet(pefll, refused, labelled, client, tmp_path):
    assert pefll("personalize", labelled, "--data", client, "--out", tmp_path / "no" / "m.safetensors").code == 0
    assert (tmp_path / "no" / "m.safetensors").is_file()
    (tmp_path / "file").write_text("")
    said = refused("personalize", labelled, "--data", client, "--out", tmp_path / "file" / "m", match="PEFLL-A102")
    assert "space" not in said
    assert "PEFLL-M052" in refused("personalize", labelled, "--data", client, "--out", tmp_path / "m.pt")


def table(path: Path, label: str = "y", clients: int = 8) -> Path:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 96)
    x = rng.normal(size=(96, 2)) + y[:, None]
    rows = [f"{a},{b},{c},{n % clients}" for n, ((a, b), c) in enumerate(zip(x, y, strict=True))]
    path.write_text("\n".join([f"a,b,{label},client", *rows]))
    return path


def test_tables_whose_labels_have_another_name(pefll, refused, tmp_path):
    pytest.importorskip("pandas")
    named = table(tmp_path / "named.csv")
    small = (*SMALL[2:], "--out", tmp_path / "run")
    said = pefll("train", "--data", named, *small)
    assert said.code == 2
    assert re.search(r"column 'label'.* a, b, y, client\b.*--label .*PEFLL-D176", said.err)
    assert pefll("train", "--data", named, "--label", "y", *small).code == 0
    one = table(tmp_path / "one.csv", clients=1)
    wrong = ("--data", one, "--label", "z", "--out", tmp_path / "m")
    assert "PEFLL-M053" in refused("personalize", tmp_path / "run", *wrong)
    assert pefll("personalize", tmp_path / "run", "--data", one, "--out", tmp_path / "m").code == 0
    assert "no column 'z'" in pefll("predict", tmp_path / "m", "--data", one, "--label", "z").out
    assert "samples are right" in pefll("predict", tmp_path / "m", "--data", one).out


def test_models_that_are_none(pefll, refused, labelled, client, tmp_path):
    assert "PEFLL-R108" in refused("predict", tmp_path / "none", "--data", client)
    (tmp_path / "text").write_text("hello")
    assert "PEFLL-M013" in refused("predict", tmp_path / "text", "--data", client)
    assert "PEFLL-M013" in refused("predict", client, "--data", client)
    (tmp_path / "other").write_bytes(safetensors.torch.save({"a": torch.zeros(2)}))
    assert "PEFLL-M014" in refused("predict", tmp_path / "other", "--data", client)
    assert pefll("personalize", labelled, "--data", client, "--out", tmp_path / "m").code == 0
    content = (tmp_path / "m").read_bytes()
    for size in (0, 4, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:size])
        assert "PEFLL-M013" in refused("predict", tmp_path / "cut", "--data", client)
    bad = npz(tmp_path / "bad.npz", x=np.zeros((2, 1, 7, 7), np.uint8))
    refused("predict", tmp_path / "m", "--data", bad, match=r"\(1, 7, 7\).*\(1, 8, 8\).*PEFLL-R117")


def test_files_that_are_there_are_overwritten_only_when_asked(pefll, refused, labelled, client, tmp_path):
    model = tmp_path / "me.safetensors"
    assert pefll("personalize", labelled, "--data", client, "--out", model).code == 0
    for option, arguments in (
        ("--out", ("personalize", labelled, "--data", client)),
        ("--out", ("predict", model, "--data", client)),
        ("--per-client", ("evaluate", labelled)),
        ("--picture", ("data", "summary", "digits", "--clients", 6)),
    ):
        path = tmp_path / f"{arguments[0]}.{'png' if option == '--picture' else 'safetensors'}"
        path.write_text("mine")
        said = refused(*arguments, option, path)
        assert said.startswith(f"{path} ")
        assert re.search(rf"{option}\b.*--force\b", said)
        assert "PEFLL-C010" in said
        assert path.read_text() == "mine"
        assert pefll(*arguments, option, path, "--force").code == 0
        assert path.read_bytes() != b"mine"
