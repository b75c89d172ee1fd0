"""The bytes of single tokens, and their names in lists of log-probabilities."""

from __future__ import annotations

from mpjax.text.text_stream import REPLACEMENT
from mpjax.text.tokenizer import Tokenizer


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token adds to a text, which may be a part of a character.

    Special tokens add their text. A SentencePiece "▁" adds its space, though `decode` leaves it out
    at the beginning of a text.
    """
    if (byte := tokenizer.byte_ids.get(token)) is not None:
        return bytes([byte])
    text = tokenizer.decode([token], skip_special=False)
    if REPLACEMENT in text:
        piece = tokenizer.backend.id_to_token(token) or ""
        if all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
    twice = tokenizer.decode([token, token], skip_special=False)
    return (twice[len(text) :] if twice.startswith(text) else text).encode()


def token_name(spelled: bytes) -> str:
    r"""The name of a token with these bytes: their text.

    Incomplete characters are escaped, such as `bytes:\xe2\x82`, as OpenAI does.
    """
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _byte_of() -> dict[str, int]:
    """The byte of each character in a byte-level BPE vocabulary (GPT-2; Radford et al., 2019).

    Printable characters of Latin-1 stand for their own byte. The remaining bytes, in order, are the
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + number): byte for number, byte in enumerate(others)}


BYTE_OF = _byte_of()
