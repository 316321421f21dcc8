"""The device sampler against a plain numpy one, and the promises that no oracle shows."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax import sampling
from qwen35_jax.sampling import SampleOutput, SamplerState
from qwen35_jax.sampling_params import SamplingParams, SamplingParamsError
from tests.oracle import sampler as oracle

EOS = (7, 11)

# One shape for nearly every test, since a compile takes longer than all of its steps.
ROWS, VOCAB, NUM_VALID = 80, 1024, 1000

_sample = jax.jit(sampling.sample, static_argnames=("variant", "num_valid", "max_logprobs"))
_admit = jax.jit(sampling.admit)
_record_prompt = jax.jit(sampling.record_prompt)


@dataclasses.dataclass
class Batch:
    """Requests in slots 1, 2, ... of a state, and how to step some of them.

    Steps are padded to ``ROWS`` rows with NaN logits in the null slot, unless ``pad`` is off.
    """

    state: SamplerState
    params: list[SamplingParams]
    num_valid: int

    @property
    def slots(self) -> np.ndarray:
        return np.arange(1, len(self.params) + 1, dtype=np.int32)

    def step(self, logits, slots=None, active=None, variant="full", pad=True) -> SampleOutput:
        slots = self.slots if slots is None else np.asarray(slots, np.int32)
        active = slots > 0 if active is None else np.asarray(active)
        logits = np.asarray(logits, np.float32)
        rows, missing = len(slots), ROWS - len(slots) if pad else 0
        output, self.state = _sample(
            self.state,
            np.pad(logits, ((0, missing), (0, 0)), constant_values=np.nan),
            np.pad(slots, (0, missing)),
            np.pad(active, (0, missing)),
            variant=variant,
            num_valid=self.num_valid,
        )
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:rows], output)


def key_of(index: int) -> tuple[int, int]:
    return sampling.request_key(3, index, 0)


def make_batch(params, prompts=None, *, vocab=VOCAB, num_valid=NUM_VALID, eos=EOS) -> Batch:
    state = sampling.init_state(ROWS + 1, vocab)
    rows = np.zeros((ROWS, sampling.ROW_WORDS), np.int32)
    rows[: len(params)] = [sampling.row_words(p, key_of(i), eos) for i, p in enumerate(params)]
    slots = np.arange(1, len(params) + 1, dtype=np.int32)
    padded = np.pad(slots, (0, ROWS - len(slots)))
    state = _admit(state, padded, rows, np.ones(ROWS, bool))
    if prompts:
        tokens = np.concatenate([np.asarray(p, np.int32) for p in prompts])
        owners = np.repeat(slots, [len(p) for p in prompts])
        missing = -len(tokens) % 4096
        state = _record_prompt(state, np.pad(tokens, (0, missing)), np.pad(owners, (0, missing)))
    return Batch(state, list(params), num_valid)


def oracle_row(index: int, params: SamplingParams, prompt=(), eos=EOS) -> oracle.Row:
    return oracle.Row(
        key=key_of(index),
        temperature=0.0 if params.greedy else params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        min_tokens=params.min_tokens,
        stop_ids=(() if params.ignore_eos else eos) + tuple(params.stop_token_ids),
        prompt=tuple(prompt),
    )


def option_mix() -> list[SamplingParams]:
    """Rows that reach every path: candidates, whole vocabulary, full sort, greedy; with and without penalties."""
    cuts = [
        {},
        {"top_k": 1},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 256},
        {"top_k": 257},
        {"top_k": 600, "top_p": 0.7},
        {"top_k": 10_000},
        {"top_p": 0.5},
        {"top_p": 0.9999},
        {"top_p": 1e-9},
        {"min_p": 0.05},
        {"min_p": 0.9},
        {"min_p": 1.0},
        {"min_p": 0.01, "top_p": 0.9},
        {"min_p": 0.02, "top_k": 50, "top_p": 0.95},
        {"min_p": 1e-5, "top_p": 0.999},
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 4, "top_p": 0.3, "min_p": 0.2},
    ]
    penalties = [
        {},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "temperature": 0.6},
        {"presence_penalty": -2.0, "repetition_penalty": 0.5, "min_tokens": 3, "stop_token_ids": (0, 1, 2, 3, 5)},
    ]
    return [SamplingParams(**({"temperature": 1.3} | p | c)) for c, p in itertools.product(cuts, penalties)]


def mixed_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Flat, ordinary and peaked rows."""
    spread = np.array([0.05, 1.0, 4.0])[np.arange(rows) % 3]
    return (rng.normal(size=(rows, vocab)) * spread[:, None]).astype(np.float32)


