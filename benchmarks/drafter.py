"""A drafter in a process of its own, without Ray: for `benchmarks.engines` and for tests.

    python -m benchmarks.drafter --head DIR --target DIR [--max-context N] ...

The service runs the same server as `deployments.drafter`. Here its address and the digest of its head, which targets
name, are written to standard output as one line of JSON as soon as targets may connect. SIGINT or SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
import typing
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.engine import DraftEngine
from peagle.drafter.protocol import DtypeName
from peagle.drafter.server import DrafterServer
from peagle.drafter.serving import DrafterLimits, load_served_head

LIMITS = ("max_num_requests", "max_num_rows", "max_draft_tokens", "cache_gib", "block_size", "max_context")


def serve(args: argparse.Namespace, limits: DrafterLimits) -> int:
    """The exit status: 0 when it was asked to stop, 1 when it failed."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.startswith("cuda") else "float32"))
    head, served = load_served_head(args.head, args.target, limits, device, dtype)
    engine = DraftEngine({0: head})
    server = DrafterServer(engine, {0: served}, device=device)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    server.start()
    sys.stdout.write(json.dumps({"address": server.address, "heads": {"0": served.digest}}) + "\n")
    sys.stdout.flush()
    while not stopped.wait(1.0) and server.is_healthy():
        pass
    server.stop()
    return 0 if stopped.is_set() else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True, help="directory of the head")
    parser.add_argument("--target", type=Path, required=True, help="directory of the target's checkpoint")
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument(
        "--dtype", choices=typing.get_args(DtypeName), help="default: bfloat16 on a GPU, float32 on a CPU"
    )
    for name in LIMITS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float if name == "cache_gib" else int)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    given: dict[str, Any] = {name: value for name in LIMITS if (value := getattr(args, name)) is not None}
    return serve(args, DrafterLimits(**given))


if __name__ == "__main__":
    sys.exit(main())
