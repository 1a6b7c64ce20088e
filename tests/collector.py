"""A receiver of OpenTelemetry's traces for the tests: keeps them as a collector's file exporter does, OTLP as JSON lines."""

import base64
import json
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

IDS = ("traceId", "spanId", "parentSpanId")  # OTLP's JSON writes them in hexadecimal, protobuf's in base64


@dataclass(frozen=True)
class Span:
    """A span as it was received; times in nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin: int
    end: int
    error: str | None
    attributes: dict[str, Any]
    service: str

    @property
    def attempt(self) -> tuple[Any, Any]:
        """Return the txid and attempt that it is about."""
        return self.attributes.get("tidegate.txid"), self.attributes.get("tidegate.attempt")

    def contains(self, other: "Span") -> bool:
        """Return whether the other span lies within this one; Airflow's clock and Postgres' are the same here."""
        return self.begin <= other.begin <= other.end <= self.end


@dataclass
class Collector:
    """A collector that listens, and the file that it writes."""

    port: int
    file: Path
    hangs: threading.Event = field(default_factory=threading.Event)

    def environment(self) -> dict[str, str]:
        """Return the standard variables that send traces here."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{self.port}/v1/traces",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_TRACES_EXPORTER": "otlp_proto_http",
        }

    def spans(self) -> list[Span]:
        """Return all spans received so far."""
        return read_spans(self.file)


def read_spans(file: Path) -> list[Span]:
    """Return the spans in a file of OTLP JSON lines."""
    found = []
    lines = file.read_text().splitlines() if file.exists() else []
    for resource in (resource for line in lines for resource in json.loads(line)["resourceSpans"]):
        service = _attributes(resource["resource"]).get("service.name", "")
        for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            status = span.get("status", {})
            found.append(
                Span(
                    span["name"],
                    span["traceId"],
                    span["spanId"],
                    span.get("parentSpanId", ""),
                    int(span["startTimeUnixNano"]),
                    int(span["endTimeUnixNano"]),
                    status.get("message", "") if status.get("code") in (2, "STATUS_CODE_ERROR") else None,
                    _attributes(span),
                    service,
                )
            )
    return found


def _attributes(of: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for attribute in of.get("attributes", []):
        ((kind, value),) = attribute["value"].items()
        values[attribute["key"]] = int(value) if kind == "intValue" else value
    return values


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[int]:
    """Serve in a thread, and yield the port."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def otlp_server(take: Callable[[bytes], Message | None]) -> socketserver.BaseServer:
    """Return a server on loopback that takes OTLP over HTTP, and answers with what `take` returns, or not at all."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = take(self.rfile.read(int(self.headers["Content-Length"])))
            if answer is None:
                return
            content = answer.SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.daemon_threads = True
    return server


@contextmanager
def collector(file: Path) -> Iterator[Collector]:
    """Run a collector on loopback that writes this file. While `hangs` is set, it takes requests and answers none."""
    lock, ended = threading.Lock(), threading.Event()

    def take(body: bytes) -> Message | None:
        if made.hangs.is_set():
            ended.wait()
            return None
        request = MessageToDict(ExportTraceServiceRequest.FromString(body))
        for span in (s for r in request["resourceSpans"] for scope in r["scopeSpans"] for s in scope["spans"]):
            span.update({name: base64.b64decode(span[name]).hex() for name in IDS if name in span})
        with lock, file.open("a") as lines:
            lines.write(json.dumps(request) + "\n")
        return ExportTraceServiceResponse()

    with serving(otlp_server(take)) as port:
        made = Collector(port, file)
        try:
            yield made
        finally:
            ended.set()


@contextmanager
def real_collector(program: str, port: int, file: Path) -> Iterator[Collector]:
    """Run a collector of the OpenTelemetry project that has the receiver otlp and the exporter file."""
    settings = {
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"127.0.0.1:{port}"}}}},
        "exporters": {"file": {"path": str(file), "flush_interval": "100ms"}},
        "service": {
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["file"]}},
            "telemetry": {"metrics": {"level": "none"}},
        },
    }
    config = file.with_suffix(".yaml")
    config.write_text(json.dumps(settings))  # which is YAML too
    process = subprocess.Popen([program, f"--config=file:{config}"])
    try:
        deadline = time.monotonic() + 30
        while not is_open(port):
            assert process.poll() is None, f"{program} has ended"
            assert time.monotonic() < deadline, f"{program} does not listen"
            time.sleep(0.1)
        yield Collector(port, file)
    finally:
        process.terminate()
        process.wait(30)


def is_open(port: int) -> bool:
    """Return whether a port of loopback answers."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
