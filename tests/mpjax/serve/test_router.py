"""The configuration of nginx in docs/serving.md, with two servers that answer their number."""

from __future__ import annotations

import http.server
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"
SESSIONS = [f"session-{number}" for number in range(12)]


class Numbered(http.server.BaseHTTPRequestHandler):
    """Answers with its number."""

    number, status = 0, 200

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        said = str(self.number).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_):
        pass


@pytest.fixture
def router(tmp_path):
    """The router's address, and the handlers of both servers."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    handlers = [type("Handler", (Numbered,), {"number": number}) for number in range(2)]
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), each) for each in handlers]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _, _, rest = PAGE.read_text().partition("```nginx\n")
    text, _, _ = rest.partition("```")
    for old, new in zip((8000, 8001, 8002), (port, *(s.server_port for s in servers)), strict=True):
        assert text.count(f"127.0.0.1:{old}") == 1
        text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    places = f"pid {tmp_path}/pid;\nerror_log {tmp_path}/log;\ndaemon off;\n"
    (tmp_path / "nginx.conf").write_text(places + text)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    running = subprocess.Popen([nginx, "-c", tmp_path / "nginx.conf"], stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as one:
                if not one.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1/completions", handlers
    finally:
        running.terminate()
        running.wait()
        for server in servers:
            server.shutdown()
            server.server_close()


def test_nginx_keeps_sessions_on_their_server(router):
    url, handlers = router

    def ask(session):
        request = urllib.request.Request(url, b"{}", {"X-Session-Id": session})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.read())

    first = [ask(session) for session in SESSIONS]
    assert set(first) == {0, 1}
    assert [ask(session) for session in SESSIONS] == first
    handlers[0].status = 503
    assert {ask(session) for session in SESSIONS} == {1}
