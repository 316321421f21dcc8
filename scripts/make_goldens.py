#!/usr/bin/env python
"""Makes tests/goldens: what transformers computes for the miniature checkpoints of tests/oracle/tiny.py.

Runs in an environment of its own with torch and transformers (the extra `parity`); it imports neither JAX nor the
product, so the goldens cannot inherit its mistakes. For every case and length it runs the prefill and eight
teacher-forced decode steps with transformers' cache, in float32 and in bfloat16, holds the float64 oracle against
transformers' float32 (every layer's output and the log-probabilities), and writes a subsample of positions together
with transformers' own bfloat16-to-float32 distance, the yardstick of the product's bfloat16.

    python scripts/make_goldens.py                 # writes tests/goldens
    python scripts/make_goldens.py --check         # measures and compares with the committed ones, writes nothing
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig  # noqa: E402

from tests.oracle import goldens, tiny  # noqa: E402
from tests.oracle.qwen35_numpy import Oracle, log_softmax  # noqa: E402

# transformers' float32 against the exact value: its own rounding noise is about 7e-5 at most and 3e-6 in the mean on
# these models (up to 4e-4 at most on others). Layer outputs: largest error over the layer's root mean square.
MAX_LOGPROB_ERROR = 2e-4
MEAN_LOGPROB_ERROR = 1e-5
MAX_LAYER_ERROR = 2e-4


def build_model(case: str, tensors: dict[str, np.ndarray], dtype: torch.dtype) -> Qwen3_5ForCausalLM:
    """transformers' text model with the case's weights.

    In bfloat16 the tensors that published files hold in float32 (A_log, the norm of the recurrence) stay in float32:
    rounding them is a property of a loader, not of the arithmetic, and would only widen the yardstick.
    """
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**tiny.text_config(case))).to(dtype).eval()
    state = {
        name.replace(tiny.PREFIX, tiny.TEXT_ONLY_PREFIX): torch.from_numpy(value) for name, value in tensors.items()
    }
    for name, parameter in model.named_parameters():
        if tiny.is_float32_tensor(name):
            parameter.data = parameter.data.float()
    missing, unexpected = model.load_state_dict(state, strict=False)
    allowed = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if set(missing) - allowed or unexpected:
        raise SystemExit(f"{case}: tensors missing {missing}, unexpected {unexpected}")
    if model.config.tie_word_embeddings != (model.lm_head.weight is model.model.embed_tokens.weight):
        raise SystemExit(f"{case}: transformers did not tie the head as the configuration says")
    return model


def run_model(model: Qwen3_5ForCausalLM, tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Prefill of `length` tokens, then one decode step for each further one, through transformers' cache.

    Returns:
        logprobs float64 [T, V] and layer outputs float64 [L, T, D].
    """
    pieces: list[list[np.ndarray]] = [[] for _ in model.model.layers]

    def keep(index: int):
        def hook(module, args, output):
            pieces[index].append(output[0].double().numpy())

        return hook

    handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(model.model.layers)]
    logits, cache = [], None
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    try:
        for start, stop in [(0, length)] + [(t, t + 1) for t in range(length, len(tokens))]:
            output = model(ids[:, start:stop], cache=cache, use_cache=True)
            cache = output.cache
            logits.append(output.logits[0].double().numpy())
    finally:
        for handle in handles:
            handle.remove()
    return log_softmax(np.concatenate(logits)), np.stack([np.concatenate(piece) for piece in pieces])


def check_files(case: str, model: Qwen3_5ForCausalLM, tensors: dict[str, np.ndarray]) -> list[str]:
    """Complaints when transformers' own loader does not find the same model in the directories that tiny.py writes."""
    complaints = []
    for text_only in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            tiny.write_hf_dir(
                directory, case, dtype="float32", shards=2, text_only=text_only, tensors=tensors, skipped_tensors=True
            )
            loaded, info = Qwen3_5ForCausalLM.from_pretrained(
                directory, dtype=torch.float32, output_loading_info=True, local_files_only=True
            )
        layout = "text-only" if text_only else "full"
        if info["missing_keys"] or info["mismatched_keys"]:
            complaints.append(f"{case}: transformers misses tensors in the {layout} directory: {info}")
        wanted = dict(model.named_parameters())
        for name, value in loaded.named_parameters():
            if not torch.equal(value, wanted[name]):
                complaints.append(f"{case}: {name} differs after loading the {layout} directory")
    return complaints


