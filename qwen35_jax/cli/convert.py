"""``qwen35-convert``: a Hugging Face directory to one that loads without conversion.

The conversion runs on the CPU and needs the memory of a few tensors, not of the model.
"""

from __future__ import annotations

import signal
import sys

from absl import flags

from qwen35_jax.cli.command import run_command

_MODEL = flags.DEFINE_string("model", None, "Hugging Face directory of the model.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to make; absent or empty.", required=True)
_DTYPE = flags.DEFINE_enum(
    "dtype", "auto", ["auto", "bfloat16", "float32"], "dtype of the matrices; auto takes the checkpoint's."
)


def main() -> int:
    """Converts as the flags say."""
    import jax

    # A GPU would bring nothing, and a busy one would be in the way.
    jax.config.update("jax_platforms", "cpu")
    from qwen35_jax.checkpoint import convert
    from qwen35_jax.progress import Progress

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the partial output is removed
    dtype = None if _DTYPE.value == "auto" else _DTYPE.value
    manifest = convert(_MODEL.value, _OUTPUT.value, dtype=dtype, progress=Progress())
    size = sum(manifest.files.values())
    print(
        f"{_OUTPUT.value}: {len(manifest.parameters)} parameters in {manifest.dtype}, {size / 2**20:,.0f} MiB "
        f"({manifest.source['skipped_tensors']} tensors that text generation does not use were left out)"
    )
    return 0


def run() -> None:
    """Entry point of ``qwen35-convert``."""
    run_command(main)


if __name__ == "__main__":
    run()
