"""The JSON Schemas of `docs/json`: one for each verb, of what it prints with ``--json``, which the package has, too."""

import difflib
import json
from pathlib import Path
from typing import Any

from tidegate.state_store.base.errors import UsageError

FOLDER = Path(__file__).parent / "docs" / "json"


def verbs() -> list[str]:
    """Return the verbs that have a schema, in alphabetical order; `quarantine list` is one."""
    return sorted(file.stem.replace("-", " ") for file in FOLDER.glob("*.json"))


def schema(verb: str) -> dict[str, Any]:
    """Return a verb's schema.

    Raises: UsageError with the nearest verb, if there is none.
    """
    if verb not in verbs():
        close = difflib.get_close_matches(verb, verbs(), n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise UsageError(f"There is no schema for {verb}. {hint}Verbs: {', '.join(verbs())}.")
    found: dict[str, Any] = json.loads((FOLDER / f"{verb.replace(' ', '-')}.json").read_text(encoding="utf-8"))
    return found