@pytest.mark.parametrize(("vocab", "num_valid"), [(VOCAB, NUM_VALID), (200, 190)])
def test_tokens_equal_the_oracle(vocab, num_valid):
    rng = np.random.default_rng(1)
    params = option_mix()
    prompts = [rng.integers(0, num_valid, size=30).tolist() for _ in params]
    batch = make_batch(params, prompts, vocab=vocab, num_valid=num_valid)
    rows = [oracle_row(i, p, prompt) for i, (p, prompt) in enumerate(zip(params, prompts, strict=True))]
    unclear, beyond_list, whole = 0, 0, 0
    for _ in range(5):
        logits = mixed_logits(rng, len(params), vocab)
        logits[:, num_valid:] = 50.0  # the padded vocabulary would win everywhere
        tokens = batch.step(logits).tokens
        for index, row in enumerate(rows):
            want = oracle.sample(row, logits[index], num_valid)
            ordered = row.top_k > 0 or row.top_p < 1
            beyond_list += ordered and want.place >= sampling.MAX_CANDIDATES
            whole += not ordered and want.kept == num_valid
            if want.clear:
                assert tokens[index] == want.token, (index, params[index], want)
            unclear += not want.clear
            row.output.append(int(tokens[index]))
    assert unclear <= 3
    assert whole > 10
    assert (beyond_list > 10) == (vocab > sampling.MAX_CANDIDATES)  # only the full sort can have found these
    np.testing.assert_array_equal(np.asarray(batch.state.generated)[: len(rows) + 1], [0] + [5] * len(params))
    records = np.asarray(batch.state.records)
    for index, row in enumerate(rows):
        counts = np.bincount(row.output, minlength=vocab)
        np.testing.assert_array_equal(records[index + 1] & 0x7FFF, counts)
        np.testing.assert_array_equal(np.flatnonzero(records[index + 1] & 0x8000), np.unique(row.prompt))
    assert not records[0].any()


@pytest.mark.parametrize(("vocab", "num_valid"), [(VOCAB, NUM_VALID), (16, 13)])
def test_logprobs_and_ranks_are_those_of_the_unmodified_logits(vocab, num_valid):
    rng = np.random.default_rng(2)
    params = option_mix()
    params = [dataclasses.replace(p, stop_token_ids=(), min_tokens=0) for p in params]
    batch = make_batch(params, [[3, 4, 5]] * len(params), vocab=vocab, num_valid=num_valid)
    logits = np.round(mixed_logits(rng, len(params), vocab), 1)  # many exact ties, between 0.0 and -0.0 too
    logits[:, num_valid:] = 30.0
    for _ in range(2):
        out = batch.step(logits)
    for index in range(len(params)):
        want = oracle.logprobs(logits[index], num_valid)
        order = np.lexsort((np.arange(vocab), -want))
        token = out.tokens[index]
        assert token < num_valid
        assert out.logprob[index] == pytest.approx(want[token], abs=1e-5)
        assert out.rank[index] == 1 + np.flatnonzero(order == token)[0]
        assert out.top_ids[index].shape == out.top_logprobs[index].shape == (20,)
        shown = min(20, num_valid)
        np.testing.assert_array_equal(out.top_ids[index][:shown], order[:shown])
        np.testing.assert_allclose(out.top_logprobs[index][:shown], want[order[:shown]], atol=1e-5)
        assert np.all(np.isneginf(out.top_logprobs[index][shown:]))
    assert out.finite.all()


