import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from pefll.core.errors import PefllError
from pefll.data import download
from pefll.data.download import Archive, fetch, get

CONTENT = np.random.default_rng(0).bytes(2_000_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Sends CONTENT; its behaviour is set by the test."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.knows_range = True
        self.break_after = []  # bytes to send before the connection is cut, for each request in turn
        self.status = None
        self.shift = 0
        self.ranges = []

    def handle_error(self, *_):
        """A client that hangs up is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        if self.server.status:
            self.send_error(self.server.status)
            return
        start = 0
        if wanted and self.server.knows_range:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(CONTENT):
                self.send_error(416)
                return
            start += self.server.shift
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        else:
            self.send_response(200)
        body = CONTENT[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        stop = self.server.break_after.pop(0) if self.server.break_after else len(body)
        self.wfile.write(body[:stop])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = Server()
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.fixture
def archive(server):
    return Archive(f"http://127.0.0.1:{server.server_port}/a.tar.gz", "a.tar.gz", MD5)


def test_whole_file_with_progress(server, archive, tmp_path):
    seen = []
    path = fetch(archive, tmp_path, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)
    assert [each.name for each in tmp_path.iterdir()] == ["a.tar.gz"]
    # What is there and right is not downloaded again.
    assert fetch(archive, tmp_path) == path
    assert server.ranges == [None]


def test_a_broken_transfer_is_continued(server, archive, tmp_path):
    server.break_after = [700_000, 600_000]
    assert fetch(archive, tmp_path).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=700000-", "bytes=1300000-"]


def test_a_broken_transfer_is_continued_by_the_next_call(server, archive, tmp_path):
    server.break_after = [700_000, 0]
    with pytest.raises(PefllError, match=r"700,000 bytes.*PEFLL-D132"):
        fetch(archive, tmp_path)
    assert not (tmp_path / "a.tar.gz").exists()
    assert (tmp_path / "a.tar.gz.part").stat().st_size == 700_000
    assert fetch(archive, tmp_path).read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=700000-"


def test_a_server_that_ignores_ranges_starts_anew(server, archive, tmp_path):
    server.knows_range = False
    (tmp_path / "a.tar.gz.part").write_bytes(CONTENT[:1000])
    assert fetch(archive, tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]


def test_a_server_that_sends_another_range_is_not_believed(server, archive, tmp_path):
    server.shift = 1
    (tmp_path / "a.tar.gz.part").write_bytes(CONTENT[:1000])
    with pytest.raises(PefllError, match=r"another part.*PEFLL-D132"):
        fetch(archive, tmp_path)
    assert (tmp_path / "a.tar.gz.part").read_bytes() == CONTENT[:1000]


def test_a_part_that_is_whole_already(server, archive, tmp_path):
    (tmp_path / "a.tar.gz.part").write_bytes(CONTENT)
    assert fetch(archive, tmp_path).read_bytes() == CONTENT


def test_a_link_in_place_of_the_part_is_not_followed(server, archive, tmp_path):
    mine = tmp_path / "mine"
    mine.touch()
    download.part_of(archive, tmp_path).symlink_to(mine)
    with pytest.raises(PefllError, match="PEFLL-D131"):
        fetch(archive, tmp_path)
    assert mine.read_bytes() == b""


def test_wrong_md5_is_removed(server, archive, tmp_path):
    with pytest.raises(PefllError, match="PEFLL-D133"):
        fetch(archive._replace(md5="0" * 32), tmp_path)
    assert list(tmp_path.iterdir()) == []
    # A part of something else is found out, removed, and the next call starts anew.
    (tmp_path / "a.tar.gz.part").write_bytes(b"x" * 1000)
    with pytest.raises(PefllError, match="PEFLL-D133"):
        fetch(archive, tmp_path)
    assert fetch(archive, tmp_path).read_bytes() == CONTENT


def test_a_damaged_file_in_place_is_replaced(server, archive, tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"damaged")
    assert fetch(archive, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("status", [404, 500])
def test_http_errors_say_what_to_do(server, archive, tmp_path, status):
    server.status = status
    with pytest.raises(PefllError, match=rf"{archive.url}.*\b{status}\b.*`pefll data check.*PEFLL-D130"):
        fetch(archive, tmp_path)


def test_offline(archive, server, tmp_path):
    closed = Archive("http://127.0.0.1:9/a.tar.gz", "a.tar.gz", MD5)
    with pytest.raises(PefllError, match="PEFLL-D132") as caught:
        fetch(closed, tmp_path)
    assert closed.url in str(caught.value)


def test_get_by_name(archive, tmp_path, monkeypatch):
    monkeypatch.setitem(download.ARCHIVES, "cifar10", archive)
    path = get("cifar10", tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "a.tar.gz"
    assert get("digits", tmp_path) is None
    assert get("cifar10", str(tmp_path / "new" / "folder")) == path
    for name in ("femnist", "shakespeare", "mnist_writers"):
        with pytest.raises(PefllError, match="PEFLL-D128") as caught:
            get(name, tmp_path)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(PefllError, match="shakespeare cannot be downloaded"):
        get("shakespeare_tenth", tmp_path)
    with pytest.raises(PefllError, match=r"did you mean 'cifar100'.*PEFLL-A101"):
        get("cifar1000", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PefllError, match="PEFLL-D129"):
        get("cifar10", tmp_path / "file" / "folder")


def test_the_official_archives():
    assert all(archive.url.endswith(archive.file) for archive in download.ARCHIVES.values())
