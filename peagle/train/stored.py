"""The target's hidden states of packed batches, kept on disk: for a target that is too slow to run in every step.

    peagle store RECIPE [section.key=value ...] [--max-batches N]

The folder `stored_states` of the recipe gets one `batch-*.safetensors` for each batch, with its tokens, documents,
positions, answers and states in the dtype that the target runs in, and `states.json`, which says what they are of. A
run that is cut short goes on with the batches that are missing.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from peagle.config import default_aux_layer_ids, read_target_config
from peagle.provenance import conditions
from peagle.store import NO_SPACE, write_bytes
from peagle.train.data import Batch, Conversations, PackedBatches, check_data_fits, target_hash
from peagle.train.recipe import Recipe
from peagle.train.target import Target

logger = logging.getLogger(__name__)

MANIFEST = "states.json"
_INTEGERS = ("tokens_BN", "document_BN", "position_BN")


@dataclasses.dataclass(frozen=True)
class StoredBatch(Batch):
    """A batch with what the target says about it, as `peagle.train.passes.States` has it."""

    aux_BNX: Tensor
    last_BNS: Tensor


def states_of(batch: Batch, target: Target, aux_layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """aux [B, N, C * S] and last [B, N, S] of a batch, as `Target.states`: as stored with it, else computed."""
    if isinstance(batch, StoredBatch):
        return batch.aux_BNX, batch.last_BNS
    return target.states(batch.tokens_BN, batch.document_BN, batch.position_BN, aux_layer_ids)


def new_batches(recipe: Recipe, dtype: torch.dtype) -> PackedBatches:
    """The training batches that a recipe asks for, checked against its target; with states where they are stored.

    dtype: that the target runs in. Raises ValueError when data or stored states are not of this target and recipe.
    """
    data = Conversations.load(recipe.data)
    stored = recipe.states == "stored"
    batches = StoredBatches(recipe, data, dtype) if stored else PackedBatches(data, **packing(recipe))
    check_data_fits(recipe.data, recipe.target_dir(), batches)
    return batches


def packing(recipe: Recipe) -> dict[str, Any]:
    """Arguments of `PackedBatches`."""
    return {"seed": recipe.seed, **recipe.batch.model_dump(include={"num_sequences", "max_tokens", "long"})}


def describe(recipe: Recipe, data: Conversations, dtype: torch.dtype) -> dict[str, Any]:
    """What stored states depend on, as `states.json` has it."""
    target_dir = recipe.target_dir()
    layers = recipe.drafter.aux_layer_ids or default_aux_layer_ids(read_target_config(target_dir)["num_hidden_layers"])
    return {
        "target": target_hash(target_dir),
        "data": data.digest(),
        "aux_layer_ids": list(layers),
        "dtype": str(dtype).removeprefix("torch."),
        **packing(recipe),
    }


def batch_bytes(recipe: Recipe, description: dict[str, Any]) -> int:
    """Bytes that one stored batch takes, headers left out."""
    hidden_size = read_target_config(recipe.target_dir())["hidden_size"]
    states = (len(description["aux_layer_ids"]) + 1) * hidden_size * getattr(torch, description["dtype"]).itemsize
    return recipe.batch.num_sequences * recipe.batch.max_tokens * (states + 4 * len(_INTEGERS) + 1)


def folder_of(recipe: Recipe) -> Path:
    if not recipe.stored_states:
        raise ValueError("stored_states: names no folder")
    return Path(recipe.stored_states)


def read_description(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """`states.json`. Raises ValueError naming every entry that is not as wanted, or that there is none."""
    path = folder / MANIFEST
    if not path.exists():
        raise ValueError(f"stored_states: no {MANIFEST} in {folder}; write the states with `peagle store`")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if wrong := [f"{key} = {found.get(key)}, not {value}" for key, value in wanted.items() if found.get(key) != value]:
        raise ValueError(f"stored_states: {path} is of other states than the recipe asks for: {'; '.join(wrong)}")
    return found


def batch_path(folder: Path, number: int) -> Path:
    return folder / f"batch-{number:06d}.safetensors"


def write_states(recipe: Recipe, *, max_batches: int | None = None, device: str | None = None) -> Path:
    """Writes the batches of one epoch that are missing; returns the folder. Prints the room they take.

    max_batches: the first so many only. device: overrides the recipe's.

    Raises ValueError for a folder of other states, OSError (ENOSPC) before anything is written when the disk has no
    room for them, and when it fills up; what is written then stays and counts.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu") if recipe.device == "auto" else recipe.device
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    folder, data = folder_of(recipe), Conversations.load(recipe.data)
    batches, description = PackedBatches(data, **packing(recipe)), describe(recipe, data, dtype)
    check_data_fits(recipe.data, recipe.target_dir(), batches)
    num_batches = min(batches.num_batches(), max_batches or batches.num_batches())
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        read_description(folder, description)
    missing = [number for number in range(num_batches) if not batch_path(folder, number).exists()]
    num_bytes, free = len(missing) * batch_bytes(recipe, description), shutil.disk_usage(folder).free
    room = f"{len(missing)} of {num_batches} batches to write into {folder}: {num_bytes:,} bytes, {free:,} are free"
    logger.info(room)
    if num_bytes > free:
        raise OSError(errno.ENOSPC, f"stored_states: no room: {room}. Use another disk, or fewer with --max-batches")
    manifest = description | {"num_batches": num_batches, "made": conditions()}
    partial = folder / f".{MANIFEST}.partial"
    write_bytes(partial, (json.dumps(manifest, indent=2) + "\n").encode())
    partial.replace(folder / MANIFEST)
    target = Target(recipe.target_dir(), device=device, dtype=dtype, compiled=recipe.compile and device != "cpu")
    layers = tuple(description["aux_layer_ids"])
    wanted = set(missing)
    for number, batch in tqdm(enumerate(itertools.islice(batches(), num_batches)), total=num_batches, mininterval=5):
        if number in wanted:
            aux_BNX, last_BNS = states_of(batch.to(device), target, layers)
            _write(batch_path(folder, number), batch, aux_BNX, last_BNS)
    return folder


