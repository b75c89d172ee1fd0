"""Embeddings and scores against transformers, and what sentence-transformers' files say."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

import mpjax
from mpjax.cli.info import inspect
from mpjax.embedding.pooling import Pooling
from mpjax.errors import CheckpointError
from mpjax.models.registry import causal
from tests.models.sharded_families import keys
from tests.mpjax import tokenizer_folders
from tests.mpjax.checkpoint.gguf.write_gguf import gguf, llama_metadata, random_tensors
from tests.mpjax.checkpoint.test_every_family import build

torch = pytest.importorskip("torch")

TEXTS = ["one two three", "a", "def f(x): return x and more of it, so that it is the longest"]


def write(folder, architecture, **changes):
    """A folder of a model with a tokenizer; returns transformers' model."""
    hf = (
        keys(causal(architecture))
        | {"architectures": [architecture]}
        | {"vocab_size": 400, "pad_token_id": None}
        | changes
    )
    model = build(architecture, hf)
    tokenizer_folders.qwen(folder)
    model.save_pretrained(folder)
    return model


def hidden(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].numpy()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    return folder, write(folder, "Qwen3Model")


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_a_model_without_a_head_embeds_the_last_token(embedder):
    folder, model = embedder
    lm = mpjax.load(folder, progress=False)
    expected = np.stack([hidden(model, lm.tokenizer.encode(text))[-1] for text in TEXTS])
    assert ("answers", "embeddings of texts, with mpjax.embed") in inspect(folder).describe()
    found = mpjax.embed(lm, TEXTS)
    np.testing.assert_allclose(found, unit(expected), atol=1e-5)
    np.testing.assert_allclose(mpjax.embed(lm, TEXTS[0]), found[0], atol=1e-6)
    ids = [lm.tokenizer.encode(text) for text in TEXTS]
    np.testing.assert_allclose(mpjax.embed(lm, ids), found, atol=1e-6)
    short = mpjax.embed(lm, TEXTS, dimensions=8)
    np.testing.assert_allclose(short, unit(expected[:, :8]), atol=1e-5)
    for call in (
        lambda: mpjax.generate(lm, TEXTS[0]),
        lambda: mpjax.generate_tokens(lm.model, [[1, 2]], [2], max_new_tokens=2),
        lambda: mpjax.evaluate(lm, TEXTS),
    ):
        with pytest.raises(ValueError, match=r"predicts no tokens: mpjax\.embed gives"):
            call()


