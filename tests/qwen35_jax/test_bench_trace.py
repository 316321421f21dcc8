"""Device traces: reading a profile, giving kernels to parts, and the scopes of the model's programs."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from qwen35_jax.bench.device_trace import (
    GROUP_OF,
    PARTS,
    DeviceEvent,
    DeviceTrace,
    Launches,
    launches_of,
    part_of,
    profile,
    read_profile,
    scopes_of,
)
from qwen35_jax.params import ParamPack
from qwen35_jax.steps import ProgramKey, StepSpec, device_state_shapes, layout_of, make_step
from schedulers import Bucket
from tests.engine_kit import MODEL, NUM_VALID

# (line, start in ns, duration in ns, kernel, stats)
EVENTS = [
    ("Stream #13(Compute,MemcpyD2D)", 1000, 400, "nvjet_tst_128x64", {"hlo_op": "cublas-gemm.1"}),
    ("Stream #13(Compute,MemcpyD2D)", 1500, 500, "loop_add_fusion", {"hlo_op": "loop_add_fusion"}),
    ("Stream #13(Compute,MemcpyD2D)", 2600, 100, "MemcpyD2D", {"memcpy_details": "kind:D2D size:8"}),
    ("Stream #13(Compute,MemcpyD2D)", 2700, 300, "mystery", {}),
    ("Stream #14(MemcpyH2D)", 1900, 200, "MemcpyH2D", {}),
    ("XLA Ops", 1000, 2000, "cublas-gemm.1", {}),
]
SCOPES = {
    "cublas-gemm.1": "jit(step)/layer_0/mlp/gate_up/dot_general",
    "loop_add_fusion": "jit(step)/layer_0/add",
}


def profile_data(events=EVENTS, plane: str = "/device:GPU:0 (NVIDIA H200)") -> ProfileData:
    """A profile as a GPU leaves it."""
    kernels = {name: i + 1 for i, name in enumerate(dict.fromkeys(event[3] for event in events))}
    stats = {name: i + 1 for i, name in enumerate(dict.fromkeys(name for event in events for name in event[4]))}
    lines = []
    for number, line in enumerate(dict.fromkeys(event[0] for event in events)):
        text = "".join(
            f"events {{ metadata_id: {kernels[name]} offset_ps: {start * 1000} duration_ps: {duration * 1000} "
            + "".join(f'stats {{ metadata_id: {stats[stat]} str_value: "{value}" }} ' for stat, value in own.items())
            + "}\n"
            for where, start, duration, name, own in events
            if where == line
        )
        lines.append(f'lines {{ id: {number} name: "{line}" timestamp_ns: 0\n{text}}}\n')
    for field, names in (("event_metadata", kernels), ("stat_metadata", stats)):
        for name, number in names.items():
            lines.append(f'{field} {{ key: {number} value {{ id: {number} name: "{name}" }} }}\n')
    return ProfileData.from_text_proto(f'planes {{ id: 1 name: "{plane}"\n{"".join(lines)}}}')


def test_gpu_profile():
    trace = read_profile(profile_data(), SCOPES)
    assert [event.name for event in trace.events] == [
        "nvjet_tst_128x64",
        "loop_add_fusion",
        "MemcpyH2D",
        "MemcpyD2D",
        "mystery",
    ]
    assert trace.events[0].scope == SCOPES["cublas-gemm.1"]
    assert trace.events[0].stream == "GPU:0 (NVIDIA H200)/Stream #13(Compute,MemcpyD2D)"
    assert trace.note == ""
    assert trace.skipped_lines == {"XLA Ops": 1}
    # 1000-1400, 1500-2100 (two streams), 2600-3000
    assert trace.busy_s == pytest.approx(1400e-9)
    assert trace.span_s == pytest.approx(2000e-9)
    assert trace.idle_share == pytest.approx(0.3)
    np.testing.assert_allclose(trace.gaps_s, [100e-9, 500e-9])


def test_parts_sum_up_and_lose_nothing():
    parts = read_profile(profile_data(), SCOPES).by_part()
    assert {name: round(part.seconds * 1e9) for name, part in parts.items()} == {
        "glue": 500,
        "gate_up": 400,
        "other": 300,
        "copy_h2d": 200,
        "copy_d2d": 100,
    }
    assert list(parts) == ["glue", "gate_up", "other", "copy_h2d", "copy_d2d"]  # longest first
    assert dict(parts["other"].names) == pytest.approx({"mystery": 300e-9})
    assert all(part.kernels == 1 for part in parts.values())


def test_by_part_takes_another_classification():
    parts = read_profile(profile_data(), SCOPES).by_part(lambda event: event.name[0])
    assert {name: part.kernels for name, part in parts.items()} == {"l": 1, "n": 1, "m": 1, "M": 2}


def test_only_the_asked_device_counts():
    trace = read_profile(profile_data(plane="/device:GPU:10"), device=0)
    assert trace.events == () and "no plane of device 0" in trace.note and "/device:GPU:10" in trace.note
    assert len(read_profile(profile_data(plane="/device:GPU:10"), device=10).events) == 5


def test_lines_of_unknown_names_count_when_there_are_no_streams():
    events = [("Graph #1", *EVENTS[0][1:]), ("XLA Modules", *EVENTS[1][1:])]
    trace = read_profile(profile_data(events))
    assert [event.name for event in trace.events] == ["nvjet_tst_128x64"]
    assert trace.skipped_lines == {"XLA Modules": 1}


def test_scope_from_the_kernel_name_or_the_event_itself():
    events = [
        ("Stream #1", 0, 1, "loop_add_fusion_7", {}),
        ("Stream #1", 1, 1, "kernel", {"hlo_op": "unknown.3", "tf_op": "jit(step)/layer_1/attention/kv_write/pallas"}),
    ]
    found = read_profile(profile_data(events), {"loop_add_fusion.7": "jit(step)/layer_0/norm/mul"}).events
    assert [part_of(event) for event in found] == ["norm", "kv_write"]


@pytest.mark.parametrize(
    ("name", "scope", "part"),
    [
        ("fusion_1", "jit(step)/layer_3/gated_delta_net/norm/mul", "norm"),
        ("fusion_1", "jit(step)/sampling/lm_head/dot_general", "lm_head"),
        ("fusion_1", "jit(step)/sampling/argmax", "sampling"),
        ("fusion_1", "jit(step)/layer_3/gated_delta_net/jit(_gdn_decode)/gdn_decode/mul", "gdn_decode"),
        ("fusion_1", "jit(step)/layer_3/gated_delta_net/jit(_gdn_decode)", "gdn_decode"),
        ("fusion_1", "jit(step)/layer_3/gated_delta_net/split", "glue"),
        ("fusion_1", "", "other"),
        ("paged_decode_attention_combine", "", "paged_decode_attention"),
        ("mosaic_gdn_decode_kernel", "jit(step)/layer_3", "gdn_decode"),
        ("nvjet_sm90_tst_64x8", "", "gemm"),
        ("cutlass3x_sm90_bf16", "jit(step)/layer_0/mlp/down/dot_general", "down"),
        ("gemm_fusion_dot_12", "", "gemm"),
        ("MemcpyD2D", "jit(step)/layer_0/mlp/down", "copy_d2d"),
        ("MemcpyP2P", "", "copy_p2p"),
        ("[CUDA memcpy DtoH]", "", "other"),
        ("Memset", "", "memset"),
    ],
)
def test_part_of(name: str, scope: str, part: str):
    assert part_of(DeviceEvent(name, scope, "jit_step", 0, 1)) == part
    assert part in GROUP_OF


def test_groups_hold_every_part_once():
    parts = [part for parts in PARTS.values() for part in parts]
    assert len(parts) == len(set(parts))


def test_empty_trace():
    trace = DeviceTrace(())
    assert (trace.busy_s, trace.span_s, trace.idle_share, trace.gaps_s, trace.by_part()) == (0, 0, None, (), {})


def test_scopes_of_hlo_text():
    text = """HloModule jit_step, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused_computation.1 (param_0: f32[4]) -> f32[4] {
  %param_0 = f32[4]{0} parameter(0)
  %mul.1 = f32[4]{0} multiply(%param_0, %param_0), metadata={op_name="jit(step)/norm/mul" source_line=3}
  ROOT %add.1 = f32[4]{0} add(%mul.1, %param_0), metadata={op_name="jit(step)/swiglu/add"}
}

