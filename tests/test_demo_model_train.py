"""Training of the demo model: its differentiable pass against the engine's and the oracle's, resuming, export."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from qwen35_jax.cache import Cache
from qwen35_jax.config import AttentionConfig, GatedDeltaNetConfig, ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.model import PrefillInputs
from qwen35_jax.params import ParamPack
from qwen35_jax.presets import layer_pattern
from qwen35_jax.weights import load_params
from scripts.demo_model import architecture, checkpointing, curves, export, forward, sources, train, transport
from scripts.demo_model.delta_rule import gated_delta_rule, unit_lower_inverse
from scripts.demo_model.leg import Leg
from scripts.demo_model.settings import Settings
from tests.oracle.qwen35_numpy import Oracle

PAGE = 64


def tiny_config(**changes) -> ModelConfig:
    """Every part of the demo model, in a few thousand parameters."""
    config = ModelConfig(
        hidden_size=32,
        intermediate_size=48,
        vocab_size=64,
        layer_types=layer_pattern(4),
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=32, rotary_dim=8),
        gdn=GatedDeltaNetConfig(num_k_heads=1, num_v_heads=2, head_k_dim=16, head_v_dim=16),
        tie_word_embeddings=True,
        eos_token_ids=(1,),
        dtype="float32",
    )
    return dataclasses.replace(config, **changes)


def lively_params(pack: ParamPack, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights under which every part matters: first weights make all layers nearly silent."""
    rng = np.random.default_rng(seed)
    params = architecture.initial_params(pack, seed)
    decayed = architecture.decayed(pack)
    return {
        name: (value * 8 if decayed[name] else value + 0.1 * rng.standard_normal(value.shape)).astype(np.float32)
        for name, value in params.items()
    }


def segments_of(rows: list[list[int]]) -> np.ndarray:
    """Segment lengths of each row -> int32 [B, T]."""
    return np.stack([np.repeat(np.arange(len(lengths)), lengths) for lengths in rows]).astype(np.int32)


# --- the delta rule ---------------------------------------------------------------------------------------------------


def naive_rule(query, key, value, beta, decay, segments):
    """Token by token, for one row: the definition."""
    group = value.shape[1] // key.shape[1]
    query, key = (jnp.repeat(x, group, axis=1) for x in (query, key))
    starts = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])

    def step(state, token):
        query, key, value, beta, decay, start = token
        state = jnp.where(start, 0, jnp.exp(decay)[:, None, None] * state)
        delta = beta[:, None] * (value - jnp.einsum("hvk,hk->hv", state, key))
        state = state + delta[:, :, None] * key[:, None, :]
        return state, jnp.einsum("hvk,hk->hv", state, query)

    state = jnp.zeros((value.shape[1], value.shape[2], key.shape[2]), value.dtype)
    return jax.lax.scan(step, state, (query, key, value, beta, decay, starts))[1]


def rule_arguments(rng: np.random.Generator, length: int):
    rows, k_heads, v_heads, k_dim, v_dim = 2, 2, 4, 8, 6
    query, key = rng.standard_normal((2, rows, length, k_heads, k_dim))
    key[:, 40:60] = key[:, 40:41]  # neighbouring keys that repeat
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    value = rng.standard_normal((rows, length, v_heads, v_dim))
    beta = rng.uniform(0.02, 0.98, (rows, length, v_heads))
    decay = -(10.0 ** rng.uniform(-4, 1.0, (rows, length, v_heads)))  # from hardly any to complete
    decay[:, 40:60] = -1e-4
    return query, key, value, beta, decay


def test_delta_rule_and_its_gradients_match_the_recurrence():
    """In float64, so that nothing hides in rounding; segments start on chunk edges and inside chunks."""
    length = 150
    segments = segments_of([[64, 1, 2, 83], [30, 70, 50]])
    rng = np.random.default_rng(0)
    arguments = rule_arguments(rng, length)
    probe = rng.standard_normal(arguments[2].shape)

    with jax.enable_x64():

        def total(rule, *arguments):
            out = rule(*arguments)
            return jnp.sum(out * probe), out

        def naive(*arguments):
            return jax.vmap(naive_rule)(*arguments, segments)

        def chunked(*arguments):
            return gated_delta_rule(*arguments, jnp.asarray(segments))

        results = []
        for rule in (naive, chunked):
            compute = jax.jit(jax.value_and_grad(functools.partial(total, rule), argnums=range(5), has_aux=True))
            (_, out), gradients = compute(*map(jnp.asarray, arguments))
            results.append((out, *gradients))
    assert results[1][0].dtype == jnp.float64
    for name, want, got in zip(("out", "query", "key", "value", "beta", "decay"), *results, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * max(1, np.abs(want).max()), err_msg=name)


