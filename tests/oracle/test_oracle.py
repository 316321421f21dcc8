"""The oracle itself: it continues a sequence exactly, and the goldens notice every classic mistake."""

import ast
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import goldens, tiny
from tests.oracle.qwen35_numpy import Oracle


@pytest.mark.parametrize("case", ["0.8b-tied", "4b-untied", "27b-untied"])
def test_continuing_from_a_state_equals_one_run(case):
    oracle = Oracle(tiny.hf_config(case), tiny.weights(case))
    tokens = tiny.token_ids(case, 21)
    whole = oracle.forward(tokens)
    state = oracle.new_state()
    parts = [oracle.forward(part, state) for part in np.split(tokens, [1, 3, 13, 14, 15])]
    assert state.length == 21
    np.testing.assert_allclose(np.concatenate([p.logprobs for p in parts]), whole.logprobs, atol=1e-11)
    joined = np.concatenate([p.layer_outputs for p in parts], axis=1)
    np.testing.assert_allclose(joined, whole.layer_outputs, atol=1e-11)


def test_full_and_text_only_exports_are_one_model():
    case = "0.8b-untied"
    tensors = tiny.weights(case)
    renamed = {name.replace(tiny.PREFIX, tiny.TEXT_ONLY_PREFIX): value for name, value in tensors.items()}
    tokens = tiny.token_ids(case, 5)
    full = Oracle(tiny.hf_config(case), tensors).forward(tokens)
    text_only = Oracle(tiny.hf_config(case, text_only=True), renamed).forward(tokens)
    np.testing.assert_array_equal(full.logprobs, text_only.logprobs)


def test_the_oracle_does_not_import_the_product():
    allowed = {"__future__", "collections", "copy", "dataclasses", "functools", "hashlib", "json", "pathlib", "typing"}
    allowed |= {"numpy", "ml_dtypes", "safetensors"}
    for name in ("qwen35_numpy.py", "tiny.py", "goldens.py"):
        tree = ast.parse((Path(__file__).parent / name).read_text())
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            assert {module.split(".")[0] for module in modules} <= allowed, (name, modules)


def _edit(suffix, change):
    def apply(config, tensors):
        edited = {name: change(value) if name.endswith(suffix) else value for name, value in tensors.items()}
        assert any(name.endswith(suffix) for name in tensors)
        return config, edited

    return apply


def _rope(**changes):
    def apply(config, tensors):
        return {**config, "rope_parameters": {**config["rope_parameters"], **changes}}, tensors

    return apply


def _halves_instead_of_interleaved(weight):
    heads = weight.shape[0] // 512
    return weight.reshape(2, heads, 256, -1).swapaxes(0, 1).reshape(weight.shape)


def _tiled_head_order(config, tensors):
    """What tiled head order (h % Hk instead of h // (Hv // Hk)) computes, by moving the value heads."""
    v_heads, k_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    order = np.arange(v_heads).reshape(-1, k_heads).T.ravel()  # the value heads that key head 0 serves come first
    rows = (order[:, None] * 128 + np.arange(128)).ravel()
    start = 2 * k_heads * 128
    edited = dict(tensors)
    for name, value in tensors.items():
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            edited[name] = np.concatenate([value[:start], value[start:][rows]])
        elif name.endswith("in_proj_z.weight"):
            edited[name] = value[rows]
        elif name.endswith(("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")):
            edited[name] = value[order]
        elif name.endswith("out_proj.weight"):
            edited[name] = value[:, rows]
    return config, edited


MISTAKES = {
    "rope_theta": _rope(rope_theta=1e6),
    "rope over twice the dims": _rope(partial_rotary_factor=0.5),
    "q and gate as halves": _edit("q_proj.weight", _halves_instead_of_interleaved),
    "tiled head order": _tiled_head_order,
    "q_norm without 1 +": _edit("q_norm.weight", lambda w: w - 1),
    "final norm without 1 +": _edit("language_model.norm.weight", lambda w: w - 1),
    "recurrence norm with 1 +": _edit("linear_attn.norm.weight", lambda w: w + 1),
    "reversed convolution": _edit("conv1d.weight", lambda w: w[..., ::-1]),
    "A_log read as bfloat16": _edit("A_log", tiny.round_bf16),
    "dt_bias forgotten": _edit("dt_bias", np.zeros_like),
    "eps": lambda config, tensors: ({**config, "rms_norm_eps": 1e-5}, tensors),
}


def _worst(oracle, case, length, *, forget_at=None):
    """Largest error against the golden; `forget_at` drops the recurrent state (not the keys) before that token."""
    golden = goldens.load_golden(case, length)
    state = oracle.new_state()
    split = length if forget_at is None else forget_at
    first = oracle.forward(golden.tokens[0, :split], state)
    if forget_at is not None:
        full = [kind == "full_attention" for kind in oracle.layer_types]
        state.layers = [layer if keep else None for layer, keep in zip(state.layers, full, strict=True)]
    rest = oracle.forward(golden.tokens[0, split:], state)
    logprobs = np.concatenate([first.logprobs, rest.logprobs])
    return goldens.distance(logprobs[golden.positions], golden.logprobs)[0]


def test_without_a_mistake_the_golden_agrees():
    assert _worst(Oracle(tiny.text_config("4b-untied"), tiny.weights("4b-untied")), "4b-untied", 130) < 2e-4


@pytest.mark.parametrize("mistake", MISTAKES)
def test_goldens_notice(mistake):
    """Each classic mistake moves some log-probability by more than the bar of the float32 comparison, 5e-4."""
    config, tensors = MISTAKES[mistake](tiny.text_config("4b-untied"), tiny.weights("4b-untied"))
    assert _worst(Oracle(config, tensors), "4b-untied", 130) > 1e-3


def test_goldens_notice_a_recurrent_state_that_is_not_carried():
    oracle = Oracle(tiny.text_config("4b-untied"), tiny.weights("4b-untied"))
    assert _worst(oracle, "4b-untied", 130, forget_at=64) > 1e-3
