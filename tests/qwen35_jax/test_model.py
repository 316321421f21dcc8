"""The decoder as a whole: against the fp64 oracle layer by layer, and against itself however a step is composed."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.registry import UnknownImplementation, all_ops
from qwen35_jax.cache import Cache
from qwen35_jax.config import AttentionConfig, GatedDeltaNetConfig, ModelConfig
from qwen35_jax.layers import linear
from qwen35_jax.model import DecodeInputs, ForwardOutput, PrefillInputs, Qwen35
from qwen35_jax.params import ParamPack
from tests.oracle import tiny
from tests.oracle.qwen35_numpy import Oracle

PAGE = 64
NUM_PAGES, NUM_SLOTS, WIDTH = 16, 8, 3
# One bucket serves most tests: T prefill tokens of R requests and B decode rows.
TOKENS, REQUESTS, ROWS = 96, 4, 3
# Programs that run a few times: the optimiser of the CPU backend would cost more than it saves.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


# --- a host that packs steps ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sequence:
    """A sequence with its own slot and pages; ``length`` tokens are in the cache."""

    tokens: np.ndarray
    slot: int
    pages: tuple[int, ...]
    length: int = 0


def prefill_inputs(chunks, tokens: int = TOKENS, requests: int = REQUESTS, garbage: int = 0) -> PrefillInputs:
    """Packs ``chunks``, a list of (sequence or None for an absent request, token count), and advances them.

    ``garbage`` is the token id of padding: nothing may depend on it.
    """
    chunks = [*chunks, *[(None, 0)] * (requests - len(chunks))]
    out = {
        "tokens": np.full(tokens, garbage, np.int32),
        "positions": np.zeros(tokens, np.int32),
        "page_ids": np.zeros(tokens, np.int32),
        "page_offsets": np.zeros(tokens, np.int32),
        "cu_seqlens": np.cumsum([0, *(count for _, count in chunks)]).astype(np.int32),
        "slot_ids": np.zeros(requests, np.int32),
        "has_state": np.zeros(requests, bool),
        "page_table": np.zeros((requests, WIDTH), np.int32),
        "kv_lens": np.zeros(requests, np.int32),
    }
    for row, (sequence, count) in enumerate(chunks):
        if sequence is None:
            continue
        place = slice(out["cu_seqlens"][row], out["cu_seqlens"][row + 1])
        positions = sequence.length + np.arange(count)
        out["tokens"][place] = sequence.tokens[positions]
        out["positions"][place] = positions
        out["page_ids"][place] = np.asarray(sequence.pages)[positions // PAGE]
        out["page_offsets"][place] = positions % PAGE
        out["slot_ids"][row] = sequence.slot
        out["has_state"][row] = sequence.length > 0
        out["page_table"][row, : len(sequence.pages)] = sequence.pages
        out["kv_lens"][row] = sequence.length + count
        sequence.length += count
    return PrefillInputs(**{name: jnp.asarray(value) for name, value in out.items()})


def decode_inputs(sequences, rows: int = ROWS, garbage: int = 0) -> DecodeInputs:
    """One next token of each of ``sequences`` (None for a row of padding), which are advanced."""
    sequences = [*sequences, *[None] * (rows - len(sequences))]
    out = {name: np.zeros(rows, np.int32) for name in DecodeInputs._fields}
    out["tokens"][:] = garbage
    out["page_table"] = np.zeros((rows, WIDTH), np.int32)
    for row, sequence in enumerate(sequences):
        if sequence is None:
            continue
        position = sequence.length
        out["tokens"][row] = sequence.tokens[position]
        out["positions"][row] = position
        out["page_ids"][row] = sequence.pages[position // PAGE]
        out["page_offsets"][row] = position % PAGE
        out["slot_ids"][row] = sequence.slot
        out["page_table"][row, : len(sequence.pages)] = sequence.pages
        out["kv_lens"][row] = position + 1
        sequence.length += 1
    return DecodeInputs(**{name: jnp.asarray(value) for name, value in out.items()})


def cache_specs(config: ModelConfig, dtype="float32", pages: int = NUM_PAGES, slots: int = NUM_SLOTS) -> Cache:
    attention, gdn = config.attention, config.gdn
    kv = (config.num_attention_layers, pages, 2, attention.num_kv_heads, PAGE, attention.head_dim)
    state = (config.num_gdn_layers, slots, gdn.num_v_heads, gdn.head_v_dim, gdn.head_k_dim)
    return Cache(
        kv=jax.ShapeDtypeStruct(kv, dtype),
        conv=jax.ShapeDtypeStruct((config.num_gdn_layers, slots, 3, gdn.conv_dim), dtype),
        state=jax.ShapeDtypeStruct(state, "float32"),
    )


def poisoned_cache(config: ModelConfig) -> Cache:
    """All pages and slots hold NaN, the null ones included: whatever reads them by mistake shows."""
    return jax.tree.map(lambda spec: jnp.full(spec.shape, jnp.nan, spec.dtype), cache_specs(config))


# --- models -----------------------------------------------------------------------------------------------------------


def model_config(case: str) -> ModelConfig:
    text = tiny.text_config(case)
    return ModelConfig(
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        vocab_size=text["vocab_size"],
        layer_types=tuple(text["layer_types"]),
        attention=AttentionConfig(text["num_attention_heads"], text["num_key_value_heads"]),
        gdn=GatedDeltaNetConfig(text["linear_num_key_heads"], text["linear_num_value_heads"]),
        tie_word_embeddings=text["tie_word_embeddings"],
        dtype="float32",
    )


def fused_parameter(config: ModelConfig, tensors: dict[str, np.ndarray], path: str) -> np.ndarray:
    """The parameter ``path`` out of Hugging Face tensors: the fused layouts written down a second time."""
    root = {"embed": "embed_tokens.weight", "final_norm": "norm.weight"}
    if path in root:
        return tensors[tiny.PREFIX + root[path]]
    if path == "lm_head":
        return tensors["lm_head.weight"].T
    layer, name = path.removeprefix("layers.").split(".", 1)

    def get(suffix: str) -> np.ndarray:
        return tensors[f"{tiny.PREFIX}layers.{layer}.{suffix}"]

    attention = config.attention
    if name == "mixer.in_proj":
        return np.concatenate([get(f"linear_attn.in_proj_{part}.weight").T for part in ("qkv", "z", "b", "a")], axis=1)
    if name == "mixer.qkv_proj":
        q_and_gate = get("self_attn.q_proj.weight").reshape(attention.num_heads, 2, attention.head_dim, -1)
        q, gate = (q_and_gate[:, i].reshape(-1, config.hidden_size).T for i in (0, 1))
        return np.concatenate([q, gate, get("self_attn.k_proj.weight").T, get("self_attn.v_proj.weight").T], axis=1)
    if name == "mlp.gate_up":
        return np.concatenate([get("mlp.gate_proj.weight").T, get("mlp.up_proj.weight").T], axis=1)
    if name == "mixer.conv_weight":
        return get("linear_attn.conv1d.weight")[:, 0].T
    plain = {
        "input_norm": "input_layernorm.weight",
        "post_norm": "post_attention_layernorm.weight",
        "mlp.down": "mlp.down_proj.weight",
        "mixer.o_proj": "self_attn.o_proj.weight",
        "mixer.q_norm": "self_attn.q_norm.weight",
        "mixer.k_norm": "self_attn.k_norm.weight",
        "mixer.A_log": "linear_attn.A_log",
        "mixer.dt_bias": "linear_attn.dt_bias",
        "mixer.norm": "linear_attn.norm.weight",
        "mixer.out_proj": "linear_attn.out_proj.weight",
    }
    return get(plain[name]).T


class Runner:
    """A tiny model in fp32 with one jitted step, which compiles once for every combination of input shapes."""

    def __init__(self, case: str):
        self.case = case
        self.config = model_config(case)
        self.tensors = tiny.weights(case)
        self.pack = ParamPack(self.config)
        self.params = self.pack.assemble(lambda path: fused_parameter(self.config, self.tensors, path))

        @functools.partial(jax.jit, donate_argnums=3, compiler_options=COMPILER_OPTIONS)
        def step(params, prefill, decode, cache) -> tuple[ForwardOutput, list[jax.Array]]:
            model = self.pack.unpack(params)
            out = model.forward(prefill, decode, cache, layer_outputs=True)
            hiddens = (out.prefill_hidden, out.decode_hidden, out.prefill_all_hidden)
            return out, [None if hidden is None else model.logits(hidden) for hidden in hiddens]

        self._step = step

    def step(self, prefill, decode, cache):
        """Runs a step; returns the output and the logits of (last prefill tokens, decode rows, all prefill tokens)."""
        return self._step(self.params, prefill, decode, cache)

    @functools.cached_property
    def forward(self) -> Callable[..., ForwardOutput]:
        """A step as the engine runs it: (prefill, decode, cache) -> output, without layer outputs."""

        @functools.partial(jax.jit, donate_argnums=3, compiler_options=COMPILER_OPTIONS)
        def forward(params, prefill, decode, cache) -> ForwardOutput:
            return self.pack.unpack(params).forward(prefill, decode, cache)

        return functools.partial(forward, self.params)

    def sequence(self, length: int, slot: int, *pages: int, seed: int = 0) -> Sequence:
        return Sequence(tiny.token_ids(self.case, length, seed=seed), slot, pages)

    def oracle(self, sequence: Sequence):
        return Oracle(tiny.hf_config(self.case), self.tensors).forward(sequence.tokens)


@functools.cache
def runner(case: str) -> Runner:
    return Runner(case)


@pytest.fixture(scope="module")
def rig() -> Runner:
    """The model of the tests that need only one: two layers of each kind, two value heads a key head."""
    return runner("4b-untied")


def assert_close(got, want, what=""):
    """fp32 accuracy for values of order one."""
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4, err_msg=what)


def empty_prefill() -> PrefillInputs:
    return prefill_inputs([])


def empty_decode() -> DecodeInputs:
    return decode_inputs([])


# --- against the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["0.8b-tied", "4b-untied", "27b-tied"])  # value heads 1x, 2x, 3x the key heads
def test_every_layer_matches_the_oracle(case):
    rig = runner(case)
    sequences = [rig.sequence(72, 5, 9, 2), rig.sequence(5, 1, 4), rig.sequence(19, 3, 7)]
    oracles = [rig.oracle(sequence) for sequence in sequences]
    cache = poisoned_cache(rig.config)
    layers = [np.full_like(oracle.layer_outputs, np.nan) for oracle in oracles]
    logits = [np.full_like(oracle.logits, np.nan) for oracle in oracles]

    def run(chunks, rows):
        nonlocal cache
        before = [sequence.length for sequence in sequences]
        prefill = prefill_inputs([(None if i is None else sequences[i], count) for i, count in chunks])
        decode = decode_inputs([None if i is None else sequences[i] for i in rows])
        out, (last_logits, row_logits, all_logits) = rig.step(prefill, decode, cache)
        cache = out.cache
        places = [
            (i, before[i], slice(*prefill.cu_seqlens[r : r + 2])) for r, (i, _) in enumerate(chunks) if i is not None
        ]
        places += [(i, before[i], slice(TOKENS + r, TOKENS + r + 1)) for r, i in enumerate(rows) if i is not None]
        step_logits = np.concatenate([all_logits, row_logits])
        for i, start, place in places:
            positions = slice(start, start + place.stop - place.start)
            layers[i][:, positions] = np.stack(out.layer_outputs)[:, place]
            logits[i][positions] = step_logits[place]
        for r, (i, count) in enumerate(chunks):
            if count:  # the head of the engine sees the last token only
                assert_close(last_logits[r], logits[i][sequences[i].length - 1])

    run([(0, 61), (None, 0), (1, 3), (2, 17)], [])  # packed, an absent request between them, 15 tokens of padding
    run([], [1, None, 2])  # rows in another order, padding between them
    run([(0, 6)], [2, 1])  # a second chunk (no multiple of anything) beside decode rows
    run([(0, 4)], [])
    run([], [0])
    assert [sequence.length for sequence in sequences] == [72, 5, 19]
    for sequence_layers, sequence_logits, oracle in zip(layers, logits, oracles, strict=True):
        for index, (got, want) in enumerate(zip(sequence_layers, oracle.layer_outputs, strict=True)):
            assert_close(got, want, f"layer {index}")
        assert_close(sequence_logits, oracle.logits, "logits")


# --- against itself ---------------------------------------------------------------------------------------------------


def prefilled(rig: Runner, cache: Cache, chunks, **bucket) -> tuple[np.ndarray, Cache]:
    """Logits of each chunk's last token, prefill only."""
    out, (logits, _, _) = rig.step(prefill_inputs(chunks, **bucket), None, cache)
    return np.asarray(logits[: len(chunks)]), out.cache


