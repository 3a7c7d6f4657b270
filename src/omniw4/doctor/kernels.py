"""The compiled kernels: which architectures, which families run here, and whether each gets a known answer right."""

from __future__ import annotations

import torch

from omniw4 import int4, ops, repack
from omniw4.doctor.check import Check, Status
from omniw4.errors import OmniW4Error
from omniw4.ops import extension
from omniw4.runtime.linear import W4A4Linear
from omniw4.tensors import LinearSpec, QuantizedLinear

M, N, K = 37, 192, 128
SPECS = {
    "W4A4": LinearSpec(act_bits=4, rank=0, rotation="none"),
    "W4A8": LinearSpec(act_bits=8, rank=0, rotation="none"),
    "W4A4 integer scales": LinearSpec(act_bits=4, rank=0, rotation="none", scale_type="integer"),
    "W4A8 integer scales": LinearSpec(act_bits=8, rank=0, rotation="none", scale_type="integer"),
}


def known_answer(spec: LinearSpec) -> tuple[torch.Tensor, QuantizedLinear, torch.Tensor]:
    """A linear whose every scale is exactly 1, so that its output is a matrix of small integers.

    Returns:
        x ``[M, K]`` float16, the linear, and y ``[M, N]`` int32 by plain integer arithmetic.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-2, 3, (N, K), generator=generator, dtype=torch.int8)
    x = torch.randint(-7, 8, (M, K), generator=generator, dtype=torch.int32)
    largest = int4.INT8_MAX if spec.act_bits == 8 else int4.INT4_MAX
    x[:, :: int4.GROUP_SIZE] = largest  # the scale of a token or group is its largest magnitude over this
    groups = K // int4.GROUP_SIZE
    integer = spec.scale_type == "integer"
    linear = QuantizedLinear(
        spec,
        int4.pack_nibbles(weight),
        torch.ones(N, groups, dtype=torch.uint8 if integer else torch.float16),
        row_scales=torch.ones(N) if integer else None,
    )
    return x.to(torch.float16), linear, x @ weight.to(torch.int32).T


def try_family(layout: str, spec: LinearSpec, device: torch.device) -> str:
    """Run the known answer through one family: "exact", or a sentence on what is wrong or not there."""
    if layout != ops.CANONICAL and (reason := repack.get(layout).unsupported(spec)):
        return f"not offered: {reason}"
    x, linear, wanted = known_answer(spec)
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    try:
        module = W4A4Linear.from_quantized(linear.to(device))
        module.prepare(layout, dtype=dtype)
        y = module(x.to(device, dtype)).cpu()
    except OmniW4Error as e:
        return f"not there: {e.message}"
    except RuntimeError as e:
        return f"failed: {' '.join(str(e).split())[:120]}"
    wrong = int((y.float() != wanted.float()).sum())
    return "exact" if wrong == 0 else f"WRONG in {wrong} of {wanted.numel()} values"


def checks() -> list[Check]:
    found = [_family("reference", ops.CANONICAL, torch.device("cpu"))]
    if reason := extension.why_missing():
        status: Status = "warning" if torch.cuda.is_available() else "note"
        found.append(Check("kernels", "compiled", status, reason, "`make kernels`; needs nvcc, no GPU"))
        return found
    archs = extension.compiled_archs()
    found.append(Check("kernels", "compiled", "ok", f"{len(extension.module().kernels())} for {extension.told(archs)}"))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        capability = torch.cuda.get_device_capability(device)
        if not extension.runs_on(capability, archs):
            wanted = f"{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")
            advice = f"compile for it: `OMNIW4_CUDA_ARCHS={wanted} make kernels`"
            found.append(Check("kernels", f"on cuda:{index}", "problem", "none runs on this GPU", advice))
            continue
        taken = {name: ops.kernel_layout(device, spec.act_bits, spec.scale_type) for name, spec in SPECS.items()}
        told = ", ".join(f"{name} {layout}" for name, layout in taken.items())
        slow = [name for name, layout in taken.items() if layout == ops.CANONICAL]
        status, advice = ("note", f"{', '.join(slow)}: the slow reference runs") if slow else ("ok", "")
        if extension.compiled_as_ptx(capability, archs):
            told += "; compiled by the driver from PTX, untested on this architecture"
        found.append(Check("kernels", f"taken on cuda:{index}", status, told, advice))
        found += [_family(f"{layout} on cuda:{index}", layout, device) for layout in repack.LAYOUTS]
    return found


def _family(name: str, layout: str, device: torch.device) -> Check:
    """Known answers of one family at every width it offers."""
    results = {width: try_family(layout, spec, device) for width, spec in SPECS.items()}
    ran = {width: told for width, told in results.items() if not told.startswith("not ")}
    if not ran:
        return Check("kernels", name, "note", "; ".join(dict.fromkeys(results.values())))
    told = ", ".join(f"{width} {result}" for width, result in ran.items())
    native = ""
    if device.type == "cuda" and layout == "mma_s4":
        fits = repack.auto(torch.cuda.get_device_capability(device)) == layout
        native = "; native" if fits else "; emulated on this GPU, its times prove nothing"
    if any(result != "exact" for result in ran.values()):
        advice = "do not use it: rebuild with `make kernels`, and report the line above"
        return Check("kernels", name, "problem", told + native, advice)
    return Check("kernels", name, "ok", told + native)
