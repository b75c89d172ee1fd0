"""Grammars accept what templates write, and nothing else, by llguidance's own acceptance."""

from __future__ import annotations

import json

import pytest
import tokenizers

from mpjax.constraints.kinds import ChatAnswer, JsonSchema
from mpjax.text.answers import Style
from mpjax.text.channels import HARMONY, THINK
from mpjax.text.tool_formats import ToolFormat
from mpjax.text.tool_grammars import Called, grammar
from tests.mpjax.text.test_tool_calls import ARGUMENTS, SCHEMA, written
from tests.mpjax.text.tool_templates import TEMPLATES
from tests.mpjax.tokenizer_folders import byte_level

llguidance = pytest.importorskip("llguidance")

THOUGHTS = ("<think>", "</think>")
CITY = {"type": "object", "properties": SCHEMA["properties"], "required": ["city"]}
TOOLS = [Called("get_weather", CITY), Called("now", {"type": "object", "properties": {}})]


class Model:
    """The tokens of a model that writes calls in a format, with some of its markers as tokens."""

    def __init__(self, name, has_tokens=True, channels=None):
        source, tokens = TEMPLATES[name]
        self.backend = byte_level(["<eos>"])
        tokens = dict.fromkeys([*(tokens if has_tokens else ()), *(THOUGHTS if channels else ())])
        self.backend.add_tokens([tokenizers.AddedToken(one) for one in tokens])
        ids = {self.backend.token_to_id(one): one for one in tokens}
        self.style = Style(channels, ToolFormat.of_template(source), ids)
        self.tokens = llguidance.LLTokenizer(self.backend.to_str(), eos_token=0)

    def accepts(self, made, text):
        """Whether a grammar accepts the whole text, and would accept its end there."""
        is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(made, self.tokens)
        assert not is_wrong, (messages, made)
        matcher = llguidance.LLMatcher(self.tokens, made, log_level=0)
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_accepted_and_other_calls_are_not(name, has_tokens):
    model = Model(name, has_tokens, HARMONY if name == "harmony" else None)
    is_single = model.style.tools.is_single
    made = grammar(model.style, TOOLS)
    first = ("get_weather", {"city": "x", "days": 5, "flag": True, "deep": {"a": [1, "b"]}})
    calls = [first, ("now", {})][: 1 if is_single else 2]
    assert model.accepts(made, written(name, calls))
    assert model.accepts(made, written(name, [("get_weather", {"city": ARGUMENTS["city"]})]))
    assert not model.accepts(made, "")
    assert not model.accepts(made, "Hello")
    assert not model.accepts(made, written(name, [("launch", {})]))
    assert not model.accepts(made, written(name, [("get_weather", {"days": 5})]))
    assert not model.accepts(made, written(name, [("get_weather", {"city": "x", "days": "y"})]))
    assert not model.accepts(made, written(name, calls)[:-4])
    single = grammar(model.style, TOOLS, is_single=True)
    assert model.accepts(single, written(name, calls[:1]))
    assert is_single or not model.accepts(single, written(name, calls))


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "texts"])
def test_reasoning_may_come_first(has_tokens):
    model = Model("hermes", has_tokens, THINK)
    for prompt, text, is_right in (
        ("<think>\n", f"Hm.</think>\n\n{CALL}", True),
        ("<think>\n", CALL, False),
        ("", f"<think>Hm.</think>\n\n{CALL}", True),
        ("", CALL, True),
        ("", f"Hm.{CALL}", False),
        ("</think>\n\n", f"<think>Hm.</think>{CALL}", False),
        ("</think>\n\n", CALL, True),
    ):
        made = grammar(model.style, TOOLS, prompt=prompt)
        assert model.accepts(made, text) == is_right, (prompt, text)


@pytest.mark.parametrize("name", ["hermes", "harmony", "Llama 3"])
def test_a_constrained_text_may_stand_beside_calls(name):
    model = Model(name, channels=HARMONY if name == "harmony" else THINK)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    before = before if name == "harmony" else "<think>Hm.</think>\n\n"
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    either = grammar(model.style, TOOLS, is_required=False, has_answer=True)
    alone = grammar(model.style, [], is_required=False, has_answer=True)
    for outer in (either, alone):
        made = ChatAnswer(outer, JsonSchema(schema)).grammar()
        assert model.accepts(made, f'{before}{final}{{"a": 1}}')
        assert not model.accepts(made, f'{before}{final}{{"a": "x"}}')
        assert model.accepts(made, f'{final}{{"a": 1}}')
        assert model.accepts(made, before + written(name, [("now", {})])) == (outer is either)