def decoded(rig: Runner, cache: Cache, sequences, **bucket) -> tuple[np.ndarray, Cache]:
    out, (_, logits, _) = rig.step(None, decode_inputs(sequences, **bucket), cache)
    return np.asarray(logits[: len(sequences)]), out.cache


def test_packed_equals_alone_in_any_company_and_bucket(rig):
    lengths = (40, 1, 17)

    def sequences():
        return [
            rig.sequence(n + 1, slot, page, seed=slot)
            for slot, (n, page) in enumerate(zip(lengths, (3, 8, 5), strict=True), 1)
        ]

    first, second, third = sequences()
    packed, cache = prefilled(rig, poisoned_cache(rig.config), [(first, 40), (second, 1), (third, 17)])
    packed_next, _ = decoded(rig, cache, [first, second, third])
    order = [2, 0, 1]
    shuffled = sequences()
    reversed_, cache = prefilled(
        rig, poisoned_cache(rig.config), [(shuffled[i], lengths[i]) for i in order], tokens=128, requests=3
    )
    reversed_next, _ = decoded(rig, cache, [shuffled[i] for i in order], rows=5)
    assert_close(reversed_, packed[order])
    assert_close(reversed_next, packed_next[order])
    for i, sequence in enumerate(sequences()):
        alone, cache = prefilled(rig, poisoned_cache(rig.config), [(None, 0), (sequence, lengths[i])])
        assert_close(alone[1], packed[i])
        alone_next, _ = decoded(rig, cache, [None, sequence])
        assert_close(alone_next[1], packed_next[i])


