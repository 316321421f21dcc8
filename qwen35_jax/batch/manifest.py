"""The manifest beside a job's output: what its answers depend on, so that a resumed job cannot mix two models.

``OUT.jsonl.manifest.json`` holds digests of the model's files, the options that change answers, and the sampling
defaults. Options that change only speed (batch sizes, scheduling, kernels) are left out on purpose: they may be changed
between two runs of one job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from qwen35_jax.config import EngineConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.sampling_params import SamplingParams

FORMAT = 1

_ANSWER_OPTIONS = (
    "dtype",
    "state_dtype",
    "load_format",
    "max_model_len",
    "quantization",
    "seed",
    "skip_tokenizer_init",
)
# What a model is made of; other files may come and go, those of a job in the same directory among them.
_MODEL_SUFFIXES = (".json", ".jinja", ".safetensors", ".txt", ".model")
_MODEL_FOLDERS = ("params", "additional_chat_templates")
_JOB_SUFFIX = ".manifest.json"
_SAMPLES = 16  # blocks read of each file
_BLOCK = 4096


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What the answers of a job depend on.

    Attributes:
        model_files: relative path to digest, see :func:`model_digests`.
        options: engine options that change answers.
        sampling: the job's sampling defaults.
        chat_template_kwargs: the job's defaults for chats.
        model: the model's directory; for people, not compared.
        input: the input's path; for people, not compared (rows are compared one by one).
    """

    model_files: Mapping[str, str]
    options: Mapping[str, Any]
    sampling: Mapping[str, Any]
    chat_template_kwargs: Mapping[str, Any]
    model: str = ""
    input: str = ""

    @classmethod
    def of_job(
        cls,
        model: str,
        config: EngineConfig,
        sampling: SamplingParams,
        chat_template_kwargs: Mapping[str, Any],
        input_path: str,
    ) -> Manifest:
        """The manifest of a job.

        Raises:
            UserInputError: the model's files cannot be read.
        """
        return cls(
            model_files=model_digests(model),
            options={name: getattr(config, name) for name in _ANSWER_OPTIONS},
            sampling=json.loads(json.dumps(dataclasses.asdict(sampling))),
            chat_template_kwargs=dict(chat_template_kwargs),
            model=os.path.abspath(model),
            input=os.path.abspath(input_path),
        )

    def write(self, path: str) -> None:
        """Write to ``path``, all of it or nothing."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        temporary = f"{path}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, ensure_ascii=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: str) -> Manifest:
        """The manifest of an earlier run.

        Raises:
            UserInputError: the file is unreadable or no manifest.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            if not isinstance(content, dict):
                raise ValueError("not an object")
            if content.pop("format", None) != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            manifest = cls(**content)
            for name in ("model_files", "options", "sampling", "chat_template_kwargs"):
                if not isinstance(getattr(manifest, name), dict):
                    raise ValueError(f"{name} is not an object")
            return manifest
        except (OSError, ValueError, TypeError) as error:
            raise UserInputError(f"cannot resume: {path} is not a job's manifest: {error}") from error

    def differences(self, other: Manifest) -> list[str]:
        """What of ``other`` (an earlier run) differs from this one, one phrase each."""
        found = []
        for name in sorted({*self.model_files, *other.model_files}):
            if name not in other.model_files:
                found.append(f"model file {name} is new")
            elif name not in self.model_files:
                found.append(f"model file {name} is gone")
            elif self.model_files[name] != other.model_files[name]:
                found.append(f"model file {name} differs")
        groups = (
            ("", self.options, other.options),
            ("sampling default ", self.sampling, other.sampling),
            ("chat_template_kwargs.", self.chat_template_kwargs, other.chat_template_kwargs),
        )
        for prefix, now, before in groups:
            for name in sorted({*now, *before}):
                if now.get(name) != before.get(name):
                    found.append(f"{prefix}{name} was {before.get(name)!r}, is {now.get(name)!r}")
        return found


def model_digests(model: str) -> dict[str, str]:
    """A digest of every file that belongs to the model in a directory, by relative path.

    Small files are read whole. Of large ones the size and sixteen blocks spread over the file are taken, which tells
    any two trainings apart without reading gigabytes.

    Raises:
        UserInputError: a file cannot be read.
    """
    root = pathlib.Path(model)
    try:
        return {path.relative_to(root).as_posix(): _file_digest(path) for path in sorted(_model_files(root))}
    except OSError as error:
        raise UserInputError(f"cannot read {error.filename or model}: {error.strerror or error}") from error


def _model_files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    for path in root.iterdir():
        named_so = path.suffix.lower() in _MODEL_SUFFIXES and not path.name.endswith(_JOB_SUFFIX)
        if named_so and not path.name.startswith(".") and path.is_file():
            yield path
    for folder in _MODEL_FOLDERS:
        for directory, _, names in os.walk(root / folder):
            yield from (path for name in names if (path := pathlib.Path(directory, name)).is_file())


def _file_digest(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.blake2b(str(size).encode(), digest_size=12)
        if size <= 4 * _SAMPLES * _BLOCK:
            digest.update(file.read())
        else:
            for index in range(_SAMPLES):
                file.seek((size - _BLOCK) * index // (_SAMPLES - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
