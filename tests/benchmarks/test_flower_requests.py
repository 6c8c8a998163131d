"""The proxy that looks into the requests of Flower's clients passes them on as they are and counts them by path."""

from __future__ import annotations

import http.client
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install flwr==1.41.0")

from benchmarks.flower_requests import Bytes, OpeningProxy, since
from pefll.deploy.certificates import make_certificates
from pefll.deploy.processes import free_port


class Doubling(BaseHTTPRequestHandler):
    """Answers a request with its content twice."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(2 * len(content)))
        self.end_headers()
        self.wfile.write(2 * content)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def test_requests_are_passed_on_and_counted_by_path(tmp_path):
    make_certificates(tmp_path, ["127.0.0.1"])
    secret = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secret.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Doubling)
    server.socket = secret.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = free_port()
    proxy = OpeningProxy(port, server.server_port, tmp_path)
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=20)
    try:
        for path, content in (("/a", b"12345"), ("/b", b"x" * 100_000), ("/a", b"")):
            connection.request("POST", path, body=content)
            assert connection.getresponse().read() == 2 * content
        counts = proxy.counts()
    finally:
        connection.close()
        server.shutdown()
        server.server_close()
    assert counts["/a"]._replace(heads=0) == Bytes(2, 0, 5, 10)
    assert counts["/b"]._replace(heads=0) == Bytes(1, 0, 100_000, 200_000)
    assert 100 < counts["/b"].heads < 1000
    assert list(since({"/a": counts["/a"]}, counts)) == ["/b"]