@pytest.mark.parametrize("chunks", [(64, 26), (1, 2, 87), (3, 86, 1), (65, 25)])
def test_chunked_equals_one_shot(rig, chunks):
    whole, parts = rig.sequence(91, 2, 6, 11), rig.sequence(91, 2, 6, 11)
    want, cache = prefilled(rig, poisoned_cache(rig.config), [(whole, 90)])
    want_next, _ = decoded(rig, cache, [whole])
    cache = poisoned_cache(rig.config)
    for count in chunks:
        got, cache = prefilled(rig, cache, [(parts, count)])
    assert_close(got, want)
    assert_close(decoded(rig, cache, [parts])[0], want_next)


def test_decoding_a_prompt_equals_prefilling_it(rig):
    whole, rows = rig.sequence(9, 2, 6), rig.sequence(9, 2, 6)
    want, _ = prefilled(rig, poisoned_cache(rig.config), [(whole, 9)])
    _, cache = prefilled(rig, poisoned_cache(rig.config), [(rows, 1)])
    for _ in range(8):
        got, cache = decoded(rig, cache, [rows])
    assert_close(got, want)


def test_unified_equals_separate_programs(rig):
    def sequences():
        return rig.sequence(90, 1, 3, 4), rig.sequence(12, 2, 5), rig.sequence(33, 3, 6)

    long, short, other = sequences()
    _, cache = prefilled(rig, poisoned_cache(rig.config), [(short, 10), (other, 30), (long, 40)])
    chunk, cache = prefilled(rig, cache, [(long, 49)])
    row, cache = decoded(rig, cache, [short, other])
    last, _ = decoded(rig, cache, [long, short])

    long, short, other = sequences()
    _, cache = prefilled(rig, poisoned_cache(rig.config), [(short, 10), (other, 30), (long, 40)])
    out, (unified_chunk, unified_row, _) = rig.step(prefill_inputs([(long, 49)]), decode_inputs([short, other]), cache)
    assert_close(unified_chunk[:1], chunk)
    assert_close(unified_row[:2], row)
    assert_close(decoded(rig, out.cache, [long, short])[0], last)


