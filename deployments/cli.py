"""The command `peagle`: every program of the product is one subcommand (`python -m deployments.cli` is the same).

A subcommand turns its line into the arguments of one plain function, which it imports when it runs: `peagle --help`
loads neither torch nor Ray. ValueError and OSError are the user's errors: their message goes to standard error and the
exit status is 1. So it is for any other error, which is named as unexpected. `peagle --traceback ...` shows where an
error comes from.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from deployments import APP_NAME

app = typer.Typer(
    name="peagle",
    help="Serve LLMs with P-EAGLE speculative decoding on Ray Serve and vLLM, and train the drafters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[Path, typer.Argument(help="Ray Serve config file of the service")]
ServiceUrl = Annotated[str, typer.Argument(help="of the service")]
ApiKey = Annotated[str | None, typer.Option(envvar="PEAGLE_API_KEY", help="of a caller of the service")]
RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="YAML file, such as configs/train/smollm2-135m.yaml")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="recipe's settings")]


def clock() -> Callable[[str], None]:
    """A function that prints a message behind the seconds since now."""
    start = time.monotonic()
    return lambda message: typer.echo(f"[{time.monotonic() - start:5.1f} s] {message}")


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("httpx", "httpx2"):  # each logs every request; OpenAI's client uses the second
        logging.getLogger(name).setLevel(logging.WARNING)


def say_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import packages_distributions, version

        from peagle import __version__

        found = packages_distributions()
        names = {"vLLM": found["vllm"][0], "Ray": found["ray"][0]}
        others = [f"{name} {version(package)}" for name, package in names.items()]
        typer.echo(", ".join([f"peagle {__version__}", *others]))
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="show where an error comes from")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=say_version, is_eager=True, help="print the versions and end")
    ] = False,
) -> None:
    """Options of every subcommand; `main` reads them."""


# ---- the service


@app.command()
def serve(
    config: Config = Path("configs/local.yaml"),
    detach: Annotated[bool, typer.Option("--detach", help="return when ready; Ray and the service go on")] = False,
    timeout: Annotated[float, typer.Option(help="seconds to wait until ready")] = 900.0,
) -> None:
    """Start the service of CONFIG on this machine, print how to talk to it, and stop it at Ctrl-C."""
    from deployments.up import up

    up(config, detach=detach, timeout_s=timeout, say=clock())


@app.command()
def check(config: Config) -> None:
    """Check CONFIG without starting anything (keys, vLLM's arguments, heads), and print what it asks for."""
    from deployments.serve_config import describe, read_config

    typer.echo(describe(*read_config(config, is_here=False)))


@app.command()
def manifest(
    config: Config,
    output: Annotated[Path | None, typer.Option(help="file to write instead of standard output")] = None,
) -> None:
    """Write the KubeRay RayService of CONFIG, with its NetworkPolicy and PodDisruptionBudgets."""
    from deployments.manifest import render

    text = render(config)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")


@app.command()
def view(
    url: ServiceUrl = "http://127.0.0.1:8000",
    watch: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="between two drawings; default: 1 on a terminal")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print it and end, as without a terminal")] = False,
    api_key: ApiKey = None,
) -> None:
    """Show workloads, their acceptance, the chosen K, drafters and autoscaling of a running service."""
    from deployments.view import show

    show(url, api_key, None if once else watch or (1.0 if sys.stdout.isatty() else None))


@app.command()
def heads(
    url: ServiceUrl = "http://127.0.0.1:8000",
    propose: Annotated[Path | None, typer.Option(help="directory of a head to try")] = None,
    application: Annotated[str, typer.Option("--app", help="Serve's name of the service, for changes")] = APP_NAME,
    back: Annotated[bool, typer.Option("--back", help="end the trial, else roll back the last change")] = False,
    api_key: ApiKey = None,
) -> None:
    """List trials and changes of heads of a running service, newest first.

    Changes go through the Ray cluster of this machine, or the one that RAY_ADDRESS names.
    """
    from deployments.view import change_line, fetch

    if propose is not None or back:
        from deployments.client import change_heads

        change = change_heads(propose, application)
        typer.echo(f"{change.name}: {change.state}, {change.reason}")
        return
    changes = fetch(url, api_key)["head_changes"]
    typer.echo("\n".join(map(change_line, changes)) or "no trial and no change of heads")


