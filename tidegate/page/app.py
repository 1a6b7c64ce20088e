"""The FastAPI app of the page. Airflow mounts it; only the api-server builds it."""

from fastapi import FastAPI

from tidegate.page import error_pages, frontend, metrics, pipelines
from tidegate.page.answers import Answer, BrowserRules, add_error_handlers

ROUTERS = (pipelines.router, metrics.router, error_pages.router, frontend.router)


def create_app() -> FastAPI:
    """Return the app with all its routes; nothing is connected yet."""
    app = FastAPI(title="Tidegate", default_response_class=Answer, docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    app.add_middleware(BrowserRules)
    for router in ROUTERS:
        app.include_router(router)
    app.mount("/assets", frontend.HashedFiles(directory=frontend.STATIC / "assets", check_dir=False))
    return app
