"""The view of a history: registration makes it, and follows the declaration."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.test_migrations import shape
from tests.servers import Server
from tests.store import PipelineSpec, registration, state_tables
from tidegate import migrations
from tidegate.jobs import Files, History, Pipeline
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import DeclarationChanged


@pytest.fixture
def empty(server: Server, tmp_path: Path) -> Iterator[Settings]:
    """Settings with a database that has the ledger alone."""
    name = server.create_database()
    settings = replace(server.settings, pg_database=name, home=tmp_path)
    migrations.upgrade(settings, [])
    yield settings
    server.drop_database(name)


def declare(**parts: Any) -> PipelineSpec:
    usual: dict[str, Any] = {
        "key": {"tail": "text"}, "columns": {"seats": "integer"}, "order_by": {"at": "timestamptz"}, "deleted": "gone",
        "collapse": True,
    }  # fmt: skip
    return Pipeline("dimensions", Files("planes", schema={"tail": "string"}), {"plane": History(**usual | parts)}).spec


def register(settings: Settings, spec: PipelineSpec, *statements: str) -> str:
    """Register a pipeline after its migration; return the definition of the view."""
    with migrations.connected(settings) as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
        state_tables.metadata_of((spec,)).create_all(connection)
        registration.register(connection, spec)
    (view,) = (view for view in shape(settings)["views"] if "plane_versions" in view)
    return view


def test_the_view_follows_the_declaration(empty: Settings) -> None:
    """Until a batch has committed, versions may collapse or not, and columns may come; with the table, the view goes."""
    before = shape(empty)["relations"]
    assert "earlier" in register(empty, declare())
    assert "earlier" not in register(
        empty, declare(collapse=False), "CREATE VIEW public.of_people AS SELECT tail FROM state.plane"
    )
    more = declare(columns={"model": "text", "seats": "integer"})
    people = ["GRANT SELECT ON state.plane TO PUBLIC", 'ALTER TABLE state.plane_versions ADD model text COLLATE "C"']
    view = register(empty, more, *people)
    assert "version.model" in view, "beside a view of people's"
    (relation,) = (line for line in shape(empty)["relations"] if line.startswith("state.plane v"))
    assert "=r/" in relation.replace("tidegate_reader=r/", "")
    changed = ["DROP VIEW public.of_people", "DROP VIEW state.plane"]
    again = register(empty, more, *changed)  # as after a migration downwards and up again
    assert sorted(again.replace(",", "").split()) == sorted(view.replace(",", "").split())
    (relation,) = (line for line in shape(empty)["relations"] if line.startswith("state.plane v"))
    assert "tidegate_reader=r/" in relation
    with migrations.connected(empty) as connection:
        state_tables.metadata_of((more,)).drop_all(connection)
    assert shape(empty)["relations"] == before


def test_a_table_of_the_views_name_is_not_touched(empty: Settings) -> None:
    """It may hold data of an earlier declaration: the pipeline is refused, with what to do."""
    with pytest.raises(DeclarationChanged, match=r"there is a table state\.plane, of an earlier declaration\. Drop it"):
        register(empty, declare(), "CREATE TABLE state.plane (tail text)")
