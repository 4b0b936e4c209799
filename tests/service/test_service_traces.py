"""Traces: with one engine setting, each request is a span that an OpenTelemetry collector gets."""

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.service_harness import FIXED, running_service, wait_for

pytestmark = [pytest.mark.service, pytest.mark.long]


class Collector(ThreadingHTTPServer):
    """Takes what OpenTelemetry's exporter sends by HTTP. `spans`: (name, trace, attributes)."""

    spans: list[tuple[str, str, dict[str, Any]]]


class Export(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {item.key: item.value for item in span.attributes}
                    self.server.spans.append((span.name, span.trace_id.hex(), attributes))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    server = Collector(("127.0.0.1", 0), Export)
    server.spans = []
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_request_is_a_span_of_its_clients_trace_with_the_id_of_its_answer(collector: Collector) -> None:
    engine = {"otlp_traces_endpoint": f"http://127.0.0.1:{collector.server_port}/v1/traces"}
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with running_service(engine=engine, target={"env": env}, depth=FIXED) as service:
        trace = os.urandom(16).hex()
        headers = {"traceparent": f"00-{trace}-{os.urandom(8).hex()}-01", "x-request-id": "order-66"}
        found: dict[str, Any] = {}
        for stream in (False, True):
            answer = service.ask(headers=headers, max_tokens=8, stream=stream)
            assert answer.status_code == 200
            found = found or answer.json()
        untraced = service.ask(max_tokens=4).json()
        assert found["id"] == "chatcmpl-order-66"

        def requests() -> list[tuple[str, str, dict[str, Any]]]:
            return [span for span in list(collector.spans) if span[0] == "llm_request"]

        wait_for(lambda: len(requests()) >= 3 + service.num_early_answers, "spans", 60)
    of_trace = [attributes for _, trace_id, attributes in requests() if trace_id == trace]
    assert [attributes["gen_ai.request.id"].string_value for attributes in of_trace] == ["chatcmpl-order-66"] * 2
    assert of_trace[0]["gen_ai.usage.completion_tokens"].int_value == 8
    others = [attributes for _, trace_id, attributes in requests() if trace_id != trace]
    assert len(others) == 1 + service.num_early_answers
    assert others[-1]["gen_ai.request.id"].string_value == untraced["id"]
