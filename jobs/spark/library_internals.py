"""Uses of private or undocumented parts of libraries, each with its purpose: an upgrade of PySpark, gRPC or Kafka starts here.

Imports are inside functions: declarations must not load pyspark.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from tidegate.state_store.base.errors import DeclarationInvalid

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import types as T
    from pyspark.sql.connect.client.core import RpcDeadlines


def note_not_streaming(rows: "DataFrame") -> None:
    """Set `rows.isStreaming` for `observe`: the server would analyse the whole query to return False."""
    vars(rows)["isStreaming"] = False


def disable_reattach(session: "SparkSession") -> None:
    """Disable reattaching a Connect session's queries after a broken connection: a short query is cheaper to repeat.

    To allow it, the client confirms each part of an answer by a call: several for a small batch.
    """
    session.client.disable_reattachable_execute()


def set_deadlines(session: "SparkSession", deadlines: "RpcDeadlines") -> None:
    """Set the deadlines of a Connect session's small requests, for which Spark has no option."""
    vars(session.client)["_rpc_deadlines"] = deadlines


def close_channel(session: "SparkSession") -> None:
    """Close a Connect session's connection, so that a query that hangs fails."""
    session.client._channel.close()


def leave_on_server(session: "SparkSession") -> None:
    """Close a Connect session here, but keep it on the server, with its Python workers."""
    vars(session)["release_session_on_close"] = False
    session.stop()


@contextmanager
def settings_kept(session: "SparkSession", pinned: Collection[str]) -> Iterator[None]:
    """Keep an author's code from changing these settings of a Connect session, or stopping it: other batches share it.

    Raises: DeclarationInvalid, where the code tries to.
    """
    client, change, ask = session.client, session.client.config, session.sql

    def refuse(what: str) -> NoReturn:
        raise DeclarationInvalid(
            f"The transform {what}, though other batches share the Spark session. Take that out; where it is about values, say "
            "at each value what is meant: try_cast(), convert_timezone() and the like."
        )

    def config(operation: Any) -> Any:
        keys = [pair.key for pair in operation.set.pairs] if operation.HasField("set") else list(operation.unset.keys)
        if changed := [key for key in keys if key in pinned]:
            refuse(f"changes {changed[0]}")
        return change(operation)

    def sql(query: str, *args: Any, **kwargs: Any) -> Any:
        if changed := [key for key in pinned if key in query]:
            refuse(f"changes {changed[0]}")
        return ask(query, *args, **kwargs)

    vars(client)["config"] = config
    vars(session).update(sql=sql, stop=lambda: refuse("stops its session"))
    try:
        yield
    finally:
        del vars(client)["config"], vars(session)["sql"], vars(session)["stop"]


def add_artifacts(session: "SparkSession", modules: "Mapping[str, bytes]", files: "Mapping[str, bytes]") -> None:
    """Send archives of modules, and files, to a Connect session; Spark's method would also put them on this process' path."""
    from pyspark.sql.connect.client.artifact import InMemory, new_file_artifact, new_pyfile_artifact  # noqa: PLC0415

    artifacts = [new_pyfile_artifact(name, InMemory(content)) for name, content in modules.items()]
    artifacts += [new_file_artifact(name, InMemory(content)) for name, content in files.items()]
    manager = session.client._artifact_manager
    manager._request_add_artifacts(manager._add_artifacts(artifacts))


def plan_of(returned: "DataFrame", rows: "Sequence[DataFrame]") -> tuple[Any, list[int]]:
    """Return a DataFrame's plan as sent to the server, and the ids of the plans of `rows` in it."""
    frame: Any = returned
    sources: Sequence[Any] = rows
    return frame._plan.plan(returned.sparkSession.client), [source._plan._plan_id for source in sources]


def spark_schema(schema: "pa.Schema") -> "T.StructType":
    """Return an Arrow schema as a Spark schema, without asking the server."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415

    return from_arrow_schema(schema)


def is_text_encoding(codec: Any) -> bool:
    """Return whether a codec turns bytes into text, as `bytes.decode` requires: rot13 and base64 do not."""
    return bool(codec._is_text_encoding)


def refusals_of_kafka_client() -> tuple[int, int]:
    """Return the Kafka client's codes for permanent errors: authentication or TLS failed."""
    from confluent_kafka import KafkaError  # noqa: PLC0415

    return KafkaError._AUTHENTICATION, KafkaError._SSL
