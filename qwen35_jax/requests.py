"""From what a caller gives (texts, token ids, conversations) to requests that an engine can take."""

from __future__ import annotations

import array
import dataclasses
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qwen35_jax.outputs import CompletionOutput, RequestError, RequestOutput
from qwen35_jax.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams, SamplingParamsError

if TYPE_CHECKING:
    from qwen35_jax.text import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, ``{"prompt": str}`` or ``{"prompt_token_ids": [int, ...]}``."""

Message = Mapping[str, Any]
"""One message of a conversation: ``{"role": str, "content": str | parts}`` and what the template knows beside."""


@dataclasses.dataclass(slots=True)
class GenerationRequest:
    """A request that is ready for the engine.

    Attributes:
        request_id: unique among the requests of a run.
        rng_id: what its random bits derive from, beside the seed.
        prompt_token_ids: checked ids, 4 bytes each (many long prompts may wait at once).
        params: with ``max_tokens`` set.
        prompt: text of the prompt, if there is one.
        chat: whether the prompt was rendered from a conversation: its output is split into reasoning and content.
    """

    request_id: str
    rng_id: str | int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    prompt: str | None = None
    chat: bool = False


class RequestPreparer:
    """Checks and tokenises single requests.

    Args:
        tokenizer: None when only token ids are taken.
        vocab_size: rows of the model's embedding.
        max_model_len: longest prompt + output in tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int):
        self._tokenizer = tokenizer
        self._vocab_limit = vocab_size if tokenizer is None else min(tokenizer.vocab_limit, vocab_size)
        self._max_model_len = max_model_len

    def prompt(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        rng_id: str | int,
        *,
        default_limit: bool = False,
    ) -> GenerationRequest:
        """A request to continue a prompt.

        Args:
            prompt: see :data:`Prompt`.
            params: sampling options.
            request_id: see :class:`GenerationRequest`.
            rng_id: likewise.
            default_limit: ``max_tokens`` is a default, not what this request asked for: it gives way to what room the
                context leaves.

        Raises:
            RequestError: the prompt cannot run; says why.
        """
        text, token_ids = _prompt_parts(prompt)
        if text is not None:
            token_ids = self._encode(text)
        else:
            self._check_token_ids(token_ids)
        return self._request(request_id, rng_id, text, token_ids, params, chat=False, default_limit=default_limit)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        request_id: str,
        rng_id: str | int,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        default_limit: bool = False,
    ) -> GenerationRequest:
        """A request to answer a conversation.

        Raises:
            RequestError: the conversation cannot run; says why.
        """
        check_messages(messages)
        if self._tokenizer is None:
            message = "chats need a tokenizer (skip_tokenizer_init is set)"
            raise RequestError("invalid_prompt", message, param="messages")
        switches = template_switches(chat_template_kwargs)
        try:
            text = self._tokenizer.render_chat(
                [dict(message) for message in messages], tools=None if tools is None else list(tools), **switches
            )
        except Exception as error:  # whatever a template does with a conversation is that conversation's problem
            raise RequestError("template_error", str(error), param="messages") from error
        # The template writes all special tokens itself.
        token_ids = self._encode(text, add_special_tokens=False)
        return self._request(request_id, rng_id, text, token_ids, params, chat=True, default_limit=default_limit)

    def _check_token_ids(self, token_ids: list[int]) -> None:
        for index, token in enumerate(token_ids):
            if not 0 <= token < self._vocab_limit:
                raise RequestError(
                    "invalid_token_id",
                    f"token id {token} at position {index} is outside the vocabulary (0 to {self._vocab_limit - 1})",
                    param="prompt_token_ids",
                )

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._tokenizer is None:
            message = "prompts must be token ids (skip_tokenizer_init is set)"
            raise RequestError("invalid_prompt", message, param="prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}: not valid text"
            raise RequestError("invalid_prompt", message, param="prompt") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _request(
        self,
        request_id: str,
        rng_id: str | int,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        *,
        chat: bool,
        default_limit: bool,
    ) -> GenerationRequest:
        if not token_ids:
            raise RequestError("invalid_prompt", "the prompt is empty", param="prompt")
        params = self._with_max_tokens(params, len(token_ids), default_limit)
        return GenerationRequest(request_id, rng_id, array.array("i", token_ids), params, prompt=text, chat=chat)

    def _with_max_tokens(self, params: SamplingParams, prompt_len: int, default_limit: bool) -> SamplingParams:
        limit = self._max_model_len
        room = limit - prompt_len
        if room < 1:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {prompt_len} tokens and leaves no room for output: max_model_len is {limit}",
                param="prompt",
            )
        wanted = max(DEFAULT_MAX_TOKENS, params.min_tokens) if params.max_tokens is None else params.max_tokens
        if params.max_tokens is None or (default_limit and wanted > room):
            most = min(wanted, room)
            try:
                return dataclasses.replace(params, max_tokens=most)
            except SamplingParamsError as error:
                raise RequestError("invalid_sampling", str(error), param=error.field) from error
        if params.max_tokens > room:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {prompt_len} tokens and max_tokens is {params.max_tokens}: together more than "
                f"max_model_len, which is {limit}",
                param="max_tokens",
            )
        return params


