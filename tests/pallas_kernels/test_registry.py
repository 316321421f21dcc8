"""The choice of an implementation."""

from __future__ import annotations

import logging

import jax
import pytest

import pallas_kernels
from pallas_kernels import registry
from pallas_kernels.registry import Op, Target, UnknownImplementation, UnsupportedArguments
from tests.pallas_kernels.conformance import OPS, host, tiny_specs_of

CPU, GPU = Target("cpu", "cpu"), Target("gpu", "NVIDIA H200", "9.0")


def only_gpu(target, arguments):
    if target.platform != "gpu":
        raise UnsupportedArguments(f"needs a GPU, not {target.platform}")


def only_wide(target, arguments):
    only_gpu(target, arguments)
    if arguments["width"] % 64:
        raise UnsupportedArguments(f"width must be a multiple of 64, got {arguments['width']}")


@pytest.fixture
def op():
    op = Op("example")
    op.register("reference", lambda width: "plain", priority=0)
    op.register("fast", lambda width: "fast", priority=20, supports=only_wide)
    op.register("portable", lambda width: "portable", priority=10, supports=only_gpu)
    op.register("experimental", lambda width: "experimental", priority=-1)
    return op


@pytest.mark.parametrize(
    ("target", "width", "chosen"),
    [(GPU, 128, "fast"), (GPU, 100, "portable"), (CPU, 128, "reference"), (CPU, 100, "reference")],
)
def test_auto_takes_the_best_that_accepts(op, target, width, chosen):
    assert op.select("auto", {"width": width}, target=target).name == chosen


def test_auto_never_takes_a_negative_priority(op):
    assert op.select("experimental", {"width": 1}, target=CPU).name == "experimental"
    assert op.select("auto", {"width": 1}, target=CPU).name == "reference"


def test_a_named_one_never_falls_back(op):
    assert op.select("fast", {"width": 64}, target=GPU).name == "fast"
    with pytest.raises(
        UnsupportedArguments, match="example: implementation 'fast': width must be a multiple of 64, got 65"
    ):
        op.select("fast", {"width": 65}, target=GPU)
    with pytest.raises(UnsupportedArguments, match="'portable': needs a GPU, not cpu"):
        op.select("portable", {"width": 64}, target=CPU)


def test_auto_leaves_to_others_what_they_do_faster(op):
    def large(target, arguments):
        if arguments["width"] < 1024:
            raise UnsupportedArguments(f"pays from a width of 1024 on, not for {arguments['width']}")

    op.register("large", lambda width: "large", priority=30, supports=only_wide, auto_supports=large)
    assert op.select("auto", {"width": 1024}, target=GPU).name == "large"
    assert op.select("auto", {"width": 128}, target=GPU).name == "fast"
    assert op.select("large", {"width": 128}, target=GPU).name == "large", "who asks for it gets it"
    assert op.select("auto", {"width": 1024}, target=CPU).name == "reference"
    with pytest.raises(UnsupportedArguments, match="'large': needs a GPU, not cpu"):
        op.select("large", {"width": 1024}, target=CPU)


def test_an_unknown_name_lists_what_exists(op):
    with pytest.raises(
        UnknownImplementation, match="'fsat'; known: 'auto', 'fast', 'portable', 'reference', 'experimental'"
    ):
        op.select("fsat", {"width": 64}, target=GPU)


def test_nothing_accepts():
    op = Op("gpu_only")
    op.register("fast", lambda: None, priority=1, supports=only_gpu)
    with pytest.raises(
        UnsupportedArguments, match="gpu_only: no implementation takes these arguments.*fast: needs a GPU"
    ):
        op.select("auto", {}, target=CPU)


def test_other_exceptions_of_a_check_are_not_swallowed():
    """Only "not my arguments" means that; a fault in a check must surface."""
    op = Op("faulty")
    op.register("reference", lambda: None, priority=0)
    op.register("broken", lambda: None, priority=1, supports=lambda target, arguments: arguments["missing"])
    with pytest.raises(KeyError, match="missing"):
        op.select("auto", {}, target=CPU)


