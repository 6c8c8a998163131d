"""The server's app: the ordinary training loop with clients behind a grid, stopped and started again at any moment."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.app import Context, RecordDict

from pefll.core.errors import PefllError
from pefll.core.tree import named_leaves
from pefll.deploy import apps, server_app
from pefll.deploy.apps import write_model
from pefll.deploy.plan import Plan
from pefll.engines.flower.client.app import PefllClientApp
from pefll.engines.flower.inprocess import InProcessGrid
from pefll.engines.flower.protocol.names import DELIVER, client_name
from pefll.runs import checkpoint
from pefll.runs.personal import PersonalModel
from pefll.runs.record import RunFolder
from pefll.training import run
from tests.engines.flower.federations import CLIENTS, PER_ROUND, QUICK, Setting, serial_state, setting

ROUNDS = 2


class Killed(BaseException):
    """The server's process is gone."""


def plan_of(here: Setting, folder: Path | str, **changes) -> Plan:
    names = tuple(client_name(number) for number in range(here.agreement.num_clients))
    settings = {"rounds": ROUNDS, "clients_per_round": PER_ROUND, "eval_every": 1, "terms": QUICK} | changes
    return Plan(here.agreement, names, folder=str(folder), **settings)


def fresh_grid(here: Setting) -> InProcessGrid:
    nodes = {node: context.node_config for node, context in here.grid.contexts.items()}
    return InProcessGrid(PefllClientApp({DELIVER: write_model}), nodes, here.agreement.to_config())


def last_state(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.latest(RunFolder(folder / "run").checkpoints, print).tensors


def same_as_serial(here: Setting, folder: Path) -> bool:
    found = last_state(folder)
    return all(torch.equal(found[f"server.{name}"], leaf) for name, leaf in named_leaves(serial_state(here, rounds=2)))


def test_a_run_has_all_that_a_run_has(tmp_path):
    here = setting(tmp_path)
    trained = server_app.train(here.grid, plan_of(here, tmp_path))
    assert same_as_serial(here, tmp_path)
    summary = trained.summary
    assert summary["engine"] == "flower"
    assert summary["rounds"] == ROUNDS
    assert summary["accuracy"]["best"]["seen"]["per_sample"] > 0
    assert summary["bytes_up"] > 0
    assert len(RunFolder(tmp_path / "run").history()) == ROUNDS
    assert run.load(tmp_path / "run").config.engine == "flower"


def test_the_app_that_flower_loads_does_the_same(tmp_path, capsys):
    here = setting(tmp_path)
    context = Context(1, 1, {}, RecordDict(), plan_of(here, tmp_path).to_config())
    apps.server(here.grid, context)
    assert same_as_serial(here, tmp_path)
    assert "2 rounds of 4 clients" in capsys.readouterr().err


# Who they are; the first state; two rounds of three, each with an evaluation of two; the test of two.
@pytest.mark.parametrize("moment", range(14))
def test_a_server_killed_between_any_two_exchanges_goes_on_bit_exact(moment, tmp_path):
    here = setting(tmp_path)
    pushes = 0

    def killing(messages, push=here.grid.push_messages):
        nonlocal pushes
        pushes += 1
        if pushes > moment:
            raise Killed
        return push(messages)

    here.grid.push_messages = killing
    with pytest.raises(Killed):
        server_app.train(here.grid, plan_of(here, tmp_path))
    server_app.train(fresh_grid(here), plan_of(here, tmp_path))
    assert same_as_serial(here, tmp_path)
    assert [row["round"] for row in RunFolder(tmp_path / "run").history()] == [1, 2]


def test_a_server_killed_while_clients_keep_something_goes_on_bit_exact(tmp_path):
    """What clients kept in the rounds that were lost is not what they had at the checkpoint."""
    here = setting(tmp_path, "fedrep")
    plan = plan_of(here, tmp_path, rounds=3, checkpoint_every=1)
    rounds = 0

    def killing(messages, push=here.grid.push_messages):
        nonlocal rounds
        messages = list(messages)
        rounds += messages[0].metadata.message_type == "train.train"
        replies = push(messages)
        if rounds == 3:
            raise Killed
        return replies

    here.grid.push_messages = killing
    with pytest.raises(Killed):
        server_app.train(here.grid, plan)
    server_app.train(fresh_grid(here), plan)
    found = last_state(tmp_path)
    for name, leaf in named_leaves(serial_state(here, rounds=3)):
        rows = found[f"server.{name}"]
        if name == "heads":
            rows = torch.stack([here.kept(client, row) for client, row in enumerate(rows)])
        assert torch.equal(rows, leaf)


def test_another_agreement_does_not_go_on_with_a_run(tmp_path):
    here = setting(tmp_path)
    server_app.train(here.grid, plan_of(here, tmp_path))
    other = setting(tmp_path, changes={"client_lr": 0.5})
    with pytest.raises(PefllError, match="PEFLL-R104"):
        server_app.train(other.grid, plan_of(other, tmp_path, rounds=3))


def test_clients_that_do_not_come_are_not_waited_for_for_ever(tmp_path):
    here = setting(tmp_path)
    here.grid.online.discard(1000)
    with pytest.raises(PefllError, match=r"of 6 clients.* 0 s.*PEFLL-F454"):
        server_app.train(here.grid, plan_of(here, tmp_path, wait_seconds=0.0))


def test_an_ordinary_end_is_one_sentence_and_no_traceback(tmp_path, capsys, caplog):
    here = setting(tmp_path)
    here.grid.online.discard(1000)
    context = Context(1, 1, {}, RecordDict(), plan_of(here, tmp_path, wait_seconds=0.0).to_config())
    logger = logging.getLogger("flwr")
    before = list(logger.filters)
    try:
        with pytest.raises(PefllError, match="PEFLL-F454") as told:
            apps.server(here.grid, context)
        logger.error("ServerApp raised an exception", exc_info=told.value)  # as Flower does
        logger.error("something else", exc_info=ValueError("of ours"))
    finally:
        logger.filters[:] = before
    said = capsys.readouterr().err
    assert "error: 5 of 6 clients" in said
    assert "[PEFLL-F454]" in said
    assert [record.message for record in caplog.records if record.exc_info] == ["something else"]


@pytest.mark.parametrize("method", ["pefll", "fedavg", "knn-per", "fedrep", "pfedhn"])
def test_a_client_that_was_not_there_gets_its_model_and_writes_it_to_its_disk(method, tmp_path):
    here = setting(tmp_path, method, seen=5)
    here.grid.online.discard(1005)
    server_app.train(here.grid, plan_of(here, tmp_path))
    here.grid = fresh_grid(here)
    kinds: list[tuple[int, str]] = []

    def transport(node, request, deliver):
        kinds.append((node, request.metadata.message_type))
        return [deliver(request)]

    here.grid.transport = transport
    done = server_app.personalize(here.grid, plan_of(here, tmp_path))
    assert done == [client_name(number) for number in range(CLIENTS)]
    model = PersonalModel.load(tmp_path / "client-005.safetensors")
    content = np.load(tmp_path / "client-005.npz")
    mine = content["split"] == 0
    alone = run.load(tmp_path / "run").personalize(content["x"][mine], content["y"][mine])
    found, expected = model.probabilities(content["x"]), alone.probabilities(content["x"])
    # Where a new client trains, its batches depend on its number, which is another one there.
    trains = method in ("fedrep", "pfedhn")
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.2 if trains else 1e-5)
    if method == "pefll":  # two exchanges, after everybody was asked who it is
        asked = [kind for node, kind in kinds if node == 1005 and not kind.endswith("hello")]
        assert asked == ["query.describe_all", "query.deliver"]


