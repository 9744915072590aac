"""Load tokenizers, find their stop ids and the bytes of every id, and render prompts to ids.

Completions are decoded through ``token_bytes`` and never encoded again: the tokenizer may encode the same text to
other ids than the sampled ones.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from oarjax.errors import UserError
from oarjax.system.time_limit import time_limit

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
PROBE_TOKENS = 64
TEMPLATE_SECONDS = 10.0
"""Limit on rendering one chat."""


class TokenizerError(UserError, ValueError):
    """Raised when a tokenizer is missing, does not fit the model, or cannot encode a text."""


class TextError(TokenizerError):
    """Raised when a text cannot be encoded; ``errors_at`` adds its place."""


@contextlib.contextmanager
def errors_at(location: str) -> Iterator[None]:
    """Put a text's place, such as a line of a file, before the messages of its errors; "" adds nothing."""
    try:
        yield
    except TextError as error:
        if not location:
            raise
        raise TextError(f"{location}: {error}") from None


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of an HF folder and check that it encodes its own vocabulary.

    A ``tokenizer.json`` is used unchanged. ``AutoTokenizer`` would rebuild it as the class that the model's type
    suggests, and a character-level vocabulary rebuilt as Qwen2's byte-level BPE drops what it does not know. Code that
    comes with a folder is never run.

    Raises:
        TokenizerError: the folder holds no tokenizer, or its ids do not decode to the same text.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TokenizerError(f"tokenizer folder {folder}: no such folder")
    has_json = (folder / "tokenizer.json").exists()
    if not has_json and not ((folder / "vocab.json").exists() and (folder / "merges.txt").exists()):
        raise TokenizerError(f"tokenizer folder {folder}: expected tokenizer.json, or vocab.json with merges.txt")
    try:
        if has_json:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        else:
            from transformers import AutoTokenizer  # imports torch where it is installed, which takes seconds

            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # the tokenizers library has no error class
        raise TokenizerError(f"tokenizer folder {folder} cannot be read ({error}); fetch it again") from error
    _check_round_trip(tokenizer, folder)
    return tokenizer