def test_a_row_does_not_depend_on_its_company():
    """Alone, reversed, between pads, with neighbours that need other paths: the same bits."""
    rng = np.random.default_rng(3)
    params = option_mix()
    logits = mixed_logits(rng, len(params), VOCAB)
    prompts = [[1, 2, 3]] * len(params)
    together = make_batch(params, prompts).step(logits)

    mirrored = make_batch(params, prompts)
    backwards = mirrored.step(logits[::-1], mirrored.slots[::-1])
    for name in SampleOutput._fields:
        np.testing.assert_array_equal(getattr(backwards, name)[::-1], getattr(together, name), err_msg=name)

    for start in range(3):  # a third of them, pads between
        chosen = np.arange(start, len(params), 3)
        slots = np.zeros(3 * len(chosen), np.int32)
        slots[1::3] = chosen + 1
        between = np.full((len(slots), VOCAB), np.nan)
        between[1::3] = logits[chosen]
        out = make_batch(params, prompts).step(between, slots)
        for name in SampleOutput._fields:
            np.testing.assert_array_equal(getattr(out, name)[1::3], getattr(together, name)[chosen], err_msg=name)
        assert not out.tokens[::3].any() and out.finite.all()

    alone = make_batch(params, prompts)
    for index in range(len(params)):  # another program: logprobs may differ in the last bit, tokens may not
        out = alone.step(logits[index : index + 1], [index + 1], pad=False)
        assert out.tokens[0] == together.tokens[index], params[index]
        assert out.logprob[0] == pytest.approx(together.logprob[index], abs=1e-6)
        np.testing.assert_array_equal(out.top_ids[0], together.top_ids[index])


def test_inactive_rows_change_nothing():
    params = [SamplingParams(presence_penalty=1.0), SamplingParams(temperature=0)]
    batch = make_batch(params)
    before = jax.tree.map(np.asarray, batch.state)
    logits = np.random.default_rng(0).normal(size=(3, VOCAB))
    out = batch.step(logits, slots=[1, 2, 0], active=[False, True, True])
    after = jax.tree.map(np.asarray, batch.state)
    np.testing.assert_array_equal(after.generated[:3], [0, 0, 1])
    np.testing.assert_array_equal(after.records[:2], before.records[:2])
    assert after.records[2].sum() == 1
    assert out.tokens[0] == 0 and out.tokens[2] == 0
    for name in set(SamplerState._fields) - {"generated", "records"}:
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


def test_greedy_variant_gives_the_bits_of_the_full_one():
    rng = np.random.default_rng(4)
    params = [SamplingParams(temperature=0)] * 16
    assert not any(map(sampling.needs_full, params))
    logits = np.round(rng.normal(size=(16, VOCAB)) * 2, 1).astype(np.float32)  # ties
    logits[:, NUM_VALID:] = 100.0
    full, greedy = make_batch(params), make_batch(params)
    for _ in range(3):
        a, b = full.step(logits, variant="full"), greedy.step(logits, variant="greedy")
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.tokens, logits[:, :NUM_VALID].argmax(1))
        np.testing.assert_array_equal(a.finite, b.finite)
    np.testing.assert_array_equal(np.asarray(full.state.generated), np.asarray(greedy.state.generated))
    assert b.top_ids.shape == (16, 0) and b.top_logprobs.shape == (16, 0)
    assert not b.logprob.any() and not b.rank.any()


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ({"temperature": 0}, False),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop_token_ids": [4]}, False),
        ({"temperature": 0, "logprobs": 0}, True),
        ({"temperature": 0, "presence_penalty": 0.1}, True),
        ({"temperature": 0, "frequency_penalty": -0.1}, True),
        ({"temperature": 0, "repetition_penalty": 1.1}, True),
        ({"temperature": 0, "min_tokens": 1}, True),
        ({"temperature": 0.5}, True),
    ],
)
def test_needs_full(given, full):
    assert sampling.needs_full(SamplingParams(**given)) is full


@pytest.mark.parametrize("variant", ["greedy", "full"])
def test_rows_with_non_finite_logits_are_flagged_alone(variant):
    params = [SamplingParams(temperature=0)] * 3 + [SamplingParams(), SamplingParams(top_p=0.9999)] * 3
    if variant == "greedy":
        params = [SamplingParams(temperature=0)] * 9
    clean = np.random.default_rng(5).normal(size=(9, VOCAB)).astype(np.float32)
    want = make_batch(params).step(clean, variant=variant)
    assert want.finite.all()
    dirty = clean.copy()
    dirty[1, 17] = np.nan
    dirty[3, 0] = np.inf
    dirty[4, :] = -np.inf
    dirty[5, NUM_VALID:] = np.nan  # padding does not count
    dirty[6, 1:300] = -np.inf  # some -inf is a mask, not a fault
    out = make_batch(params).step(dirty, variant=variant)
    np.testing.assert_array_equal(out.finite, [True, False, True, False, False, True, True, True, True])
    np.testing.assert_array_equal(out.tokens[[1, 3, 4]], 0)
    untouched = [0, 2, 5, 7, 8]
    for name in SampleOutput._fields:
        np.testing.assert_array_equal(getattr(out, name)[untouched], getattr(want, name)[untouched], err_msg=name)
    assert out.tokens[6] == 0 or out.tokens[6] >= 300
    assert np.isfinite(out.logprob).all()


