"""Fixtures for modules whose stack runs beside a store of their own, in a fixture `beside_store`: import them by name."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.servers import Server, migrated_database
from tests.sources.s3 import Bucket
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.state_store import Settings

__all__ = ["bucket", "s3", "server", "spark", "template"]

_numbers = count(1)


@pytest.fixture(scope="module")
def server(beside_store: tuple[Settings, Any]) -> Server:
    return Server(beside_store[0])


@pytest.fixture(scope="module")
def template(server: Server) -> Iterator[str]:
    with migrated_database(server) as name:
        yield name


@pytest.fixture
def spark(settings: Settings) -> Iterator[SparkSession]:
    with spark_session(settings, "conformance") as session:
        yield session


@pytest.fixture(scope="module")
def s3(beside_store: tuple[Settings, Any]) -> Any:
    return beside_store[1]


@pytest.fixture
def bucket(s3: Any) -> Bucket:
    return s3.make_bucket(f"bucket-{next(_numbers)}")
