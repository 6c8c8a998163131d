"""A run's settings: written, read, checked, compared."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest

from pefll.core.errors import PefllError
from pefll.core.wording import for_the_command_line
from pefll.runs.config import MAY_CHANGE, Config

ODD = "a \"quoted\" \\ back\\nslash\nnew line\ttab\r é ü 漢 \x07 \x7f # [x] = 'y'"


def test_toml_round_trip(tmp_path):
    config = Config(
        method="fedavg",
        settings={"client_lr": 1e-5, "local_steps": 3, "word": ODD, "flag": True, "big": 1e22, "none": float("inf")},
        data=ODD,
        data_dir="/a b/ü",
        unseen=0.25,
        rounds=7,
        clients=12,
    )
    path = tmp_path / "config.toml"
    config.save(path)
    assert Config.load(path) == config
    plain = tomllib.loads(path.read_text())
    assert plain["data"] == ODD
    assert plain["settings"]["word"] == ODD
    assert plain["settings"]["flag"] is True


def test_every_default_survives(tmp_path):
    Config().save(tmp_path / "c.toml")
    assert Config.load(tmp_path / "c.toml") == Config()


def test_a_whole_number_where_a_share_is_wanted(tmp_path):
    Config(unseen=0).save(tmp_path / "c.toml")
    loaded = Config.load(tmp_path / "c.toml")
    assert loaded.unseen == 0
    assert isinstance(loaded.unseen, float)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("roundz = 3", r"'roundz'.*'rounds'.*PEFLL-A101"),
        ('rounds = "3"', r"\brounds\b.*'3'.*PEFLL-A001"),
        ("rounds = 3.0", r"\brounds\b.*\b3\.0\b.*PEFLL-A001"),
        ("rounds = true", "PEFLL-A001"),
        ("method = 1", "PEFLL-A008"),
        ("settings = 1", "PEFLL-A012"),
        ("rounds = ", "PEFLL-R001"),
        ("rounds = -1", r"config\.toml.*\brounds\b.*-1.*PEFLL-A002"),
        ("eval_every = 0", r"config\.toml.*\beval_every\b.*\b0\b.*PEFLL-A002"),
        ('engine = "vectr"', r"'vectr'.*'vector'.*PEFLL-A101"),
    ],
)
def test_a_config_that_is_wrong_is_refused(tmp_path, text, sentence):
    path = tmp_path / "config.toml"
    path.write_text(text)
    for on in (False, True):  # a file has no options, whoever reads about it
        with for_the_command_line(on), pytest.raises(PefllError, match=sentence):
            Config.load(path)


def test_no_config_is_a_sentence(tmp_path):
    with pytest.raises(PefllError, match=r"config\.toml.*PEFLL-R022"):
        Config.load(tmp_path / "config.toml")
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PefllError, match="PEFLL-R001"):
        Config.load(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("engine", "gpu", "PEFLL-A101"),
        ("precision", "float16", "PEFLL-A101"),
        ("rounds", -1, "PEFLL-A002"),
        ("clients", -1, "PEFLL-A002"),
        ("clients_per_round", -2, "PEFLL-A002"),
        ("processes", -1, "PEFLL-A002"),
        ("seed", -1, "PEFLL-A002"),
        ("eval_every", 0, "PEFLL-A002"),
        ("eval_clients", -1, "PEFLL-A002"),
        ("checkpoint_every", 0, "PEFLL-A002"),
        ("checkpoint_minutes", 0.0, "PEFLL-A554"),
        ("checkpoint_minutes", float("nan"), "PEFLL-A005"),
        ("unseen", 1.0, "PEFLL-A007"),
        ("prior_clients", 1.0, "PEFLL-A007"),
        ("prior_clients", -0.5, "PEFLL-A007"),
        ("prior_rounds", -1, "PEFLL-A002"),
        ("unseen", -0.1, "PEFLL-A007"),
        ("unseen", float("nan"), "PEFLL-A005"),
    ],
)
def test_values_that_make_no_sense(name, value, code):
    with pytest.raises(PefllError, match=rf"\b{name}\b.*{value}.*{code}"):
        Config(**{name: value})


OTHER = {
    "method": "local", "settings": {"local_steps": 9}, "data": "cifar10", "data_dir": "x", "partition": "natural",
    "clients": 9, "unseen": 0.5, "model": "mlp", "task": "regression", "rounds": 2000, "clients_per_round": 3,
    "seed": 8, "engine": "vector", "device": "cpu", "precision": "float64", "processes": 3, "eval_every": 7,
    "eval_clients": 6, "checkpoint_every": 9, "checkpoint_minutes": 1.0, "sampling": "samples", "lr_schedule": "cosine",
    "server_lr_schedule": "step 9 0.5", "data_sha256": "abc", "label": "y", "client_column": "who",
    "features": "a", "drop": "b", "treat": "a=category", "encode": "none", "missing": "drop", "min_samples": 5,
    "time_column": "t", "unseen_clients": "ann", "prior_clients": 0.5, "prior_rounds": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_what_may_change_on_resuming_and_what_not(name):
    """Whatever changes the numbers may not; where things are and how fast they go may."""
    started = Config()
    asked = dataclasses.replace(started, **{name: OTHER[name]})
    assert asked != started
    if name in MAY_CHANGE:
        started.check_same(asked)
    else:
        with pytest.raises(PefllError, match=rf"\b{name}\b.*PEFLL-R104"):
            started.check_same(asked)


def test_what_may_change_is_known_here():
    where_and_how_fast = {"data_dir", "device", "engine", "processes", "encode", "data_sha256"}
    assert {"rounds", "checkpoint_every", "checkpoint_minutes"} | where_and_how_fast == MAY_CHANGE


def test_a_run_is_extended_but_not_shortened_and_never_on_other_data():
    Config(rounds=5).check_same(Config(rounds=5))
    with pytest.raises(PefllError, match="PEFLL-R105"):
        Config(rounds=5).check_same(Config(rounds=4))
    Config(data_sha256="a").check_same(Config(data_sha256="a"))
    Config(data_sha256="").check_same(Config(data_sha256="a"))
    with pytest.raises(PefllError, match="PEFLL-R103"):
        Config(data_sha256="a").check_same(Config(data_sha256="b"))


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("rounds", "5", "PEFLL-A001"),
        ("rounds", 2.5, "PEFLL-A001"),
        ("device", object(), "PEFLL-A008"),
        ("seed", True, "PEFLL-A001"),
    ],
)
def test_settings_of_a_wrong_type_are_refused_before_anything_is_written(name, value, code):
    with pytest.raises(PefllError, match=rf"\b{name}\b.*{code}"):
        Config(**{name: value})


def test_the_command_makes_the_run_again():
    config = Config(data="cifar10", partition="by-class 2", rounds=7, settings={"embedding": "linear"}, device="cpu")
    assert config.command() == ("pefll train --set embedding=linear --data cifar10 --partition 'by-class 2' --rounds 7")
    assert Config().command() == "pefll train --data digits"  # without --data there is no training


def test_other_settings_on_resuming_are_shown_as_arguments():
    smooth, plain = "classification label_smoothing=0.1", ""
    started = Config(data="digits", task=smooth)
    with pytest.raises(PefllError, match=rf"task='{smooth}', and cannot be resumed with task='classification';"):
        started.check_same(dataclasses.replace(started, task=plain))
    with pytest.raises(PefllError, match=r"was started without drop, and cannot be resumed with drop='a';"):
        Config(data="digits").check_same(Config(data="digits", drop="a"))
