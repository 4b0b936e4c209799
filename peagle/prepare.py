"""``python -m peagle.prepare``: make the target and the head ready to serve, and print their paths.

With a filled cache it only checks, in about a second.
"""

import argparse
import sys
import time
from pathlib import Path

from peagle.embedded import DEFAULT_TARGET, embedded_targets, prepare_target
from peagle.heads import prepare_head, shipped_heads


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when everything is ready, 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m peagle.prepare", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_TARGET, help=f"embedded target ({', '.join(embedded_targets())})")
    parser.add_argument("--head", default=None, help="shipped head or directory; default: that of the target")
    parser.add_argument("--cache-dir", type=Path, default=None, help="default: $PEAGLE_CACHE or ~/.cache/peagle")
    parser.add_argument("--verify", action="store_true", help="hash every file that is reused")
    options = parser.parse_args(arguments)
    start = time.monotonic()

    def report(message: str) -> None:
        print(f"[{time.monotonic() - start:5.1f} s] {message}", flush=True)

    try:
        target_dir = prepare_target(options.target, options.cache_dir, verify=options.verify, report=report)
        report(f"target ready: {target_dir}")
        head = options.head or (options.target if options.target in shipped_heads() else None)
        if head is None:
            report(f"no head ships for {options.target}: only the target is prepared")
            return 0
        head_dir = prepare_head(head, target_dir, options.cache_dir, verify=options.verify, report=report)
        report(f"head ready:   {head_dir}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