def test_inverse_keeps_its_accuracy_when_keys_repeat():
    """Equal keys, strong writes, no decay: where a Neumann product loses everything."""
    strict = np.tril(np.full((64, 64), 0.97), -1)
    got = unit_lower_inverse(jnp.asarray(strict, jnp.float32))
    want = np.linalg.inv(np.eye(64) + strict)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


# --- the whole model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rig():
    """A tiny model in float32, two rows of segments, and all their logits by the training pass."""
    config = tiny_config()
    pack = architecture.training_pack(config)
    params = lively_params(pack)
    lengths = [[70, 3, 57], [1, 64, 65]]
    segments = segments_of(lengths)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, segments.shape, dtype=np.int32)

    @jax.jit
    def logits(params, tokens, segments):
        model = pack.unpack(tuple(params[leaf.name] for leaf in pack.leaves))
        hidden = forward.hidden_states(model, tokens, segments)
        return model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, -1)

    return config, pack, params, lengths, segments, tokens, np.asarray(logits(params, tokens, segments)), logits


@functools.cache
def engine_step(config: ModelConfig):
    """Layout and compiled float32 prefill step of a model."""
    pack = architecture.training_pack(config)

    @jax.jit
    def step(flat, inputs, cache):
        model = pack.unpack(flat)
        return model.logits(model.forward(inputs, None, cache, layer_outputs=True).prefill_all_hidden)

    return pack, step


