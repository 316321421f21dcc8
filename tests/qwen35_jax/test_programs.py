"""What XLA is told about programs."""

from __future__ import annotations

import pytest

from qwen35_jax.programs import compiler_options
from qwen35_jax.steps import ProgramKey
from schedulers import Bucket


def key(kind, tokens, rows):
    return ProgramKey(kind, Bucket(tokens, 8 if tokens else 0, rows, 16), 1, "full")


def test_a_cpu_gets_no_options():
    assert compiler_options(key("decode", 0, 4), "cpu") == {}


@pytest.mark.parametrize(
    ("kind", "tokens", "rows", "generated"),
    [
        ("decode", 0, 256, True),
        ("prefill", 128, 0, True),
        ("prefill", 512, 0, False),
        ("unified", 8192, 64, False),
    ],
)
def test_generated_products_are_tried_only_for_few_tokens(kind, tokens, rows, generated):
    options = compiler_options(key(kind, tokens, rows), "gpu")
    assert options.get("xla_gpu_enable_triton_gemm", True) is generated
    assert "CONDITIONAL" in options["xla_gpu_enable_command_buffer"].split(",")


def test_transfers_get_options_as_well():
    assert "xla_gpu_memory_limit_slop_factor" in compiler_options(("merge", 4), "gpu")