def test_padded_vocabulary_is_never_sampled():
    params = [SamplingParams(temperature=100.0), SamplingParams(top_p=0.9999), SamplingParams(top_k=300)] * 26
    batch = make_batch(params)
    for _ in range(10):
        assert batch.step(np.zeros((len(params), VOCAB))).tokens.max() < NUM_VALID


def test_cut_offs_break_ties_by_id():
    params = [
        SamplingParams(top_k=3),
        SamplingParams(top_k=300),
        SamplingParams(top_p=0.0105),  # eleven of a thousand equal tokens
        SamplingParams(top_p=0.4005),
        SamplingParams(temperature=0),
    ] * 16
    limits = np.tile([3, 300, 11, 401, 1], 16)
    batch = make_batch(params)
    zeros = np.where(np.arange(VOCAB) % 2, -0.0, 0.0)  # equal values, whatever their sign
    drawn = np.stack([batch.step(np.tile(zeros, (80, 1))).tokens for _ in range(20)])
    assert np.all(drawn < limits)
    for kind in range(4):
        tokens = drawn[:, kind::5]
        assert tokens.max() >= 0.75 * limits[kind] - 1  # and the whole of the allowed range is used


def test_min_tokens_masks_eos_and_every_stop_token():
    stop = tuple(range(100, 162))  # with two EOS ids: 64
    params = [
        SamplingParams(temperature=0, min_tokens=2, stop_token_ids=stop),
        SamplingParams(temperature=0, min_tokens=2, ignore_eos=True, stop_token_ids=stop),
        SamplingParams(temperature=1.0, min_tokens=2, stop_token_ids=stop),
        SamplingParams(temperature=0, min_tokens=0, stop_token_ids=stop),
        SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(VOCAB + 5, 2**31 - 1)),  # ids beyond the logits
    ]
    logits = np.zeros((5, VOCAB), np.float32)
    logits[:, list(stop)] = 60.0
    logits[:, EOS[0]] = 70.0
    logits[:, 500] = 50.0
    batch = make_batch(params)
    tokens = [batch.step(logits).tokens.tolist() for _ in range(3)]
    assert tokens[0] == tokens[1] == [500, EOS[0], 500, EOS[0], 100]
    assert tokens[2] == [EOS[0], EOS[0], EOS[0], EOS[0], EOS[0]]


def test_min_tokens_over_the_whole_vocabulary_still_gives_a_real_token():
    params = [SamplingParams(temperature=t, min_tokens=5, stop_token_ids=range(13)) for t in (0.0, 1.0)]
    out = make_batch(params, vocab=16, num_valid=13).step(np.zeros((2, 16)))
    np.testing.assert_array_equal(out.tokens, 0)


def test_counts_saturate():
    batch = make_batch([SamplingParams(temperature=0, frequency_penalty=1e-9)], [[3]])
    full = np.asarray(batch.state.records).copy()
    full[1, 3] = 0x8000 | 0x7FFE
    batch.state = batch.state._replace(records=jnp.asarray(full))
    logits = np.zeros((1, VOCAB))
    logits[0, 3] = 10
    for want in (0xFFFF, 0xFFFF):
        batch.step(logits)
        assert np.asarray(batch.state.records)[1, 3] == want
    assert np.asarray(batch.state.records).astype(int).sum() == 0xFFFF


