"""Pages that explain the errors, from docs/errors."""

import re
from functools import cache
from html import escape
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from tidegate.page.access import User
from tidegate.page.answers import Refusal

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "errors"
CODE = re.compile(r"[A-Z][A-Z_]{0,60}")
PAGE = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title></head>
<body><main>{content}</main></body>
</html>
"""

router = APIRouter()


@router.get("/errors/{code}", response_class=HTMLResponse)
def error_page(code: str, user: User) -> HTMLResponse:  # noqa: ARG001 - it is the login that is asked for
    """Return the page of an error code."""
    if not has_page(code):
        raise Refusal(404, "NOT_FOUND", f"There is no page for {code}.")
    return HTMLResponse(PAGE.format(title=escape(code), content=_html(code)))


def has_page(code: str) -> bool:
    """Return whether an error code has a page."""
    return CODE.fullmatch(code) is not None and (FOLDER / f"{code}.md").is_file()


@cache
def _html(code: str) -> str:
    from markdown_it import MarkdownIt  # noqa: PLC0415 - for few requests

    return str(MarkdownIt("commonmark", {"html": False}).enable("table").render((FOLDER / f"{code}.md").read_text()))
