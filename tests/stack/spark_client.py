"""Queries Spark's ports, other than the Connect server's, as a client without a secret; prints the answers as JSON.

    python spark_client.py PORT ...

Spark's own classes are the client. The first answer is that of a Spark without authentication, which the program starts to show
that the queries would be answered.
"""

import json
import os
import sys
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.java_gateway import launch_gateway

SECONDS = "10s"

jvm = launch_gateway().jvm


def single(package: Any, name: str) -> Any:
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def configuration() -> Any:
    settings = jvm.org.apache.spark.SparkConf(False)
    for name in ("spark.rpc.askTimeout", "spark.rpc.lookupTimeout"):
        settings.set(name, SECONDS)
    for name in ("spark.driver.host", "spark.driver.bindAddress"):
        settings.set(name, "127.0.0.1")
    return settings.set("spark.ui.enabled", "false")


def control(port: int) -> str:
    """Look up the driver's endpoint for blocks, and ask it for the memory status."""
    settings, nothing = configuration(), single(jvm.scala, "None")
    manager = jvm.org.apache.spark.SecurityManager(
        settings, nothing, single(jvm.org.apache.spark.internal.config, "package").AUTH_SECRET_FILE()
    )
    client = jvm.org.apache.spark.rpc.RpcEnv.create("client", "127.0.0.1", 0, settings, manager, True)
    try:
        endpoint = client.setupEndpointRef(jvm.org.apache.spark.rpc.RpcAddress("127.0.0.1", port), "BlockManagerMaster")
        question = single(jvm.org.apache.spark.storage.BlockManagerMessages, "GetMemoryStatus")
        kind = single(jvm.scala.reflect, "ClassTag").apply(jvm.java.lang.Class.forName("scala.collection.immutable.Map"))
        return f"answer: {endpoint.askSync(question, kind).size()} block managers"
    except Py4JJavaError as error:
        return causes(error)
    finally:
        client.shutdown()


def blocks(port: int) -> str:
    """Ask a block manager for its local folders."""
    network = jvm.org.apache.spark.network
    settings = network.util.TransportConf("shuffle", network.util.MapConfigProvider.EMPTY)
    client = network.shuffle.ExternalBlockStoreClient(settings, None, False, 10_000)
    client.init("client")
    executors = jvm.java.lang.reflect.Array.newInstance(jvm.java.lang.Class.forName("java.lang.String"), 1)
    executors[0] = "driver"
    answer = jvm.java.util.concurrent.CompletableFuture()
    try:
        client.getHostLocalDirs("127.0.0.1", port, executors, answer)
        return f"answer: {answer.get(10, jvm.java.util.concurrent.TimeUnit.SECONDS)}"
    except Py4JJavaError as error:
        return causes(error)
    finally:
        client.close()


def causes(error: Py4JJavaError) -> str:
    texts, cause = [], error.java_exception
    while cause is not None:
        texts.append(str(cause.toString()).splitlines()[0])
        cause = cause.getCause()
    return " < ".join(texts)


open_spark = jvm.org.apache.spark.SparkContext("local[1]", "control", configuration())
answers = {
    "without authentication": [
        control(int(open_spark.conf().get("spark.driver.port"))),
        blocks(int(open_spark.getExecutorMemoryStatus().keys().head().rpartition(":")[2])),
    ],
    **{port: [control(int(port)), blocks(int(port))] for port in sys.argv[1:]},
}
sys.stdout.write("\n" + json.dumps(answers) + "\n")
sys.stdout.flush()
os._exit(0)