def test_a_client_without_a_place_for_a_model_is_told_apart(tmp_path):
    here = setting(tmp_path)
    server_app.train(here.grid, plan_of(here, tmp_path))
    here.grid = fresh_grid(here)
    here.grid.contexts[1002].node_config = {
        key: value for key, value in here.grid.contexts[1002].node_config.items() if key != "model"
    }
    done = server_app.personalize(here.grid, plan_of(here, tmp_path))
    assert "client-002" not in done
    assert len(done) == CLIENTS - 1


def test_a_plan_survives_its_way_through_flowers_config(tmp_path):
    here = setting(tmp_path, shape=(1, 16, 16), model="lenet")
    plan = plan_of(here, tmp_path)
    assert Plan.from_config(plan.to_config()) == plan
    assert Plan.from_config(plan.to_config()).agreement.sha256 == here.agreement.sha256
    for change, words in (
        ({"task": "dance"}, "PEFLL-F410"),
        ({"names": ("a b",)}, "PEFLL-F413"),
        ({"names": ("a", "a")}, "PEFLL-F414"),
    ):
        with pytest.raises(PefllError, match=words):
            dataclasses.replace(plan, **change)
    config = plan.to_config()
    del config["rounds"]
    with pytest.raises(PefllError, match=r"\brounds\b.*PEFLL-F411"):
        Plan.from_config(config)
    with pytest.raises(PefllError, match="PEFLL-F211"):
        Plan.from_config(plan.to_config() | {"input-shape": "nonsense"})
    for hostile in (
        *({"names": text} for text in ("[" * 100_000, '"abc"', "[1]", "{}", f'["{"x" * (5 << 20)}"]')),
        *({"rounds": value} for value in ("many", -1, 1.5, 10**400, float("nan"))),
        {"quorum": float("nan")},
        {"exchange-seconds": "long"},
        {"wait-seconds": float("nan")},
        {"folder": 3},
    ):
        with pytest.raises(PefllError) as refused:
            Plan.from_config(plan.to_config() | hostile)
        assert refused.value.code == "PEFLL-F211"
        assert len(str(refused.value)) < 400
    assert Plan.from_config(plan.to_config() | {"patience-seconds": float("inf")}).terms.patience_seconds == float(
        "inf"
    )
