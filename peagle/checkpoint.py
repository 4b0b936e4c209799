"""Heads on disk, in vLLM's own format: check, load, save, and the drafter that a head makes.

All is checked, so that a plain head which loads here also loads in stock vLLM with nothing missing. (vLLM itself does
not name a missing tensor: the parameter keeps whatever memory it was given.) Checks read the headers of the safetensors
files and import no torch.

Three forms are read. The *plain* form is vLLM's own, and what training writes. The *shipped* form leaves out what the
target has, so that a repository can hold it: instead of `embed_tokens.weight` it has `mask_embedding` [H], the one row
of the target's table that differs, and with a reduced draft vocabulary no `lm_head.weight`, whose rows are the target's
at `d2t`. Its `config.json` names an architecture that vLLM refuses. The third is that of other trainers: the
speculators package's `config.json`, or other names. `convert` writes each as a plain head, and `peagle.heads` does so
by itself where a head is served.

Values that a shape cannot tell are checked too: `d2t` [V_draft] holds *offsets* (target token = i + d2t[i]), `t2d` [V]
marks the target tokens that the draft vocabulary has.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.config import (
    MASK_TOKEN_KEYS,
    SHIPPED_PREFIX,
    DrafterConfig,
    HeadError,
    check_head_fits,
    is_read_alike_by_vllm,
    read_head_config,
    read_json,
)
from peagle.store import write_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from peagle.model import Drafter

FLOAT_DTYPES = ("F32", "F16", "BF16")
#: Tensors of the target that some trainers save with the drafter's; they play a part in training alone.
TARGET_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")
#: safetensors' names of torch's types.
_DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "bool": "BOOL",
    "uint8": "U8",
}  # fmt: skip


# ---- checks without torch


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Type (safetensors' name, such as "BF16") and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def canonical_name(name: str) -> str:
    """vLLM's name of a tensor: some call the first layer `midlayer`, and NeMo AutoModel puts `model.` before names."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def weight_files(head_dir: str | Path) -> list[Path]:
    """The head's safetensors files, sorted. Raises HeadError when there is none."""
    files = sorted(path for path in Path(head_dir).glob("*.safetensors") if path.is_file())
    if not files:
        if not Path(head_dir).is_dir():
            raise HeadError(f"there is no directory {head_dir}")
        found = sorted(path.name for path in Path(head_dir).iterdir())
        raise HeadError(
            f"{Path(head_dir) / 'model.safetensors'} does not exist (the directory holds: {found or 'nothing'})"
        )
    return files


def read_tensor_specs(head_dir: str | Path) -> dict[str, TensorSpec]:
    """Type and shape of every tensor in a head directory, by canonical name, from the files' headers.

    Raises HeadError for no safetensors file, one that is cut short or damaged, and a tensor stored twice.
    """
    from safetensors import SafetensorError, safe_open

    specs: dict[str, TensorSpec] = {}
    for path in weight_files(head_dir):
        try:
            with safe_open(path, framework="np") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except SafetensorError as error:
            raise HeadError(f"{path} ({path.stat().st_size} bytes) is cut short or damaged: {error}") from error
        for stored, one in slices.items():
            if (name := canonical_name(stored)) in specs:
                raise HeadError(f"{path}: {name} is stored twice in {head_dir}")
            specs[name] = TensorSpec(one.get_dtype(), tuple(one.get_shape()))
    return specs


@dataclasses.dataclass(frozen=True)
class Expected:
    """A tensor that a head may or must hold. `one_row` accepts leading dimensions of 1 (mask_hidden)."""

    shape: tuple[int, ...]
    required: bool = True
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    one_row: bool = False

    def fits(self, spec: TensorSpec) -> bool:
        shape = tuple(size for size in spec.shape if size != 1) if self.one_row else spec.shape
        return spec.dtype in self.dtypes and shape == self.shape

    def __str__(self) -> str:
        return f"{'/'.join(self.dtypes)} {list(self.shape)}"


