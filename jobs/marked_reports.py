"""Reports in the text of an error: Spark passes on only that text, so a task puts a report into it, as JSON after a mark."""

import json
from typing import Any


def marked(mark: str, report: dict[str, Any]) -> str:
    """Return the text in which `report_behind` finds a report."""
    return f"{mark} {json.dumps(report)}"


def report_behind(mark: str, error: object) -> dict[str, Any] | None:
    """Return the report after a mark in the text of an error; None if there is none."""
    text = str(error)
    start = text.find(f"{mark} {{")  # the mark alone stands in the plan of any other error
    if start < 0:
        return None
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text, start + len(mark) + 1)[0]
    return found
