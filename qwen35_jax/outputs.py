"""What a request gives back: plain dataclasses, no jax."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: log-softmax of the unmodified logits over the real token ids, fp32.
        rank: 1 for the most probable token; counted on the same distribution.
        decoded_token: the token's own text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: number of the sample (always 0 while ``n`` is 1).
        text: all of the text, reasoning included; empty without a tokenizer.
        token_ids: generated ids. A token that ended the output (EOS, a stop token id) is the last of them, though its
            text is left out of ``text``.
        cumulative_logprob: sum over ``token_ids``; None unless logprobs were asked for.
        logprobs: a dict for each token, token id to :class:`Logprob`, the sampled token always in it; None unless
            asked for.
        finish_reason: "stop" (EOS, stop token or stop string), "length" (max_tokens), "abort" or "error".
        stop_reason: the stop string or stop token id that hit; None for EOS and for other reasons.
        reasoning: for chats, the text before ``</think>``; None where there is no reasoning or the request is no chat.
        content: for chats, the text after the reasoning; None where the request is no chat.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None
    content: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds of one monotonic clock.

    Attributes:
        submitted: handed to the engine.
        first_token: first token read by the host; None when there was none.
        finished: last token read by the host.
    """

    submitted: float
    first_token: float | None
    finished: float


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt.

    Attributes:
        request_id: name of the request within the :class:`~qwen35_jax.LLM`.
        prompt: the text given, or rendered from a conversation; None for token-id prompts.
        prompt_token_ids: ids the model read; empty when the prompt could not be turned into ids.
        outputs: one :class:`CompletionOutput`; a failed request holds what it had generated so far.
        error: what went wrong, naming the value; None for a request that went well.
        error_code: short code of the error: "invalid_prompt", "context_length_exceeded", "invalid_token_id",
            "template_error", "invalid_sampling", "rejected", "engine_error", or a code of the batch reader.
        error_param: the field that the error is about, where there is one.
        metrics: times of the request; None when it never reached the engine.
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    outputs: list[CompletionOutput] = dataclasses.field(default_factory=list)
    error: str | None = None
    error_code: str | None = None
    error_param: str | None = None
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        """Whether the request has ended; always True for what ``generate`` and ``chat`` return."""
        return bool(self.outputs) and all(output.finish_reason is not None for output in self.outputs)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The finish reason of the only output."""
        return self.outputs[0].finish_reason if self.outputs else None

    @classmethod
    def failed(
        cls,
        request_id: str,
        message: str,
        *,
        code: str,
        param: str | None = None,
        prompt: str | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> RequestOutput:
        """A request that failed before it generated anything."""
        return cls(
            request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids or [],
            outputs=[CompletionOutput(finish_reason="error")],
            error=message,
            error_code=code,
            error_param=param,
        )


class RequestError(ValueError):
    """One request cannot run; the others go on.

    Attributes:
        code: see :attr:`RequestOutput.error_code`.
        param: the field that the error is about, where there is one.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None):
        super().__init__(message)
        self.code = code
        self.param = param


class GenerationError(RuntimeError):
    """Raised by ``generate(..., raise_on_error=True)`` for the first request that fails.

    Attributes:
        output: the failed request.
    """

    def __init__(self, output: RequestOutput):
        super().__init__(f"request {output.request_id!r} failed: {output.error}")
        self.output = output