def expected_tensors(config: DrafterConfig) -> dict[str, Expected]:
    """Every tensor that a head of this configuration may hold, by its name in the checkpoint."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, key_value = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    expected = {"fc.weight": Expected((hidden, config.fc_input_size)), "norm.weight": Expected((hidden,))}
    if config.norm_before_fc:
        expected["input_norm.weight"] = Expected((config.fc_input_size,))
    if config.fc_norm:
        for index in range(len(config.aux_layer_ids)):
            expected[f"fc_norm.{index}.weight"] = Expected((config.target_hidden_size,))
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        inputs = 2 * hidden if index == 0 else hidden
        expected[f"{layer}.input_layernorm.weight"] = Expected((hidden,))
        # vLLM gives a hidden_norm to every layer and uses the first one's only.
        expected[f"{layer}.hidden_norm.weight"] = Expected((hidden,), required=index == 0)
        expected[f"{layer}.post_attention_layernorm.weight"] = Expected((hidden,))
        projections = {"q": (query, inputs), "k": (key_value, inputs), "v": (key_value, inputs), "o": (hidden, query)}
        for name, shape in projections.items():
            expected[f"{layer}.self_attn.{name}_proj.weight"] = Expected(shape)
            if config.attention_bias and not (name == "o" and config.qk_norm):
                expected[f"{layer}.self_attn.{name}_proj.bias"] = Expected(shape[:1])
        if config.qk_norm:
            expected[f"{layer}.self_attn.q_norm.weight"] = Expected((config.head_dim,))
            expected[f"{layer}.self_attn.k_norm.weight"] = Expected((config.head_dim,))
        expected[f"{layer}.mlp.gate_proj.weight"] = Expected((mlp, hidden))
        expected[f"{layer}.mlp.up_proj.weight"] = Expected((mlp, hidden))
        expected[f"{layer}.mlp.down_proj.weight"] = Expected((hidden, mlp))
    if config.is_parallel:
        expected["mask_hidden"] = Expected((config.fc_input_size,), one_row=True)
        expected["mask_embedding"] = Expected((hidden,), required=False)
    reduced = config.draft_vocab_size < config.vocab_size
    expected["embed_tokens.weight"] = Expected((config.vocab_size, hidden), required=False)
    expected["lm_head.weight"] = Expected((config.draft_vocab_size, hidden), required=False)
    expected["d2t"] = Expected((config.draft_vocab_size,), required=reduced, dtypes=("I64", "I32"))
    expected["t2d"] = Expected((config.vocab_size,), required=False, dtypes=("BOOL", "U8"))
    return expected


def is_plain(head_dir: str | Path, config: DrafterConfig) -> bool:
    """Whether stock vLLM loads the head in `head_dir` as it is.

    vLLM shares the target's output matrix with a head that has none, which fits the whole vocabulary only, puts
    `model.` before the names of most tensors itself, and refuses a table of token ids beside the whole vocabulary.
    """
    from safetensors import safe_open

    names = set[str]()
    for path in weight_files(head_dir):
        with safe_open(path, framework="np") as file:
            names |= set(file.keys())
    has_others = names & {*TARGET_TENSORS, *(["d2t"] if config.draft_vocab_size == config.vocab_size else [])}
    return (
        not tables_left_out(config, names)
        and not has_others
        and not any(name.startswith("model.") for name in names)
        and is_read_alike_by_vllm(read_json(Path(head_dir) / "config.json"))
    )


def tables_left_out(config: DrafterConfig, names: Collection[str]) -> list[str]:
    """The target's tables that vLLM needs of a head, and that one with these tensors, in the shipped form, lacks."""
    left_out = ["embed_tokens.weight"] if "mask_embedding" in names else []
    is_reduced = config.draft_vocab_size < config.vocab_size
    return left_out + (["lm_head.weight"] if is_reduced and "lm_head.weight" not in names else [])


