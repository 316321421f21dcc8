"""One set of compiled programs, engines made from them at will, and the judge of what they said.

A rig compiles ``stream`` programs (decode, prefill and unified): they are all that the overlap modes ``off`` and
``stream`` need, so both are engines over the same executables. ``device`` overlap is a rig of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax import loading, runtime
from qwen35_jax.cache import PAGE_SIZE, Cache, cache_shapes, pages_for
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.engine import Engine
from qwen35_jax.model import PrefillInputs
from qwen35_jax.params import FlatParams, ParamPack
from qwen35_jax.prefill_device import PrefillDevice
from qwen35_jax.programs import CompileCounter, ProgramSet, init_device_state
from qwen35_jax.progress import Progress
from qwen35_jax.steps import ProgramKey
from qwen35_jax.transfer import transfer_widths
from qwen35_jax.weights import random_params
from schedulers import BucketLadder, Scheduler
from schedulers.buckets import Axes, requests_of
from tests.engine_kit import Job, Result, drain, submit_all

TOP = 20  # alternatives asked for with every token


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of a rig: few programs, yet every length and row count falls into a bucket with padding in it.

    Attributes:
        max_num_seqs: rows at once.
        max_model_len: prompt + output.
        max_num_batched_tokens: prompt tokens a step; below the longest prompt, so that some come in pieces.
        row_rungs: buckets of decode rows, one row alone among them.
    """

    max_num_seqs: int = 64
    max_model_len: int = 1024
    max_num_batched_tokens: int = 512
    row_rungs: tuple[int, ...] = (1, 8, 64)

    def ladder(self) -> BucketLadder:
        tokens = (self.max_num_batched_tokens,)
        requests = tuple(requests_of(rung, self.max_num_seqs) for rung in tokens)
        widths = (pages_for(self.max_model_len),)
        return BucketLadder(
            prefill_axes=Axes(tokens, requests, (), widths),
            decode_axes=Axes((), (), self.row_rungs, widths),
            unified_axes=Axes(tokens, requests, (self.max_num_seqs,), widths),
        )


def prepare() -> None:
    """Sets the backend up; before anything touches a device."""
    runtime.prepare(EngineConfig().gpu_memory_utilization, None)


@functools.cache
def _params(config: ModelConfig, dtype: jnp.dtype, device: jax.Device) -> FlatParams:
    return random_params(config, dtype=dtype, seed=0, device=device)


class Run(NamedTuple):
    """What came of some jobs in one engine.

    Attributes:
        results: by name of the job.
        compiles: since the engine was ready.
        dispatched: dispatches by kind of program; those of the prefill device begin with "other".
    """

    results: dict[str, Result]
    compiles: int
    dispatched: collections.Counter[str]

    @property
    def overlapped(self) -> int:
        """Dispatches that only an overlap mode has."""
        return self.dispatched["unified"] + self.dispatched["other prefill"]


