"""Apps for tests with real processes: a server that only does rounds, and a client that can be told to misbehave."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from pefll.deploy.apps import client as honest

server = ServerApp()


class Misbehaving(ClientApp):
    """Answers as every client does, but for what its node config says, such as trouble="nan@1.0 late@2.1".

    Each word is what happens, at which round and in which exchange of it.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        troubles = str(context.node_config.get("trouble", ""))
        if not troubles or not message.metadata.message_type.startswith("train."):
            return honest(message, context)
        from pefll.engines.flower.protocol.message import header_of

        header = header_of(message.content)
        here = f"@{header['round']}.{header['exchange']}"
        kinds = [word.removesuffix(here) for word in troubles.split() if word.endswith(here)]
        if not kinds:
            return honest(message, context)
        if kinds[0] == "killed":
            os.killpg(os.getpgid(0), signal.SIGKILL)  # with the SuperNode, which is the same process
        reply = honest(message, context)
        return misbehave(kinds[0], message, reply)


def misbehave(kind: str, message: Message, reply: Message) -> Message:
    import torch

    from pefll.engines.flower.protocol.message import header_of, pack, tensors_of

    header, tensors = header_of(reply.content), tensors_of(reply.content)
    if kind == "late":
        time.sleep(max(0.0, message.metadata.created_at + message.metadata.ttl + 1 - time.time()))
    elif kind == "another-round":
        header["round"] += 1
    elif kind == "shape":
        tensors["0"] = tensors["0"][:-1]
    elif kind == "dtype":
        tensors["0"] = tensors["0"].long()
    elif kind == "nan":
        tensors["0"] = tensors["0"] * torch.nan
    elif kind == "norm":
        tensors["0"] = 1e6 * tensors["0"]
    elif kind == "100mb":
        tensors["more"] = torch.zeros(25_000_000)
    elif kind in ("another-format", "garbage"):
        record = reply.content["pefll"]
        record["format"], record["tensors"] = (2, "[]") if kind == "another-format" else (record["format"], "garbage")
        return Message(reply.content, reply_to=message)
    elif kind == "raises":
        raise RuntimeError("a client's own error")
    else:
        raise AssertionError(kind)
    return Message(pack(header, tensors), reply_to=message)


client = Misbehaving()


@server.main()
def main(grid: Any, context: Context) -> None:
    """Do all rounds, and write what came of them beside the federation's folder."""
    from pefll.deploy.plan import Plan
    from pefll.engines.flower.server.engine import FlowerEngine
    from tests.engines.flower.federations import sha256

    plan = Plan.from_config(context.run_config)
    said: list[str] = []
    seconds: list[float] = []

    def report(sentence: str) -> None:
        said.append(sentence)
        print(sentence, flush=True)

    engine = FlowerEngine(grid, plan.agreement, plan.names, plan.clients_per_round, plan.terms, report)
    engine.roster.wait_for(plan.wait_clients or len(plan.names), plan.wait_seconds)
    state = engine.start()
    for t in range(plan.rounds):
        began = time.monotonic()
        state = engine.advance(state, t, 1)
        seconds.append(round(time.monotonic() - began, 2))
        print(f"round {t} done in {seconds[-1]} s", flush=True)
    result = {"sha256": sha256(state), "dropped": engine.dropped, "said": said, "seconds": seconds}
    result["ledger"] = vars(engine.ledger)
    place = Path(plan.folder) / "result.json"
    place.with_suffix(".part").write_text(json.dumps(result))
    place.with_suffix(".part").rename(place)
