"""What a client refuses, whatever the server asks for; and the attacks that it refuses."""

from __future__ import annotations

import logging
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.app import Message

from benchmarks import curious_server as attack
from pefll.core.errors import PefllError
from pefll.deploy.folder import CLIENT_FILE, find_bundle
from pefll.deploy.setup import agreement_like, refused_by_default
from pefll.engines.cohort import Ledger
from pefll.engines.flower.client.app import task_of
from pefll.engines.flower.client.member import Member
from pefll.engines.flower.client.policy import Draw, Policy, Refusal
from pefll.engines.flower.protocol.message import BadMessage, header_of, pack, tensors_of
from pefll.engines.flower.protocol.names import ECHO, KEPT, SENT
from pefll.methods import METHODS
from tests.engines.flower.federations import Setting, flower_state, sampled, serial_state, setting, sha256

REPLIES = 16


def nothing() -> None:
    """Take the place of a progress bar."""


@pytest.fixture(autouse=True)
def flowers_log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    return caplog


@pytest.mark.parametrize("asks", [attack.descriptor, attack.update])
def test_a_server_that_asks_for_one_sample_gets_it_only_from_a_client_without_limits(asks, tmp_path):
    for name in ("open", "limited"):
        (tmp_path / name).mkdir()
    assert asks(tmp_path / "open", REPLIES, attack.ALLOW_ALL, nothing)["exact_samples"] == REPLIES
    limited = asks(tmp_path / "limited", REPLIES, {}, nothing)
    assert (limited["exact_samples"], limited["refused"]) == (0, REPLIES)
    assert "PEFLL-P004" in limited["refusal"]


def test_the_label_histogram_is_read_from_what_an_honest_run_sends(tmp_path):
    """Documented and not defended against: this test says that docs/deploy.md is still right."""
    for name in ("linear", "prior"):
        (tmp_path / name).mkdir()
    found = attack.histogram(tmp_path / "linear", rounds=2, clients=40, step=nothing)
    assert found["clients_with_exact_histogram"] == 40
    assert found["training_batches_with_exact_histogram"] == found["training_batches"]
    assert attack.prior(tmp_path / "prior", 12, nothing)["clients_with_exact_histogram"] == 12


def test_a_client_that_refuses_is_left_out_and_both_logs_say_why(tmp_path, flowers_log):
    here = setting(tmp_path)
    offender = sampled(here, 0)[1]  # the first one is asked for the first descriptor
    here.grid.contexts[1000 + offender].node_config["min-samples"] = "100"
    rounds = [t for t in range(3) if offender in sampled(here, t)]
    said: list[str] = []
    state, engine = flower_state(here, report=said.append)
    assert sha256(state) == sha256(serial_state(here, {t: {offender} for t in rounds}))
    assert [(t, name) for t, name, _ in engine.dropped] == [(t, f"client-{offender:03d}") for t in rounds]
    assert all("is left out: it refuses to reply from" in line and "[PEFLL-P004]" in line for line in said)
    assert flowers_log.text.count("this client refuses to reply from") == len(rounds)
    assert "the reply is made from" in flowers_log.text


def ask(here: Setting, task: str, trees: list[Tensor | str], keep: str = "evaluation-7-0", **static: int):
    """Ask the first client for a task as a server of any kind may; return its refusal and its tensors.

    Args:
        here: whose grid.
        task: its name.
        trees: the arguments; a text names something that the client keeps.
        keep: the name under which the client keeps what is its own.
        static: whole-number arguments.
    """
    header = dict.fromkeys(ECHO, 0) | {"task": task, "cache": "7", "agreement": here.agreement.sha256, "keep": keep}
    header |= {"static": static, "trees": [None] * len(trees)}
    header["places"] = [(KEPT, tree) if isinstance(tree, str) else (SENT, str(i)) for i, tree in enumerate(trees)]
    tensors = {str(i): tree for i, tree in enumerate(trees) if not isinstance(tree, str)}
    (name,) = here.grid.push_messages([Message(pack(header, tensors), 1000, f"train.{task}")])
    (reply,) = here.grid.pull_messages([name])
    return header_of(reply.content).get("refusal"), tensors_of(reply.content)


def with_default_limits(here: Setting) -> Setting:
    for context in here.grid.contexts.values():
        del context.node_config["min-samples"], context.node_config["numbers-per-sample"]
    return here


