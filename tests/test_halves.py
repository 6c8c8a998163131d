"""Embedder and generator: each alone, from files too, and together the bits of `Run.personalize`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pefll
from pefll.core.errors import PefllError
from pefll.runs import halves, modelfile
from tests.at_once import both
from tests.test_documents import ROOT, python_of

SMALL = {"rounds": 2, "clients_per_round": 2, "local_steps": 1, "processes": 1}
OWN = "tests.test_halves:Own"
MODEL = "tests.test_halves:build"


def build(input_shape, classes):
    return nn.Sequential(nn.Linear(input_shape[0], 5), nn.Tanh(), nn.Linear(5, classes))


@dataclasses.dataclass(frozen=True)
class Own(pefll.PeFLL):
    """A user's method: PeFLL with descriptors of at most 1."""

    def generate(self, server, eta_h, v):
        return super().generate(server, eta_h, v.clamp(-1, 1))


def table(shape=(6,), clients=8, rows=9, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, clients * rows)
    x = rng.normal(size=(len(y), *shape)).astype(np.float32)
    return x, y, np.repeat(np.arange(clients), rows)


@pytest.fixture(scope="module")
def run():
    return pefll.fit(pefll.federation_from_arrays(*table()), **SMALL)


@pytest.fixture
def files(run, tmp_path):
    run.embedder().save(tmp_path / "client.safetensors")
    run.generator().save(tmp_path / "server.safetensors")
    return tmp_path / "client.safetensors", tmp_path / "server.safetensors"


def same(model, other):
    assert model.spec == other.spec
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("method", "settings", "shape"),
    [
        ("pefll", {}, (6,)),
        ("pefll", {"embedding": "mlp-unlabeled", "server_average": 0.5}, (6,)),
        ("pefll-prior", {"precision": "float64"}, (6,)),
        ("pefll-plus", {}, (1, 8, 8)),
        (OWN, {"model": MODEL}, (6,)),
    ],
)
def test_both_halves_together_have_the_bits_of_the_run(method, settings, shape, tmp_path):
    x, y, client = table(shape)
    if len(shape) == 3:
        x = (40 * x + 128).clip(0, 255).astype(np.uint8)
    trained = pefll.fit(pefll.federation_from_arrays(x, y, client), method, **SMALL | settings)
    labels = trained.embedder().uses_labels
    trained.embedder().save(tmp_path / "c")
    trained.generator().save(tmp_path / "s")
    own = {"method": OWN} if method == OWN else {}
    embedder = pefll.Embedder.load(tmp_path / "c", **own)
    generator = pefll.Generator.load(tmp_path / "s", **own | ({"model": MODEL} if own else {}))
    theirs = [(x[client == one], y[client == one] if labels else None) for one in range(4)]
    sent = [embedder.describe(*samples) for samples in theirs]
    assert all(v.shape == (embedder.size,) == (generator.size,) for v in sent)
    assert all(
        np.array_equal(v, trained.embedder().describe(*samples)) for v, samples in zip(sent, theirs, strict=True)
    )
    made = [trained.generate(sent), generator.generate(np.array(sent).tolist())]
    for number, samples in enumerate(theirs):
        wanted = trained.personalize(*samples)
        assert all(same(models[number], wanted) for models in made)
    assert not same(made[0][0], made[0][1]), "clients differ"


def test_frames_saved_runs_and_other_names_of_columns(tmp_path):
    pandas = pytest.importorskip("pandas")
    x, y, client = table()
    frame = pandas.DataFrame(x, columns=list("abcdef")).assign(colour=np.array(["r", "g", "b"])[y], user=client)
    federation = pefll.federation_from_frame(frame, label="colour", client="user")
    trained = pefll.fit(federation, **SMALL, out=tmp_path / "run")
    pefll.load(tmp_path / "run").embedder().save(tmp_path / "c")
    mine = frame[frame.user == 3][["c", "a", "b", "d", "e", "f", "colour", "user"]]
    v = pefll.Embedder.load(tmp_path / "c").describe(mine)
    (model,) = trained.generate(v[None])
    assert same(model.of_client(3), trained.personalize(mine)), "a descriptor does not name its client"
    assert set(model.predict(mine, names=True)) <= {"r", "g", "b"}
    with pytest.raises(PefllError, match="PEFLL-M037"):
        trained.embedder().describe(frame)


def test_threads_share_them(run):
    x, y, client = table()
    embedder, generator = run.embedder(), run.generator()

    def model_of(one):
        return generator.generate(embedder.describe(x[client == one], y[client == one])[None])[0]

    alone = [model_of(one) for one in range(8)]
    for together in both(lambda _: [model_of(one) for one in range(8)]):
        assert all(same(a, b) for a, b in zip(alone, together, strict=True))


