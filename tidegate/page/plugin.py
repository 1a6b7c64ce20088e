"""What Airflow loads: the page's place in its menu and tabs, and its app.

Every process of Airflow imports this module, each task too, so it imports nothing of ours but constants. The app is built when
Airflow asks for it, which only the api-server does.
"""

from functools import cached_property
from typing import Any, ClassVar

from airflow.sdk.plugins_manager import AirflowPlugin

from tidegate.page import PREFIX

# Airflow replaces the names in braces, and shows the address in a frame.
VIEWS = [
    {"name": "Tidegate", "href": f"{PREFIX}/", "destination": "nav", "url_route": "tidegate"},
    {"name": "Tidegate", "href": f"{PREFIX}/go?pipeline={{DAG_ID}}", "destination": "dag", "url_route": "tidegate-pipeline"},
    {
        "name": "Tidegate",
        "href": f"{PREFIX}/go?pipeline={{DAG_ID}}&run={{RUN_ID}}",
        "destination": "dag_run",
        "url_route": "tidegate-run",
    },
    {
        "name": "Tidegate",
        "href": f"{PREFIX}/go?pipeline={{DAG_ID}}&run={{RUN_ID}}&position={{MAP_INDEX}}",
        "destination": "task_instance",
        "url_route": "tidegate-batch",
    },
]


class TidegatePlugin(AirflowPlugin):  # type: ignore[misc]
    """The page at `PREFIX` of Airflow's api-server."""

    name = "tidegate"
    external_views: ClassVar[list[dict[str, str]]] = VIEWS

    @cached_property
    def fastapi_apps(self) -> list[dict[str, Any]]:
        """Return the app, built on first use."""
        from tidegate.page.app import create_app  # noqa: PLC0415 - for the api-server only

        return [{"app": create_app(), "url_prefix": PREFIX, "name": "Tidegate"}]
