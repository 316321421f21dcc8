"""Where parameters lie on a mesh of devices: logical axes of every parameter, rules to mesh axes, checked divisions.

Every axis of a parameter has a logical name; a rule maps a logical name to a mesh axis or to none. A dimension that
does not divide over its mesh axis is refused with the numbers, at the time of configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwen35_jax.errors import UserInputError

MODEL_AXIS = "model"

# Logical axes by the parameter's path below its layer. The fused outputs of a projection share one name.
PARAMETER_AXES: dict[str, tuple[str, ...]] = {
    "embed": ("vocab", "hidden"),
    "final_norm": ("hidden",),
    "lm_head": ("hidden", "vocab"),
    "input_norm": ("hidden",),
    "post_norm": ("hidden",),
    "mlp.gate_up": ("hidden", "mlp"),
    "mlp.down": ("mlp", "hidden"),
    "mixer.qkv_proj": ("hidden", "heads"),
    "mixer.o_proj": ("heads", "hidden"),
    "mixer.q_norm": ("head_dim",),
    "mixer.k_norm": ("head_dim",),
    "mixer.in_proj": ("hidden", "linear_heads"),
    "mixer.out_proj": ("linear_heads", "hidden"),
    "mixer.conv_weight": ("taps", "linear_heads"),
    "mixer.A_log": ("linear_heads",),
    "mixer.dt_bias": ("linear_heads",),
    "mixer.norm": ("head_dim",),
}
# Each product is cut along its heads, its MLP columns or the vocabulary; what is left out is on every device.
DEFAULT_RULES: dict[str, str] = {name: MODEL_AXIS for name in ("vocab", "mlp", "heads", "linear_heads")}


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with one axis, :data:`MODEL_AXIS`, over the devices."""
    return Mesh(np.asarray(devices), (MODEL_AXIS,))


def logical_axes(path: str) -> tuple[str, ...]:
    """The logical axes of a parameter, by its path in the model.

    Raises:
        ValueError: no such parameter.
    """
    axes = PARAMETER_AXES.get(re.sub(r"^layers\.\d+\.", "", path))
    if axes is None:
        raise ValueError(f"parameter {path!r} has no logical axes")
    return axes


def partition_spec(path: str, rules: Mapping[str, str] = DEFAULT_RULES) -> PartitionSpec:
    """The mesh axes of a parameter's dimensions under the rules."""
    return PartitionSpec(*(rules.get(axis) for axis in logical_axes(path)))


def parameter_sharding(
    path: str, shape: tuple[int, ...], mesh: Mesh, rules: Mapping[str, str] = DEFAULT_RULES
) -> NamedSharding:
    """Where a parameter lies on the mesh.

    Raises:
        UserInputError: a dimension does not divide over its mesh axis; names the parameter and the numbers.
    """
    spec = partition_spec(path, rules)
    for dim, (size, mesh_axis) in enumerate(zip(shape, spec, strict=True)):
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            raise UserInputError(
                f"{path}: dimension {dim} ({logical_axes(path)[dim]}) of size {size} does not divide over the "
                f"{mesh.shape[mesh_axis]} devices of mesh axis {mesh_axis!r}"
            )
    return NamedSharding(mesh, spec)
