"""The ops of a quantized layer, one file each: contract, reference in plain torch, registration with torch.library.

Importing this package registers ``torch.ops.omniw4.*``. The implementation registered here is the reference and runs
on every device in layout "canonical"; kernels add theirs for CUDA with ``<op>.register_kernel("cuda")``.
"""

from omniw4.ops.gemm_lora_up import gemm_lora_up, gemm_lora_up_ref, group_sums_ref
from omniw4.ops.gemm_qknorm_rope import gemm_qknorm_rope, gemm_qknorm_rope_ref
from omniw4.ops.inv_rms import inv_rms, inv_rms_ref
from omniw4.ops.layouts import CANONICAL, activation_shapes, kernel_layout, register_kernels
from omniw4.ops.pack_lora_act import pack_lora_act, pack_lora_act_ref, unpack_lora_act
from omniw4.ops.qknorm_rope import qknorm_rope, qknorm_rope_ref, rope_tables
from omniw4.ops.quantize_lora_down import quantize_lora_down, quantize_lora_down_ref, transform

import omniw4.ops.cuda  # noqa: F401  isort: skip  (registers the kernels with the ops above)

__all__ = [
    "CANONICAL",
    "activation_shapes",
    "gemm_lora_up",
    "gemm_lora_up_ref",
    "gemm_qknorm_rope",
    "gemm_qknorm_rope_ref",
    "group_sums_ref",
    "inv_rms",
    "inv_rms_ref",
    "kernel_layout",
    "pack_lora_act",
    "pack_lora_act_ref",
    "qknorm_rope",
    "qknorm_rope_ref",
    "quantize_lora_down",
    "quantize_lora_down_ref",
    "register_kernels",
    "rope_tables",
    "transform",
    "unpack_lora_act",
]
