"""Names of vLLM's settings, read from its source: importing vLLM takes ten seconds."""

import ast
import functools
import importlib.util
from pathlib import Path

ENGINE_ARGUMENTS = ("engine/arg_utils:AsyncEngineArgs", "entrypoints/launchers/cli_args:FrontendArgs")
SPECULATIVE_CONFIG = ("config/speculative:SpeculativeConfig",)


@functools.cache
def setting_names(*records: str) -> frozenset[str]:
    """The fields of these dataclasses, each as "path/of/file:Class", and of their bases in the same file. Empty if vLLM
    is not installed, or keeps one elsewhere."""
    names: set[str] = set()
    spec = importlib.util.find_spec("vllm")
    for record in records:
        file, _, name = record.partition(":")
        path = Path(*(spec.submodule_search_locations or ()) if spec else (), f"{file}.py")
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
        classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        if name not in classes:
            return frozenset()
        wanted = [name]
        for each in wanted:
            wanted += [base.id for base in classes[each].bases if isinstance(base, ast.Name) and base.id in classes]
            names |= {
                line.target.id
                for line in classes[each].body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
    return frozenset(names)
