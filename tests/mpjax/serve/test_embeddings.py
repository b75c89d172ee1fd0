"""Embeddings, scores and reranked documents over HTTP."""

from __future__ import annotations

import base64

import numpy as np
import pytest

import mpjax
from mpjax.embedding.pooling import Pooling
from mpjax.serve.embeddings import embeddings, rerank, scores
from mpjax.serve.errors import RequestError
from tests.mpjax.embedding.test_api import write

TEXTS = ["one two", "three", "def f(x): return"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    write(folder, "Qwen3ForSequenceClassification", num_labels=1)
    return mpjax.load(folder, progress=False)


def test_embeddings_of_a_server(client, lm, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no memory")

    expected = mpjax.embed(lm, TEXTS)
    body = {"model": "tiny", "input": TEXTS}
    found = client.post("/v1/embeddings", json=body).json()
    assert [each["index"] for each in found["data"]] == [0, 1, 2]
    vectors = np.asarray([each["embedding"] for each in found["data"]])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    count = sum(len(lm.tokenizer.encode(text)) for text in TEXTS)
    assert found["usage"] == {"prompt_tokens": count, "total_tokens": count}
    coded = client.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()
    raw = base64.b64decode(coded["data"][2]["embedding"])
    np.testing.assert_allclose(np.frombuffer(raw, "<f4"), expected[2], atol=1e-6)
    single = embeddings(lm, {"input": lm.tokenizer.encode(TEXTS[0]), "dimensions": 4})
    assert len(single["data"]) == 1
    assert len(single["data"][0]["embedding"]) == 4
    with monkeypatch.context() as patch:
        patch.setattr("mpjax.serve.embeddings.embed", fail)
        assert client.post("/v1/embeddings", json=body | {"model": "other"}).status_code == 404
        failed = client.post("/v1/embeddings", json=body)
        assert (failed.status_code, failed.json()["error"]["message"]) == (500, "no memory")
    patched = Pooling(prompts={"query": "find: "})
    monkeypatch.setattr("mpjax.serve.embeddings.pooling_of", lambda _: patched)
    found = client.post("/v1/embeddings", json=body | {"prompt_name": "query"}).json()
    count = sum(len(lm.tokenizer.encode("find: " + text)) for text in TEXTS)
    assert found["usage"]["prompt_tokens"] == count
    vectors = np.asarray([each["embedding"] for each in found["data"]])
    expected = mpjax.embed(lm, ["find: " + text for text in TEXTS])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_pairs_of_an_embedding_model_have_cosines(client, lm):
    body = {"model": "tiny", "text_1": TEXTS[0], "text_2": TEXTS}
    found = client.post("/v1/score", json=body).json()["data"]
    one, *_ = vectors = mpjax.embed(lm, TEXTS)
    np.testing.assert_allclose([each["score"] for each in found], vectors @ one, atol=1e-5)
    body = {"model": "tiny", "query": TEXTS[0], "documents": TEXTS}
    ranked = client.post("/v1/rerank", json=body).json()["results"]
    assert [each["index"] for each in ranked] == np.argsort(-(vectors @ one)).tolist()


def test_a_classifier_ranks_documents(classifier):
    logits = mpjax.score(classifier, ["query"] * 3, TEXTS)[:, 0]
    order = np.argsort(-logits)
    body = {"query": "query", "documents": TEXTS, "top_n": 2}
    found = rerank(classifier, body)["results"]
    assert [each["index"] for each in found] == order[:2].tolist()
    assert found[0]["document"] == {"text": TEXTS[order[0]]}
    expected = 1 / (1 + np.exp(-logits[order[:2]]))
    np.testing.assert_allclose([each["relevance_score"] for each in found], expected, rtol=1e-5)
    bare = rerank(classifier, body | {"return_documents": False})["results"]
    assert "document" not in bare[0]
    with (
        mpjax.Engine(classifier, slots=1, max_tokens=32) as engine,
        pytest.raises(ValueError, match="predicts no tokens"),
    ):
        engine.submit("a")


@pytest.mark.parametrize(
    ("answer", "body", "key"),
    [
        (embeddings, {}, "input"),
        (embeddings, {"input": ""}, "input"),
        (embeddings, {"input": 3}, "input"),
        (embeddings, {"input": "a", "dimensions": 1000}, "input"),
        (embeddings, {"input": "a", "prompt_name": "x"}, "prompt_name"),
        (embeddings, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (scores, {"text_1": "a"}, "text_2"),
        (scores, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        (scores, {"text_1": "a", "text_2": [3]}, "text_2"),
        (rerank, {"query": "a"}, "documents"),
        (rerank, {"query": "a", "documents": ["b"], "top": 1}, "top"),
    ],
)
def test_wrong_bodies_are_refused_by_their_keys(answer, body, key, lm):
    with pytest.raises(RequestError) as caught:
        answer(lm, body)
    assert caught.value.parameter == key
    assert caught.value.status == 400
