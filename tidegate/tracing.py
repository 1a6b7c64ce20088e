"""Traces of `tidegate run`, sent to a collector if OpenTelemetry's own environment variables name one.

Airflow's tasks are traced by Airflow ([traces] otel_on); what is told of batches is the same: `tidegate.jobs.engine.spans`.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points

from tidegate.state_store.base.errors import TidegateError, UsageError

SERVICE = "tidegate"
# Any of these asks for traces.
REQUESTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER")
# A collector that is away holds up the end of the run by no more than this; OpenTelemetry's own default is 10 s.
TIMEOUT_VARIABLE, TIMEOUT_SECONDS = "OTEL_EXPORTER_OTLP_TIMEOUT", "3"
PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


@contextmanager
def traced(name: str, pipeline: str) -> Iterator[None]:
    """Record a span about the block, and what is told within it, if the environment asks for traces.

    The span continues the trace that the variable TRACEPARENT names, if it is set. Importing and setting up OpenTelemetry is
    left to runs that are traced.

    Raises: UsageError if the environment names an exporter that is not installed.
    """
    if not is_requested(os.environ):
        yield
        return
    from opentelemetry import trace  # noqa: PLC0415 - most runs are not traced
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    os.environ.setdefault(TIMEOUT_VARIABLE, TIMEOUT_SECONDS)
    exporter = exporter_name(os.environ)
    try:
        make_exporter = entry_points(group="opentelemetry_traces_exporter")[exporter].load()
    except KeyError:
        raise UsageError(
            f"OTEL_TRACES_EXPORTER names {exporter}, which is not installed. Set it to otlp, or to none."
        ) from None
    service = os.environ.get("OTEL_SERVICE_NAME") or SERVICE
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(make_exporter()))
    trace.set_tracer_provider(provider)
    outer = TraceContextTextMapPropagator().extract({"traceparent": os.environ.get("TRACEPARENT", "")})
    tracer = trace.get_tracer(SERVICE)
    try:
        with tracer.start_as_current_span(
            name, outer, attributes={"tidegate.pipeline": pipeline}, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except TidegateError as error:
                span.set_attribute("error.type", error.code)  # not its message, which may quote data
                span.set_status(trace.Status(trace.StatusCode.ERROR, error.code))
                raise
    finally:
        provider.shutdown()


def is_requested(environ: Mapping[str, str]) -> bool:
    """Return whether the environment asks for traces, as OpenTelemetry specifies it."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(environ.get(name) for name in REQUESTS)


def exporter_name(environ: Mapping[str, str]) -> str:
    """Return which exporter the environment names; as in Airflow, it is OTLP over gRPC unless it is said."""
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    return PROTOCOLS.get(protocol, exporter) if exporter == "otlp" else exporter
