"""A Qwen3 of 8 billion weights through `calibrate --offload` and `quantize`: what is planned, what is measured.

    python scripts/large_model.py --device cuda --layers 4     the real sizes, four of its 36 blocks: some minutes
    python scripts/large_model.py --tiny                       small sizes, on a CPU, in less than a minute

Makes a model with random weights on disk (BF16, sharded, head and embedding untied, a tokenizer of bytes), calibrates
it on a few samples of the built-in text and quantizes it, each in a process of its own that tells its peak memory: of
the host as Linux counts it (VmHWM), of a GPU, of which it gets no more than the limit, what torch had allocated. Ends
with 1 when a process takes more than the limit, or the plan of `quantize --dry-run` is not within 15 % of what was
measured: on a CPU the rise of resident memory over what the libraries take, on a GPU its memory.

Disk, for all 36 blocks: 16 GB of weights, 29 GB of statistics and 10 GB of checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.15
NOISE = 64 << 20  # bytes: what the libraries keep for themselves once they are at work, whatever the model's size
MEASURED = "--measured"  # first argument of the processes this one starts
_M_MMAP_THRESHOLD = -3  # of <malloc.h>


@dataclass(frozen=True)
class Sizes:
    """Of a Qwen3 with 8 billion weights."""

    layers: int = 36
    hidden: int = 4096
    mlp: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936

    def block(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of one block."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (q, self.hidden),
            "self_attn.k_proj.weight": (kv, self.hidden),
            "self_attn.v_proj.weight": (kv, self.hidden),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "self_attn.o_proj.weight": (self.hidden, q),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.mlp, self.hidden),
            "mlp.up_proj.weight": (self.mlp, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.mlp),
        }

    def shards(self) -> list[dict[str, tuple[int, ...]]]:
        """One for the embedding, one a block, one for the head."""
        blocks = [
            {f"model.layers.{i}.{name}": shape for name, shape in self.block().items()} for i in range(self.layers)
        ]
        table = (self.vocab, self.hidden)
        last = {"model.norm.weight": (self.hidden,), "lm_head.weight": table}
        return [{"model.embed_tokens.weight": table}, *blocks, last]

    def disk_bytes(self) -> int:
        """Of model, statistics and a checkpoint under way."""
        weights = sum(a * b for shape in self.block().values() for a, b in [(*shape, 1)[:2]]) * self.layers
        inputs = 2 * self.hidden**2 + (self.heads * self.head_dim) ** 2 + self.mlp**2
        tables = 2 * self.vocab * self.hidden
        return 2 * (weights + tables) + 4 * inputs * self.layers + (3 * weights) // 2 + 2 * tables


TINY = Sizes(layers=2, hidden=512, mlp=1536, heads=8, kv_heads=2, head_dim=64, vocab=1000)


def main() -> int:
    if sys.argv[1:2] == [MEASURED]:
        return measured(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=str(value))
    parser.add_argument("--tiny", action="store_true", help=f"sizes that a CPU is quick with: {TINY}")
    parser.add_argument("--device", default="cpu", help="of both verbs (cpu)")
    parser.add_argument("--samples", type=int, default=8, help="sequences to calibrate on (8)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of each (512)")
    parser.add_argument("--limit-gib", type=float, default=12.0, help="memory that a process may take (12)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to work, and keep what is made (a temporary one)"
    )
    parser.add_argument("--json", type=Path, default=None, help="write what was found here")
    options = parser.parse_args()
    sizes = TINY if options.tiny else Sizes()
    sizes = replace(sizes, **{k: v for k in asdict(sizes) if (v := getattr(options, k)) is not None})
    sys.path.insert(0, str(ROOT / "src"))
    with tempfile.TemporaryDirectory(prefix="omniw4-large-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(folder).free, sizes.disk_bytes()
        if free < needed:
            print(f"error: {gib(needed)} are needed and {gib(free)} free in {folder}: take fewer --layers", flush=True)
            return 2
        found = run(sizes, folder, options.device, options.samples, options.seq_len, options.limit_gib)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    print("all held" if found["held"] else "BROKEN: " + "; ".join(found["broken"]), flush=True)
    return 0 if found["held"] else 1


def run(sizes: Sizes, folder: Path, device: str, samples: int, seq_len: int, limit_gib: float) -> dict[str, Any]:
    began = time.monotonic()
    model, stats, out = folder / "model", folder / "stats", folder / "w4a4"
    weights = make_model(model, sizes, device)
    print(f"model: {weights / 1e9:.2f} billion weights, made in {time.monotonic() - began:.0f} s", flush=True)
    data = ("--samples", samples, "--seq-len", seq_len)
    calibrate = verb(limit_gib, "calibrate", model, "--offload", *data, "--out", stats, "--device", device)
    quantize = ("quantize", model, "--stats", stats, "--device", device)
    plan = dry_run(*quantize) if calibrate["code"] == 0 else {}
    verbs = [calibrate, *([verb(limit_gib, *quantize, "--out", out)] if plan else [])]
    broken = [f"{one['verb']} ended with {one['code']}" for one in verbs if one["code"]]
    if not plan:
        broken.append("there is no plan")
    for one in verbs:
        for where in ("host", "gpu"):
            if one[f"{where}_peak"] > limit_gib * 2**30:
                broken.append(
                    f"{one['verb']} takes {gib(one[f'{where}_peak'])} of {where} memory, more than {limit_gib:g} GiB"
                )
    found: dict[str, Any] = {"sizes": asdict(sizes), "device": device, "verbs": verbs}
    if plan and verbs[1]["code"] == 0:
        on_gpu = device.startswith("cuda")
        planned = plan["gpu_memory_bytes" if on_gpu else "peak_memory_bytes"]
        taken = verbs[1]["gpu_peak"] if on_gpu else verbs[1]["host_peak"] - verbs[1]["host_before"]
        print(f"plan: {gib(planned)}, measured {gib(taken)}: {planned / taken:.2f} of it", flush=True)
        print(f"plan: {plan['estimated_seconds']} s of work, measured {verbs[1]['seconds']:.0f} s in all", flush=True)
        if abs(planned - taken) > TOLERANCE * taken + NOISE:
            broken.append(f"the plan states {gib(planned)}, and {gib(taken)} were measured")
        stated = ("peak_memory_bytes", "gpu_memory_bytes", "disk_bytes", "estimated_seconds")
        found |= {"planned": planned, "measured": taken, "plan": {key: plan[key] for key in stated}}
    seconds = round(time.monotonic() - began, 1)
    print(f"{seconds:.0f} s in all", flush=True)
    return {**found, "seconds": seconds, "broken": broken, "held": not broken}


def make_model(folder: Path, sizes: Sizes, device: str) -> int:
    """An ordinary Hugging Face folder; returns the number of weights.

    Rows of linears have length one and the branches of a block are scaled down, so that hidden states neither vanish
    nor explode on their way through the blocks.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    torch.manual_seed(0)
    shards, total, index = sizes.shards(), 0, {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: random_weight(name, shape, sizes.layers, device) for name, shape in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
        total += sum(tensor.numel() for tensor in tensors.values())
    note = {"metadata": {"total_size": 2 * total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(note))
    transformers.Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_id=0,
    ).save_pretrained(folder)
    save_tokenizer(folder)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # the verbs have the GPU to themselves, but for this process's context
    return total


def random_weight(name: str, shape: tuple[int, ...], layers: int, device: str) -> torch.Tensor:
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = 1.0 if "embed" in name else shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        scale *= (2 * layers) ** -0.5
    return torch.randn(shape, device=device).mul_(scale).to(torch.bfloat16).cpu()


def save_tokenizer(folder: Path) -> None:
    """A token for each byte, and one for the end of a text."""
    import tokenizers
    import transformers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{letter: i for i, letter in enumerate(letters, 1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def verb(limit_gib: float, *arguments: object) -> dict[str, Any]:
    """Run a verb in a process of its own, which says what it took."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        began = time.monotonic()
        command = [sys.executable, __file__, MEASURED, str(result), str(limit_gib), *map(str, arguments)]
        code = subprocess.run(command, env=environment(), check=False).returncode
        told = json.loads(result.read_text()) if result.is_file() else {"code": code, "host_peak": 0, "gpu_peak": 0}
        told |= {"verb": str(arguments[0]), "seconds": round(time.monotonic() - began, 1)}
    gpu = f", {gib(told['gpu_peak'])} of the GPU" if told["gpu_peak"] else ""
    print(f"{told['verb']}: {told['seconds']:.0f} s, {gib(told['host_peak'])} of the host at the peak{gpu}", flush=True)
    return told


def dry_run(*arguments: object) -> dict[str, Any]:
    began = time.monotonic()
    command = [sys.executable, "-m", "omniw4", *map(str, arguments), "--dry-run", "--json"]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=False)
    print(f"dry run: {time.monotonic() - began:.0f} s", flush=True)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def measured(result: Path, limit_gib: float, arguments: list[str]) -> int:
    """The command line in this process; what it took goes to ``result``. Of a GPU it gets no more than the limit, what
    torch keeps for later included."""
    import torch
    import transformers

    from omniw4 import calibrate, checkpoint, model, quantize  # noqa: F401  (part of what the libraries take)
    from omniw4.cli import app

    transformers.Qwen3ForCausalLM  # noqa: B018  (imported when it is asked for)
    gpu = arguments[arguments.index("--device") + 1].startswith("cuda")
    if gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit_gib * 2**30 / total, 1.0))
        torch.ones(64, 64, device="cuda").matmul(torch.ones(64, 64, device="cuda")).sum().item()
        torch.cuda.reset_peak_memory_stats()
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 256 << 10)  # freed tensors go back to the system, whatever their size
    before = status("VmRSS")
    code = app.run(arguments)
    told = {
        "code": code,
        "host_before": before,
        "host_peak": status("VmHWM"),
        "gpu_peak": torch.cuda.max_memory_allocated() if gpu else 0,
        "gpu_reserved": torch.cuda.max_memory_reserved() if gpu else 0,
    }
    result.write_text(json.dumps(told))
    return code


def status(key: str) -> int:
    """Bytes, of what Linux knows about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
