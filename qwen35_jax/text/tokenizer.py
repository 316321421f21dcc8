"""Tokenizer and chat template of a model directory.

Ids come from ``tokenizer.json`` alone, through the ``tokenizers`` library: the classes of transformers may rebuild the
pre-tokenizer from their own idea of the model and then split text (combining marks, for one) differently from what
the file says. transformers only renders chat templates, and is imported when the first chat needs it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from qwen35_jax.text.reasoning import starts_inside_reasoning

_PROBE = "Ids: naïve e\u0301, नमस्ते दुनिया, สวัสดีครับ, 日本語, 👩\u200d💻 12345\r\n  x\n"

# Arguments of apply_chat_template that are ours, or that would change what it returns.
_RESERVED_TEMPLATE_ARGS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


class TokenizerError(ValueError):
    """A tokenizer file is missing, unreadable or not of a supported kind; the message names the file."""


class ChatError(ValueError):
    """Messages or template arguments that cannot be rendered, or a model without a chat template."""


class Tokenizer:
    """Text to ids and back, and chat rendering.

    Attributes:
        directory: where the files came from.
        eos_token_ids: union of the EOS ids of tokenizer_config.json, generation_config.json and config.json, in this
            order.
        special_ids: ids that ``skip_special_tokens`` leaves out of text.
        vocab_limit: last id + 1; logits of ids from here on belong to padding.
    """

    def __init__(self, backend: tokenizers.Tokenizer, directory: Path, eos_token_ids: Sequence[int] = ()):
        """Wrap a loaded backend; use :meth:`from_dir`.

        Raises:
            TokenizerError: the decoder is not byte-level.
        """
        self._backend = backend
        self.directory = directory
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_limit = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._bytes: dict[int, bytes] = {}
        self._check_decoder()

    @classmethod
    def from_dir(cls, directory: str | os.PathLike[str]) -> Tokenizer:
        """Load ``tokenizer.json`` and the EOS ids of the files beside it.

        Raises:
            TokenizerError: names the file that is missing, unreadable, or disagrees with another.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file; the model directory needs a tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path}: not a readable tokenizer: {error}") from error
        # Settings that a training run left in the file would cut or pad prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        _check_added_tokens(backend, config, directory / "tokenizer_config.json")
        return cls(backend, directory, _eos_ids(backend, directory, config))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, as ``tokenizer.json`` says.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: whether the file's post-processor may add its own (a BOS; Qwen has none).

        Raises:
            ValueError: the text holds lone surrogates, which have no bytes.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            if not isinstance(text, str):
                raise TypeError(f"expected text, got {type(text).__name__}") from None
            at = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if at is None:
                raise
            raise ValueError(f"the text holds a lone surrogate ({text[at]!r} at character {at})") from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; unknown ids give nothing, broken UTF-8 gives U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to the decoded text (none for an unknown id)."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else _piece_bytes(token)
        return known

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> str:
        """Prompt text of a conversation by the model's own chat template.

        The prompt for the assistant's answer is opened unless ``add_generation_prompt=False`` (or
        ``continue_final_message=True``) is given. Content given as a list of text parts is joined, null content is
        empty, and arguments of tool calls given as JSON text are parsed, since templates want them as mappings.

        Args:
            messages: mappings with ``role`` and ``content``.
            tools: tool descriptions as the template wants them.
            **chat_template_kwargs: passed on to the template, for example ``enable_thinking=False``.

        Raises:
            ChatError: no template, malformed messages, content that is not text, or an error of the template.
        """
        reserved = _RESERVED_TEMPLATE_ARGS & chat_template_kwargs.keys()
        if reserved:
            raise ChatError(f"chat_template_kwargs: {sorted(reserved)[0]!r} cannot be set")
        conversation = _normal_messages(messages)
        if tools is not None and (isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence)):
            raise ChatError(f"tools: expected a list of tool descriptions, got {tools!r}")
        if not chat_template_kwargs.get("continue_final_message"):
            chat_template_kwargs.setdefault("add_generation_prompt", True)
        template = self._template_tokenizer
        if template.chat_template is None:
            raise ChatError(
                f"{self.directory}: the model has no chat template (neither chat_template.jinja nor a chat_template in "
                f"tokenizer_config.json); use prompts instead of messages"
            )
        try:
            rendered = template.apply_chat_template(
                conversation, tools=list(tools) if tools else None, tokenize=False, **chat_template_kwargs
            )
        except Exception as error:  # templates are programs: anything can come out of them
            raise ChatError(f"the chat template failed: {type(error).__name__}: {error}") from error
        if not isinstance(rendered, str):
            raise ChatError(f"the chat template gave {type(rendered).__name__} instead of text")
        return rendered

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> list[int]:
        """Ids of :meth:`render_chat`; the template writes all special tokens itself, so none are added."""
        return self.encode(self.render_chat(messages, tools, **chat_template_kwargs), add_special_tokens=False)

    starts_inside_reasoning = staticmethod(starts_inside_reasoning)

    @functools.cached_property
    def _template_tokenizer(self) -> Any:
        """The transformers tokenizer, for its chat template and special tokens only."""
        # Rendering needs no torch, so the advice to install it would only alarm users.
        logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())
        from transformers import PreTrainedTokenizerFast  # takes seconds to import

        # This class takes tokenizer.json as it is, whatever class tokenizer_config.json names.
        try:
            loaded = PreTrainedTokenizerFast.from_pretrained(str(self.directory), local_files_only=True)
        except Exception as error:
            raise TokenizerError(f"{self.directory}: transformers cannot load the tokenizer: {error}") from error
        ids = loaded.backend_tokenizer.encode(_PROBE, add_special_tokens=False).ids
        if ids != self.encode(_PROBE, add_special_tokens=False):
            raise TokenizerError(
                f"{self.directory}: transformers gives other ids than tokenizer.json; its chat template may refer to "
                f"tokens that the file lacks"
            )
        return loaded

    def _check_decoder(self) -> None:
        """Refuse tokenizers whose text is not the UTF-8 of its tokens' bytes, which the text stream relies on."""
        decoder = {} if self._backend.decoder is None else json.loads(self._backend.decoder.__getstate__())
        if decoder.get("type") == "Sequence" and len(decoder.get("decoders", ())) == 1:
            decoder = decoder["decoders"][0]
        if decoder.get("type") != "ByteLevel":
            raise TokenizerError(
                f"{self.directory / 'tokenizer.json'}: decoder {decoder.get('type', 'null')!r} is not supported; "
                f"byte-level tokenizers (decoder ByteLevel) are"
            )


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable characters stand for themselves, other bytes for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _piece_bytes(token: str) -> bytes:
    """Bytes of a vocabulary entry; an added token with characters beyond the alphabet is its own UTF-8."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON object file, {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _check_added_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Refuse a tokenizer_config.json that counts on tokens which tokenizer.json lacks or numbers differently."""
    declared = config.get("added_tokens_decoder")
    if not isinstance(declared, Mapping):
        return
    for token_id, token in declared.items():
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str) and str(backend.token_to_id(content)) != str(token_id):
            raise TokenizerError(
                f"{path}: added token {content!r} has id {token_id}, but tokenizer.json gives it "
                f"{backend.token_to_id(content)}"
            )