def test_recycled_slot_and_pages_equal_fresh_ones(rig):
    fresh = rig.sequence(21, 4, 7, seed=3)
    want, cache = prefilled(rig, poisoned_cache(rig.config), [(fresh, 20)])
    want_next, _ = decoded(rig, cache, [fresh])

    old = rig.sequence(70, 4, 7, 8, seed=1)
    _, cache = prefilled(rig, poisoned_cache(rig.config), [(old, 69)])
    _, cache = decoded(rig, cache, [old])
    recycled = rig.sequence(21, 4, 7, seed=3)
    got, cache = prefilled(rig, cache, [(recycled, 20)])
    assert_close(got, want)
    got_next, cache = decoded(rig, cache, [recycled])
    assert_close(got_next, want_next)

    one_token = rig.sequence(2, 4, 7, seed=5)  # a first chunk of a single token must not read the old state either
    got, _ = prefilled(rig, cache, [(one_token, 1)])
    want, _ = prefilled(rig, poisoned_cache(rig.config), [(rig.sequence(2, 4, 7, seed=5), 1)])
    assert_close(got, want)


def test_padding_changes_nothing_and_other_slots_and_pages_stay_bit_identical(rig):
    rng = np.random.default_rng(0)

    def start() -> Cache:
        return jax.tree.map(
            lambda spec: jnp.asarray(rng.standard_normal(spec.shape), spec.dtype), cache_specs(rig.config)
        )

    rng_state = rng.bit_generator.state
    before = jax.tree.map(np.array, start())
    results = []
    for garbage in (0, 77):
        rng.bit_generator.state = rng_state
        chunk = rig.sequence(30, 2, 6)
        row = dataclasses.replace(rig.sequence(30, 4, 9), length=10)
        prefill = prefill_inputs([(None, 0), (chunk, 30)], garbage=garbage)
        out, logits = rig.step(prefill, decode_inputs([None, row], garbage=garbage), start())
        results.append(jax.tree.map(np.array, (out, logits)))
        after = results[-1][0].cache
        for slot in (1, 3, 5, 6, 7):
            np.testing.assert_array_equal(after.state[:, slot], before.state[:, slot])
            np.testing.assert_array_equal(after.conv[:, slot], before.conv[:, slot])
        for slot in (2, 4):
            assert (after.state[:, slot] != before.state[:, slot]).any()
        for page in set(range(1, NUM_PAGES)) - {6, 9}:
            np.testing.assert_array_equal(after.kv[:, page], before.kv[:, page])
        np.testing.assert_array_equal(after.kv[:, 9, :, :, :10], before.kv[:, 9, :, :, :10])
        np.testing.assert_array_equal(after.kv[:, 9, :, :, 11:], before.kv[:, 9, :, :, 11:])
        np.testing.assert_array_equal(after.kv[:, 6, :, :, 30:], before.kv[:, 6, :, :, 30:])
        assert (after.kv[:, 9, :, :, 10] != before.kv[:, 9, :, :, 10]).all()
    (out, (last, row, _)), (other, (other_last, other_row, _)) = results
    np.testing.assert_array_equal(last, other_last)
    np.testing.assert_array_equal(row[1], other_row[1])
    for part, other_part in zip(out.cache, other.cache, strict=True):
        np.testing.assert_array_equal(part[:, 1:], other_part[:, 1:])