def inference_logits(config: ModelConfig, params, pieces: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of all tokens by the engine's own pass over poisoned pools: one packed prefill step."""
    pack, step = engine_step(dataclasses.replace(config, dtype="float32"))
    requests = len(pieces)
    tokens = np.concatenate(pieces)
    pages_of = [-(-len(piece) // PAGE) for piece in pieces]
    first_page = np.cumsum([1, *pages_of])
    table = np.zeros((requests, max(pages_of)), np.int32)
    for row, count in enumerate(pages_of):
        table[row, :count] = first_page[row] + np.arange(count)
    positions = np.concatenate([np.arange(len(piece)) for piece in pieces]).astype(np.int32)
    owners = np.repeat(np.arange(requests), [len(piece) for piece in pieces])
    attention, gdn = config.attention, config.gdn
    kv = (config.num_attention_layers, int(first_page[-1]), 2, attention.num_kv_heads, PAGE, attention.head_dim)
    cache = Cache(
        kv=jnp.full(kv, jnp.nan, pack.dtype),
        conv=jnp.full((config.num_gdn_layers, requests + 1, 3, gdn.conv_dim), jnp.nan, pack.dtype),
        state=jnp.full((config.num_gdn_layers, requests + 1, gdn.num_v_heads, gdn.head_v_dim, gdn.head_k_dim), jnp.nan),
    )
    inputs = PrefillInputs(
        tokens=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        page_ids=jnp.asarray(table[owners, positions // PAGE]),
        page_offsets=jnp.asarray(positions % PAGE),
        cu_seqlens=jnp.asarray(np.cumsum([0, *map(len, pieces)]), jnp.int32),
        slot_ids=jnp.arange(1, requests + 1, dtype=jnp.int32),
        has_state=jnp.zeros(requests, bool),
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray([len(piece) for piece in pieces], jnp.int32),
    )
    flat = tuple(jnp.asarray(params[leaf.name], leaf.spec.dtype) for leaf in pack.leaves)
    return np.split(np.asarray(step(flat, inputs, cache)), np.cumsum([len(piece) for piece in pieces])[:-1])


def pieces_of(array: np.ndarray, lengths: list[list[int]]) -> list[np.ndarray]:
    return [
        piece for row, of_row in zip(array, lengths, strict=True) for piece in np.split(row, np.cumsum(of_row)[:-1])
    ]


def test_equals_the_pass_of_the_engine(rig):
    config, _, params, lengths, _, tokens, logits, _ = rig
    wanted = inference_logits(config, params, pieces_of(tokens, lengths))
    assert np.std(np.concatenate(wanted)) > 0.5
    for want, got in zip(wanted, pieces_of(logits, lengths), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_segments_do_not_see_each_other(rig):
    *_, segments, tokens, logits, compute = rig
    others = tokens.copy()
    others[0, :70] = (others[0, :70] + 1) % 64
    others[0, 72:] = (others[0, 72:] + 1) % 64
    got = np.asarray(compute(rig[2], others, segments))
    # Decays of a chunk are summed from its first token on, whichever segment that is of: the last bits may differ.
    np.testing.assert_allclose(got[0, 70:72], logits[0, 70:72], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(got[1], logits[1])
    assert np.abs(got[0, 72] - logits[0, 72]).max() > 0.1


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_loss_counts_what_it_should(rig):
    """Against sums by hand over the logits: weights, segment starts, tasks, z-loss; blocks of tokens change nothing."""
    config, pack, params, *_, compute = rig
    batch = sources.RandomBatches(None, 0, 2, 130, vocab_size=config.vocab_size).batch(0)
    batch = {**batch, "weights": np.where(batch["tasks"] == 0, 1.0, 0.25).astype(np.float32)}
    logits = np.asarray(compute(params, batch["tokens"], batch["segments"]))
    log_sum = np.log(np.exp(logits.astype(np.float64)).sum(-1))

    nll, weight, correct, counted, squares = np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2), 0.0
    tokens, segments, tasks, weights = (batch[name] for name in ("tokens", "segments", "tasks", "weights"))
    for row in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            if segments[row, t] == segments[row, t - 1]:
                task, w, before = tasks[row, t], weights[row, t], (row, t - 1)
                nll[task] += w * (log_sum[before] - logits[before][tokens[row, t]])
                weight[task] += w
                squares += w * log_sum[before] ** 2
                correct[task] += w == 1 and logits[before].argmax() == tokens[row, t]
                counted[task] += w == 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "LOGIT_TOKENS", 32)
        loss, sums = jax.jit(lambda params: forward.loss_sums(pack, params, batch, num_tasks=2, z_loss=0.01))(params)
    for want, got in zip((nll, weight, correct, counted), sums, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5)
    np.testing.assert_allclose(loss, (nll.sum() + 0.01 * squares) / weight.sum(), rtol=1e-5)
    assert counted[0] > 0 == counted[1]


# --- legs -------------------------------------------------------------------------------------------------------------

TRIAL = Settings(
    batch_size=2,
    seq_len=32,
    total_steps=4,
    warmup_steps=1,
    learning_rate=1e-2,
    source="random",
    log_every=1,
    eval_every=2,
    eval_batches=1,
    dtype="float32",
)


def trial_config() -> ModelConfig:
    return tiny_config(layer_types=layer_pattern(4)[1:])  # a run of two layers of one kind, and another kind


@functools.cache
def trial_trainer(num_tasks: int):
    """One compiled step for all legs."""
    return train.make_trainer(trial_config(), TRIAL, num_tasks)


def leg(run_dir: pathlib.Path, *, arguments: dict | None = None, **options) -> Leg:
    settings = dataclasses.replace(TRIAL, **options)
    standard = {"source_arguments": {"vocab_size": 64}, "say": lambda text: None}
    return Leg(trial_config(), trial_trainer, settings, run_dir, **{**standard, **(arguments or {})})


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> pathlib.Path:
    """Four steps in one leg."""
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    assert leg(run_dir).run() == 4
    return run_dir


def stable_log(run_dir: pathlib.Path, *kinds: str) -> list[dict]:
    clocks = ("tokens_per_s", "seconds")
    records = curves.read_log(run_dir / curves.LOG)
    return [{k: v for k, v in r.items() if k not in clocks} for r in records if not kinds or r["kind"] in kinds]


def test_two_legs_equal_one_bit_by_bit(whole_run: pathlib.Path, tmp_path: pathlib.Path):
    first, parts, second = tmp_path / "first", tmp_path / "parts", tmp_path / "second"
    assert leg(first, max_steps=2, arguments={"parts_out": parts}).run() == 2
    transport.join(parts, second)
    curves.append_log(second / curves.LOG, {"kind": "train", "step": 3})  # after the checkpoint: a leg that broke off
    assert leg(second).run() == 4

    states = []
    for run_dir in (whole_run, second):
        checkpoint = checkpointing.latest(run_dir)
        assert checkpoint is not None and checkpoint.name == "step_00000004"
        assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]
        states.append(checkpointing.restore(checkpoint, trial_trainer(2).state_shapes))
    for (path, one), two in zip(
        jax.tree_util.tree_leaves_with_path(states[0]), jax.tree.leaves(states[1]), strict=True
    ):
        np.testing.assert_array_equal(one, two, err_msg=str(path))
    # The first step of a leg compiles: it has no rate, and no record of its own.
    assert [(r["kind"], r["step"]) for r in stable_log(second)] == [
        ("train", 2),
        ("eval", 2),
        ("train", 4),
        ("eval", 4),
    ]
    assert stable_log(whole_run, "eval") == stable_log(second, "eval")
    legs = checkpointing.read_provenance(checkpointing.latest(second))["legs"]
    assert [(one["first_step"], one["last_step"]) for one in legs] == [(0, 2), (2, 4)]
    assert (second / curves.PICTURE).read_bytes().startswith(b"\x89PNG")


def trial_batch() -> sources.HostBatch:
    return sources.RandomBatches(None, 0, 2, 32, vocab_size=64).batch(0)


def test_gradients_match_differences():
    """Along the gradient and across it, for every kind of parameter at once."""
    pack = architecture.training_pack(trial_config())
    params, batch = lively_params(pack), trial_batch()

    def compute(params):
        return trial_trainer(2).gradients(jax.device_put(params, jax.devices()[0]), batch)

    gradients = {name: np.asarray(g) for name, g in compute(params)[1].items()}
    assert all(np.any(g) for g in gradients.values())
    rng = np.random.default_rng(3)
    random = {name: rng.standard_normal(g.shape).astype(np.float32) * np.std(g) for name, g in gradients.items()}
    for direction in (gradients, {name: g + random[name] for name, g in gradients.items()}):
        length = np.sqrt(sum(np.vdot(d, d) for d in direction.values()))
        slope = sum(np.vdot(gradients[name], d) for name, d in direction.items()) / length
        step = 1e-3
        ends = [
            float(compute({name: p + sign * step / length * direction[name] for name, p in params.items()})[0][0])
            for sign in (1, -1)
        ]
        np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), slope, rtol=5e-3)


def test_steps_on_one_batch_learn_it():
    trainer = trial_trainer(2)
    state, batch = trainer.init(0), trial_batch()
    losses = []
    for _ in range(4):
        state, out = trainer.step(state, batch)
        losses.append(float(out["loss"]))
    assert abs(losses[0] - np.log(64)) < 0.2 and losses[-1] < losses[0] - 0.3, losses
    assert int(state["step"]) == 4
    moved = architecture.initial_params(architecture.training_pack(trial_config()), 0)
    assert all(np.any(np.asarray(state["params"][name]) != value) for name, value in moved.items())


def test_bfloat16_stays_near_float32():
    config = trial_config()
    pack = ParamPack(config, dtype="bfloat16", kernels="reference")
    params = jax.device_put(architecture.initial_params(architecture.training_pack(config), 0), jax.devices()[0])
    batch = trial_batch()
    exact = trial_trainer(2).evaluate(params, batch).nll
    near = jax.jit(functools.partial(forward.loss_sums, pack, num_tasks=2))(params, batch)[1].nll
    assert np.any(exact != near)
    np.testing.assert_allclose(near, exact, rtol=2e-3)


def test_a_leg_goes_on_only_with_its_own_settings(whole_run: pathlib.Path, demo_checkpoint: pathlib.Path):
    with pytest.raises(UserInputError, match="--learning_rate=0.5 was 0.01 in step_00000004; --allow_changes"):
        leg(whole_run, learning_rate=0.5)
    said = []
    assert leg(whole_run, seq_len=64, arguments={"allow_changes": True, "say": said.append}).run() == 4
    assert any("seq_len: 32 before, 64" in text for text in said) and "nothing to do" in said[-1]
    other = dataclasses.replace(trial_config(), vocab_size=128)
    with pytest.raises(UserInputError, match="is of another model"):
        Leg(other, trial_trainer, TRIAL, whole_run)
    with pytest.raises(UserInputError, match="was trained with another tokenizer"):
        leg(whole_run, arguments={"source_arguments": {"vocab_size": 64, "tokenizer_dir": demo_checkpoint}})


def test_a_leg_stops_in_time_and_keeps_what_it_has(tmp_path: pathlib.Path):
    assert leg(tmp_path / "run", stop_after_seconds=1e-6).run() == 1
    checkpoint = checkpointing.latest(tmp_path / "run")
    assert checkpoint is not None and checkpoint.name == "step_00000001"

    broken = leg(tmp_path / "run")
    broken.state["params"]["embed"] = jnp.full_like(broken.state["params"]["embed"], jnp.nan)
    with pytest.raises(FloatingPointError, match="step 2: the loss is nan"):
        broken.run()
    assert checkpointing.latest(tmp_path / "run") == checkpoint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "--batch_size must be positive, got 0"),
        ({"max_steps": -1}, "--max_steps must not be negative, got -1"),
        ({"dtype": "float16"}, "--dtype='float16' is not one of bfloat16, float32"),
        ({"source": "web"}, "--source='web' is not one of tasks, random"),
        ({"eval_batches": 0}, "--eval_batches must be positive"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(UserInputError, match=message):
        dataclasses.replace(TRIAL, **change)


def test_command_line(capsys, tmp_path: pathlib.Path):
    assert train.main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--stop_after_seconds" in text and "Longest gradient. [1.0]" in text
    assert train.main(["train", f"--run_dir={tmp_path}/run"]) == 2
    assert "--tokenizer is needed" in capsys.readouterr().err
    assert train.main(["train", "--run_dir=x", f"--tokenizer={tmp_path}"]) == 2
    assert "tokenizer.json: not a tokenizer" in capsys.readouterr().err


# --- batches, transport, size -----------------------------------------------------------------------------------------


def test_batches_read_ahead_are_those_of_their_steps():
    arguments = {"tokenizer_dir": None, "seed": 5, "batch_size": 1, "seq_len": 24}
    reader = sources.Prefetcher("random", {**arguments, "split": "train"}, 3, depth=2)
    got = [batch for _, batch in zip(range(3), reader, strict=False)]
    reader.close()
    for step, batch in enumerate(got, start=3):
        want = sources.RandomBatches(**arguments).batch(step)
        for name in sources.FIELDS:
            np.testing.assert_array_equal(batch[name], want[name])
    held_out = sources.RandomBatches(**arguments, split="held_out").batch(3)
    assert np.any(held_out["tokens"] != got[0]["tokens"])


def test_worker_processes_make_the_same_batches():
    arguments = {"tokenizer_dir": None, "seed": 5, "batch_size": 1, "seq_len": 24, "split": "train"}
    reader = sources.Prefetcher("random", arguments, 0, workers=1)
    got = next(iter(reader))
    reader.close()
    np.testing.assert_array_equal(got["tokens"], sources.RandomBatches(**arguments).batch(0)["tokens"])


def test_split_and_join(tmp_path: pathlib.Path):
    source, parts = tmp_path / "source", tmp_path / "parts"
    (source / "a" / "b").mkdir(parents=True)
    noise = np.random.default_rng(0).bytes(250_000)
    (source / "a" / "b" / "data").write_bytes(noise)
    (source / "empty").mkdir()
    (source / "note.txt").write_text("hello")
    (source / ".partial").write_text("left behind")
    assert transport.split(source, parts, part_bytes=100_000) == 3
    assert max(path.stat().st_size for path in parts.iterdir()) == 100_000
    transport.join(parts, tmp_path / "joined")
    assert (tmp_path / "joined" / "a" / "b" / "data").read_bytes() == noise
    assert sorted(p.name for p in (tmp_path / "joined").iterdir()) == ["a", "empty", "note.txt"]
    again = tmp_path / "again"
    transport.split(tmp_path / "joined", again, part_bytes=100_000)
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {p.name: p.read_bytes() for p in parts.iterdir()}

    assert transport.main(["transport", "join", str(parts), str(tmp_path / "joined")]) == 2  # there already
    (parts / "run.001").write_bytes(bytes(100_000))
    with pytest.raises(UserInputError, match="run.001: its contents differ"):
        transport.join(parts, tmp_path / "other")
    (parts / "run.json").unlink()
    with pytest.raises(UserInputError, match="not the index"):
        transport.join(parts, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_demo_model_fits_its_budget():
    """Parameters, and what a checkpoint takes on the road (weights and second moments fp32, first moments bf16)."""
    pack = architecture.training_pack(architecture.demo_config(3000))
    assert pack.config.vocab_size == 3072
    assert pack.num_parameters <= 5_600_000
    state = train.make_trainer(pack.config, TRIAL, 1).state_shapes
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) < 57e6
    first = architecture.initial_params(pack, 0)
    rates = np.exp(first["layers.*.mixer.A_log"]) * np.log1p(np.exp(first["layers.*.mixer.dt_bias"]))
    assert rates.min() > 5e-4 and rates.max() < 2 and rates.max() / rates.min() > 10


# --- export -----------------------------------------------------------------------------------------------------------

EXACT = ("A_log", "mixer.norm")  # stored in float32


def rounded(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters as the exported file holds them."""
    return {
        name: value if name.endswith(EXACT) else np.asarray(jnp.asarray(value, jnp.bfloat16), np.float32)
        for name, value in params.items()
    }


@pytest.fixture(scope="module")
def exported(tmp_path_factory, demo_checkpoint: pathlib.Path):
    """A tiny model with lively weights in Hugging Face layout: directory, config, parameters, what the loader reads."""
    config = tiny_config(dtype="bfloat16")
    pack = architecture.training_pack(config)
    params = lively_params(pack)
    directory = tmp_path_factory.mktemp("exported") / "model"
    export.write_hf_dir(directory, config, params, demo_checkpoint)
    flat = load_params(directory, config, dtype=jnp.float32)
    return directory, config, params, {leaf.name: x for leaf, x in zip(pack.leaves, flat, strict=True)}


def test_exported_weights_come_back_through_the_loader(exported):
    directory, config, params, loaded = exported
    assert ModelConfig.from_hf(directory) == config
    for name, want in rounded(params).items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), want, err_msg=name)


def test_exported_model_gives_the_logits_of_training(exported, rig):
    """Engine's pass and oracle, both from the files, against the training pass over the rounded weights."""
    directory, config, params, loaded = exported
    _, _, _, lengths, segments, tokens, _, compute = rig
    trained = pieces_of(np.asarray(compute(rounded(params), tokens, segments)), lengths)
    pieces = pieces_of(tokens, lengths)
    engine = inference_logits(config, loaded, pieces)
    with safe_open(directory / export.WEIGHTS, "np") as file:
        tensors = {name: np.asarray(file.get_tensor(name), np.float32) for name in file.keys()}  # noqa: SIM118
    oracle = Oracle(json.loads((directory / "config.json").read_text()), tensors)
    for ours, theirs, piece in zip(trained, engine, pieces, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
        np.testing.assert_allclose(ours, oracle.forward(piece).logits, rtol=0, atol=1e-4)


def test_export_command(whole_run: pathlib.Path, demo_checkpoint: pathlib.Path, tmp_path: pathlib.Path, capsys):
    output = tmp_path / "model"
    arguments = ["export", f"--run_dir={whole_run}", f"--tokenizer={demo_checkpoint}", f"--output={output}"]
    assert export.main(arguments) == 0
    assert "step 4" in capsys.readouterr().out
    written = {"config.json", "generation_config.json", export.WEIGHTS, *export.TOKENIZER_FILES}
    assert {path.name for path in output.iterdir()} == written
    load_params(output, ModelConfig.from_hf(output))
    assert export.main(["export", f"--run_dir={tmp_path}", *arguments[2:]]) == 2
    assert "has no checkpoint" in capsys.readouterr().err


@pytest.mark.parity
def test_transformers_reads_the_export(exported):
    import torch
    from transformers import AutoModelForCausalLM

    directory, config, _, loaded = exported
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, 90, dtype=np.int32)
    ours = inference_logits(config, loaded, [tokens])[0]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.asarray(tokens[None], dtype=torch.long)).logits[0].numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)
