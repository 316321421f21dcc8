"""The packed parameter layout: few leaves, nothing allocated, every parameter filled exactly once."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax.config import ModelConfig
from qwen35_jax.model import Qwen35
from qwen35_jax.params import ParamPack

CACHE_LEAVES, SAMPLER_LEAVES, MOST_LEAVES = 3, 16, 320
PRESETS = ("0.8b", "2b", "4b", "9b", "27b", "tiny-0.8b", "tiny-4b", "tiny-27b")


def _model(config: ModelConfig, dtype: str = "float32") -> Qwen35:
    """A model of random numbers, different in every parameter, made without compiling anything."""
    rng = np.random.default_rng(0)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Qwen35(config, param_dtype=dtype)))
    return nnx.merge(graphdef, jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), s.dtype), state))


def _values(model: Qwen35) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in flat}


@pytest.mark.parametrize("name", PRESETS)
def test_programs_take_few_leaves(name):
    pack = ParamPack(ModelConfig.preset(name))
    assert len(pack.leaves) + CACHE_LEAVES + SAMPLER_LEAVES <= MOST_LEAVES
    assert len({leaf.name for leaf in pack.leaves}) == len(pack.leaves)


def test_size_of_the_4b_is_the_published_one():
    pack = ParamPack(ModelConfig.preset("4b"))
    assert pack.num_bytes == pytest.approx(8.41e9, rel=2e-3)
    assert pack.num_parameters == pytest.approx(4.2e9, rel=2e-3)
    bytes_of_leaves = sum(leaf.spec.size * leaf.spec.dtype.itemsize for leaf in pack.leaves)
    assert pack.num_bytes == bytes_of_leaves


def test_layout_is_made_without_allocating():
    before = jax.live_arrays()  # held, so that none goes and lends its id to another
    pack = ParamPack(ModelConfig.preset("27b"))
    assert {id(array) for array in jax.live_arrays()} <= {id(array) for array in before}
    assert all(isinstance(spec, jax.ShapeDtypeStruct) for spec in pack.specs.values())


def test_parameters_have_the_fused_shapes_and_dtypes():
    specs = ParamPack(ModelConfig.preset("27b")).specs
    want = {
        "embed": ((248320, 5120), "bfloat16"),
        "layers.0.input_norm": ((5120,), "float32"),
        "layers.0.mixer.in_proj": ((5120, 10240 + 6144 + 96), "bfloat16"),
        "layers.0.mixer.conv_weight": ((4, 10240), "bfloat16"),
        "layers.0.mixer.A_log": ((48,), "float32"),
        "layers.0.mixer.dt_bias": ((48,), "float32"),
        "layers.0.mixer.norm": ((128,), "float32"),
        "layers.0.mixer.out_proj": ((6144, 5120), "bfloat16"),
        "layers.0.post_norm": ((5120,), "float32"),
        "layers.0.mlp.gate_up": ((5120, 34816), "bfloat16"),
        "layers.0.mlp.down": ((17408, 5120), "bfloat16"),
        "layers.3.mixer.qkv_proj": ((5120, 2 * 6144 + 2 * 1024), "bfloat16"),
        "layers.3.mixer.q_norm": ((256,), "float32"),
        "layers.3.mixer.k_norm": ((256,), "float32"),
        "layers.3.mixer.o_proj": ((6144, 5120), "bfloat16"),
        "final_norm": ((5120,), "float32"),
        "lm_head": ((5120, 248320), "bfloat16"),
    }
    for path, (shape, dtype) in want.items():
        assert (specs[path].shape, specs[path].dtype) == (shape, jnp.dtype(dtype)), path
    kinds = {path.split(".", 2)[2] if path.startswith("layers.") else path for path in specs}
    assert len(kinds) == len(want)


def test_only_untied_models_have_a_head():
    assert "lm_head" in ParamPack(ModelConfig.preset("tiny-27b")).specs
    assert "lm_head" not in ParamPack(ModelConfig.preset("tiny-4b")).specs


@pytest.mark.parametrize("name", ["tiny-4b", "tiny-27b"])
def test_pack_and_unpack_are_inverse(name):
    config = ModelConfig.preset(name)
    model, pack = _model(config), ParamPack(config, dtype="float32")
    flat = pack.pack(model)
    assert [(x.shape, x.dtype) for x in flat] == [(spec.shape, spec.dtype) for spec in pack.leaf_specs]
    want, got = _values(model), _values(pack.unpack(flat))
    assert want.keys() == got.keys() == pack.specs.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)
    # Layers hold different values, so that a mix-up of layers would show.
    assert not np.array_equal(want["layers.0.mixer.A_log"], want["layers.1.mixer.A_log"])


def test_random_parameters_are_made_and_packed_inside_jit():
    config = ModelConfig.preset(
        "tiny-4b", layer_types=("linear_attention", "full_attention"), tie_word_embeddings=False
    )
    pack = ParamPack(config)
    flat = jax.jit(lambda: pack.pack(nnx.state(Qwen35(config, rngs=nnx.Rngs(0)))))()
    assert [(x.shape, x.dtype) for x in flat] == [(spec.shape, spec.dtype) for spec in pack.leaf_specs]
    values = {path: value.astype(np.float32) for path, value in _values(pack.unpack(flat)).items()}
    for path, value in values.items():
        name = path.split(".")[-1]
        assert np.isfinite(value).all(), path
        if name in ("input_norm", "post_norm", "final_norm", "q_norm", "k_norm"):  # weights of 1 + w
            assert not value.any(), path
        elif name in ("norm", "dt_bias"):
            assert (value == 1).all(), path
        elif name not in ("A_log", "conv_weight"):
            assert value.std() == pytest.approx(0.02, rel=0.1), path
    assert (values["layers.0.mixer.A_log"] >= 0).all() and values["layers.0.mixer.conv_weight"].std() > 0.1


def test_kernels_get_small_parameters_in_place():
    """Numbers of heads with zeros behind them, norms of attention for all its layers."""
    config = ModelConfig.preset("tiny-4b", layer_types=("full_attention", "linear_attention", "full_attention"))
    pack = ParamPack(config, dtype="float32")
    draw = np.random.default_rng(0)
    flat = tuple(draw.standard_normal(spec.shape, np.float32) for spec in pack.leaf_specs)
    want, got = _values(pack.unpack(flat)), _values(jax.jit(lambda x: pack.unpack(x, in_place=True))(flat))
    padded, whole = set(), set()
    for path, value in want.items():
        name = path.split(".")[-1]
        if got[path].ndim > value.ndim:
            whole.add(name)
            row = {"layers.0": 0, "layers.2": 1}[path[:8]]  # the layer's place in the pools
            assert got[path].shape == (2, *value.shape)
            np.testing.assert_array_equal(got[path][row], value, err_msg=path)
            continue
        np.testing.assert_array_equal(got[path][tuple(map(slice, value.shape))], value, err_msg=path)
        if got[path].shape != value.shape:
            padded.add(name)
            assert got[path].nbytes % 256 == 0 and not got[path][value.size :].any()
    assert padded == {"A_log", "dt_bias"} and whole == {"q_norm", "k_norm"}


def test_unpack_is_only_static_slices():
    pack = ParamPack(ModelConfig.preset("tiny-27b"))

    def use(flat):
        return [variable.get_value() for _, variable in nnx.to_flat_state(nnx.state(pack.unpack(flat)))]

    jaxpr = jax.make_jaxpr(use)(pack.leaf_specs)
    assert {eqn.primitive.name for eqn in jaxpr.eqns} <= {"slice", "squeeze", "reshape"}


def test_assemble_asks_once_for_every_parameter_and_keeps_little():
    config = ModelConfig.preset("tiny-27b")
    pack, values = ParamPack(config, dtype="float32"), _values(_model(config))
    asked, handed_out, most_alive = [], [], 0

    def get(path):
        nonlocal most_alive
        alive = sum(ref().size for ref in handed_out if ref() is not None and ref().size >= 128 * 128)
        most_alive = max(most_alive, alive)
        asked.append(path)
        value = values[path].astype(np.float64)  # cast by assemble, so that nothing but assemble can hold it
        handed_out.append(weakref.ref(value))
        return value

    flat = pack.assemble(get)
    assert asked == list(pack.specs) and sorted(asked) == sorted(values)
    assert most_alive == 0
    for got, want in zip(flat, pack.pack(_model(config)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_assemble_places_on_the_device_that_is_named():
    config = ModelConfig.preset("tiny-4b", num_layers=1)
    pack, device = ParamPack(config), jax.devices()[-1]
    flat = pack.assemble(lambda path: np.zeros(pack.specs[path].shape, np.float32), device=device)
    assert all(x.devices() == {device} for x in flat)
    assert [x.dtype for x in flat] == [spec.dtype for spec in pack.leaf_specs]


@pytest.mark.parametrize("path", ["layers.1.mixer.out_proj", "layers.1.mixer.norm"])
def test_assemble_names_a_parameter_of_another_shape(path):
    pack = ParamPack(ModelConfig.preset("tiny-4b", num_layers=2))

    def get(asked):
        shape = pack.specs[asked].shape
        return np.zeros((shape[0] + 1, *shape[1:]) if asked == path else shape, np.float32)

    with pytest.raises(ValueError, match=rf"^{path}: shape .* expected"):
        pack.assemble(get)


def test_assemble_refuses_integers():
    pack = ParamPack(ModelConfig.preset("tiny-4b", num_layers=1))
    with pytest.raises(ValueError, match=r"^embed: dtype int8 is not a floating type"):
        pack.assemble(lambda path: np.zeros(pack.specs[path].shape, np.int8))


def test_pack_refuses_a_model_of_another_layout():
    pack = ParamPack(ModelConfig.preset("tiny-4b", num_layers=2), dtype="float32")
    with pytest.raises(ValueError, match=r"missing \['layers.1.input_norm'"):
        pack.pack(_model(ModelConfig.preset("tiny-4b", num_layers=1)))
    with pytest.raises(ValueError, match=r": shape .* expected"):
        pack.pack(_model(ModelConfig.preset("tiny-4b", num_layers=2, hidden_size=64)))
    with pytest.raises(ValueError, match=r": dtype bfloat16, expected float32"):
        pack.pack(_model(ModelConfig.preset("tiny-4b", num_layers=2), "bfloat16"))


def test_unpack_refuses_another_tuple():
    pack = ParamPack(ModelConfig.preset("tiny-4b", num_layers=1))
    flat = tuple(jnp.zeros(spec.shape, spec.dtype) for spec in pack.leaf_specs)
    with pytest.raises(ValueError, match=f"{len(flat) - 1} arrays, expected {len(flat)}"):
        pack.unpack(flat[:-1])
    with pytest.raises(ValueError, match=r"embed: shape \(1,\), expected"):
        pack.unpack((jnp.zeros((1,)), *flat[1:]))
