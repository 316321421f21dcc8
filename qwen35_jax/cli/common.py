"""What commands share: their flags (engine options, sampling defaults), how a command line is read, exit codes.

Flags live in a ``FlagValues`` of the command, not in absl's global one: ``--help`` then shows this command's flags and
nothing of the libraries', and a command can be run more than once in a process.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags

from qwen35_jax.config import EngineConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.outputs import RequestError
from qwen35_jax.requests import template_switches
from qwen35_jax.sampling_params import SamplingParams, SamplingParamsError

EXIT_FAILED = 1
EXIT_USER_ERROR = 2

ENGINE_HELP: Mapping[str, str] = {
    "dtype": "Weights, activations and KV cache: auto (the checkpoint's), bfloat16 or float32.",
    "max_model_len": "Longest prompt + output in tokens; the default is what the model and the memory allow.",
    "max_num_seqs": "Most sequences at once; lowered, with a warning, to what the memory allows.",
    "max_num_batched_tokens": "Most prompt tokens in a step, a multiple of 64; decoding rows are not counted.",
    "gpu_memory_utilization": "Share of the device's memory that may be used.",
    "scheduler_policy": "How prompts and running rows share a step: off or auto.",
    "decode_overlap": "Prompts beside running rows: off (in turns), stream (in one program) or device (two devices).",
    "decode_steps": "Output tokens a dispatch while no prompt waits: 1 or 8.",
    "num_kv_pages": "Pages of 64 tokens in the KV cache; the default is what the memory allows.",
    "state_dtype": "Recurrent state: float32, or bfloat16 (half the memory, less exact).",
    "kernels": "Implementation of every kernel: auto, reference, a name, or op=name pairs with commas.",
    "overlap_dispatch": "Read results one dispatch late, so that the device does not wait for the host.",
    "async_chunks": "Most prompt chunks in flight with --decode_overlap=device.",
    "seed": "Seed of rows that bring none; random bits derive from it and from the row's custom_id.",
    "load_format": "auto, or random for random weights (the directory then needs no weights).",
    "compilation_cache_dir": "Where compiled programs are kept; the next start loads them. Keep it to yourself.",
    "enable_prefix_caching": "Not supported yet.",
    "tensor_parallel_size": "Only 1 is supported yet.",
    "data_parallel_size": "Only 1 is supported yet.",
    "debug_poison": "Fill freed memory with NaN, to find out who reads it.",
    "skip_tokenizer_init": "Take and give token ids only.",
    "batch_invariant": "Not supported yet.",
    "quantization": "Not supported yet.",
}

SAMPLING_HELP: Mapping[str, str] = {
    "temperature": "0 to 100; 0 is greedy.",
    "top_p": "Over 0, at most 1.",
    "top_k": "0 keeps all.",
    "min_p": "0 to 1.",
    "presence_penalty": "-2 to 2.",
    "frequency_penalty": "-2 to 2.",
    "repetition_penalty": "1 changes nothing.",
    "max_tokens": "Most output tokens; the default is 4096. It gives way to what room the context leaves a row.",
    "min_tokens": "Output does not end before this many.",
    "ignore_eos": "Go on after EOS, up to max_tokens.",
    "logprobs": "0 to 20 alternatives reported with every token.",
}

_HELP = ("-h", "-help", "--help", "--helpfull", "--helpshort")
_DEFINE = {"str": flags.DEFINE_string, "int": flags.DEFINE_integer, "float": flags.DEFINE_float}


class CommandLine:
    """The flags of one command.

    Args:
        usage: first line of the help.
        description: the text under it.
    """

    def __init__(self, usage: str, description: str):
        self.values = flags.FlagValues()
        self._usage = usage
        self._description = description
        self._groups: list[tuple[str, list[str]]] = []

    def group(self, title: str) -> None:
        """Flags defined from here on are shown under ``title``."""
        self._groups.append((title, []))

    def define(self, kind: str, name: str, default: Any, text: str) -> None:
        """Define a flag of type "str", "int", "float", "bool" or "list" (may be given several times)."""
        if kind == "bool":
            flags.DEFINE_boolean(name, default, text, flag_values=self.values)
        elif kind == "list":
            flags.DEFINE_multi_string(name, default, text, flag_values=self.values)
        else:
            _DEFINE[kind](name, default, text, flag_values=self.values)
        self._groups[-1][1].append(name)

    def define_engine(self) -> None:
        """Define a flag for every field of :class:`EngineConfig`, under its name and with its default."""
        self.group("Engine")
        for field in dataclasses.fields(EngineConfig):
            self.define(str(field.type).partition(" | ")[0], field.name, field.default, ENGINE_HELP[field.name])

    def define_sampling(self) -> None:
        """Define the sampling options of rows that do not say; not given means the model's generation_config."""
        self.group("Sampling of rows that do not say (default: the model's generation_config.json)")
        kinds = {field.name: str(field.type).partition(" | ")[0] for field in dataclasses.fields(SamplingParams)}
        for name, text in SAMPLING_HELP.items():
            self.define(kinds[name], name, None, text)
        self.define("list", "stop", None, "A string that ends the text; may be given several times.")
        self.define("bool", "enable_thinking", None, "Whether chats reason before they answer, if the template can.")
        self.define("str", "chat_template_kwargs", None, "A JSON object of switches for the chat template.")

    def parse(self, argv: Sequence[str]) -> None:
        """Read a command line (its first entry is the program).

        Raises:
            UserInputError: an unknown flag, a wrong value or a stray argument, by name.
        """
        if any(argument.lstrip("-").startswith("undefok") for argument in argv[1:]):
            raise UserInputError("--undefok is not supported: an unknown flag is always an error")
        try:
            rest = self.values(list(argv))
        except flags.Error as error:
            raise UserInputError(" ".join(str(error).split())) from error
        if len(rest) > 1:
            raise UserInputError(f"unexpected argument {rest[1]!r}: options are given as --name=value (see --help)")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)

    def require(self, *names: str) -> None:
        """Raises: UserInputError: one of the flags was not given, or is empty."""
        for name in names:
            if not getattr(self.values, name):
                raise UserInputError(f"--{name} is needed (see --help)")

    def engine_options(self) -> dict[str, Any]:
        """The fields of :class:`EngineConfig`."""
        return {field.name: getattr(self.values, field.name) for field in dataclasses.fields(EngineConfig)}

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """``defaults`` with the flags that were given.

        Raises:
            UserInputError: a value is out of range.
        """
        given = {name: getattr(self.values, name) for name in (*SAMPLING_HELP, "stop")}
        try:
            return SamplingParams.from_dict(given, defaults)
        except SamplingParamsError as error:
            raise UserInputError(f"--{error.field}: {str(error).removeprefix(f'{error.field}: ')}") from error

    def chat_template_switches(self) -> dict[str, Any]:
        """What chats get that do not say.

        Raises:
            UserInputError: --chat_template_kwargs is no JSON object, or holds what no template takes.
        """
        switches: Any = {}
        if self.values.chat_template_kwargs is not None:
            try:
                switches = json.loads(self.values.chat_template_kwargs, parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                raise UserInputError(f"--chat_template_kwargs is not valid JSON: {error}") from error
            if not isinstance(switches, dict):
                raise UserInputError("--chat_template_kwargs must be a JSON object")
        if self.values.enable_thinking is not None:
            switches["enable_thinking"] = self.values.enable_thinking
        try:
            return template_switches(switches)
        except RequestError as error:
            raise UserInputError(f"--{error}") from error

    def help(self) -> str:
        """The whole help text."""
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        parts = [f"usage: {self._usage}", "", textwrap.dedent(self._description).strip()]
        for title, names in self._groups:
            parts += ["", f"{title}:"]
            for name in names:
                flag = self.values[name]
                switch = f"--[no]{name}" if flag.boolean else f"--{name}"
                default = "" if flag.default in (None, [], "") else f" [{_shown(flag.default)}]"
                body = textwrap.fill(f"{flag.help}{default}", width - 6)
                parts += [f"  {switch}", textwrap.indent(body, " " * 6)]
        return "\n".join(parts)


def names_in_order(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names that a flag lists, commas between them, in the order of ``known``.

    Raises:
        UserInputError: one is not known, or there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserInputError(f"--{flag}: {name!r} is none of {', '.join(known)}")
    if not names:
        raise UserInputError(f"--{flag} names no {flag.removesuffix('s')}")
    return tuple(name for name in known if name in names)


def run_command(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a command as a process: its exit code is that of ``main``, or 143 where SIGTERM ended it.

    SIGTERM raises SystemExit as an interrupt raises KeyboardInterrupt, so that what a command has started ends with it
    and what it has made for itself is removed.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):
        # A path or a message that the terminal's encoding lacks must not end a job whose answers are all written.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv))


def run_with_flags(
    line: CommandLine, argv: Sequence[str], body: Callable[[CommandLine], int], *user_errors: type[Exception]
) -> int:
    """What every command does around its work: the help text, its flags, and :func:`exit_code`.

    Args:
        line: the flags; read when ``body`` is called.
        argv: the program's name and its flags.
        body: the work; returns the exit code.
        *user_errors: see :func:`exit_code`.

    Returns:
        The exit code.
    """

    def read_and_run() -> int:
        if any(word in _HELP for word in argv[1:]):
            print(line.help())
            return 0
        line.parse(argv)
        return body(line)

    return exit_code(read_and_run, *user_errors)


def exit_code(body: Callable[[], int], *user_errors: type[Exception]) -> int:
    """The exit code of ``body``; 2 and a line on stderr when the user is at fault, 130 when the user interrupts it.

    Args:
        body: the work.
        *user_errors: exceptions that are the user's to mend, beside :class:`UserInputError`.
    """
    try:
        return body()
    except (UserInputError, *user_errors) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
