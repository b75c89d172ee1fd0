"""The formats in which models write tool calls, recognised from their chat templates.

A call is literal text around a name and its arguments, as templates render earlier calls. The
same description parses an answer (`tool_calls.py`) and constrains one (`tool_grammars.py`).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class InObject:
    """A call is a JSON object with its "name" and, under `key`, its arguments.

    listed: whether calls are the items of one list.
    """

    key: str = "arguments"
    listed: bool = False


@dataclasses.dataclass(frozen=True)
class AsJson:
    """The arguments are a JSON object behind `ToolFormat.middle`."""


@dataclasses.dataclass(frozen=True)
class AsParameters:
    """Each argument has markers around its name and its value.

    A string is written without quotes, and other values as JSON.
    """

    open: str
    middle: str
    close: str


@dataclasses.dataclass(frozen=True)
class Quoted:
    """The arguments are `{name:value,...}`, with a marker on both sides of each string."""

    quote: str


@dataclasses.dataclass(frozen=True)
class Pythonic:
    """A call is one of Python, `name(key=value, ...)`, whose values are literals.

    listed: as in InObject; otherwise calls are on lines of their own.
    """

    listed: bool = True


Arguments = InObject | AsJson | AsParameters | Quoted | Pythonic


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    Spaces and newlines of the literal texts may be missing in an answer, and there may be more of
    them around calls.

    required: strings that the source of a template with this format contains.
    begin, end: around all calls; around each call, if wraps_each. between: the separator of calls.
    open, middle, close: before a call's name, between it and its arguments, and behind them.
    is_bare: whether `begin` may be missing if the answer begins with a call.
    opens_alone: whether `open` begins a call also without `begin`.
    number: the marker of the id that the model writes behind the name, or "".
    number_pattern: the regular expression of such an id. identity: the call's id made from it.
    id_size: the number of random characters behind id_prefix in ids that mpjax makes.
    is_single: whether an answer has at most one call. in_header: whether a call is a message of a
        channel (`channels.py`), with `open` and `middle` in its header.
    """

    name: str
    required: tuple[str, ...]
    arguments: Arguments
    begin: str = ""
    end: str = ""
    between: str = ""
    wraps_each: bool = True
    open: str = ""
    middle: str = ""
    close: str = ""
    is_bare: bool = False
    opens_alone: bool = False
    number: str = ""
    number_pattern: str = ""
    identity: str = ""
    id_prefix: str = "call_"
    id_size: int = 24
    is_single: bool = False
    in_header: bool = False

    @classmethod
    def of_template(cls, source: str) -> ToolFormat | None:
        """The format of a chat template, in Jinja source; None if it names no known markers."""
        found = (each for each in KNOWN if all(text in source for text in each.required))
        return next(found, None)

    @property
    def literals(self) -> tuple[str, ...]:
        """All literal texts of the format."""
        found = [self.begin, self.end, self.open, self.middle, self.close, self.number]
        if isinstance(self.arguments, AsParameters):
            found += dataclasses.astuple(self.arguments)
        elif isinstance(self.arguments, Quoted):
            found.append(self.arguments.quote)
        return tuple(filter(None, found))


def _listed(name: str, required: tuple[str, ...], begin: str, end: str = "") -> ToolFormat:
    """A format in which all calls are one list of JSON objects between two markers."""
    listed = InObject(listed=True)
    return ToolFormat(name, required, listed, begin=begin, end=end, wraps_each=False)


