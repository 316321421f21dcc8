"""SamplingParams: what one request asks of the sampler (host side, no jax).

Values are normalised and checked once, when the object is made, so that everything behind it (engine, device sampler,
text stream) can take them as they are. Every error is a :class:`SamplingParamsError` that names the field, the value
and the allowed range.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Self

MAX_LOGPROBS = 20
"""Most alternatives that ``logprobs`` may ask for."""

MAX_STOP_IDS = 64
"""Most token ids that may end one request: EOS ids and ``stop_token_ids`` together."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by them would leave the range of fp32 for nothing."""


class SamplingParamsError(ValueError):
    """A sampling option has a wrong type or value, is unknown, or is not supported.

    Attributes:
        field: name of the option.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


DEFAULT_MAX_TOKENS = 4096
"""Output tokens of a request that does not say, if the context has that much room."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request; names as users of vLLM know them.

    Attributes:
        n: samples of one prompt. Only 1 is supported.
        temperature: 0 to 100; 0 (and anything below 1e-5) is greedy.
        top_p: over 0, at most 1: keep the smallest set of most probable tokens that holds this much probability.
        top_k: keep the k most probable tokens; 0, -1 and None keep all.
        min_p: 0 to 1: drop tokens less probable than this share of the most probable one.
        presence_penalty: -2 to 2, taken off the logit of every token that the output already holds.
        frequency_penalty: -2 to 2, taken off once for each time the output holds the token.
        repetition_penalty: 0.001 to 1000; divides positive logits (multiplies negative ones) of tokens that prompt or
            output hold.
        seed: seed of this request; None takes the engine's seed.
        stop: strings that end the text; one string or a sequence of them.
        stop_token_ids: token ids that end the output, beside EOS.
        ignore_eos: go on after EOS.
        max_tokens: most output tokens, at least 1; None takes the engine's default.
        min_tokens: EOS, stop tokens and stop strings do not end the output before this many tokens.
        logprobs: 0 to 20 alternatives reported with every token (0: the sampled token alone); None reports nothing.
        prompt_logprobs: not supported, only None.
        logit_bias: not supported, only None.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string that ended the text.

    Raises:
        SamplingParamsError: (a ValueError) names the field, the value and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Normalise every field to one type and check its range."""
        self._refuse_unsupported()
        self._set("temperature", _float("temperature", self.temperature, 1.0, 0.0, 100.0))
        self._set("top_p", _float("top_p", self.top_p, 1.0, 0.0, 1.0, low_open=True))
        self._set("top_k", max(_int("top_k", self.top_k, 0, -1, 2**31 - 1), 0))
        self._set("min_p", _float("min_p", self.min_p, 0.0, 0.0, 1.0))
        self._set("presence_penalty", _float("presence_penalty", self.presence_penalty, 0.0, -2.0, 2.0))
        self._set("frequency_penalty", _float("frequency_penalty", self.frequency_penalty, 0.0, -2.0, 2.0))
        self._set("repetition_penalty", _float("repetition_penalty", self.repetition_penalty, 1.0, 1e-3, 1e3))
        if self.seed is not None:
            self._set("seed", _int("seed", self.seed, 0, -(2**63), 2**64 - 1))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.max_tokens is not None:
            self._set("max_tokens", _int("max_tokens", self.max_tokens, 1, 1, 2**31 - 1))
        self._set("min_tokens", _int("min_tokens", self.min_tokens, 0, 0, 2**31 - 1))
        if self.logprobs is not None:
            self._set("logprobs", _int("logprobs", self.logprobs, 0, 0, MAX_LOGPROBS))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            self._set(name, _bool(name, getattr(self, name), _DEFAULTS[name]))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError("min_tokens", f"{self.min_tokens} is more than max_tokens={self.max_tokens}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _refuse_unsupported(self) -> None:
        self._set("n", _int("n", self.n, 1, 1, 2**31 - 1))
        if self.n != 1:
            raise SamplingParamsError("n", f"{self.n} samples of one prompt are not supported yet; only n=1 is")
        for name in ("prompt_logprobs", "logit_bias"):
            value = getattr(self, name)
            if value is not None and value != {}:
                raise SamplingParamsError(name, f"not supported yet (got {value!r}); leave it out")
            self._set(name, None)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken instead of a sample."""
        return self.temperature < GREEDY_BELOW

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], defaults: SamplingParams | None = None) -> Self:
        """Make params from plain keys, for example those of a job's line.

        Args:
            options: option name to value; None stands for "not given".
            defaults: where options that are not given come from; the class's own defaults when None.

        Raises:
            SamplingParamsError: an unknown key (by name), or a wrong value.
        """
        unknown = [key for key in options if key not in _DEFAULTS]
        if unknown:
            known = ", ".join(_DEFAULTS)
            raise SamplingParamsError(str(unknown[0]), f"unknown sampling option; known ones are {known}")
        given = {key: value for key, value in options.items() if value is not None}
        base = {name: getattr(defaults, name) for name in _DEFAULTS} if defaults is not None else {}
        return cls(**(base | given))

    @classmethod
    def from_generation_config(cls, generation_config: Mapping[str, Any]) -> Self:
        """Default params of a checkpoint, from the content of its ``generation_config.json``.

        Takes temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens; ``do_sample: false`` is greedy.
        EOS ids are not sampling params: the engine unites them from all of the checkpoint's files.

        Raises:
            SamplingParamsError: a value out of range; the message names the key and the file.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        options = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
        if generation_config.get("max_new_tokens") is not None:
            options["max_tokens"] = generation_config["max_new_tokens"]
        if generation_config.get("do_sample") is False:
            options["temperature"] = 0.0
        try:
            return cls(**options)
        except SamplingParamsError as error:
            raise SamplingParamsError(error.field, f"in generation_config.json: {error}") from None


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


def _int(name: str, value: object, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise SamplingParamsError(name, f"expected an integer from {low} to {high}, got {value!r}")
    value = int(value)
    if not low <= value <= high:
        raise SamplingParamsError(name, f"{value} is out of range; expected {low} to {high}")
    return value


def _float(name: str, value: object, default: float, low: float, high: float, low_open: bool = False) -> float:
    if value is None:
        return default
    allowed = f"a number {'over' if low_open else 'from'} {low:g} {'and at most' if low_open else 'to'} {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SamplingParamsError(name, f"expected {allowed}, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        raise SamplingParamsError(name, f"{value} is out of range; expected {allowed}") from None
    if not math.isfinite(number) or number < low or number > high or (low_open and number <= low):
        raise SamplingParamsError(name, f"{number} is out of range; expected {allowed}")
    return number


def _bool(name: str, value: object, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise SamplingParamsError(name, f"expected true or false, got {value!r}")
    return value


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, (bytes, Mapping)) or not isinstance(strings, Sequence | set | frozenset):
        raise SamplingParamsError("stop", f"expected a string or a list of strings, got {value!r}")
    if isinstance(strings, (set, frozenset)):  # a fixed order: the first of two equal hits is reported
        strings = sorted(strings, key=repr)
    for string in strings:
        if not isinstance(string, str):
            raise SamplingParamsError("stop", f"expected strings, got {string!r} in the list")
        if not string:
            raise SamplingParamsError("stop", "an empty string would stop everything; leave it out")
    return tuple(dict.fromkeys(strings))


def _stop_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise SamplingParamsError("stop_token_ids", f"expected a list of token ids, got {value!r}")
    ids = tuple(dict.fromkeys(_int("stop_token_ids", item, 0, 0, 2**31 - 1) for item in _no_none(value)))
    if len(ids) > MAX_STOP_IDS:
        raise SamplingParamsError("stop_token_ids", f"{len(ids)} ids; at most {MAX_STOP_IDS} fit, EOS included")
    return ids


def _no_none(items: Any) -> list[Any]:
    items = list(items)
    if None in items:
        raise SamplingParamsError("stop_token_ids", "expected token ids, got None in the list")
    return items
