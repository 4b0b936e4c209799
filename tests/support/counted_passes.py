"""What vLLM adds to a CPU worker (`worker_extension_cls`): a test counts the passes that its drafter runs."""

from typing import Any


class CountedPasses:
    _passes: list[int]

    def passes(self) -> list[int]:
        """Requests of each pass of the drafter since the first call."""
        if not hasattr(self, "_passes"):
            self._passes, drafter = [], self.model_runner.drafter  # type: ignore[attr-defined]
            propose = drafter.propose

            def count(*args: Any, **kwargs: Any) -> Any:
                self._passes.append(len(kwargs["next_token_ids"]))
                return propose(*args, **kwargs)

            drafter.propose = count
        return list(self._passes)