def stop_ids(folder: Path | str, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Return the ids that end a completion, sorted.

    They are the union of ``eos_token_id`` in the folder's generation_config.json (an int or a list), the tokenizer's
    end token, and ``<|im_end|>`` and ``<|endoftext|>`` if the vocabulary has them. A Qwen folder without
    generation_config.json thus still gets Qwen's two: (151643, 151645).

    Raises:
        TokenizerError: there is no stop id, or the tokenizer lacks an id of generation_config.json.
    """
    vocab = tokenizer.get_vocab()
    stops: set[int] = set()
    path = Path(folder) / "generation_config.json"
    if path.exists():
        try:
            declared = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError, RecursionError) as error:
            raise TokenizerError(f"{path} is not a JSON object ({error}); fetch it again") from None
        if declared is not None:
            stops |= _known_ids(declared, set(vocab.values()), path)
    for token in (tokenizer.eos_token, END_OF_TURN, END_OF_TEXT):
        if token is not None and token in vocab:
            stops.add(vocab[token])
    if not stops:
        raise TokenizerError(
            f"{folder}: no token ends a completion; set eos_token in tokenizer_config.json "
            "or eos_token_id in generation_config.json"
        )
    return tuple(sorted(stops))


def _known_ids(declared: Any, vocabulary: set[int], path: Path) -> set[int]:
    ids = declared if isinstance(declared, list) else [declared]
    unknown = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or i not in vocabulary]
    if unknown:
        raise TokenizerError(
            f"{path}: eos_token_id: expected ids of the tokenizer beside it (up to {max(vocabulary)}), got "
            f"{unknown[0]!r}; fetch the folder again"
        )
    return set(ids)


def pad_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of padding. Masks come from lengths, so it may also be a stop id."""
    vocab = tokenizer.get_vocab()
    for token in (tokenizer.pad_token, END_OF_TEXT, tokenizer.eos_token):
        if token is not None and token in vocab:
            return vocab[token]
    raise TokenizerError("the tokenizer has no padding token; set pad_token in tokenizer_config.json")


def token_bytes(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> list[bytes]:
    """Return the UTF-8 bytes of every id below ``vocab_size``; concatenated they are a completion's text.

    Byte-level BPE vocabularies (Qwen) spell bytes in GPT-2's alphabet, which is decoded here; in plain vocabularies
    a token is its own text. Special tokens, and padding ids of the embedding beyond the tokenizer, are b"". An added
    token that is not special (``<think>``) is its own text.

    Raises:
        TokenizerError: the tokenizer has ids at or above ``vocab_size``, or decodes in another way.
    """
    vocab = tokenizer.get_vocab()
    highest = max(vocab.values())
    if highest >= vocab_size:
        raise TokenizerError(
            f"the tokenizer has ids up to {highest}, but the model's vocabulary only {vocab_size}: they do not belong "
            "together; use the tokenizer in the model's folder"
        )
    added = dict(tokenizer.added_tokens_decoder)
    special = {index for index, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None
    table = [b""] * vocab_size
    for token, index in vocab.items():
        if index in special:
            continue
        if alphabet is None or index in added:
            table[index] = token.encode()
        else:
            table[index] = bytes(alphabet[letter] for letter in token)
    return table


def text_of(ids: Iterable[int], table: Sequence[bytes]) -> str:
    """Decode ids by their bytes; a character cut at either end becomes U+FFFD."""
    return b"".join(table[index] for index in ids).decode("utf-8", errors="replace")


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Encode a text without adding tokens before or after it, nor cutting or padding it, as its file may say.

    It is transformers' call without what it prepares for batches, in a third of the time.

    Raises:
        TextError: the vocabulary lacks a character and has no unknown token.
    """
    backend = tokenizer.backend_tokenizer
    # Set only where it differs, as by transformers: threads share the tokenizer.
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except Exception as error:  # tokenizers raises bare Exceptions
        unknown_letters = [letter for letter in dict.fromkeys(text) if not _known(tokenizer, letter)]
        cause = f"its vocabulary lacks {', '.join(map(repr, unknown_letters[:10]))}" if unknown_letters else str(error)
        cause += "; change the text, or use a policy whose tokenizer can"
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            cause = "it contains half of a surrogate pair, which is not a character; correct the text, or leave it out"
        raise TextError(f"the tokenizer cannot encode {_short(text)}: {cause}") from None


def _known(tokenizer: PreTrainedTokenizerFast, letter: str) -> bool:
    try:
        tokenizer(letter, add_special_tokens=False)
    except Exception:  # as above
        return False
    return True


def render_prompt(
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    *,
    template: Literal["chat", "plain"],
    system_prompt: str | None,
    prompt_format: str,
    thinking: bool | None = None,
    chat: Sequence[dict[str, str]] = (),
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Render a prompt to ids, up to where the completion begins.

    ``prompt_format`` is applied first; only ``{prompt}`` is replaced, so other braces (``\\boxed{}``) stay.
    chat: the tokenizer's chat template with the system prompt if there is one, the prompt as the user's turn and the
    opening of the assistant's turn, with Qwen3's ``enable_thinking`` if ``thinking`` is set. plain: the text, after the
    system prompt and a blank line if there is one. A ``chat`` whose last turn is the prompt is rendered whole, with the
    system prompt if it has none.

    Raises:
        TokenizerError: the chat template is missing, fails or lacks enable_thinking, the format has no ``{prompt}``,
            or the result is empty.
    """
    if "{prompt}" not in prompt_format:
        raise TokenizerError(f"data.prompt_format {prompt_format!r}: expected {{prompt}} where the prompt goes")
    text = prompt_format.replace("{prompt}", prompt)
    if template == "chat":
        if tokenizer.chat_template is None:
            raise TokenizerError("the tokenizer has no chat template; set data.template to plain")
        switch: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        if switch and not can_think(tokenizer):
            raise TokenizerError("data.thinking: the chat template has no enable_thinking; set data.thinking to null")
        if tools and "tools" not in str(tokenizer.chat_template):
            raise TokenizerError(
                "the chat template shows no tools; describe them in the prompt, with data.template=plain"
            )
        switch |= {"tools": list(tools)} if tools else {}
        turns = [*chat[:-1], {"role": "user", "content": text}]
        if system_prompt is not None and all(turn["role"] != "system" for turn in turns):
            turns.insert(0, {"role": "system", "content": system_prompt})
        try:
            with time_limit(TEMPLATE_SECONDS):
                rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **switch)
        except Exception as error:  # Jinja has many, and a template may raise its own
            raise TextError(
                f"the chat template fails on the prompt {_short(prompt)} ({type(error).__name__}: {error}); "
                "set data.template to plain, or correct the template"
            ) from error
        ids = encode(tokenizer, str(rendered))
    elif chat:
        raise TokenizerError("the prompt is a list of messages; set data.template to chat")
    else:
        ids = encode(tokenizer, text if system_prompt is None else f"{system_prompt}\n\n{text}")
    if not ids:
        remedy = "correct the chat template or data.prompt_format" if prompt.strip() else "fill it in, or leave it out"
        raise TextError(f"the prompt {_short(prompt)} encodes to no tokens; {remedy}")
    return ids


def chat_ids(tokenizer: PreTrainedTokenizerFast, turns: Sequence[dict[str, str]], **switch: Any) -> list[int]:
    """Render turns by the chat template, up to the assistant's next turn; an assistant's last turn is continued.

    Raises:
        TokenizerError: the chat template is missing or fails, or the turns render to no tokens.
    """
    if tokenizer.chat_template is None:
        raise TokenizerError("chat messages need a chat template, and the tokenizer has none; save plain text instead")
    continued = bool(turns) and turns[-1]["role"] == "assistant"
    try:
        with time_limit(TEMPLATE_SECONDS):
            rendered = tokenizer.apply_chat_template(
                list(turns),
                add_generation_prompt=not continued,
                continue_final_message=continued,
                tokenize=False,
                **switch,
            )
    except Exception as error:  # Jinja has many, and a template may raise its own
        raise TextError(f"the chat template fails on {turns!r:.80} ({type(error).__name__}: {error})") from error
    ids = encode(tokenizer, str(rendered))
    if not ids:
        raise TextError(f"the chat {turns!r:.80} encodes to no tokens; leave it out")
    return ids


def reply_ids(
    tokenizer: PreTrainedTokenizerFast, said: str, stops: Sequence[str], *, keep: bool, thinking: bool | None = None
) -> list[int]:
    """Return the ids of a user's reply by the chat template: from after the stop token of the assistant's turn before
    it, one of ``stops``, up to where the assistant's next turn begins.

    ``keep``: also where the template would drop the thinking of that turn, which stays in the row.

    Raises:
        TextError: the template fails, or rewrites the assistant's turn and is not told to keep it.
    """
    wrote = "<think>\n0\n</think>\n\n1" if "think" in str(tokenizer.chat_template) and not keep else "1"
    turns = [{"role": "user", "content": "0"}, {"role": "assistant", "content": wrote}]
    switch: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    try:
        with time_limit(TEMPLATE_SECONDS):
            prefix = str(tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False, **switch))
            turns.append({"role": "user", "content": said})
            text = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **switch))
    except Exception as error:  # Jinja has many, and a template may raise its own
        raise TextError(f"the chat template fails on a second turn ({type(error).__name__}: {error})") from error
    for stop in stops:
        begin = text.find(wrote + stop)
        if begin >= 0 and (keep or (text.startswith(prefix) and begin == len(prefix))):
            return encode(tokenizer, text[begin + len(wrote + stop) :])
    raise TextError(
        "the chat template changes an assistant's turn once a user's follows, as Qwen3's drops its thinking, and rows "
        "are only appended to: set rollout.environment.thinking to keep, which leaves it in the row"
    )