def test_absent_requests_get_zeros_and_padding_rows_finite_numbers(rig):
    sequence = rig.sequence(5, 2, 6)
    out, _ = rig.step(prefill_inputs([(None, 0), (sequence, 5)]), empty_decode(), poisoned_cache(rig.config))
    assert np.abs(out.prefill_hidden[1]).max() > 0.1
    np.testing.assert_array_equal(out.prefill_hidden[np.array([0, 2, 3])], 0)
    assert np.isfinite(out.decode_hidden).all()
    assert all(np.isfinite(layer).all() for layer in out.layer_outputs)


@pytest.mark.parametrize("case", ["0.8b-tied", "4b-untied"])  # the last layer is one of attention, of Gated DeltaNet
def test_the_last_layer_is_computed_only_for_what_the_head_needs(case):
    """Hidden states and pools are those of a step that computes every token."""
    rig = runner(case)
    running, first, second = rig.sequence(80, 4, 7, 3), rig.sequence(72, 5, 9, 2), rig.sequence(5, 1, 4)
    cache = rig.step(prefill_inputs([(running, 12)]), empty_decode(), poisoned_cache(rig.config))[0].cache
    steps = (  # a first chunk of several, one behind the first page, and one without prompts
        (prefill_inputs([(None, 0), (first, 66), (second, 5)]), decode_inputs([None, running])),
        (prefill_inputs([(first, 4), (None, 0)]), decode_inputs([])),
        (prefill_inputs([]), decode_inputs([running, first])),
    )
    for prefill, decode in steps:
        want, _ = rig.step(prefill, decode, jax.tree.map(jnp.copy, cache))
        got = rig.forward(prefill, decode, cache)
        live = np.asarray(decode.slot_ids) != 0
        np.testing.assert_array_equal(np.any(got.prefill_hidden, axis=1), np.diff(prefill.cu_seqlens) > 0)
        assert_close(got.prefill_hidden, want.prefill_hidden)
        assert_close(got.decode_hidden[live], want.decode_hidden[live])
        for name, pool, wanted in zip(Cache._fields, got.cache, want.cache, strict=True):
            assert_close(pool[:, 1:], wanted[:, 1:], name)
        cache = got.cache


