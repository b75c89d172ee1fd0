"""Chats, tools and responses by clients of others, where they are installed."""

from __future__ import annotations

import pytest

pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from mpjax.serve.application import application
from tests.mpjax.serve.running import Server
from tests.mpjax.serve.scripted import Script, tokenizer_of

pytestmark = pytest.mark.filterwarnings("default")  # what they warn of is theirs
CALL = '<tool_call>\n{"name": "shell", "arguments": {"cmd": "ls é"}}\n</tool_call>'
THINKS = "{# </think> enable_thinking #}"
ARGUMENTS = {"cmd": "ls é"}


@pytest.fixture(scope="module")
def script():
    return Script(tokenizer_of("hermes", THINKS))


@pytest.fixture(scope="module")
def url(script):
    with Server(application(script, "it")) as server:
        yield server.url + "/v1"


@pytest.mark.parametrize("by_responses", [False, True])
def test_langchain(script, url, by_responses):
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def shell(cmd: str) -> str:
        """Runs a command."""
        return f"ran {cmd}"

    model = langchain.ChatOpenAI(
        model="it", base_url=url, api_key="x", use_responses_api=by_responses
    ).bind_tools([shell])
    script.answers += [f"<think>Hm</think>I look. {CALL}{CALL}", "Done.", f"I look. {CALL}"]
    asked = [HumanMessage("Hi"), model.invoke("Hi")]
    assert [call["args"] for call in asked[1].tool_calls] == [ARGUMENTS] * 2
    for call in asked[1].tool_calls:
        asked.append(ToolMessage(shell.invoke(call["args"]), tool_call_id=call["id"]))
    assert model.invoke(asked).text == "Done."
    assert script.prompts[-1].count("tool: ran ls é") == 2
    first, *rest = model.stream("Hi")
    for chunk in rest:
        first += chunk
    assert first.text == "I look."
    assert [call["args"] for call in first.tool_calls] == [ARGUMENTS]


def test_litellm(script, url, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the net
    litellm = pytest.importorskip("litellm")
    parameters = {"type": "object", "properties": {"cmd": {"type": "string"}}}
    function = {"name": "shell", "parameters": parameters}
    options = {"model": "openai/it", "api_base": url, "api_key": "x"}
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    asked |= {"tools": [{"type": "function", "function": function}]}
    script.answers += [f"<think>Hm</think>I look. {CALL}", f"I look. {CALL}", "Yes."]
    [choice] = litellm.completion(**options, **asked).choices
    assert (choice.finish_reason, choice.message.reasoning_content) == ("tool_calls", "Hm")
    chunks = list(litellm.completion(**options, **asked, stream=True))
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    for found in (choice.message, message):
        assert found.content == "I look."
        assert found.tool_calls[0].function.arguments == '{"cmd": "ls é"}'
    found = litellm.responses(**options, input="Hi")
    assert found.output[0].content[0].text == "Yes."
