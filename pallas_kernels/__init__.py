"""GPU kernels and their plain-jnp references.

Nine ops; each is a folder of the same name with ``api.py`` (the public function), ``reference.py`` (its definition),
``specs.py`` (real model shapes) and one file per further implementation. The public functions are exported here, so
``pallas_kernels.gdn_decode`` is the function; ``from pallas_kernels.gdn_decode import specs`` reaches into its folder.
"""

from pallas_kernels.add_rms_norm.api import add_rms_norm
from pallas_kernels.causal_conv.api import causal_conv
from pallas_kernels.gated_rms_norm.api import gated_rms_norm
from pallas_kernels.gdn_decode.api import gdn_decode
from pallas_kernels.gdn_prefill.api import gdn_prefill
from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.paged_decode_attention.api import paged_decode_attention
from pallas_kernels.paged_prefill_attention.api import paged_prefill_attention
from pallas_kernels.registry import UnknownImplementation, UnsupportedArguments, describe
from pallas_kernels.swiglu_product.api import swiglu_product

__all__ = [
    "UnknownImplementation",
    "UnsupportedArguments",
    "add_rms_norm",
    "causal_conv",
    "describe",
    "gated_rms_norm",
    "gdn_decode",
    "gdn_prefill",
    "kv_write",
    "paged_decode_attention",
    "paged_prefill_attention",
    "swiglu_product",
]
