"""Small tokenizers, trained on a few lines and written as checkpoints write theirs."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The capital of France is Paris.\n\nAnd 12,345 more — naïve café, 日本語, 👩‍👩‍👧 emoji!",
    "",
    "  leading and  double spaces ",
    "can't won't I'm . , ? it's",
    "def f(x):\n\treturn x ** 2  # ✓",
]
LLAMA_TEMPLATE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{% for message in messages %}
    {% if message.role == "debug" %}{% continue %}{% endif %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {% generation %}
            {{- message.content.split('</think>')[-1].lstrip('\\n') }}
        {% endgeneration %}
        {%- if message.tool_calls %}{{- message.tool_calls | tojson }}{% endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
    {% if loop.index0 == ns.last %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# As gpt-oss's: macros, a namespace, channels, and a last answer that ends with another token.
HARMONY_TEMPLATE = """{%- macro signature(tool) -%}
{{- "type " + tool.name + " = (_: " }}
{%- if tool.parameters is defined and tool.parameters is mapping %}
    {%- for name, spec in tool.parameters.properties.items() %}
        {{- name + ": " + spec.type + ("" if loop.last else ", ") }}
    {%- endfor %}
{%- endif %}
{{- ") => any;" }}
{%- endmacro -%}
{%- macro turn(role, channel, text, end="<|end|>") -%}
{{- "<|start|>" + role }}
{%- if channel %}{{- "<|channel|>" + channel }}{%- endif %}
{{- "<|message|>" + text + end }}
{%- endmacro -%}
{%- set effort = reasoning_effort | default("medium", true) %}
{%- set today = "Current date: " + strftime_now("%Y-%m-%d") %}
{{- turn("system", none, today + "\\nReasoning: " + effort) }}
{%- if messages[0].role in ["developer", "system"] %}
    {{- turn("developer", none, "# Instructions\\n\\n" + messages[0].content) }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
    {%- for tool in tools %}{{- signature(tool.function) }}{%- endfor %}
{%- endif %}
{%- set last = namespace(call=none) %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- set last.call = call.name %}
        {{- turn("assistant to=functions." + call.name, "commentary json", call.arguments | tojson,
                 "<|call|>") }}
    {%- elif message.role == "assistant" %}
        {%- if "<|channel|>" in message.content %}
            {{- raise_exception("Text of other channels belongs into thinking.") }}
        {%- endif %}
        {%- if loop.last and not add_generation_prompt %}
            {%- if message.thinking %}
                {{- turn("assistant", "analysis", message.thinking) }}
            {%- endif %}
            {{- turn("assistant", "final", message.content, "<|return|>") }}
        {%- else %}
            {{- turn("assistant", "final", message.content) }}
        {%- endif %}
    {%- elif message.role == "tool" %}
        {%- if last.call is none %}{{- raise_exception("No tool was called.") }}{%- endif %}
        {{- turn("functions." + last.call + " to=assistant", "commentary", message.content) }}
    {%- else %}
        {{- turn(message.role, none, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""
CHAT = [
    {"role": "system", "content": "Be <brief> & kind. "},
    {"role": "user", "content": "Häagen-Dazs in 日本?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes.", "tool_calls": None},
    {"role": "user", "content": "Why? <|eot_id|>"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "description": "a < b & c"}}]


def byte_level(special, vocabulary=400):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def llama(folder):
    """A folder like Llama-3's: bos by the post-processor, everything in tokenizer_config.json."""
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    backend = byte_level([*names, "<|eot_id|>"])
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
            ),
        ]
    )
    backend.enable_truncation(5)  # left in by training; no prompt may be cut by it
    config = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "chat_template": LLAMA_TEMPLATE,
        "clean_up_tokenization_spaces": True,
    }
    write(folder, backend, tokenizer_config=config, generation_config={"eos_token_id": [1, 4]})
    return folder


def qwen(folder):
    """A folder like Qwen's: no bos, plain added tokens, the template in a file of its own."""
    backend = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([tokenizers.AddedToken("<think>"), tokenizers.AddedToken("</think>")])
    config = {
        "bos_token": None,
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "add_bos_token": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": "stale",
    }
    write(folder, backend, tokenizer_config=config, config={"eos_token_id": 0, "bos_token_id": 0})
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE, encoding="utf-8")
    return folder


def harmony(folder):
    """A folder like gpt-oss's: three tokens end an answer, and `<|end|>` a message of it."""
    ends = ["<|return|>", "<|endoftext|>", "<|call|>"]
    backend = byte_level([*ends, "<|start|>", "<|channel|>", "<|message|>", "<|end|>"])
    config = {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    written = {"eos_token_id": [0, 1, 2], "pad_token_id": 1}
    write(folder, backend, tokenizer_config=config, generation_config=written)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(HARMONY_TEMPLATE, encoding="utf-8")
    return folder


def sentencepiece():
    """Shaped like Llama-2's: ▁ for spaces, one in front of the text, bytes for the unknown."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = {piece: index for index, piece in enumerate(special)}
    for piece in (
        [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdeé.") + ["▁a", "▁▁", "ab", ""]
    ):
        pieces[piece] = len(pieces)
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE(pieces, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(special)
    return backend


def metaspace():
    backend = sentencepiece()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return backend


def write(folder, backend, **files):
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
