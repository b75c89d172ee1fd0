"""Arguments of functions that generate, measure and calibrate: wrong ones are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.evaluation.perplexity import evaluate
from mpjax.kernels import KVFormat
from tests.refusals import require_a_result_or_its_name

TOKENS = [[5, 6, 7, 8], [9, 10, 0, 0]]
ODD = {
    "text": "text",
    "bytes": b"x",
    "number": 2.5,
    "negative": -1,
    "object": object(),
    "mapping": {"x": 1},
    "nested": [[[1]]],
    "ragged": [[1], [1, 2]],
    "complex": np.ones((1, 2), complex),
}
# Other words that messages name an argument by.
NAMED = {"kv_format": ["KV format"], "documents": ["text is"], "reference": ["folder"]}
# Other tests have the seeds and the prompts, whose kinds are many.
ELSEWHERE = ("seeds", "seed", "prompts", "prompt", "progress")


def stream(**arguments: Any) -> str:
    return "".join(mpjax.stream(**arguments))


def calls(lm: mpjax.LanguageModel) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Calls that are right, by name."""
    of_text = {"max_new_tokens": 2, "sampling": None, "stop": "zz"}
    speculated = of_text | {"speculate": mpjax.Ngram(), "processors": (), "constraint": None}
    of_tokens = {"model": lm.model, "tokens": TOKENS, "lengths": [4, 2], "max_new_tokens": 2}
    calibrated = dataclasses.replace(lm, kv_format=KVFormat("8s"))
    rounded = mpjax.quantize(lm, mpjax.Recipe.of("WNF2A32KV16", "rtn"))
    graph, state = nnx.split(lm.model)
    own = dataclasses.replace(lm, model=nnx.merge(graph, jax.tree.map(jnp.copy, state)))
    new = {"tree": {"model.norm.weight": np.ones(128, np.float32)}, "scales": "new"}
    return {
        "by_file_names": (
            mpjax.by_file_names,
            {"tree": {"final_norm": {"w": np.ones(128)}}, "names": "tunix"},
        ),
        "update": (mpjax.update, {"lm": own, "version": None} | new),
        "Engine.update_weights": (
            mpjax.Engine(own, slots=1, max_tokens=64).update_weights,
            {"running": "continue"} | new,
        ),
        "token_logprobs": (
            mpjax.token_logprobs,
            {"model": lm.model, "tokens": TOKENS, "lengths": [4, 2], "temperature": 1.0}
            | {"routes": None},
        ),
        "in_mode": (lm.in_mode, {"deterministic": False}),
        "generate": (mpjax.generate, {"lm": lm, "prompts": "x ="} | speculated),
        "stream": (stream, {"lm": lm, "prompt": "x ="} | speculated),
        "generate_tokens": (
            mpjax.generate_tokens,
            of_tokens | {"sampling": None, "kv_format": "KV16", "speculate": None},
        ),
        "Ngram": (mpjax.Ngram, {"k": 4, "n": 3}),
        "Draft": (mpjax.Draft, {"lm": lm, "k": 4}),
        "Eagle": (mpjax.Eagle, {"k": 4}),
        "DrafterTraining": (
            mpjax.DrafterTraining,
            {"steps": 2, "batch": 2, "length": 8, "rate": 1e-3, "passes": 1}
            | {"vocabulary": 64, "layers": (0, 1)},
        ),
        "the fields of a Sampling": (
            lambda **fields: mpjax.generate_tokens(**of_tokens, sampling=fields),
            {"min_new_tokens": 0, "stop_ids": [1], "repetition_penalty": 1.1}
            | {"presence_penalty": 0.1, "logit_bias": {5: 1.0}}
            | {"allowed_ids": [5, 6], "bad_words": [[5]]},
        ),
        "page_size": (
            lambda page_size: dataclasses.replace(lm, page_size=page_size),
            {"page_size": 16},
        ),
        "calibrate_cache": (
            mpjax.calibrate_cache,
            {"lm": calibrated, "documents": ["x = 1"], "window": 16, "max_tokens": 16},
        ),
        "Engine": (
            lambda **options: mpjax.Engine(**options).close(),
            {"lm": lm, "slots": 2, "cache_memory": 0.5, "max_tokens": 64, "chunk_tokens": 16}
            | {"steps": 2, "share_prefixes": True, "max_gap": 0.1, "speculate": mpjax.Ngram()},
        ),
        "Engine.submit": (
            mpjax.Engine(lm, slots=1, max_tokens=64).submit,
            {"prompt": "x ="} | of_text | {"priority": 0, "prompt_logprobs": False},
        ),
        "evaluate": (
            evaluate,
            {"lm": lm, "documents": ["x = 1"], "window": 16, "batch": 1, "stride": 16},
        ),
        "recipe_for_budget": (
            mpjax.recipe_for_budget,
            {
                "lm": lm,
                "bits": 8.5,
                "documents": ["x = 1"],
                "choices": ["W8g64"],
                "precision": "A16KV8",
                "method": "rtn",
            },
        ),
        "learn_scales": (
            mpjax.learn_scales,
            {"lm": rounded, "documents": ["x = 1"], "reference": None, "rechoose": False}
            | {"learning": mpjax.Learning(1), "calibration": mpjax.Calibration(16, 16, 1)},
        ),
        "compare": (
            mpjax.compare,
            {"lm": lm, "reference": lm, "documents": ["x = 1"], "window": 16, "batch": 1}
            | {"stride": 16},
        ),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("generate", "stream", "generate_tokens", "the fields of a Sampling", "page_size"),
        *("calibrate_cache", "evaluate", "compare", "learn_scales", "Engine", "Engine.submit"),
        *(
            "Ngram",
            "Draft",
            "Eagle",
            "DrafterTraining",
            "by_file_names",
            "update",
            "Engine.update_weights",
        ),
        *("token_logprobs", "in_mode"),
    ],
)
def test_what_is_wrong_is_named_or_taken(name, tiny):
    """Never an AttributeError or a TypeError from somewhere below."""
    call, arguments = calls(tiny)[name]
    call(**arguments)
    for argument in arguments:
        if argument in ELSEWHERE:
            continue
        for odd in ODD.values():
            words = argument.replace("_", " "), *NAMED.get(argument, ())
            require_a_result_or_its_name(call, arguments, argument, odd, *words)