def measure_case(case: str) -> tuple[dict, dict[str, np.ndarray], list[str]]:
    """Measures all lengths of a case: (numbers for the index, arrays for the npz, complaints)."""
    tensors = tiny.weights(case)
    oracle = Oracle(tiny.hf_config(case), tensors)
    exact_model = build_model(case, tensors, torch.float32)
    rounded_model = build_model(case, tensors, torch.bfloat16)
    numbers: dict = {"weights_sha256": goldens.weights_digest(tensors), "lengths": {}}
    arrays: dict[str, np.ndarray] = {}
    complaints = check_files(case, exact_model, tensors)
    for length, count in goldens.SEQUENCES.items():
        tokens = np.stack([tiny.token_ids(case, length + goldens.DECODE_STEPS, seed=i) for i in range(count)])
        wanted = [oracle.forward(sequence) for sequence in tokens]
        exact = [run_model(exact_model, sequence, length) for sequence in tokens]
        rounded = [run_model(rounded_model, sequence, length)[0] for sequence in tokens]
        exact_logprobs = np.stack([logprobs for logprobs, _ in exact])
        top, mean, _ = goldens.distance(exact_logprobs, np.stack([output.logprobs for output in wanted]))
        layer_errors = np.max(
            [goldens.relative_error(e[1], w.layer_outputs) for e, w in zip(exact, wanted, strict=True)], axis=0
        )
        bf16_max, bf16_mean, bf16_p99 = goldens.distance(np.stack(rounded), exact_logprobs)
        print(
            f"{case:12s} {count:2d} of length {length:3d}: oracle vs float32 max {top:.1e} mean {mean:.1e}, layers "
            f"{layer_errors.max():.1e}; bfloat16 vs float32 mean {bf16_mean:.4f} p99 {bf16_p99:.4f} max {bf16_max:.3f}",
            flush=True,
        )
        if top > MAX_LOGPROB_ERROR or mean > MEAN_LOGPROB_ERROR or layer_errors.max() > MAX_LAYER_ERROR:
            complaints.append(f"{case} length {length}: the oracle and transformers disagree")
        positions = goldens.kept_positions(length)
        logprobs, layers = exact[0]
        arrays[f"tokens_{length}"] = tokens.astype(np.uint16)
        arrays[f"positions_{length}"] = positions.astype(np.uint16)
        arrays[f"logprobs_{length}"] = logprobs[positions].astype(np.float32)
        arrays[f"layers_{length}"] = layers[:, positions].astype(np.float32)
        numbers["lengths"][str(length)] = {
            "sequences": count,
            "fp32_max": float(f"{top:.3e}"),
            "fp32_mean": float(f"{mean:.3e}"),
            "fp32_layer_errors": [float(f"{error:.3e}") for error in layer_errors],
            "bf16_max": round(bf16_max, 6),
            "bf16_mean": round(bf16_mean, 6),
            "bf16_p99": round(bf16_p99, 6),
        }
    return numbers, arrays, complaints


def compare_with_committed(case: str, numbers: dict, arrays: dict[str, np.ndarray]) -> list[str]:
    """Complaints about committed goldens that differ from what was just measured by more than rounding."""
    complaints = []
    committed = goldens.load_index()["cases"][case]
    if committed["weights_sha256"] != numbers["weights_sha256"]:
        complaints.append(f"{case}: the weights differ from those of the committed goldens")
    with np.load(goldens.GOLDENS_DIR / f"{case}.npz") as file:
        for name, value in arrays.items():
            if name not in file or file[name].shape != value.shape:
                complaints.append(f"{case}: {name} is missing or has another shape")
            elif not np.allclose(file[name], value, rtol=0, atol=2 * MAX_LOGPROB_ERROR):
                complaints.append(f"{case}: {name} differs by {np.abs(file[name] - value).max():.1e}")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed goldens, write nothing")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)

    index: dict = {
        "command": "python scripts/make_goldens.py",
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": platform.machine(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "attention": "sdpa",
        "distance": "|delta logprob| over all sequences, positions (prefill and steps) and ids; p99 = numpy.quantile",
        "cases": {},
    }
    complaints: list[str] = []
    goldens.GOLDENS_DIR.mkdir(exist_ok=True)
    for case in tiny.CASES:
        numbers, arrays, bad = measure_case(case)
        complaints += bad
        index["cases"][case] = numbers
        if arguments.check:
            complaints += compare_with_committed(case, numbers, arrays)
        elif not bad:
            np.savez_compressed(goldens.GOLDENS_DIR / f"{case}.npz", **arrays)
    if "jax" in sys.modules or "qwen35_jax" in sys.modules:
        complaints.append("JAX or the product was imported: goldens must not depend on them")
    for complaint in complaints:
        print("FAILED", complaint, file=sys.stderr)
    if complaints:
        return 1
    if not arguments.check:
        (goldens.GOLDENS_DIR / goldens.INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
    size = sum(file.stat().st_size for file in goldens.GOLDENS_DIR.iterdir())
    print(f"{len(tiny.CASES) * len(goldens.LENGTHS)} goldens agree; {goldens.GOLDENS_DIR} holds {size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
