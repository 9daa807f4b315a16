"""A server of buckets on loopback, for what is stored under s3://…: moto's, a process of its own.

It is for the way of the bytes; what a real server promises is tested with one (tests marked slow).
"""

import contextlib
import http.client
import http.server
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping

import pytest

_SAYS_PORT = re.compile(rb"Running on http://127\.0\.0\.1:(\d+)")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A running server's URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr
        found = next(filter(None, map(_SAYS_PORT.search, process.stderr)), None)
        assert found, f"the server of buckets ended with {process.wait(10)}"
        port = int(found[1])
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        drain.wait(10)
        process.stderr.close()


def environment(endpoint: str) -> dict[str, str]:
    """What a client of the server has in its environment."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def make_bucket(endpoint: str, name: str) -> None:
    """A new bucket."""
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()


@pytest.fixture(scope="session")
def bucket_server():
    """The URL of a server that serves all tests of this process."""
    with server() as endpoint:
        make_bucket(endpoint, "tests")
        yield endpoint


@pytest.fixture
def bucket(bucket_server, monkeypatch, request):
    """The URL of a place for one store."""
    for name, value in environment(bucket_server).items():
        monkeypatch.setenv(name, value)
    name = re.sub(r"\W+", "-", request.node.name)
    return f"s3://tests/{name}-{os.getpid()}"


class Proxy:
    """Stands before a server: it can be away, leave conditions out of what it passes on, or refuse
    requests as servers do. `refuses`: given method and headers, the status and code, or None."""

    def __init__(self, endpoint: str) -> None:
        self.is_away = self.drops_conditions = False
        self.refuses: Callable[[str, Mapping[str, str]], tuple[int, str] | None] = (
            lambda method, headers: None
        )
        proxy, host = self, endpoint.removeprefix("http://")

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self):
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                if proxy.is_away:
                    self.close_connection = True
                    return
                self.pass_on()

            def answer(self, status, code):
                data = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data if self.command != "HEAD" else b"")

            def pass_on(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = dict(self.headers)
                if refused := proxy.refuses(self.command, headers):
                    self.answer(*refused)
                    return
                if proxy.drops_conditions:
                    headers = {k: v for k, v in headers.items() if k.lower() != "if-none-match"}
                connection = http.client.HTTPConnection(host, timeout=60)
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = answer.headers["Content-Length"] if self.command == "HEAD" else len(data)
                self.send_header("Content-Length", str(length or 0))
                self.end_headers()
                self.wfile.write(data)
                connection.close()

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """It is away for good."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def proxy(bucket_server, bucket, monkeypatch):
    """A proxy, through which all clients of this test go to the server that they would ask."""
    found = Proxy(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", found.endpoint)
    yield found
    found.close()


@pytest.fixture
def proxied(bucket, bucket_server, monkeypatch):
    proxy = Proxy(bucket_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield bucket, proxy
    proxy.is_away = False
