"""Adapters of a server: named as the model, listed, loaded and unloaded by clients."""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import pytest

import mpjax
from mpjax.adapters.collection import Adapters
from tests.mpjax.checkpoint.adapters.write_adapter import write_adapter
from tests.mpjax.conftest import TINY

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

ASKED = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(folder / name, TINY, seed))
        for seed, name in enumerate(("a", "b", "c"))
    }


@pytest.fixture(scope="module")
def adapted(lm, folders):
    adapted = dataclasses.replace(lm, adapters=Adapters())
    adapted.reserve_adapters(2, 8)
    adapted.add_adapter("a", folders["a"])
    return adapted


@pytest.fixture(scope="module")
def client(adapted):
    from mpjax.serve.application import Limits, application
    from tests.mpjax.serve.running import Server

    engine = mpjax.Engine(adapted, slots=4, chunk_tokens=64, steps=4)
    with (
        Server(application(engine, "tiny", Limits(adapters=2))) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


def completion(client, model):
    answer = client.post("/v1/completions", json=ASKED | {"model": model})
    return answer.status_code, answer.json()


def text_of(adapted, name):
    options = {"max_new_tokens": 6, "sampling": {"temperature": 0}}
    return mpjax.generate(adapted, [ASKED["prompt"]], adapter=name, **options).text[0]


def test_model_names_an_adapter(client, adapted):
    for model, name in (("a", "a"), ("tiny", None)):
        status, found = completion(client, model)
        assert (status, found["model"]) == (200, model)
        assert found["choices"][0]["text"] == text_of(adapted, name)
    assert text_of(adapted, "a") != text_of(adapted, None)
    listed = client.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [("tiny", None), ("a", "tiny")]
    assert client.get("/v1/models/a").json()["parent"] == "tiny"


def test_clients_load_and_unload(client, adapted, folders):
    status, found = completion(client, "b")
    assert status == 404
    assert found["error"]["message"] == 'there is no model "b": this server has "tiny", "a"'
    load = {"lora_name": "b", "lora_path": folders["b"]}
    loaded = client.post(LOAD, json=load)
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'b' added successfully.",
    )
    assert completion(client, "b")[1]["choices"][0]["text"] == text_of(adapted, "b")
    again = client.post(LOAD, json=load | {"lora_path": folders["c"]})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    more = client.post(LOAD, json=load | {"lora_name": "c"})
    assert "there is room for 2 adapters: unload one" in more.json()["error"]["message"]
    running = adapted.adapters.take("b")
    assert client.post(UNLOAD, json={"lora_name": "b"}).status_code == 200
    assert client.post(LOAD, json=load | {"lora_name": "c"}).status_code == 400
    adapted.adapters.give_back(running)
    assert client.post(LOAD, json=load).status_code == 200
    plain = {"content": json.dumps(load), "headers": {"Content-Type": "text/plain"}}
    assert client.post(UNLOAD, **plain).status_code == 415
    before = text_of(adapted, "b")
    replaced = load | {"lora_path": folders["c"], "load_inplace": True}
    assert client.post(LOAD, json=replaced).status_code == 200
    assert completion(client, "b")[1]["choices"][0]["text"] == text_of(adapted, "b") != before
    assert client.post(UNLOAD, json={"lora_name": "b"}).status_code == 200
    assert completion(client, "b")[0] == 404
    assert client.post(UNLOAD, json={"lora_name": "b"}).status_code == 404


def test_the_server_answers_while_an_adapter_is_loaded(client, adapted, folders, monkeypatch):
    """Also where a request for an adapter waits, and where one with an adapter ends."""
    is_loading, may_end = threading.Event(), threading.Event()
    put = Adapters._put

    def slow(*arguments):
        is_loading.set()
        assert may_end.wait(60)
        put(*arguments)

    monkeypatch.setattr(Adapters, "_put", slow)
    running = adapted.adapters.take("a")
    answers = {}

    def ask(path, body):
        answers[path] = httpx.post(f"{client.base_url}{path}", json=body, timeout=120).status_code

    asked = {LOAD: {"lora_name": "slow", "lora_path": folders["c"]}}
    asked |= {"/v1/completions": ASKED | {"model": "a"}}
    threads = [threading.Thread(target=ask, args=each) for each in asked.items()]
    try:
        threads[0].start()
        assert is_loading.wait(60)
        threads[1].start()
        adapted.adapters.give_back(running)
        for _ in range(20):
            assert client.get("/health", timeout=5).status_code == 200
            time.sleep(0.01)
        assert answers == {}
    finally:
        may_end.set()
        for thread in threads:
            thread.join()
    assert answers == {LOAD: 200, "/v1/completions": 200}
    adapted.remove_adapter("slow")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"lora_path": "x"}, "lora_name is missing"),
        ({"lora_name": "x"}, "lora_path is missing"),
        ({"lora_name": "tiny", "lora_path": "x"}, 'lora_name is "tiny", which is there'),
        ({"lora_name": "x", "lora_path": "/no/folder"}, "has no adapter_config.json"),
        ({"lora_name": "x", "lora_path": 1}, "lora_path is 1: expected"),
        ({"lora_name": "x", "lora_path": "~nobody-has-this-name"}, "~nobody-has-this-name: "),
        ({"lora_name": "\ud800", "lora_path": "x"}, r'lora_name is "\ud800": expected a text'),
        ({"lora_name": "x", "lora_path": "x", "rank": 1}, '"rank" is no key of this request'),
        ([], "the body is not a JSON object"),
    ],
)
def test_bodies_are_refused(client, body, said):
    content, headers = json.dumps(body), {"Content-Type": "application/json"}
    answer = client.post(LOAD, content=content, headers=headers)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_server_loads_none_unless_it_is_told_to(lm):
    from mpjax.serve.adapters import ServedAdapters
    from mpjax.serve.errors import RequestError

    with pytest.raises(RequestError, match="loads no adapters: start it with --max-adapters"):
        ServedAdapters(lm, "tiny", 0).load(lm, {"lora_name": "x", "lora_path": "x"})
