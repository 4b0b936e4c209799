"""The remote drafter: how a target hands over a step, the cache and pass that answer it, and the server around them."""