def test_a_run_that_has_no_halves_says_so(run):
    x, y, client = table()
    federation = pefll.federation_from_arrays(x, y, client)
    for method in ("fedavg", "knn-per", "local"):
        other = pefll.fit(federation, method, **SMALL) if method != "local" else None
        other = other or pefll.fit(federation, method, rounds=0, processes=1, epochs=1)
        for ask in (other.embedder, other.generator, lambda other=other: other.generate([[0.0]])):
            with pytest.raises(PefllError, match="PEFLL-T621"):
                ask()
    refining = run.with_settings(refine_steps=3)
    with pytest.raises(PefllError, match="PEFLL-T624"):
        refining.embedder()
    assert same(
        refining.with_settings(refine_steps=0).generate([run.embedder().describe(x[:9], y[:9])])[0],
        run.personalize(x[:9], y[:9]),
    )


def test_what_is_no_descriptor(run):
    good = np.zeros((2, run.generator().size))
    assert len(run.generate(torch.tensor(good))) == 2
    assert run.generate(good[:0]) == []
    bad = good.copy()
    bad[1, 0] = np.nan
    for value, code in (
        (good[0], "PEFLL-T623"),
        (good[:, 1:], "PEFLL-T623"),
        ([[1.0], [1.0, 2.0]], "PEFLL-T623"),
        (good.astype(str), "PEFLL-T623"),
        ("abc", "PEFLL-T623"),
        (None, "PEFLL-T623"),
        (bad, "PEFLL-T622"),
    ):
        with pytest.raises(PefllError, match=code):
            run.generator().each(value)
    for huge in (1e300, 1e38):
        with pytest.raises(PefllError, match="PEFLL-T629"):
            run.generate(huge * (good + 1))
    with pytest.raises(PefllError, match="PEFLL-T122"):
        run.embedder().describe(np.zeros((3, 6)))


def test_files_that_cannot_be_used(run, files, tmp_path):
    client, server = files
    with pytest.raises(PefllError, match="PEFLL-R620"):
        run.embedder().save(client)
    run.embedder().save(client, overwrite=True)
    diverged = {name: value * torch.nan for name, value in run.embedder().tensors.items()}
    with pytest.raises(PefllError, match="PEFLL-M624"):
        dataclasses.replace(run.embedder(), tensors=diverged).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(PefllError, match="PEFLL-R621"):
        pefll.Embedder.load(tmp_path / "nowhere")
    for load, path, other in ((pefll.Embedder.load, client, server), (pefll.Generator.load, server, client)):
        with pytest.raises(PefllError, match="PEFLL-M014"):
            load(other)
        content = path.read_bytes()
        with pytest.raises(PefllError, match="PEFLL-T620"):
            load(path, method="fedavg")
        for damage in (content[:-1], content[:40], b"", content + b"0", content[:-3] + bytes(3)):
            path.write_bytes(damage)
            with pytest.raises(PefllError, match=r"PEFLL-M01[0-7]"):
                load(path)
        path.write_bytes(content)
        assert load(path)


def rewritten(path: Path, kind, tensors=None, spec=None, **origin):
    """Write a file with a right hash, as a stranger may."""
    header = modelfile.read_header(path, kind)
    whole = modelfile.read_tensors(path, header) | (tensors or {})
    method = json.loads(header.texts["method"]) | origin
    content = header.spec.to_json() | (spec or {})
    path.write_bytes(modelfile.to_bytes(whole, json.dumps(content), {"method": json.dumps(method)}, kind))


@pytest.mark.parametrize("which", [0, 1])
def test_files_of_a_stranger(which, files):
    path = files[which]
    kind, load = ((halves.EMBEDDER, pefll.Embedder.load), (halves.GENERATOR, pefll.Generator.load))[which]
    whole, content = modelfile.read_tensors(path, modelfile.read_header(path, kind)), path.read_bytes()
    name = next(iter(sorted(whole)))
    changes = [
        ({"settings": {"descriptor_size": 10**9}}, "M622"),
        ({"settings": {"descriptor_size": 10**17}}, "(M622|M010)"),
        ({"settings": {"descriptor_size": -1}}, "M010"),
        ({"settings": {"hypernetwork": "XXL", "embedding": "huge"}}, "."),
        ({"settings": {"refine_steps": 1}}, "T624"),
        ({"settings": [1]}, "M010"),
        ({"name": "os:system"}, "M001"),
        ({"name": "nothing"}, "M010"),
        ({"name": "fedavg", "settings": {}}, "T621"),
        ({"seed": -1}, "M010"),
        ({"seed": "0"}, "M010"),
        ({"more": 1}, "M010"),
        ({"spec": {"classes": 2**31}}, "(M622|M010|L007)"),
        ({"spec": {"input_shape": [2**31]}}, "(M622|M010|L007)"),
        ({"tensors": {name: whole[name].double()}}, "M622"),
        ({"tensors": {name: whole[name][:-1]}}, "M622"),
        ({"tensors": {"more": torch.zeros(1)}}, "M622"),
        ({"tensors": {name: whole[name] * torch.nan}}, "M623"),
    ]
    for change, code in changes:
        rewritten(path, kind, **change)
        with pytest.raises(PefllError, match=f"PEFLL-{code}"):
            load(path)
        path.write_bytes(content)
    rewritten(path, kind)
    assert load(path)


