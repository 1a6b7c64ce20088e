"""Pages that explain the errors, from docs/errors, as HTML in which everything is escaped."""

from functools import cache
from html import escape

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from tidegate.explain import error_pages
from tidegate.page.access import User
from tidegate.page.http_answers import Refusal

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
    if not error_pages.has_page(code):
        raise Refusal(404, "NOT_FOUND", f"There is no page for {code}.")
    return HTMLResponse(PAGE.format(title=escape(code), content=_html(code)))


@cache
def _html(code: str) -> str:
    """Return a page's content as HTML. Links to other errors lead to their pages here; other documents are not served."""
    from markdown_it import MarkdownIt  # noqa: PLC0415 - for few requests

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(error_pages.markdown(code))
    for link in (each for token in tokens for each in token.children or () if each.type == "link_open"):
        target = str(link.attrs["href"])
        if error_pages.has_page(other := target.removesuffix(".md")):
            link.attrs["href"] = other
        elif "://" not in target:
            del link.attrs["href"]
    return str(markdown.renderer.render(tokens, markdown.options, {}))
