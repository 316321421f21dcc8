"""Small engines for tests: one tiny fp32 model, programs compiled once a shape, engines made from them at will."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax import loading
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.engine import Engine, EngineOutput, TokenLogprob
from qwen35_jax.params import FlatParams
from qwen35_jax.prefill_device import PrefillDevice
from qwen35_jax.programs import CompileCounter, ProgramSet, init_device_state
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.steps import VARIANTS
from qwen35_jax.transfer import transfer_widths
from qwen35_jax.weights import random_params
from schedulers import BucketLadder, Scheduler

VOCAB, NUM_VALID, EOS = 512, 500, (7, 11)
MODEL = ModelConfig.preset(
    "tiny-4b", vocab_size=VOCAB, layer_types=("linear_attention", "full_attention"), dtype="float32"
)
OPTIONS = EngineConfig(dtype="float32", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256)


@functools.cache
def _params(device: jax.Device):
    return random_params(MODEL, dtype=jnp.dtype("float32"), seed=3, device=device)


@dataclasses.dataclass
class Result:
    """Everything the engine said about one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    last: EngineOutput | None = None

    @property
    def ending(self) -> tuple[str | None, int | str | None]:
        assert self.last is not None
        return self.last.finish_reason, self.last.stop_reason


@dataclasses.dataclass(frozen=True)
class Job:
    """A request as :meth:`Engine.submit` takes it."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as engines take it.

    Attributes:
        config: its numbers.
        load: (device, dtype) -> flat parameters.
        eos_ids: ids that end an output.
        num_valid: ids below it are real.
        variants: of the sampler that its programs are compiled in.
    """

    config: ModelConfig
    load: Callable[[jax.Device, jnp.dtype], FlatParams]
    eos_ids: Sequence[int]
    num_valid: int
    variants: Sequence[str] = VARIANTS