@pytest.mark.parametrize("kind", ["mean_tokens", "cls_token"])
def test_the_folder_says_how_texts_are_pooled(kind, embedder, tmp_path):
    folder, model = embedder
    lm = mpjax.load(folder, progress=False)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    steps = ["Transformer", "Pooling", "Dense", "Normalize"][: 4 if kind == "mean_tokens" else 2]
    listed = [
        {"idx": n, "type": f"sentence_transformers.models.{step}", "path": step * (n > 0)}
        for n, step in enumerate(steps)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    for step in steps[1:]:
        (tmp_path / step).mkdir()
    modes = {"pooling_mode_lasttoken": False, f"pooling_mode_{kind}": True}
    (tmp_path / "Pooling/config.json").write_text(json.dumps(modes))
    prompts = {"prompts": {"query": "find: "}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    states = [hidden(model, lm.tokenizer.encode(f"find: {text}")) for text in TEXTS]
    expected = np.stack([x.mean(0) if kind == "mean_tokens" else x[0] for x in states])
    if len(steps) == 4:
        dense = {"linear.weight": np.random.default_rng(0).standard_normal((5, 64), np.float32)}
        safetensors.numpy.save_file(dense, tmp_path / "Dense/model.safetensors")
        (tmp_path / "Dense/config.json").write_text(json.dumps({"in_features": 64}))
        expected = unit(expected @ dense["linear.weight"].T)
    lm = mpjax.load(tmp_path, progress=False)
    found = mpjax.embed(lm, TEXTS, prompt="query")
    if kind == "mean_tokens":
        (tmp_path / "Pooling/config.json").write_text(json.dumps(modes | {"include_prompt": False}))
        with pytest.raises(ValueError, match="include_prompt is false: expected true"):
            mpjax.embed(lm, TEXTS)
        (tmp_path / "Pooling/config.json").write_text(json.dumps(modes))
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())
    with pytest.raises(ValueError, match=r"prompt is 'doc': expected a prompt of .* \(query\)"):
        mpjax.embed(lm, TEXTS, prompt="doc")
    (tmp_path / "Pooling/config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(CheckpointError, match=r"pooling_mode is \['max_tokens'\]: expected last"):
        mpjax.embed(lm, TEXTS)


def test_tokens_that_read_those_after_them(tmp_path):
    """As in EmbeddingGemma; texts of other lengths are padded."""
    changes = {"use_bidirectional_attention": True, "sliding_window": 8, "head_dim": 16}
    model = write(tmp_path, "Gemma3TextModel", **changes)
    lm = mpjax.load(tmp_path, progress=False)
    assert lm.config.windows[:2] == (5, None)
    ids = [lm.tokenizer.encode(text) for text in (*TEXTS, TEXTS[2] * 3)]
    assert len(ids[3]) > 16 > len(ids[0])
    expected = np.stack([hidden(model, each)[-1] for each in ids])
    np.testing.assert_allclose(mpjax.embed(lm, ids), unit(expected), atol=1e-5)
    with pytest.raises(ValueError, match="predicts no tokens"):
        mpjax.generate(lm, TEXTS[0])


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_classifiers(family, tmp_path):
    labels = {"id2label": {"0": "no", "1": "yes", "2": "perhaps"}} if family == "Llama" else {}
    model = write(tmp_path, f"{family}ForSequenceClassification", **labels)
    lm = mpjax.load(tmp_path, progress=False)
    ids = [lm.tokenizer.encode(text) for text in TEXTS]
    with torch.no_grad():
        expected = np.concatenate([model(torch.tensor([each])).logits.numpy() for each in ids])
    assert expected.shape[1] == (3 if labels else 2)
    said = f"{expected.shape[1]} scores of a text, with mpjax.score"
    assert ("answers", said) in inspect(tmp_path).describe()
    found = mpjax.score(lm, TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())
    pairs = mpjax.score(lm, TEXTS, TEXTS[::-1])
    joined = [a + b for a, b in zip(ids, ids[::-1], strict=True)]
    np.testing.assert_allclose(pairs, mpjax.score(lm, joined), atol=1e-6)
    with pytest.raises(ValueError, match="predicts no tokens"):
        mpjax.generate(lm, TEXTS[0])
    mpjax.save(lm, tmp_path / "saved")
    again = mpjax.score(mpjax.load(tmp_path / "saved"), TEXTS)
    np.testing.assert_array_equal(again, found)


def test_a_model_that_predicts_tokens_is_no_classifier():
    lm = mpjax.load(mpjax.bundled_model())
    with pytest.raises(ValueError, match="is no classifier: expected an architecture such as"):
        mpjax.score(lm, "a")
    assert mpjax.embed(lm, ["a", "b"]).shape == (2, lm.config.hidden_size)
    with pytest.raises(ValueError, match="dimensions is 100000: expected at most"):
        mpjax.embed(lm, "a", dimensions=100000)


@pytest.mark.parametrize(("number", "kind"), [(None, "last"), (1, "mean"), (2, "first"), (4, None)])
def test_a_gguf_file_names_its_pooling(number, kind, tmp_path, rng):
    more = {} if number is None else {"llama.pooling_type": number}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(llama_metadata() | more, random_tensors({}, rng)))
    if kind is None:
        with pytest.raises(CheckpointError, match="pooling_type is 4: expected 0 or 1 or 2 or 3"):
            Pooling.of_gguf(path)
    else:
        assert Pooling.of_gguf(path) == Pooling(kind)
