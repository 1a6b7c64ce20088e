"""What the page's answers have in common: JSON with an ETag, errors in one shape, headers, how long a request may be."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate.explain import error_pages
from tidegate.state_store.base.errors import (
    AccessRefused,
    PipelinePaused,
    PipelineRetired,
    RangeRefused,
    RetryableError,
    SchemaOutOfDate,
    SettingsInvalid,
    TidegateError,
    UnknownBatch,
    UnknownPipeline,
    UsageError,
)

# No script, style or connection from anywhere else, and no page of another site may show this one in a frame.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
# The most bytes of a request's body, by its path: what is announced is compared before anything is read.
MOST_BYTES = 64 * 1024
MOST_BYTES_OF = {
    re.compile(r"/quarantine/\d+/\d+$"): 20 * 1024 * 1024,  # a mended record of 8 MiB, escaped
    re.compile(r"/states/[^/]+/rows$"): 1024 * 1024,  # many keys
}
MOST_PROBLEMS = 3  # that an answer names
MOST_CHARACTERS = 10_000  # of an error, which may quote a value
_HIDDEN_IN_ETAG = "now"


class Refusal(Exception):
    """An answer that is no success: status, code and what to do."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Answer(JSONResponse):
    """JSON whose ETag, unless one is given, changes when anything but its time, `now`, does."""

    def __init__(self, content: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(content, *arguments, **named)
        if "ETag" not in self.headers:
            self.headers["ETag"] = f'W/"{hashlib.sha256(self._without_time(content)).hexdigest()[:32]}"'
        self.headers["Cache-Control"] = "private, no-cache"
        self.headers["Vary"] = "Cookie, Authorization"

    def _without_time(self, content: Any) -> bytes:
        if isinstance(content, Mapping) and _HIDDEN_IN_ETAG in content:
            return super().render({name: value for name, value in content.items() if name != _HIDDEN_IN_ETAG})
        return bytes(self.body)


class BrowserRules:
    """Middleware: security headers on every answer, 304 for one that the browser has already."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._is_too_long(scope):
            refusal = JSONResponse({"code": "TOO_LONG", "message": "The request is too long.", "page": None}, 413)
            await refusal(scope, receive, send)
            return
        known = Headers(scope=scope).get("If-None-Match") if scope["method"] in ("GET", "HEAD") else None
        is_unchanged = False

        async def send_with_headers(message: Message) -> None:
            nonlocal is_unchanged
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
                if known is not None and message["status"] == 200 and headers.get("ETag") in known.split(", "):
                    is_unchanged = True
                    message["status"] = 304
                    del headers["Content-Length"]
            elif is_unchanged:
                message["body"] = b""
            await send(message)

        await self._app(scope, receive, send_with_headers)

    @staticmethod
    def _is_too_long(scope: Scope) -> bool:
        """Return whether a request announces a body that is too long, or does not announce it."""
        headers = Headers(scope=scope)
        length = headers.get("Content-Length", "0")
        most = next((most for path, most in MOST_BYTES_OF.items() if path.search(scope["path"])), MOST_BYTES)
        return "Transfer-Encoding" in headers or not length.isdecimal() or int(length) > most


def body_of(model: type[BaseModel]) -> Any:
    """Return a dependency with a request's body as this model. After that of its user, it reads nothing of a stranger's.

    The body is parsed off the event loop, on which all other requests wait.

    Raises: Refusal (422; 400 to one who has gone away).
    """

    async def read(request: Request) -> Any:
        try:
            return await run_in_threadpool(model.model_validate_json, await request.body())
        except ClientDisconnect as gone:
            raise Refusal(400, "CUT_OFF", "The request was cut off.") from gone
        except ValidationError as error:
            raise Refusal(422, "MALFORMED_REQUEST", _problems(error.errors(include_url=False, include_input=False))) from error

    return Depends(read)


def add_error_handlers(app: FastAPI) -> None:
    """Let every error of the app be answered in one shape: code, message, and the page that explains it."""
    for kind in (Refusal, TidegateError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)


def error_page(request: Request, code: str) -> str | None:
    """Return the address of the page that explains an error code; None if there is none."""
    return f"{request.scope['root_path']}/errors/{code}" if error_pages.has_page(code) else None


def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, Refusal):
        status, code, message = error.status, error.code, str(error)
    elif isinstance(error, TidegateError):
        status, code, message = _status(error), error.code, str(error)
    elif isinstance(error, RequestValidationError):
        status, code, message = 422, "MALFORMED_REQUEST", _problems(error.errors())
    else:
        assert isinstance(error, HTTPException)
        status, code, message = error.status_code, "NOT_FOUND" if error.status_code == 404 else "REFUSED", f"{error.detail}."
    if len(message) > MOST_CHARACTERS:
        message = f"{message[:MOST_CHARACTERS]}..."
    return JSONResponse({"code": code, "message": message, "page": error_page(request, code)}, status)


def _status(error: TidegateError) -> int:
    if isinstance(error, UnknownPipeline | UnknownBatch):
        return 404
    if isinstance(error, PipelineRetired):
        return 410
    if isinstance(error, UsageError) and not isinstance(error, RangeRefused):
        return 422
    unusable = isinstance(error, RetryableError | SchemaOutOfDate | AccessRefused | SettingsInvalid)
    return 503 if unusable and not isinstance(error, PipelinePaused) else 409


def _problems(errors: Sequence[Mapping[str, Any]]) -> str:
    named = [": ".join(filter(None, (".".join(map(str, each["loc"])), each["msg"]))) for each in errors[:MOST_PROBLEMS]]
    more = f"; and {len(errors) - MOST_PROBLEMS} more" if len(errors) > MOST_PROBLEMS else ""
    return f"The request is malformed: {'; '.join(named)}{more}."