TINY = Model(MODEL, lambda device, dtype: _params(device), EOS, NUM_VALID)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A step as a scheduler found it, and the prompt tokens that it took.

    Attributes:
        active: output tokens left of every decoding row.
        prompts: prompt tokens left of the admitted prompts, in their order.
        lengths: tokens taken of the first of them.
    """

    active: tuple[int, ...]
    prompts: tuple[int, ...]
    lengths: tuple[int, ...]


class Kit:
    """The programs of one configuration; :meth:`engine` makes a fresh engine from them in no time.

    Attributes:
        dispatched: dispatches of the last engine by kind of program.
        choices: what its scheduler chose among, step by step.
    """

    def __init__(self, options: EngineConfig, ladder: Mapping[str, Sequence[int]], model: Model = TINY):
        self.options, self.model = options.validate(), model
        ladder_of = functools.partial(
            BucketLadder.from_limits,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            unified=options.decode_overlap == "stream",
            **ladder,
        )
        with mock.patch.object(loading, "VARIANTS", model.variants):
            first = loading.build_engine(
                self.options,
                model.config,
                model.load,
                eos_ids=model.eos_ids,
                num_valid=model.num_valid,
                ladder=ladder_of(),
            )
        self.ladder = first.scheduler.ladder
        self.limits = first.scheduler.config
        self.start_report = first.start_report
        self.programs: ProgramSet = first.programs
        other = first.prefill_device
        self.other: ProgramSet | None = other.programs if other else None
        first.close()
        self.dispatched: collections.Counter[str] = collections.Counter()
        self.choices: list[Choice] = []
        count_dispatches(self.programs, self.dispatched)
        if self.other is not None:
            count_dispatches(self.other, self.dispatched, "other ")

    def engine(
        self,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        async_chunks: int | None = None,
        **changes,
    ) -> Engine:
        """A fresh engine: empty pools, new scheduler, the same programs; ``dispatched`` and ``choices`` are empty.

        Args:
            max_num_seqs: fewer sequences than the programs were made for.
            max_num_batched_tokens: fewer prefill tokens a step.
            async_chunks: fewer chunks in flight (``device``).
            **changes: options that do not need other programs; those of ``stream`` and of 8 decode steps serve ``off``
                and 1 as well.
        """
        if (changes.get("decode_overlap", self.options.decode_overlap) == "device") != (self.other is not None):
            raise ValueError(f"programs of {self.options.decode_overlap!r} do not serve {changes['decode_overlap']!r}")
        self.dispatched.clear()
        self.choices.clear()
        limits = dataclasses.replace(
            self.limits,
            max_num_seqs=max_num_seqs or self.limits.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens or self.limits.max_num_batched_tokens,
            policy=changes.get("scheduler_policy", self.limits.policy),
            overlap=changes.get("decode_overlap", self.limits.overlap),
            decode_steps=changes.get("decode_steps", self.limits.decode_steps),
            max_chunks_in_flight=self.limits.max_chunks_in_flight if async_chunks is None else async_chunks,
        )
        numbers = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "async_chunks": async_chunks,
        }
        changes |= {name: number for name, number in numbers.items() if number is not None}
        options = dataclasses.replace(self.options, **changes)
        prefill_device = None
        if self.other is not None:
            prefill_device = PrefillDevice(
                self.other,
                init_device_state(self.other.shapes, self.other.device),
                transfer_widths(self.ladder.max_width),
                poison=options.debug_poison,
            )
        state = init_device_state(self.programs.shapes, self.programs.device)
        scheduler = Scheduler(limits, self.ladder)
        watch_choices(scheduler, self.choices)
        return Engine(
            options,
            scheduler,
            self.programs,
            state,
            eos_ids=self.model.eos_ids,
            num_valid=self.model.num_valid,
            prefill_device=prefill_device,
            compiles=CompileCounter(),
            start_report=self.start_report,
        )


def count_dispatches(programs: ProgramSet, counts: collections.Counter[str], where: str = "") -> None:
    """Counts dispatches by kind of program from now on."""
    run = programs.run

    def counted(key, state, fields):
        counts[where + key.kind] += 1
        return run(key, state, fields)

    programs.run = counted  # type: ignore[method-assign]


def watch_choices(scheduler: Scheduler, choices: list[Choice]) -> None:
    """Notes what the scheduler chooses among from now on."""
    choose = scheduler._choose_chunks

    def watched(active):
        prompts = tuple(seq.prompt_left for seq in scheduler._prefilling.values())
        lengths = choose(active)
        choices.append(Choice(tuple(seq.tokens_left for seq in active), prompts, tuple(lengths)))
        return lengths

    scheduler._choose_chunks = watched  # type: ignore[method-assign]


@functools.cache
def kit(name: str) -> Kit:
    """Configurations the tests share; each is compiled once a process."""
    one = {"token_rungs": [256], "row_rungs": [8], "width_rungs": [8]}
    replace = functools.partial(dataclasses.replace, OPTIONS)
    match name:
        case "off":
            return Kit(OPTIONS, one)
        case "other_buckets":  # small chunks, several rungs of rows and widths
            return Kit(
                replace(max_num_batched_tokens=64, max_num_seqs=4),
                {"token_rungs": [64], "row_rungs": [4], "width_rungs": [3, 8]},
            )
        case "stream":
            return Kit(replace(decode_overlap="stream", max_num_batched_tokens=128), one | {"token_rungs": [128]})
        case "device":
            options = replace(decode_overlap="device", max_num_batched_tokens=128, decode_steps=8, async_chunks=2)
            return Kit(options, one | {"token_rungs": [128]})
        case "bf16_state":
            return Kit(replace(state_dtype="bfloat16"), one)
        case "k8":
            return Kit(replace(decode_steps=8), one | {"row_rungs": [1, 8]})
    raise ValueError(name)


def submit_all(engine: Engine, jobs: Iterable[Job]) -> None:
    for job in jobs:
        engine.submit(job.name, job.prompt, job.params, rng_id=job.name)


def drain(engine: Engine, results: dict[str, Result] | None = None, *, after_step=None) -> dict[str, Result]:
    """Step until nothing is left; checks that the pools are whole again."""
    results = {} if results is None else results
    while engine.has_work:
        for output in engine.step():
            result = results.setdefault(output.request_id, Result())
            assert result.last is None or not result.last.finished, f"{output.request_id} ended twice"
            result.tokens += output.token_ids
            result.logprobs += output.logprobs or []
            result.last = output
        if after_step is not None:
            after_step(results)
    stats = engine.scheduler.stats()
    assert (stats.slots_used, stats.pages_used, stats.staging_slots_used, stats.staging_pages_used) == (0, 0, 0, 0)
    return results


def run(engine: Engine, jobs: Sequence[Job]) -> dict[str, Result]:
    """All jobs through the engine, which is closed afterwards."""
    submit_all(engine, jobs)
    results = drain(engine)
    assert engine.compiles_after_warmup == 0
    engine.close()
    return results


def mixed_jobs() -> list[Job]:
    """Lengths around the 64 grid, and every kind of sampling option."""
    rng = np.random.default_rng(5)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = [
        dataclasses.replace(greedy, logprobs=3),
        greedy,
        SamplingParams(temperature=1.0, max_tokens=9, seed=4, logprobs=0),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=14, logprobs=20),
        greedy,
        SamplingParams(temperature=1.2, min_p=0.02, presence_penalty=1.5, frequency_penalty=0.3, max_tokens=10),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=16, logprobs=1),
        SamplingParams(temperature=1.0, top_p=0.999, min_tokens=8, max_tokens=20, stop_token_ids=tuple(range(40))),
        dataclasses.replace(greedy, max_tokens=1, logprobs=2),
        SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, logprobs=2),
        greedy,
        SamplingParams(temperature=0.7, max_tokens=30, stop_token_ids=tuple(range(0, 480, 8))),
    ]
    lengths = [1, 3, 17, 64, 65, 130, 300, 2, 128, 200, 63, 33]
    return [
        Job(f"r{i}", tuple(rng.integers(0, NUM_VALID, n).tolist()), params)
        for i, (n, params) in enumerate(zip(lengths, options, strict=True))
    ]


def assert_same(found: dict[str, Result], expected: dict[str, Result], atol: float = 1e-4) -> None:
    """Same tokens and endings; logprobs within ``atol`` (fp32 sums in another order differ by about 1e-6 here)."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert got.tokens == want.tokens, name
        assert got.ending == want.ending, name
        assert len(got.logprobs) == len(want.logprobs), name
        for a, b in zip(got.logprobs, want.logprobs, strict=True):
            assert (a.token_id, a.rank) == (b.token_id, b.rank), name
            np.testing.assert_allclose(a.logprob, b.logprob, atol=atol, err_msg=name)
            np.testing.assert_allclose(
                [logprob for _, logprob, _ in a.top], [logprob for _, logprob, _ in b.top], atol=atol, err_msg=name
            )
