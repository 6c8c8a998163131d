"""`pefll flower ...` on the command line: what it makes, and one sentence for everything that is wrong."""

from __future__ import annotations

import re
import stat
import sys

import numpy as np
import pytest

from pefll.cli import flower, main
from pefll.deploy import foreground
from pefll.runs.record import RunFolder


def pefll(capsys, *words: str) -> tuple[int, str]:
    """Run the command line; return the exit code and all that was said."""
    before = sys.argv
    sys.argv = ["pefll", *words]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    said = capsys.readouterr()
    return int(ended.value.code or 0), " ".join((said.out + said.err).split())


def test_without_flower_there_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "flwr", None)
    for words in (
        ["init", str(tmp_path / "f"), "--like", "digits"],
        ["server", "x"],
        ["demo"],
        ["personalize", "x"],
        ["run", "x"],
    ):
        code, said = pefll(capsys, "flower", *words)
        assert code == 2
        assert said.startswith("error: real clients need Flower: pip install flwr==1.41.0 [PEFLL-")


def test_the_verbs_explain_themselves(capsys):
    code, said = pefll(capsys, "flower", "--help")
    assert code == 0
    for verb in ("init", "server", "client", "run", "add", "renew", "personalize", "demo"):
        assert verb in said
    assert flower.app.info.help


