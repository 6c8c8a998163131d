"""A client's process: it answers with its owner's app, and runs no code that the server names."""

from __future__ import annotations

import stat
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from pefll.deploy.node import NodeSettings
from pefll.deploy.plan import CLIENT_APP, read_app, renew_app
from pefll.deploy.processes import client_command
from pefll.errors import PefllError


def test_settings_are_in_a_file_of_ones_own_and_not_in_the_argument_list(tmp_path):
    data = tmp_path / 'it\'s "mine".npz'
    command = client_command(tmp_path, "127.0.0.1:1", {"name": "ann", "data": str(data)}, code=["mine:Own"])
    assert command[-1] == str(tmp_path / "node.json")
    assert "npz" not in " ".join(command)
    assert stat.S_IMODE((tmp_path / "node.json").stat().st_mode) == 0o600
    read = NodeSettings.read(tmp_path / "node.json")
    assert (read.config["data"], read.app, list(read.code)) == (str(data), CLIENT_APP, ["mine:Own"])
    (tmp_path / "node.json").write_text("[]")
    with pytest.raises(PefllError) as caught:
        NodeSettings.read(tmp_path / "node.json")
    assert caught.value.code == "PEFLL-F002"


def test_a_client_imports_no_code_that_only_the_server_names(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nModel = Method = None\n")
    program = (
        "from pefll.named import allow_only, import_name\n"
        "from pefll.errors import PefllError\n"
        "allow_only(['json:dumps'])\n"
        "import_name('json:dumps', 'method')\n"
        "for name in ('evil:Method', 'subprocess:Popen'):\n"
        "    try:\n"
        "        import_name(name, 'method')\n"
        "    except PefllError as error:\n"
        "        assert error.code == 'PEFLL-F005', error\n"
        "    else:\n"
        "        raise SystemExit(f'{name} was imported')\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert not (tmp_path / "ran").exists()


def test_an_older_federation_names_the_clients_app_where_it_is_now(tmp_path):
    from pefll.deploy.plan import Plan, write_app
    from tests.engines.flower.federations import setting

    write_app(tmp_path, "fed", Plan(setting(tmp_path, clients=1).agreement, ("ann",)), client="pefll_node:client")
    renew_app(tmp_path)
    assert f'clientapp = "{CLIENT_APP}"' in (tmp_path / "pyproject.toml").read_text()
    assert read_app(tmp_path).names == ("ann",)
