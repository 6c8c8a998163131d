"""The fault matrix with real processes: SuperLink, SuperNodes, TLS and keys on this machine. `make test-faults`.

Every part trains a small PeFLL and compares the server's state, bit for bit, with that of the serial engine in which
the clients that failed were absent from exactly the rounds in which they failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import flwr
import torch

from pefll.core.errors import PefllError
from pefll.core.files import write_json
from pefll.core.tree import named_leaves
from pefll.deploy.certificates import make_certificates, make_node_key
from pefll.deploy.loopback import Loopback
from pefll.deploy.processes import client_command, free_port, program, server_command, wait_for_server
from pefll.deploy.server_check import check_server
from pefll.engines.flower.protocol.names import client_name
from pefll.engines.flower.server.terms import Terms
from pefll.runs import checkpoint
from pefll.runs.record import RunFolder
from pefll.training.summary import commit
from tests.engines.flower.deployment import APPS, deploy, result, start, start_client
from tests.engines.flower.federations import Setting, WithoutSome, setting, sha256

CLIENTS = 4
BAD = 1
REPLIES = ("another-round", "shape", "dtype", "nan", "norm", "100mb", "another-format", "garbage", "raises", "late")
WORDS = {
    "another-round": "answered with round",
    "shape": "instead of float32",
    "dtype": "sent int64",
    "nan": "NaN or infinity",
    "norm": "times as long as the median",
    "100mb": "bytes, but at most",
    "another-format": "uses format 2, but this server uses 3: upgrade pefll on the client's machine",
    "garbage": "sent a list of tensors that cannot be read",
    "raises": "failed in its app",
    "late": "did not answer within",
}
TERMS = Terms(exchange_seconds=40, round_seconds=900, quorum=0.25, pause_seconds=2, patience_seconds=600)


def expected(here: Setting, absent: dict[int, set[int]], rounds: int) -> Any:
    engine = WithoutSome(here.federation, here.agreement.build(), here.agreement.seed, CLIENTS)
    engine.absent = absent
    try:
        return engine.advance(engine.start(), 0, rounds)
    finally:
        engine.close()


def wait_until(what: Callable[[], bool], seconds: float, why: str) -> None:
    ends = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends, f"waited {seconds:.0f} s in vain: {why}"
        time.sleep(0.2)


def replies(here: Setting, place: Path) -> list[dict[str, Any]]:
    """Each wrong reply in a round of its own, in one run."""
    script = " ".join(f"{kind}@{t}.{t % 3}" for t, kind in enumerate(REPLIES))
    with deploy(here, place, APPS, rounds=len(REPLIES), clients_per_round=CLIENTS, terms=TERMS) as there:
        start(there, here, {BAD: script})
        there.run(1800)
        found = result(there)
    wanted = expected(here, {t: {BAD} for t in range(len(REPLIES))}, len(REPLIES))
    same = found["sha256"] == sha256(wanted)
    rows = []
    for t, kind in enumerate(REPLIES):
        said = [reason for round_, name, reason in found["dropped"] if round_ == t and name == client_name(BAD)]
        rows.append(
            {
                "fault": f"a client's reply: {kind}",
                "exchange": t % 3,
                "log": said,
                "seconds_of_round": found["seconds"][t],
                "same_as_without_it": same,
                "ok": same and any(WORDS[kind] in reason for reason in said),
            }
        )
    return rows


def killed(here: Setting, place: Path) -> list[dict[str, Any]]:
    """Clients killed in each of the three exchanges; after the second, half of them are gone, then all but one."""
    with deploy(here, place, APPS, rounds=3, clients_per_round=CLIENTS, terms=TERMS) as there:
        start(there, here, {1: "killed@0.0", 2: "killed@1.1", 3: "killed@2.2"})
        there.run(1800)
        found = result(there)
    absent = {0: {1}, 1: {1, 2}, 2: {1, 2, 3}}
    same = found["sha256"] == sha256(expected(here, absent, 3))
    rows = []
    for t, names in absent.items():
        dropped = {name for round_, name, _ in found["dropped"] if round_ == t}
        rows.append(
            {
                "fault": f"a client killed in exchange {t}; {len(names)} of {CLIENTS} are gone",
                "exchange": t,
                "log": [f"{name} {reason}" for round_, name, reason in found["dropped"] if round_ == t],
                "seconds_of_round": found["seconds"][t],
                "same_as_without_it": same,
                "ok": same and dropped == {client_name(client) for client in names},
            }
        )
    return rows


def revive(there: Loopback, *names: str) -> None:
    """Restart the named processes that have ended by themselves."""
    for name in names:
        process = there.running.get(name)
        if process is not None and process.poll() is not None:
            there.end(name)
            there.start(name, process.args)  # type: ignore[arg-type]


def all_gone(here: Setting, place: Path) -> list[dict[str, Any]]:
    """All clients are killed after the first round and started again when the server has noticed."""
    terms = replace(TERMS, quorum=1.0)  # or the round would be done with the first that is back
    with deploy(here, place, APPS, rounds=2, clients_per_round=CLIENTS, terms=terms) as there:
        start(there, here)
        process = there.start_run()
        wait_until(lambda: "round 0 done" in there.log("run"), 600, "the first round")
        for client in range(CLIENTS):
            there.end(client_name(client), hard=True)
        wait_until(lambda: "the server tries again" in there.log("run"), 600, "the server to notice")
        for client in range(CLIENTS):
            start_client(there, here, client)
        while process.poll() is None:
            # As `pefll flower client` does: the server refuses a client while it takes its predecessor for connected.
            revive(there, *(client_name(client) for client in range(CLIENTS)))
            time.sleep(5)
        found = result(there)
    same = found["sha256"] == sha256(expected(here, {}, 2))
    return [
        {
            "fault": "all clients gone, and back",
            "log": [line for line in found["said"] if "repeated" in line][:3],
            "seconds_of_round": found["seconds"][1],
            "same_as_without_it": same,
            "ok": same,
        }
    ]


def server_killed(here: Setting, place: Path, exchange: int) -> list[dict[str, Any]]:
    """The server and its app are killed while an exchange of the second round is under way, and started again."""
    with deploy(here, place, rounds=2, clients_per_round=CLIENTS, eval_every=2, terms=TERMS) as there:
        start(there, here)
        process = there.start_run("first")
        wait_until(
            lambda: any(f"ROUND 1.{exchange}]" in there.log(client_name(client)) for client in range(CLIENTS)),
            900,
            "the exchange",
        )
        there.end("server", hard=True)
        process.wait(120)
        began = time.monotonic()
        there.start_server()
        there.run(1200, "second")
        saved = checkpoint.latest(RunFolder(there.folder / "run").checkpoints, print)
    same = all(torch.equal(saved.tensors[f"server.{name}"], leaf) for name, leaf in named_leaves(expected(here, {}, 2)))
    return [
        {
            "fault": f"the server killed in exchange {exchange} of a round, and started again",
            "exchange": exchange,
            "seconds_until_done": round(time.monotonic() - began, 1),
            "same_as_without_it": same,
            "ok": same and saved.round == 2,
        }
    ]


def not_let_in(here: Setting, place: Path) -> list[dict[str, Any]]:
    """Nodes with an unknown key, with another authority's certificate and without TLS; then an expired certificate."""
    rows = []
    with deploy(here, place, APPS, rounds=1, clients_per_round=CLIENTS, terms=TERMS) as there:
        others = strangers(there, here)
        there.start_server()
        for name, command in others.items():
            there.start(name, command)
        time.sleep(20)
        server = there.log("server")
        refused = [line.strip()[:160] for line in server.splitlines() if "fleet" in line and '" 4' in line]
        let_in = "Activated" in server
        reasons = {
            "unknown-key": refused[-1:],
            "wrong-certificate": [
                why_not(there.address, there.home / "wrong-certificate" / "ca.crt"),
                *said_by(there, "wrong-certificate", "CERTIFICATE_VERIFY_FAILED"),
            ],
            "no-tls": said_by(there, "no-tls", "Connection attempt failed"),
        }
        needed = {"unknown-key": "", "wrong-certificate": "not this federation's", "no-tls": ""}
        for name in others:
            ok = not let_in and bool(reasons[name]) and needed[name] in reasons[name][0]
            rows.append({"fault": name, "log": reasons[name], "ok": ok, "let_in": let_in})
        start_client(there, here, 0)  # an honest one is let in by the same server
        wait_until(lambda: "Activated" in there.log("server"), 60, "an honest client")
        there.end("server", *others, client_name(0))
        make_certificates(there.folder / "server", ["127.0.0.1"], days=-1)
        host, _, port = there.address.rpartition(":")
        there.start("expired", server_command(there.folder, host, int(port), None))
        wait_for_server(there.address, time.monotonic() + 60)
        start_client(there, here, 0)
        time.sleep(15)
        reason = why_not(there.address, there.folder / "server" / "ca.crt")
        ok = "Activated" not in there.log("expired") and "expired" in reason
        rows.append({"fault": "an expired certificate of the server", "log": [reason], "ok": ok, "let_in": False})
    return rows