class Rig:
    """Programs of one model; :meth:`engine` makes a fresh engine from them without a compile.

    Args:
        config: the model.
        dtype: "bfloat16" or "float32".
        shapes: sizes.
        overlap: "stream" (serves ``off`` as well) or "device".
        num_valid: ids below this are real; None takes the vocabulary.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        shapes: Shapes,
        *,
        overlap: str = "stream",
        num_valid: int | None = None,
    ):
        self.config, self.dtype, self.shapes = config, dtype, shapes
        self.num_valid = config.vocab_size if num_valid is None else num_valid
        self.options = EngineConfig(
            dtype=dtype,
            max_model_len=shapes.max_model_len,
            max_num_seqs=shapes.max_num_seqs,
            max_num_batched_tokens=shapes.max_num_batched_tokens,
            decode_overlap=overlap,
            load_format="random",
            skip_tokenizer_init=True,
        ).validate()
        self._first: Engine | None = loading.build_engine(
            self.options,
            config,
            lambda device, kind: _params(config, kind, device),
            eos_ids=config.eos_token_ids,
            num_valid=self.num_valid,
            progress=Progress(),
            ladder=shapes.ladder(),
        )
        report = self._first.start_report
        assert report is not None
        self.plan = report.plan
        self.programs = self._first.programs
        other = self._first.prefill_device
        self._other = other.programs if other else None
        self.dispatched: collections.Counter[str] = collections.Counter()
        self._count(self.programs, "")
        if self._other is not None:
            self._count(self._other, "other ")
        self._limits = self._first.scheduler.config
        self._ladder = self._first.scheduler.ladder

    def _count(self, programs: ProgramSet, where: str) -> None:
        """Counts dispatches by kind of program from now on."""
        run = programs.run

        def counted(key, state, fields):
            self.dispatched[where + key.kind] += 1
            return run(key, state, fields)

        programs.run = counted  # type: ignore[method-assign]

    def first(self) -> Engine:
        """The engine as loading made it, in the rig's own overlap mode; given out once, and closed by the caller."""
        assert self._first is not None, "the first engine has been given out"
        engine, self._first = self._first, None
        return engine

    def engine(self, overlap: str | None = None, *, max_num_seqs: int | None = None, **changes) -> Engine:
        """A fresh engine: empty pools, new scheduler, the same programs. The one before must have been closed.

        Args:
            overlap: mode; None takes the rig's own.
            max_num_seqs: fewer rows than the programs were made for.
            **changes: options that do not change any program.
        """
        if self._first is not None:
            self.first().close()  # there may be no room for two sets of pools
        mode = overlap or self.options.decode_overlap
        if (mode == "device") != (self._other is not None):
            raise ValueError(f"a rig made for {self.options.decode_overlap!r} has no programs for overlap {mode!r}")
        limits = dataclasses.replace(self._limits, overlap=mode, max_num_seqs=max_num_seqs or self._limits.max_num_seqs)
        options = dataclasses.replace(self.options, decode_overlap=mode, **changes)
        prefill_device = None
        if self._other is not None:
            prefill_device = PrefillDevice(
                self._other,
                init_device_state(self._other.shapes, self._other.device),
                transfer_widths(self._ladder.max_width),
                poison=options.debug_poison,
            )
        state = init_device_state(self.programs.shapes, self.programs.device)
        return Engine(
            options,
            Scheduler(limits, self._ladder),
            self.programs,
            state,
            eos_ids=self.config.eos_token_ids,
            num_valid=self.num_valid,
            prefill_device=prefill_device,
            compiles=CompileCounter(),
        )

    def prefill_engine(self, tokens: int) -> Engine:
        """An engine over the same weights with one program of its own: prompts in steps of ``tokens``, sampled in full.

        It serves requests that end with their first token and ask for log-probabilities.
        """
        if self._first is not None:
            self.first().close()
        shapes = dataclasses.replace(self.shapes, max_num_batched_tokens=tokens)
        width = pages_for(shapes.max_model_len)
        options = dataclasses.replace(
            self.options,
            max_num_batched_tokens=tokens,
            decode_overlap="off",
            num_kv_pages=width * shapes.max_num_seqs,  # another engine's worth of memory is not needed
        )
        return loading.build_engine(
            options.validate(),
            self.config,
            lambda device, kind: _params(self.config, kind, device),
            eos_ids=self.config.eos_token_ids,
            num_valid=self.num_valid,
            progress=Progress(),
            ladder=shapes.ladder(),
            choose=lambda ladder: [
                ProgramKey("prefill", ladder.pick("prefill", tokens=tokens, requests=1, width=width), 1, "full")
            ],
        )

    def run(self, jobs: Sequence[Job], overlap: str | None = None, **changes) -> Run:
        """All jobs through a fresh engine."""
        engine = self.engine(overlap, **changes)
        before = self.dispatched.copy()
        try:
            submit_all(engine, jobs)
            results = drain(engine)
            return Run(results, engine.compiles_after_warmup, self.dispatched - before)
        finally:
            engine.close()


# --- the judge ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Forced:
    """What one row alone, its tokens given, makes of an answer.

    Attributes:
        chosen: float32 [N, 1 + TOP], log-probabilities of the asked ids at every output position.
        best: int32 [N, 2], the two most probable ids.
        best_logprobs: float32 [N, 2], theirs.
    """

    chosen: np.ndarray
    best: np.ndarray
    best_logprobs: np.ndarray

    @property
    def margins(self) -> np.ndarray:
        """float32 [N]: how far the most probable id is ahead of the second."""
        return self.best_logprobs[:, 0] - self.best_logprobs[:, 1]