def test_channels_may_come_first():
    model = Model("harmony", channels=HARMONY)
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>Hi"
    made, free = (grammar(model.style, TOOLS, is_required=one) for one in (True, False))
    for text, is_right in ((before + call, True), (before + final, False), (before, False)):
        assert model.accepts(made, text) == is_right
    assert model.accepts(free, before + final)
    assert model.accepts(free, before + call)
    assert not model.accepts(free, call.replace("now", "launch"))


def test_calls_in_free_text_are_those_of_the_tools():
    model = Model("hermes")
    free = grammar(model.style, TOOLS, is_required=False)
    for text in ("Hi", "", f"I look.\n{CALL}\n{CALL} Done."):
        assert model.accepts(free, text)
    assert not model.accepts(free, f"I look.\n{CALL.replace('now', 'launch')}")
    llama = Model("Llama 3")
    free = grammar(llama.style, TOOLS, is_required=False)
    assert llama.accepts(free, "Hi { you")
    assert llama.accepts(free, '{"name": "now", "parameters": {}}')
    assert not llama.accepts(free, '{"name": "launch", "parameters": {}}')
    texts = Model("hermes", has_tokens=False)
    with pytest.raises(ValueError, match="begin with no token of the model"):
        grammar(texts.style, TOOLS, is_required=False)


def test_texts_keep_to_the_values_of_their_schema():
    schema = {"properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
    for name in ("GLM", "Gemma 4", "Qwen3-Coder", "hermes"):
        model = Model(name)
        made = grammar(model.style, [Called("now", schema)])
        assert model.accepts(made, written(name, [("now", {"unit": "C"})])), name
        assert not model.accepts(made, written(name, [("now", {"unit": "K"})])), name
    short = {"properties": {"unit": {"type": "string", "maxLength": 1}}}
    strict, loose = (Called("now", short, is_strict=one) for one in (True, False))
    with pytest.raises(ValueError, match="maxLength of its arguments is not enforced in the form"):
        grammar(Model("GLM").style, [strict])
    assert grammar(Model("GLM").style, [loose])
    made = grammar(Model("hermes").style, [strict])
    assert not Model("hermes").accepts(made, written("hermes", [("now", {"unit": "CC"})]))


def test_json_has_few_spaces_in_a_row():
    model = Model("hermes")
    made = grammar(model.style, TOOLS)
    call = json.dumps({"city": "x"}, indent=4)
    head, tail = '<tool_call>\n{"name": "get_weather", "arguments": ', "}\n</tool_call>"
    assert model.accepts(made, head + call + tail)
    assert not model.accepts(made, head + call.replace("    ", " " * 99) + tail)


def test_values_of_python_match_their_schemas():
    model = Model("Llama pythonic")
    properties = {
        "one": {"enum": ["a b", 2, None, True]},
        "text": {"type": "string"},
        "name": {"type": "string", "pattern": "^[a-z]{3}$"},
        "deep": {"type": "object", "properties": {"k": {"type": "array", "items": SCHEMA}}},
    }
    made = grammar(model.style, [Called("f", {"type": "object", "properties": properties})])
    for arguments, is_right in (
        ("", True),
        ("one='a b', text='it\\'s'", True),
        ('one=None, text="x", name="abc", deep={}', True),
        ("""deep={"k": [{"city": 'x', "flag": False}, {}]}""", True),
        ("one='c'", False),
        ("one=true", False),
        ("name='abc'", False),
        ('name="abcd"', False),
        ("text=5", False),
        ("""deep={"k": [{"flag": None}]}""", False),
    ):
        assert model.accepts(made, f"[f({arguments})]") == is_right, arguments
    free = grammar(model.style, TOOLS, is_required=False)
    assert model.accepts(free, "Hi [1]")
    assert model.accepts(free, "[now()]")
    assert not model.accepts(free, "[launch()]")
