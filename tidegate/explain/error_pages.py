"""The pages of `docs/errors`: one for each error code, which the package has, too."""

import difflib
import re
from functools import cache
from pathlib import Path
from posixpath import normpath

from tidegate.explain import remedies
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.base.settings import Settings

FOLDER = Path(__file__).parents[1] / "docs" / "errors"
_CODE = re.compile(r"[A-Z]+(?:_[A-Z]+)*")
_TRIGGER = re.compile(r"tidegate trigger (\w+) --wait")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


@cache
def codes() -> tuple[str, ...]:
    """Return the codes that have a page, in alphabetical order."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.md") if file.stem != "README"))


def has_page(code: str) -> bool:
    """Return whether an error code is explained; one of an author's own source may not be."""
    return code in codes()


def markdown(code: str) -> str:
    """Return a code's page in Markdown; upper and lower case are the same.

    Raises: UsageError with the nearest code, if there is no such page.
    """
    wanted = code.upper().replace("-", "_")
    if not _CODE.fullmatch(wanted) or not has_page(wanted):
        close = difflib.get_close_matches(wanted, codes(), n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise UsageError(f"There is no error {code}. {hint}All of them: tidegate error")
    return (FOLDER / f"{wanted}.md").read_text(encoding="utf-8")


def summary(code: str) -> str:
    """Return what an error means, in one sentence: the page's first paragraph."""
    return " ".join(markdown(code).split("\n\n")[1].split())


def plain(code: str, settings: Settings | None = None) -> str:
    """Return a code's page for a terminal: links by their names or paths, commands indented instead of fenced.

    With settings, runs are started as they are in that stack.
    """
    page = markdown(code)
    if settings is not None:
        page = _TRIGGER.sub(lambda found: remedies.run_of(found[1], settings), page)
    lines, is_code = [], False
    for line in _LINK.sub(_named, page).splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif is_code:
            lines.append(f"    {line}")
        else:
            lines.append(line.lstrip("# ") if line.startswith("#") else line)
    return "\n".join(lines) + "\n"


def _named(link: re.Match[str]) -> str:
    """Return a link's text; for another document, also its path from the project's folder."""
    text, target = link.groups()
    if "/" not in target:
        return text
    return f"{text} ({normpath(f'docs/errors/{target}')})"
