"""How a target and a drafter introduce themselves: what the target says, and whether the drafter's heads fit it.

    target                                      drafter
    hello: shape, layers, heads by digest  ->
                                           <-   refused: why, in words
                                           <-   welcome: mailbox or none, reducers (raw, in the order named)
    attached: whether it has the mailbox   ->   (only where a mailbox was named)

Heads are named by digest; the numbers of a target's heads are its own, the drafter translates them.
"""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Mapping

from peagle.runtime.steps import TargetShape
from peagle.runtime.wire import Message, WireError

MAX_REDUCER_BYTES = 1 << 30
MAX_PAYLOAD_BYTES = 1 << 32
MAX_NUM_HEADS = 63  # a bit each in a word of 64, the sign left out: `peagle.vllm.remote_health`


@dataclasses.dataclass(frozen=True)
class Hello:
    """name: of the target, for people. aux_layer_ids: the tapped layers. heads: index -> digest. host: of
    `host_identity`. known_reducers: digests of heads whose reducer the target has already. key: of the drafter, ""
    where it asks for none."""

    name: str
    shape: TargetShape
    aux_layer_ids: tuple[int, ...]
    heads: Mapping[int, str]
    host: str
    known_reducers: tuple[str, ...] = ()
    key: str = dataclasses.field(default="", repr=False)

    def fields(self) -> dict[str, object]:
        return {
            "name": self.name,
            "shape": dataclasses.asdict(self.shape),
            "aux_layer_ids": list(self.aux_layer_ids),
            "heads": {str(index): digest for index, digest in self.heads.items()},
            "host": self.host,
            "known_reducers": list(self.known_reducers),
            "key": self.key,
        }

    @classmethod
    def read(cls, message: Message) -> Hello:
        """Inverse of `fields`. Raises WireError, naming the field, for anything else."""
        if message.kind != "hello":
            raise WireError(f"the first message is {message.kind!r:.40}, not a hello")
        try:
            found = cls(
                name=message.field("name", str),
                shape=TargetShape(**message.field("shape", dict)),
                aux_layer_ids=tuple(int(layer) for layer in message.field("aux_layer_ids", list)),
                heads={int(index): str(digest) for index, digest in message.field("heads", dict).items()},
                host=message.field("host", str),
                known_reducers=tuple(str(digest) for digest in message.field("known_reducers", list)),
                key=message.field("key", str),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise WireError(f"hello: {error}") from error
        if any(not 0 <= index < MAX_NUM_HEADS for index in found.heads):
            raise WireError(f"hello: heads = {sorted(found.heads)} must be numbered 0 .. {MAX_NUM_HEADS - 1}")
        return found


@dataclasses.dataclass(frozen=True)
class ServedHead:
    """A head as a drafter offers it.

    digest: of `peagle.heads.head_digest`. reducer: its `Reducer` as bytes. max_depth: the most drafts it is run for.
    """

    digest: str
    reducer: bytes
    hidden_size: int
    dtype: str
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    max_depth: int


def refusal(hello: Hello, heads: Mapping[int, ServedHead], key: str = "") -> str | None:
    """Why these heads cannot draft for this target; None where they can. key: the drafter's secret, "" for none."""
    if key and not hmac.compare_digest(hello.key.encode(), key.encode()):
        return "the drafter's key is missing or another one: name it beside the drafter's address"
    by_digest = {head.digest: head for head in heads.values()}
    if not hello.heads:
        return "the target names no head"
    if (num_bytes := hello.shape.payload_bytes) > MAX_PAYLOAD_BYTES:
        return f"a step of max_num_rows = {hello.shape.max_num_rows} has {num_bytes} bytes, at most {MAX_PAYLOAD_BYTES}"
    for index, digest in hello.heads.items():
        head = by_digest.get(digest)
        if head is None:
            return f"head {index} of the target is {digest}, this drafter has {', '.join(sorted(by_digest))}"
        wanted = (hello.shape.hidden_size, hello.shape.dtype, hello.shape.vocab_size, hello.aux_layer_ids)
        served = (head.hidden_size, head.dtype, head.vocab_size, head.aux_layer_ids)
        for name, ours, theirs in zip(
            ("hidden_size", "dtype", "vocab_size", "aux_layer_ids"), served, wanted, strict=True
        ):
            if ours != theirs:
                return f"head {digest}: {name} is {ours} at the drafter and {theirs} at the target"
        if hello.shape.max_depth > head.max_depth:
            return (
                f"head {digest}: the target asks for up to {hello.shape.max_depth} drafts, this drafter gives "
                f"{head.max_depth}: start it with a larger --max-depth"
            )
    return None


def check_swap(heads: Mapping[int, ServedHead], index: int, served: ServedHead) -> ServedHead:
    """The head that `served` may replace.

    Raises ValueError for an index without a head, a head that is served under another already, or one that targets of
    the old one cannot feed.
    """
    old = heads.get(index)
    if old is None:
        raise ValueError(f"there is no head {index} to swap, only {sorted(heads)}")
    if served.digest in {other.digest for i, other in heads.items() if i != index}:
        raise ValueError(f"head {served.digest} is served under another number already")
    for name in ("hidden_size", "dtype", "vocab_size", "aux_layer_ids"):
        if getattr(served, name) != getattr(old, name):
            raise ValueError(
                f"head {served.digest} does not fit the targets: its {name} is {getattr(served, name)}, that of head "
                f"{old.digest} {getattr(old, name)}"
            )
    return old
