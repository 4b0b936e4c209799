"""A conversation with a running service in the terminal (`peagle chat`), or by lines through a pipe."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import openai
import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.live import Live
from rich.text import Text

from peagle.store import cache_root

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionChunk

HELP = """\
/k N, /k auto   draft tokens verified per step; auto: the service decides
/system TEXT    system prompt of this conversation; without TEXT: none
/reset          forget what was said
/help           this list
Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D leaves."""

KEYS = KeyBindings()


@KEYS.add("enter")
def _send(event: KeyPressEvent) -> None:
    event.current_buffer.validate_and_handle()


@KEYS.add("escape", "enter")
def _begin_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


class Conversation:
    """What was said to a service and answered; `k`: draft tokens verified per step, None: the service decides.

    Raises ValueError with the service's words when it refuses, OSError when it does not answer.
    """

    def __init__(self, url: str, api_key: str | None, *, k: int | None, **sampling: Any) -> None:
        self.k = k
        self._url, self._sampling = url, sampling
        self._system: list[Any] = []
        self._turns: list[Any] = []
        self._out, self._notes = (
            Console(highlight=False, markup=False, emoji=False, stderr=is_error) for is_error in (False, True)
        )
        # Without a key no header: the client would send what a service with keys takes for a wrong one.
        self._headers: Any = {} if api_key else {"Authorization": openai.Omit()}
        self._client = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=api_key or "none")
        with self._errors():
            self._model = self._client.models.list(extra_headers=self._headers).data[0].id

    def obey(self, line: str) -> None:
        """Carry out a command, or ask what is no command."""
        command, _, rest = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/k" if rest == "auto" or rest.isdecimal():
                self.k = None if rest == "auto" else int(rest)
            case "/system":
                self._system = [{"role": "system", "content": rest}] if rest else []
            case "/reset":
                self._turns.clear()
            case "/help":
                self._notes.print(HELP)
            case _ if command.startswith("/"):
                raise ValueError(f"{line.strip()} is no command\n{HELP}")
            case _:
                self.ask(line)

    def ask(self, question: str) -> None:
        """Print the answer as it comes, then its numbers. What came counts as said, also when it is interrupted."""
        asked: Any = {"role": "user", "content": question}
        answer, num_tokens, start_s, drafting = "", 0, time.monotonic(), dict[str, Any]()
        # A chunk for every step, also where the service would put several into one.
        extra = self._sampling | {"stream_interval": 1} | ({} if self.k is None else {"drafting": {"k": self.k}})
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may need several tokens
        try:
            with (
                self._errors(),
                self._client.chat.completions.create(
                    model=self._model, messages=[*self._system, *self._turns, asked], stream=True, logprobs=True,
                    extra_body=extra, extra_headers=self._headers,
                ) as stream,
                self._printer() as show,
            ):  # fmt: skip
                for chunk in stream:
                    drafting = (chunk.model_extra or {}).get("drafting", drafting)
                    for token, is_draft in _tokens(chunk):
                        text = decoder.decode(token)
                        show(text, is_draft)
                        answer += text
                        num_tokens += 1
        finally:
            if answer:
                self._turns += [asked, {"role": "assistant", "content": answer}]
        speed = f"{num_tokens / (time.monotonic() - start_s):.0f} tokens/s"
        k, source = drafting.get("k", 0), drafting.get("source", "no drafter")
        steps = f"{drafting.get('acceptance_length', 1.0):.2f} tokens a step"
        self._notes.print(f"[K = {k} ({source}), {steps}, {speed}]", style="dim")

    @contextmanager
    def _printer(self) -> Iterator[Callable[[str, bool], None]]:
        """A function that prints a token's text: on a terminal wrapped at words, and in green if it was drafted."""
        if not self._out.is_terminal:
            yield lambda text, _: typer.echo(text, nl=False)
            typer.echo()
            return
        line = Text()
        # Only the last line is drawn again and again: what is above it scrolls as any output does.
        with Live(line, console=self._out, refresh_per_second=20, vertical_overflow="visible") as live:

            def show(text: str, is_draft: bool) -> None:
                nonlocal line
                *finished, line = line.append(text, "green" if is_draft else "").split("\n", allow_blank=True)
                for one in finished:
                    self._out.print(one)
                live.update(line)

            yield show

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except openai.APIConnectionError as error:
            raise OSError(f"{self._url} does not answer: {error.__cause__ or error}") from error
        except openai.APIError as error:
            raise ValueError(error.body["message"] if isinstance(error.body, dict) else error.message) from error


def _tokens(chunk: ChatCompletionChunk) -> list[tuple[bytes, bool]]:
    """Tokens of a chunk, and whether each was drafted. A chunk is what one step gave: accepted drafts, then one token
    of the target's own."""
    choice = next(iter(chunk.choices), None)
    tokens = list((choice and choice.logprobs and choice.logprobs.content) or ())
    num_drafted = len(tokens) - 1
    if tokens and choice and choice.finish_reason == "stop" and tokens[-1].token not in (choice.delta.content or ""):
        tokens.pop()  # the token that ends a turn is no text
    return [(bytes(token.bytes or ()), index < num_drafted) for index, token in enumerate(tokens)]


def _history() -> History:
    """Questions of all conversations, for the arrow keys; of this one alone where the cache cannot be written."""
    path = cache_root() / "chat-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def converse(conversation: Conversation) -> None:
    """Obey what is typed until Ctrl-D; an error is shown, and the conversation goes on. Ctrl-C stops what runs."""
    session: PromptSession[str] = PromptSession("> ", history=_history(), multiline=True, key_bindings=KEYS)
    while True:
        try:
            conversation.obey(session.prompt())
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo()
        except (ValueError, OSError) as error:
            typer.secho(str(error), fg="red", err=True)
