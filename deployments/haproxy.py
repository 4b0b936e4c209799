"""Serve's HAProxy with a configuration for this service, started again at once when it dies.

Serve's controller calls `install` when it starts (RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH); it then starts
`HAProxyManager` of this module on each node in place of Ray's. What differs:

- retries: a request whose replica dies before it answers goes to another one;
- one client address gets three quarters of the connections at the most, so that others still come in;
- if RAY_SERVE_HAPROXY_BALANCE_ALGORITHM is `BALANCE`, the turns of a conversation go to one replica, which has their
  prefix in its cache, while that one has not many more requests than the others;
- replicas hear the client's address, in a header whose name a client does not know;
- while no application is known: 503 in OpenAI's form with Retry-After, in place of 404 in plain text;
- no pages of HAProxy's own (ports 8404 and 9101): they would share its connections with the service;
- the admin socket and its folder are closed to other users.
"""

import asyncio
import re
import zlib
from pathlib import Path
from typing import Any

import ray
from ray.serve._private import controller, haproxy

from cluster.errors import ApiError
from deployments.compat import address_header
from deployments.errors import json_response, not_ready, server_lost

RETRY_ON = "conn-failure empty-response 502"
"""502: of a replica whose engine died."""
OPTIONS = """
    option http-buffer-request
    timeout http-request 60s
    no option splice-request"""
"""A request can be sent again only where HAProxy holds all of it, up to a buffer's 16 kB, so it waits for the body, and
for no longer than 60 s: it has 4,096 connections. HAProxy 2.8 that splices a request which came in two pieces never
sees its client leave."""

MAX_CONNECTIONS = 3072
CONNECTIONS = f"""
    stick-table type ipv6 size 64k expire 2h store conn_cur
    tcp-request connection track-sc0 src
    tcp-request connection reject if {{ sc0_conn_cur gt {MAX_CONNECTIONS} }}"""
"""The most connections of one client address, of 4,096 in all."""


def _set_variable(variable: str, condition: str, *expressions: str) -> str:
    """Rules that set a variable to the first of these values that the body has."""
    rule, is_missing = f"\n    http-request set-var(txn.{variable}) req.body", f"!{{ var(txn.{variable}) -m found }}"
    return "".join(f"{rule},{expression} if {condition} {is_missing}" for expression in expressions)


def _message_text(message: str) -> tuple[str, str]:
    """A message's text as a whole, or its first part."""
    return f"json_query('$.{message}.content')", f"json_query('$.{message}.content[0].text')"


CONVERSATION = (
    _set_variable("first", "METH_POST", *_message_text("messages[0]"), *_message_text("input[0]"), "bytes(0,2048)")
    + _set_variable(
        "second", "{ req.body,json_query('$.messages[0].role') -m str system developer }", *_message_text("messages[1]")
    )
    + "\n    http-request set-var(txn.conversation) var(txn.first),concat(,txn.second)"
)
"""What is the same in each turn of a chat: the first message, and behind a system prompt the second one. For a
completion, and where HAProxy's buffer does not hold the message, the beginning of the body."""
BALANCE = "hash var(txn.conversation)"
LOADS = """
    hash-type consistent
    hash-balance-factor 125"""
"""A replica with more than 1.25 times the mean number of requests passes further ones on."""


def own_config(text: str, not_ready_page: Path, address_header: str = "") -> str:
    """A configuration file of Ray's as this service needs it. `not_ready_page`: an HTTP response. `address_header`: a
    header to which HAProxy adds the client's address; "": none."""
    options = f"{OPTIONS}\n    option forwardfor header {address_header}" if address_header else OPTIONS
    sections = re.split(r"(?m)^(?=\S)", text.replace("mode 666 level admin", "mode 600 level admin"))
    text = "".join(part for part in sections if not part.startswith(("frontend prometheus\n", "listen stats\n")))
    text = re.sub(r"\n    retry-on .*", lambda found: found[0] + options, text, count=1)
    rules = CONNECTIONS
    if (balance := f"\n    balance {BALANCE}") in text:
        text, rules = text.replace(balance, balance + LOADS), CONNECTIONS + CONVERSATION
        # By HAProxy's own ids, which are places in the list, all servers behind one that goes would change.
        text = re.sub(
            r"(?m)^    server (\S+).*", lambda found: f"{found[0]} id {1 + zlib.crc32(found[1].encode()) // 2}", text
        )
    # A connection of HTTP/2 holds a hundred requests, so limits of connections would bound nothing.
    text = re.sub(r"(?m)^frontend http_frontend\n    bind .*", lambda found: f"{found[0]} proto h1{rules}", text)
    if "\n    use_backend " not in text:
        refusal = f"http-request return status 503 errorfile {not_ready_page}"
        text = re.sub(r"http-request return status 404 .*", refusal, text)
    return text


def error_page(error: ApiError) -> bytes:
    response = json_response(error)
    head = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
    return b"HTTP/1.1 503 Service Unavailable\r\n%s\r\n%s" % (head, response.body)


class HAProxy(haproxy.HAProxyApi):
    """The HAProxy of one node."""

    is_stopping = False
    replacing: asyncio.Lock
    """Held while one HAProxy takes the place of another."""

    def _generate_config_file_internal(self) -> None:
        super()._generate_config_file_internal()
        path = Path(self.config_file_path)
        not_ready_page = path.with_name("503.http")
        not_ready_page.write_bytes(error_page(not_ready()))
        Path(str(self.cfg.error_file_path)).write_bytes(error_page(server_lost()))
        path.write_text(own_config(path.read_text(), not_ready_page, address_header()))

    async def _start_and_wait_for_haproxy(self, *extra_args: str, **options: Any) -> Any:
        process: Any = await super()._start_and_wait_for_haproxy(*extra_args, **options)
        self._watch = asyncio.ensure_future(self._replace(process))
        return process

    async def _graceful_reload(self) -> None:
        async with self.replacing:
            await super()._graceful_reload()

    async def _replace(self, process: Any) -> None:
        """Start HAProxy again when this one dies."""
        status = await process.wait()
        async with self.replacing:
            if process is not self._proc or self.is_stopping:
                return
            haproxy.logger.warning("HAProxy has ended with %d; it starts again", status)
            self._proc = await self._start_and_wait_for_haproxy()

    async def stop(self) -> None:
        self.is_stopping = True
        await super().stop()


def adopt(api: Any) -> None:
    """Make Ray's control of an HAProxy that has not started yet this service's."""
    api.__class__, api.replacing = HAProxy, asyncio.Lock()
    api.cfg.retry_on = RETRY_ON
    # A replica that refuses a connection is dead: the request goes to the next one at once.
    api.cfg.observe_error_limit = 1
    Path(api.cfg.socket_path).parent.chmod(0o700)


ray_actor: Any = haproxy.HAProxyManager
RayManager: Any = ray_actor.__ray_metadata__.modified_class.__ray_actor_class__


class HAProxyManager(RayManager):
    """The actor that controls the HAProxy of one node."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        adopt(self._haproxy)  # its start is a task, which runs after this


def install() -> None:
    """Let Serve's controller, in whose process this runs, start HAProxy as this service needs it."""
    controller.HAProxyManager = ray.remote(num_cpus=0)(HAProxyManager)  # type: ignore[misc, assignment]
