from __future__ import annotations

import json

import pytest
import tokenizers

from mpjax.checkpoint import CheckpointError
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.tokenizer_folders import TEXTS, TOOLS, llama, qwen, sentencepiece, write


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    return qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(params=["llama", "qwen"])
def pair(request):
    """The same folder through this library and through transformers."""
    transformers = pytest.importorskip("transformers")
    folder = request.getfixturevalue(f"{request.param}_folder")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return Tokenizer.from_folder(folder), reference


@pytest.mark.parametrize("text", [*TEXTS, "<|eot_id|>x<|im_end|><think>y</think>", "e\u0301"])
def test_encode_and_decode_equal_those_of_transformers(pair, text):
    ours, reference = pair
    ids = ours.encode(text)
    assert ids == reference(text)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip_special=skip) == reference.decode(
            ids, skip_special_tokens=skip
        )


def test_stop_and_bos_ids(llama_folder, qwen_folder):
    llama, qwen = Tokenizer.from_folder(llama_folder), Tokenizer.from_folder(qwen_folder)
    assert (llama.bos_id, llama.stop_ids) == (0, (1, 4))
    assert (qwen.bos_id, qwen.stop_ids) == (None, (0, 2))  # config.json's, then <|im_end|>


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (2,)),
        ({"config": {"eos_token_id": [7, 2]}}, (7, 2)),
        ({"config": {"text_config": {"eos_token_id": 5}}}, (5, 2)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": 9}}, (9, 2)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": None}}, (5, 2)),
    ],
)
def test_stop_ids_come_from_the_first_file_that_names_them(tmp_path, files, expected):
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    write(tmp_path, sentencepiece(), special_tokens_map=names, **files)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.stop_ids == expected
    assert tokenizer.bos_id == 1


def test_add_bos_token_does_not_override_the_post_processor(tmp_path):
    transformers = pytest.importorskip("transformers")
    write(tmp_path, sentencepiece(), tokenizer_config={"bos_token": "<s>", "add_bos_token": True})
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = Tokenizer.from_folder(tmp_path).encode("ab é")
    assert ids == reference("ab é")["input_ids"]
    assert ids[0] != 1


def test_tokens_of_tokenizer_config_that_tokenizer_json_lacks_are_added(tmp_path):
    transformers = pytest.importorskip("transformers")
    backend = sentencepiece()
    start = backend.get_vocab_size()
    entry = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(start + 1): {"content": "<|user|>", "special": False, **entry},
        str(start): {"content": "<|end|>", "special": True, **entry},
    }
    config = {
        "eos_token": "<|end|>",
        "unk_token": "ab",  # an ordinary piece that is special by being named
        "added_tokens_decoder": added,
    }
    write(tmp_path, backend, tokenizer_config=config)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    text = "ab<|user|>a<|end|>"
    assert ours.encode(text) == reference(text)["input_ids"]
    assert ours.encode(text)[-1] == start == ours.stop_ids[0]
    assert ours.decode(ours.encode(text)) == reference.decode(
        reference(text)["input_ids"], skip_special_tokens=True
    )
    added[str(start + 9)] = {"content": "<|far|>", **entry}
    write(tmp_path, backend, tokenizer_config=config)
    with pytest.raises(
        CheckpointError, match=rf"'<\|far\|>' the id {start + 9}, but .* {start + 2}"
    ):
        Tokenizer.from_folder(tmp_path)


def test_added_tokens_follow_in_order_of_their_numbers(tmp_path):
    backend = sentencepiece()
    backend.add_tokens([f"<{index}>" for index in range(backend.get_vocab_size(), 999)])
    entries = {index: {"content": f"<{index}>", "normalized": False} for index in (1001, 1000, 999)}
    added = {str(index): entry for index, entry in entries.items()}
    write(tmp_path, backend, tokenizer_config={"added_tokens_decoder": added})
    assert Tokenizer.from_folder(tmp_path).encode("<999><1001><1000>") == [999, 1001, 1000]


def test_added_tokens_keep_their_flags(tmp_path):
    transformers = pytest.importorskip("transformers")
    backend = sentencepiece()
    start, plain = backend.get_vocab_size(), {"normalized": False, "special": False}
    flags = [{"lstrip": True}, {"rstrip": True}, {"single_word": True}]
    added = {
        str(start + place): {"content": f"<{name}>", **plain, **flag}
        for place, (name, flag) in enumerate(zip("abc", flags, strict=True))
    }
    write(tmp_path, backend, tokenizer_config={"added_tokens_decoder": added})
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    for text in ("a <a> a", "a <b> a", "a<c>a <c> a"):
        assert ours.encode(text) == reference(text)["input_ids"]


