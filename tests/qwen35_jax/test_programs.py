"""What XLA is told about programs, and the order in which they are lowered and compiled."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import pytest

from qwen35_jax import programs
from qwen35_jax.config import ModelConfig
from qwen35_jax.params import ParamPack
from qwen35_jax.programs import ProgramSet, compiler_options
from qwen35_jax.steps import ProgramKey, StepSpec, device_state_shapes
from schedulers import Bucket

# The programs of a tiny engine, lowered for a GPU that is not here, in the order in which an engine lowers them.
LOWER = """
import hashlib, json, jax, jax.numpy as jnp
from qwen35_jax import runtime
from qwen35_jax.config import ModelConfig
from tests.pallas_kernels.test_mosaic_sm90 import ON_H200
from tests.qwen35_jax.test_programs import program_set
runtime.prepare(0.9, None)
found = {}
with jax.sharding.use_abstract_mesh(ON_H200):
    for job in program_set(jnp.bfloat16).jobs().values():
        text = job.trace().lower(lowering_platforms=("cuda",)).as_text()
        counts = [text.count(word) for word in ("@mosaic_gpu", "/triton.py")]
        found[job.name] = [hashlib.sha256(text.encode()).hexdigest(), *counts]
print(json.dumps(found))
"""


def key(kind, tokens, rows, variant="full"):
    return ProgramKey(kind, Bucket(tokens, 8 if tokens else 0, rows, 16), 1, variant)


GREEDY = (key("decode", 0, 8, "greedy"), key("prefill", 128, 0, "greedy"))


def program_set(dtype=jnp.float32, keys=GREEDY) -> ProgramSet:
    """Programs of a tiny model that has only shapes."""
    layers = ("linear_attention", "full_attention")
    config = ModelConfig.preset("tiny-4b", vocab_size=512, layer_types=layers)
    pack = ParamPack(config, dtype=dtype)
    shapes = device_state_shapes(config, 65, 9, jnp.dtype(dtype), jnp.dtype("float32"))
    spec = StepSpec(pack, config.vocab_size)
    return ProgramSet(spec, jax.devices()[0], pack.leaf_specs, shapes, keys, extract_widths=(1,), merge_widths=(1, 2))


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


@pytest.mark.timeout(200)
def test_two_processes_lower_the_same_texts():
    """JAX's own cache goes by the text, serialized kernels with their locations and counters included."""
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", LOWER],
            cwd=root,
            env=environment | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [child.communicate(timeout=180) for child in children]
    assert not any(child.returncode for child in children), outputs
    first, second = (json.loads(out) for out, _ in outputs)
    assert first == second and len(first) == 6
    assert sum(kernels for _, kernels, _ in first.values()) > 2
    assert not any(files for *_, files in first.values()), "a kernel holds the stack of its trace"


def test_large_programs_come_first_in_whatever_order_they_are_asked_for():
    keys = [
        key("unified", 512, 8),
        key("prefill", 512, 0),
        key("prefill", 512, 0, "greedy"),
        key("prefill", 128, 0),
        key("decode", 0, 256),
        key("decode", 0, 8),
        key("decode", 0, 8, "greedy"),
    ]
    shuffled = list(keys)
    random.Random(1).shuffle(shuffled)
    rest = [("extract", 1), ("merge", 1), ("merge", 2), "fill"]
    assert list(program_set(keys=tuple(shuffled)).jobs()) == keys + rest


class Fakes:
    """Stands in for tracing, lowering and compiling; remembers who did what."""

    def __init__(self, monkeypatch, fails=None):
        self.lowered, self.compiled, self.fails = [], [], fails
        self.overlapped = threading.Event()
        monkeypatch.setattr(programs.Job, "trace", lambda job: self._trace(job))

    def _trace(self, job):
        return types.SimpleNamespace(lower=lambda: self._lower(job))

    def _lower(self, job):
        if self.lowered and self.fails is None:
            assert self.overlapped.wait(30), "nothing is compiled while the next program is lowered"
        self.lowered.append((job.name, threading.get_ident()))

        def compile(compiler_options):
            self.overlapped.set()
            if self.fails is not None and job.name.startswith(self.fails):
                raise RuntimeError(f"{job.name} does not compile")
            self.compiled.append(job.name)
            return types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(temp_size_in_bytes=7))

        return types.SimpleNamespace(compile=compile)


def test_one_thread_lowers_in_order_while_others_compile(monkeypatch):
    fakes, lines = Fakes(monkeypatch), []
    found = program_set()
    found.compile(lambda *line: lines.append(line), threads=2)
    names = [job.name for job in found.jobs().values()]
    assert fakes.lowered == [(name, threading.get_ident()) for name in names]
    assert sorted(fakes.compiled) == sorted(names)
    assert [line[:2] for line in lines] == [(done, len(names)) for done in range(1, len(names) + 1)]
    assert all(note.startswith("bucket ") and note.endswith(" s") for *_, note in lines)
    assert found.number == len(names) and found.num_loaded == 0 and found.scratch_bytes() == 7
    found.compile(threads=1)  # nothing is left to do
    assert len(fakes.lowered) == len(names)


def test_a_program_that_does_not_compile_ends_the_start(monkeypatch):
    fakes = Fakes(monkeypatch, fails="prefill")
    with pytest.raises(RuntimeError, match="prefill T=128 .* does not compile"):
        program_set().compile(threads=1)
    assert len(fakes.compiled) < 5
