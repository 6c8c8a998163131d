"""`pefll certify`: pages, files and errors for run folders, result files and personal models."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import pefll as pefll_package
from benchmarks import held_out_certificates
from pefll.core.files import write_json
from pefll.data import load_samples
from pefll.guarantees.held_out import at_least, mean_statements
from pefll.guarantees.statement import Statement
from pefll.runs.personal import PersonalModel
from pefll.runs.record import RunFolder
from pefll.training import certificate, run
from tests.cli.conftest import npz, trained

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results/cifar10-pefll-n1000-embedding_convnet-client_lr_0.0005-server_lr_0.0005-bf16-seed0.json"


@pytest.fixture(scope="session")
def many_unseen(tmp_path_factory):
    """A run whose federation has six unseen clients."""
    return trained(tmp_path_factory, "certified", "--clients", "12", "--unseen", "0.5")


@pytest.fixture
def folder(many_unseen, tmp_path):
    return Path(shutil.copytree(many_unseen, tmp_path / "run"))


def accuracies(folder: Path) -> list[float]:
    counts = RunFolder(folder).summary()["client_counts"]["unseen"]
    return [k / m for k, m in zip(counts["correct"], counts["samples"], strict=True)]


def test_a_run_folder_gets_its_certificate_and_its_models_carry_it(pefll, refused, folder, tmp_path):
    target, card, picture = tmp_path / "c.json", tmp_path / "CARD.md", tmp_path / "c.svg"
    before = RunFolder(folder).summary()
    files = ("--out", target, "--card", card, "--plot", picture)
    said = pefll("certify", folder, "--delta", "0.1", "--share", "0.5", *files)
    assert said.code == 0, said
    bound = mean_statements(accuracies(folder), 0.1)[0].bound
    assert f"≥ {at_least(bound)}" in said.out
    assert "Assumes" in said.out
    assert "by-class" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    certificate = json.loads(target.read_text())
    assert certificate["statements"][0]["bound"] == bound
    assert certificate["statements"][0]["confidence"] == 0.9
    summary = RunFolder(folder).summary()  # its check is right again
    assert summary == before | {"certificate": certificate}
    assert at_least(bound) in card.read_text()
    assert "# pefll on digits" in card.read_text()
    assert picture.read_text().startswith("<?xml")
    assert pefll("show", folder, "--out", tmp_path).code == 0
    assert pefll("certify", folder, "--no-bounds").code == 0
    assert RunFolder(folder).summary()["certificate"]["delta"] == 0.05  # replaced
    refused("certify", folder, "--out", target, match="exists already.*--force.*C010")

    headline = RunFolder(folder).summary()["certificate"]["headline"]
    assert "with confidence 95%" in headline
    samples = load_samples("digits")
    mine = npz(tmp_path / "mine.npz", x=samples.x[:40], y=samples.y[:40])
    model = tmp_path / "me.safetensors"
    said = pefll("personalize", folder, "--data", mine, "--out", model)
    assert headline in said.out
    loaded = PersonalModel.load(model)
    assert loaded.spec.certificate == headline
    assert headline in repr(loaded)
    assert headline in pefll("certify", model).out
    refined = run.load(folder).with_settings(refine_steps=1)  # the certificate is about other models
    assert refined.personalize(samples.x[:40], samples.y[:40]).spec.certificate is None


def test_a_model_and_the_clients_own_samples(pefll, refused, folder, tmp_path):
    samples = load_samples("digits")
    x, y = samples.x, samples.y
    mine, more = npz(tmp_path / "a.npz", x=x[:40], y=y[:40]), npz(tmp_path / "b.npz", x=x[40:160], y=y[40:160])
    model = tmp_path / "me.safetensors"
    pefll("personalize", folder, "--data", mine, "--out", model)
    refused("certify", model, match="needs labelled samples.*--data.*G146")
    said = pefll("certify", model, "--data", more, "--delta", "0.1", "--width", "0.2", "--out", tmp_path / "m.json")
    right = int((PersonalModel.load(model).predict(x[40:160]) == y[40:160]).sum())
    bound = stats.beta.ppf(0.1, right, 121 - right)
    found = json.loads((tmp_path / "m.json").read_text())
    assert found["bound"] == pytest.approx(bound, abs=1e-9)
    assert f"at least {at_least(bound)}, with confidence 90%" in said.out
    # What nobody can check comes first.
    assert re.match(r"Note: the bound from \S*b\.npz holds only if none of its samples made this model", said.out)
    assert "of 120 samples" in said.out
    # Of 76 samples, the interval of half is 0.2 wide at most; scipy agrees.
    assert "Least number: 76 labelled samples" in said.out
    wide = [
        stats.beta.ppf(0.95, n // 2 + 1, n - n // 2) - stats.beta.ppf(0.05, n // 2, n - n // 2 + 1) for n in (75, 76)
    ]
    assert wide[0] > 0.2 >= wide[1]
    as_json = json.loads(pefll("certify", model, "--data", more, "--delta", "0.1", "--json").out)
    assert as_json["bound"] == found["bound"]
    assert "none of its samples made this model" in as_json["notes"][0]

    bare = npz(tmp_path / "bare.npz", x=x[:5])
    refused("certify", model, "--data", bare, match="no labelled sample.*G147")
    strange = npz(tmp_path / "strange.npz", x=x[:5], y=[1, 2, 3, 4, 17])
    refused("certify", model, "--data", strange, match=r"\b17\b.*0 to 9.*G131")
    of_two = npz(tmp_path / "two.npz", x=x[:5], y=y[:5], client=np.array([1, 1, 1, 2, 2]))
    refused("certify", model, "--data", of_two, match="samples of 2 clients.*M034")
    refused("certify", model, "--width", "1.5", match="width is 1.5.*G104")
    refused("certify", model, "--width", "0.00001", match="at least 0.001.*G107")
    refused("certify", model, "--data", more, "--delta", "1", match="delta is 1.*G103")
    refused("certify", model, "--share", "0.5", match="--share.*about runs.*G143")
    refused("certify", mine, match="neither a run folder.*G148")
    refused("certify", folder, "--data", more, match="--data.*is a run.*G144")


def test_a_committed_result_needs_no_data(pefll, refused, tmp_path):
    content = COMMITTED.read_bytes()
    said = pefll("certify", COMMITTED, "--json")
    found = json.loads(said.out)["certificate"]
    rows = {row["name"]: row for row in found["statements"]}
    assert found["clients"] == 100
    counts = json.loads(content)["client_counts"]["unseen"]
    values = np.array(counts["correct"]) / counts["samples"]
    assert rows["mean-betting"]["measured"] == pytest.approx(values.mean())
    assert rows["mean-hoeffding"]["bound"] == pytest.approx(values.mean() - np.sqrt(np.log(20) / 200))
    # The best certificate of the three is the one that was named beforehand.
    assert 0.8 < rows["mean-betting"]["bound"] < values.mean()
    assert rows["mean-betting"]["bound"] > rows["mean-bernstein"]["bound"] > 0
    rank = max(r for r in range(1, 100) if stats.binom.cdf(r - 1, 100, 0.1) <= 0.05)
    assert rows["share-measured"]["bound"] == np.sort(values)[rank - 1]
    assert COMMITTED.read_bytes() == content
    refused("certify", COMMITTED, "--share", "0.99", match="needs 299 unseen clients, but there are 100.*G110")
    refused("certify", COMMITTED, "--share", "1.5", match="share of clients is 1.5.*G104")
    refused("certify", COMMITTED, "--width", "0", match="width is 0.*G104")
    refused("certify", COMMITTED, "--out", tmp_path / "c.txt", match=r"a \.json file, not c\.txt.*G141")


def unlike(**changed: object) -> dict[str, object]:
    return json.loads(COMMITTED.read_text()) | {"measured": {}} | changed  # it also has bounds over training


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"client_counts": None}, "no test counts of single clients.*G121"),
        ({"split": "validation"}, "trial of a search.*validation samples.*G120"),
        ({"client_counts": {"unseen": {"samples": [], "correct": []}}}, "has no unseen client.*G123"),
        ({"client_counts": {"unseen": {"samples": [9], "correct": [3]}}}, "has 1 unseen client.*at least 2.*G123"),
        (
            {"client_counts": {"unseen": {"samples": [9, 0], "correct": [3, 0]}}},
            "2 unseen clients, 1 of them without a test figure.*G123",
        ),
        ({"client_counts": {"unseen": {"samples": [9, 9], "correct": [3, float("nan")]}}}, "damaged.*G122"),
        ({"client_counts": {"unseen": {"samples": [9, 9], "correct": [3, 10]}}}, "damaged.*G122"),
        ({"client_counts": {"unseen": {"samples": [9, 9]}}}, "damaged.*G122"),
        (
            {"client_counts": None, "client_metrics": {"unseen": {"samples": [2], "rmse": [1]}}},
            "rmse.*no largest.*G124",
        ),
        (
            {"client_counts": None, "client_metrics": {"unseen": {"samples": [2, 3], "micro_f1": [1.5, 0.5]}}},
            "damaged.*G122",
        ),
    ],
)
def test_results_that_promise_nothing_are_refused(refused, tmp_path, changed, match):
    write_json(tmp_path / "result.json", unlike(**changed))
    refused("certify", tmp_path / "result.json", match=match)


def test_other_metrics_between_0_and_1(pefll, tmp_path):
    figures = {"samples": [5] * 40, "micro_f1": [0.5, 0.75] * 19 + [None, 1.0]}
    write_json(tmp_path / "r.json", unlike(client_counts=None, client_metrics={"unseen": figures}))
    said = pefll("certify", tmp_path / "r.json")
    assert said.code == 0, said
    assert "39 unseen clients" in said.out
    assert "1 unseen client" in " ".join(said.out.split())
    assert "true" not in said.out.split("Assumes")[0]  # a metric on few samples is not that on many
    assert "expected micro F1" in " ".join(said.out.replace("│", " ").split())


def test_wrong_paths(refused, tmp_path, folder):
    refused("certify", tmp_path / "nothing", match="there is no.*G142")
    refused("certify", tmp_path, match="not a run folder.*R119")
    write_json(tmp_path / "other.json", {"method": "pefll"})
    refused("certify", tmp_path / "other.json", match="not the result of a run.*G125")
    write_json(tmp_path / "list.json", [1, 2])
    refused("certify", tmp_path / "list.json", match="list.json is not the result of a run.*G125")
    (tmp_path / "notes.txt").write_text("these are words, and no model")
    refused("certify", tmp_path / "notes.txt", match="notes.txt is neither a run folder, nor.*G148")
    (tmp_path / "cut.safetensors").write_bytes(b"\x00")
    refused("certify", tmp_path / "cut.safetensors", match="not a safetensors file.*M013")
    (tmp_path / "broken.json").write_text("{")
    refused("certify", tmp_path / "broken.json", match="is damaged.*A105")
    (folder / "summary.json").unlink()
    refused("certify", folder, match="is not finished.*G126")


@pytest.fixture(scope="session")
def none_unseen(tmp_path_factory):
    """A run with a prior whose clients all took part in training."""
    return trained(tmp_path_factory, "everyone", "--clients", "12", "--unseen", "0", "--prior-clients", "0.5")


def test_a_run_without_unseen_clients_has_the_bounds_over_training(pefll, refused, none_unseen, tmp_path):
    folder = Path(shutil.copytree(none_unseen, tmp_path / "run"))
    said = pefll("certify", folder, "--plot", tmp_path / "c.svg", "--card", tmp_path / "CARD.md")
    assert said.code == 0, said
    words = " ".join(said.out.replace("│", " ").split())
    assert "This run has no unseen client, so it has no bound from unseen clients" in words
    assert "betting" not in words
    assert "are not independent" in words  # what by-class means for bounds over training, too
    found = RunFolder(folder).summary()["certificate"]
    assert {row["name"] for row in found["statements"]} >= {"theorem-3.2-unequal", "prior-half", "query"}
    assert (found["clients"], found["headline"]) == (0, None)
    assert "Theorem 3.2" in (tmp_path / "CARD.md").read_text()
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")
    samples = load_samples("digits")
    mine = npz(tmp_path / "mine.npz", x=samples.x[:40], y=samples.y[:40])
    pefll("personalize", folder, "--data", mine, "--out", tmp_path / "me.safetensors")
    assert PersonalModel.load(tmp_path / "me.safetensors").spec.certificate is None

    refused("certify", folder, "--share", "0.5", match=rf"{folder} has no unseen client.*at least 2.*G123")
    refused("certify", folder, "--no-bounds", match=rf"{folder} has no unseen client.*G123")
    shutil.rmtree(folder / "checkpoints")
    refused("certify", folder, match=rf"{folder} has no unseen client, and.*checkpoints in .* are gone.*G128")


def test_a_run_whose_checkpoints_are_gone_keeps_what_its_unseen_clients_say(pefll, folder):
    shutil.rmtree(folder / "checkpoints")
    said = pefll("certify", folder)
    assert said.code == 0, said
    assert "betting" in said.out
    words = " ".join(said.out.split())
    assert f"There is no bound from training: the checkpoints in {folder / 'checkpoints'} are gone" in words
    assert "start" not in words.split("Notes")[1]


def test_what_cannot_be_is_refused_before_bounds_are_computed(refused, folder, tmp_path, monkeypatch):
    def expensive(*_: object) -> None:
        raise AssertionError("the bounds were computed")

    monkeypatch.setattr(certificate, "meta_bounds", expensive)
    refused("certify", folder, "--share", "1.5", match="share of clients is 1.5.*G104")
    refused("certify", folder, "--share", "0.99", match="needs 299 unseen clients, but there are 6.*G110")
    refused("certify", folder, "--width", "0.0001", match="at least 0.001.*G107")
    refused("certify", folder, "--plot", tmp_path / "c.xyz", match=r"c\.xyz.*\.png, \.pdf or \.svg.*O009")
    (tmp_path / "file").write_text("no folder")
    refused("certify", folder, "--card", tmp_path / "file" / "CARD.md", match="cannot write.*A102")


def test_errors_name_the_run(refused, tmp_path):
    """A run folder whose figures promise nothing, with its networks."""
    random = np.random.default_rng(0)
    x, client = random.normal(size=(120, 3)), np.repeat(np.arange(6), 20)
    for folder, labels, task, unseen, match in (
        ("numbers", x.sum(1), pefll_package.Regression(), 0.5, "is scored by rmse.*G124"),
        ("classes", (x.sum(1) > 0).astype(int), None, 0.0, "has no unseen client, and there is no bound.*FedAvg.*G128"),
    ):
        federation = pefll_package.federation_from_arrays(x, labels, client, unseen=unseen)
        method = pefll_package.PeFLL(local_steps=1) if task else "fedavg"
        pefll_package.fit(federation, method, task=task, rounds=1, device="cpu", out=tmp_path / folder)
        refused("certify", tmp_path / folder, match=f"^error: {tmp_path / folder} {match}")


def test_a_run_on_arrays_is_told_where_its_bounds_are(pefll, tmp_path):
    random = np.random.default_rng(0)
    x, client = random.normal(size=(160, 3)), np.repeat(np.arange(8), 20)
    federation = pefll_package.federation_from_arrays(x, (x.sum(1) > 0).astype(int), client, unseen=0.5)
    trained_now = pefll_package.fit(federation, pefll_package.PeFLL(), rounds=1, device="cpu", out=tmp_path / "run")
    words = " ".join(pefll("certify", tmp_path / "run").out.split())
    assert "given in Python; give it to run.certify(federation=...) there." in words
    assert "--data" not in words  # which a run refuses
    loaded = run.load(tmp_path / "run")
    names = [one.name for one in loaded.certify(federation=federation).statements]
    assert names == [one.name for one in trained_now.certify().statements]
    assert "theorem-3.2" in names


STORED = Statement("query", "Error of new clients", 0.12, 0.34, False, 0.95, "It is at most 0.34.", "Own words.")


def stored(**changed: object) -> dict[str, object]:
    kept = {"delta": 0.05, "points": [{"round": 7, "unseen_error": 0.1, "bounds": {}}], "statements": [STORED.row()]}
    return unlike(measured={"certificates": kept | changed})


def test_a_result_shows_the_bounds_that_reproduce_certificates_stored(pefll, refused, tmp_path):
    path = tmp_path / "r.json"
    write_json(path, stored())
    found = json.loads(pefll("certify", path, "--json").out)["certificate"]
    assert found["statements"][-1] == STORED.row()
    assert any("after round 7" in note for note in found["notes"])
    assert "≤ 34.0%" in pefll("certify", path).out
    other = json.loads(pefll("certify", path, "--delta", "0.1", "--json").out)["certificate"]
    assert all(row["name"] != "query" for row in other["statements"])
    assert any("1 bound" in note and "δ = 0.05" in note and "--delta 0.05" in note for note in other["notes"])

    none = {"unseen": {"samples": [], "correct": []}}
    write_json(path, stored() | {"num_unseen": 0, "client_counts": none})
    alone = json.loads(pefll("certify", path, "--json").out)["certificate"]
    assert [row["name"] for row in alone["statements"]] == ["query"]
    refused("certify", path, "--delta", "0.1", match=r"no unseen client.*made for δ = 0\.05.*--delta 0\.05.*G128")
    for damage in (
        {"delta": None},
        {"delta": 10**400},
        {"statements": [{"name": "x"}]},
        {"statements": [STORED.row() | {"bound": "x"}]},
    ):
        write_json(path, stored(**damage))
        refused("certify", path, match="r.json is damaged: its bounds over training.*G127")


def test_a_folder_that_is_missing_is_made(tmp_path, monkeypatch, capsys):
    shutil.copy(COMMITTED, tmp_path)
    out = tmp_path / "new" / "folder"
    monkeypatch.setattr("sys.argv", ["held_out_certificates", "--results", str(tmp_path), "--out", str(out)])
    held_out_certificates.main()
    assert "| cifar10 | 1000 | 0 | 100 |" in capsys.readouterr().out
    assert json.loads((out / "certificates_held_out.json").read_text())["certificates"]


def test_texts_from_a_stranger_do_not_reach_the_terminal(pefll, folder, tmp_path):
    summary = json.loads((folder / "summary.json").read_text())
    evil = "\x1b[2J\x1b]0;x\x07\ud800"
    file, card = tmp_path / "result.json", tmp_path / "card.md"
    file.write_text(json.dumps(summary | {"dataset": evil, "partition": evil, "command": evil}))
    said = pefll("certify", file, "--card", card)
    assert said.code == 0
    assert "[2J]0;x\ufffd" in said.out
    assert "\x1b" not in said.out + said.err + card.read_text()
    model, samples = tmp_path / "m.safetensors", load_samples("digits")
    personal = run.load(folder).personalize(samples.x[:40], samples.y[:40])
    personal.spec = dataclasses.replace(personal.spec, certificate=f"mean {evil[:-1]}")
    personal.save(model)
    said = pefll("certify", model, "--width", "0.2")
    assert said.code == 0
    assert "By its run: mean [2J]0;x." in said.out
    assert "\x1b" not in said.out + said.err


def test_a_pipe_is_not_read(refused, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "PEFLL-G150" in refused("certify", tmp_path / "pipe", match="pipe or a device")
