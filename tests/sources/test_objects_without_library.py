"""A Spark that cannot read a store says what it lacks."""

from collections.abc import Callable

import pytest

from tests import steps
from tests.sources.s3 import running_server
from tests.sources.test_objects import parquet
from tidegate.jobs import Count, Files, Pipeline, State
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SettingsInvalid


def test_a_missing_library_is_named(settings: Settings, register: Callable[..., None]) -> None:
    """The planner reads the store by itself; Spark needs Hadoop's client for it."""
    source = Files("s3a://bucket-of-one", schema={"name": "string", "amount": "int"})
    pipeline = Pipeline("inbox", source, {"all": State(aggregates={"lines": Count()})})
    register(pipeline)
    with running_server() as server:
        server.make_bucket("bucket-of-one").put("one.parquet", parquet(["a"], [1]))
        assert steps.plan(settings, pipeline, run_id="run") == [1]
        with pytest.raises(SettingsInvalid, match=r"has no library for it .* Name it in the setting spark_packages"):
            steps.process(settings, pipeline, 1, owner="test")
