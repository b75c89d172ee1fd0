"""Short chat templates that write calls of tools as those of models do, with their markers."""

from __future__ import annotations

HEAD = """{% if tools %}{{ tools | tojson }} MARKERS{% endif %}{% for m in messages %}
{%- if not m.tool_calls %}{{ m.role }}: {{ m.content }}{{ eos_token }}
{%- else %}assistant: {{ m.content or '' }}CALLS{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}CALL{% endfor %}"
VALUES = "{% for k, v in f.arguments.items() %}VALUE{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
OBJECT = '{"name": "{{ f.name }}", "KEY": {{ f.arguments | tojson }}}'
LIST = "[" + EACH.replace(
    "CALL", OBJECT.replace("KEY", "arguments") + "{{ ', ' if not loop.last }}"
)
GEMMA = """{%- macro value(v) -%}
{%- if v is string %}{{ quote + v + quote }}{% elif v is boolean %}{{ 'true' if v else 'false' }}
{%- elif v is mapping %}{ {{- fields(v) -}} }
{%- elif v is sequence %}[{% for one in v %}{{ value(one) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ v }}{% endif %}{%- endmacro -%}
{%- macro fields(o) -%}
{%- for k, v in o | dictsort %}{{ k }}:{{ value(v) }}{{ ',' if not loop.last }}{% endfor %}
{%- endmacro -%}"""


def template(calls, markers="", before=""):
    return before + HEAD.replace("CALLS", calls).replace("MARKERS", markers)


def each(call):
    return EACH.replace("CALL", call)


def gemma(quote, begin, end):
    calls = each(begin + "call:{{ f.name }}{ {{- fields(f.arguments) -}} }" + end)
    return template(calls, quote, "{% set quote = '" + quote + "' %}" + GEMMA)


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")
DEEPSEEK += ("<｜tool▁call▁end｜>", "<｜tool▁sep｜>")


def deepseek(call):
    one = "{{ '<｜tool▁call▁begin｜>' }}" + call + "<｜tool▁call▁end｜>"
    return template("<｜tool▁calls▁begin｜>" + each(one) + "<｜tool▁calls▁end｜>", "{{ '' }}")


ARGUMENTS = "{{ f.arguments | tojson }}"
# For each format: a template, and its markers that are tokens of the models.
TEMPLATES = {
    "hermes": (
        template(
            each(
                "\n<tool_call>\\n".replace("\\n", "\n")
                + OBJECT.replace("KEY", "arguments")
                + "\n</tool_call>"
            ),
            "{# <tool_call>\\n{ #}",
        ),
        ("<tool_call>", "</tool_call>"),
    ),
    "Qwen3-Coder": (
        template(
            each(
                "\n<tool_call>\n<function={{ f.name }}>\n"
                + VALUES.replace("VALUE", "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n")
                + "</function>\n</tool_call>"
            )
        ),
        ("<tool_call>", "</tool_call>"),
    ),
    "GLM": (
        template(
            each(
                "\n<tool_call>{{ f.name }}\n"
                + VALUES.replace(
                    "VALUE", "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE + "</arg_value>\n"
                )
                + "</tool_call>"
            )
        ),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "Llama 3": (
        template(
            each(OBJECT.replace("KEY", "parameters")), '{"name": function name, "parameters": {}}'
        ),
        ("<|python_tag|>",),
    ),
    "Mistral": (template("[TOOL_CALLS]" + LIST + "]"), ("[TOOL_CALLS]",)),
    "Mistral with [ARGS]": (
        template(each("[TOOL_CALLS]{{ f.name }}[ARGS]" + ARGUMENTS)),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    "Mistral with [CALL_ID]": (
        template(each("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]" + ARGUMENTS)),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "harmony": (
        template(
            each(
                "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
                + ARGUMENTS
                + "<|call|>"
            )
        ),
        ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>"),
    ),
    "Gemma 4": (
        gemma('<|"|>', "<|tool_call>", "<tool_call|>"),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "FunctionGemma": (
        gemma("<escape>", "<start_function_call>", "<end_function_call>"),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "DeepSeek V3.1": (deepseek("{{ f.name }}<｜tool▁sep｜>" + ARGUMENTS), DEEPSEEK),
    "DeepSeek V3": (
        deepseek("function<｜tool▁sep｜>{{ f.name }}\n```json\n" + ARGUMENTS + "\n```"),
        DEEPSEEK,
    ),
    "Phi-4-mini": (
        template("<|tool_call|>" + LIST + "]<|/tool_call|>", "<|tool|>{# m['tools'] #}"),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "functools": (template("functools" + LIST + "]"), ()),
    "Kimi K2": (
        template(
            "<|tool_calls_section_begin|>"
            + each(
                "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}"
                "<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>"
            )
            + "<|tool_calls_section_end|>"
        ),
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
    ),
}
PYTHON = """{%- macro value(v) -%}
{%- if v is string %}{{ v | tojson }}{% elif v is none %}None{% elif v is boolean %}{{ v }}
{%- elif v is mapping %}{ {{- fields(v, '"', '": ') -}} }
{%- elif v is sequence %}[{% for one in v %}{{ value(one) }}{{ ', ' if not loop.last }}{% endfor %}]
{%- else %}{{ v }}{% endif %}{%- endmacro -%}
{%- macro fields(o, open, close) -%}
{%- for k, v in o.items() %}{{ open }}{{ k }}{{ close }}{{ value(v) }}{{ ', ' if not loop.last }}
{%- endfor %}{%- endmacro -%}"""


def pythonic(markers, begin, between, end):
    call = "{{ f.name }}({{ fields(f.arguments, '', '=') }}){{ '' if loop.last else BETWEEN }}"
    calls = begin + each(call.replace("BETWEEN", f"'{between}'")) + end
    return template(calls, markers, PYTHON)


TEMPLATES["Llama pythonic"] = (
    pythonic("[func_name1(params_name1=params_value1, ...)]", "[", ", ", "]"),
    ("<|python_start|>", "<|python_end|>"),
)
TEMPLATES["LFM2"] = (
    pythonic("<|tool_list_start|>", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
)
TEMPLATES["OLMo 3"] = (
    pythonic("", "<function_calls>", "\\n", "</function_calls>"),
    ("<function_calls>", "</function_calls>"),
)
SOURCE, MARKERS = TEMPLATES["GLM"]
TEMPLATES["GLM-4.7"] = (
    SOURCE.replace("{{ f.name }}\n", "{{ f.name }}")
    .replace("</arg_key>\n", "</arg_key>")
    .replace("</arg_value>\n", "</arg_value>"),
    MARKERS,
)
