"""The server over real connections, by httpx and by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import jax
import numpy as np
import pytest

import mpjax

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from mpjax.serve.application import Limits, application  # noqa: E402
from mpjax.serve.errors import RequestError  # noqa: E402
from tests.mpjax.serve.running import GREEDY, PAGE, PROMPT  # noqa: E402


def events(text):
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def idle(engine, seconds=30):
    """Waits until no request runs."""
    deadline = time.monotonic() + seconds
    while engine.has_work:
        assert time.monotonic() < deadline, "a request runs on"
        time.sleep(0.02)


def test_a_completion(client, alone):
    found = client.post("/v1/completions", json={"prompt": PROMPT, "model": "tiny"} | GREEDY).json()
    [choice] = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (alone.text[0], "length")
    assert (found["object"], found["model"]) == ("text_completion", "tiny")
    assert found["usage"]["completion_tokens"] == 12
    assert found["usage"]["prompt_tokens"] == alone.prompt_tokens[0]


def test_a_stream_has_the_same_text(client, alone):
    body = {"prompt": [PROMPT] * 2, "stream": True, "stream_options": {"include_usage": True}}
    response = client.post("/v1/completions", json=body | GREEDY | {"logprobs": 0})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events(response.text)
    assert done == "[DONE]"
    assert json.loads(last)["usage"]["completion_tokens"] == 24
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    texts, logprobs, reasons = ["", ""], [[], []], []
    for chunk in map(json.loads, chunks):
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
        reasons += filter(None, [choice["finish_reason"]])
    assert texts == alone.text * 2
    assert reasons == ["length"] * 2
    np.testing.assert_allclose(logprobs, alone.logprobs * 2, atol=1e-4)


def test_a_chat_whole_and_streamed(client, lm):
    messages = [{"role": "user", "content": "Why"}]
    expected = mpjax.generate(lm, [messages], max_new_tokens=12)
    body = {"messages": messages, "logprobs": True, "top_logprobs": 1} | GREEDY
    found = client.post("/v1/chat/completions", json=body).json()
    [choice] = found["choices"]
    assert choice["message"]["content"] == expected.text[0]
    assert len(choice["logprobs"]["content"]) == len(expected.tokens[0])
    *chunks, _ = events(client.post("/v1/chat/completions", json=body | {"stream": True}).text)
    assert not any("usage" in json.loads(chunk) for chunk in chunks)  # which nobody asked for
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == expected.text[0]


def test_log_probabilities_of_a_prompt_as_the_harness_reads_them(client, lm):
    """lm_eval sends ids, and reads what lies between the context and the last token."""
    ids = np.random.default_rng(0).integers(1, 2048, 40).tolist()
    body = {"prompt": [ids, ids[:9]], "max_tokens": 1, "logprobs": 1, "echo": True}
    body |= {"temperature": 0, "seed": 1234, "model": "tiny"}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    logits = np.asarray(lm.model(np.array([ids])))[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for choice, length in zip(choices, (40, 9), strict=True):
        found, context = choice["logprobs"], 5
        expected = logprobs[np.arange(context - 1, length - 1), ids[context:length]]
        assert len(found["tokens"]) == length + 1
        assert found["token_logprobs"][0] is None
        np.testing.assert_allclose(found["token_logprobs"][context:-1], expected, atol=1e-4)
        best = [max(top.values()) for top in found["top_logprobs"][context:-1]]
        likeliest = logprobs[context - 1 : length - 1].max(-1)
        np.testing.assert_allclose(best, likeliest, atol=1e-4)
        assert choice["text"].startswith(lm.tokenizer.decode(ids[:9]))
    only = client.post("/v1/completions", json=body | {"max_tokens": 0}).json()
    assert only["usage"]["completion_tokens"] == 0
    assert len(only["choices"][1]["logprobs"]["tokens"]) == 9


def test_several_choices_differ_and_a_seed_repeats_them(client):
    body = {"prompt": PROMPT, "n": 3, "seed": 5, "max_tokens": 8}
    first, second = (client.post("/v1/completions", json=body).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert len({*texts}) == 3
    assert texts == [choice["text"] for choice in second["choices"]]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize("stream", [False, True])
def test_the_choices_of_each_prompt_are_neighbours(client, stream):
    prompts = [PROMPT, "import"]
    body = {"max_tokens": 8, "temperature": 0, "echo": True}
    alone = [
        client.post("/v1/completions", json=body | {"prompt": prompt}).json()["choices"][0]["text"]
        for prompt in prompts
    ]
    body |= {"prompt": prompts, "n": 2, "stream": stream}
    response = client.post("/v1/completions", json=body)
    found = [json.loads(one) for one in events(response.text)[:-1]] if stream else [response.json()]
    texts = ["", "", "", ""]
    for choice in (choice for one in found for choice in one["choices"]):
        texts[choice["index"]] += choice["text"]
    new = [text.removeprefix(prompt) for text, prompt in zip(alone, prompts, strict=True)]
    assert new[0] != new[1]
    assert texts == [alone[0], alone[0], alone[1], alone[1]]


def test_the_model_health_and_metrics(client, server):
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 256
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert "mpjax_new_tokens_total" in client.get("/metrics").text


def test_the_best_of_several_answers_come(client):
    """By log-probability per token, for each prompt."""
    body = {"prompt": ["x", "y"], "temperature": 1.5, "seed": 3, "max_tokens": 6, "logprobs": 0}

    def asked(**more):
        found = client.post("/v1/completions", json=body | more).json()
        ranked = [np.mean(one["logprobs"]["token_logprobs"]) for one in found["choices"]]
        texts = [one["text"] for one in found["choices"]]
        assert [one["index"] for one in found["choices"]] == [*range(len(texts))]
        return texts, ranked, found["usage"]

    texts, ranked, usage = asked(n=4)
    best, _, used = asked(n=2, best_of=4)
    expected = [
        texts[i] for at in (0, 4) for i in sorted(range(at, at + 4), key=lambda i: -ranked[i])[:2]
    ]
    assert best == expected
    assert len(set(expected)) > 1
    assert (used["prompt_tokens"], used["completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "x", "model": "other"}, 404, 'there is no model "other"'),
        ({"prompt": "x", "max_tokens": 5000}, 400, "the 256 tokens of a request"),
        ({"prompt": "x", "max_tokens": 5000}, 400, "maximum context length is 256 tokens"),
        ({"prompt": "x", "min_tokens": 20}, 400, "min_tokens is 20 and max_tokens 16"),
        ({"prompt": "x", "best_of": 3, "stream": True}, 400, "expected no stream, since the best"),
        ({"prompt": "x" * 30_000}, 413, "longer than 20000 bytes"),
        ({"prompt": "x", "n": 41}, 400, "ask for 41 answers, and at most 40 requests may wait"),
    ],
)
def test_what_is_refused_says_why(client, body, status, message):
    response = client.post("/v1/completions", json=body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_each_door_asks_for_the_key(client, server):
    for path in ("/v1/models", "/v1/models/tiny", "/metrics"):
        assert httpx.get(server.url + path).status_code == 401, path
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}).status_code == 401
    for path in ("/v1/responses", "/tokenize", "/detokenize"):
        assert httpx.post(server.url + path, json={}).status_code == 401, path
        assert client.post(path, json={"model": "other", "prompt": "x"}).status_code in (400, 404)
    found = client.post("/tokenize", json={"prompt": PROMPT, "model": "tiny"}).json()
    assert found["max_model_len"] == 256
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
    assert client.post("/v1/completions", content=b"{").status_code == 400
    missing = client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, None)


def test_scripts_of_named_pages_alone_may_read_answers(client):
    """As a browser asks before it sends them, and as it checks what it got."""
    asks = {"Access-Control-Request-Method": "POST"}
    asks |= {"Access-Control-Request-Headers": "authorization,content-type"}
    for origin, status in ((PAGE, 200), ("https://other.example", 400)):
        found = client.options("/v1/completions", headers={"Origin": origin} | asks)
        assert found.status_code == status
        body = {"prompt": PROMPT, "stream": True} | GREEDY
        found = client.post("/v1/completions", json=body, headers={"Origin": origin})
        allowed = found.headers.get("access-control-allow-origin")
        assert allowed == (PAGE if origin == PAGE else None)
        assert found.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(client, engine, stream):
    """The engine waits between its programs, so that the server hears of it before many have run.

    Without the client, 180 programs of 16 tokens would run.
    """
    idle(engine)
    before = engine.statistics()["new_tokens"]
    engine.observe(lambda run: time.sleep(0.02))
    body = {"prompt": PROMPT, "max_tokens": 240, "temperature": 0, "stream": stream, "n": 12}
    if stream:
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=0.05)
    idle(engine)
    engine.observe(None)
    assert engine.statistics()["new_tokens"] - before < 40 * 16
    numbers = engine.statistics()
    assert numbers["free_pages"] == numbers["pages"]


def test_openais_own_client(server, alone, lm):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
    with client:
        found = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
        assert found.choices[0].text == alone.text[0]
        messages = [{"role": "user", "content": "Why"}]
        chunks = client.chat.completions.create(
            model="tiny", messages=messages, stream=True, **GREEDY
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == mpjax.generate(lm, [messages], max_new_tokens=12).text[0]
        assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.filterwarnings("default")  # what lm_eval and its dependencies warn of is theirs
def test_lm_evals_own_client(server, lm, chat_folder, monkeypatch):
    """Its scores of continuations are those of the model's logits, and its texts those of greed."""
    pytest.importorskip("tenacity")  # which lm_eval's clients need, and it doesn't
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    options = {"base_url": server.url + "/v1/completions", "tokenizer": str(chat_folder)}
    client = completions.LocalCompletionsAPI(
        model="tiny", tokenizer_backend="huggingface", max_length=200, max_gen_toks=12, **options
    )
    pairs = [(PROMPT, " x"), ("import", " numpy as np")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = client.loglikelihood(asked)
    for (context, continuation), (score, is_greedy) in zip(pairs, found, strict=True):
        ids = lm.tokenizer.encode(context + continuation)
        begin = len(lm.tokenizer.encode(context))
        logprobs = np.asarray(jax.nn.log_softmax(lm.model(np.array([ids]))[0, begin - 1 : -1]))
        expected = logprobs[np.arange(len(ids) - begin), ids[begin:]].sum()
        np.testing.assert_allclose(score, expected, atol=1e-3)
        assert is_greedy == (logprobs.argmax(-1) == ids[begin:]).all()
    asked = [Instance("generate_until", {}, (PROMPT, {"until": [], "max_gen_toks": 12}), 0)]
    assert client.generate_until(asked) == mpjax.generate(lm, PROMPT, max_new_tokens=12).text


def status_of(app, *received, path="/v1/completions"):
    """The status of the answer to a request whose connection gives these messages."""
    messages, sent = list(received), []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run(app(scope | {"query_string": b"", "root_path": ""}, receive, send))
    return sent[0]["status"]


def test_a_client_that_goes_away_amid_its_body_is_no_fault(engine):
    app = application(engine, "tiny")
    part = {"type": "http.request", "body": b"{", "more_body": True}
    assert status_of(app, part, {"type": "http.disconnect"}) == 499


def test_requests_that_find_a_full_queue_are_refused(engine, monkeypatch):
    monkeypatch.setattr(engine, "statistics", lambda: {"waiting": 3})
    app = application(engine, "tiny", Limits(waiting=3))
    assert status_of(app, {"type": "http.request", "body": b'{"prompt": "x"}'}) == 503
    assert not engine.has_work
    embedding = {"type": "http.request", "body": b'{"input": "x"}'}
    none = application(engine, "tiny", Limits(waiting=0))
    assert status_of(none, embedding, path="/v1/embeddings") == 503
    assert status_of(app, embedding, path="/v1/embeddings") == 200


def test_prompts_are_tokenised_beside_the_event_loop(engine, monkeypatch):
    threads = []

    def read(lm, body, ignore_unknown):
        threads.append(threading.current_thread())
        raise RequestError("read", status=418)

    monkeypatch.setattr("mpjax.serve.application.read_completion", read)
    app = application(engine, "tiny")
    assert status_of(app, {"type": "http.request", "body": b"{}"}) == 418
    assert threads != [threading.current_thread()]
