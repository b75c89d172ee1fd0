"""An engine over two processes, as `mpjax serve` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

import mpjax
from mpjax.engine import alike, processes
from mpjax.engine.filling import Layout, stepping
from mpjax.engine.planner import Decode
from mpjax.engine.processes import LENGTHS, Launch, pack, unpack
from mpjax.errors import ProcessLostError
from tests.mpjax.engine.conftest import make_engine

PROMPT = "def f(x):\n    return"
ANSWERED = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
CONSTRAINED = {**ANSWERED, "structured_outputs": {"regex": "[a-c]{3}(yes|no)"}}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def asked(port, body, path="completions"):
    """The status and the object of an answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def metrics(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return answer.read()


@pytest.fixture
def servers(tiny_folder):
    """The two processes of a server, and its port; they share no terminal with the test."""
    pytest.importorskip("uvicorn")
    port, coordinator = free_port(), f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mpjax", "serve", "--model", str(tiny_folder)]
    command += ["--slots", "2", "--max-tokens", "256", "--chunk-tokens", "16", "--port", str(port)]
    command += ["--processes", "2", "--coordinator", coordinator, "--process"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    started = [
        subprocess.Popen(
            [*command, str(number)], stderr=subprocess.PIPE, text=True, env=environment
        )
        for number in range(2)
    ]
    try:
        for line in started[0].stderr:
            if "listening" in line:
                break
        else:
            raise AssertionError(started[1].communicate(timeout=30))
        yield started, port
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_two_processes_serve_a_model(servers, tiny):
    """The tokens are those of one process; without a follower requests end with its number."""
    (leader, follower), port = servers
    alone = mpjax.generate(tiny, [PROMPT], max_new_tokens=12, sampling={"temperature": 0})
    assert asked(port, ANSWERED)[1]["choices"][0]["text"] == alone.text[0]
    text = asked(port, CONSTRAINED)[1]["choices"][0]["text"]
    constraint = mpjax.Regex(CONSTRAINED["structured_outputs"]["regex"])
    with make_engine(tiny) as engine:
        assert text == engine.submit(PROMPT, constraint=constraint).result().text
    status, refused = asked(port, {"input": "x"}, "embeddings")
    assert (status, refused["error"]["code"]) == (400, "unsupported_parameter")
    assert "not computed over 2 processes" in refused["error"]["message"]

    found = []
    long = threading.Thread(
        target=lambda: found.append(asked(port, {**ANSWERED, "max_tokens": 200, "n": 8}))
    )
    follower.send_signal(signal.SIGSTOP)  # so that the request still runs when it is killed
    long.start()
    while b"mpjax_waiting 0" in (numbers := metrics(port)) and b"mpjax_running 0" in numbers:
        time.sleep(0.05)
    follower.kill()
    long.join(60)
    [(status, failed)] = found
    assert status == 500
    assert "process 1 of the engine is lost" in failed["error"]["message"]
    assert leader.wait(60) == 1
    assert "start the engine again in all processes" in leader.stderr.read()


def test_ctrl_c_ends_all_processes(servers):
    (leader, follower), port = servers
    assert asked(port, None, "models")[0] == 200  # from now on uvicorn reads signals
    leader.send_signal(signal.SIGINT)
    assert [leader.wait(60), follower.wait(60)] == [0, 0]


def test_a_launch_is_read_as_it_was_written(tiny):
    plan = Decode([], 4, True, [], 5)
    step = stepping(plan, Layout(3), rows=2, entries=4, columns=1)
    launch = Launch.of("decode", False, (step, plan), {"greedy": True})
    data = pack(launch)
    head, body = LENGTHS.unpack(data[: LENGTHS.size])
    head, body = data[LENGTHS.size :][:head], data[LENGTHS.size + head :][:body]
    found = unpack(head, body)
    assert jax.tree.structure(found.arguments[0]) == jax.tree.structure(step)
    assert jax.tree.all(jax.tree.map(np.array_equal, found.arguments[0], step))
    assert found.arguments[1] == Decode((), 4, True, (), 5)
    assert (found.name, found.how) == ("decode", (("greedy", True),))
    wrong = [b"[", b'{"kind": "open"}', b'{"array": ["object", 1]}', b"\xff", b"1", b"[" * 100_000]
    wrong += [b'{"array": ["int8", %d]}' % count for count in (-1, len(body) + 1, 2**70)]
    for one in wrong:
        with pytest.raises(ValueError, match="a message of another process can't be read"):
            unpack(one, body)


def test_only_processes_with_the_secret_are_taken(monkeypatch):
    """Strangers that send nothing, or are many, don't change how long process 0 waits."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "MOST_STRANGERS", 3)
    server, has_ended = socket.create_server(("127.0.0.1", 0)), threading.Event()
    address, secret = server.getsockname(), b"secret".ljust(32)

    def knock():
        while not has_ended.wait(0.05):
            with socket.create_connection(address) as stranger:
                stranger.sendall(processes.HELLO.pack(b"guessed", 1))

    with server, ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        oldest, *_ = [stack.enter_context(socket.create_connection(address)) for _ in range(4)]
        oldest.sendall(b"s")
        oldest.settimeout(4)
        pool.submit(knock)
        try:
            taken = pool.submit(processes._accepted, server, secret)
            assert oldest.recv(1) == b""
            with socket.create_connection(address) as member:
                member.sendall(processes.HELLO.pack(secret, 1))
                taken.result(4)[1].close()
            monkeypatch.setattr(processes, "CONNECT_SECONDS", 0.2)
            with pytest.raises(ProcessLostError, match=r"process 1 .* has not connected within 0"):
                pool.submit(processes._accepted, server, secret).result(4)
        finally:
            has_ended.set()


def test_a_lost_process_is_an_error_in_the_others(monkeypatch):
    ports, lost = queue.Queue(), queue.Queue()

    def shared(port):
        if port:
            ports.put(port)
            ports.put(port)
        return port or ports.get(), b"secret".ljust(32)

    def follow(number):
        this.number = number
        with processes.launches("127.0.0.1") as received:
            if number == 1:
                raise RuntimeError("out of memory")
            return list(received)

    this = threading.local()
    monkeypatch.setattr(processes, "_shared", shared)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: this.number)
    with ThreadPoolExecutor() as pool:
        first, second = (pool.submit(follow, number) for number in (1, 2))
        followers = processes.Followers("127.0.0.1", lost.put)
        assert "RuntimeError: out of memory" in str(lost.get(timeout=10))
        followers.close()
        with pytest.raises(RuntimeError, match="out of memory"):
            first.result(10)
        with pytest.raises(ProcessLostError, match=r"process 1 .* \(RuntimeError: out of memory"):
            second.result(10)


def test_processes_with_other_engines_are_refused(tiny, monkeypatch):
    with (
        make_engine(tiny) as engine,
        make_engine(tiny) as same,
        make_engine(tiny, "KV8", speculate=mpjax.Ngram(n=2)) as other,
    ):
        first = []

        def gather(own):
            first.append(own)
            return np.stack([first[0], own])

        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        alike.require_alike(engine._parts())
        alike.require_alike(same._parts())
        differing = "models, sizes of engines, proposers"
        with pytest.raises(ValueError, match=f"process 1 and process 0 have different {differing}"):
            alike.require_alike(other._parts())
    one, two = (alike.outline({"norm": jnp.full(3, value)}) for value in (1, 2))
    assert one != two


def test_where_an_engine_leads(tiny, monkeypatch):
    with make_engine(tiny) as engine:
        with pytest.raises(
            ValueError, match="lead needs a model that is divided among the devices"
        ):
            engine.lead("localhost")
        monkeypatch.setattr(type(tiny), "processes", 2)
        with pytest.raises(ValueError, match="process 0 calls follow: process 0 leads"):
            engine.follow("localhost")
        with pytest.raises(
            ValueError, match=r"host is '192\.0\.2\.1': expected the name or address"
        ):
            engine.lead("192.0.2.1")
