"""The error class of things a user can put right: the commands print it as one line and exit with code 2."""

from __future__ import annotations


class UserInputError(ValueError):
    """Something the user gave (a path, a file, a field, an option) is wrong or not supported.

    The message is one line and names the thing: the file, the field, the tensor or the option, with the numbers.
    """
