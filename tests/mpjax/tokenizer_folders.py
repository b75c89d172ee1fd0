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
