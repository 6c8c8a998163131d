"""Other tasks than classification with clients on other machines: the same bits, and checks of what is sent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from pefll.core.errors import PefllError
from pefll.core.plugins import allow
from pefll.data.samples import TEST
from pefll.deploy.setup import agreement_like
from pefll.engines.flower.client.app import PefllClientApp
from pefll.engines.flower.client.member import Member, _node_settings
from pefll.engines.flower.inprocess import InProcessGrid, write_client
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.message import BadMessage
from pefll.engines.flower.protocol.names import client_name
from pefll.engines.flower.server.engine import FlowerEngine
from pefll.engines.flower.server.reply import Reply, check_sums
from pefll.engines.serial import SerialEngine
from pefll.tasks import Classification, MultiLabel, Regression
from pefll.tasks.names import name_of
from pefll.tasks.sums import no_sums
from pefll.training.evaluation import client_scores
from tests.engines.flower.federations import NO_LIMITS, sha256
from tests.tasks.labels import with_numbers, with_sets


@pytest.mark.parametrize("make", [with_numbers, with_sets])
@pytest.mark.parametrize("method", ["pefll", "fedavg"])
def test_real_clients_give_the_bits_of_the_serial_engine(make, method, tmp_path):
    data = make(clients=4, seen=4)
    task = (Regression() if data.labels == "numbers" else MultiLabel()).bind(data)
    agreed = Agreement(method, "mlp", data.input_shape, 0, 4, {"local_steps": 2}, learns=name_of(task), label_columns=2)
    assert Agreement.from_config(agreed.to_config()) == agreed
    nodes = {}
    for client in range(4):
        path = tmp_path / f"{client_name(client)}.npz"
        write_client(data, client, path)
        nodes[1000 + client] = {"name": client_name(client), "data": str(path), "methods": method, **NO_LIMITS}
    grid = InProcessGrid(PefllClientApp(), nodes, agreed.to_config())
    remote = FlowerEngine(grid, agreed, [client_name(number) for number in range(4)], 2)
    local = SerialEngine(data, agreed.build(), 0, 2)
    found, wanted = (engine.advance(engine.start(), 0, 2) for engine in (remote, local))
    assert sha256(found) == sha256(wanted)
    sums = [client_scores(engine, engine.method, wanted, np.arange(4), TEST) for engine in (remote, local)]
    assert (sums[0] == sums[1]).all()
    assert sums[0][:, 0].sum() > 0
    remote.close(), local.close()


def test_an_own_task_may_have_another_number_of_outputs_than_classes():
    name = "tests.tasks.test_own_classes:Ordinal"
    allow(name)
    agreed = Agreement("fedavg", "mlp", (6,), 3, 4, learns=name)
    method = Agreement.from_config(agreed.to_config()).build()
    assert (method.problem.task.outputs, method.problem.classes) == (1, 3)
    assert method.problem.model(method.problem.model.init(0, "model"), torch.zeros(5, 6)).shape == (5, 1)
    with pytest.raises(PefllError, match="PEFLL-F500"):
        Agreement("fedavg", "mlp", (6,), 3, 4, learns="classification classes=4").build()


def test_a_federation_of_today_keeps_its_fingerprint():
    """Runs with real clients are recognised by it."""
    agreed = Agreement("fedavg", "mlp", (6,), 3, 4, version="0")
    assert agreed.sha256.startswith("4b8a1cb93b1a1a4c187b")  # what the version before tasks computed
    config = agreed.to_config()
    del config["learns"], config["label-columns"]
    assert Agreement.from_config(config).sha256 == agreed.sha256
    assert Agreement("fedavg", "mlp", (6,), 0, 4, version="0", learns="multilabel members=3").sha256 != agreed.sha256


@pytest.mark.parametrize(
    ("task", "name", "value"),
    [
        (Classification(3, extra=["macro_f1"]), "correct", 6.0),
        (Classification(3, extra=["macro_f1"]), "macro_f1", 6.0),
        (Regression(mean=(0.0,), deviation=(1.0,)), "rmse", -1.0),
        (Regression(mean=(0.0,), deviation=(1.0,)), "samples", 2.5),
        (Regression(mean=(0.0,), deviation=(1.0,)), "samples", 7.0),
        (MultiLabel(2), "micro_f1", -1.0),
    ],
)
def test_impossible_sums_are_refused(task, name, value):
    shape, dtype = (1, 2) if task.labels == "sets" else (1,), torch.float32 if task.labels == "numbers" else torch.int64
    y = torch.zeros(shape, dtype=dtype)
    form = no_sums(task, y, 3 if task.labels == "classes" else 0, torch.float32)
    fine = form._replace(samples=torch.tensor(5.0))
    check_sums(Reply(list(fine), []), form, task, 6)
    bad = fine._replace(**{name: torch.full_like(getattr(fine, name), value)})
    with pytest.raises(BadMessage):
        check_sums(Reply(list(bad), []), form, task, 6)


@pytest.mark.parametrize(
    ("classes", "learns"),
    [(3, "classification classes=5"), (0, "classification"), (3, "regression"), (0, "regression")],
)
def test_a_task_that_does_not_fit_the_agreement_is_refused(classes, learns):
    with pytest.raises(PefllError, match="PEFLL-F500"):
        Agreement("fedavg", "mlp", (6,), classes, 4, learns=learns).build()


def test_an_example_gives_the_agreement_its_task(tmp_path):
    """Real clients do not tell their labels, so their mean comes from the example."""
    x, y = np.random.default_rng(0).normal(size=(30, 3)), np.arange(30)
    np.savez(tmp_path / "like.npz", x=x, y=y, client=np.zeros(30, dtype=int))
    given = {"method": "fedavg", "pairs": [], "model": "mlp", "num_clients": 4}
    agreed = agreement_like(str(tmp_path / "like.npz"), tmp_path, task="regression loss_name=huber", **given)
    assert agreed.build().problem.task == Regression("huber", mean=(14.5,), deviation=(float(f"{y.std():.9g}"),))
    assert agreement_like(str(tmp_path / "like.npz"), tmp_path, **given).learns == ""
    spec = {"name": "client-0", "data": str(tmp_path / "like.npz"), "methods": "fedavg", **NO_LIMITS}
    assert Member(**_node_settings(tuple(spec.items()), ""), agreement=agreed).federation().labels == "numbers"
    two = dataclasses.replace(agreed, learns="regression mean=0,0 deviation=1,1", label_columns=2)
    with pytest.raises(PefllError, match="PEFLL-S507"):
        Member(**_node_settings(tuple(spec.items()), ""), agreement=two).federation()


def test_a_server_cannot_name_code_as_the_task():
    agreed = Agreement("fedavg", "mlp", (6,), 0, 4, learns="os:getcwd")
    with pytest.raises(PefllError, match="PEFLL-M001"):
        agreed.build()
