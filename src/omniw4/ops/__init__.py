"""The ops of a quantized layer, one file each: contract, reference in plain torch, registration with torch.library.

Importing this package registers ``torch.ops.omniw4.*``. The implementation registered here is the reference and runs
on every device in layout "canonical"; kernels add theirs for CUDA with ``<op>.register_kernel("cuda")``.
"""

import omniw4.ops.cuda
from omniw4.ops.attention_cuda import attention_kernel_runs
from omniw4.ops.attention_varlen import attention_varlen, attention_varlen_out, attention_varlen_ref
from omniw4.ops.gemm_lora_up import gemm_lora_up, gemm_lora_up_ref, group_sums_ref, integer_sums_ref
from omniw4.ops.gemm_qknorm_rope import gemm_qknorm_rope, gemm_qknorm_rope_ref
from omniw4.ops.inv_rms import inv_rms, inv_rms_ref
from omniw4.ops.layouts import CANONICAL, activation_shapes, kernel_layout, register_kernels
from omniw4.ops.pack_lora_act import pack_lora_act, pack_lora_act_ref, unpack_lora_act
from omniw4.ops.qknorm_rope import qknorm_rope, qknorm_rope_ref, rope_tables
from omniw4.ops.quantize_fp8 import quantize_fp8, quantize_fp8_ref
from omniw4.ops.quantize_lora_down import quantize_lora_down, quantize_lora_down_ref, transform
from omniw4.ops.rms_norm import rms_norm, rms_norm_ref
from omniw4.ops.round_columns import round_columns, round_columns_ref
from omniw4.ops.swiglu import swiglu, swiglu_ref

import omniw4.ops.cuda_rows  # noqa: F401  isort: skip  (the same for the ops of the dense back ends)

__all__ = [
    "CANONICAL",
    "activation_shapes",
    "attention_kernel_runs",
    "attention_varlen",
    "attention_varlen_out",
    "attention_varlen_ref",
    "gemm_lora_up",
    "gemm_lora_up_ref",
    "gemm_qknorm_rope",
    "gemm_qknorm_rope_ref",
    "group_sums_ref",
    "integer_sums_ref",
    "inv_rms",
    "inv_rms_ref",
    "kernel_layout",
    "pack_lora_act",
    "pack_lora_act_ref",
    "qknorm_rope",
    "qknorm_rope_ref",
    "quantize_fp8",
    "quantize_fp8_ref",
    "quantize_lora_down",
    "quantize_lora_down_ref",
    "register_kernels",
    "rms_norm",
    "rms_norm_ref",
    "rope_tables",
    "round_columns",
    "round_columns_ref",
    "swiglu",
    "swiglu_ref",
    "transform",
    "unpack_lora_act",
]
