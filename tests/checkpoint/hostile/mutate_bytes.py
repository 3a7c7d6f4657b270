"""Mutations that know nothing of JSON: cuts, flipped bits, splices."""

from __future__ import annotations

import random
from collections.abc import Iterator

from mutation import Base, Mutation, entries, split_file

from omniw4 import errors


def truncations(base: Base) -> Iterator[Mutation]:
    """Every JSON file ends at every byte; every weight file in its header, and around each tensor's ends."""
    for name in base.new_json_files:
        content = base.files[name]
        for cut in range(len(content.rstrip())):
            yield Mutation(f"{name} cut to {cut} bytes", {name: content[:cut]}, (errors.MalformedJsonError,))
    for name in base.weight_files:
        content = base.files[name]
        header = split_file(content)[0]
        start = 8 + len(header)
        ends = {start + offset for entry in entries(header).values() for offset in entry["data_offsets"]}
        cuts = {*range(0, start, 3), *(end + d for end in ends for d in (-2, -1, 0, 1))}
        for cut in sorted(cut for cut in cuts if 0 <= cut < len(content)):
            yield Mutation(f"{name} cut to {cut} bytes", {name: content[:cut]}, (errors.TruncatedFileError,))
        for extra in (1, 2, 7, 8, 4096):
            longer = {name: content + bytes(extra)}
            yield Mutation(f"{name} and {extra} zero bytes", longer, (errors.TrailingDataError,))


def flips(base: Base) -> Iterator[Mutation]:
    """One bit of every byte of the JSON files and headers, and of some bytes of the data."""
    rng = random.Random(1)
    for name in base.new_json_files:
        yield from (_flip(base, name, position, rng) for position in range(len(base.files[name])))
    for name in base.weight_files:
        start = 8 + len(split_file(base.files[name])[0])
        yield from (_flip(base, name, position, rng) for position in range(start))
        for position in rng.sample(range(start, len(base.files[name])), min(150, len(base.files[name]) - start)):
            flipped = _flip(base, name, position, rng)
            damage = (errors.HashMismatchError, errors.NonFiniteTensorError, errors.ScaleValueError)
            yield Mutation(flipped.name, flipped.files, damage)


def splices(base: Base, count: int) -> Iterator[Mutation]:
    """Bytes deleted, inserted, repeated, moved from another place or file; up to four times in one file."""
    rng = random.Random(2)
    names = list(base.files)
    for number in range(count):
        name = rng.choice(names)
        content = bytearray(base.files[name])
        near = len(content) if name.endswith(".json") else 8 + len(split_file(base.files[name])[0])
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(max(1, min(near + 16, len(content) + 1)))
            length = rng.choice((1, 2, 4, 8, 40))
            donor = base.files[rng.choice(names)]
            taken = rng.randrange(len(donor))
            content[position : position + rng.choice((0, 0, length))] = rng.choice(
                (b"", rng.randbytes(length), donor[taken : taken + length], bytes(content[:length]), b"\xff" * length)
            )
        yield Mutation(f"splice {number} of {name}", {name: bytes(content)})


def _flip(base: Base, name: str, position: int, rng: random.Random) -> Mutation:
    content = bytearray(base.files[name])
    bit = rng.randrange(8)
    content[position] ^= 1 << bit
    return Mutation(f"{name}: bit {bit} of byte {position}", {name: bytes(content)})
