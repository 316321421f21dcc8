"""Lines of a job's output: one terminal record for every row, in OpenAI's batch envelope.

A row that ran: ``{"id", "custom_id", "line", "line_digest", "response": {"status_code": 200, "request_id", "body"},
"error": null}``; a row that failed: ``"response": null, "error": {"code", "message", "line", "param"}``. ``line`` is
the row's number in the input (records are written in the order in which rows finish) and ``line_digest`` tells on a
resume whether the row is still the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from qwen35_jax.batch.records import BadRow, Row, row_key
from qwen35_jax.outputs import CompletionOutput, Logprob, RequestOutput

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


def response_record(row: Row, output: RequestOutput, *, model: str, created: int) -> dict[str, Any]:
    """The terminal record of a row that ran.

    Args:
        row: the row.
        output: its answer.
        model: name of the model for the body.
        created: seconds since 1970.
    """
    completion = output.outputs[0]
    prompt_tokens, completion_tokens = len(output.prompt_token_ids), len(completion.token_ids)
    choice: dict[str, Any] = {"index": completion.index}
    if row.kind == "chat":
        message = {"role": "assistant", "content": completion.content}
        if completion.reasoning is not None:
            message["reasoning_content"] = completion.reasoning
        choice["message"] = message
        choice["logprobs"] = _chat_logprobs(completion, row.params.logprobs or 0)
    else:
        choice["text"] = completion.text
        choice["logprobs"] = _completion_logprobs(completion)
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


def _chat_logprobs(completion: CompletionOutput, number: int) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    content = []
    for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True):
        # The sampled token is always there; as an alternative it counts only where it is one of the most probable.
        best = sorted((entry for entry in found.values() if entry.rank <= number), key=lambda entry: entry.rank)
        top = [_token_entry(entry) for entry in best[:number]]
        content.append({**_token_entry(found[token_id]), "top_logprobs": top})
    return {"content": content}


def _token_entry(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token
    return {
        "token": token,
        "logprob": _number(entry.logprob),
        "bytes": None if token is None else list(token.encode("utf-8", "replace")),
    }


def _completion_logprobs(completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    sampled = [found[token_id] for token_id, found in zip(completion.token_ids, completion.logprobs, strict=True)]
    tokens = [_name(entry, token_id) for entry, token_id in zip(sampled, completion.token_ids, strict=True)]
    return {
        "tokens": tokens,
        "token_logprobs": [_number(entry.logprob) for entry in sampled],
        "top_logprobs": [
            {_name(entry, token_id): _number(entry.logprob) for token_id, entry in found.items()}
            for found in completion.logprobs
        ],
        "text_offset": _offsets(tokens),
    }


def _name(entry: Logprob, token_id: int) -> str:
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def _offsets(tokens: Sequence[str]) -> list[int]:
    offsets, length = [], 0
    for token in tokens:
        offsets.append(length)
        length += len(token)
    return offsets


def _number(value: float) -> float:
    return value if math.isfinite(value) and value > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def _as_text(text: str) -> str:
    """Lone surrogates (of a key in a broken row, say) as visible escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