ENTRY %main.5 (Arg_0.1: f32[4]) -> f32[4] {
  %Arg_0.1 = f32[4]{0} parameter(0), metadata={op_name="state"}
  %loop_add_fusion = f32[4]{0} fusion(%Arg_0.1), kind=kLoop, calls=%fused_computation.1
  ROOT %custom-call.2 = f32[4]{0} custom-call(%loop_add_fusion), metadata={op_type="x" op_name="jit(step)/down/dot"}
}
"""
    scopes = scopes_of(text)
    assert scopes["loop_add_fusion"] == "jit(step)/swiglu/add"
    assert scopes["custom-call.2"] == "jit(step)/down/dot"


def test_scopes_of_a_compiled_program():
    @jax.jit
    def program(x):
        with jax.named_scope("gate_up"):
            x = x @ x
        with jax.named_scope("norm"):
            return jnp.tanh(x)

    parts = {
        part_of(DeviceEvent("", scope, "", 0, 0))
        for scope in scopes_of(program.lower(jnp.ones((8, 8))).compile().as_text()).values()
    }
    assert parts >= {"gate_up", "norm"}


def test_profile_of_a_cpu_says_that_there_is_no_device(tmp_path):
    ran = []
    trace = profile(lambda: ran.append(jnp.ones(8).sum().block_until_ready()), tmp_path)
    if jax.default_backend() == "cpu":
        assert trace.idle_share is None and "no device events" in trace.note
    else:
        assert trace.events
    assert len(ran) == 1
    assert list(tmp_path.rglob("*.xplane.pb"))


# What every program has, and what it has beside.
COMMON = {"in_proj", "out_proj", "qkv_proj", "o_proj", "gate_up", "down", "lm_head", "kv_write"}
COMMON |= {"norm", "add_rms_norm", "swiglu", "embed", "inputs", "sampling", "params"}
PROGRAMS = {
    "decode": (Bucket(0, 0, 4, 2), COMMON | {"gdn_decode", "paged_decode_attention"}),
    "prefill": (
        Bucket(64, 2, 0, 2),
        COMMON
        | {"admit", "causal_conv", "gdn_prefill", "gated_norm", "paged_prefill_attention"}
        | {"paged_decode_attention"},  # of the last layer
    ),
}


def step_of(layer_types, *, linear: tuple[int, int], full: tuple[int, int], outside: tuple[int, int], kind="decode"):
    """Names of a step's kernels: so many before and after the mixer's own kernel, before and after all layers."""
    own = {"linear_attention": "gdn_decode" if kind == "decode" else "causal_conv", "full_attention": "kv_write"}
    names = ["memcpy32_post"] * outside[0]
    for layer_type in layer_types:
        before, after = linear if layer_type == "linear_attention" else full
        names += ["nvjet"] * before + [f"{own[layer_type]}_mosaic_gpu_kernel"] + ["loop_add_fusion"] * after
    if kind == "prefill" and layer_types[-1] == "full_attention":  # the last tokens' keys and queries
        names += ["nvjet", "kv_write"]
    return names + ["nvjet"] * outside[1]


def in_order(names):
    return [DeviceEvent(name, "", "", 10 * number, 5) for number, name in enumerate(names)]


LAYERS = ("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_launches_a_layer(kind):
    """Of each kind of layer, whatever share of them stands before the mixer's kernel; several steps in the trace."""
    step = step_of(LAYERS, linear=(2, 6), full=(3, 8), outside=(5, 4), kind=kind)
    assert launches_of(in_order(step * 3), kind, LAYERS, 3) == Launches(9, 12, 9 + 2 * (kind == "prefill"))
    first = step_of(LAYERS, linear=(2, 7), full=(3, 8), outside=(5, 4), kind=kind)
    assert launches_of(in_order(first + step), kind, LAYERS, 2).gdn_layer == 9.5, "a mean over the steps"