@app.command()
def chat(
    question: Annotated[str | None, typer.Argument(help="ask this and end; default: a conversation")] = None,
    url: Annotated[str, typer.Option(help="of the service")] = "http://127.0.0.1:8000",
    max_tokens: Annotated[int, typer.Option(help="of an answer")] = 512,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token")] = 0.0,
    k: Annotated[int | None, typer.Option("-k", help="drafts verified per step; default: the service decides")] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a running service; accepted draft tokens are shown in green. `/help` lists what can be typed."""
    from deployments.chat import Conversation, converse

    conversation = Conversation(url, api_key, k=k, max_tokens=max_tokens, temperature=temperature)
    if question:
        conversation.ask(question)
    elif sys.stdin.isatty():
        converse(conversation)
    else:
        with contextlib.suppress(EOFError):
            for line in sys.stdin:
                conversation.obey(line.strip())


@app.command()
def batch(
    requests: Annotated[Path, typer.Argument(help="JSONL file in the format of OpenAI's batches")],
    out: Annotated[
        Path | None, typer.Option(help="file of answers, which are not asked again; default: standard output")
    ] = None,
    url: Annotated[str, typer.Option(help="of any service with OpenAI's API")] = "http://127.0.0.1:8000",
    max_running: Annotated[int, typer.Option(min=1, help="requests at a time")] = 32,
    api_key: ApiKey = None,
) -> None:
    """Answer a file of requests by a running service. The same command goes on where an earlier run stopped."""
    from deployments.batch import answer_file

    num, num_before, refusals = asyncio.run(answer_file(requests, out, url, api_key, max_running=max_running))
    typer.echo(f"{num} answered, {num_before} had answers, {len(refusals)} refused", err=True)
    if refusals:
        where = f"see {out or 'the output'}; the first: {refusals[0]}"
        raise ValueError(f"{requests}: {len(refusals)} lines were refused, {where}")


# ---- targets and heads


@app.command()
def prepare(
    target: Annotated[str | None, typer.Option(help="embedded target; default: smollm2-135m-instruct")] = None,
    head: Annotated[str | None, typer.Option(help="shipped head or directory; default: that of the target")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="default: $PEAGLE_CACHE or ~/.cache/peagle")] = None,
) -> None:
    """Make the embedded target and its head ready to serve, and print their paths (a second with a filled cache)."""
    from peagle.embedded import DEFAULT_TARGET, prepare_target
    from peagle.heads import prepare_head

    say, target = clock(), target or DEFAULT_TARGET
    target_dir = prepare_target(target, cache_dir, report=say)
    say(f"target ready: {target_dir}")
    say(f"head ready:   {prepare_head(head or target, target_dir, cache_dir, report=say)}")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="directory with config.json and safetensors")],
    out: Annotated[Path, typer.Argument(help="directory of the head")],
    target: Annotated[
        str | None, typer.Option(help="target whose tables the head lacks, or is to lack: as for `peagle evaluate`")
    ] = None,
    without_tables: Annotated[bool, typer.Option("--without-tables", help="a small head, which vLLM refuses")] = False,
) -> None:
    """Convert a head (of speculators, NeMo AutoModel, or without tables) to the form that stock vLLM loads."""
    from peagle.heads import convert as convert_head
    from peagle.train.recipe import target_checkpoint

    target_dir = None if target is None else target_checkpoint(target)
    config, num_tensors, left_out = convert_head(source, out, target_dir, has_tables=not without_tables)
    method = f"P-EAGLE, mask token {config.ptd_token_id}" if config.is_parallel else "EAGLE-3"
    typer.echo(
        f"{out}: {method}, layers {config.num_hidden_layers}, auxiliary layers {json.dumps(config.aux_layer_ids)}"
    )
    typer.echo(f"tensors written: {num_tensors}; left to the target: {', '.join(left_out) or 'none'}")


@app.command()
def publish(
    head: Annotated[Path, typer.Argument(help="directory that `peagle train` wrote")],
    repo: Annotated[str, typer.Option(metavar="ORG/NAME", help="Hugging Face repository, made where it is not")],
    base_model: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="the target's id; default: the recipe's target")
    ] = None,
    license_id: Annotated[str, typer.Option("--license", help="by Hugging Face's name")] = "apache-2.0",
    note: Annotated[str, typer.Option(help="a sentence for the card")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="write the card, upload nothing")] = False,
) -> None:
    """Write a model card into HEAD and upload the head with it, in the form that stock vLLM loads."""
    from peagle.train.publish import publish as publish_head

    files = publish_head(head, repo, base_model=base_model, license_id=license_id, note=note, dry_run=dry_run)
    done = "the card is written; to upload" if dry_run else f"uploaded to https://huggingface.co/{repo}"
    typer.echo(f"{done}: {', '.join(files)}")


# ---- training


@app.command()
def generate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    prompts: Annotated[str | None, typer.Option(help="answer these: file or Hugging Face data set")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the answers to --prompts")] = None,
    url: Annotated[
        str | None, typer.Option(help="service that serves the target, with OpenAI's API; default: an engine here")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="longest answer to --prompts, in tokens")] = 512,
    temperature: Annotated[float, typer.Option(help="of the answers to --prompts; 0: greedy")] = 0.0,
    max_running: Annotated[int, typer.Option(min=1, help="requests at a time, with --url")] = 32,
    api_key: Annotated[str | None, typer.Option(envvar="PEAGLE_API_KEY", help="of the service")] = None,
) -> None:
    """Let the target write training conversations, or answers to given prompts, to train or evaluate on.

    With --url the same command goes on where an earlier run stopped.
    """
    if (prompts is None) != (out is None) or (url is not None and prompts is None):
        raise ValueError("--prompts needs --out, and --out and --url need --prompts")
    from peagle.train.recipe import Recipe

    loaded = Recipe.load(recipe, overrides)
    log_to_stderr()
    if prompts is not None and out is not None and url is not None:
        from deployments.regenerate import regenerate

        answers = regenerate(
            loaded, prompts, out, url, api_key, max_tokens=max_tokens, temperature=temperature, max_running=max_running
        )
        typer.echo(json.dumps(asyncio.run(answers)))
        return
    from peagle.vllm.generate import answer_prompts, run_all

    # As an interrupt from the keyboard: `finally` ends the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if prompts is not None and out is not None:
        made = answer_prompts(loaded, prompts, out, max_tokens, temperature)
    else:
        made = run_all(loaded)
    typer.echo(json.dumps(made))


@app.command()
def tokenize(
    recipe: RecipeFile,
    source: Annotated[str, typer.Argument(help="file, folder or Hugging Face data set of conversations")],
    out: Annotated[Path, typer.Option(help="folder of the data set")],
    overrides: Overrides = None,
) -> None:
    """Turn conversations into training data of the recipe's target, or into answers to evaluate on."""
    from peagle.train.prompts import tokenize_source
    from peagle.train.recipe import Recipe

    log_to_stderr()
    typer.echo(json.dumps(tokenize_source(Recipe.load(recipe, overrides).target_dir(), source, out)))


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    num_workers: Annotated[
        int | None, typer.Option(min=1, help="through Ray Train, a GPU (or CPU) each; default: in this process")
    ] = None,
) -> None:
    """Train a head by a recipe; goes on where an earlier run into the same output folder stopped."""
    from peagle.train.recipe import Recipe

    log_to_stderr()
    loaded = Recipe.load(recipe, overrides)  # a wrong recipe is refused before torch loads
    if loaded.conversations is not None:
        from peagle.train.prompts import make_data

        make_data(loaded)
    if num_workers is None:
        from peagle.train.trainer import train_head

        head = train_head(loaded)
    else:
        from deployments.train import train as train_together

        head = train_together(recipe, overrides or [], num_workers)
    typer.echo(f"head written to {head}")


