"""Lines of a job's input: what they may hold, and what is wrong with those that cannot run.

Two forms, freely mixed:

- OpenAI batch lines: ``{"custom_id", "method", "url", "body"}`` with url ``/v1/chat/completions`` (body: ``messages``)
  or ``/v1/completions`` (body: ``prompt`` or ``prompt_token_ids``);
- plain lines: one of ``prompt``, ``messages``, ``prompt_token_ids``, and the same options beside it.

Options of both are the fields of :class:`~qwen35_jax.sampling_params.SamplingParams`, and ``max_completion_tokens``,
``top_logprobs``, ``chat_template_kwargs``, ``tools``, ``return_token_ids``. ``model``, ``user``, ``metadata`` and
``stream: false`` are accepted and have no effect. Any other key is an error that names it: an option that is silently
ignored is a wrong answer. A ``null`` value means "not given".

``custom_id`` (or ``id`` in plain lines) is a string or an integer and comes back as it was written; it should be there,
since it keeps a row's identity when lines move. The second line with the same one is an error record.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from qwen35_jax.outputs import RequestError
from qwen35_jax.requests import brief, check_messages, is_token_ids, template_switches
from qwen35_jax.sampling_params import SamplingParams, SamplingParamsError

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"

_PROMPT_KEYS = ("messages", "prompt", "prompt_token_ids")
_SAMPLING_KEYS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_CHAT_ONLY_KEYS = ("chat_template_kwargs", "tools")
_OTHER_KEYS = ("max_completion_tokens", "top_logprobs", "return_token_ids")
_IGNORED_KEYS = {"model": str, "user": str, "metadata": dict, "stream": bool}
_DEFAULT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": (),
    "suffix": (),
    "tool_choice": ("auto",),
}
"""Keys of OpenAI's API for what is not supported, and the values, beside null, with which they ask for nothing."""
_BODY_KEYS = frozenset((*_PROMPT_KEYS, *_SAMPLING_KEYS, *_CHAT_ONLY_KEYS, *_OTHER_KEYS, *_IGNORED_KEYS))
_MAX_DEPTH = 100
_ID_KEYS = ("custom_id", "id")
_ENVELOPE_KEYS = frozenset(("custom_id", "method", "url", "body"))

CustomId = str | int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line that can run.

    Attributes:
        line: its number in the input, from 1, blank lines counted.
        digest: of its content, see :func:`line_digest`.
        custom_id: as written; None when absent.
        kind: which of the two response forms the answer takes.
        params: sampling options, the job's defaults filled in.
        prompt: for completions: text, or ``{"prompt_token_ids": [...]}``.
        messages: for chats.
        chat_template_kwargs: for chats; the job's defaults filled in.
        tools: for chats.
        return_token_ids: put the generated ids into the answer.
        prefix: of its keys' paths: "body." in an envelope.
        prompt_key: the key that its prompt stood under.
        limit_key: the key that ``max_tokens`` stood under; None where the line has none, and the default gives way to
            what room the context leaves.
    """

    line: int
    digest: str
    custom_id: CustomId
    kind: Literal["chat", "completion"]
    params: SamplingParams
    prompt: str | Mapping[str, Any] = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] | None = None
    return_token_ids: bool = False
    prefix: str = ""
    prompt_key: str = "prompt"
    limit_key: str | None = None

    def path_of(self, param: str | None) -> str | None:
        """The path, from the line's top, of the key that an error of its request is about.

        Args:
            param: as the request's error names it, which knows neither envelope nor spelling.
        """
        if param is None:
            return None
        own = {"prompt": self.prompt_key, "prompt_token_ids": self.prompt_key}
        if self.limit_key is not None:
            own["max_tokens"] = self.limit_key
        return self.prefix + own.get(param, param)


@dataclasses.dataclass(frozen=True, slots=True)
class BadRow:
    """One line that cannot run, and why.

    Attributes:
        line: its number in the input.
        digest: of its content.
        custom_id: None when absent or unreadable.
        code: "invalid_encoding", "invalid_json", "invalid_line", "invalid_custom_id", "duplicate_custom_id",
            "unknown_key", "invalid_value", "invalid_prompt" or "line_too_long".
        message: names what is wrong.
        param: the key that it is about, as a path from the line's top ("body.temperature").
    """

    line: int
    digest: str
    custom_id: CustomId
    code: str
    message: str
    param: str | None = None


def line_digest(raw: bytes) -> str:
    """A digest of a line's content; a byte order mark, a carriage return and outer blanks do not count."""
    return hashlib.blake2b(raw.removeprefix(b"\xef\xbb\xbf").strip(), digest_size=8).hexdigest()


