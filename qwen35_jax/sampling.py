"""Sampling on the device: the struct-of-arrays twin of SamplingParams and the sampler itself.

Every slot of the engine has a row in :class:`SamplerState`. :func:`admit` writes the row of a new request,
:func:`record_prompt` notes its prompt tokens, :func:`sample` turns logits into tokens and counts them. All three are
pure functions for use inside a jitted program that owns (donates) the state; ``records``, the only large leaf, is
read by gathers and changed by scatters, so that it stays in place.

Order of operations, all in fp32: penalties (repetition over prompt and output, presence and frequency over output),
min_tokens masking, temperature, min_p, top_k, top_p. Cut-offs rank tokens by (value descending, id ascending).
A row is greedy (first token in that order) when its temperature is 0; otherwise the token is the argmax of
``scaled logit + Gumbel noise`` over the kept tokens. The noise of a token is a function of (key of the row, number of
tokens generated so far, token id) alone: neither other rows nor the batch shape nor the path taken can change it.

Three paths find the token of a sampled row, and which one serves is decided by the row itself:

- **candidates**: the best 256 tokens by ``lax.top_k`` hold everything that the cut-offs keep (any top_k <= 256, and
  almost every top_p or min_p).
- **whole vocabulary**: no top_k and no top_p: only min_p can drop tokens, which needs no order.
- **full sort**: cut-offs that reach beyond the candidates, for example top_p = 0.9999 on flat logits.

The last two run under ``lax.cond``, only when a row needs them; a row that did not need them never takes its
token from there. A full sort of a 248k vocabulary would otherwise dominate the step of small batches.

Reported logprobs are the log-softmax of the *unmodified* logits over real ids; ranks are on the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qwen35_jax.sampling_params import GREEDY_BELOW, MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams, SamplingParamsError

MAX_CANDIDATES = 256
"""Length K of the candidate list."""

_SORT_BLOCK = 8  # rows sorted at once by the full-sort path

_SEEN_IN_PROMPT = 0x8000
_COUNT_MASK = 0x7FFF

# Columns of a row as int32 words; floats and the key are bit casts.
_FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_STOP_COLUMN = len(_FLOAT_FIELDS) + 4  # after top_k, min_tokens and the two words of the key
ROW_WORDS = _STOP_COLUMN + MAX_STOP_IDS
"""int32 words of one request's row, see :func:`row_words`."""

Variant = Literal["greedy", "full"]