def test_admit_clears_a_recycled_slot_and_leaves_others_alone():
    params = [SamplingParams(temperature=0, presence_penalty=1.0)] * 3
    batch = make_batch(params, [[1], [2], [3]])
    logits = np.random.default_rng(6).normal(size=(3, VOCAB))
    batch.step(logits)
    before = jax.tree.map(np.asarray, batch.state)
    new = sampling.row_words(SamplingParams(top_k=9, seed=1), (5, 2**32 - 1), EOS)
    junk = np.full_like(new, -7)
    slots = np.array([2, 3, 0, 0], np.int32)
    fresh = np.array([True, False, True, False])
    after = jax.tree.map(np.asarray, _admit(batch.state, slots, np.stack([new, junk, junk, junk]), fresh))
    for other in (0, 1, 3):
        for name in SamplerState._fields:
            np.testing.assert_array_equal(getattr(after, name)[other], getattr(before, name)[other], err_msg=name)
    assert not after.records[2].any() and after.generated[2] == 0
    assert after.top_k[2] == 9 and after.temperature[2] == 1.0 and after.presence[2] == 0.0
    np.testing.assert_array_equal(after.key[2], [5, 2**32 - 1])
    np.testing.assert_array_equal(after.stop_ids[2], [*EOS] + [-1] * 62)


def test_record_prompt_over_several_chunks_with_pads():
    state = sampling.init_state(4, 32)
    state = _record_prompt(state, np.array([5, 5, 9, 0, 31], np.int32), np.array([1, 1, 3, 0, 0], np.int32))
    state = _record_prompt(state, np.array([5, 6, 9, 9, 0], np.int32), np.array([1, 1, 2, 2, 0], np.int32))
    records = np.asarray(state.records)
    want = np.zeros((4, 32), np.uint16)
    want[1, [5, 6]] = want[2, 9] = want[3, 9] = 0x8000
    np.testing.assert_array_equal(records, want)


@pytest.mark.parametrize(("vocab", "k"), [(4096, 256), (5001, 20), (320, 20), (1000, 256), (330, 1), (20, 20)])
def test_top_k_in_blocks_is_top_k(vocab, k):
    """Also where equal values and -inf lie on the border, and where blocks do not divide the vocabulary."""
    rng = np.random.default_rng(8)
    values = np.concatenate(
        [
            rng.normal(size=(4, vocab)),
            rng.integers(0, 3, size=(4, vocab)),
            np.zeros((1, vocab)),
            np.full((1, vocab), -np.inf),
            np.where(rng.random((4, vocab)) < 0.5 * k / vocab, rng.integers(0, 2, size=(4, vocab)), -np.inf),
            np.sort(rng.normal(size=(2, vocab))),
        ]
    ).astype(np.float32)
    best, ids = jax.jit(sampling._top_k, static_argnums=1)(values, k)
    order = np.lexsort((np.broadcast_to(np.arange(vocab), values.shape), -values))[:, :k]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(best, np.take_along_axis(values, order, axis=1))


@pytest.mark.parametrize(
    ("params", "spread"),
    [
        (SamplingParams(), 1.5),
        (SamplingParams(temperature=0.7, top_k=12), 1.5),
        (SamplingParams(top_p=0.999), 0.3),  # full sort
    ],
)
def test_draws_follow_the_distribution(params, spread):
    steps = 60
    logits = (np.random.default_rng(7).normal(size=NUM_VALID) * spread).astype(np.float32)
    scaled = logits.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    probs = np.exp(scaled - scaled.max())
    if params.top_k:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    probs[order[(np.cumsum(probs[order]) - probs[order]) >= params.top_p]] = 0
    probs /= probs.sum()
    batch = make_batch([params] * ROWS)
    tiled = np.tile(np.pad(logits, (0, VOCAB - NUM_VALID)), (ROWS, 1))
    drawn = np.concatenate([batch.step(tiled).tokens for _ in range(steps)])
    counts = np.bincount(drawn, minlength=NUM_VALID)
    expected = probs * len(drawn)
    assert counts[probs == 0].sum() == 0
    by_rank = np.argsort(-expected, kind="stable")
    cell = (np.cumsum(expected[by_rank]) // 15).astype(int)  # about fifteen draws a cell, rare tokens share one
    observed, wanted = np.bincount(cell, counts[by_rank]), np.bincount(cell, expected[by_rank])
    observed, wanted = observed[wanted >= 5], wanted[wanted >= 5]
    assert wanted.sum() > 0.99 * len(drawn)
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_noise_differs_by_step_row_and_seed_and_repeats():
    params = [SamplingParams()] * ROWS
    logits = np.zeros((ROWS, VOCAB))
    batch = make_batch(params)
    first, second = batch.step(logits).tokens, batch.step(logits).tokens
    assert np.mean(first == second) < 0.05
    assert len(np.unique(first)) > 65  # 80 draws of 1000 give about 77 different ones
    np.testing.assert_array_equal(make_batch(params).step(logits).tokens, first)


def test_request_key_is_pinned_and_tells_every_argument_apart():
    assert sampling.request_key(0, 0, 0) == sampling.request_key(0, 0, 0)
    assert sampling.request_key(0, 0, 0) == (1024790795, 2137679063)
    arguments = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, "0", 0), (0, "a", 0), (0, "a\n0", 0), (-1, 0, 0)]
    assert len({sampling.request_key(*a) for a in arguments}) == len(arguments)
    sampling.request_key(0, "\ud800", 0)  # a custom id may hold a lone surrogate
    assert all(0 <= word < 2**32 for word in sampling.request_key(2**64 - 1, "x", 5))