@app.command()
def evaluate(
    head: Annotated[Path, typer.Argument(help="directory of the head, or name of one that ships")],
    answers: Annotated[list[Path], typer.Argument(help="folders of answers, each of one temperature")],
    target: Annotated[str, typer.Option(help="embedded target's name, directory or Hugging Face id")],
    against: Annotated[Path | None, typer.Option(metavar="HEAD2", help="for the ratio of AL: HEAD / HEAD2")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="default: what the heads were trained for")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for evaluation.json")] = None,
) -> None:
    """Measure the acceptance of a head on answers of its target, for every K."""
    from peagle.train.evaluate import evaluate_heads
    from peagle.train.recipe import target_checkpoint

    target_dir = str(target_checkpoint(target))
    for part in evaluate_heads(head, answers, target_dir, against=against, num_draft_tokens=num_draft_tokens, out=out):
        typer.echo(part)


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script. Exit status: 0; 1 with the reason on standard error; 2 for a line that cannot be read."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        app(arguments, prog_name="peagle")
    except SystemExit as end:
        return int(end.code or 0)
    except Exception as error:
        if "--traceback" in arguments:
            raise
        if isinstance(error, ValueError | OSError):
            typer.echo(f"error: {error}", err=True)
        else:
            typer.echo(f"error: unexpected {error!r:.1000}; `peagle --traceback ...` shows where", err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