def check_messages(messages: Any) -> None:
    """Check the shape of a conversation; the template checks the rest.

    Raises:
        RequestError: names the message and the key.
    """

    def require(good: bool, place: str, what: str) -> None:
        if not good:
            raise RequestError("invalid_prompt", f"{place} {what}", param=place)

    is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    require(is_list, "messages", f"must be a list, got {brief(messages)}")
    require(bool(messages), "messages", "is empty")
    entries: list[Any] = list(messages)
    for index, message in enumerate(entries):
        place = f"messages[{index}]"
        require(isinstance(message, Mapping), place, f"must be an object with role and content, got {brief(message)}")
        role = message.get("role")
        require(isinstance(role, str), f"{place}.role", f"must be a string, got {brief(role)}")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        place += ".content"
        require(isinstance(content, Sequence), place, f"must be a string or a list of parts, got {brief(content)}")
        parts: list[Any] = list(content)
        for number, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, Mapping) else None
            good = kind == "text" and isinstance(part.get("text"), str)
            found = f"type {kind!r}" if isinstance(kind, str) and kind != "text" else brief(part)
            require(good, f"{place}[{number}]", f'must be {{"type": "text", "text": str}}, got {found}')


def template_switches(given: Any) -> dict[str, Any]:
    """Switches of the chat template, checked as far as they mean the same to every template.

    Raises:
        RequestError: no object, a switch that is not one, or ``enable_thinking`` that is neither true nor false (a
            template would take the string "false" for true).
    """
    switches = {} if given is None else given
    if not isinstance(switches, Mapping) or not all(isinstance(name, str) for name in switches):
        message = f"chat_template_kwargs must be an object, got {brief(given)}"
        raise RequestError("invalid_value", message, param="chat_template_kwargs")
    for name in ("self", "messages", "tools"):
        if name in switches:
            message = f"chat_template_kwargs: {name!r} cannot be set"
            raise RequestError("invalid_value", message, param="chat_template_kwargs")
    thinking = switches.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        message = f"chat_template_kwargs.enable_thinking must be true or false, got {brief(thinking)}"
        raise RequestError("invalid_value", message, param="chat_template_kwargs")
    return {name: value for name, value in switches.items() if value is not None or name != "enable_thinking"}


def failed_output(request_id: str, error: RequestError, prompt: Any = None) -> RequestOutput:
    """The output of a request that could not be prepared."""
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput.failed(request_id, str(error), code=error.code, param=error.param, prompt=text)


def aborted_output(request_id: str, prompt: Any = None) -> RequestOutput:
    """The output of a request that was given up before it had one."""
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(request_id, prompt=text, outputs=[CompletionOutput(finish_reason="abort")])


def is_token_ids(value: Any, *, allow_empty: bool = False) -> bool:
    """Whether ``value`` is a sequence of integers (numpy's too), which makes it one prompt."""
    if isinstance(value, (str, bytes, Mapping, Iterator)) or not isinstance(value, Iterable):
        return False
    empty = True
    for item in value:
        if type(item) is not int and (isinstance(item, bool) or not isinstance(item, numbers.Integral)):
            return False
        empty = False
    return allow_empty or not empty


def brief(value: Any) -> str:
    """The type and the beginning of a value, for messages."""
    if value is None:
        return "null"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _prompt_parts(prompt: Any) -> tuple[str | None, list[int]]:
    """The text, or the ids, of a prompt."""
    param, value = "prompt", prompt
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise RequestError(
                "invalid_prompt",
                'a prompt given as a dict is {"prompt": str} or {"prompt_token_ids": [int, ...]}, '
                f"got the keys {', '.join(map(str, prompt)) or '(none)'}",
                param="prompt",
            )
        ((param, value),) = prompt.items()
    if isinstance(value, str) and param == "prompt":
        return value, []
    if is_token_ids(value, allow_empty=True):
        return None, [int(token) for token in value]
    expected = "a string or a list of token ids" if param == "prompt" else "a list of token ids"
    raise RequestError("invalid_prompt", f"{param} must be {expected}, got {brief(value)}", param=param)