@pytest.mark.parametrize(("method", "task"), [("per-fedavg", "adapt"), ("local", "train")])
def test_a_model_of_one_sample_is_not_kept_either(method, task, tmp_path):
    """A server could ask for scores of the kept model, and so find the sample."""
    here = with_default_limits(setting(tmp_path, method, sizes=(20, 25, 30), changes={"batch_size": 1}))
    theta = here.agreement.build().problem.model.init(0, "model")
    refusal, tensors = ask(here, task, [theta])
    assert "[PEFLL-P004]" in str(refusal)
    assert not tensors
    assert not list((tmp_path / "state").rglob("*.safetensors"))
    here = with_default_limits(setting(tmp_path, method, sizes=(20, 25, 30), changes={"batch_size": 8}))
    assert ask(here, task, [theta]) == (None, {})
    assert len(list((tmp_path / "state").rglob("*.safetensors"))) == 1


def test_a_method_that_the_owner_did_not_name_is_refused_before_its_code_is_looked_for(tmp_path, flowers_log):
    here = setting(tmp_path, "fedavg")
    here.grid.contexts[1001].node_config["methods"] = "pefll, fedrep"
    del here.grid.contexts[1002].node_config["methods"]  # then it is PeFLL alone
    said: list[str] = []
    engine = here.engine(report=said.append)
    assert engine.roster.present() == [0, 3, 4, 5]
    engine.close()
    assert said == [
        "client client-001 refuses to take part in 'fedavg': its owner has named pefll, fedrep; `pefll flower client "
        "--methods` names others [PEFLL-P003]",
        "client client-002 refuses to take part in 'fedavg': its owner has named pefll; `pefll flower client "
        "--methods` names others [PEFLL-P003]",
    ]
    assert flowers_log.text.count("this client refuses to take part in") == 2


def client_with(draws: list[Draw], counts=(20, 6, 0)):
    from types import SimpleNamespace

    return SimpleNamespace(draws=draws, count=torch.tensor(counts))


def test_the_limits():
    policy = Policy()
    policy.check_reply(client_with([Draw(0, 8)]), 1000, describes=False)
    policy.check_reply(client_with([Draw(2, 0)]), 4, describes=False)
    policy.check_reply(client_with([Draw(0, 8), Draw(0, 20)]), 8, describes=True)
    for draws, allowed in (([Draw(0, 7)], False), ([Draw(0, 20), Draw(0, 7)], False), ([Draw(1, 6)], True)):
        with pytest.raises(Refusal) as caught:
            policy.check_reply(client_with(draws), 1, describes=False)
        assert caught.value.code == "PEFLL-P004"
        few = Policy(allow_few=True)
        if allowed:  # all that there is
            few.check_reply(client_with(draws), 1, describes=False)
        else:
            with pytest.raises(Refusal, match="PEFLL-P004"):
                few.check_reply(client_with(draws), 1, describes=False)
    with pytest.raises(Refusal) as caught:
        policy.check_reply(client_with([Draw(0, 20), Draw(0, 12)]), 13, describes=True)
    assert caught.value.code == "PEFLL-P005"
    Policy(numbers_per_sample=2).check_reply(client_with([Draw(0, 12)]), 24, describes=True)
    Policy(numbers_per_sample=0, min_samples=0).check_reply(client_with([Draw(0, 1)]), 99, describes=True)


def test_a_refusal_does_not_tell_the_server_how_many_samples_there_are():
    for draw, numbers, has in ((Draw(1, 6), 1, "6 samples"), (Draw(0, 12), 13, "12 samples")):
        with pytest.raises(Refusal) as caught:
            Policy().check_reply(client_with([draw]), numbers, describes=True)
        assert has.split()[0] not in str(caught.value).replace("[PEFLL-P004]", "").replace("[PEFLL-P005]", "").split()
        assert has in caught.value.detail


def test_the_owners_copy_of_the_limits_is_read_and_survives_the_way_to_the_node(tmp_path):
    text = CLIENT_FILE.format(name="ann", address="a:1", methods="fedavg", least=8)
    for name in ("ca.crt", "node.key"):
        (tmp_path / name).write_text("")
    (tmp_path / "client.toml").write_text(text)
    assert find_bundle(tmp_path, None).policy == Policy(("fedavg",))
    changed = text.replace("min-samples = 8", "min-samples = 9").replace("sample = 1.0", "sample = 0.5")
    (tmp_path / "client.toml").write_text(changed.replace('"fedavg"', '"fedavg, mine:Own"'))
    policy = find_bundle(tmp_path, None).policy
    assert policy == Policy(("fedavg", "mine:Own"), 9, numbers_per_sample=0.5)
    assert not find_bundle(tmp_path, None).ignored
    assert Policy.of_node(policy.to_node()) == policy
    (tmp_path / "client.toml").write_text('name = "ann"\naddress = "a:1"\n')  # of before there were limits
    assert find_bundle(tmp_path, None).policy == Policy()
    (tmp_path / "client.toml").write_text(text.replace("min-samples = 8", 'min-samples = "many"'))
    with pytest.raises(PefllError) as caught:
        find_bundle(tmp_path, None)
    assert caught.value.code == "PEFLL-P007"
    with pytest.raises(PefllError, match="PEFLL-P002"):
        Policy(min_samples=-1)


