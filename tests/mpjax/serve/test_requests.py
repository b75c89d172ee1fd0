from __future__ import annotations

import dataclasses

import pytest

import mpjax
from mpjax.engine.options import TooLongError
from mpjax.serve.errors import RequestError
from mpjax.serve.requests import read_chat, read_completion, refusal_of_engine

pytestmark = pytest.mark.any_version


def completion(lm, **body):
    return read_completion(lm, {"prompt": "import"} | body)


def test_prompts_have_four_forms(tiny):
    ids = tiny.tokenizer.encode("import")
    for prompt, expected in (
        ("import", [ids]),
        (["import", "import"], [ids, ids]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ):
        assert completion(tiny, prompt=prompt).prompts == expected


def test_what_is_left_out_is_openais(tiny):
    asked = completion(tiny)
    assert (asked.max_new_tokens, asked.choices, asked.stream) == (16, 1, False)
    assert asked.sampling["temperature"] == 1.0
    assert completion(tiny).seed != completion(tiny).seed
    assert completion(tiny, seed=-(2**63)).seed == -(2**63)


def test_what_is_given_is_passed_on(tiny):
    asked = completion(
        tiny,
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_tokens=2,
        stop_token_ids=[4],
        stop="x",
        n=3,
        stream=True,
        stream_options={"include_usage": True},
        user="me",
        suffix=None,
        priority=2,
        logprobs=1,
    )
    assert asked.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": None,
        "min_new_tokens": 2,
        "stop_ids": [4],
    }
    assert (asked.stop, asked.choices, asked.priority) == (["x"], 3, 2)
    assert asked.stream
    assert asked.with_usage
    assert asked.logprobs
    assert (asked.top, asked.candidates) == (1, 1)
    greedy = {"temperature": 0, "logprobs": 1}
    assert completion(tiny, **greedy).candidates == 0  # the token itself is the likeliest
    assert completion(tiny, **greedy, min_tokens=2).candidates == 1
    assert completion(tiny, **greedy | {"logprobs": 4}).candidates == 4
    assert completion(tiny, temperature=0, top_p=0.5).sampling == {"temperature": 0.0}
    assert completion(tiny, top_p=0).sampling == completion(tiny, temperature=0).sampling
    assert completion(tiny, n=2, best_of=2).choices == 2


def test_an_echo_is_the_prompt_as_it_was_sent_with_special_tokens(tiny):
    special = tiny.tokenizer.decode([0], skip_special=False)
    assert special
    assert completion(tiny, prompt=f"a{special} b", echo=True).echoes == [f"a{special} b"]
    ids = [0, *tiny.tokenizer.encode("import")]
    assert completion(tiny, prompt=ids, echo=True).echoes == [special + "import"]
    assert completion(tiny).echoes is None


def test_what_is_left_out_is_the_models_own(tiny):
    own = mpjax.Sampling(0.6, top_k=1, top_p=0.9, repetition_penalty=1.1)
    lm = dataclasses.replace(tiny, sampling=own)
    assert mpjax.Sampling.of(completion(lm).sampling, own) == own
    asked = completion(lm, temperature=0.5, top_k=-1, min_p=0.1).sampling
    chosen = mpjax.Sampling(0.5, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    assert mpjax.Sampling.of(asked, own) == chosen  # as the engine reads it
    asked = completion(lm, temperature=0).sampling
    assert mpjax.Sampling.of(asked, own) == mpjax.Sampling(repetition_penalty=1.1)
    greedy = dataclasses.replace(tiny, sampling=mpjax.Sampling())  # "do_sample": false
    assert completion(greedy).sampling == {"temperature": 0.0}
    assert completion(greedy, temperature=2, top_k=3).sampling == {"temperature": 2.0, "top_k": 3}
    lists = {"bad_words": [[3], [4, 5]], "logit_bias": {6: 1.5}}
    bound = dataclasses.replace(tiny, sampling=mpjax.Sampling(**lists))
    assert completion(bound).sampling == {"temperature": 0.0} | lists
    words = completion(bound, temperature=1, logit_bias={"7": 2}).sampling
    assert words == {"temperature": 1.0} | lists | {"logit_bias": {7: 2}}


def test_penalties_and_lists_of_tokens_become_a_sampling(tiny):
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -2, "temperature": 0}
    lists = {"logit_bias": {"5": 2, "7": -100}, "allowed_token_ids": [5.0, 7], "bad_words": ["x"]}
    asked = completion(tiny, **penalties, **lists, logprobs=1)
    words = [tiny.tokenizer.encode(text) for text in ("x", " x")]
    assert asked.sampling == penalties | {
        "logit_bias": {5: 2, 7: -100},
        "allowed_ids": [5, 7],
        "bad_words": words,
    }
    assert asked.candidates == 1  # the likeliest token may not be the one that is drawn
    assert completion(tiny, temperature=0, presence_penalty=0, logprobs=1).candidates == 0