def _eos_ids(backend: tokenizers.Tokenizer, directory: Path, config: Mapping[str, Any]) -> list[int]:
    """EOS ids named by the tokenizer, the generation config and the model config, in this order."""
    ids = []
    token = config.get("eos_token")
    if isinstance(token, Mapping):  # older files store tokens as objects
        token = token.get("content")
    if token is not None:
        token_id = backend.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise TokenizerError(f"{directory / 'tokenizer_config.json'}: eos_token {token!r} is not in tokenizer.json")
        ids.append(token_id)
    model_config = _read_json(directory / "config.json")
    text_config = model_config.get("text_config")
    sources = [
        ("generation_config.json", _read_json(directory / "generation_config.json")),
        ("config.json", model_config),
        ("config.json", text_config if isinstance(text_config, Mapping) else {}),
    ]
    for name, content in sources:
        value = content.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise TokenizerError(f"{directory / name}: eos_token_id: expected token ids, got {value!r}")
            ids.append(token_id)
    return ids


def _normal_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages in the one form that every template takes: text content, arguments of tool calls as mappings."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ChatError(f"messages: expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ChatError("messages: the list is empty")
    normal = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ChatError(f"{where}: expected an object with role and content, got {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ChatError(f"{where}.role: expected a string such as 'user', got {role!r}")
        if "content" not in message and not message.get("tool_calls"):
            raise ChatError(f"{where}.content: missing")
        one = {**message, "content": _text_content(message.get("content"), where)}
        if message.get("tool_calls"):
            one["tool_calls"] = _tool_calls(message["tool_calls"], where)
        normal.append(one)
    return normal


def _text_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise ChatError(f"{where}.content: expected text or a list of text parts, got {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ChatError(f"{where}.content[{index}]: only text parts are supported, got {kind!r}")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise ChatError(f"{where}.tool_calls: expected a list, got {type(calls).__name__}")
    parsed = []
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise ChatError(f"{where}.tool_calls[{index}]: expected an object, got {type(call).__name__}")
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except ValueError as error:
                raise ChatError(f"{where}.tool_calls[{index}].function.arguments: not JSON: {error}") from None
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(call)
    return parsed
