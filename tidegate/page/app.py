"""The FastAPI app of the page. Airflow mounts it; only the api-server builds it."""

from fastapi import FastAPI

from tidegate.page import frontend_files
from tidegate.page.http_answers import Answer, BrowserRules, add_error_handlers
from tidegate.page.routes import (
    action_routes,
    batch_routes,
    error_page_routes,
    metrics_route,
    pipeline_routes,
    quarantine_routes,
    query_routes,
    state_routes,
)

_GROUPS = (
    pipeline_routes,
    batch_routes,
    state_routes,
    query_routes,
    quarantine_routes,
    action_routes,
    metrics_route,
    error_page_routes,
    frontend_files,
)


def create_app() -> FastAPI:
    """Return the app with all its routes; nothing is connected yet."""
    app = FastAPI(title="Tidegate", default_response_class=Answer, docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    app.add_middleware(BrowserRules)
    for group in _GROUPS:
        app.include_router(group.router)
    app.mount("/assets", frontend_files.HashedFiles(directory=frontend_files.STATIC / "assets", check_dir=False))
    return app
