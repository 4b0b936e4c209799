"""`peagle chat` and `peagle view` as a user sees them: by keys, in a terminal and through pipes, against a small real
service."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from deployments.chat import Conversation, converse
from deployments.view import change_line, rendered
from tests.unit.deployments.test_batch import JsonHandler

DRAFTING = {"k": 2, "source": "learned", "acceptance_length": 1.5}
RATES = {"mean": [0.9, 0.5], "low": [0.8, 0.4], "high": [0.95, 0.6]}
WORKLOAD = {
    "workload": "code", "num_requests": 2.0, "num_steps": 10.0, "k": 2, "source": "learned", "reason": "it pays",
    "acceptance_length": 2.4, "acceptance_rates": RATES,
}  # fmt: skip
DOCUMENT = {"model": "m", "max_draft_tokens": 2, "policy": "adaptive", "step_times": "unknown", "workloads": [WORKLOAD]}


class Handler(JsonHandler):
    """Answers as the service does, in steps of `a`, `b` (drafted) and `!`; `slow` is answered until the client goes."""

    service: "SmallService"

    def do_GET(self) -> None:
        document = DOCUMENT if self.path == "/drafting" else {"data": [{"id": "m"}]}
        self.send(200, document)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.service.asked.append((body, self.headers["Authorization"]))
        question = body["messages"][-1]["content"]
        if question == "refused":
            self.send(400, {"error": {"message": "not so"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            while question == "slow":
                self._step([b"word "], None)
                time.sleep(0.02)
        except OSError:
            self.service.gone.set()
            return
        self._step([b"a\n", "é".encode()[:1], "é".encode()[1:]], None)
        if question == "broken":
            self.wfile.write(b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
            return
        self._step([b"b", b"!", b"<end>"], "stop")
        self.wfile.write(f"data: {json.dumps({'choices': [], 'drafting': DRAFTING})}\n\ndata: [DONE]\n\n".encode())

    def _step(self, tokens: list[bytes], finish_reason: str | None) -> None:
        content = [{"token": token.decode(errors="replace"), "bytes": list(token), "logprob": 0} for token in tokens]
        text = b"".join(tokens).decode().removesuffix("<end>")
        choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": content}}
        self.wfile.write(f"data: {json.dumps({'choices': [choice | {'finish_reason': finish_reason}]})}\n\n".encode())


class SmallService:
    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.asked: list[tuple[dict[str, Any], str | None]] = []
        self.gone = threading.Event()

    @property
    def messages(self) -> list[list[tuple[str, str]]]:
        """(role, content) of what each request had."""
        return [[(one["role"], one["content"]) for one in body["messages"]] for body, _ in self.asked]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[SmallService]:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {})) as server:
        server.daemon_threads = True
        server.RequestHandlerClass.service = found = SmallService(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


def type_keys(service: SmallService, keys: str, **options: Any) -> None:
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        keyboard.send_text(keys)
        converse(Conversation(service.url, None, k=None, max_tokens=8, **options))


def _take_terminal() -> None:
    """Of a new process: the terminal is its own, and Ctrl-C reaches it, which tests in the background may ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """The command `peagle` in a terminal, as a person uses it. `shown`: what it wrote after the last match."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = dict(os.environ, TERM="xterm", COLUMNS="60", LINES="20", PROMPT_TOOLKIT_NO_CPR="1")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli", *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def type(self, keys: str, *patterns: str) -> None:
        """Type, and read on to each of `patterns`."""
        os.write(self._master, keys.encode())
        for pattern in patterns:
            self.wait_for(pattern)

    def wait_for(self, pattern: str, timeout_s: float = 120) -> None:
        """Read on, from the last match, to the next of `pattern`."""
        end_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.shown)):
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"no {pattern!r} in {self.shown!r}"
            if select.select([self._master], [], [], left_s)[0]:
                self.shown += os.read(self._master, 65536).decode(errors="replace")
        self.shown = self.shown[found.end() :]

    def ended(self) -> int:
        return self.process.wait(timeout=120)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    found = Terminal(*arguments)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()


UP, STOP, LEAVE, PASTED = "\x1b[A", "\x03", "\x04", "\x1b[200~two\nlines\x1b[201~"
PROMPT = r">.*?\x1b\[\?25h"  # the cursor is shown when keys are read
ANSWERED = f"tokens a step[^>]*{PROMPT}"
ANSWER = "a\néb!"


def test_what_is_typed_is_asked_and_commands_change_how(service: SmallService, capfd) -> None:
    type_keys(service, f"one\r/k 3\r/system be brief\r{PASTED}\r/k auto\r/reset\r/system\rthree\r{LEAVE}")
    assert service.messages == [
        [("user", "one")],
        [("system", "be brief"), ("user", "one"), ("assistant", ANSWER), ("user", "two\nlines")],
        [("user", "three")],
    ]
    assert [body.get("drafting") for body, _ in service.asked] == [None, {"k": 3}, None]
    assert {key for _, key in service.asked} == {None}
    body = service.asked[0][0]
    assert (body["stream_interval"], body["max_tokens"], body["logprobs"]) == (1, 8, True)
    shown = capfd.readouterr()
    assert shown.out == 3 * f"{ANSWER}\n"
    assert shown.err.count("[K = 2 (learned), 1.50 tokens a step, ") == 3


def test_a_cache_that_cannot_be_written_keeps_nobody_from_talking(service: SmallService, tmp_path) -> None:
    (tmp_path / "cache").write_text("a file")
    type_keys(service, f"one\r/quit\rtwo\r{LEAVE}")
    assert service.messages == [[("user", "one")]]


def test_an_error_is_shown_and_the_conversation_goes_on(service: SmallService, capfd) -> None:
    type_keys(service, f"refused\r/nothing\r/k many\rbroken\r/help\rlast\r{LEAVE}")
    assert service.messages[-1] == [("user", "broken"), ("assistant", "a\né"), ("user", "last")]
    shown = capfd.readouterr().err
    assert re.findall(r"not so|engine died|/nothing is no command|/k many is no command", shown) == [
        "not so", "/nothing is no command", "/k many is no command", "engine died",
    ]  # fmt: skip
    assert shown.count("Ctrl-D leaves") == 3


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments.cli", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=240, check=False)


def test_a_pipe_gives_lines_and_gets_plain_text(service: SmallService) -> None:
    done = run("chat", "--url", f"{service.url}/v1/", "--api-key", "sk-1", text="one\n\n/k 1\ntwo\n/quit\nthree\n")
    assert done.returncode == 0
    assert done.stdout == 2 * f"{ANSWER}\n"
    assert [body.get("drafting") for body, _ in service.asked] == [None, {"k": 1}]
    assert {key for _, key in service.asked} == {"Bearer sk-1"}
    done = run("chat", "--url", service.url, text="refused\none\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: not so\n")
    assert len(service.asked) == 3


def test_view_in_a_pipe_is_printed_once_and_no_line_is_broken(service: SmallService) -> None:
    done = run("view", service.url)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[:2] == [
        ["workload", "running", "steps", "K", "source", "expected", "AL", "S1", "S2"],
        ["code", "2", "10", "2", "learned", "2.40", "90(80-95)", "50(40-60)"],
    ]
    assert done.stdout.endswith("\n\nm: K_max 2, policy adaptive, unknown\ncode: it pays\n")


def test_a_watched_head_is_shown_with_its_figures_of_now() -> None:
    verdict = "AL +15.9% (+0.7% to +31.2%) over 137 requests"
    change = {"name": "b", "head": "b", "against": "a", "state": "promoted", "is_watched": True, "reason": verdict}
    change |= {"gain": -0.1, "low": -0.2, "high": -0.01}
    assert change_line(change).endswith(f"{verdict}; AL -10.0% (-20.0% to -1.0%)")
    assert change_line({**change, "is_watched": False}).endswith(verdict)


@pytest.mark.parametrize("width", [70, 80, 100, 120])
def test_rates_stand_below_the_position_that_they_are_of(width: int) -> None:
    """At any width, also where some rates are shorter than others."""
    rates = {"mean": [0.9, 0.2, 0.05, 0.2], "low": [0.8, 0.1, 0.01, 0.1], "high": [0.95, 0.3, 0.06, 0.3]}
    row = {**WORKLOAD, "acceptance_rates": rates}
    console = Console(width=width)
    with console.capture() as capture:
        console.print(rendered({**DOCUMENT, "max_draft_tokens": 4, "workloads": [row]}))
    text = capture.get()
    places = [
        [(match.start() - text.rfind("\n", 0, match.start())) for match in re.finditer(pattern, text)]
        for pattern in (r"\bS\d\b", r"\d+\(\d+-\d+\)")
    ]
    assert places[0] == places[1]
    assert len(places[0]) == 4


def test_in_a_terminal_drafts_are_green_and_ctrl_c_stops_the_answer_alone(service: SmallService) -> None:
    with terminal("chat", "--url", service.url) as shell:
        shell.wait_for(PROMPT)
        shell.type("one\r", r"\x1b\[32mb!?\x1b\[0m", ANSWERED)
        shell.type("slow\r", "word word")
        shell.type(STOP)
        assert service.gone.wait(120)  # the engine must not go on for nobody
        shell.wait_for(PROMPT)
        shell.type(STOP, PROMPT)
        shell.type("two\r", ANSWERED)
        shell.type(LEAVE)
        assert shell.ended() == 0
    (_, _, *slow, last) = service.messages[-1]
    assert [role for role, _ in slow] == ["user", "assistant"]
    assert set(slow[1][1].split()) == {"word"}
    assert last == ("user", "two")


def test_the_history_outlasts_the_program_and_is_not_for_others(service: SmallService, tmp_path) -> None:
    type_keys(service, f"one\r{LEAVE}")
    assert (tmp_path / "cache/chat-history").stat().st_mode & 0o777 == 0o600
    with terminal("chat", "--url", service.url) as shell:
        shell.wait_for(PROMPT)
        shell.type(UP, "one")
        shell.type("!\r", ANSWERED)
        shell.type(LEAVE)
        assert shell.ended() == 0
    assert service.messages == [[("user", "one")], [("user", "one!")]]


def test_view_in_a_terminal_is_drawn_in_place_until_ctrl_c(service: SmallService) -> None:
    with terminal("view", service.url) as shell:
        shell.wait_for("it pays")
        shell.wait_for(r"\x1b\[1A.*\x1b\[2K(.|\n)*it pays")  # the lines before are wiped
        shell.type(STOP)
        assert shell.ended() == 0
    with terminal("view", service.url, "--once") as shell:
        shell.wait_for("it pays")
        assert shell.ended() == 0