def test_row_words_counts_eos_into_the_limit():
    params = SamplingParams(stop_token_ids=list(range(100, 163)))
    assert sampling.row_words(params, (1, 2), [100]).shape == (sampling.ROW_WORDS,)
    with pytest.raises(SamplingParamsError, match="65 ids together with EOS"):
        sampling.row_words(params, (1, 2), [1, 2])
    ignoring = dataclasses.replace(params, ignore_eos=True)
    assert sampling.row_words(ignoring, (1, 2), [1, 2]).dtype == np.int32


def test_wrong_static_arguments_are_refused():
    state = sampling.init_state(2, 8)
    rest = (jnp.zeros((1, 8)), jnp.ones(1, jnp.int32), jnp.ones(1, bool))
    with pytest.raises(ValueError, match="variant"):
        sampling.sample(state, *rest, variant="beam", num_valid=8)
    with pytest.raises(ValueError, match="num_valid: 9"):
        sampling.sample(state, *rest, variant="full", num_valid=9)


def test_random_words_are_those_of_fold_in():
    words = np.array([[0, 0], [1, 2**32 - 1], key_of(0)], np.uint32)
    for value in (0, 1, 248_319):
        keys = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
        want = jax.random.key_data(jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, value))
        got = sampling._threefry(jnp.asarray(words), jnp.zeros(3, jnp.uint32), jnp.full(3, value, jnp.uint32))
        np.testing.assert_array_equal(got, want)
        numpy_words = [oracle.threefry(tuple(key), (np.zeros(1, np.uint32), np.array([value]))) for key in words]
        np.testing.assert_array_equal(np.asarray(numpy_words)[..., 0], want)


def test_no_option_compiles_anything_new():
    logits = np.zeros((1, VOCAB))
    make_batch([SamplingParams()]).step(logits)
    before = _sample._cache_size(), _admit._cache_size()
    for params in option_mix()[::7]:
        batch = make_batch([params])
        for _ in range(2):  # the state that comes out fits the program that it went into
            batch.step(logits)
    assert (_sample._cache_size(), _admit._cache_size()) == before
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(batch.state))


@pytest.mark.parametrize("program", ["full", "greedy", "admit", "record_prompt"])
def test_records_stay_in_place(program):
    """Neither a copy of the records nor a temporary of their size, in the optimised program."""
    slots, vocab, rows = 257, 2048, 4
    state = jax.eval_shape(lambda: sampling.init_state(slots, vocab))

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    flags = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32)
    full = functools.partial(sampling.sample, variant="full", num_valid=vocab)
    greedy = functools.partial(sampling.sample, variant="greedy", num_valid=vocab)
    function, arguments = {
        "full": (full, (logits, ints(rows), flags)),
        "greedy": (greedy, (logits, ints(rows), flags)),
        "admit": (sampling.admit, (ints(rows), ints(rows, sampling.ROW_WORDS), flags)),
        "record_prompt": (sampling.record_prompt, (ints(64), ints(64))),
    }[program]
    compiled = jax.jit(function, donate_argnums=0).lower(state, *arguments).compile()
    records = slots * vocab * 2
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= records
    assert memory.temp_size_in_bytes < records / 2
    shape = rf"u16\[{slots},{vocab}\]"
    assert not re.findall(rf"= {shape}\S* (?:copy|select|broadcast|add)\(.*", compiled.as_text())
