"""``qwen35-convert``: a Hugging Face directory to one that loads without conversion."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from qwen35_jax.cli.common import EXIT_FAILED, CommandLine, run_command, run_with_flags
from qwen35_jax.errors import UserInputError

_DTYPES = ("auto", "bfloat16", "float32")

_USAGE = "qwen35-convert --model=HF_DIR --output=DIR [--dtype=auto|bfloat16|float32]"
_DESCRIPTION = """
Reads the checkpoint in HF_DIR, fuses and checks its tensors, and writes them to DIR as Orbax checkpoints, with the
config and tokenizer files beside them. Every command takes DIR as its --model, and starts faster from it.

The conversion runs on the CPU, needs the memory of a few tensors rather than of the model, and writes DIR completely or
not at all.

Exit codes: 0 converted; 1 it broke off (a full disk), and nothing is left; 2 something in the command line or the
checkpoint is wrong, and nothing was written; 130 or 143 interrupted by a signal, and nothing is left.
"""


def command_line() -> CommandLine:
    """The flags of this command."""
    line = CommandLine(_USAGE, _DESCRIPTION)
    line.group("Conversion")
    line.define("str", "model", None, "Hugging Face directory of the model.")
    line.define("str", "output", None, "Directory to make; absent or empty.")
    line.define("str", "dtype", "auto", "dtype of the matrices: auto (the checkpoint's), bfloat16 or float32.")
    return line


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: the program's name and its flags.

    Returns:
        The exit code.
    """
    return run_with_flags(command_line(), argv, _run)


def run() -> NoReturn:
    """Entry point of the console command."""
    run_command(main)


def _run(line: CommandLine) -> int:
    line.require("model", "output")
    if line.dtype not in _DTYPES:
        raise UserInputError(f"--dtype must be one of {', '.join(_DTYPES)}, got {line.dtype!r}")
    try:
        _convert(line.model, line.output, None if line.dtype == "auto" else line.dtype)
    except OSError as error:  # the disk ran full, a file server went away
        print(f"error: the conversion broke off: {error}; nothing is left", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _convert(model: str, output: str, dtype: str | None) -> None:
    import jax

    # A GPU would bring nothing, and a busy one would be in the way.
    jax.config.update("jax_platforms", "cpu")
    from qwen35_jax.checkpoint import convert
    from qwen35_jax.progress import Progress

    manifest = convert(model, output, dtype=dtype, progress=Progress())
    size = sum(size for size, _ in manifest.files.values())
    skipped = manifest.source["skipped_tensors"]
    print(
        f"{output}: {len(manifest.parameters)} parameters in {manifest.dtype}, {size / 2**20:,.0f} MiB"
        f" ({skipped} tensors that text generation does not use were left out)"
    )


if __name__ == "__main__":
    run()