@pytest.mark.parametrize(
    ("body", "message", "parameter"),
    [
        ({"prompt": 5}, "prompt is 5: expected a text, token ids, or a list of them", "prompt"),
        ({"prompt": None}, "prompt 0 is empty: expected at least one token", "prompt"),
        ({"prompt": [{"role": "user"}]}, r'prompt is \[\{"role": "user"\}\]: expected', "prompt"),
        ({"prompt": [99999]}, "token id 99999", "prompt"),
        ({"max_token": 5}, r'"max_token" is no key of this request \(did you mean', "max_token"),
        ({"best_of": 1, "n": 2}, "best_of is 1 and n 2: expected n or more", "best_of"),
        ({"logprobs": 21}, "logprobs is 21: expected a whole number from 0 to 20", "logprobs"),
        ({"max_tokens": 0}, "which leaves only the prompt", "max_tokens"),
        ({"temperature": "hot"}, 'temperature is "hot": expected a number of 0', "temperature"),
        ({"stop": [1]}, r"stop is \[1\]: expected a text that is not empty, or a list", "stop"),
        ({"stop": "\ud800"}, r'stop is "\\ud800": expected a text', "stop"),
        ({"seed": 2**63}, "seed is 9223372036854775808: expected a whole number from -", "seed"),
        ({"top_p": 1.5}, "top_p is 1.5: expected a number from 0 to 1", "top_p"),
        ({"stream": 1}, "stream is 1: expected true or false", "stream"),
        ({"stream_options": 1}, "stream_options is 1: expected an object", "stream_options"),
        ({"stream_options": {}}, "stream_options is given, and stream is not", "stream_options"),
        ({"echo": True, "logprobs": 1, "stream": True}, "come whole", "stream"),
        ({"stop_token_ids": [2, 99999]}, "has 99999: .* from 0 to 2047", "stop_token_ids"),
        ({"frequency_penalty": 2.5}, "expected a number from -2 to 2", "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "expected an object of numbers from -100", "logit_bias"),
        ({"logit_bias": {"1": 5, "01": -5}}, "expected an object of numbers", "logit_bias"),
        ({"logit_bias": {"2048": 1}}, "logit_bias has 2048: expected token ids", "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "at most 300", "logit_bias"),
        ({"allowed_token_ids": []}, "which allows no token", "allowed_token_ids"),
        ({"bad_words": [""]}, r'bad_words is \[""\]: expected a list of texts', "bad_words"),
        ({"bad_words": ["a" * 2000]}, "expected 1 to 8 in each", "bad_words"),
    ],
)
def test_what_is_wrong_is_named(tiny, body, message, parameter):
    with pytest.raises(RequestError, match=message) as error:
        completion(tiny, **body)
    assert error.value.parameter == parameter


def test_an_engines_messages_use_the_clients_keys():
    error = ValueError("min_new_tokens is 9 and max_new_tokens 4; expected less")
    found = refusal_of_engine(error, 400, "prompt")
    assert str(found) == "min_tokens is 9 and max_tokens 4; expected less"
    assert (found.parameter, found.status) == ("min_tokens", 400)
    closed = refusal_of_engine(ValueError("the engine is closed"), 503, "prompt")
    assert closed.parameter is None
    long = refusal_of_engine(TooLongError("the prompt has 9 tokens"), 400, "messages")
    assert (long.parameter, long.code) == ("messages", "context_length_exceeded")


def test_chats_go_through_the_template(chat_folder):
    import mpjax

    lm = mpjax.load(chat_folder)
    messages = [{"role": "user", "content": [{"type": "text", "text": "Why"}]}]
    asked = read_chat(lm, {"messages": messages, "max_completion_tokens": 4})
    plain = [{"role": "user", "content": "Why"}]
    assert asked.prompts == [lm.tokenizer.encode_chat(plain)]
    assert asked.max_new_tokens == 4
    assert read_chat(lm, {"messages": plain}).max_new_tokens is None
    for template in ("{% for i in range(9) %}{% endfor %}", 5, ["default"]):
        with pytest.raises(RequestError, match="is not the name of a template") as error:
            read_chat(lm, {"messages": plain, "chat_template_kwargs": {"chat_template": template}})
        assert error.value.parameter == "chat_template_kwargs"
    with pytest.raises(RequestError, match=r"the role of messages\[0\] is null") as error:
        read_chat(lm, {"messages": [{}]})
    assert error.value.parameter == "messages"
    for key, value, message in (
        ("chat_template_kwargs", {"messages": []}, "has 'messages', which may not be among its"),
        ("chat_template_kwargs", {"self": 1}, "has 'self', which may not be among its keys"),
        ("chat_template_kwargs", [], r"chat_template_kwargs is \[\]: expected an object"),
        ("top_logprobs", 2, "top_logprobs is 2, and logprobs is not true: set logprobs"),
    ):
        with pytest.raises(RequestError, match=message) as error:
            read_chat(lm, {"messages": plain, key: value})
        assert error.value.parameter == key


def test_the_effort_of_reasoning_is_a_variable_of_the_template(chat_folder):
    import mpjax

    lm = mpjax.load(chat_folder)
    body = {"messages": [{"role": "user", "content": "Why"}]}
    plain = read_chat(lm, body).prompts
    assert read_chat(lm, body | {"reasoning_effort": "medium"}).prompts == plain
    with pytest.raises(RequestError, match="the chat template of the model has no such") as error:
        read_chat(lm, body | {"reasoning_effort": "high"})
    assert error.value.code == "unsupported_parameter"
    lm.tokenizer.chat_templates["default"] = (
        "{{ reasoning_effort | default('medium') }} {{ messages[0].content }}"
    )
    [ids] = read_chat(lm, body | {"reasoning_effort": "high"}).prompts
    assert lm.tokenizer.decode(ids) == "high Why"


def test_a_template_that_refuses_messages(chat_folder):
    import mpjax

    lm = mpjax.load(chat_folder)
    lm.tokenizer.chat_templates["default"] = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match=r"^the chat template of the model .*must alternate"):
        read_chat(lm, {"messages": [{"role": "user", "content": "Why"}]})
