"""Results of other verbs, as their ``--json`` printed them: which verb wrote a document, and reading it. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniw4.errors import UsageError

# what only the document of this verb has
_KEYS = {
    "verify": {"gates", "perplexity", "argmax_agreement"},
    "bench": {"environment", "ops", "ceiling"},
    "profile": {"environment", "engines"},
    "roofline": {"gpu", "rows", "total"},
}
KINDS = tuple(_KEYS)
MAX_BYTES = 100 << 20


@dataclass(frozen=True)
class Result:
    """A document of one verb.

    Attributes:
        label: names another recipe; empty for the checkpoint of the report.
        file: where it was read from, for messages.
    """

    kind: str
    label: str
    document: dict[str, Any]
    file: str = ""

    @property
    def hash(self) -> str | None:
        """Content hash of the checkpoint it is of; None where it does not say."""
        found = self.document.get("hash")
        return found if isinstance(found, str) else None


def read(text: str) -> Result:
    """``verify.json``, or ``rtn=rtn.json`` for the same verb on another recipe's checkpoint.

    Raises:
        UsageError: no such file, no JSON, no document of a verb that a report shows, or an empty name.
    """
    label, equals, name = text.rpartition("=")
    path = Path(name)
    if equals and not path.is_file() and Path(text).is_file():
        label, path = "", Path(text)
    elif equals and not label.strip():
        raise UsageError(f"results {text!r} have an empty name", hint="give NAME=FILE, or FILE for this checkpoint's")
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)  # a device never ends
        if len(raw) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
        document = json.loads(raw.decode("utf-8"))
    except OSError as e:
        hint = "save what `omniw4 verify DIR --model MODEL --json` prints"
        raise UsageError(f"cannot read results {str(path)!r}: {e.strerror or e}", hint=hint) from e
    except (ValueError, RecursionError) as e:
        raise UsageError(f"results {str(path)!r} are not JSON: {e}", hint="save what a verb prints with --json") from e
    kind = kind_of(document)
    if kind is None:
        message = f"results {str(path)!r} are of none of the verbs {', '.join(KINDS)}"
        raise UsageError(message, hint="save what a verb prints with --json")
    if label and kind != "verify":
        raise UsageError(
            f"results {text!r} name another recipe, and are of {kind}", hint="only verdicts of verify are compared"
        )
    return Result(kind, label, document, str(path))


def kind_of(document: Any) -> str | None:
    """The verb that printed a document; None for anything else."""
    if not isinstance(document, dict):
        return None
    return next((kind for kind, keys in _KEYS.items() if keys <= document.keys()), None)


def beside(folder: Path) -> list[str]:
    """Results that lie in the checkpoint's folder: verify.json, bench.json, profile.json, roofline.json."""
    return [str(folder / f"{kind}.json") for kind in KINDS if (folder / f"{kind}.json").is_file()]


def read_all(found: Iterable[str], named: Iterable[str]) -> list[Result]:
    """Read several.

    Args:
        found: lay in the checkpoint's folder.
        named: by the user; one takes the place of what was found of the same verb.

    Raises:
        UsageError: two that are named are of the same verb and recipe, so that one would hide the other.
    """
    results: dict[tuple[str, str], Result] = {}
    for result in map(read, named):
        if (other := results.get((result.kind, result.label))) is not None:
            what = f"the recipe {result.label!r}" if result.label else f"{result.kind} of this checkpoint"
            raise UsageError(
                f"results {other.file!r} and {result.file!r} are both of {what}",
                hint="give each verdict a name of its own, NAME=FILE"
                if result.kind == "verify"
                else "name one of them",
            )
        results[result.kind, result.label] = result
    ours = [result for result in map(read, found) if (result.kind, result.label) not in results]
    return [*ours, *results.values()]