def test_padding_tokens_pass_through_the_mixers_as_zeros(rig):
    """A token of padding keeps its embedding plus what the MLPs add: nothing comes from the pools or neighbours."""
    out, _ = rig.step(empty_prefill(), empty_decode(), poisoned_cache(rig.config))
    rows = np.asarray(out.layer_outputs[-1])
    np.testing.assert_allclose(rows, np.broadcast_to(rows[:1], rows.shape), atol=1e-5)


# --- the program ------------------------------------------------------------------------------------------------------


def abstract_inputs(tokens: int = TOKENS, requests: int = REQUESTS, rows: int = ROWS):
    return jax.eval_shape(lambda: (prefill_inputs([], tokens, requests), decode_inputs([], rows)))


def forward_with(config: ModelConfig, kernels: str = "auto"):
    pack = ParamPack(config, kernels=kernels)

    def step(params, prefill, decode, cache):
        model = pack.unpack(params)
        out = model.forward(prefill, decode, cache)
        hidden = [hidden for hidden in (out.prefill_hidden, out.decode_hidden) if hidden is not None]
        return out.cache, model.logits(jnp.concatenate(hidden))

    return step, pack.leaf_specs


LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        *((kind, (LINEAR, FULL, LINEAR)) for kind in ("prefill", "decode", "unified")),
        *((kind, (FULL, LINEAR, FULL)) for kind in ("prefill", "unified")),  # the last layer writes keys twice
    ],
)
def test_donated_pools_are_updated_in_place(kind, kinds):
    config = dataclasses.replace(model_config("4b-untied"), layer_types=kinds)
    # Pools far larger than anything a step computes; they exist as shapes only.
    pools = cache_specs(config, pages=5000, slots=2000)
    prefill, decode = abstract_inputs()
    step, params = forward_with(config)
    inputs = (None if kind == "decode" else prefill, None if kind == "prefill" else decode)
    compiled = jax.jit(step, donate_argnums=3).lower(params, *inputs, pools).compile()
    sizes = [math.prod(pool.shape) * jnp.dtype(pool.dtype).itemsize for pool in pools]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(sizes)
    assert memory.temp_size_in_bytes < min(sizes) / 2
    shapes = ["f32[" + ",".join(map(str, pool.shape)) + "]" for pool in pools]
    for line in compiled.as_text().splitlines():
        result = re.match(r"\s*(ROOT )?%?\S+ = (\S+) (copy|copy-start|select|convert|transpose)\(", line)
        assert not (result and any(result[2].startswith(shape) for shape in shapes)), line


