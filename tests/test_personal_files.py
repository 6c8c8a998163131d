"""The file of a personal model tells when it is damaged, and a stranger's file costs nothing but a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from pefll.core.errors import PefllError
from pefll.models import MLP
from pefll.models.spec import ModelSpec
from pefll.runs import modelfile
from pefll.runs.personal import PersonalModel
from tests.cli.conftest import pefll  # noqa: F401 - a fixture
from tests.faults.personal_models import DAMAGES, campaign

CONTENT = {
    "model": "mlp",
    "input_shape": [2],
    "classes": 2,
    "normalise": None,
    "tokens": False,
    "class_names": ["a", "b"],
    "feature_names": ["left", "right"],
    "num_clients": 2,
}
SPEC = ModelSpec.from_json(CONTENT)


@pytest.fixture
def path(tmp_path):
    PersonalModel(MLP((2,), 2), SPEC).save(tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_every_byte_counts(path):
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        with pytest.raises(PefllError):
            PersonalModel.load(path)
    path.write_bytes(content)
    PersonalModel.load(path)


def test_damages_of_all_kinds(tmp_path):
    """As `python -m tests.faults.personal_models`, with fewer damages."""
    figures = campaign(count=20 * len(DAMAGES), seed=1, processes=1, folder=tmp_path)
    assert (figures["accepted_silently"], figures["tracebacks"]) == (0, 0), figures["not_refused"]
    assert figures["accepted_identical"] == 0
    assert figures["peak_memory_grew_by_megabytes"] < 500


def test_the_campaign_sees_a_hash_that_nobody_looks_at(tmp_path, monkeypatch):
    monkeypatch.setattr(modelfile, "_hash_is_right", lambda content: True)
    figures = campaign(count=3 * len(DAMAGES), seed=2, processes=0, folder=tmp_path)
    assert figures["accepted_silently"] > 0


def test_small_files_that_ask_for_much_cost_nothing(tmp_path):
    weights = MLP((2,), 2).state_dict()
    for name, shape in {"one": [10**9], "many": [10**9, 10**9], "most": [2**31, 1, 1]}.items():
        content = modelfile.to_bytes(weights, json.dumps(CONTENT | {"input_shape": shape, "feature_names": []}))
        (tmp_path / f"{name}.safetensors").write_bytes(content)
        metadata = {"format": modelfile.UNCHECKED, "facts": json.dumps(CONTENT | {"classes": 10**9, "class_names": []})}
        (tmp_path / f"old-{name}.safetensors").write_bytes(safetensors.torch.save(weights, metadata))
    # Large by what its header says, and by what the file system says, but not on the disk.
    entry = {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 2**32]}
    about = {"format": modelfile.FORMAT, "facts": json.dumps(CONTENT), "sha256": "0" * 64}
    header = json.dumps({"__metadata__": about, "layers.0.weight": entry}).encode()
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**32)
    with (tmp_path / "huge.safetensors").open("wb") as file:
        file.truncate(2**40)
    program = """
        import resource, sys, time
        from pathlib import Path
        from pefll import PefllError, PersonalModel
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28),) * 2)
        for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
            begun = time.monotonic()
            try:
                PersonalModel.load(path)
            except PefllError as error:
                print(path.name, error.code, time.monotonic() - begun)
    """
    words = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    lines = [line.split() for line in said.stdout.splitlines()]
    assert [name for name, *_ in lines] == sorted(each.name for each in tmp_path.glob("*.safetensors"))
    for name, code, seconds in lines:
        assert code.startswith("PEFLL-M0"), name
        assert float(seconds) < 5, name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_neither_written_nor_read(path, tmp_path, bad):
    model = PersonalModel.load(path)
    with torch.no_grad():
        model.network.layers[0].weight[0, 0] = bad
    with pytest.raises(PefllError) as error:
        model.save(tmp_path / "bad")
    assert error.value.code == "PEFLL-M015"
    assert not (tmp_path / "bad").exists()
    (tmp_path / "bad").write_bytes(modelfile.to_bytes(dict(model.network.state_dict()), json.dumps(CONTENT)))
    with pytest.raises(PefllError) as error:
        PersonalModel.load(tmp_path / "bad")
    assert error.value.code == "PEFLL-M018"


def test_a_spec_that_could_not_be_read_again_is_not_written(tmp_path):
    with pytest.raises(PefllError) as error:
        PersonalModel(nn.Linear(2, 2), replace(SPEC, class_names=("a",))).save(tmp_path / "m")
    assert error.value.code == "PEFLL-M016"


def test_files_of_earlier_versions_load_with_a_note(pefll, path, tmp_path):  # noqa: F811
    model = PersonalModel.load(path)
    metadata = {"format": modelfile.UNCHECKED, "facts": json.dumps(CONTENT)}
    (tmp_path / "old").write_bytes(safetensors.torch.save(model.network.state_dict(), metadata))
    x = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    with pytest.warns(UserWarning, match="SHA-256"):
        old = PersonalModel.load(tmp_path / "old")
    assert np.array_equal(old.probabilities(x), model.probabilities(x))
    np.savez(tmp_path / "x.npz", x=x)
    said = pefll("predict", tmp_path / "old", "--data", tmp_path / "x.npz")
    assert said.code == 0
    assert said.err.startswith("note: ")
    assert "SHA-256" in said.err
    assert not pefll("predict", path, "--data", tmp_path / "x.npz").err
    # Without its hash, or with the format of those that have none, a file of today is none of these.
    path.write_bytes(path.read_bytes().replace(modelfile.FORMAT.encode(), modelfile.UNCHECKED.encode()))
    with pytest.raises(PefllError, match="PEFLL-M010"):
        PersonalModel.load(path)


def test_other_programs_can_read_the_file(path):
    tensors = safetensors.torch.load_file(path)
    assert tensors.keys() == MLP((2,), 2).state_dict().keys()


def test_code_of_ones_own_that_cannot_be_built_without_memory(path, tmp_path):
    class Reads(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.scale = float(self.weight.detach().abs().sum())  # not without values

    made = PersonalModel(Reads(), replace(SPEC, model="tests.test_personal_files:reads"))
    made.save(tmp_path / "own")
    again = PersonalModel.load(tmp_path / "own", architecture="tests.test_personal_files:reads")
    assert torch.equal(again.network.weight, made.network.weight)


def reads(input_shape, classes):
    layer = nn.Linear(input_shape[0], classes)
    assert float(layer.weight.detach().sum()) < 10**6
    return layer