def test_launches_that_the_order_does_not_tell():
    step = step_of(LAYERS, linear=(2, 6), full=(3, 8), outside=(5, 4))
    assert launches_of(in_order(step), "decode", LAYERS, 2) is None, "another number of steps"
    assert launches_of(in_order(step[:-20]), "decode", LAYERS, 1) is None, "a layer is missing"
    assert launches_of(in_order(["loop_fusion"] * 9), "decode", LAYERS, 1) is None, "other implementations"
    short = step_of(LAYERS[:4], linear=(2, 6), full=(3, 8), outside=(5, 4))
    assert launches_of(in_order(short), "decode", LAYERS[:4], 1) is None, "no linear layer after the full one"
    assert launches_of([], "decode", LAYERS, 0) is None


@pytest.mark.parametrize("kind", PROGRAMS)
def test_programs_name_every_part(kind):
    """Read before XLA: what it makes of the names is its own affair, and a compilation cache keeps old ones."""
    bucket, expected = PROGRAMS[kind]
    key = ProgramKey(kind, bucket, 1, "greedy")
    model = dataclasses.replace(MODEL, dtype="float32", layer_types=("linear_attention", "full_attention") * 2)
    pack = ParamPack(model, dtype="float32", kernels="reference")
    state = device_state_shapes(model, 5, 5, jnp.dtype("float32"), jnp.dtype("float32"))
    packed = [jax.ShapeDtypeStruct((words,), jnp.int32) for words in layout_of(kind, bucket).pieces]
    lowered = jax.jit(make_step(StepSpec(pack, NUM_VALID), key)).lower(pack.leaf_specs, state, packed)
    text = lowered.as_text(debug_info=True)
    paths = {path for path in re.findall(r'loc\("([^"]+/[^"]+)"', text) if not path.endswith(".py")}
    assert {part_of(DeviceEvent("", path, "", 0, 0)) for path in paths} - {"glue"} == expected
    # A product without a part of its own would be hidden in the glue.
    products = {part_of(DeviceEvent("", path, "", 0, 0)) for path in paths if path.endswith("dot_general")}
    assert products and "glue" not in products
