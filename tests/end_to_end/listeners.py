"""Servers on loopback that receive what a stack sends: mails by SMTP, metrics by OpenTelemetry."""

import socketserver
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from tests.collector import otlp_server, serving


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


@dataclass
class Received:
    """A collector's port, and the newest value that each process has sent of each counter and each timer's count."""

    port: int
    values: dict[tuple[str, tuple[tuple[str, str], ...], int], float] = field(default_factory=dict)

    def sums(self, pipeline: str) -> dict[str, float]:
        """Return each metric of a pipeline, added up over all processes: a counter, or how often a timer was sent."""
        found: dict[str, float] = defaultdict(float)
        for (name, attributes, _), value in self.values.items():
            if dict(attributes).get("pipeline") == pipeline:
                found[name] += value
        return dict(found)


@contextmanager
def metrics_collector() -> Iterator[Received]:
    """Run a collector that takes metrics by OTLP over HTTP."""

    def take(body: bytes) -> ExportMetricsServiceResponse:
        request = ExportMetricsServiceRequest.FromString(body)
        for metric in (m for r in request.resource_metrics for scope in r.scope_metrics for m in scope.metrics):
            data = getattr(metric, metric.WhichOneof("data"))
            for point in data.data_points:
                attributes = tuple(sorted((a.key, a.value.string_value) for a in point.attributes))
                key = metric.name, attributes, point.start_time_unix_nano
                made.values[key] = point.count if hasattr(point, "count") else point.as_int or point.as_double
        return ExportMetricsServiceResponse()

    with serving(otlp_server(take)) as port:
        made = Received(port)
        yield made
