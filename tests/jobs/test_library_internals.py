"""The parts that `tidegate.jobs.spark.library_internals` relies on exist in the installed versions."""

import codecs
import json
import re
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pyarrow as pa
import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import types as T
from pyspark.sql.connect.client.core import RpcDeadlines

from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.spark import library_internals
from tidegate.jobs.spark.spark_errors import meaning_of
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import PermanentError, SparkFailed


def test_the_installed_versions_are_those_that_were_checked() -> None:
    assert {name: version(name) for name in library_internals.CHECKED} == library_internals.CHECKED


@pytest.mark.promise("error:SPARK_FAILED")
@pytest.mark.parametrize(
    "condition",
    [
        *("AGGREGATE_OUT_OF_MEMORY", "POINTER_ARRAY_OUT_OF_MEMORY", "UNABLE_TO_ACQUIRE_MEMORY"),
        *("_LEGACY_ERROR_TEMP_2105", "_LEGACY_ERROR_TEMP_2107", "_LEGACY_ERROR_TEMP_2250"),  # the last one is a broadcast's
    ],
)
def test_what_spark_says_when_it_is_out_of_memory_is_known(condition: str) -> None:
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-common-utils_*.jar")
    words = " ".join(json.loads(ZipFile(jar).read("error/error-conditions.json"))[condition]["message"])
    for attempt, kind in ((1, SparkFailed), (2, PermanentError)):
        error = meaning_of(PySparkException(re.sub("<[^>]*>", "1", words)), attempt)
        assert type(error) is kind
        assert "Spark ran out of memory over this batch (" in str(error)


def test_a_connect_session_has_the_parts_that_are_used(settings: Settings) -> None:
    """Setting an attribute that does not exist would silently do nothing."""
    with spark_session(settings, "inbox") as session:
        assert isinstance(session.client._rpc_deadlines, RpcDeadlines)
        assert callable(session.client.disable_reattachable_execute)
        assert callable(session.client._channel.close)
        assert session.release_session_on_close
        rows = session.range(3)
        library_internals.note_not_streaming(rows)
        assert rows.isStreaming is False
        plan, (source,) = library_internals.plan_of(rows.where("id > 1"), [rows])
        assert plan.HasField("filter")
        assert plan.filter.input.common.plan_id == source


def test_small_questions_are_answered_without_a_server() -> None:
    assert library_internals.spark_schema(pa.schema([("n", pa.int64())])) == T.StructType([T.StructField("n", T.LongType())])
    assert library_internals.is_text_encoding(codecs.lookup("latin-1"))
    assert not library_internals.is_text_encoding(codecs.lookup("rot13"))
    assert len(set(library_internals.refusals_of_kafka_client())) == 2