HARMONY = ToolFormat(
    "harmony",
    ("<|channel|>", "<|call|>"),
    AsJson(),
    open="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    is_single=True,
    in_header=True,
)
KIMI = ToolFormat(
    "Kimi K2",
    ("<|tool_call_argument_begin|>",),
    AsJson(),
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    wraps_each=False,
    open="<|tool_call_begin|>functions.",
    middle="<|tool_call_argument_begin|>",
    close="<|tool_call_end|>",
    number=":",
    number_pattern="[0-9]+",
    identity="functions.{name}:{number}",
)
DEEPSEEK = ToolFormat(
    "DeepSeek V3.1",
    ("<｜tool▁sep｜>",),
    AsJson(),
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    wraps_each=False,
    open="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    close="<｜tool▁call▁end｜>",
)
DEEPSEEK_V3 = dataclasses.replace(
    DEEPSEEK,
    name="DeepSeek V3",
    required=("<｜tool▁sep｜>", "```json"),
    between="\n",
    open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    close="\n```<｜tool▁call▁end｜>",
)
GLM = ToolFormat(
    "GLM",
    ("<tool_call>", "<arg_key>", "<arg_value>"),
    AsParameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    between="\n",
    open="<tool_call>",
    middle="\n",
    close="\n</tool_call>",
)
GLM_4_7 = ToolFormat(
    "GLM-4.7",
    ("<tool_call>", "</arg_key><arg_value>"),
    AsParameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    open="<tool_call>",
    close="</tool_call>",
)
QWEN_CODER = ToolFormat(
    "Qwen3-Coder",
    ("<tool_call>", "<function=", "<parameter="),
    AsParameters("<parameter=", ">\n", "\n</parameter>"),
    begin="<tool_call>\n",
    end="\n</tool_call>",
    between="\n",
    open="<function=",
    middle=">\n",
    close="\n</function>",
    opens_alone=True,
)
HERMES = ToolFormat(
    "hermes",
    ("<tool_call>\\n{",),
    InObject(),
    begin="<tool_call>\n",
    end="\n</tool_call>",
    between="\n",
)
# Jinja sources spell a newline in two ways.
HERMES_2 = dataclasses.replace(HERMES, required=("<tool_call>\n", '"arguments": '))
NEMOTRON = dataclasses.replace(
    _listed("Nemotron Nano 2", ("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>"), between="\n"
)
GEMMA_4 = ToolFormat(
    "Gemma 4",
    ("<|tool_call>call:", '<|"|>'),
    Quoted('<|"|>'),
    open="<|tool_call>call:",
    close="<tool_call|>",
)
FUNCTION_GEMMA = ToolFormat(
    "FunctionGemma",
    ("<start_function_call>", "<escape>"),
    Quoted("<escape>"),
    open="<start_function_call>call:",
    close="<end_function_call>",
)
MISTRAL = dataclasses.replace(
    _listed("Mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]"), id_prefix="", id_size=9
)
MISTRAL_ARGS = dataclasses.replace(
    MISTRAL,
    name="Mistral with [ARGS]",
    required=("[TOOL_CALLS]", "[ARGS]"),
    arguments=AsJson(),
    begin="",
    open="[TOOL_CALLS]",
    middle="[ARGS]",
)
MISTRAL_CALL_ID = dataclasses.replace(
    MISTRAL_ARGS,
    name="Mistral with [CALL_ID]",
    required=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    number="[CALL_ID]",
    number_pattern="[a-zA-Z0-9]{9}",
    identity="{number}",
)
LLAMA = ToolFormat(
    "Llama 3",
    ('{"name": function name, "parameters": ',),
    InObject("parameters"),
    begin="<|python_tag|>",
    is_bare=True,
    is_single=True,
)
LLAMA_PYTHONIC = ToolFormat(
    "Llama pythonic",
    ("[func_name1(params_name1=params_value1",),
    Pythonic(),
    begin="<|python_start|>",
    end="<|python_end|>",
    wraps_each=False,
    is_bare=True,
)
LFM_2 = dataclasses.replace(
    LLAMA_PYTHONIC,
    name="LFM2",
    required=("<|tool_list_start|>",),
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    is_bare=False,
)
OLMO_3 = ToolFormat(
    "OLMo 3",
    ("<function_calls>",),
    Pythonic(listed=False),
    begin="<function_calls>",
    end="</function_calls>",
    between="\n",
    wraps_each=False,
)
PHI = _listed("Phi-4-mini", ("<|tool|>", "'tools'"), "<|tool_call|>", "<|/tool_call|>")
GRANITE = _listed("Granite 3", ("<|tool_call|>",), "<|tool_call|>")
FUNCTOOLS = _listed("functools", ("functools",), "functools")
KNOWN = (
    HARMONY,
    KIMI,
    DEEPSEEK_V3,
    DEEPSEEK,
    GLM_4_7,
    GLM,
    QWEN_CODER,
    HERMES,
    HERMES_2,
    NEMOTRON,
    GEMMA_4,
    FUNCTION_GEMMA,
    MISTRAL_CALL_ID,
    MISTRAL_ARGS,
    MISTRAL,
    LLAMA_PYTHONIC,
    LLAMA,
    LFM_2,
    OLMO_3,
    PHI,
    GRANITE,
    FUNCTOOLS,
)
