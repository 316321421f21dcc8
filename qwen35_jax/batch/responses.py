"""Lines of a job's output: one terminal record for every row, in OpenAI's batch envelope.

A row that ran: ``{"id", "custom_id", "line", "line_digest", "response": {"status_code": 200, "request_id", "body"},
"error": null}``; a row that failed: ``"response": null, "error": {"code", "message", "line", "param"}``. ``line`` is
the row's number in the input (records are written in the order in which rows finish) and ``line_digest`` tells on a
resume whether the row is still the same.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import re
from typing import TYPE_CHECKING, Any

from qwen35_jax.batch.records import BadRow, Row, row_key
from qwen35_jax.outputs import CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from qwen35_jax.text import Tokenizer

_LOWEST_LOGPROB = -9999.0  # JSON has no -inf; the value that OpenAI writes in its place

# Legal inside JSON strings, but line ends to many readers, or no text at all: written as escapes.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def dump_line(record: dict[str, Any]) -> bytes:
    """A record as one line of JSON, newline included."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode() + b"\n"


def error_record(row: Row | BadRow, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The terminal record of a row that failed."""
    return {
        "id": _record_id(row),
        "custom_id": row.custom_id,
        "line": row.line,
        "line_digest": row.digest,
        "response": None,
        "error": {"code": code, "message": _as_text(message), "line": row.line, "param": param and _as_text(param)},
    }


def response_record(
    row: Row, output: RequestOutput, *, model: str, created: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The terminal record of a row that ran.

    Args:
        row: the row.
        output: its answer.
        model: name of the model for the body.
        created: seconds since 1970.
        tokenizer: has the bytes of tokens; None when the model runs without one.
    """
    completion = output.outputs[0]
    prompt_tokens, completion_tokens = len(output.prompt_token_ids), len(completion.token_ids)
    choice: dict[str, Any] = {"index": completion.index}
    if row.kind == "chat":
        message = {"role": "assistant", "content": completion.content}
        if completion.reasoning is not None:
            message["reasoning_content"] = completion.reasoning
        choice["message"] = message
        choice["logprobs"] = _chat_logprobs(completion, row.params.logprobs or 0, tokenizer)
    else:
        choice["text"] = completion.text
        choice["logprobs"] = _completion_logprobs(completion, row.params.skip_special_tokens, tokenizer)
    choice["finish_reason"] = completion.finish_reason
    choice["stop_reason"] = completion.stop_reason
    if row.return_token_ids:
        choice["token_ids"] = completion.token_ids
    record_id = _record_id(row)
    body = {
        "id": f"{'chatcmpl' if row.kind == 'chat' else 'cmpl'}-{record_id.removeprefix('batch_req_')}",
        "object": "chat.completion" if row.kind == "chat" else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    return {
        "id": record_id,
        "custom_id": row.custom_id,
        "line": row.line,
        "line_digest": row.digest,
        "response": {"status_code": 200, "request_id": output.request_id, "body": body},
        "error": None,
    }


def _record_id(row: Row | BadRow) -> str:
    key = f"{row_key(row.custom_id, row.line)}\n{row.line}\n{row.digest}"
    return "batch_req_" + hashlib.blake2b(key.encode(), digest_size=12).hexdigest()


def _chat_logprobs(completion: CompletionOutput, number: int, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    content = []
    for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True):
        # The sampled token is always there; as an alternative it counts only where it is one of the most probable.
        best = sorted((item for item in found.items() if item[1].rank <= number), key=lambda item: item[1].rank)
        top = [_token_entry(other, entry, tokenizer) for other, entry in best[:number]]
        content.append({**_token_entry(token_id, found[token_id], tokenizer), "top_logprobs": top})
    return {"content": content}


def _token_entry(token_id: int, entry: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "token": entry.decoded_token,
        "logprob": _number(entry.logprob),
        # The token's own, from which a character that several tokens share can be put together: its text cannot tell.
        "bytes": None if tokenizer is None else list(tokenizer.token_bytes(token_id)),
    }


def _completion_logprobs(
    completion: CompletionOutput, skip_special_tokens: bool, tokenizer: Tokenizer | None
) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    sampled = [found[token_id] for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True)]
    tokens = [_name(entry, token_id) for entry, token_id in zip(sampled, completion.token_ids, strict=True)]
    return {
        "tokens": tokens,
        "token_logprobs": [_number(entry.logprob) for entry in sampled],
        "top_logprobs": [_by_name(found) for found in completion.logprobs],
        "text_offset": _offsets(completion.token_ids, skip_special_tokens, tokenizer),
    }


def _by_name(found: dict[int, Logprob]) -> dict[str, float]:
    named: dict[str, float] = {}
    for token_id, entry in found.items():
        # Tokens that are parts of characters share a name: it is the first one's, and the sampled token comes first.
        named.setdefault(_name(entry, token_id), _number(entry.logprob))
    return named


def _name(entry: Logprob, token_id: int) -> str:
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def _offsets(token_ids: list[int], skip_special_tokens: bool, tokenizer: Tokenizer | None) -> list[int]:
    """Where in the text each token begins; for a token that begins within a character, where that one does."""
    if tokenizer is None:  # there is no text
        return [0] * len(token_ids)
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], 0
    for token_id in token_ids:
        offsets.append(length)
        if token_id not in skipped:
            length += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return offsets


def _number(value: float) -> float:
    return value if math.isfinite(value) and value > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def _as_text(text: str) -> str:
    """Lone surrogates (of a key in a broken row, say) as visible escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