class Judge:
    """Log-probabilities of finished answers, one row alone in one prefill pass with every token given.

    An engine meets the same tokens in company, in other buckets, a prompt in pieces and the output token by token
    through the decode kernels; here the whole sequence goes through the prefill kernels at once.

    Args:
        rig: whose model and weights are used.
        dtype: of weights and activations; None takes the rig's. With "float32" the rig's weights are widened.
        kernels: implementation of every kernel.
        max_tokens: longest output.
    """

    def __init__(self, rig: Rig, *, dtype: str | None = None, kernels: str = "auto", max_tokens: int = 64):
        config, length = rig.config, rig.shapes.max_model_len
        width, kind = pages_for(length), jnp.dtype(dtype or rig.dtype)
        pack = ParamPack(config, dtype=kind, kernels=kernels)
        self._length, self._max_tokens, self._params = length, max_tokens, rig.programs.params
        specs = cache_shapes(config, width + 1, 2, kind, jnp.dtype("float32"))

        def judge(flat, tokens, count, first, asked):
            """``tokens [T]`` of which ``count`` are real, output from ``first`` on, ids ``asked [M, K]``."""
            model = pack.unpack(tuple(x.astype(leaf.spec.dtype) for x, leaf in zip(flat, pack.leaves, strict=True)))
            positions = jnp.arange(length, dtype=jnp.int32)
            real = positions < count
            pages = jnp.arange(1, width + 1, dtype=jnp.int32)
            inputs = PrefillInputs(
                tokens=tokens,
                positions=jnp.where(real, positions, 0),
                page_ids=jnp.where(real, pages[positions // PAGE_SIZE], 0),
                page_offsets=jnp.where(real, positions % PAGE_SIZE, 0),
                cu_seqlens=jnp.stack([jnp.int32(0), count]),
                slot_ids=jnp.ones(1, jnp.int32),
                has_state=jnp.zeros(1, bool),
                page_table=pages[None],
                kv_lens=count[None],
            )
            cache = Cache(*(jnp.zeros(spec.shape, spec.dtype) for spec in specs))
            hidden = model.forward(inputs, None, cache, layer_outputs=True).prefill_all_hidden
            # The token at position p was drawn from the scores at p - 1.
            at = jnp.clip(first - 1 + jnp.arange(max_tokens), 0, length - 1)
            logits = model.logits(hidden[at])
            logits = jnp.where(jnp.arange(logits.shape[1]) < rig.num_valid, logits, -jnp.inf)
            logprobs = jax.nn.log_softmax(logits)
            best_logprobs, best = jax.lax.top_k(logprobs, 2)
            return jnp.take_along_axis(logprobs, asked, axis=1), best, best_logprobs

        shapes = (
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in self._params),
            jax.ShapeDtypeStruct((length,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((max_tokens, 1 + TOP), jnp.int32),
        )
        self._make = lambda: jax.jit(judge).lower(*shapes).compile()
        self._judge: jax.stages.Compiled | None = None

    def compile(self) -> None:
        """Compiles the pass; not while an engine runs that is held to compile nothing."""
        if self._judge is None:
            self._judge = self._make()

    def __call__(self, job: Job, result: Result) -> Forced:
        """Judges one answer that was generated with ``logprobs=TOP``."""
        self.compile()
        assert self._judge is not None
        count = len(result.tokens)
        assert 0 < count <= self._max_tokens and len(result.logprobs) == count
        tokens = np.zeros(self._length, np.int32)
        everything = [*job.prompt, *result.tokens[:-1]]
        tokens[: len(everything)] = everything
        asked = np.zeros((self._max_tokens, 1 + TOP), np.int32)
        asked[:count] = [[entry.token_id, *(token for token, _, _ in entry.top)] for entry in result.logprobs]
        found = self._judge(self._params, tokens, np.int32(len(everything)), np.int32(len(job.prompt)), asked)
        return Forced(*(np.asarray(array)[:count] for array in found))


def reported(result: Result) -> np.ndarray:
    """float64 [N, 1 + TOP]: what the engine said of the same ids."""
    return np.array(
        [[entry.logprob, *(logprob for _, logprob, _ in entry.top)] for entry in result.logprobs], np.float64
    )


@dataclasses.dataclass(frozen=True)
class Distance:
    """|delta logprob| over rows and output positions: the tokens' own, and those of all reported ids."""

    positions: int
    mean: float
    p99: float
    max: float
    top_mean: float
    top_p99: float
    top_max: float

    @classmethod
    def between(cls, found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> Distance:
        """Of arrays [N, 1 + TOP], one a row: column 0 holds the token, the others the reported ids."""
        delta = np.abs(np.concatenate(found).astype(np.float64) - np.concatenate(wanted).astype(np.float64))
        own, top = delta[:, 0], delta[:, 1:]
        if not np.isfinite(delta).all():
            return cls(len(delta), *[float("nan")] * 6)
        return cls(
            len(delta),
            *(float(f(part)) for part in (own, top) for f in (np.mean, lambda x: np.quantile(x, 0.99), np.max)),
        )


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two greedy answers part: the row, the position in the output, and the judge's top-two margin there."""

    name: str
    position: int
    margin: float

    def __str__(self) -> str:
        return f"{self.name} at token {self.position} (margin {self.margin:.3g})"


def first_differences(
    found: Mapping[str, Result], other: Mapping[str, Result], judged: Mapping[str, Forced]
) -> list[Difference]:
    """Where answers of the same greedy requests first differ.

    Args:
        found: answers that were judged.
        other: answers of some of the same requests.
        judged: what the judge made of ``found``; up to the first difference the prefix is the same.
    """
    differences = []
    for name, result in other.items():
        want = found[name].tokens
        if result.tokens == want:
            continue
        same = [a == b for a, b in zip(result.tokens, want, strict=False)]
        position = same.index(False) if False in same else len(same)
        margin = float(judged[name].margins[position]) if position < len(want) else float("inf")
        differences.append(Difference(name, position, margin))
    return differences