def test_a_folder_from_the_servers_operator_cannot_loosen_the_limits(tmp_path):
    for name in ("ca.crt", "node.key"):
        (tmp_path / name).write_text("")
    loose = 'name = "ann"\naddress = "a:1"\nmin-samples = 0\nallow-few = true\nnumbers-per-sample = 0\n'
    (tmp_path / "client.toml").write_text(loose)
    bundle = find_bundle(tmp_path, None)
    assert (bundle.policy, bundle.ignored) == (Policy(), True)
    for draws, numbers, code in (([Draw(1, 6)], 1, "PEFLL-P004"), ([Draw(0, 20)], 21, "PEFLL-P005")):
        with pytest.raises(Refusal) as caught:
            bundle.policy.check_reply(client_with(draws), numbers, describes=True)
        assert caught.value.code == code


def test_nodes_of_flowers_simulation_allow_everything():
    assert Policy.of_node({"partition-id": 3, "num-partitions": 5}) == Policy(None, 0, True, 0.0)
    assert Policy.of_node({"partition-id": 3, "name": "ann"}) == Policy()


@pytest.mark.parametrize("method", METHODS)
def test_the_tasks_that_a_method_lists_are_those_that_it_asks_for(method, tmp_path):
    """What is not listed is refused; what is asked for must be listed."""
    here = setting(tmp_path, method, seen=5)
    asked = set()

    def transport(node, request, deliver):
        asked.add(request.metadata.message_type.partition(".")[2])
        return [deliver(request)]

    here.grid.transport = transport
    engine = here.engine(newcomers=["client-005"])
    state = engine.advance(engine.start(), 0, 1)
    for _, cohort in engine.cohorts(torch.arange(6).numpy()):
        cohort.ledger = Ledger()
        theta = engine.method.personalize(state, cohort)
        cohort.run(engine.method.predict, attack.each(theta), split=2)
    engine.close()
    listed = set(engine.method.client_tasks)
    assert asked - {"hello"} <= listed
    assert listed - asked <= {"keep_memory"}, "made on the client itself, and only there"


def test_a_server_cannot_ask_for_what_a_client_keeps(tmp_path):
    """kNN-Per's memory is features and labels of all samples; FedRep's head stays with the client."""
    for method, task in (("knn-per", "remember"), ("fedrep", "fit_head"), ("pefll-prior", "with_shares")):
        with pytest.raises(BadMessage, match=repr(task)):
            task_of(setting(tmp_path, method).agreement.build(), task)


def test_what_a_client_keeps_goes_only_where_the_method_puts_it(tmp_path):
    """pFedMe's `train` of a kept model would send the server a model much like it."""
    here = with_default_limits(setting(tmp_path, "pfedme", sizes=(20, 25, 30), changes={"batch_size": 8}))
    theta = here.agreement.build().problem.model.init(0, "model")
    refusal, tensors = ask(here, "train", [theta], keep="round-1-0")
    assert (refusal, len(tensors)) == (None, 1)
    for task in ("train", "join_in"):
        refusal, tensors = ask(here, task, ["round-1-0:0"], keep="round-2-0")
        assert refusal == (
            f"refuses to use kept tensors as 'theta' of '{task}': PFedMe does not name this argument in "
            "`kept_arguments` [PEFLL-P013]"
        )
        assert not tensors
    refusal, tensors = ask(here, "train", [theta, "round-1-0:0"])
    assert "as '1' of 'train'" in str(refusal)
    assert ask(here, "recall", ["round-1-0:0"]) == (None, {})
    assert len(ask(here, "predict", ["evaluation-7-0:0"], split=0)[1]) == 4


