"""Several clients of one engine, each in a process of its own.

vLLM's engine core answers a request to the client that sent it (`client_index`). vLLM's own server uses that for
`--api-server-count`. Here the first client is the one that starts the engine. It learns the addresses of the others
before (`started_for`), and these connect later (`connect`).

The engine greets each address once, and a client waits for this greeting. So a process that takes the place of another
one needs an address of its own: ask `client_addresses` for spare ones.
"""

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import values
from starlette.datastructures import State
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.v1.engine import core_client
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.utils import get_engine_zmq_bind_addresses
from vllm.v1.executor import Executor

from peagle.vllm.request_args import ALL_OF_CLIENT

Address = tuple[str, str]
"""ZMQ addresses of one client: of its requests, of its outputs."""

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client. Where it is set, metrics are in files that other processes can read."""


def client_addresses(config: Any, number: int) -> list[Address]:
    """Addresses of further clients of the engine that is to start with `config`. It is told their number if its model
    takes images or audio."""
    if config.model_config.is_multimodal_model:  # features that one client has sent are not in the caches of others
        config.parallel_config._api_process_count = number + 1
    made = get_engine_zmq_bind_addresses(config, number)
    return list(zip(made.inputs, made.outputs, strict=True))


@contextlib.contextmanager
def started_for(addresses: Sequence[Address], metrics_folder: str | None = None) -> Iterator[None]:
    """An engine that an `AsyncLLM` starts meanwhile also serves the clients at these addresses, numbered from 1 on.

    Args:
        metrics_folder: where this client keeps vLLM's metrics, as the others do in which `METRICS_FOLDER` is set. The
            engine tells the state after a step to one of those clients that the step answers.
    """
    launch, value_class, folder = core_client.launch_core_engines, values.ValueClass, os.environ.get(METRICS_FOLDER)

    def launch_for_all(config: Any, executor_class: Any, log_stats: bool, own: Any) -> Any:
        own.inputs += [address for address, _ in addresses]
        own.outputs += [address for _, address in addresses]
        return launch(config, executor_class, log_stats, own)

    core_client.launch_core_engines = launch_for_all  # type: ignore[assignment]
    if metrics_folder is not None:
        os.environ[METRICS_FOLDER], values.ValueClass = metrics_folder, values.MultiProcessValue()
    try:
        yield
    finally:
        core_client.launch_core_engines, values.ValueClass = launch, value_class
        os.environ.pop(METRICS_FOLDER, None)
        os.environ.update({} if folder is None else {METRICS_FOLDER: folder})


async def connect(config: Any, arguments: Namespace, address: Address, index: int) -> tuple[AsyncLLM, State]:
    """vLLM's client of an engine that another process starts, and the state of vLLM's API server: its API objects by
    name.

    Args:
        config: vLLM's configuration of the engine.
        arguments: of vLLM's server.
        address: of this client, its `index` counted from 1 on.
    """
    config.parallel_config._api_process_rank = index
    client = AsyncLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=True,
        log_requests=False,
        client_addresses={"input_address": address[0], "output_address": address[1]},
        client_count=index + 1,
        client_index=index,
    )
    state = State()
    await init_app_state(client, state, arguments, supported_tasks=await client.get_supported_tasks())
    return client, state


async def abort_all_of(client: AsyncLLM, index: int) -> None:
    """Abort all requests of another client, whose process has ended."""
    await client.engine_core.abort_requests_async([f"{ALL_OF_CLIENT}{index}"])
