from __future__ import annotations

import copy
import dataclasses
import importlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers.processors

import mpjax
from mpjax.engine.calls import count_programs
from mpjax.engine.engine import Engine
from mpjax.errors import NotFiniteError
from mpjax.evaluation import perplexity as evaluation
from mpjax.kernels import KVFormat
from tests.mpjax.odd_models import with_damaged_token

CODE = "def add(x, y):\n    return x + y"
# Contexts and continuations of several lengths.
PAIRS = [
    (CODE, "\nprint(add(1, 2))"),
    ("import os", "\nimport sys\n"),
    (CODE + "\n\n" + CODE, "\n"),
    ("for i in", " range(10):"),
    ("class A", ":"),
]
CHAT = """{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content | trim }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


@pytest.fixture
def harness():
    """The module, where lm_eval is installed."""
    pytest.importorskip("lm_eval")
    import mpjax.evaluation.harness

    return mpjax.evaluation.harness


@pytest.fixture
def model(harness, tiny):
    return harness.HarnessLM(tiny, batch_size=2)


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def score(lm, ids, count):
    """The sum of ln p of the last `count` ids, in float64 by numpy, and if all are likeliest."""
    padded = np.zeros((1, 128), np.int32)
    padded[0, : len(ids) - 1] = ids[:-1]
    logits = np.asarray(_forward(lm.model, jnp.asarray(padded))[0], np.float64)
    logits = logits[len(ids) - 1 - count : len(ids) - 1]
    targets = np.asarray(ids[-count:])
    peak = logits.max(-1)
    sums = peak + np.log(np.exp(logits - peak[:, None]).sum(-1))
    logprobs = logits[np.arange(count), targets] - sums
    return logprobs.sum(), bool((logits.argmax(-1) == targets).all())


_forward = jax.jit(lambda model, tokens: model(tokens))


def with_tokenizer(lm, *, adds_bos=False, **attributes):
    """A copy with other attributes of the tokenizer, whose bos token is <|endoftext|>, id 0."""
    tokenizer = copy.copy(lm.tokenizer)
    tokenizer.backend = tokenizers.Tokenizer.from_str(lm.tokenizer.backend.to_str())
    if adds_bos:
        tokenizer.backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return dataclasses.replace(lm, tokenizer=tokenizer)


def test_loglikelihood_is_that_of_the_full_forward_pass(model, tiny):
    encode = tiny.tokenizer.encode
    # A text that the model would write itself, in a case where its text is read as the same tokens.
    context = "import os"
    written = mpjax.generate(tiny, context, max_new_tokens=2)
    assert encode(context + written.text[0]) == encode(context) + written.tokens[0]
    half = tiny.tokenizer.decode(written.tokens[0][:1]) + "("
    assert encode(context + half)[:-1] == encode(context) + written.tokens[0][:1]
    pairs = [*PAIRS, (context, half), (context, written.text[0])]
    found = model.loglikelihood(requests("loglikelihood", *pairs))
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        ids = encode(context + continuation)
        expected, likeliest = score(tiny, ids, len(ids) - len(encode(context)))
        assert logprob == pytest.approx(expected, rel=1e-5)
        assert greedy is likeliest
    assert [greedy for _, greedy in found] == [False] * len(pairs[:-1]) + [True]


def test_the_cache_counts_and_few_programs_do(harness, tiny):
    pairs = requests("loglikelihood", *PAIRS)
    before = count_programs()
    expected = np.array(harness.HarnessLM(tiny, batch_size=3).loglikelihood(pairs))[:, 0]
    assert count_programs() - before == 1
    rounded = dataclasses.replace(tiny, kv_format=KVFormat(4))
    found = np.array(harness.HarnessLM(rounded, batch_size=2).loglikelihood(pairs))[:, 0]
    assert 1e-4 < np.abs(found / expected - 1).max() < 0.1


def test_without_a_context_bos_stands_before(model, tiny):
    pairs = [("", "import os"), (" ", "x = 1"), ("", "<|endoftext|>def f")]
    found = model.loglikelihood(requests("loglikelihood", *pairs))
    for text, (logprob, _) in zip(["import os", " x = 1", "def f"], found, strict=True):
        ids = tiny.tokenizer.encode(text)
        assert logprob == pytest.approx(score(tiny, [0, *ids], len(ids))[0], rel=1e-5)


def test_a_long_context_loses_its_beginning(harness, tiny):
    ids, seen = tiny.tokenizer.encode(CODE + "\nimport os"), tiny.tokenizer.encode(CODE)
    assert len(ids) > 9 > len(ids) - len(seen)
    model = harness.HarnessLM(tiny, max_length=8)
    [(logprob, _)] = model.loglikelihood(requests("loglikelihood", (CODE, "\nimport os")))
    assert logprob == pytest.approx(score(tiny, ids[-9:], len(ids) - len(seen))[0], rel=1e-5)


def test_rolling_is_what_perplexity_sums(harness, tiny):
    window = 8
    texts = ["x = [1, 2]\n", "", CODE * 2, "import os"]
    model = harness.HarnessLM(tiny, batch_size=2, max_length=window)
    found = model.loglikelihood_rolling(requests("loglikelihood_rolling", *[(t,) for t in texts]))
    reached_back = 0
    for text, logprob in zip(texts, found, strict=True):
        ids = [0, *tiny.tokenizer.encode(text)]
        last = (len(ids) - 1) % window
        whole = len(ids) - last
        parts = [
            score(tiny, ids[i : i + window + 1], window)[0] for i in range(0, whole - 1, window)
        ]
        if last:  # where there are several windows, the last one sees as much as the others
            parts.append(score(tiny, ids[-window - 1 :], last)[0])
            reached_back += len(parts) > 1
        assert logprob == pytest.approx(sum(parts), rel=1e-5)
    assert reached_back
    # Without windows they are the same numbers.
    sums = harness.HarnessLM(tiny).loglikelihood_rolling(
        requests("loglikelihood_rolling", *[(t,) for t in texts])
    )
    expected = evaluation.evaluate(tiny, texts)
    assert -sum(sums) == pytest.approx(expected.nats_per_token * expected.tokens, rel=1e-6)


def test_generation_is_that_of_generate(model, tiny):
    contexts = ["for i in", CODE, "import os"]
    text = mpjax.generate(tiny, contexts, max_new_tokens=12).text[0]
    stops = [text[3:5], "never"]
    greedy = {"until": stops, "max_gen_toks": 12, "do_sample": False}
    drawn = {"until": [], "max_gen_toks": 12, "temperature": 1.5}
    asked = [(context, greedy) for context in contexts] + [(contexts[0], drawn)] * 2
    found = model.generate_until(requests("generate_until", *asked))
    assert found[:3] == mpjax.generate(tiny, contexts, max_new_tokens=12, stop=stops).text
    assert found[0] == text[: text.index(stops[0])] != text
    hot = mpjax.Sampling(temperature=1.5)
    again = mpjax.generate(tiny, contexts[:1] * 2, max_new_tokens=12, sampling=hot, seeds=[3, 4])
    assert found[3:] == again.text
    assert found[3] != found[4]  # the same request twice is two draws


def test_what_is_not_finite_is_no_answer(harness, tiny):
    """Requests are counted as lm_eval gave them, not as batches have them."""
    lm = harness.HarnessLM(with_damaged_token(tiny, tiny.tokenizer.encode("class")[0]), 2)
    contexts = [CODE, "for i in", "class A", "import os"]
    asked = requests("generate_until", *[(context, {"max_gen_toks": 3}) for context in contexts])
    with pytest.raises(NotFiniteError, match=r"^request 2: the model computes NaN"):
        lm.generate_until(asked)
    pairs = requests("loglikelihood", *[(context, " x") for context in contexts])
    with pytest.raises(NotFiniteError, match=r"^request 2: the model computes NaN"):
        lm.loglikelihood(pairs)
    texts = requests("loglikelihood_rolling", *[(context,) for context in contexts])
    with pytest.raises(NotFiniteError, match=r"^window 2: the model computes NaN"):
        lm.loglikelihood_rolling(texts)


@pytest.fixture
def prompts(tiny, monkeypatch):
    """The prompts that engines are asked to continue."""
    found, submit = [], Engine.submit

    def watched(self, prompt, **options):
        found.append(tiny.tokenizer.decode(prompt))
        return submit(self, prompt, **options)

    monkeypatch.setattr(Engine, "submit", watched)
    return found


def test_a_long_prompt_loses_its_beginning(harness, tiny, prompts):
    model = harness.HarnessLM(tiny, max_length=16, max_new_tokens=6)
    context = f"{CODE}\n\n" * 9 + "import os"
    model.generate_until(requests("generate_until", (context, {})))
    [prompt] = prompts
    assert context.endswith(prompt)
    assert 5 <= len(tiny.tokenizer.encode(prompt)) <= 10
    with pytest.raises(ValueError, match="16 new tokens, which leave no room"):
        model.generate_until(requests("generate_until", ("x", {"max_gen_toks": 16})))


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("text", ["日本語の文章です。", "👩‍👧", "größer\n  x = 1\n"])
def test_a_prompt_loses_no_more_than_it_must(harness, tiny, prompts, text, adds_bos):
    lm = with_tokenizer(tiny, adds_bos=adds_bos)
    model = harness.HarnessLM(lm, max_length=24, max_new_tokens=4)
    model.generate_until(requests("generate_until", (text * 40, {})))
    [prompt] = prompts
    assert (text * 40).endswith(prompt)
    # At most the rest of one character is missing, which is up to three tokens.
    assert 17 <= len(lm.tokenizer.encode(prompt)) <= 20


def test_a_chat_begins_with_one_bos(harness, tiny):
    lm = with_tokenizer(tiny, adds_bos=True, chat_templates={"default": CHAT})
    model = harness.HarnessLM(lm)
    plain = harness.HarnessLM(with_tokenizer(tiny, chat_templates={"default": CHAT}))
    text = model.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "<|endoftext|>user: hi\nassistant:"
    assert model.tok_encode(text) == plain.tok_encode(text) == tiny.tokenizer.encode(text)
    assert model.tok_encode("hi") == [0, *plain.tok_encode("hi")]
    assert model.tok_encode("hi", add_special_tokens=False) == plain.tok_encode("hi")
    asked = requests("generate_until", (text, {"max_gen_toks": 4}))
    assert model.generate_until(asked) == plain.generate_until(asked)
    assert model.prefix_token_id == model.eot_token_id == 0
    pairs = requests("loglikelihood", (text, " yes"), ("", " yes"))
    np.testing.assert_allclose(model.loglikelihood(pairs), plain.loglikelihood(pairs), rtol=1e-6)
    rolling = requests("loglikelihood_rolling", (CODE,))
    assert model.loglikelihood_rolling(rolling) == plain.loglikelihood_rolling(rolling)


def test_a_turn_that_has_begun_stays_open(harness, tiny):
    model = harness.HarnessLM(with_tokenizer(tiny, chat_templates={"default": CHAT}))
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "Answer: "}]
    text = model.apply_chat_template(chat, add_generation_prompt=False)
    assert text == "<|endoftext|>user: 2 + 2?\n<|endoftext|>assistant: Answer:"
    assert model.chat_template(True) == CHAT
    assert model.chat_template(False) is None
    for refused, message in (([], "messages is empty"), ([{"role": "user"}], "has content None")):
        with pytest.raises(ValueError, match=message):
            model.apply_chat_template(refused, add_generation_prompt=False)


TURN = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ CONTENT }}<|im_end|>{% endfor %}"
SHOWN = "m.content.split('</think>')[-1]"


@pytest.mark.parametrize("message", ["A: 7", "end", "m", ">", "", " ", "x ", "</think>A"])
@pytest.mark.parametrize("trims", [False, True])
def test_a_begun_turn_is_not_sought_in_the_markup(harness, tiny, message, trims):
    source = TURN.replace("CONTENT", "m.content | trim + ' '" if trims else SHOWN)
    model = harness.HarnessLM(with_tokenizer(tiny, chat_templates={"default": source}))
    begun = [{"role": "assistant", "content": message}]
    text = model.apply_chat_template(begun, add_generation_prompt=False)
    shown = message.strip() if trims else message.removeprefix("</think>")
    assert text == f"<|im_start|>assistant: {shown}"


def test_a_chat_template_can_be_named(harness, tiny):
    templates = {"default": CHAT, "short": "{{ messages[-1].content[:99] }}!"}
    model = harness.HarnessLM(with_tokenizer(tiny, chat_templates=templates))
    chat, usual = [{"role": "user", "content": "hi"}], "<|endoftext|>user: hi\nassistant:"
    assert model.apply_chat_template(chat) == usual
    assert model.chat_template("short") == templates["short"]
    assert [model.apply_chat_template(chat, prompt) for prompt in (True, False)] == ["hi!", "hi"]
    assert model.tokenizer_name != str(tiny.source)
    with pytest.raises(ValueError, match=r"leaves out the content of message 0 \(user\)"):
        model.apply_chat_template([{"role": "user", "content": "x" * 99}], False)
    for name, expected in ((True, CHAT), ("default", CHAT), ("", None), (None, None)):
        assert model.chat_template(name) == expected
        assert model.apply_chat_template(chat) == usual
    assert model.tokenizer_name == str(tiny.source)
    with pytest.raises(ValueError, match="no chat template 'rag': name one of default, short"):
        model.chat_template("rag")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 257}, "max_length is 257: expected at most 256, the positions"),
        ({"max_length": 0}, "max_length is 0"),
        ({"batch_size": 0}, "batch_size is 0: expected 1 or more"),
        ({"batch_size": "eight"}, "batch_size is 'eight': expected 1 or more, a whole number"),
        ({"max_length": 2.5}, r"max_length is 2\.5: expected 1 or more, a whole number"),
        ({"max_new_tokens": None}, "max_new_tokens is None: expected 1 or more"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(harness, tiny, options, message):
    with pytest.raises(ValueError, match=message):
        harness.HarnessLM(tiny, **options)


def test_what_can_not_be_scored_is_refused(harness, tiny):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        harness.HarnessLM(dataclasses.replace(tiny, tokenizer=None))
    model = harness.HarnessLM(tiny, max_length=4)
    long = "\n" + CODE
    for continuation, count in (("", 0), (long, len(tiny.tokenizer.encode("x" + long)) - 1)):
        with pytest.raises(ValueError, match=f"has {count} tokens: expected 1 to 4"):
            model.loglikelihood(requests("loglikelihood", ("x", continuation)))
    bare = harness.HarnessLM(with_tokenizer(tiny, bos_id=None, special_tokens={}))
    with pytest.raises(ValueError, match="neither a bos nor an eos token"):
        bare.loglikelihood(requests("loglikelihood", ("", "x")))


DOCUMENTS: list[dict[str, Any]] = [
    {"question": "import", "choices": [" os", " sys", " 7"], "answer": 0, "text": CODE},
    {"question": "def f(x):\n    return", "choices": [" x", " +"], "answer": 1, "text": "x = 1"},
]


def read_documents(**_):
    return {"test": importlib.import_module("datasets").Dataset.from_list(DOCUMENTS)}


TASK = {"custom_dataset": read_documents, "test_split": "test", "doc_to_text": "{{question}}"}
CHOICE = TASK | {
    "task": "choice",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
WRITE = TASK | {
    "task": "write",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match"}],
}
ROLL = TASK | {
    "task": "roll",
    "output_type": "loglikelihood_rolling",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}


@pytest.mark.filterwarnings("default")  # what lm_eval and its dependencies warn of is theirs
def test_lm_eval_runs_tasks(harness, tiny, tiny_folder):
    import lm_eval
    from lm_eval.tasks import TaskManager

    # Without the list of all its tasks, which takes seconds to read.
    options = {"bootstrap_iters": 0, "task_manager": TaskManager(include_defaults=False)}
    found = lm_eval.simple_evaluate(harness.HarnessLM(tiny), tasks=[CHOICE, WRITE, ROLL], **options)
    encode = tiny.tokenizer.encode
    likeliest = []
    for d in DOCUMENTS:
        texts = [encode(d["question"] + choice) for choice in d["choices"]]
        own = [len(ids) - len(encode(d["question"])) for ids in texts]
        likeliest.append(
            np.argmax([score(tiny, *pair)[0] for pair in zip(texts, own, strict=True)])
        )
    right = [best == d["answer"] for best, d in zip(likeliest, DOCUMENTS, strict=True)]
    assert found["results"]["choice"]["acc,none"] == np.mean(right)
    expected = evaluation.evaluate(tiny, [d["text"] for d in DOCUMENTS]).bits_per_byte
    assert found["results"]["roll"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-6)
    assert found["config"]["precision"] == tiny.precision
    written = [sample["resps"][0][0] for sample in found["samples"]["write"]]
    prompts = [d["question"] for d in DOCUMENTS]
    assert written == mpjax.generate(tiny, prompts, max_new_tokens=4, stop="\n").text
    arguments = f"pretrained={tiny_folder},precision=A16KV4"
    again = lm_eval.simple_evaluate("mpjax", arguments, tasks=[ROLL], **options)
    assert again["config"]["precision"].endswith("KV4")
    assert again["results"]["roll"] != found["results"]["roll"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pretrained": None}, "has no pretrained"),
        ({"device": "cuda:0"}, "device is 'cuda:0', and JAX chooses .* CUDA_VISIBLE_DEVICES or"),
        ({"max_batch_size": 64}, "max_batch_size is 64, .* give the number as batch_size"),
        ({"batch_size": "auto"}, "batch_size is 'auto': expected a whole number"),
        ({"peft": "x", "kv": 4}, "has kv, peft, which .*: expected pretrained, .*, max_new_tokens"),
    ],
)
def test_what_lm_eval_passes_is_read_or_refused(harness, tiny_folder, options, message):
    usual = {"batch_size": "4", "max_batch_size": None, "device": None}
    create = harness.HarnessLM.create_from_arg_string
    assert create(f"pretrained={tiny_folder}", usual).batch_size == 4
    assert create(f"pretrained={tiny_folder},max_positions=300", usual).max_length == 300
    assert create(f"pretrained={tiny_folder},page_size=64", usual).lm.page_size == 64
    with pytest.raises(ValueError, match=message):  # before anything is loaded
        create("precision=W4A16KV8,pretrained=no/such/folder", usual | options)


def test_without_the_extra(monkeypatch):
    for name in {"lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "mpjax.evaluation.harness", raising=False)
    with pytest.raises(ImportError, match=r"needs lm_eval: pip install lm_eval"):
        importlib.import_module("mpjax.evaluation.harness")


def test_importing_mpjax_leaves_it_alone():
    code = "import sys, mpjax, mpjax.evaluation.perplexity; sys.exit('lm_eval' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