def check_tensors(config: DrafterConfig, specs: dict[str, TensorSpec], source: str | Path) -> None:
    """Raises HeadError, in one line, for missing, spare, wrong-shaped or wrong-typed tensors, of which it names three.

    specs: by canonical name. source: the head's file or directory.
    """
    expected = expected_tensors(config)
    specs = {name: spec for name, spec in specs.items() if name not in TARGET_TENSORS}
    missing = [name for name, want in expected.items() if want.required and name not in specs]
    problems = [f"missing {name}: expected {expected[name]}" for name in missing]
    wrong = [name for name in specs if name in expected and not expected[name].fits(specs[name])]
    problems += [f"wrong {name}: found {specs[name]}, expected {expected[name]}" for name in wrong]
    spare = [name for name in specs if name not in expected]
    problems += [f"spare {name}: found {specs[name]}, not part of this head" for name in spare]
    if "mask_hidden" in specs and "mask_hidden" not in expected:
        problems.append(f"config.json names no mask token ({', '.join(MASK_TOKEN_KEYS)})")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise HeadError(f"head {source} does not match its config.json: {'; '.join(problems[:3])}{more}")


def check_head(head_dir: str | Path, target: dict[str, Any] | None = None) -> DrafterConfig:
    """Check a head directory without loading it, and against a target's `config.json` when one is given.

    Raises HeadError for a missing or damaged file, missing, spare or wrong tensors, or a head for another target.
    """
    config = read_head_config(head_dir)
    if target is not None:
        check_head_fits(config, target)
    specs = read_tensor_specs(head_dir)
    files = weight_files(head_dir)
    check_tensors(config, specs, files[0] if len(files) == 1 else head_dir)
    shared = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in specs]
    if shared == ["lm_head.weight"] and read_json(Path(head_dir) / "config.json").get("tie_word_embeddings"):
        raise HeadError(
            f"head {head_dir} ties its output matrix to its own embed_tokens.weight (tie_word_embeddings), but vLLM "
            "drafts with the target's: store lm_head.weight in it, or write false if the target's is meant"
        )
    if shared and config.hidden_size != config.target_hidden_size:
        raise HeadError(
            f"head {head_dir} has no {' and no '.join(shared)}, so it must share the target's, but its hidden_size = "
            f"{config.hidden_size} is not the target's {config.target_hidden_size}"
        )
    return config


# ---- tensors


