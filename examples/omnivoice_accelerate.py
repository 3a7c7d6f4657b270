"""Text to speech with OmniVoice on the fused engine.

    python examples/omnivoice_accelerate.py k2-fsa/OmniVoice "Hello, world." hello.wav
    python examples/omnivoice_accelerate.py k2-fsa/OmniVoice "Hello, world." hello.wav --checkpoint omnivoice-w4a4/

Without a checkpoint the model's own weights run, in its own 16-bit type. `--device cpu` runs the reference, slowly.
"""

import argparse

import soundfile
import torch
from omnivoice import OmniVoice

from omniw4.runtime.omnivoice import accelerate


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("wave")
    parser.add_argument("--checkpoint")
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args(arguments)
    dtype = torch.float32 if chosen.device == "cpu" else torch.float16

    model = OmniVoice.from_pretrained(chosen.model, dtype=dtype, device_map=chosen.device)
    accelerate(model, chosen.checkpoint)
    (wave,) = model.generate(text=chosen.text, language="en")
    soundfile.write(chosen.wave, wave, model.sampling_rate)


if __name__ == "__main__":
    main()
