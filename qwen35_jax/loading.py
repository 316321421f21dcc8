"""From a model directory and options to a warm engine: plan memory, load weights, compile, warm up."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from qwen35_jax import runtime
from qwen35_jax.cache import (
    MemoryPlan,
    MemoryPlanError,
    page_bytes,
    pages_for,
    plan_memory,
    sampler_row_bytes,
    slot_bytes,
    tree_bytes,
)
from qwen35_jax.checkpoint import load_model_params, read_model_config
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.engine import Engine
from qwen35_jax.errors import UserInputError
from qwen35_jax.params import FlatParams, ParamPack
from qwen35_jax.prefill_device import PrefillDevice
from qwen35_jax.program_store import SUBDIRECTORY, ProgramStore, open_store
from qwen35_jax.programs import CompileCounter, ProgramSet, init_device_state
from qwen35_jax.progress import ProgressFn, silent
from qwen35_jax.startup import StartReport
from qwen35_jax.steps import VARIANTS, DeviceState, ProgramKey, StepSpec, device_state_shapes
from qwen35_jax.transfer import in_transit_bytes, transfer_widths
from qwen35_jax.weights import random_params
from schedulers import BucketLadder, Scheduler, SchedulerConfig
from schedulers.buckets import requests_of

if TYPE_CHECKING:
    from qwen35_jax.text import Tokenizer

log = logging.getLogger(__name__)

_CPU_MODEL_LEN = 4096  # default context of the CPU backend
_DEVICE_OVERLAP_MODEL_LEN = 32768  # default context of `device` overlap: whole prompts are in transit, beside the pools
_LAUNCH_PROMPTS = 32  # most prompts of a launch in `device` overlap, so that what is in transit is bounded


def create_engine(
    model: str, *, progress: ProgressFn = silent, **options: Any
) -> tuple[Engine, ModelConfig, Tokenizer | None]:
    """Load a model directory and make it ready.

    Args:
        model: Hugging Face or converted (Orbax) directory.
        progress: told of every stage (loading, compiling, warming up).
        **options: fields of :class:`EngineConfig`.

    Returns:
        The engine, the model's configuration and the tokenizer (None with ``skip_tokenizer_init``).

    Raises:
        UserInputError: the directory or an option is wrong; the message names it.
        MemoryPlanError: it does not fit.
    """
    config = EngineConfig(**options).validate()
    _check_kernels(config.kernels)
    runtime.prepare(config.gpu_memory_utilization, config.compilation_cache_dir)
    model_config = read_model_config(model)
    tokenizer = None
    if not config.skip_tokenizer_init:
        from qwen35_jax.text import Tokenizer

        tokenizer = Tokenizer.from_dir(model)
        if tokenizer.vocab_limit > model_config.vocab_size:
            raise UserInputError(
                f"{model}: the tokenizer knows ids up to {tokenizer.vocab_limit - 1}, the model has "
                f"{model_config.vocab_size} vocabulary rows"
            )

    def load(device: jax.Device, dtype: jnp.dtype) -> FlatParams:
        if config.load_format == "random":
            return random_params(model_config, dtype=dtype, seed=config.seed, device=device)
        return load_model_params(model, model_config, dtype=dtype, device=device, progress=progress)

    eos = tuple(sorted({*model_config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}))
    num_valid = tokenizer.vocab_limit if tokenizer else model_config.vocab_size
    engine = build_engine(config, model_config, load, eos_ids=eos, num_valid=num_valid, progress=progress)
    return engine, model_config, tokenizer


def build_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    load: Any,
    *,
    eos_ids: Sequence[int],
    num_valid: int,
    progress: ProgressFn = silent,
    ladder: BucketLadder | None = None,
    choose: Callable[[BucketLadder], Sequence[ProgramKey]] | None = None,
) -> Engine:
    """Make an engine from configurations and a weight loader.

    Args:
        config: validated options.
        model_config: the model.
        load: ``load(device, dtype)`` gives the flat parameter tuple on that device.
        eos_ids: ids that end an output.
        num_valid: ids below this are real.
        progress: told of every stage.
        ladder: program shapes in place of the backend's default ladder.
        choose: the main device's programs, given the ladder, in place of all that it has: for measuring single steps,
            since a request that needs another program fails.

    Raises:
        UserInputError: an option does not fit this machine.
        MemoryPlanError: it does not fit.
    """
    say = getattr(progress, "message", log.info)
    warn = _warner(progress)
    devices = runtime.devices()
    overlap_device = config.decode_overlap == "device"
    if overlap_device and len(devices) < 2:
        raise UserInputError(
            f"decode_overlap='device' needs two devices, this process has {len(devices)} ({devices[0].device_kind})"
        )
    main, other = devices[0], devices[1] if overlap_device else None
    dtype = jnp.dtype(config.activation_dtype(model_config))
    state_dtype = jnp.dtype(config.state_dtype)
    pack = ParamPack(model_config, dtype=dtype, kernels=config.kernels)

    plan = _plan(config, model_config, pack, main, dtype, state_dtype)
    scheduler_config, ladder, staging = _sizes(config, model_config, plan, dtype, state_dtype, main.platform, ladder)
    if staging is not None and other is not None:
        limit = runtime.memory_limit(other, config.gpu_memory_utilization)
        # CPU devices share the host's memory: what the main one has planned is gone.
        _check_staging(plan, tree_bytes(staging), limit - plan.total if other.platform == "cpu" else limit)
    say(f"device: {main.device_kind}; dtype {dtype.name}, state {state_dtype.name}, kernels {config.kernels}")
    say(f"memory plan:\n{plan.describe()}")
    say(
        f"max_model_len {plan.max_model_len}, max_num_seqs {plan.num_seqs}, "
        f"max_num_batched_tokens {scheduler_config.max_num_batched_tokens}"
    )
    for warning in plan.warnings:
        warn(warning)
    say(ladder.describe())
    if choose is None:
        say("every shape is compiled in two sampler variants (greedy, full), before the first request")

    store = None
    if config.compilation_cache_dir:
        place = os.path.join(config.compilation_cache_dir, SUBDIRECTORY)
        store = open_store(place, warn)
    compiles = CompileCounter()
    spec = StepSpec(pack, num_valid)
    started = time.perf_counter()
    params = load(main, dtype)
    loaded = time.perf_counter()
    shapes = device_state_shapes(model_config, plan.num_pages, plan.num_seqs + 1, dtype, state_dtype)
    widths = transfer_widths(ladder.max_width)
    programs = ProgramSet(
        spec,
        main,
        params,
        shapes,
        _main_keys(config, ladder) if choose is None else tuple(choose(ladder)),
        merge_widths=widths if overlap_device else (),
        fill_width=min(16, widths[-1]),
    )
    compile_s = _compile(programs, progress, "compiling", store)
    scratch = programs.scratch_bytes()
    say(f"compiled programs take at most {scratch / 2**20:,.1f} MiB of scratch, {plan.workspace / 2**20:,.1f} planned")
    state, recompile_s = _warm_up(programs, progress, "compiling", store)
    compile_s += recompile_s
    num_programs, num_loaded = programs.number, programs.num_loaded
    prefill_device = None
    if other is not None and staging is not None:
        other_programs = ProgramSet(
            spec,
            other,
            jax.device_put(params, other),
            staging,
            tuple(ProgramKey("prefill", bucket, 1, variant) for bucket in ladder.prefill for variant in VARIANTS),
            extract_widths=widths,
            fill_width=min(16, widths[-1]),
        )
        stage = "compiling for the prefill device"
        compile_s += _compile(other_programs, progress, stage, store)
        staging_state, recompile_s = _warm_up(other_programs, progress, stage, store)
        compile_s += recompile_s
        num_programs += other_programs.number
        num_loaded += other_programs.num_loaded
        prefill_device = PrefillDevice(other_programs, staging_state, widths, poison=config.debug_poison)
    warm_up_s = time.perf_counter() - loaded - compile_s
    return Engine(
        config,
        Scheduler(scheduler_config, ladder),
        programs,
        state,
        eos_ids=eos_ids,
        num_valid=num_valid,
        prefill_device=prefill_device,
        compiles=compiles,
        start_report=StartReport(plan, scratch, loaded - started, compile_s, warm_up_s, num_programs, num_loaded),
    )


def _check_kernels(name: str) -> None:
    """An implementation that some op does not have is refused before anything is loaded."""
    try:
        registry.check_choice(name)
    except registry.UnknownImplementation as error:
        raise UserInputError(f"kernels={name!r}: {error}") from error


def _plan(
    config: EngineConfig,
    model_config: ModelConfig,
    pack: ParamPack,
    device: jax.Device,
    dtype: jnp.dtype,
    state_dtype: jnp.dtype,
) -> MemoryPlan:
    longest = model_config.max_position_embeddings
    if config.max_model_len is None:
        max_model_len = longest
        if config.decode_overlap == "device":
            max_model_len = min(max_model_len, _DEVICE_OVERLAP_MODEL_LEN)
        if device.platform == "cpu":
            max_model_len = min(max_model_len, _CPU_MODEL_LEN)
    elif config.max_model_len > longest:
        raise UserInputError(
            f"max_model_len={config.max_model_len} exceeds the model's max_position_embeddings={longest}"
        )
    else:
        max_model_len = config.max_model_len
    staging = 0
    if config.decode_overlap == "device":
        slots, pages = _staging_sizes(config, max_model_len, config.max_num_seqs)
        staging = in_transit_bytes(
            slots * (slot_bytes(model_config, dtype, state_dtype) + sampler_row_bytes(model_config)),
            pages * page_bytes(model_config, dtype),
        )
    # A program samples for its decode rows or its prompts, the unified one for both.
    sampled_rows = config.max_num_seqs
    if config.decode_overlap == "stream":
        sampled_rows += requests_of(config.max_num_batched_tokens, config.max_num_seqs)
    return plan_memory(
        model_config,
        limit=runtime.memory_limit(device, config.gpu_memory_utilization),
        dtype=dtype,
        state_dtype=state_dtype,
        weights=pack.num_bytes,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        max_model_len_is_default=config.max_model_len is None,
        max_num_batched_tokens=config.max_num_batched_tokens,
        sampled_rows=sampled_rows,
        num_kv_pages=config.num_kv_pages,
        staging=staging,
        platform="cpu" if device.platform == "cpu" else "gpu",
    )


def _staging_sizes(config: EngineConfig, max_model_len: int, max_num_seqs: int) -> tuple[int, int]:
    """Slots and pages that launches in flight may hold, the null ones not counted."""
    prompts = min(requests_of(config.max_num_batched_tokens, max_num_seqs), _LAUNCH_PROMPTS)
    # A launch holds at most one prompt of full length beside what its token budget covers.
    pages = pages_for(max_model_len) + pages_for(config.max_num_batched_tokens) + prompts
    return config.async_chunks * prompts, config.async_chunks * pages


def _sizes(
    config: EngineConfig,
    model_config: ModelConfig,
    plan: MemoryPlan,
    dtype: jnp.dtype,
    state_dtype: jnp.dtype,
    platform: str,
    ladder: BucketLadder | None,
) -> tuple[SchedulerConfig, BucketLadder, DeviceState | None]:
    """Scheduler limits, bucket ladder and (``device`` overlap) the shapes of the staging pool."""
    limits = SchedulerConfig(
        max_num_seqs=plan.num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        num_pages=plan.num_pages,
        num_slots=plan.num_seqs + 1,
        policy=config.scheduler_policy,
        decode_steps=config.decode_steps,
        overlap="off" if config.decode_overlap == "device" else config.decode_overlap,
    )
    if ladder is None:
        ladder = _default_ladder(limits, platform)
    if config.decode_overlap != "device":
        return limits, ladder, None
    slots, pages = _staging_sizes(config, plan.max_model_len, plan.num_seqs)
    staging_slots, staging_pages = slots + 1, pages + 1
    limits = dataclasses.replace(
        limits,
        overlap="device",
        max_chunks_in_flight=config.async_chunks,
        staging_slots=staging_slots,
        staging_pages=staging_pages,
    )
    return limits, ladder, device_state_shapes(model_config, staging_pages, staging_slots, dtype, state_dtype)


def _default_ladder(limits: SchedulerConfig, platform: str) -> BucketLadder:
    """Few programs on a CPU, where compiling is slow and the references read no more pages than are live."""
    if platform != "cpu":
        return limits.ladder("gpu")
    return BucketLadder.from_limits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        page_size=limits.page_size,
        unified=limits.overlap == "stream",
        preset="small",
        width_rungs=(),
    )


def _check_staging(plan: MemoryPlan, staging: int, limit: int) -> None:
    needed = plan.weights + staging + plan.workspace
    if needed > limit:
        raise MemoryPlanError(
            f"the prefill device needs {needed / 2**20:,.1f} MiB (weights, a staging pool of "
            f"{staging / 2**20:,.1f} MiB and workspace), {limit / 2**20:,.1f} MiB are there; lower max_model_len or "
            f"max_num_batched_tokens"
        )


def _main_keys(config: EngineConfig, ladder: BucketLadder) -> tuple[ProgramKey, ...]:
    """Every program the main device may be asked for, decode first."""
    keys = [
        ProgramKey("decode", bucket, steps, variant)
        for steps in sorted({1, config.decode_steps})
        for bucket in ladder.decode
        for variant in VARIANTS
    ]
    if config.decode_overlap != "device":
        keys += [ProgramKey("prefill", bucket, 1, variant) for bucket in ladder.prefill for variant in VARIANTS]
    if config.decode_overlap == "stream":
        keys += [ProgramKey("unified", bucket, 1, variant) for bucket in ladder.unified for variant in VARIANTS]
    return tuple(keys)


def _compile(programs: ProgramSet, progress: ProgressFn, stage: str, store: ProgramStore | None) -> float:
    """Load or compile everything and say so; returns the seconds it took."""
    started = time.perf_counter()
    progress(stage, 0, programs.number, "the first programs take longest")
    programs.compile(
        lambda done, total, note: progress(stage, done, total, note), threads=runtime.compile_threads(), store=store
    )
    seconds = time.perf_counter() - started
    log.info(
        "%s: all programs ready after %.1f s, %d of %d kept from an earlier start",
        stage,
        seconds,
        programs.num_loaded,
        programs.number,
    )
    return seconds


def _warner(progress: ProgressFn) -> Callable[[str], None]:
    """Says what a user must know: to the progress display that can, or to the log as a warning."""
    message = getattr(progress, "message", None)
    return log.warning if message is None else lambda text: message(f"warning: {text}")


def _warm_up(
    programs: ProgramSet, progress: ProgressFn, stage: str, store: ProgramStore | None
) -> tuple[DeviceState, float]:
    """Allocate the pools and run every program once; kept programs that fail are compiled anew.

    Returns:
        The pools, and the seconds that compiling anew took.
    """
    try:
        return programs.warm_up(init_device_state(programs.shapes, programs.device)), 0.0
    except Exception as error:
        if store is None or not programs.num_loaded or "RESOURCE_EXHAUSTED" in str(error):
            raise
        failure = str(error)
    # Only here is nothing left that holds the first pools.
    programs.discard_loaded(store, f"a program that was loaded failed at its first run: {failure}")
    seconds = _compile(programs, progress, stage, store)
    return programs.warm_up(init_device_state(programs.shapes, programs.device)), seconds