def said_by(there: Loopback, name: str, words: str) -> list[str]:
    """Return the last line of a process that has some words in it, without its colours."""
    lines = [re.sub(r"\x1b\[\d+m", "", line).strip()[-200:] for line in there.log(name).splitlines()]
    return [line for line in lines if words in line][-1:]


def strangers(there: Loopback, here: Setting) -> dict[str, list[str]]:
    """Return the commands of nodes that must not be let in."""
    data = {"name": client_name(0), "data": str(here.folder / "client-000.npz")}
    commands = {}
    bundle = there.folder / "clients" / client_name(0)
    for name in ("unknown-key", "wrong-certificate", "no-tls"):
        own = there.home / name
        shutil.copytree(bundle, own)
        if name == "unknown-key":
            make_node_key(own / "node.key", own / "node.pub")
        if name == "wrong-certificate":
            make_certificates(own / "other", ["127.0.0.1"])
            shutil.copy(own / "other" / "ca.crt", own / "ca.crt")
        commands[name] = client_command(own, there.address, dict(data))
        if name == "no-tls":
            words = ["--insecure", "--superlink", there.address, "--host", "127.0.0.1", "--port", str(free_port())]
            commands[name] = [program("flower-supernode"), *words]
    return commands


def why_not(address: str, authority: Path) -> str:
    """Return what `pefll flower client` would say."""
    try:
        check_server(address, authority)
    except PefllError as error:
        return str(error)
    return ""


