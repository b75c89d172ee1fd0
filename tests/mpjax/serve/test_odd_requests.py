"""Requests that are odd and legal, by OpenAI's own client and over plain connections."""

from __future__ import annotations

import gzip
import json

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.mpjax.serve.running import PROMPT  # noqa: E402

SHORT = {"max_tokens": 2, "temperature": 0}
USER = {"role": "user", "content": "Why"}
TOOL = {"type": "function", "function": {"name": "f"}}

BOTH = {
    "no sampling": {"top_p": None, "temperature": None, "seed": None, "n": None, "stop": None},
    "four stop strings": {"stop": ["a" * 9, "b" * 9, "c" * 9, "\N{EURO SIGN}"]},
    "no stop string": {"stop": []},
    "top_p of 0": {"top_p": 0, "temperature": 1},
    "least seed": {"seed": -(2**63)},
    "largest seed": {"seed": 2**63 - 1, "temperature": 1, "n": 2},
    "whole floats": {"max_tokens": 2.0, "n": 1.0, "seed": 1.0},
    "whose it is": {"user": "", "extra_body": {"metadata": {"a": "b"}, "safety_identifier": "x"}},
    "null of no key": {"extra_body": {"some_key_of_another_server": None}},
    "penalties of 0": {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
}
CHATS = {
    "the longer name": {"max_tokens": None, "max_completion_tokens": 2},
    "text alone": {"response_format": {"type": "text"}, "modalities": ["text"], "audio": None},
    "usual reasoning": {"reasoning_effort": None, "verbosity": None},
    "usual reasoning, named": {"reasoning_effort": "medium", "verbosity": "medium"},
    "service": {"store": True, "service_tier": "auto", "metadata": {}, "prompt_cache_key": "k"},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "no tools": {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
    "automatic tools": {"tool_choice": "auto", "functions": [], "function_call": "auto"},
    "no log-probabilities": {"logprobs": None, "top_logprobs": None},
    "none of the likeliest": {"logprobs": True, "top_logprobs": 0},
    "parts": {"messages": [USER | {"content": [{"type": "text", "text": "é"}]}]},
    "empty texts": {"messages": [USER | {"content": "", "name": ""}]},
    "an answer sent back": {
        "messages": [
            USER,
            {"role": "assistant", "content": "a", "refusal": None, "audio": None},
            {"role": "assistant", "content": None, "refusal": "no", "tool_calls": None},
            USER,
        ]
    },
}
COMPLETIONS = {
    "characters": {"prompt": "é€\N{FAMILY}\x00\ufeff", "echo": True},
    "ids": {"prompt": [[5], [6, 7]], "echo": True, "logprobs": 0},
    "as many as are asked for": {"n": 2, "best_of": 2, "suffix": ""},
    "no log-probabilities": {"logprobs": None, "echo": None, "best_of": None},
}


def sdk_of(server, key="secret"):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def sdk(server):
    with sdk_of(server) as client:
        yield client


def chat(sdk, **body):
    return sdk.chat.completions.create(**{"model": "tiny", "messages": [USER]} | SHORT | body)


def complete(sdk, **body):
    return sdk.completions.create(**{"model": "tiny", "prompt": PROMPT} | SHORT | body)


@pytest.mark.parametrize("body", [*BOTH.values(), *CHATS.values()], ids=[*BOTH, *CHATS])
def test_an_odd_chat(sdk, body):
    found = chat(sdk, **body)
    assert len(found.choices) == (body.get("n") or 1)
    assert found.usage.completion_tokens > 0
    assert all(isinstance(choice.message.content, str) for choice in found.choices)


@pytest.mark.parametrize("body", [*BOTH.values(), *COMPLETIONS.values()], ids=[*BOTH, *COMPLETIONS])
def test_an_odd_completion(sdk, body):
    found = complete(sdk, **body)
    prompt = body.get("prompt", PROMPT)
    count = len(prompt) if isinstance(prompt, list) else 1
    assert len(found.choices) == count * (body.get("n") or 1)
    if isinstance(prompt, str) and body.get("echo"):
        assert found.choices[0].text.startswith(prompt)


def test_seeds_that_differ_above_32_bits_give_other_texts(sdk):
    texts = [
        complete(sdk, temperature=1, max_tokens=8, seed=seed).choices[0].text
        for seed in (-1, 2**32 - 1, 2**63 - 1, -1)
    ]
    assert texts[0] == texts[3]
    assert len({*texts}) == 3


@pytest.mark.parametrize("options", [None, {}, {"include_usage": True}, {"include_usage": False}])
def test_the_usage_of_a_stream(sdk, options):
    for make in (chat, complete):
        *chunks, last = make(sdk, stream=True, stream_options=options)
        has_usage = bool(options) and options["include_usage"]
        assert (last.usage is not None) == has_usage
        assert (last.choices == []) == has_usage
        for chunk in chunks:
            assert chunk.usage is None
            assert ("usage" in chunk.model_fields_set) == has_usage


@pytest.mark.parametrize(
    ("body", "kind", "code", "parameter"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError, "model_not_found", "model"),
        ({"max_tokens": 999}, openai.BadRequestError, "context_length_exceeded", "messages"),
        ({"tools": [TOOL]}, openai.BadRequestError, "unsupported_parameter", "tools"),
        ({"verbosity": "low"}, openai.BadRequestError, "unsupported_parameter", "verbosity"),
        ({"extra_body": {"x": 1}}, openai.BadRequestError, "unknown_parameter", "x"),
        ({"temperature": -1}, openai.BadRequestError, None, "temperature"),
    ],
)
def test_programs_recognise_errors(sdk, body, kind, code, parameter):
    with pytest.raises(kind) as error:
        chat(sdk, **body)
    found = error.value
    assert (found.code, found.param, found.type) == (code, parameter, "invalid_request_error")


@pytest.mark.parametrize("body", [{"\ud800": 1}, {"stop": "\ud800"}, {"model": "\ud800"}])
def test_halves_of_surrogate_pairs(client, body):
    """Which JSON can spell, and UTF-8 can't."""
    text = json.dumps({"prompt": "x"} | SHORT | body)
    found = client.post("/v1/completions", content=text)
    assert found.status_code in (400, 404)
    error = found.json()["error"]
    assert r"\ud800" in error["message"]
    assert error["param"] in ("stop", "model", r"\ud800")


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("HEAD", "/v1/models", {}, 200),
        ("GET", "/v1/models/", {}, 200),
        ("GET", "/v1/models/tiny/", {}, 200),
        ("GET", "/v1/models?limit=1", {}, 200),
        ("OPTIONS", "/v1/completions", {}, 405),
        ("POST", "/v1/completions/", {}, 200),
        ("POST", "/v1/completions", {"Content-Type": "text/plain"}, 200),
        ("POST", "/v1/completions", {"Authorization": "bearer  secret"}, 200),
        ("POST", "/v1/completions", {"Authorization": "secret"}, 401),
        ("POST", "/v1/completions", {"Accept": "text/html", "X-Odd": "é"}, 200),
        ("POST", "/v1/completions", {"Content-Encoding": "identity"}, 200),
        ("POST", "/v1/completions", {"Content-Encoding": "gzip"}, 415),
        ("GET", "/v1/models/%ED%A0%80", {}, 404),
    ],
)
def test_odd_connections(client, method, path, options, status):
    body = json.dumps({"prompt": "x"} | SHORT).encode()
    body = gzip.compress(body) if options.get("Content-Encoding") == "gzip" else body
    content = {"content": body} if method == "POST" else {}
    headers = {name: value.encode() for name, value in options.items()}
    found = client.request(method, path, headers=headers, follow_redirects=True, **content)
    assert found.status_code == status
    if status >= 400:
        assert found.json()["error"]["message"]
    assert len(found.headers["x-request-id"]) == 32
