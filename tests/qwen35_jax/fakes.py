"""A deterministic engine and tokenizer under the real contracts, for tests of everything above the engine."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from qwen35_jax.config import ModelConfig
from qwen35_jax.llm import LLM
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.text import ChatError
from schedulers import RequestRejected

EOS = 256
VOCAB_SIZE = 300  # rows 257.. are padding
BROKEN = 7  # a prompt with this byte gives non-finite logits after two tokens
SLOW = ord("~")  # a prompt that begins with it gives a token only every eighth step


# Twins of the engine's own classes: importing those would start JAX, which these tests do not need. A test compares
# their fields.


@dataclasses.dataclass
class TokenLogprob:
    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float, int], ...]


@dataclasses.dataclass
class EngineOutput:
    request_id: str
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finished: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


def echo(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The prompt again, then EOS."""
    return [*prompt, EOS]


class FakeEngine:
    """Gives each request the tokens of a script; at most ``max_num_seqs`` run at once, in order of arrival."""

    def __init__(
        self,
        script: Callable[[Sequence[int], SamplingParams], Sequence[int]] = echo,
        *,
        max_model_len: int = 64,
        max_num_seqs: int = 4,
        tokens_per_step: int = 1,
        crash_at_step: int | None = None,
        on_step: Callable[[FakeEngine], None] | None = None,
    ):
        self.script = script
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.tokens_per_step = tokens_per_step
        self.crash_at_step = crash_at_step
        self.on_step = on_step
        self.submitted: list[tuple[str, str | int, SamplingParams]] = []
        self.stopped: list[str] = []
        self.aborted: list[str] = []
        self.most_inside = 0
        self.steps = 0
        self.closed = False
        self._live: collections.OrderedDict[str, dict] = collections.OrderedDict()
        self._out: list[EngineOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._out)

    def submit(self, request_id, prompt_token_ids, params, rng_id, sample_index=0):
        if request_id in self._live:
            raise RequestRejected(f"request id {request_id!r} is in use")
        if len(prompt_token_ids) + params.max_tokens > self.max_model_len:
            raise RequestRejected("too long")
        if prompt_token_ids[0] == ord("!"):
            raise RequestRejected("needs 9 pages, there are 8")
        tokens = list(self.script(prompt_token_ids, params))
        self._live[request_id] = {"prompt": prompt_token_ids, "params": params, "tokens": tokens, "given": 0}
        self.submitted.append((request_id, rng_id, params))
        self.most_inside = max(self.most_inside, len(self._live))

    def abort(self, request_id):
        if self._live.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self._out.append(EngineOutput(request_id, finished=True, finish_reason="abort"))

    def stop(self, request_id):
        if self._live.pop(request_id, None) is not None:
            self.stopped.append(request_id)

    def close(self):
        self.closed = True

    def step(self):
        self.steps += 1
        if self.on_step is not None:
            self.on_step(self)
        if self.crash_at_step is not None and self.steps >= self.crash_at_step:
            raise RuntimeError("device lost")
        outputs, self._out = self._out, []
        for request_id in list(self._live)[: self.max_num_seqs]:
            output = self._advance(request_id)
            if output is not None:
                outputs.append(output)
        return outputs

    def _advance(self, request_id):
        live = self._live[request_id]
        params, prompt = live["params"], live["prompt"]
        if prompt[0] == SLOW and self.steps % 8:
            return None
        output = EngineOutput(request_id, logprobs=None if params.logprobs is None else [])
        for _ in range(self.tokens_per_step):
            if BROKEN in prompt and live["given"] == 2:
                output.finished, output.finish_reason = True, "error"
                output.error = "non-finite logits at position 2"
                break
            token = live["tokens"][live["given"] % len(live["tokens"])]
            live["given"] += 1
            output.token_ids.append(token)
            if output.logprobs is not None:
                top = ((token, -0.5, 1), (65, -1.5, 2), (66, float("-inf"), 3))
                output.logprobs.append(TokenLogprob(token, -0.5, 1, top[: params.logprobs]))
            if token == EOS and not params.ignore_eos:
                output.finished, output.finish_reason = True, "stop"
            elif token in params.stop_token_ids:
                output.finished, output.finish_reason, output.stop_reason = True, "stop", token
            elif live["given"] >= params.max_tokens:
                output.finished, output.finish_reason = True, "length"
            if output.finished:
                break
        if output.finished:
            del self._live[request_id]
        return output


class FakeTokenizer:
    """A token a byte, and EOS."""

    vocab_limit = EOS + 1
    eos_token_ids = (EOS,)
    special_ids = frozenset([EOS])

    def __init__(self):
        self.encoded = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded += 1
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        pieces = [b"" if i == EOS and skip_special_tokens else self.token_bytes(i) for i in ids]
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id])

    def render_chat(self, messages, tools=None, enable_thinking=False, **chat_template_kwargs) -> str:
        if messages[0]["role"] == "boom":
            raise ChatError("the chat template failed: unexpected role boom")
        text = "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages)
        text += f"tools={len(tools)}\n" if tools else ""
        text += "".join(f"{key}={value}\n" for key, value in sorted(chat_template_kwargs.items()))
        return f"{text}a:" + ("<think>\n" if enable_thinking else "")


def texts(outputs) -> list[str]:
    """The text of each output."""
    return [output.outputs[0].text for output in outputs]


def make_llm(engine: FakeEngine | None = None, *, tokenizer: bool = True, **options) -> LLM:
    """An LLM around fakes; ``options`` go to the engine unless one is given."""
    config = ModelConfig.preset("tiny-0.8b", vocab_size=VOCAB_SIZE)
    return LLM.from_engine(engine or FakeEngine(**options), config, FakeTokenizer() if tokenizer else None)