def test_names_are_unique_and_auto_is_reserved(op):
    with pytest.raises(ValueError, match="already registered"):
        op.register("fast", lambda: None, priority=3)
    with pytest.raises(ValueError, match="reserved"):
        op.register("auto", lambda: None, priority=3)
    with pytest.raises(ValueError, match="already defined"):
        registry.define_op("gdn_decode")
    with pytest.raises(
        KeyError, match="unknown op 'gdn'; known: add_rms_norm, causal_conv, gated_rms_norm, gdn_decode"
    ):
        registry.get_op("gdn")


def test_choices_are_described_and_logged_once(op, caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels.registry"):
        for _ in range(3):
            op.select("auto", {"width": 100}, target=GPU)
        op.select("auto", {"width": 100}, target=CPU)
    assert op.choices == (("auto", "portable", GPU), ("auto", "reference", CPU))
    assert "auto -> portable on NVIDIA H200, auto -> reference on cpu" in op.describe()
    assert (
        "fast (priority 20), portable (priority 10), reference (priority 0), experimental (by name only)"
        in op.describe()
    )
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0] == (
        "example: auto -> portable on gpu (NVIDIA H200); fast declined: width must be a multiple of 64, got 100"
    )


def test_the_target_is_where_the_program_will_run():
    assert registry.current_target().platform == jax.default_backend()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert registry.current_target() == Target("gpu", "NVIDIA H200")
    with jax.default_device(jax.devices("cpu")[0]):
        assert registry.current_target().platform == "cpu"


def test_every_op_is_there_and_has_its_reference():
    assert OPS == (
        "add_rms_norm",
        "causal_conv",
        "gated_rms_norm",
        "gdn_decode",
        "gdn_prefill",
        "kv_write",
        "paged_decode_attention",
        "paged_prefill_attention",
        "swiglu_product",
    )
    for name in OPS:
        op = registry.get_op(name)
        assert op.implementations["reference"].priority == 0
        assert callable(getattr(pallas_kernels, name))
        assert f"{name}: " in pallas_kernels.describe()


def test_public_ops_choose_through_the_registry():
    spec = tiny_specs_of("causal_conv")["tiny1-ragged"]
    case = host(spec.case())
    with pytest.raises(UnknownImplementation, match="causal_conv: unknown implementation 'nonsense'; known: 'auto'"):
        pallas_kernels.causal_conv(**case.arguments, implementation="nonsense")
    for implementation in ("auto", "reference"):
        jax.eval_shape(lambda a, i=implementation: pallas_kernels.causal_conv(**a, implementation=i), case.arguments)
    asked = [asked for asked, _, _ in registry.get_op("causal_conv").choices]
    assert "auto" in asked and "reference" in asked


def test_a_choice_of_kernels_is_a_name_or_pairs():
    assert registry.implementation_of("auto", "kv_write") == "auto"
    assert registry.implementation_of("reference", "kv_write") == "reference"
    pairs = "kv_write=reference,gdn_decode=mosaic_sm90"
    registry.check_choice(pairs)
    found = [registry.implementation_of(pairs, op) for op in ("kv_write", "gdn_decode", "gdn_prefill")]
    assert found == ["reference", "mosaic_sm90", "auto"]


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (
            "mosaic_sm1",
            r"add_rms_norm has no such implementation as 'mosaic_sm1' \(it has auto, mosaic_sm90, reference",
        ),
        ("triton", "add_rms_norm has no such implementation as 'triton'"),
        ("kv_write=reference,gdn_decode", "'gdn_decode' is not op=name; the ops are add_rms_norm, "),
        ("kv_wirte=reference", "'kv_wirte=reference' is not op=name"),
        ("kv_write=mosaic", r"kv_write has no such implementation as 'mosaic' \(it has auto, .*reference\)"),
        ("kv_write=auto,kv_write=reference", "kv_write is named twice"),
        ("kv_write=", "kv_write has no such implementation as ''"),
    ],
)
def test_a_wrong_choice_is_refused_by_name(kernels, words):
    with pytest.raises(UnknownImplementation, match=words):
        registry.check_choice(kernels)