def test_lists_are_arrays(tiny):
    _, arguments = calls(tiny)["generate_tokens"]
    arrays = {name: jnp.asarray(arguments[name]) for name in ("tokens", "lengths")}
    found, expected = (mpjax.generate_tokens(**given) for given in (arguments, arguments | arrays))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


@pytest.mark.parametrize("name", ["generate", "stream", "generate_tokens"])
def test_sampling_may_be_a_mapping(name, tiny):
    call, arguments = calls(tiny)[name]
    given = {"temperature": 5.0, "top_k": 100}
    arguments |= {"max_new_tokens": 8}
    results = [
        call(**(arguments | {"sampling": sampling}))
        for sampling in (given, mpjax.Sampling(**given), None)
    ]
    texts = [
        result.tokens.tolist()
        if isinstance(result, mpjax.GeneratedTokens)
        else getattr(result, "tokens", result)
        for result in results
    ]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(ValueError, match=r"'temprature' \(did you mean 'temperature'\?\)"):
        call(**(arguments | {"sampling": {"temprature": 1.0}}))
    with pytest.raises(ValueError, match=r"sampling is 0\.7: expected a Sampling, or a mapping"):
        call(**(arguments | {"sampling": 0.7}))


def test_a_model_in_the_place_of_the_other_is_told_apart(tiny):
    """A LanguageModel has the Decoder in `model`; it is easy to pass the wrong one."""
    with pytest.raises(ValueError, match=r"model is .*: expected a Decoder, such as lm\.model"):
        mpjax.generate_tokens(tiny, TOKENS, [4, 2], max_new_tokens=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lm is .*: expected a LanguageModel, as mpjax\.load"):
        mpjax.generate(tiny.model, "x =")
    with pytest.raises(ValueError, match="lm is 'Qwen3-8B-AWQ/': expected a LanguageModel"):
        mpjax.generate("Qwen3-8B-AWQ/", "x =")  # type: ignore[arg-type]