def parse_line(
    line: int,
    raw: bytes,
    defaults: SamplingParams,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Row | BadRow | None:
    """One line's bytes as a row.

    Args:
        line: its number, from 1.
        raw: without the newline.
        defaults: sampling options of rows that do not say.
        chat_template_kwargs: switches of chats that do not say.

    Returns:
        None for a blank line; a :class:`BadRow`, never an exception, for anything that cannot run.
    """
    raw = raw.removeprefix(b"\xef\xbb\xbf").strip()
    if not raw:
        return None
    digest = line_digest(raw)
    custom_id: CustomId = None
    try:
        value = decode_line(raw)
        custom_id = custom_id_of(value)
        return _row(line, digest, custom_id, value, defaults, chat_template_kwargs or {})
    except RequestError as error:
        return BadRow(line, digest, custom_id, error.code, str(error), error.param)
    except RecursionError:
        return BadRow(line, digest, custom_id, "invalid_json", "nested too deeply")


def decode_line(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        RequestError: bytes that are no UTF-8, invalid JSON, a repeated key, anything but an object.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        message = f"byte {error.start} (0x{raw[error.start]:02x}) is not valid UTF-8"
        raise RequestError("invalid_encoding", message) from None
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise RequestError("invalid_json", f"not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise RequestError("invalid_json", "nested too deeply") from None
    except RequestError:
        raise
    except ValueError as error:  # for instance an integer of thousands of digits
        raise RequestError("invalid_json", f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("invalid_line", f"a line must be a JSON object, got {_json_type(value)}")
    return value


def custom_id_of(value: Mapping[str, Any]) -> CustomId:
    """The ``custom_id`` (or, in a plain line, ``id``) of a line's object; None when absent.

    Raises:
        RequestError: it is neither a string nor an integer, or both keys are there.
    """
    keys = [key for key in _ID_KEYS if value.get(key) is not None]
    if len(keys) > 1:
        raise RequestError("invalid_custom_id", "custom_id and id are both given", param="id")
    if not keys:
        return None
    custom_id = value[keys[0]]
    if isinstance(custom_id, bool) or not isinstance(custom_id, (str, int)):
        raise RequestError(
            "invalid_custom_id", f"{keys[0]} must be a string or an integer, got {brief(custom_id)}", param=keys[0]
        )
    if isinstance(custom_id, str):
        _check_text(custom_id, keys[0], code="invalid_custom_id")
    return custom_id


def identify(raw: bytes) -> tuple[bool, CustomId]:
    """Whether a line is a row at all (not blank), and the custom_id that :func:`parse_line` would find."""
    raw = raw.removeprefix(b"\xef\xbb\xbf").strip()
    if not raw:
        return False, None
    try:
        return True, custom_id_of(decode_line(raw))
    except RequestError:
        return True, None


def row_key(custom_id: CustomId, line: int) -> str:
    """What identifies a row when a job is resumed: its ``custom_id``, or else its line number.

    ``7`` and ``"7"`` are different ids.
    """
    return f"line:{line}" if custom_id is None else f"id:{json.dumps(custom_id)}"


def rng_id(custom_id: CustomId, line: int) -> str | int:
    """What a row's random bits derive from (beside the seed): its ``custom_id``, or else its line number."""
    return line if custom_id is None else row_key(custom_id, line)


def _row(
    line: int,
    digest: str,
    custom_id: CustomId,
    value: dict[str, Any],
    defaults: SamplingParams,
    chat_template_kwargs: Mapping[str, Any],
) -> Row:
    envelope = any(key in value for key in ("body", "url", "method"))
    if envelope:
        kind, body, prefix = _open_envelope(value)
    else:
        kind, body, prefix = None, {key: item for key, item in value.items() if key not in _ID_KEYS}, ""
    try:
        _check_keys(body)
        body = {key: item for key, item in body.items() if item is not None}
        form = _prompt_form(body, kind)
        kind = "chat" if form == "messages" else "completion"
        _check_ignored(body)
        if body.get("logprobs") is False:  # a row that says no; from_dict takes None for a row that says nothing
            defaults = dataclasses.replace(defaults, logprobs=None)
        params = SamplingParams.from_dict(_sampling_options(body, kind if envelope else None), defaults)
        _check_text(body)
        row = Row(
            line,
            digest,
            custom_id,
            kind,
            params,
            return_token_ids=_typed(body, "return_token_ids", bool, False),
            prefix=prefix,
            prompt_key=form,
            limit_key=_limit_key(body),
        )
        if kind == "chat":
            check_messages(body["messages"])
            tools = _typed(body, "tools", list, None)
            own = template_switches(_typed(body, "chat_template_kwargs", dict, {}))
            return dataclasses.replace(
                row,
                messages=tuple(body["messages"]),
                tools=None if tools is None else _tools(tools),
                chat_template_kwargs={**chat_template_kwargs, **own},
            )
        for key in _CHAT_ONLY_KEYS:
            if key in body:
                raise RequestError("invalid_value", f"{key} needs messages", param=key)
        return dataclasses.replace(row, prompt=_prompt(body, form))
    except SamplingParamsError as error:
        field = error.field if error.field != "max_tokens" else _limit_key(body) or error.field
        message = field + str(error).removeprefix(error.field)
        raise RequestError("invalid_value", message, param=prefix + field) from None
    except RequestError as error:
        raise RequestError(error.code, str(error), param=error.param and prefix + error.param) from None


def _open_envelope(value: dict[str, Any]) -> tuple[str | None, dict[str, Any], str]:
    """Kind (None when there is no url), body and the prefix of its keys."""
    for key in value:
        if key not in _ENVELOPE_KEYS and key != "id":
            raise RequestError("unknown_key", f"unknown key {key!r} beside body", param=key)
    if value.get("id") is not None:
        raise RequestError("unknown_key", "a line with a body is named by custom_id, not id", param="id")
    if value.get("method") not in (None, "POST"):
        raise RequestError("invalid_value", f'method must be "POST", got {brief(value["method"])}', param="method")
    url = value.get("url")
    if url not in (None, CHAT_URL, COMPLETION_URL):
        message = f"url must be {CHAT_URL} or {COMPLETION_URL}, got {brief(url)}"
        raise RequestError("invalid_value", message, param="url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise RequestError("invalid_value", f"body must be an object, got {_json_type(body)}", param="body")
    return {None: None, CHAT_URL: "chat", COMPLETION_URL: "completion"}[url], body, "body."


def _check_keys(body: Mapping[str, Any]) -> None:
    for key, value in body.items():
        if key in _DEFAULT_VALUES:
            allowed = (None, *_DEFAULT_VALUES[key])
            # By type too: to Python 1 is True.
            if not any(type(value) is type(one) and value == one for one in allowed):
                words = " or ".join(json.dumps(one) for one in reversed(allowed))
                message = f"{key} is not supported: only {words} may be given, got {brief(value)}"
                raise RequestError("invalid_value", message, param=key)
        elif key not in _BODY_KEYS:
            near = difflib.get_close_matches(key, _BODY_KEYS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise RequestError("unknown_key", f"unknown key {key!r}{hint}", param=key)


def _check_ignored(body: Mapping[str, Any]) -> None:
    for key, kind in _IGNORED_KEYS.items():
        _typed(body, key, kind, None)
    if body.get("stream"):
        raise RequestError("invalid_value", "stream: true is not supported in a batch", param="stream")


def _prompt_form(body: Mapping[str, Any], kind: str | None) -> str:
    """Which of the prompt keys is there: exactly one, and one that fits the url."""
    wanted = {None: _PROMPT_KEYS, "chat": _PROMPT_KEYS[:1], "completion": _PROMPT_KEYS[1:]}[kind]
    given = [key for key in _PROMPT_KEYS if key in body]
    if not given:
        raise RequestError("invalid_prompt", f"no prompt: one of {', '.join(wanted)} is needed", param=wanted[0])
    if len(given) > 1:
        raise RequestError("invalid_prompt", f"{' and '.join(given)} are both given; one is needed", param=given[1])
    if given[0] not in wanted:
        url = CHAT_URL if kind == "chat" else COMPLETION_URL
        raise RequestError("invalid_prompt", f"{given[0]} does not go with url {url}", param=given[0])
    return given[0]


def _prompt(body: Mapping[str, Any], form: str) -> str | Mapping[str, Any]:
    value = body[form]
    if form == "prompt" and isinstance(value, str):
        return value
    if isinstance(value, list) and is_token_ids(value, allow_empty=True):
        return {"prompt_token_ids": value}
    expected = "a string or a list of token ids" if form == "prompt" else "a list of token ids"
    hint = "; several prompts are several lines" if isinstance(value, list) else ""
    raise RequestError("invalid_prompt", f"{form} must be {expected}, got {brief(value)}{hint}", param=form)


def _tools(tools: list[Any]) -> tuple[Mapping[str, Any], ...]:
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            place = f"tools[{index}]"
            raise RequestError("invalid_value", f"{place} must be an object, got {_json_type(tool)}", param=place)
    return tuple(tools)


def _sampling_options(body: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """Keys of SamplingParams; ``kind`` is None for plain lines, which may use either form of ``logprobs``."""
    options = {key: body[key] for key in _SAMPLING_KEYS if key in body}
    most = body.get("max_completion_tokens")
    if most is not None:
        if options.get("max_tokens") is None:  # null says nothing, as elsewhere
            options["max_tokens"] = most
        elif type(options["max_tokens"]) is not type(most) or options["max_tokens"] != most:  # to Python, true is 1
            message = f"max_tokens is {brief(options['max_tokens'])} and max_completion_tokens is {brief(most)}"
            raise RequestError("invalid_value", message, param="max_completion_tokens")
    flag = options.get("logprobs")
    if kind == "chat" and flag is not None and not isinstance(flag, bool):
        message = f"logprobs must be true or false (top_logprobs is the number), got {brief(flag)}"
        raise RequestError("invalid_value", message, param="logprobs")
    if kind == "completion" and isinstance(flag, bool):
        raise RequestError("invalid_value", f"logprobs must be an integer, got {brief(flag)}", param="logprobs")
    top = body.get("top_logprobs")
    if top is not None and flag is not True:
        raise RequestError("invalid_value", "top_logprobs needs logprobs: true", param="top_logprobs")
    if isinstance(flag, bool):
        options["logprobs"] = (0 if top is None else top) if flag else None
        try:
            SamplingParams(logprobs=options["logprobs"])
        except SamplingParamsError as error:
            message = str(error).replace("logprobs", "top_logprobs", 1)
            raise RequestError("invalid_value", message, param="top_logprobs") from None
    return options


def _limit_key(body: Mapping[str, Any]) -> str | None:
    return next((key for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None), None)


def _typed(body: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = body.get(key, default)
    if value is not default and not isinstance(value, kind):
        word = {str: "a string", dict: "an object", list: "a list", bool: "true or false"}[kind]
        raise RequestError("invalid_value", f"{key} must be {word}, got {brief(value)}", param=key)
    return value


def _check_text(value: Any, place: str = "", *, code: str = "invalid_encoding", depth: int = 0) -> None:
    """Refuse lone surrogates anywhere: JSON can write them, but they are no text and cannot be encoded."""
    if depth > _MAX_DEPTH:
        raise RequestError("invalid_json", f"nested too deeply (more than {_MAX_DEPTH} levels)")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            message = f"{place} holds a lone surrogate (U+{ord(value[error.start]):04X}), which is not text"
            raise RequestError(code, message, param=place) from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, place or "a key", code=code, depth=depth + 1)
            _check_text(item, f"{place}.{key}" if place else key, code=code, depth=depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if not isinstance(item, int):  # of token ids there are many
                _check_text(item, f"{place}[{index}]", code=code, depth=depth + 1)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RequestError("invalid_json", f"the key {key!r} is given twice", param=key)
            seen.add(key)
    return found


def _no_constant(name: str) -> Any:
    raise RequestError("invalid_json", f"{name} is not valid JSON")


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