class SamplerState(NamedTuple):
    """Sampling state of every slot; slot 0 is the null slot and keeps its initial values.

    Attributes:
        temperature: ``f32[S]``, 0 is greedy.
        top_p: ``f32[S]``, 1 is off.
        min_p: ``f32[S]``, 0 is off.
        presence: ``f32[S]`` presence penalty.
        frequency: ``f32[S]`` frequency penalty.
        repetition: ``f32[S]`` repetition penalty, 1 is off.
        top_k: ``i32[S]``, 0 is off.
        min_tokens: ``i32[S]``.
        key: ``u32[S, 2]`` Threefry key of the request.
        stop_ids: ``i32[S, 64]`` ids that min_tokens masks, padded with -1.
        generated: ``i32[S]`` tokens generated so far.
        records: ``u16[S, V]``: bit 15: the token is in the prompt; bits 0 to 14: times it is in the output
            (saturating). Only :func:`sample` with variant "full" counts.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    top_k: jax.Array
    min_tokens: jax.Array
    key: jax.Array
    stop_ids: jax.Array
    generated: jax.Array
    records: jax.Array


class SampleOutput(NamedTuple):
    """Result of :func:`sample`; rows that are not active hold zeros and ``finite`` True.

    Attributes:
        tokens: ``i32[B]``, always a real id.
        logprob: ``f32[B]`` of the token (variant "greedy": zeros).
        rank: ``i32[B]`` of the token, 1 is the most probable (variant "greedy": zeros).
        top_ids: ``i32[B, 20]`` most probable ids in order (variant "greedy": ``[B, 0]``).
        top_logprobs: ``f32[B, 20]`` of these; -inf beyond the real vocabulary (variant "greedy": ``[B, 0]``).
        finite: ``bool[B]``: False where the logits of a real id are NaN or +inf, or all of them are -inf. The row's
            other values are then meaningless, though valid.
    """

    tokens: jax.Array
    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    finite: jax.Array


def request_key(seed: int, rng_id: str | int, sample_index: int) -> tuple[int, int]:
    """Threefry key of one sample of one request: the same in every process, different for every argument.

    Args:
        seed: the request's seed, or the engine's.
        rng_id: stable identity of the prompt (index in the call, digest of a custom id), never a batch position.
        sample_index: number of the sample of this prompt.
    """
    kind = "s" if isinstance(rng_id, str) else "i"
    text = f"{int(seed)}\n{int(sample_index)}\n{kind}{rng_id}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def needs_full(params: SamplingParams) -> bool:
    """Whether a request needs the "full" variant of :func:`sample`, for as long as it lives.

    True for everything but plain greedy decoding: sampling, logprobs, penalties and min_tokens. The "greedy" variant
    gives a request for which this is False exactly the tokens of the "full" one, and keeps no counts of tokens.
    """
    return (
        not params.greedy
        or params.logprobs is not None
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_tokens > 0
    )


def row_words(params: SamplingParams, key: tuple[int, int], eos_ids: Sequence[int]) -> np.ndarray:
    """One request's row for :func:`admit`: ``int32[ROW_WORDS]``.

    Args:
        params: the request's options.
        key: from :func:`request_key`.
        eos_ids: EOS ids of the model; left out of the stop ids when ``params.ignore_eos``.

    Raises:
        SamplingParamsError: EOS and stop_token_ids together are more than 64 ids.
    """
    stop_ids = tuple(dict.fromkeys((() if params.ignore_eos else tuple(eos_ids)) + tuple(params.stop_token_ids)))
    if len(stop_ids) > MAX_STOP_IDS:
        raise SamplingParamsError(
            "stop_token_ids", f"{len(stop_ids)} ids together with EOS; at most {MAX_STOP_IDS} are possible"
        )
    floats = np.asarray(
        [
            0.0 if params.greedy else params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        ],
        np.float32,
    )
    row = np.full(ROW_WORDS, -1, np.int32)
    row[: len(floats)] = floats.view(np.int32)
    row[len(floats)] = params.top_k
    row[len(floats) + 1] = params.min_tokens
    row[len(floats) + 2 : _STOP_COLUMN] = np.asarray(key, np.uint32).view(np.int32)
    row[_STOP_COLUMN : _STOP_COLUMN + len(stop_ids)] = stop_ids
    return row


def init_state(num_slots: int, vocab: int) -> SamplerState:
    """State of ``num_slots`` slots (null slot included) that are all greedy; ``vocab`` is the width of the logits."""

    def filled(value: float, dtype: type) -> jax.Array:
        return jnp.full((num_slots,), value, dtype)

    return SamplerState(
        temperature=filled(0.0, jnp.float32),
        top_p=filled(1.0, jnp.float32),
        min_p=filled(0.0, jnp.float32),
        presence=filled(0.0, jnp.float32),
        frequency=filled(0.0, jnp.float32),
        repetition=filled(1.0, jnp.float32),
        top_k=filled(0, jnp.int32),
        min_tokens=filled(0, jnp.int32),
        key=jnp.zeros((num_slots, 2), jnp.uint32),
        stop_ids=jnp.full((num_slots, MAX_STOP_IDS), -1, jnp.int32),
        generated=filled(0, jnp.int32),
        records=jnp.zeros((num_slots, vocab), jnp.uint16),
    )


def admit(state: SamplerState, slot_ids: jax.Array, rows: jax.Array, fresh: jax.Array) -> SamplerState:
    """Write the rows of new requests and clear what their slots remember.

    Args:
        state: the state; donate it.
        slot_ids: ``i32[R]`` distinct slots; 0 marks absent rows.
        rows: ``i32[R, ROW_WORDS]`` from :func:`row_words`.
        fresh: ``bool[R]``: only these are written. A request is fresh in its first chunk, later chunks leave its row
            alone whatever ``rows`` holds.
    """
    # Rows that write nothing aim past the end, each at a place of its own, and are dropped: slot 0 stays as it was and
    # the indices are unique, which lets the scatter do without atomics.
    num_slots = state.generated.shape[0]
    beyond = num_slots + jnp.arange(slot_ids.shape[0], dtype=jnp.int32)
    target = jnp.where(fresh & (slot_ids > 0), slot_ids, beyond)

    def put(leaf: jax.Array, values: jax.Array) -> jax.Array:
        return leaf.at[target].set(values.astype(leaf.dtype), mode="drop", unique_indices=True)

    columns = {
        name: lax.bitcast_convert_type(rows[:, column], jnp.float32) for column, name in enumerate(_FLOAT_FIELDS)
    }
    first = len(_FLOAT_FIELDS)
    columns["top_k"] = rows[:, first]
    columns["min_tokens"] = rows[:, first + 1]
    columns["key"] = lax.bitcast_convert_type(rows[:, first + 2 : _STOP_COLUMN], jnp.uint32)
    columns["stop_ids"] = rows[:, _STOP_COLUMN:]
    columns["generated"] = jnp.zeros_like(target)
    columns["records"] = jnp.zeros((slot_ids.shape[0], state.records.shape[1]), jnp.uint16)
    return SamplerState(**{name: put(getattr(state, name), values) for name, values in columns.items()})


def record_prompt(state: SamplerState, tokens: jax.Array, token_slots: jax.Array) -> SamplerState:
    """Mark prompt tokens as seen: ``tokens i32[T]``, ``token_slots i32[T]`` (0 for pads, which write nothing)."""
    num_slots = state.records.shape[0]
    target = jnp.where(token_slots > 0, token_slots, num_slots)
    # A token that a chunk holds twice is read and written twice with the same value.
    marked = state.records[token_slots, tokens] | jnp.uint16(_SEEN_IN_PROMPT)
    return state._replace(records=state.records.at[target, tokens].set(marked, mode="drop"))


def sample(
    state: SamplerState,
    logits: jax.Array,
    slot_ids: jax.Array,
    active: jax.Array,
    *,
    variant: Variant,
    num_valid: int,
    max_logprobs: int = MAX_LOGPROBS,
) -> tuple[SampleOutput, SamplerState]:
    """Take one token a row and count it.

    Args:
        state: the state; donate it.
        logits: ``f32[B, V]``.
        slot_ids: ``i32[B]``, distinct where active; 0 marks padded rows.
        active: ``bool[B]``: rows that take a token now. Others (pads, prompts that are not complete yet) change
            nothing.
        variant: static. "greedy" serves rows for which :func:`needs_full` is False; "full" serves every row.
        num_valid: static; ids at and above it do not exist for sampling or logprobs.
        max_logprobs: static width of ``top_ids``.

    Returns:
        The output and the new state.

    Raises:
        ValueError: an unknown variant, or ``num_valid`` outside of 1 to V.
    """
    if variant not in ("greedy", "full"):
        raise ValueError(f"variant: expected 'greedy' or 'full', got {variant!r}")
    if not 1 <= num_valid <= logits.shape[1]:
        raise ValueError(f"num_valid: {num_valid} is not in 1..{logits.shape[1]}, the width of the logits")
    active = active & (slot_ids > 0)
    real = jnp.arange(logits.shape[1], dtype=jnp.int32) < num_valid
    raw = jnp.where(real, logits.astype(jnp.float32), -jnp.inf)  # [B, V]
    finite = ~jnp.any(jnp.isnan(raw) | (raw == jnp.inf), axis=1) & jnp.any(raw > -jnp.inf, axis=1)
    raw = jnp.where(real & ~finite[:, None], jnp.float32(0), raw)  # rows to fail stay harmless
    raw = _one_zero(raw)

    if variant == "greedy":
        rows = logits.shape[0]
        tokens = jnp.argmax(raw, axis=1).astype(jnp.int32)
        logprob, rank = jnp.zeros((rows,), jnp.float32), jnp.zeros((rows,), jnp.int32)
        top_ids, top_logprobs = jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows, 0), jnp.float32)
    else:
        adjusted = _adjusted_logits(state, raw, slot_ids)
        tokens = _choose(state, adjusted, slot_ids, num_valid)
        tokens = jnp.where(finite, tokens, 0)
        logprob, rank, top_ids, top_logprobs = _logprobs(raw, tokens, max_logprobs)

    tokens = jnp.where(active, tokens, 0)
    output = SampleOutput(
        tokens=tokens,
        logprob=jnp.where(active, logprob, 0),
        rank=jnp.where(active, rank, 0),
        top_ids=jnp.where(active[:, None], top_ids, 0),
        top_logprobs=jnp.where(active[:, None], top_logprobs, 0),
        finite=finite | ~active,
    )
    return output, _count(state, tokens, slot_ids, active, records=variant == "full")


def _one_zero(values: jax.Array) -> jax.Array:
    """-0.0 becomes 0.0: ``lax.top_k`` orders the two, comparisons do not, and equal values must tie everywhere."""
    return jnp.where(values == 0, jnp.float32(0), values)


def _count(
    state: SamplerState, tokens: jax.Array, slot_ids: jax.Array, active: jax.Array, *, records: bool
) -> SamplerState:
    """Add one generated token to every active row."""
    beyond = state.generated.shape[0] + jnp.arange(slot_ids.shape[0], dtype=jnp.int32)
    target = jnp.where(active, slot_ids, beyond)
    generated = state.generated.at[target].add(1, mode="drop", unique_indices=True)
    state = state._replace(generated=generated)
    if not records:
        return state
    old = state.records[slot_ids, tokens]
    new = jnp.where((old & _COUNT_MASK) == _COUNT_MASK, old, old + jnp.uint16(1))
    return state._replace(records=state.records.at[target, tokens].set(new, mode="drop", unique_indices=True))


def _adjusted_logits(state: SamplerState, raw: jax.Array, slot_ids: jax.Array) -> jax.Array:
    """Logits after penalties and the min_tokens mask, ``f32[B, V]``; neutral options leave the bits alone."""
    record = state.records[slot_ids]  # [B, V]
    count = (record & _COUNT_MASK).astype(jnp.float32)
    repetition = state.repetition[slot_ids][:, None]
    repeated = jnp.where(raw > 0, raw / repetition, raw * repetition)
    adjusted = jnp.where(record != 0, repeated, raw)
    adjusted = adjusted - state.frequency[slot_ids][:, None] * count
    adjusted = adjusted - jnp.where(count > 0, state.presence[slot_ids][:, None], 0)
    too_early = state.generated[slot_ids] < state.min_tokens[slot_ids]
    stop_ids = state.stop_ids[slot_ids]
    masked = jnp.where(too_early[:, None] & (stop_ids >= 0), stop_ids, raw.shape[1])  # past the end: dropped
    rows = jnp.arange(raw.shape[0], dtype=jnp.int32)[:, None]
    return adjusted.at[rows, masked].set(-jnp.inf, mode="drop")


def _choose(state: SamplerState, adjusted: jax.Array, slot_ids: jax.Array, num_valid: int) -> jax.Array:
    """Token of every row from its adjusted logits: ``i32[B]`` in ``[0, num_valid)``."""
    vocab = adjusted.shape[1]
    temperature = state.temperature[slot_ids]
    greedy = temperature < GREEDY_BELOW
    scaled = _one_zero(adjusted / jnp.where(greedy, jnp.float32(1), temperature)[:, None])
    top_p, min_p, top_k = state.top_p[slot_ids], state.min_p[slot_ids], state.top_k[slot_ids]
    top_k = jnp.where(top_k >= num_valid, 0, top_k)
    step = state.generated[slot_ids].astype(jnp.uint32)
    keys = _threefry(state.key[slot_ids], jnp.zeros_like(step), step)  # [B, 2]

    best = jnp.max(scaled, axis=1, keepdims=True)
    best = jnp.where(best > -jnp.inf, best, 0)  # every token masked: no cut-off makes sense, token 0 comes out
    floor = best + jnp.log(min_p)[:, None]  # -inf when min_p is off
    mass = jnp.sum(jnp.where(scaled >= floor, jnp.exp(scaled - best), 0), axis=1)  # what min_p leaves

    values, ids = _top_k(scaled, min(vocab, MAX_CANDIDATES))  # [B, K], ties in id order
    in_list = jnp.where(values >= floor, jnp.exp(values - best), 0)
    list_mass = jnp.sum(in_list, axis=1)
    complete = (values[:, -1:] < floor)[:, 0]  # min_p drops everything beyond the list
    covered = (top_k > 0) & (top_k <= values.shape[1])
    covered |= (top_k == 0) & (complete | ((top_p < 1) & (list_mass >= top_p * mass)))
    if vocab <= MAX_CANDIDATES:
        covered = jnp.ones_like(covered)
    limit_mass = jnp.where((top_k > 0) | complete, 0, mass)
    keep = _kept_in_order(in_list, top_k, top_p, limit_mass)
    tokens = _noisy_argmax(keys, jnp.where(keep, values, -jnp.inf), ids)

    if vocab > MAX_CANDIDATES:
        unordered = ~covered & (top_k == 0) & (top_p >= 1)
        by_noise = ~greedy & unordered
        by_sort = ~greedy & ~covered & ~unordered
        everything = jnp.arange(vocab, dtype=jnp.int32)[None]

        def noise_path(tokens: jax.Array, scaled: jax.Array) -> jax.Array:
            found = _noisy_argmax(keys, jnp.where(scaled >= floor, scaled, -jnp.inf), everything)
            return jnp.where(by_noise, found, tokens)

        def sort_path(tokens: jax.Array, scaled: jax.Array) -> jax.Array:
            return _sorted_rows(scaled, by_sort, tokens, keys, best, floor, top_k, top_p)

        def neither(tokens: jax.Array, scaled: jax.Array) -> jax.Array:
            return tokens

        tokens = lax.cond(jnp.any(by_noise), noise_path, neither, tokens, scaled)
        tokens = lax.cond(jnp.any(by_sort), sort_path, neither, tokens, scaled)

    tokens = jnp.where(greedy, jnp.argmax(adjusted, axis=1).astype(jnp.int32), tokens)
    return jnp.where(tokens < num_valid, tokens, 0)


def _sorted_rows(
    scaled: jax.Array,
    wanted: jax.Array,
    tokens: jax.Array,
    keys: jax.Array,
    best: jax.Array,
    floor: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """``tokens`` with the ``wanted`` rows replaced by samples over the whole ordered vocabulary.

    Takes only the rows that want it, a few at a time: time grows with their number, and the scratch of the sort (about
    ten times its input) stays that of a few rows.
    """
    rows, vocab = scaled.shape
    block = min(rows, _SORT_BLOCK)
    order = jnp.argsort(~wanted, stable=True).astype(jnp.int32)  # wanted rows first
    order = jnp.pad(order, (0, -rows % block), constant_values=rows)  # past the end: read clipped, written nowhere
    all_ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), (block, vocab))

    def sort_block(index: jax.Array, tokens: jax.Array) -> jax.Array:
        picked = lax.dynamic_slice_in_dim(order, index * block, block)

        def take(values: jax.Array) -> jax.Array:
            return values.at[picked].get(mode="clip")

        negated, ids = lax.sort((-take(scaled), all_ids), dimension=1, is_stable=True, num_keys=1)
        ordered = -negated
        weights = jnp.where(ordered >= take(floor), jnp.exp(ordered - take(best)), 0)
        keep = _kept_in_order(weights, take(top_k), take(top_p), jnp.zeros((block,), jnp.float32))
        found = _noisy_argmax(take(keys), jnp.where(keep, ordered, -jnp.inf), ids)
        return tokens.at[picked].set(jnp.where(take(wanted), found, take(tokens)), mode="drop")

    blocks = (jnp.sum(wanted, dtype=jnp.int32) + block - 1) // block
    return lax.fori_loop(0, blocks, sort_block, tokens)


def _top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """``lax.top_k`` along the last axis of ``f32[B, V]``, without NaN: values and ids ``[B, k]``, ties in id order.

    A long axis is split into blocks first. The k blocks with the largest maxima (ties: the earlier block) hold the
    whole result: k other elements, one a chosen block, are ahead of any element of a block that was not chosen. So
    lists of ``V / block`` and ``k * block`` elements are searched instead of one of V.

    XLA sorts the whole axis for ``lax.top_k`` instead, which takes more time and much more scratch.
    """
    rows, vocab = values.shape
    block = 1
    while 4 * block * block * k <= vocab:
        block *= 2
    if block < 4:
        best, ids = lax.top_k(values, k)
        return best, ids.astype(jnp.int32)
    if vocab % block:
        values = jnp.pad(values, ((0, 0), (0, -vocab % block)), constant_values=-jnp.inf)
    blocks = values.reshape(rows, -1, block)
    _, chosen = lax.top_k(jnp.max(blocks, axis=2), k)
    chosen = jnp.sort(chosen.astype(jnp.int32), axis=1)  # back in id order, for the ties
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, k * block)
    best, place = lax.top_k(candidates, k)
    ids = (
        jnp.take_along_axis(chosen, place.astype(jnp.int32) // block, axis=1) * block + place.astype(jnp.int32) % block
    )
    return best, ids


def _kept_in_order(weights: jax.Array, top_k: jax.Array, top_p: jax.Array, mass: jax.Array) -> jax.Array:
    """Which tokens top_k and then top_p keep, ``bool[B, K]``.

    Args:
        weights: ``f32[B, K]`` unnormalised probabilities in rank order, 0 for those that min_p dropped.
        top_k: ``i32[B]``, 0 is off.
        top_p: ``f32[B]``, 1 is off.
        mass: ``f32[B]`` what the weights are to be normalised by; 0 takes the sum of those that top_k keeps.
    """
    place = jnp.arange(weights.shape[1], dtype=jnp.int32)
    weights = jnp.where((top_k == 0)[:, None] | (place < top_k[:, None]), weights, 0)
    mass = jnp.where(mass > 0, mass, jnp.sum(weights, axis=1))
    before = jnp.cumsum(weights, axis=1) - weights
    nucleus = (top_p >= 1)[:, None] | (before < (top_p * mass)[:, None]) | (place == 0)
    return nucleus & (weights > 0)


def _threefry(key: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """Threefry-2x32 with 20 rounds: the bits of ``jax.random.fold_in(key, low)`` for ``high`` = 0.

    Written out because ``jax.random`` computes it in loops that do not fuse: for one word a token of the vocabulary
    that is slower on a CPU and takes longer to compile.

    Args:
        key: ``u32[..., 2]``.
        high: ``u32[...]`` first word of the counter, broadcast against the key.
        low: ``u32[...]`` second word.

    Returns:
        ``u32[..., 2]``.
    """
    schedule = (key[..., 0], key[..., 1], key[..., 0] ^ key[..., 1] ^ jnp.uint32(0x1BD11BDA))
    x, y = high + schedule[0], low + schedule[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return jnp.stack([x, y], axis=-1)


def _noisy_argmax(keys: jax.Array, values: jax.Array, ids: jax.Array) -> jax.Array:
    """Id with the largest ``value + Gumbel noise`` (the lowest of equal ones); -inf values never win.

    Args:
        keys: ``u32[B, 2]`` key of each row's step.
        values: ``f32[B, K]``.
        ids: ``i32[B, K]`` or ``i32[1, K]``; the noise belongs to the id, not to the place in the list.
    """
    low = ids.astype(jnp.uint32)
    word = _threefry(keys[:, None], jnp.zeros_like(low), low)[..., 0]
    # -log(1 - u) keeps fp32 resolution at small u, where the largest noise comes from.
    uniform = jnp.minimum((word.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), jnp.float32(1 - 2**-24))
    noisy = values - jnp.log(-jnp.log1p(-uniform))
    top = jnp.max(noisy, axis=1, keepdims=True)
    return jnp.min(jnp.where(noisy == top, ids, jnp.iinfo(jnp.int32).max), axis=1)


def _logprobs(
    raw: jax.Array, tokens: jax.Array, max_logprobs: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Logprob and rank of the tokens, and the best ``max_logprobs`` ids with theirs."""
    top_values, top_ids = _top_k(raw, min(max_logprobs, raw.shape[1]))
    best = jnp.max(raw, axis=1, keepdims=True)
    normaliser = best + jnp.log(jnp.sum(jnp.exp(raw - best), axis=1, keepdims=True))
    chosen = jnp.take_along_axis(raw, tokens[:, None], axis=1)
    ids = jnp.arange(raw.shape[1], dtype=jnp.int32)
    ahead = (raw > chosen) | ((raw == chosen) & (ids < tokens[:, None]))
    rank = 1 + jnp.sum(ahead, axis=1, dtype=jnp.int32)
    missing = ((0, 0), (0, max_logprobs - top_ids.shape[1]))  # a vocabulary smaller than the list
    top_ids = jnp.pad(top_ids, missing)
    top_logprobs = jnp.pad(top_values - normaliser, missing, constant_values=-jnp.inf)
    return (chosen - normaliser)[:, 0], rank, top_ids, top_logprobs
