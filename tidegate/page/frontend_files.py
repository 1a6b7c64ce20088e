"""The page itself: the built front end in `static`, and the addresses by which Airflow's own pages lead to it."""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from tidegate.page import PREFIX, access, ledger_connection
from tidegate.page.http_answers import Refusal
from tidegate.page.shared_models import LARGEST, WITHOUT_NUL
from tidegate.state_store.declarations.column_spec import NAME
from tidegate.state_store.ledger import batches

STATIC = Path(__file__).resolve().parent / "static"
LOGIN = "/api/v2/auth/login"
LONGEST_CACHED = "public, max-age=31536000, immutable"  # their names contain a hash of their content

router = APIRouter()


class HashedFiles(StaticFiles):
    """Files whose names change with their content, so that browsers keep them."""

    def file_response(self, *arguments: object, **named: object) -> Response:
        """Return a file's response, to be kept."""
        response = super().file_response(*arguments, **named)  # type: ignore[arg-type]
        response.headers["Cache-Control"] = LONGEST_CACHED
        return response


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """Return the page; without a login, lead to Airflow's."""
    if not await _is_logged_in(request):
        return _to_login(request, "/")
    return FileResponse(STATIC / "index.html", headers={"Cache-Control": "private, no-cache"})


@router.get("/go", include_in_schema=False)
async def go(
    request: Request,
    pipeline: Annotated[str, Query(max_length=250)],
    run: Annotated[str | None, Query(max_length=250, pattern=WITHOUT_NUL)] = None,
    position: Annotated[str, Query(max_length=20)] = "",
) -> Response:
    """Lead to a pipeline, or to the batch at a position of an Airflow run, its map index; anything else leads to the page."""
    if not await _is_logged_in(request):
        return _to_login(request, f"/go?{request.url.query}")
    target = f"{request.scope['root_path']}/#/pipelines/{quote(pipeline, safe='')}"
    if run is not None and position.isdecimal():
        txid = await run_in_threadpool(_txid_at, await access.current_user(request), pipeline, run, int(position))
        target += f"/batches/{txid}" if txid else ""
    return RedirectResponse(target)


def _txid_at(user: Any, pipeline: str, run: str, position: int) -> int | None:
    """Return the txid at a position of a run; None if there is none, or the user may not know."""
    if not NAME.fullmatch(pipeline) or position > LARGEST or not access.is_allowed(user, access.READ, pipeline):
        return None
    with ledger_connection.reader().snapshot(f"reading run {run}") as connection:
        return batches.txid_at(connection, pipeline, run, position)


async def _is_logged_in(request: Request) -> bool:
    try:
        await access.current_user(request)
    except Refusal:
        return False
    return True


def _to_login(request: Request, target: str) -> Response:
    page = request.scope["root_path"]
    return RedirectResponse(f"{page.removesuffix(PREFIX)}{LOGIN}?{urlencode({'next': page + target})}")