def _write(path: Path, batch: Batch, aux_BNX: Tensor, last_BNS: Tensor) -> None:
    """One batch, whole or not at all."""
    tensors = {name: getattr(batch, name).to(torch.int32) for name in _INTEGERS}
    tensors |= {"answer_BN": batch.answer_BN, "aux_BNX": aux_BNX.cpu(), "last_BNS": last_BNS.cpu()}
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_bytes(partial, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno not in NO_SPACE:
            raise
        raise OSError(
            error.errno,
            f"stored_states: the disk of {path.parent} is full at {path.name}: make room and start again, which goes "
            "on from here",
        ) from error
    partial.replace(path)


class StoredBatches(PackedBatches):
    """Endless batches as stored: the first time in the order of `PackedBatches`, then reshuffled, whole batches.

    The packing stays what it was, so a document always meets the same neighbours.
    """

    def __init__(self, recipe: Recipe, data: Conversations, dtype: torch.dtype) -> None:
        """Raises ValueError when the folder's states are of another target, data, packing, layers or dtype, or when
        batches are missing.
        """
        super().__init__(data, **packing(recipe))
        self.folder = folder_of(recipe)
        self._num_stored = read_description(self.folder, describe(recipe, data, dtype))["num_batches"]
        missing = [n for n in range(self._num_stored) if not batch_path(self.folder, n).exists()]
        if missing:
            raise ValueError(
                f"stored_states: {len(missing)} of {self._num_stored} batches are missing in {self.folder}, the first "
                f"{batch_path(self.folder, missing[0]).name}: go on with `peagle store`"
            )
        if self._num_stored < self.num_batches():
            used = np.unique(np.concatenate([*itertools.chain(*itertools.islice(self._groups(), self._num_stored))]))
            self.counts = self.counts_of(used)
            logger.warning(
                "%d of %d batches are stored: %d conversations are left out",
                self._num_stored,
                self.num_batches(),
                self.counts["num_left_out"],
            )

    def __call__(self, skip: int = 0, rank: int = 0, num_workers: int = 1) -> Iterator[Batch]:
        for number in itertools.count(skip):
            if number % num_workers == rank:
                epoch, at = divmod(number, self._num_stored)
                order = np.arange(self._num_stored)
                if epoch:
                    order = np.random.default_rng((self.seed, epoch)).permutation(order)
                yield self._read(int(order[at]))

    def _read(self, number: int) -> StoredBatch:
        path = batch_path(self.folder, number)
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"stored_states: {path} is damaged ({error}): remove it and write it again") from error
        return StoredBatch(**tensors | {name: tensors[name].long() for name in _INTEGERS})