def test_layers_share_one_trace_of_every_kernel():
    config = model_config("27b-tied")
    prefill, decode = abstract_inputs()
    step, params = forward_with(config)
    jaxpr = jax.make_jaxpr(step)(params, prefill, decode, cache_specs(config))
    traces: dict[str, list] = {}
    for eqn in jaxpr.eqns:
        scope = str(eqn.source_info.name_stack)
        ops = {f"_{op.name}" for op in all_ops()}  # each behind a jit of its own
        if eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] in ops and "layer_" in scope:
            shapes = tuple(str(aval) for aval in eqn.params["jaxpr"].in_avals)
            traces.setdefault(str(shapes), []).append(id(eqn.params["jaxpr"]))
    calls = sorted((len(ids), len(set(ids))) for ids in traces.values())
    # Three GDN layers call causal_conv, gdn_prefill, gated_rms_norm and gdn_decode. The attention layer is the last: it
    # writes keys of all tokens, then keys and queries of the last ones, and these attend. Each of the four has two
    # norms, of which the very first adds nothing, and an MLP's first product; the last norm and product are of the last
    # tokens alone.
    assert calls == [(1, 1)] * 5 + [(3, 1)] * 5 + [(6, 1)]


@pytest.mark.parametrize("op", [op.name for op in all_ops()])
def test_each_op_can_be_chosen_alone(op):
    """A choice for one op reaches that op: a name that it does not have is refused where it is called."""
    prefill, decode = abstract_inputs()
    config = model_config("4b-untied")  # layers of both kinds before the last one
    step, params = forward_with(config, kernels=f"{op}=nonsense")
    with pytest.raises(UnknownImplementation, match=f"{op}: unknown implementation 'nonsense'"):
        jax.eval_shape(step, params, prefill, decode, cache_specs(config))


