"""`python -m peagle.drafter --head DIR --target DIR --port N`: a drafter by itself, without Ray.

Serves until it is interrupted. Its address and the digests of its heads, which targets name, are printed as one line
of JSON as soon as targets may connect. With `PEAGLE_DRAFTER_KEY` in its environment only targets that name this key
beside the address are let in.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from peagle.config import HeadError
from peagle.drafter.engine import DraftEngine
from peagle.drafter.server import DrafterServer
from peagle.drafter.serving import DrafterLimits, load_served_head
from peagle.drafter.steps import DTYPES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m peagle.drafter", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head", type=Path, action="append", required=True, help="directory; again for more heads")
    parser.add_argument("--target", type=Path, required=True, help="directory of the target's checkpoint")
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: bfloat16 on a GPU, float32 on a CPU")
    defaults = DrafterLimits()
    parser.add_argument("--max-num-requests", type=int, default=defaults.max_num_requests)
    parser.add_argument("--max-num-rows", type=int, default=defaults.max_num_rows)
    parser.add_argument("--max-depth", type=int, help="K_max; default: what the head was trained for")
    parser.add_argument("--cache-gib", type=float, default=defaults.cache_gib, help="of each head")
    parser.add_argument("--block-size", type=int, default=defaults.block_size)
    parser.add_argument("--max-context", type=int, help="default: what the head's config.json says")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        server = _build(args)
    except (HeadError, ValueError, OSError) as error:
        parser.error(str(error))
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    server.start()
    heads = {str(index): head.digest for index, head in server.heads.items()}
    sys.stdout.write(json.dumps({"address": server.address, "heads": heads}) + "\n")
    sys.stdout.flush()
    while not stopped.wait(1.0) and server.is_healthy():
        pass
    server.stop()
    return 0 if stopped.is_set() else 1


def _build(args: argparse.Namespace) -> DrafterServer:
    dtype = DTYPES[args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")]
    limits = DrafterLimits(
        args.max_num_requests, args.max_num_rows, args.max_depth, args.cache_gib, args.block_size, args.max_context
    )
    loaded = [load_served_head(head_dir, args.target, limits, args.device, dtype) for head_dir in args.head]
    engine = DraftEngine({i: runtime for i, (runtime, _) in enumerate(loaded)}, max_num_requests=args.max_num_requests)
    served = {i: served for i, (_, served) in enumerate(loaded)}
    key = os.environ.get("PEAGLE_DRAFTER_KEY", "")
    return DrafterServer(engine, served, args.host, args.port, device=args.device, key=key)


if __name__ == "__main__":
    sys.exit(main())