@pytest.mark.parametrize("method", METHODS)
def test_the_kept_arguments_that_a_method_lists_are_those_that_it_uses(method, tmp_path):
    here = setting(tmp_path, method, seen=5)
    built = here.agreement.build()
    used: dict[str, set[str]] = {}

    def transport(node, request, deliver):
        header = header_of(request.content)
        if header["task"] != "hello":
            names = list(signature(getattr(built, header["task"])).parameters)[1:]
            assert header["trees"] == [None] * len(header["places"]), "each argument is one tensor"
            for name, (kind, _) in zip(names, header["places"], strict=False):
                if kind == KEPT:
                    used.setdefault(header["task"], set()).add(name)
        return [deliver(request)]

    here.grid.transport = transport
    engine = here.engine(newcomers=["client-005"])
    state = engine.advance(engine.start(), 0, 3)
    for _, cohort in engine.cohorts(torch.arange(6).numpy()):
        cohort.ledger = Ledger()
        theta = engine.method.personalize(state, cohort)
        cohort.run(engine.method.predict, attack.each(theta), split=2)
    engine.close()
    assert not engine.dropped
    assert used == {task: set(names) for task, names in getattr(built, "kept_arguments", {}).items()}


def test_updates_and_scores_contain_counts_that_the_hello_leaves_out(tmp_path):
    """Documented and not defended against: this test says that docs/deploy.md is still right."""
    here = setting(tmp_path, "fedavg")
    here.grid.contexts[1000].node_config["tells-counts"] = False
    theta = here.agreement.build().problem.model.init(0, "model")
    train, validation, _ = here.federation.count[:, 0].tolist()
    _, update = ask(here, "train", [theta])
    assert train in [float(leaf) for leaf in update.values() if leaf.numel() == 1]
    _, score = ask(here, "predict", [theta], split=1)
    assert validation in [float(leaf) for leaf in score.values()]


def test_init_chooses_descriptors_that_clients_send(tmp_path):
    def agreed(clients, *pairs, method="pefll"):
        return agreement_like("digits", tmp_path, method=method, pairs=list(pairs), model="auto", num_clients=clients)

    assert agreed(100).settings == {}
    assert agreed(1000).build().descriptor == 32, "the paper's 251 numbers are more than its 32 samples"
    assert agreed(1000, method="pefll-prior").build().descriptor == 22, "with ten shares of classes behind them"
    for fine in (agreed(100), agreed(1000), agreed(8, method="fedavg"), agreed(1000, "descriptor_batch=0")):
        assert refused_by_default(fine) == []
    (sentence,) = refused_by_default(agreed(100, "descriptor_size=64"))
    assert "a descriptor of 64 numbers from 32 samples" in sentence
    assert len(refused_by_default(agreed(8, "descriptor_batch=1", "batch_size=4"))) == 3


@pytest.mark.parametrize(("size", "code"), [(10**8, "PEFLL-L006"), (10**18, "PEFLL-L008")])
def test_init_tells_of_networks_that_are_too_large_before_it_makes_them(size, code, tmp_path, monkeypatch):
    monkeypatch.setattr("pefll.engines.memory.available_memory", lambda: 8 * 10**9)
    pairs = [f"descriptor_size={size}"]
    with pytest.raises(PefllError) as caught:
        agreement_like("digits", tmp_path, method="pefll", pairs=pairs, model="auto", num_clients=4)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "config", [{"settings": '{"descriptor_size": 100000000}'}, {"settings": '{"local_steps": 1000000000}'}]
)
def test_a_client_refuses_networks_that_do_not_fit_into_its_memory(config, tmp_path, monkeypatch):
    monkeypatch.setattr("pefll.engines.memory.available_memory", lambda: 8 * 10**9)
    context = setting(tmp_path).grid.contexts[1000]
    context.run_config = {**context.run_config, **config}
    with pytest.raises(Refusal) as caught:
        Member.from_context(context).method()
    assert caught.value.code == "PEFLL-P010"
    assert "GB" in caught.value.detail
    assert "GB" not in str(caught.value)


def test_the_limits_reach_the_node_through_the_command_line_and_the_nodes_settings(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from pefll.cli.flower import app
    from pefll.deploy.node import NodeSettings
    from pefll.deploy.processes import client_command

    given = {}
    monkeypatch.setattr("pefll.deploy.foreground.take_part", lambda *arguments: given.update(arguments[-1]))
    options = ["--methods", "fedavg, mine:Own", "--min-samples", "3", "--allow-few", "--numbers-per-sample", "2.5"]
    CliRunner().invoke(app, ["client", str(tmp_path), "--data", "x.npz", *options], catch_exceptions=False)
    policy = Policy(**given)
    assert policy == Policy(("fedavg", "mine:Own"), 3, True, 2.5)
    settings = client_command(tmp_path, "a:1", {"name": "ann", **policy.to_node()})[-1]
    assert Policy.of_node(NodeSettings.read(Path(settings)).config) == policy
    given.clear()
    CliRunner().invoke(app, ["client", str(tmp_path), "--data", "x.npz"], catch_exceptions=False)
    assert given == {}, "what is not given stays as client.toml says"
