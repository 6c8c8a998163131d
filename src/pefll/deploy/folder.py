"""A federation's folder: everything that the server and each client need."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pefll.core.errors import PefllError
from pefll.core.files import sentences_for_disk_errors, write_whole
from pefll.core.wording import argument, counted
from pefll.deploy.certificates import make_certificates, make_node_key
from pefll.deploy.plan import Plan, check_names, no_federation, read_app, write_app
from pefll.deploy.private import check_owner, make_private_folder, tighten, write_private
from pefll.engines.flower.client.policy import MIN_SAMPLES, Policy

README = """# {name}

A federation of {clients} for {method}, made by `pefll flower init`.

On the server's machine:

    pefll flower server {name}                    # listens at {address}
    pefll flower run {name}                       # when the clients are connected; again after a stop: it resumes

On each client's machine, with its own folder from `clients/` (send it over a safe channel, then remove it here):

    pefll flower client CLIENT-NAME --data /path/to/my/data

Everybody needs pefll {version} and Flower: pip install flwr==1.41.0

`pefll flower add {name} NEW-NAME` adds a client. After training, `pefll flower personalize {name}` makes a model for
every connected client, also for those that did not train.

This folder holds secrets: it stays on the server's machine, and only its owner can read it. `run/` is the run:
`pefll show {name}/run`.
"""


class Bundle(NamedTuple):
    """The content of a client's folder.

    Attributes:
        folder: folder with ca.crt and node.key.
        name: name of the client.
        address: address of the server, host:port.
        policy: the default limits or stricter ones; the client's owner may set others.
        ignored: whether client.toml asks for looser limits, which have no effect.
    """

    folder: Path
    name: str
    address: str
    policy: Policy = Policy()
    ignored: bool = False


# The server's operator writes this file. So the file can make the client's limits stricter, but never looser.
CLIENT_FILE = """name = "{name}"
address = "{address}"
# What this client takes part in, and what it refuses. Limits here can be stricter than these and not looser: only
# options of `pefll flower client` (--min-samples, --allow-few, --numbers-per-sample) loosen them.
methods = "{methods}"             # names with commas between them; --methods names others
min-samples = {least}               # no reply is made from a batch of fewer samples
numbers-per-sample = 1.0      # how many numbers a descriptor may have for each sample behind it
"""


def check_new(folder: Path, address: str) -> None:
    """Raise PefllError if no federation can be made in this folder, or the server's address is not host:port."""
    check_names([folder.resolve().name])
    _check_address(address)
    if folder.exists() and any(folder.iterdir()):
        raise PefllError(
            f"{folder} exists already; choose another name, remove it, or add clients with `pefll flower add`",
            code="PEFLL-F205",
        )
    if folder.exists():
        check_owner(folder)


def make_federation(folder: Path, plan: Plan, address: str, hosts: Sequence[str] = ()) -> Plan:
    """Make the folder of a federation, and return the plan with the folder's path.

    Args:
        folder: path of the new folder.
        plan: all settings of the federation.
        address: address of the server, host:port.
        hosts: other names and addresses of the server's machine.
    """
    check_new(folder, address)
    host = address.rpartition(":")[0]
    make_private_folder(folder)  # comes first, so that no file in it is ever readable for others
    plan = dataclasses.replace(plan, folder=str(folder.resolve()))
    write_app(folder, folder.resolve().name, plan)
    make_certificates(folder / "server", [host, *hosts])
    for name in plan.names:
        _make_bundle(folder, name, address, plan.agreement.method)
    text = README.format(
        name=folder.resolve().name,
        clients=counted(len(plan.names), "client"),
        method=plan.agreement.method,
        address=address,
        version=plan.agreement.version,
    )
    write_whole(folder / "README.md", text.encode())
    write_whole(folder / ".gitignore", b"server/\nclients/\nrun/\n.flower/\n")
    write_private(folder / "server" / "address", f"{address}\n".encode())
    tighten(folder)
    return plan


def add_client(folder: Path, name: str) -> Bundle:
    """Make a folder and a key for one more client, which does not train and gets its model after training."""
    plan = read_app(folder)
    check_names([name])
    if name in plan.names or (folder / "keys" / f"{name}.pub").exists():
        raise PefllError(f"there is a client {name} already", code="PEFLL-F206")
    return _make_bundle(folder, name, server_address(folder), plan.agreement.method)


def change_address(folder: Path, address: str) -> list[Path]:
    """Change the address of a federation's server, host:port; return the changed files."""
    server_address(folder)  # raises PefllError unless this is a federation's folder
    _check_address(address)
    write_private(folder / "server" / "address", f"{address}\n".encode())
    places = [folder / "server" / "address"]
    for place in sorted((folder / "clients").glob("*/client.toml")):
        find_bundle(place.parent, None)  # raises PefllError unless this is a client's folder
        write_private(place, _with_address(place.read_text(encoding="utf-8"), address).encode())
        places.append(place)
    return places


def server_address(folder: Path) -> str:
    """Return the address of a federation's server, host:port."""
    try:
        return (folder / "server" / "address").read_text(encoding="utf-8").strip()
    except OSError:
        raise no_federation(folder) from None


def find_bundle(folder: Path, name: str | None) -> Bundle:
    """Return the content of a client's folder.

    Args:
        folder: the client's folder, or the federation's folder, which contains all clients' folders.
        name: name of the client; needed with the federation's folder.
    """
    if not (folder / "client.toml").is_file():
        if name is None:
            raise PefllError(
                f"{folder} is not a client's folder; name the client with {argument('name')}", code="PEFLL-F208"
            )
        folder = folder / "clients" / name
    try:
        settings = tomllib.loads((folder / "client.toml").read_text(encoding="utf-8"))
        asked = Policy.of_node(settings)
        policy = Policy().tightened(asked)
        bundle = Bundle(folder, str(settings["name"]), str(settings["address"]), policy, policy != asked)
    except (OSError, ValueError, KeyError, RecursionError):  # RecursionError: too many nested tables
        raise PefllError(
            f"{folder} is not a client's folder; `pefll flower init` and `pefll flower add` make one",
            code="PEFLL-F202",
        ) from None
    if name is not None and bundle.name != name:
        raise PefllError(f"{folder} is the folder of {bundle.name} and not of {name}", code="PEFLL-F209")
    for needed in ("ca.crt", "node.key"):
        if not (folder / needed).is_file():
            raise PefllError(f"{folder} has no {needed}; ask for the client's folder again", code="PEFLL-F210")
    return bundle


def _make_bundle(folder: Path, name: str, address: str, method: str) -> Bundle:
    place = folder / "clients" / name
    make_private_folder(place.parent)
    make_private_folder(place)
    make_node_key(place / "node.key", folder / "keys" / f"{name}.pub")
    with sentences_for_disk_errors(str(place)):
        shutil.copy(folder / "server" / "ca.crt", place / "ca.crt")
    text = CLIENT_FILE.format(name=name, address=address, methods=method, least=MIN_SAMPLES)
    write_private(place / "client.toml", text.encode())
    tighten(place)
    return Bundle(place, name, address, Policy((method,)))


def _with_address(text: str, address: str) -> str:
    """Return the text of a client.toml with a new address; all other settings stay the same."""
    return re.sub(r"^address\s*=.*$", lambda _: f'address = "{address}"', text, count=1, flags=re.MULTILINE)


def _check_address(address: str) -> None:
    """Raise PefllError for a text that is not host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PefllError(
            f"{address!r} is not an address; write it as host:port, for example fl.example.org:8000", code="PEFLL-F204"
        )
