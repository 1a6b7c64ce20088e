"""The FastAPI app of the page. Airflow mounts it; only the api-server builds it."""

from fastapi import FastAPI

from tidegate.page import (
    actions,
    batches,
    error_pages,
    frontend,
    metrics,
    pipelines,
    quarantine,
    query_pipelines,
    states,
    throughput,
)
from tidegate.page.answers import Answer, BrowserRules, add_error_handlers

_GROUPS = (pipelines, batches, states, query_pipelines, throughput, quarantine, actions, metrics, error_pages, frontend)


def create_app() -> FastAPI:
    """Return the app with all its routes; nothing is connected yet."""
    app = FastAPI(title="Tidegate", default_response_class=Answer, docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    app.add_middleware(BrowserRules)
    for group in _GROUPS:
        app.include_router(group.router)
    app.mount("/assets", frontend.HashedFiles(directory=frontend.STATIC / "assets", check_dir=False))
    return app
