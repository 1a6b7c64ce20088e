"""Servers on loopback that receive what a stack sends: mails by SMTP, traces and metrics by OpenTelemetry."""

import socketserver
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

FAILED = 2  # the code of a span's status


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


@dataclass
class Mailbox:
    """A mail server's port, and the mails that it has received."""

    port: int
    mails: list[EmailMessage] = field(default_factory=list)


@contextmanager
def mailbox() -> Iterator[Mailbox]:
    """Run a mail server that keeps what it gets; as much of SMTP (RFC 5321) as a client without TLS and login needs."""

    class Session(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self._say("220 test")
            while line := self.rfile.readline():
                verb = line[:4].upper().strip()
                if verb == b"DATA":
                    self._say("354 go on")
                    made.mails.append(self._mail())
                self._say("221 bye" if verb == b"QUIT" else "250 ok")
                if verb == b"QUIT":
                    return

        def _mail(self) -> EmailMessage:
            lines = []
            while (line := self.rfile.readline()) not in (b".\r\n", b""):
                lines.append(line.removeprefix(b"."))
            return message_from_bytes(b"".join(lines), policy=policy.default)

        def _say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address, daemon_threads = True, True

    with serving(Server(("127.0.0.1", 0), Session)) as port:
        made = Mailbox(port)
        yield made


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
    """All spans that a collector has received, and the newest value of each counter and timer's count, by process.

    While `hangs` is set, it takes traces and answers nothing.
    """

    port: int = 0
    spans: list[Span] = field(default_factory=list)
    values: dict[tuple[str, str | None, str], float] = field(default_factory=dict)
    hangs: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def metrics(self, pipeline: str) -> dict[str, float]:
        """Return each metric of a pipeline, added up over all processes: a counter, or how often a timer was sent."""
        found: dict[str, float] = defaultdict(float)
        for (name, of, _), value in self.values.items():
            if of == pipeline:
                found[name] += value
        return dict(found)

    def take_traces(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource).get("service.name", "")
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                ids = (each.hex() for each in (span.trace_id, span.span_id, span.parent_span_id))
                error = span.status.message if span.status.code == FAILED else None
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                self.spans.append(Span(span.name, *ids, *times, error, _attributes(span), service))

    def take_metrics(self, body: bytes) -> None:
        request = ExportMetricsServiceRequest.FromString(body)
        for metric in (m for r in request.resource_metrics for scope in r.scope_metrics for m in scope.metrics):
            for point in getattr(metric, metric.WhichOneof("data")).data_points:
                series = f"{point.attributes} of the process of {point.start_time_unix_nano}"
                self.values[metric.name, _attributes(point).get("pipeline"), series] = (
                    point.count if hasattr(point, "count") else point.as_int or point.as_double
                )


def _attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector that takes OTLP over HTTP."""
    made = Collector()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/metrics":
                made.take_metrics(body)
            elif made.hangs.is_set():
                made.ended.wait()
                return
            else:
                made.take_traces(body)
            self.send_response(200)  # an empty message: all was taken
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.daemon_threads = True
    with serving(server) as made.port:
        try:
            yield made
        finally:
            made.ended.set()