class TestWithFlower:
    @pytest.fixture(autouse=True)
    def _flower(self, tmp_path, monkeypatch):
        pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")
        monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))

    @pytest.fixture
    def federation(self, tmp_path, capsys):
        from pefll.deploy.processes import free_port

        folder = tmp_path / "my-federation"
        words = ["--like", "digits", "--clients", "alice,bob", "--method", "pefll", "--set", "local_steps=3"]
        code, said = pefll(capsys, "flower", "init", str(folder), *words, "--address", f"127.0.0.1:{free_port()}")
        assert code == 0, said
        return folder

    def test_one_client_is_one(self, tmp_path, capsys):
        folder = tmp_path / "alone"
        code, said = pefll(capsys, "flower", "init", str(folder), "--like", "digits", "--clients", "ann")
        assert code == 0, said
        assert "a federation of 1 client for pefll" in said
        assert "A federation of 1 client for pefll" in (folder / "README.md").read_text()

    def test_without_an_example_it_is_for_the_digits_of_the_demo(self, tmp_path, capsys):
        from pefll.deploy.plan import read_app

        folder = tmp_path / "my-federation"
        code, said = pefll(capsys, "flower", "init", str(folder))
        assert code == 0, said
        assert "--like example.npz" in said
        agreed = read_app(folder).agreement
        assert (agreed.input_shape, agreed.classes, agreed.num_clients) == ((1, 8, 8), 10, 8)

    def test_keys_are_short_and_longer_ones_are_taken_too(self, tmp_path):
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_private_key

        from pefll.deploy.certificates import make_node_key, public_key_as_pem

        for curve, bits in ((None, 256), (ec.SECP384R1(), 384)):
            private, public = tmp_path / f"{bits}.key", tmp_path / f"{bits}.pub"
            make_node_key(private, public, curve)
            key = load_ssh_private_key(private.read_bytes(), None)
            known = load_pem_public_key(public_key_as_pem(public))
            assert (key.key_size, known.public_numbers()) == (bits, key.public_key().public_numbers())

    def test_init_makes_a_ready_app(self, federation, tmp_path):
        from flwr.cli.build import build_fab_from_disk
        from flwr.cli.config_utils import load_and_validate

        from pefll.deploy.plan import read_app

        _, warnings = load_and_validate(federation / "pyproject.toml")
        assert not warnings
        plan = read_app(federation)
        assert plan.names == ("alice", "bob")
        assert plan.agreement.settings == {"local_steps": 3}
        assert plan.agreement.normalise is not None
        assert "pefll flower run my-federation" in (federation / "README.md").read_text()
        for secret in ("server/ca.key", "server/server.key", "clients/alice/node.key"):
            assert stat.S_IMODE((federation / secret).stat().st_mode) == 0o600
        import io
        import zipfile

        travels = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(federation))).namelist()
        assert not any(word in name for name in travels for word in ("key", "crt", "clients", "server", "run"))

    def test_init_keeps_how_rounds_are_trained(self, tmp_path, capsys):
        from pefll.deploy.plan import read_app
        from pefll.deploy.server_app import config_of

        folder = tmp_path / "f"
        words = ["--lr-schedule", "cosine 0.1", "--server-lr-schedule", "step 5 0.5", "--sampling", "samples"]
        code, said = pefll(capsys, "flower", "init", str(folder), *words, "--eval-every", "7", "--clients", "2")
        assert code == 0, said
        config = config_of(read_app(folder))
        assert (config.lr_schedule, config.server_lr_schedule) == ("cosine 0.1", "step 5 0.5")
        assert (config.sampling, config.eval_every) == ("samples", 7)
        mine = ["--sampling", "tests.engines.test_sampling:in_turn"]
        code, said = pefll(capsys, "flower", "init", str(tmp_path / "own"), *mine)
        assert (code, "PEFLL_CODE=tests.engines.test_sampling:in_turn" in said) == (0, True)

    def test_an_example_whose_columns_have_other_names(self, tmp_path, capsys):
        from pefll.deploy.plan import read_app

        table = tmp_path / "example.csv"
        table.write_text("a,b,writer,kind\n" + "".join(f"{n},{n * n}.5,ann,{n % 2}\n" for n in range(6)))
        words = ["--like", str(table), "--clients", "2", "--label", "kind"]
        code, said = pefll(capsys, "flower", "init", str(tmp_path / "f"), *words, "--client-column", "writer")
        assert code == 0, said
        assert read_app(tmp_path / "f").agreement.feature_names == ("a", "b")
        code, said = pefll(capsys, "flower", "init", str(tmp_path / "g"), *words, "--client-column", "wrter")
        assert code == 2
        assert re.search(r"'wrter'.* a, b, writer, kind\b.*--client-column.*PEFLL-", said)
        assert not (tmp_path / "g").exists()

    def test_the_path_of_the_data_can_be_in_the_environment(self, federation, capsys, monkeypatch):
        monkeypatch.setenv("PEFLL_DATA", "nothing.npz")  # and not in the list of processes, which everybody can read
        code, said = pefll(capsys, "flower", "client", str(federation), "--name", "bob")
        assert code == 2
        assert "there is no file or folder nothing.npz" in said

    def test_a_second_run_is_refused_before_the_server_is_asked(self, federation, capsys):
        with RunFolder(federation / "run").held():
            code, said = pefll(capsys, "flower", "run", str(federation))
        assert code == 2
        assert "PEFLL-F006" in said

    def test_ctrl_c_says_that_the_run_goes_on(self, federation, capsys, monkeypatch):
        (federation / ".flower").mkdir(exist_ok=True)
        (federation / ".flower" / "credentials.yaml").write_text("")
        asked = [sys.executable, "-c", "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(30)"]
        monkeypatch.setattr(foreground, "run_command", lambda *_: asked)
        code, said = pefll(capsys, "flower", "run", str(federation))
        assert code == 130
        assert "the run goes on in the server" in said
        assert "before there was anything to save" not in said

    def test_clients_can_be_added_and_certificates_renewed(self, federation, capsys):
        authority = (federation / "server" / "ca.crt").read_bytes()
        before = (federation / "server" / "server.crt").read_bytes()
        code, said = pefll(capsys, "flower", "add", str(federation), "carol")
        assert code == 0, said
        assert (federation / "clients" / "carol" / "ca.crt").read_bytes() == authority
        code, said = pefll(capsys, "flower", "renew", str(federation))
        assert code == 0
        assert "is valid until" in said
        assert (federation / "server" / "ca.crt").read_bytes() == authority
        assert (federation / "server" / "server.crt").read_bytes() != before

    @pytest.mark.parametrize(
        ("file", "words", "error"),
        [
            ("clients/bob/client.toml", ["client", "FED", "--data", ".", "--name", "bob"], "PEFLL-F202"),
            ("pyproject.toml", ["add", "FED", "zoe"], "PEFLL-F203"),
        ],
    )
    def test_a_file_of_tables_within_tables_gets_one_sentence(self, file, words, error, federation, capsys):
        with (federation / file).open("a") as out:
            out.write(f"\ndeep = {'[' * 100_000}\n")
        code, said = pefll(capsys, "flower", *(str(federation) if word == "FED" else word for word in words))
        assert (code, said.count("error:")) == (2, 1)
        assert error in said

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["init", "FED", "--like", "digits"], "PEFLL-F205"),
            (["init", "NEW", "--like", "digits", "--address", "nonsense"], "PEFLL-F204"),
            (["init", "NEW", "--like", "digits", "--address", "fl.example.org:99999"], "PEFLL-F204"),
            (["init", "NEW", "--like", "digits", "--rounds", "0"], "PEFLL-C009"),
            (["init", "NEW", "--like", "digits", "--clients", "a,a"], "PEFLL-F414"),
            (["init", "NEW", "--like", "digits", "--clients", "0"], "PEFLL-F425"),
            (["init", "NEW", "--like", "digits", "--method", "nope"], "unknown method"),
            (["init", "NEW", "--like", "digits", "--set", "nope=1"], "unknown hyper-parameter"),
            (["init", "NEW", "--like", "digits", "--set", "nope"], "PEFLL-F426"),
            (["init", "NEW", "--like", "digits", "--quorum", "2"], "quorum is 2.0"),
            (["init", "NEW", "--like", "digits", "--clients-per-round", "9"], "PEFLL-C008"),
            (["init", "NEW", "--like", "nothing.npz"], "PEFLL-D178"),
            (["init", "NEW", "--lr-schedule", "cosines"], "did you mean 'cosine'"),
            (["init", "NEW", "--lr-schedule", "step 0 2"], "PEFLL-A550"),
            (["init", "NEW", "--method", "fedavg", "--server-lr-schedule", "cosine"], "PEFLL-S550"),
            (["init", "NEW", "--sampling", "sample"], "did you mean 'samples'"),
            (["init", "NEW", "--eval-every", "0"], "PEFLL-C009"),
            (["server", "NEW"], "PEFLL-F207"),
            (["run", "NEW"], "PEFLL-F207"),
            (["run", "FED"], "[PEFLL-F003]"),
            (["add", "FED", "alice"], "PEFLL-F206"),
            (["add", "FED", "a b"], "PEFLL-F413"),
            (["add", "FED", "CON"], "'CON' cannot be a name: Windows reserves that name for a device"),
            (["client", "FED", "--data", "DATA"], "PEFLL-F208"),
            (["client", "FED", "--data", "DATA", "--name", "zoe"], "PEFLL-F202"),
            (["client", "FED", "--data", "nothing.npz", "--name", "bob"], "PEFLL-F424"),
            (["client", "FED", "--data", "DATA", "--name", "bob"], "there is no server at 127.0.0.1:"),
            (["demo", "--clients", "1", "--out", "NEW"], "PEFLL-F120"),
            (["demo", "--out", "FED"], "PEFLL-F122"),
        ],
    )
    def test_bad_input_gets_one_sentence(self, words, sentence, federation, tmp_path, capsys):
        np.savez(tmp_path / "data.npz", x=np.zeros((4, 1, 8, 8), dtype=np.uint8), y=np.zeros(4, dtype=np.int64))
        places = {"FED": str(federation), "NEW": str(tmp_path / "new"), "DATA": str(tmp_path / "data.npz")}
        code, said = pefll(capsys, "flower", *(places.get(word, word) for word in words))
        assert code == 2
        assert sentence in said
        assert said.count("error:") == 1
