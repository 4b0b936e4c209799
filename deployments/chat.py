"""A conversation with a running service in the terminal (`peagle chat`), or by lines through a pipe."""

import codecs
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import typer
from openai.types.chat import ChatCompletionChunk
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from deployments.batch import client_options
from peagle.store import cache_root

HELP = """\
/k N, /k auto   draft tokens verified per step; auto: the service decides
/system TEXT    system prompt of this conversation; without TEXT: none
/reset          forget what was said
/help           this list
Enter sends, Ctrl-C stops an answer, /quit or Ctrl-D leaves. Text of several lines can be pasted."""


class Conversation:
    """What was said to a service and answered; `k`: draft tokens verified per step, None: the service decides.

    Raises ValueError with the service's words when it refuses, OSError when it does not answer.
    """

    def __init__(self, url: str, api_key: str | None, *, k: int | None, **sampling: Any) -> None:
        self.k = k
        self._url, self._sampling = url, sampling
        self._system: list[Any] = []
        self._turns: list[Any] = []
        options, self._headers = client_options(url, api_key)
        self._client = openai.OpenAI(**options)
        with self._errors():
            self._model = self._client.models.list(extra_headers=self._headers).data[0].id

    def obey(self, line: str) -> None:
        """Carry out a command, or ask what is no command. Raises EOFError for `/quit`."""
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
            case "/quit":
                raise EOFError
            case "/help":
                typer.echo(HELP, err=True)
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
            ):  # fmt: skip
                for chunk in stream:
                    drafting = (chunk.model_extra or {}).get("drafting", drafting)
                    for token, is_draft in _tokens(chunk):
                        text = decoder.decode(token)
                        typer.echo(typer.style(text, fg="green") if is_draft else text, nl=False)
                        answer += text
                        num_tokens += 1
        finally:
            if answer:
                typer.echo()
                self._turns += [asked, {"role": "assistant", "content": answer}]
        speed = f"{num_tokens / (time.monotonic() - start_s):.0f} tokens/s"
        k, source = drafting.get("k", 0), drafting.get("source", "no drafter")
        steps = f"{drafting.get('acceptance_length', 1.0):.2f} tokens a step"
        typer.secho(f"[K = {k} ({source}), {steps}, {speed}]", dim=True, err=True)

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
    """Obey lines until Ctrl-D or `/quit`. An error is shown, and the conversation goes on. Ctrl-C stops an answer."""
    session: PromptSession[str] = PromptSession("> ", history=_history())
    while True:
        try:
            conversation.obey(session.prompt())
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo()
        except (ValueError, OSError) as error:
            typer.secho(str(error), fg="red", err=True)
