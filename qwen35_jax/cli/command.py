"""What the console commands share: flags, and one clear line with exit code 2 for what a user can put right."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags
from absl import logging as absl_logging

from qwen35_jax.errors import UserInputError

EXIT_USER_ERROR = 2


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Parses flags, runs ``main`` and exits.

    Exit codes: what ``main`` returns (None is 0); 2 with one line on stderr for a bad flag, a stray argument or a
    :class:`UserInputError`; 130 when interrupted.
    """
    app.run(lambda argv: _guarded(main), flags_parser=_parse)
    raise AssertionError("app.run exits")


def _guarded(main: Callable[[], int | None]) -> int | None:
    if not flags.FLAGS["verbosity"].present:  # this project's own lines, but only the warnings of libraries
        absl_logging.set_verbosity(absl_logging.WARNING)
        logging.getLogger("qwen35_jax").setLevel(logging.INFO)
    try:
        return main()
    except UserInputError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        rest = flags.FLAGS(list(argv))
    except flags.Error as error:
        sys.exit(_fail(" ".join(str(error).split())))
    if len(rest) > 1:
        sys.exit(_fail(f"unexpected argument {rest[1]!r}: options are given as --name=value (see --help)"))
    return rest


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USER_ERROR