def test_tokens_are_special_by_being_named(tmp_path):
    """Added ones that were plain, and pieces, which stand within words too, under any name."""
    backend = sentencepiece()
    backend.add_tokens([tokenizers.AddedToken("<img>", normalized=False)])
    known, piece = backend.token_to_id("<img>"), backend.token_to_id("<0x00>")
    for names, named in (
        ({"eos_token": "<img>", "pad_token": "<0x00>"}, {}),
        ({"additional_special_tokens": ["<img>", {"content": "<0x00>"}]}, {}),
        ({"extra_special_tokens": ["<img>", "<0x00>", "<of another model>"]}, {}),
        (
            {"extra_special_tokens": {"image_token": "<img>", "end": {"content": "<0x00>"}}},
            {"image_token": "<img>", "end": "<0x00>"},
        ),
    ):
        write(tmp_path, backend, tokenizer_config=names)
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.special_ids == {0, 1, 2, known, piece}
        ids = tokenizer.encode("a<img>b<0x00>c")
        assert [index for index in ids if index in (known, piece)] == [known, piece]
        assert tokenizer.decode(ids) == "a b c"
        assert named.items() <= tokenizer.special_tokens.items()


def test_a_map_of_special_tokens_counts_where_the_config_lists_none(tmp_path):
    for added, expected in (({}, 2), ({"added_tokens_decoder": {}}, 1)):
        config = {"eos_token": "<s>", **added}
        write(
            tmp_path,
            sentencepiece(),
            tokenizer_config=config,
            special_tokens_map={"eos_token": "</s>"},
        )
        assert Tokenizer.from_folder(tmp_path).stop_ids == (expected,)


def test_what_a_tokenizer_was_trained_with_neither_cuts_nor_fills_prompts():
    backend = sentencepiece()
    ids = backend.encode("ab ab ab").ids
    for prepare in (
        lambda: backend.enable_truncation(2),
        lambda: backend.enable_padding(length=20),
    ):
        prepare()
        assert backend.encode("ab ab ab").ids != ids
        assert Tokenizer(backend).encode("ab ab ab") == ids


def test_templates_by_name_and_in_files(tmp_path, qwen_folder):
    backend = Tokenizer.from_folder(qwen_folder).backend
    hello = [{"role": "user", "content": "hello"}]
    named = [
        {"name": "default", "template": "D {{ messages[0].content }}{{ tools or '' }}"},
        {
            "name": "tool_use",
            "template": "T {{ tools[0].function.name }} {{ messages[0].content }}",
        },
    ]
    write(tmp_path, backend, tokenizer_config={"chat_template": named})
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.chat(hello) == "D hello"
    assert ours.chat(hello, tools=TOOLS) == "T größe hello"
    assert ours.chat(hello, tools=TOOLS, chat_template="default") == f"D hello{TOOLS}"

    write(tmp_path, backend, tokenizer_config={"chat_template": named[1:]})
    with pytest.raises(ValueError, match=r"no default among its chat templates \['tool_use'\]"):
        Tokenizer.from_folder(tmp_path).chat(hello)

    write(
        tmp_path, backend, tokenizer_config={}, chat_template={"chat_template": "P{{ messages }}"}
    )
    assert Tokenizer.from_folder(tmp_path).chat(hello) == f"P{hello}"

    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").write_text("R{{ messages }}", encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.chat_templates == {"default": "F", "rag": "R{{ messages }}"}
    assert ours.chat(hello, chat_template="rag") == f"R{hello}"


def test_a_folder_without_tokenizer_json_says_what_there_is(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="it holds nothing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"it holds model\.safetensors"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=r"tokenizer\.model but no .* with transformers"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("sizes", [{"vocab_size": 9}, {"text_config": {"vocab_size": 9}}])
def test_stop_ids_are_of_the_vocabulary(tmp_path, sizes):
    for ids in (8, [0, 8]):
        write(tmp_path, sentencepiece(), config=sizes, generation_config={"eos_token_id": ids})
        assert 8 in Tokenizer.from_folder(tmp_path).stop_ids
    write(tmp_path, sentencepiece(), config=sizes, generation_config={"eos_token_id": [0, 9]})
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json is \[0, 9\]: expected .* from 0 to 8"
    ):
        Tokenizer.from_folder(tmp_path)


def test_text_has_no_halves_of_surrogate_pairs():
    """A byte that is not UTF-8 becomes one in a pipe, and the backend takes it for no text."""
    tokenizer = Tokenizer(sentencepiece(), chat_templates={"default": "{{ messages[0].content }}"})
    message = r"character 1 of the text is '\\udcff', which UTF-8 can't"
    with pytest.raises(ValueError, match=message):
        tokenizer.encode("a\udcff")
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chat([{"role": "user", "content": "a\udcff"}])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"model": {"unk_token": "<nowhere>"}},
            "encode this text: Unk token `<nowhere>` not found",
        ),
        ({"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 2**63}}, "decode these"),
    ],
)
def test_a_tokenizer_that_contradicts_itself(part, message, tmp_path):
    """The backend raises bare Exceptions, and panics, only when it is used."""
    write(tmp_path, sentencepiece())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for key, changes in part.items():
        content[key] = {**(content[key] if key == "model" else {}), **changes}
    content["model"]["byte_fallback"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match=f"tokenizer.json of {tmp_path} can't {message}"):
        tokenizer.decode(tokenizer.encode("é日a"))