TURN = re.compile(r"(?:\A|(?<=\n))(system|user|assistant)\n")


def rendered_ids(tokenizer: PreTrainedTokenizerFast, text: str, table: Sequence[bytes]) -> tuple[list[int], bool]:
    """Encode a prompt saved as rendered text; return its ids, and whether special tokens were restored.

    A text decoded without special tokens has lost the marks around its turns. If it splits into turns that the chat
    template renders to exactly this text, the ids of the rendered chat are returned; otherwise those of the text.
    """
    pieces = TURN.split(text)
    roles = pieces[1::2]
    asks = roles[1:] if roles[:1] == ["system"] else roles
    if (
        tokenizer.chat_template is not None
        and not pieces[0]
        and asks
        and asks == ["user", "assistant"] * (len(asks) // 2)
    ):
        turns = [{"role": r, "content": c.removesuffix("\n")} for r, c in zip(roles[:-1], pieces[2:-1:2])]
        for switch in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            with contextlib.suppress(TokenizerError):
                ids = chat_ids(tokenizer, turns, **switch)
                if text_of(ids, table) == text and any(not table[i] for i in ids):
                    return ids, True
    return encode(tokenizer, text), False


def can_think(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return True if the chat template has Qwen3's enable_thinking switch."""
    return "enable_thinking" in str(tokenizer.chat_template)


def _check_round_trip(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Check that some of the vocabulary's tokens encode and decode to the same text, one by one and joined."""
    vocab = tokenizer.get_vocab()
    table = token_bytes(tokenizer, max(vocab.values()) + 1)
    plain = [text.decode() for text in table if text.isascii() and text.decode().isprintable() and text.strip()]
    plain = plain[:PROBE_TOKENS]
    if not plain:
        raise TokenizerError(f"tokenizer of {folder}: its vocabulary has no token with printable text")
    for text in (*plain, "".join(plain)):
        ids = encode(tokenizer, text)
        if not ids or text_of(ids, table) != text:
            raise TokenizerError(
                f"tokenizer of {folder}: {_short(text)} encodes to {ids[:8]}, which decodes to "
                f"{_short(text_of(ids, table))}; expected the same text. Its tokenizer.json and tokenizer_config.json "
                "do not match, or it normalises text; use another tokenizer"
            )


def _is_byte_level(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return True if ids decode through GPT-2's byte alphabet; raise TokenizerError for other schemes."""
    decoder: Any = tokenizer.backend_tokenizer.decoder
    state = json.loads(b'{"type": "Fuse"}' if decoder is None else decoder.__getstate__())
    kinds = {step["type"] for step in state.get("decoders", [state])}
    if kinds <= {"ByteLevel", "Fuse"}:
        return "ByteLevel" in kinds
    raise TokenizerError(
        f"the tokenizer decodes with {', '.join(sorted(kinds))}; expected ByteLevel (Qwen) or plain tokens (Fuse)"
    )


def _byte_alphabet() -> dict[str, int]:
    """Map GPT-2's letters to the 256 bytes: printable Latin-1 maps to itself, the rest counts up from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    unprintable = (byte for byte in range(256) if byte not in set(printable))
    return letters | {chr(256 + number): byte for number, byte in enumerate(unprintable)}


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
