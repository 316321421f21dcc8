"""LLM: offline generation from Python."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.driver import Driver, EngineLike
from qwen35_jax.errors import UserInputError
from qwen35_jax.outputs import GenerationError, RequestError, RequestOutput
from qwen35_jax.progress import Progress, ProgressFn
from qwen35_jax.requests import (
    GenerationRequest,
    Message,
    Prompt,
    RequestPreparer,
    aborted_output,
    failed_output,
    is_token_ids,
)
from qwen35_jax.sampling_params import SamplingParams, SamplingParamsError

if TYPE_CHECKING:
    from qwen35_jax.text import Tokenizer


class LLM:
    """A Qwen3.5 model ready to generate.

    Args:
        model: directory of a Hugging Face checkpoint or of a converted one.
        progress: called as ``progress(stage, done, total, note)`` while weights load and programs compile; a
            :class:`~qwen35_jax.progress.Progress` on stderr when None.
        **options: fields of :class:`~qwen35_jax.config.EngineConfig`: dtype, max_model_len, max_num_seqs,
            max_num_batched_tokens, gpu_memory_utilization, scheduler_policy, decode_overlap, seed,
            skip_tokenizer_init, load_format, compilation_cache_dir and so on.

    Raises:
        UserInputError: the directory, a file in it or an option is wrong; the message names it.
        TypeError: unknown option.

    An LLM runs one ``generate``, ``chat`` or ``stream`` at a time; ``abort`` may be called from other threads.
    """

    def __init__(self, model: str | os.PathLike[str], *, progress: ProgressFn | None = None, **options: Any):
        config = engine_config(options)
        defaults = default_sampling_params(model)
        from qwen35_jax.loading import create_engine

        model = os.fspath(model)
        report = progress or Progress()
        engine, model_config, tokenizer = create_engine(model, **dataclasses.asdict(config), progress=report)
        self._attach(engine, model_config, tokenizer, defaults)

    @classmethod
    def from_engine(
        cls,
        engine: EngineLike,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        default_sampling: SamplingParams | None = None,
    ) -> Self:
        """An LLM around an engine that exists already."""
        llm = cls.__new__(cls)
        llm._attach(engine, model_config, tokenizer, default_sampling or SamplingParams())
        return llm

    def _attach(
        self, engine: EngineLike, config: ModelConfig, tokenizer: Tokenizer | None, defaults: SamplingParams
    ) -> None:
        self.engine = engine
        self.model_config = config
        self.tokenizer = tokenizer
        self.default_sampling_params = defaults
        self._driver = Driver(engine, tokenizer)
        self._busy = False
        self._closed = False
        self._names = itertools.count()
        self._preparer = RequestPreparer(tokenizer, config.vocab_size, engine.max_model_len)

    # Generating.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        raise_on_error: bool = False,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one prompt or a list of them. A prompt is a string, a list of token ids, ``{"prompt": str}`` or
                ``{"prompt_token_ids": [int, ...]}``.
            sampling_params: for all prompts, or one for each; None takes the defaults of the model's
                generation_config, of which ``max_tokens`` gives way to what room the context leaves. In those given
                here ``max_tokens=None`` means 4096, or what room is left; another number must fit.
            use_tqdm: report progress on stderr.
            raise_on_error: raise at the first request that fails instead of going on.
            request_ids: names for :meth:`abort`, one a prompt; made up when None.

        Returns:
            One output a prompt, in the order of the prompts. A prompt that cannot run (empty, too long, ids outside
            the vocabulary, non-finite logits) gives an output with ``error`` set and finish_reason "error"; the
            others are not disturbed. Random bits of a request derive from the seed and its index in the call.

        Raises:
            GenerationError: a request failed and ``raise_on_error`` is set.
            ValueError: as many ``sampling_params`` or ``request_ids`` are needed as there are prompts.
            TypeError: ``prompts`` or ``sampling_params`` is none of the above.
        """
        if isinstance(prompts, (str, Mapping)) or is_token_ids(prompts):
            prompts = [prompts]  # type: ignore[list-item]
        if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):
            raise TypeError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
        return self._run_all(list(prompts), self.prepare_prompt, sampling_params, use_tqdm, raise_on_error, request_ids)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        raise_on_error: bool = False,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, rendered with the model's chat template.

        Args:
            conversations: one conversation (a list of messages ``{"role": ..., "content": ...}``) or a list of them.
            sampling_params: see :meth:`generate`.
            use_tqdm: see :meth:`generate`.
            raise_on_error: see :meth:`generate`.
            chat_template_kwargs: switches of the template, such as ``{"enable_thinking": False}``.
            tools: JSON descriptions of functions, as the template takes them.
            request_ids: see :meth:`generate`.

        Returns:
            One output a conversation, in order; ``outputs[0].reasoning`` and ``.content`` are the two parts of
            ``outputs[0].text``. A conversation that the template refuses gives an output with ``error`` set.

        Raises:
            GenerationError, ValueError, TypeError: see :meth:`generate`.
        """
        if isinstance(conversations, (str, Mapping)) or not isinstance(conversations, Iterable):
            kind = type(conversations).__name__
            raise TypeError(f"conversations must be a list of messages or a list of such lists, got {kind}")
        items: list[Any] = list(conversations)
        if items and all(isinstance(item, Mapping) for item in items):
            items = [items]

        prepare = functools.partial(self.prepare_chat, chat_template_kwargs=chat_template_kwargs, tools=tools)
        return self._run_all(items, prepare, sampling_params, use_tqdm, raise_on_error, request_ids)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests of the call that runs now; they come back with what they have and finish_reason "abort".

        Ids that are unknown or finished are ignored. May be called from any thread.
        """
        self._driver.abort([request_ids] if isinstance(request_ids, str) else request_ids)

    def stream(
        self,
        requests: Iterable[GenerationRequest | RequestOutput],
        *,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Run prepared requests and yield each output as it finishes.

        The requests are read lazily, as the engine has room: neither they nor the outputs are ever all in memory.
        Closing the iterator gives up what still runs.

        Args:
            requests: from :meth:`prepare_prompt` and :meth:`prepare_chat`; a :class:`RequestOutput` is passed through.
            on_tokens: called with the number of new tokens after each step.

        Raises:
            RuntimeError: the LLM is closed, or runs another call.
        """
        if self._closed:
            raise RuntimeError("this LLM is closed")
        if self._busy:
            raise RuntimeError("this LLM is generating; it runs one call at a time")
        self._busy = True
        try:
            with contextlib.closing(self._driver.run(requests, on_tokens=on_tokens)) as finished:
                yield from finished
        finally:
            self._busy = False

    def drain(self) -> None:
        """Let a running :meth:`stream` finish the requests that have begun and drop the others without an output."""
        self._driver.drain()

    def cancel(self) -> None:
        """Let a running :meth:`stream` give everything up and end at its next step."""
        self._driver.cancel()

    @property
    def num_started(self) -> int:
        """Requests that have given a token and are not finished."""
        return self._driver.num_started

    def close(self) -> None:
        """Release the device. Closing twice is harmless; a :meth:`stream` that still runs ends without more outputs."""
        if not self._closed:
            self._closed = True
            self._driver.cancel()
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Preparing single requests.

    def prepare_prompt(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        rng_id: str | int,
        *,
        default_limit: bool = False,
    ) -> GenerationRequest:
        """Check and tokenise one prompt; see :meth:`~qwen35_jax.requests.RequestPreparer.prompt`.

        Raises:
            RequestError: the prompt cannot run; says why.
        """
        return self._preparer.prompt(prompt, params, request_id, rng_id, default_limit=default_limit)

    def prepare_chat(
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
        """Render and tokenise one conversation; see :meth:`~qwen35_jax.requests.RequestPreparer.chat`.

        Raises:
            RequestError: the conversation cannot run; says why.
        """
        return self._preparer.chat(
            messages,
            params,
            request_id,
            rng_id,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            default_limit=default_limit,
        )

    # Running a list of them.

    def _run_all(
        self,
        items: list[Any],
        prepare: Callable[..., GenerationRequest],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        raise_on_error: bool,
        request_ids: Sequence[str] | None,
    ) -> list[RequestOutput]:
        params = self._params_for(sampling_params, len(items))
        names = self._names_for(request_ids, len(items))

        def requests() -> Iterator[GenerationRequest | RequestOutput]:
            for index, (item, options, name) in enumerate(zip(items, params, names, strict=True)):
                try:
                    yield prepare(item, options, name, index, default_limit=sampling_params is None)
                except RequestError as error:
                    yield failed_output(name, error, item)

        report = Progress() if use_tqdm and items else None
        bar = report.rows(len(items)) if report else None
        on_tokens = None if bar is None else (lambda number: bar.add(tokens=number))
        found: dict[str, RequestOutput] = {}
        try:
            with contextlib.closing(self.stream(requests(), on_tokens=on_tokens)) as finished:
                for output in finished:
                    found[output.request_id] = output
                    if bar is not None:
                        bar.add(rows=1, failed=int(output.error is not None))
                    if raise_on_error and output.error is not None:
                        raise GenerationError(output)
        finally:
            if bar is not None:
                bar.close()
        # drain() and cancel() leave requests without an output; here every prompt gets one.
        return [found.get(name) or aborted_output(name, item) for name, item in zip(names, items, strict=True)]

    def _params_for(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, number: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            return [self.default_sampling_params] * number
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * number
        if isinstance(sampling_params, str) or not isinstance(sampling_params, Sequence):
            raise TypeError(
                f"sampling_params must be SamplingParams or a list of them, got {type(sampling_params).__name__}"
            )
        params = list(sampling_params)
        if len(params) != number:
            raise ValueError(f"sampling_params has {len(params)} entries for {number} prompts")
        for index, entry in enumerate(params):
            if not isinstance(entry, SamplingParams):
                raise TypeError(f"sampling_params[{index}] must be SamplingParams, got {type(entry).__name__}")
        return params

    def _names_for(self, request_ids: Sequence[str] | None, number: int) -> list[str]:
        if request_ids is None:
            return [str(next(self._names)) for _ in range(number)]
        names = [str(name) for name in request_ids]
        if len(names) != number:
            raise ValueError(f"request_ids has {len(names)} entries for {number} prompts")
        if len(set(names)) != number:
            raise ValueError("request_ids must differ from each other")
        return names


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """An :class:`EngineConfig` from arguments, checked.

    Raises:
        TypeError: unknown option, by name.
        UserInputError: wrong or unsupported value, by name.
    """
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}; known ones are {', '.join(known)}")
    return EngineConfig(**options).validate()


def default_sampling_params(model: str | os.PathLike[str]) -> SamplingParams:
    """Sampling options of the model's own ``generation_config.json``; the plain defaults where there is none.

    Raises:
        UserInputError: the file is unreadable or holds a wrong value.
    """
    path = pathlib.Path(model) / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"expected an object, found {type(content).__name__}")
        return SamplingParams.from_generation_config(content)
    except SamplingParamsError as error:
        raise UserInputError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise UserInputError(f"cannot read {path}: {error}") from error
