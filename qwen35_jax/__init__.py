"""Offline batch generation with Qwen3.5 in JAX.

Importing the package is cheap: the public names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qwen35_jax import code_state as _code_state  # noqa: F401 - before any other module: it digests their files

if TYPE_CHECKING:
    from qwen35_jax.config import EngineConfig as EngineConfig
    from qwen35_jax.config import ModelConfig as ModelConfig
    from qwen35_jax.errors import UserInputError as UserInputError
    from qwen35_jax.llm import LLM as LLM
    from qwen35_jax.outputs import CompletionOutput as CompletionOutput
    from qwen35_jax.outputs import GenerationError as GenerationError
    from qwen35_jax.outputs import Logprob as Logprob
    from qwen35_jax.outputs import RequestMetrics as RequestMetrics
    from qwen35_jax.outputs import RequestOutput as RequestOutput
    from qwen35_jax.sampling_params import SamplingParams as SamplingParams

_HOMES = {
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "GenerationError": "outputs",
    "LLM": "llm",
    "Logprob": "outputs",
    "ModelConfig": "config",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "UserInputError": "errors",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