PARTS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "not_let_in": not_let_in,
    "killed": killed,
    "all_gone": all_gone,
    "server_killed_0": lambda here, place: server_killed(here, place, 0),
    "server_killed_1": lambda here, place: server_killed(here, place, 1),
    "server_killed_2": lambda here, place: server_killed(here, place, 2),
    "replies": replies,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/faults.json"))
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    given = parser.parse_args()
    before = json.loads(given.out.read_text()) if given.out.exists() else {}
    known = before.get("faults", {})
    known = {part: rows for part, rows in known.items() if part not in given.parts}
    for part in given.parts:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            here = setting(Path(folder), clients=CLIENTS)
            try:
                rows = PARTS[part](here, Path(folder) / "p")
            except (AssertionError, PefllError, subprocess.TimeoutExpired) as error:
                rows = [{"fault": part, "log": [str(error)[-1500:]], "ok": False}]
        made = {"commit": commit(), "finished": datetime.now(UTC).isoformat(timespec="seconds")}
        known[part] = [row | made for row in rows]
        for row in rows:
            print("ok  " if row["ok"] else "FAIL", row["fault"], row.get("log", ""), flush=True)
        write_json(
            given.out,
            before
            | {
                "command": "make test-faults",
                "python": platform.python_version(),
                "torch": torch.__version__,
                "flwr": flwr.__version__,
                "cores": os.cpu_count(),
                "faults": known,
            },
        )
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    bad = [row["fault"] for rows in known.values() for row in rows if not row["ok"]]
    raise SystemExit(f"failed: {bad}" if bad else 0)


if __name__ == "__main__":
    main()
