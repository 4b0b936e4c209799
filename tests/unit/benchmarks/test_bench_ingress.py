"""The benchmark of the ingress: its arithmetic, what it asks, and how it times an answer over a real connection."""

import http.server
import threading
import time

import httpx
import numpy as np
import pytest
import yaml

from benchmarks.ingress import (
    CONFIG,
    OURS,
    PLAIN,
    Case,
    Timing,
    ask,
    compared,
    main,
    request_body,
    shared_args,
    summary,
    table,
)


def test_a_constant_delay_is_found_in_any_noise_of_the_engine():
    rng = np.random.default_rng(1)
    plain_s = rng.lognormal(-2, 0.5, size=300)
    found = compared(plain_s + 0.004, plain_s)
    # The same rounds are drawn for both services, so the noise cancels and the interval has no width.
    for name in ("median", "p99", "median_of_pairs"):
        assert found["difference"][name] == pytest.approx([4.0, 4.0, 4.0], abs=0.002)
    assert found[PLAIN]["median"][0] == pytest.approx(1000 * np.median(plain_s), abs=0.002)
    assert found[OURS]["p99"][0] == pytest.approx(1000 * np.percentile(plain_s, 99) + 4, abs=0.002)


def test_the_interval_covers_a_difference_that_varies_and_shrinks_with_rounds():
    rng = np.random.default_rng(2)

    def width(num_rounds):
        plain_s = rng.normal(0.1, 0.01, num_rounds)
        _, low, high = compared(plain_s + rng.normal(0.001, 0.005, num_rounds), plain_s)["difference"][
            "median_of_pairs"
        ]
        assert low < 1.0 < high
        return high - low

    assert width(2000) < width(60) / 2


def test_the_summary_keeps_whole_answers_and_first_pieces_apart():
    rounds = [{OURS: Timing(0.02, 0.05), PLAIN: Timing(0.01, 0.06)}] * 3
    report = summary({str(Case(1, True)): rounds})
    one = report["1 token, streamed"]
    assert one["total_s"]["difference"]["median"][0] == -10.0
    assert one["first_s"]["difference"]["median"][0] == 10.0
    assert one["first_s"]["num_requests"] == 3
    text = table(report)
    assert "-10.00 [-10.00, -10.00]" in text
    assert " 10.00 [10.00, 10.00]" in text


def test_both_services_get_the_same_request_but_for_the_pinned_k():
    args = shared_args(CONFIG, small_engine=False)
    long, short = Case(16, False), Case(1, True)
    ours, plain = (request_body(args, service, long, "Hello") for service in (OURS, PLAIN))
    assert ours.pop("drafting") == {"k": args["drafter"]["max_draft_tokens"]}
    assert ours == plain
    assert (ours["ignore_eos"], ours["max_tokens"]) == (True, 16)
    assert request_body(args, OURS, short, "Hello") == request_body(args, PLAIN, short, "Hello")


def test_a_small_engine_drafts_nothing_and_callers_are_left_out(tmp_path):
    document = yaml.safe_load(CONFIG.read_text())
    document["applications"][0]["args"]["callers"] = {"alice": {}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(document))
    args = shared_args(tmp_path / "c.yaml", small_engine=True)
    assert not {"drafter", "depth", "callers"} & set(args)
    assert args["engine"]["hf_overrides"] == {"num_hidden_layers": 2}
    assert args["engine"]["dtype"] == "float32"
    assert "drafting" not in request_body(args, OURS, Case(16, False), "Hello")
    assert args["target"]["env"]["VLLM_CPU_OMP_THREADS_BIND"]


@pytest.fixture
def server():
    """An HTTP server that answers in two pieces: what the request's path names, then `choices`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            answered = self.path.startswith(f"/{OURS}/")
            self.send_response(200 if answered else 503)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for piece in (b"first ", b'"choices"' if answered else b"not ready"):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
                time.sleep(0.1)
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *args):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def test_the_first_piece_is_timed_before_the_end_and_a_refusal_is_no_answer(server):
    with httpx.Client(base_url=server) as client:
        timing = ask(client, OURS, {})
        assert 0 < timing.first_s < timing.total_s
        with pytest.raises(SystemExit, match="plain answered 503 .*not ready"):
            ask(client, PLAIN, {})


@pytest.mark.parametrize("bad", [["--num-requests", "1"], ["--num-starts", "0"], ["--max-tokens", "0"]])
def test_impossible_numbers_are_refused_before_anything_starts(bad, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([*bad, "--out", str(tmp_path / "x.json")])
    assert "must be at least" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