def test_the_file_of_a_model_of_your_own(tmp_path):
    x, y, client = table()
    module = build((6,), 3)
    trained = pefll.fit(pefll.federation_from_arrays(x, y, client), model=module, **SMALL)
    trained.embedder().save(tmp_path / "c")
    trained.generator().save(tmp_path / "s")
    v = pefll.Embedder.load(tmp_path / "c").describe(x[:9], y[:9])  # a client needs no model for its descriptor
    with pytest.raises(PefllError, match="PEFLL-M621"):
        pefll.Generator.load(tmp_path / "s")
    with pytest.raises(PefllError, match="PEFLL-M050"):
        pefll.Generator.load(tmp_path / "s", model=3)
    with pytest.raises(PefllError, match="PEFLL-N027"):
        pefll.Generator.load(tmp_path / "s", model=nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
    (model,) = pefll.Generator.load(tmp_path / "s", model=module).generate(v[None])
    assert same(model, trained.personalize(x[:9], y[:9]))


def test_the_example_of_a_product(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = python_of(ROOT / "docs" / "product.md", "pefll.Embedder.load")
    assert sum(1 for line in code.splitlines() if line) <= 15
    names = {}
    exec(code.replace("rounds=100", "rounds=2, model='tiny', local_steps=1, clients_per_round=2, processes=1"), names)
    samples, model = names["samples"], names["model"]
    assert same(model, names["run"].personalize(samples.x[:20], samples.y[:20]))
    assert capsys.readouterr().out == f"{model.predict(samples.x[:5])}\n"


class Halved(nn.Module):
    uses_labels = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x)


def test_an_embedder_with_an_own_network_needs_the_network_again(tmp_path):
    x, y, client = table()
    method = pefll.PeFLL(embedding=Halved(), local_steps=1)
    run = pefll.fit(pefll.federation_from_arrays(x, y, client), method, rounds=2, clients_per_round=2, processes=1)
    paths = tmp_path / "client.safetensors", tmp_path / "server.safetensors"
    run.embedder().save(paths[0])
    run.generator().save(paths[1])
    with pytest.raises(PefllError, match="PEFLL-N535"):
        pefll.Embedder.load(paths[0])
    for kind, path in zip((pefll.Embedder, pefll.Generator), paths, strict=True):
        with pytest.raises(PefllError, match="PEFLL-N548"):
            kind.load(path, embedding=Halved(), hypernetwork=Halved())
    v = pefll.Embedder.load(paths[0], embedding=Halved()).describe(x[:5])
    (model,) = pefll.Generator.load(paths[1]).generate(v[None])
    assert same(model, run.personalize(x[:5]))


def test_the_halves_of_a_run_on_a_table_take_raw_rows(tmp_path):
    pd = pytest.importorskip("pandas")
    x, y, client = table((2,))
    frame = pd.DataFrame({"income": 1000 * x[:, 0], "town": np.where(x[:, 1] > 0, "Rome", "Oslo"), "label": y})
    frame.loc[3, "income"] = np.nan
    run = pefll.fit(pefll.federation_from_frame(frame.assign(client=client), "label", "client", unseen=0.2), **SMALL)
    run.embedder().save(tmp_path / "client.safetensors")
    run.generator().save(tmp_path / "server.safetensors")
    mine = frame[client == 2]
    v = pefll.Embedder.load(tmp_path / "client.safetensors").describe(mine)
    (model,) = pefll.Generator.load(tmp_path / "server.safetensors").generate(v[None])
    theirs = run.personalize(mine)
    assert same(model, theirs)
    np.testing.assert_array_equal(model.predict(mine), theirs.predict(mine))


class OfNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6 + 2, 4)

    def forward(self, x, y):
        return self.linear(torch.cat([x, y], dim=1))


def test_an_own_embedding_network_gets_the_encoded_labels_of_a_regression(tmp_path):
    x, _, client = table()
    y = np.stack([x[:, 0] + x[:, 1], x[:, 2]], axis=1)
    federation = pefll.federation_from_arrays(x, y, client)
    run = pefll.fit(federation, pefll.PeFLL(embedding=OfNumbers(), local_steps=1), rounds=2, processes=1)
    assert run.method.descriptor == 4
    run.embedder().save(tmp_path / "client.safetensors")
    run.generator().save(tmp_path / "server.safetensors")
    v = pefll.Embedder.load(tmp_path / "client.safetensors", embedding=OfNumbers()).describe(x[:5], y[:5])
    (model,) = pefll.Generator.load(tmp_path / "server.safetensors").generate(v[None])
    assert same(model, run.personalize(x[:5], y[:5]))
    assert run.predictions(federation.name_of(0)).predicted.shape == (int(federation.count[2, 0]), 2)