def load_head(head_dir: str | Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Load a head, in any form, onto the CPU and in its stored types.

    Returns its tensors by the names of `expected_tensors`; `mask_hidden` is [1, 1, C * S] whatever its stored shape.
    Raises HeadError as `check_head`, and for tables `d2t`/`t2d` that contradict each other or the vocabulary.
    """
    from safetensors.torch import load_file

    config = check_head(head_dir)
    tensors: dict[str, Tensor] = {}
    for path in weight_files(head_dir):
        tensors |= {canonical_name(name): tensor for name, tensor in load_file(path).items()}
    for name in TARGET_TENSORS:
        tensors.pop(name, None)
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    check_tables(config, tensors, head_dir)
    return config, tensors


def save_head(head_dir: str | Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> Path:
    """Write a head directory: `config.json` and `model.safetensors`, each complete or not at all. Returns it.

    tensors: by checkpoint name, in the types to be stored; on any device. Without the tables that vLLM needs, the head
    is of the shipped form. Raises HeadError as `load_head`, and where other weights lie in the directory, before
    anything is written, and OSError when the disk is full or not writable; what was there before is still whole.
    """
    from safetensors.torch import save

    head_dir = Path(head_dir)
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    specs = {name: TensorSpec(_DTYPES.get(dtypes[name], dtypes[name]), tuple(t.shape)) for name, t in tensors.items()}
    check_tensors(config, specs, head_dir)
    check_tables(config, tensors, head_dir)
    if others := sorted(path.name for path in head_dir.glob("*.safetensors*") if path.name != "model.safetensors"):
        raise HeadError(f"{head_dir} holds other weights ({others[0]}), which would be read too: name another folder")
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    raw = config.to_dict()
    if tables_left_out(config, tensors):
        raw["architectures"] = [SHIPPED_PREFIX + name for name in raw["architectures"]]
    head_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=head_dir, prefix=".writing-") as scratch:
        weights, settings = Path(scratch) / "model.safetensors", Path(scratch) / "config.json"
        write_bytes(weights, save(stored, metadata={"format": "pt"}))
        write_bytes(settings, (json.dumps(raw, indent=2) + "\n").encode())
        weights.replace(head_dir / weights.name)
        settings.replace(head_dir / settings.name)
    return head_dir


def with_tables(config: DrafterConfig, tensors: dict[str, Tensor], tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a head's plain form, from those of any form: the mask token's embedding becomes a row of the
    table, and a reduced draft vocabulary gets its output rows. tables: the target's [V, H], by the names that they have
    in a head, as far as the head lacks them.
    """
    tensors = dict(tensors)
    if (mask_H := tensors.pop("mask_embedding", None)) is not None:
        # The row takes the table's type: vLLM casts the whole table anyway, and one type keeps the file plain.
        table_VH = {**tables, **tensors}["embed_tokens.weight"].clone()
        table_VH[config.ptd_token_id] = mask_H.to(table_VH)
        tensors["embed_tokens.weight"] = table_VH
    if config.draft_vocab_size == config.vocab_size:  # vLLM refuses tables of token ids beside the whole vocabulary
        return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if "lm_head.weight" not in tensors:
        lm_head_VH = tables["lm_head.weight"]
        tensors["lm_head.weight"] = lm_head_VH[target_ids(tensors["d2t"]).to(lm_head_VH.device)]
    return tensors


def without_tables(config: DrafterConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the shipped form of a plain head whose tables are the target's, but for the mask token's row."""
    left = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    if config.ptd_token_id is not None and "embed_tokens.weight" in tensors:
        left["mask_embedding"] = tensors["embed_tokens.weight"][config.ptd_token_id].clone()
    return left


def save_drafter(
    head_dir: str | Path, drafter: Drafter, values: dict[str, Tensor] | None = None, dtype: torch.dtype | None = None
) -> Path:
    """Write a drafter as a plain head: what it owns, and the target's tables as far as vLLM does not share them.

    values: its parameters, by the names of `Drafter.trainable`, when they are not the live ones (a moving average).
    dtype: stored type of all, by default bfloat16. Returns the directory; raises as `save_head`.
    """
    import torch

    def stored(value: Tensor) -> Tensor:
        return value.detach().to(dtype or torch.bfloat16)

    config = drafter.config
    owned: dict[str, Tensor] = dict(drafter.trainable()) if values is None else values
    tensors = {name: stored(value) for name, value in owned.items()}
    if config.draft_vocab_size < config.vocab_size:
        tensors["lm_head.weight"] = stored(drafter.lm_head.weight)
        tensors |= {"d2t": offsets(drafter.target_ids), "t2d": marks(drafter.target_ids, config.vocab_size)}
    tables = {"embed_tokens.weight": stored(drafter.embed_tokens.weight)}
    return save_head(head_dir, config, with_tables(config, tensors, tables))


def build_drafter(
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    *,
    embed_VH: Tensor | None = None,
    lm_head_VH: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Drafter:
    """A `Drafter` in evaluation mode with a head's weights, from any form.

    embed_VH: the target's embedding table [V, H]. lm_head_VH: its output matrix [V, H], of which a reduced draft
    vocabulary takes its rows. Tables of the head's own win. All are frozen. dtype: by default float32.

    Raises HeadError when a table is neither in the head nor given, or the given one has another shape.
    """
    import torch

    from peagle.model import Drafter

    dtype = dtype or torch.float32
    own_lm_head = "lm_head.weight" in tensors
    num_rows = config.draft_vocab_size if own_lm_head else config.vocab_size

    def table(name: str, argument: str, given: Tensor | None, num_rows: int) -> Tensor:
        found, shape = tensors.get(name, given), (num_rows, config.hidden_size)
        if found is None:
            raise HeadError(f"the head has no {name}: pass the target's as {argument} {list(shape)}")
        if found.shape != shape:
            raise HeadError(f"{argument} has shape {list(found.shape)}, the head needs {list(shape)}")
        return found

    embed_VH = table("embed_tokens.weight", "embed_VH", embed_VH, config.vocab_size)
    lm_head_VH = table("lm_head.weight", "lm_head_VH", lm_head_VH, num_rows)
    drafter = Drafter(config)
    own = {name: tensor for name, tensor in tensors.items() if name in drafter.trainable()}
    if config.ptd_token_id is not None and "mask_embedding" not in own:
        own["mask_embedding"] = embed_VH[config.ptd_token_id]
    drafter.load_state_dict(own)
    if "d2t" in tensors:
        drafter.target_ids = target_ids(tensors["d2t"])
        lm_head_VH = lm_head_VH if own_lm_head else lm_head_VH[drafter.target_ids.to(lm_head_VH.device)]
    drafter = drafter.to(device=device, dtype=dtype).eval()
    drafter.share_target(embed_VH.to(device=device, dtype=dtype), lm_head_VH.to(device=device, dtype=dtype))
    return drafter


def offsets(target_ids_V: Tensor) -> Tensor:
    """target_ids_V [V_draft], the target's id of each draft token -> d2t [V_draft] int64, as vLLM adds it: id - i."""
    import torch

    return target_ids_V.long() - torch.arange(len(target_ids_V), device=target_ids_V.device)


def target_ids(d2t: Tensor) -> Tensor:
    """d2t [V_draft], offsets -> [V_draft] int64, the target's token id of each draft token."""
    import torch

    return torch.arange(len(d2t), device=d2t.device) + d2t.long()


def marks(target_ids_V: Tensor, vocab_size: int) -> Tensor:
    """t2d [vocab_size] bool: the target's tokens that the draft vocabulary has."""
    import torch

    marked = torch.zeros(vocab_size, dtype=torch.bool, device=target_ids_V.device)
    return marked.index_fill(0, target_ids_V.long(), True)


def check_tables(config: DrafterConfig, tensors: dict[str, Tensor], source: str | Path) -> None:
    """Raise HeadError when `d2t` or `t2d` contradict each other, point outside the target's vocabulary, or order the
    whole of it anew."""
    import torch

    if not {"d2t", "t2d"} & tensors.keys():
        return  # and no tensor's header vouches for the vocabulary's size
    ids = target_ids(tensors["d2t"].cpu()) if "d2t" in tensors else torch.arange(config.draft_vocab_size)
    outside = ((ids < 0) | (ids >= config.vocab_size)).nonzero()[:, 0]
    problem = ""
    if len(outside):
        first = int(outside[0])
        problem = (
            f"d2t[{first}] = {int(tensors['d2t'][first])} leads to target token {int(ids[first])}, outside "
            f"0..{config.vocab_size - 1} ({len(outside)} such entries; d2t holds offsets: target = i + d2t[i])"
        )
    elif (num_different := len(ids.unique())) < len(ids):
        problem = f"d2t leads {len(ids)} draft tokens to only {num_different} different target tokens"
    elif config.draft_vocab_size == config.vocab_size and not torch.equal(ids, torch.arange(len(ids))):
        problem = "d2t orders the whole vocabulary anew, which vLLM refuses: sort lm_head.weight by token, without d2t"
    elif "t2d" in tensors and not torch.equal(tensors["t2d"].cpu().bool(), marks(ids, config.vocab_size)):
        problem = f"t2d does not mark the {len(ids)} target tokens that d2t leads to, and no others"
    if problem:
        raise HeadError(f"head {source}: {problem}")