def test_profile_scopes_name_the_parts():
    config = model_config("0.8b-tied")
    prefill, decode = abstract_inputs()
    step, params = forward_with(config)
    jaxpr = jax.make_jaxpr(step)(params, prefill, decode, cache_specs(config))
    scopes = {str(eqn.source_info.name_stack) for eqn in jaxpr.eqns}
    for part in ("embed", "layer_0/gated_delta_net", "layer_3/attention", "layer_3/mlp", "final_norm", "lm_head"):
        assert any(scope.startswith(part) for scope in scopes), part


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_of_a_step(dtype):
    config = dataclasses.replace(model_config("4b-untied"), dtype=dtype)
    prefill, decode = abstract_inputs()
    pack, cache = ParamPack(config), cache_specs(config, dtype)

    def step(params):
        model = pack.unpack(params)
        out = model.forward(
            prefill_inputs([]), decode_inputs([]), jax.tree.map(jnp.zeros_like, cache), layer_outputs=True
        )
        return out, model.logits(out.decode_hidden)

    out, logits = jax.eval_shape(step, pack.leaf_specs)
    assert (out.prefill_hidden.shape, out.prefill_hidden.dtype) == ((REQUESTS, config.hidden_size), dtype)
    assert (out.decode_hidden.shape, out.decode_hidden.dtype) == ((ROWS, config.hidden_size), dtype)
    assert {(x.shape, x.dtype.name) for x in out.layer_outputs} == {((TOKENS + ROWS, config.hidden_size), dtype)}
    assert out.prefill_all_hidden.shape == (TOKENS, config.hidden_size)
    assert (logits.shape, logits.dtype) == ((ROWS, config.vocab_size), jnp.float32)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out.cache) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)


def test_extras_and_absent_parts_are_none():
    config = model_config("0.8b-tied")
    prefill, decode = abstract_inputs()
    pack, cache = ParamPack(config), cache_specs(config)

    def step(params, prefill, decode, cache):
        return pack.unpack(params).forward(prefill, decode, cache)

    out = jax.eval_shape(step, pack.leaf_specs, prefill, None, cache)
    assert out.decode_hidden is None and out.layer_outputs is None and out.prefill_all_hidden is None
    assert jax.eval_shape(step, pack.leaf_specs, None, decode, cache).prefill_hidden is None
    with pytest.raises(ValueError, match="both are None"):
        jax.eval_shape(step, pack.leaf_specs, None, None, cache)


def test_mixture_of_experts_is_refused_by_name():
    from qwen35_jax.config import MoeConfig

    config = dataclasses.replace(model_config("4b-untied"), moe=MoeConfig(8, 2, 64, 64))
    with pytest.raises(ValueError, match="mixture-of-experts"):
        nnx.eval_shape(lambda: Qwen35(config))


def test_named_kernel_implementation_reaches_every_op():
    config = model_config("4b-untied")
    prefill, decode = abstract_inputs()
    pack = ParamPack(config, kernels="no-such-kernel")

    def step(params, prefill, decode, cache):
        return pack.unpack(params).forward(prefill, decode, cache)

    with pytest.raises(ValueError, match="no-such-kernel"):
        jax.eval_shape(step, pack.leaf_specs, prefill, decode, cache_specs(config))


def test_a_decode_step_with_products_in_parts_equals_one_without(rig, monkeypatch):
    """Real sizes leave the last product of mixer and MLP to the norm behind it; here the inner dimensions are small."""

    def answers(model: Runner):
        results = []
        for run in (lambda *inputs: model.step(*inputs)[0], model.forward):  # with layer outputs and as the engine does
            rows = [rig.sequence(10, 2 + n, 5 + n, seed=n) for n in range(2)]
            _, cache = prefilled(model, poisoned_cache(rig.config), [(row, 9) for row in rows])
            out = run(None, decode_inputs(rows), cache)
            results += [out.decode_hidden[:2], out.cache.state[:, 2:4]]
        return results

    want, seen, plain = answers(rig), [], linear.parts_of
    monkeypatch.setattr(linear, "LEAST_INNER", (64, 64))
    monkeypatch.setattr(linear, "parts_of", lambda *shape: seen.append(plain(*shape)) or seen[-1])
    for one, other in zip(answers(Runner(rig.case)), want, strict=True):
        assert_close(one, other)
    assert max(seen) > 1
