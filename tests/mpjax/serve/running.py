"""A server that runs in a thread, and what its tests send."""

from __future__ import annotations

import socket
import threading
import time

import uvicorn

PROMPT = "def f(x):\n    return"
GREEDY = {"temperature": 0, "max_tokens": 12}
PAGE = "https://page.example"


class Server:
    """A server on a free port, in a thread."""

    def __init__(self, app):
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(app, log_config=None, log_level="error", lifespan="on")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self):
        self.thread.start()
        deadline = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()
