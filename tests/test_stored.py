"""Stored states: training on them is training on recomputed ones, bit for bit, and what does not fit is refused."""

import errno
import itertools
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

from peagle.train.data import Conversations, PackedBatches
from peagle.train.recipe import Recipe
from peagle.train.stored import StoredBatches, batch_bytes, describe, packing, write_states
from peagle.train.trainer import Trainer
from tests.small_run import write_small_run

SHORT = ("schedule.max_steps=3", "schedule.warmup_steps=1", "evaluate.data=null")


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """A small run whose states are stored."""
    folder = write_small_run(tmp_path_factory.mktemp("stored"))
    write_states(recipe(folder))
    return folder


def recipe(folder: Path, *overrides: str) -> Recipe:
    fixed = ["states=stored", f"stored_states={folder / 'states'}", *SHORT]
    return Recipe.load(folder / "recipe.yaml", [*fixed, *overrides])


def reader(folder: Path, *overrides: str, dtype: torch.dtype = torch.float32) -> StoredBatches:
    loaded = recipe(folder, *overrides)
    return StoredBatches(loaded, Conversations.load(loaded.data), dtype)


def test_training_on_stored_states_is_training_on_recomputed_ones(stored) -> None:
    weights = []
    for states in ("recomputed", "stored"):
        trainer = Trainer(recipe(stored, f"states={states}", f"output={stored / states}"))
        trainer.run()
        weights.append(trainer.drafter.trainable())
    recomputed, read = weights
    assert recomputed.keys() == read.keys()
    for name, value in recomputed.items():
        assert torch.equal(value, read[name]), name


def test_stored_batches_are_those_that_are_packed(stored) -> None:
    loaded = recipe(stored)
    packed = PackedBatches(Conversations.load(loaded.data), **packing(loaded))
    batches = reader(stored)
    num_batches = packed.num_batches()
    assert num_batches > 2
    for ours, theirs in zip(itertools.islice(batches(), num_batches), packed()):  # noqa: B905 packed() never ends
        for name in ("tokens_BN", "document_BN", "position_BN", "answer_BN"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
    first, second = (
        [batch.tokens_BN for batch in itertools.islice(batches(epoch * num_batches), num_batches)] for epoch in (0, 1)
    )
    assert all(any(torch.equal(one, other) for other in second) for one in first)
    dealt = itertools.islice(batches(2, rank=1, num_workers=2), 1)
    assert torch.equal(next(dealt).tokens_BN, next(batches(3)).tokens_BN)


def test_the_room_said_is_the_room_taken(stored, caplog) -> None:
    loaded = recipe(stored)
    said = batch_bytes(loaded, describe(loaded, Conversations.load(loaded.data), torch.float32))
    sizes = [path.stat().st_size for path in (stored / "states").glob("batch-*")]
    assert all(0 <= size - said < 1000 for size in sizes), (said, sizes)
    with caplog.at_level("INFO"):
        write_states(loaded)
    assert f"0 of {len(sizes)} batches to write" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=5"], "seed = 0, not 5"),
        (["batch.num_sequences=2"], "num_sequences = 4, not 2"),
        (["drafter.aux_layer_ids=[1,2,3]"], r"aux_layer_ids = \[2, 3, 4\], not \[1, 2, 3\]"),
    ],
)
def test_states_of_something_else_are_refused(stored, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reader(stored, *overrides)
    with pytest.raises(ValueError, match=message):
        write_states(recipe(stored, *overrides))


def test_another_dtype_and_other_weights_are_refused(stored, tmp_path) -> None:
    with pytest.raises(ValueError, match="dtype = float32, not bfloat16"):
        reader(stored, dtype=torch.bfloat16)
    tuned = shutil.copytree(stored / "target", tmp_path / "tuned")
    weights = tuned / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="target = "):
        reader(stored, f"target={tuned}")


def test_missing_and_damaged_batches_are_named_and_made_again(stored, tmp_path) -> None:
    folder = shutil.copytree(stored / "states", tmp_path / "states")
    here = f"stored_states={folder}"
    one = folder / "batch-000001.safetensors"
    whole, kept = one.read_bytes(), (folder / "batch-000000.safetensors").stat().st_mtime_ns
    one.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=r"batch-000001\.safetensors is damaged"):
        next(reader(stored, here)(1))
    one.unlink()
    with pytest.raises(ValueError, match=r"1 of \d batches are missing in .* batch-000001"):
        reader(stored, here)
    write_states(recipe(stored, here))
    assert one.read_bytes() == whole
    assert (folder / "batch-000000.safetensors").stat().st_mtime_ns == kept, "what is there is not written again"
    (folder / "states.json").unlink()
    with pytest.raises(ValueError, match="peagle store"):
        reader(stored, here)


def test_a_disk_without_room(stored, tmp_path, monkeypatch) -> None:
    """Too small for all batches: nothing is written. Full on the way: what is written stays, and is gone on from."""
    fresh = recipe(stored, f"stored_states={tmp_path / 'states'}")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(OSError, match="no room: .* bytes, 1,000 are free"):
            write_states(fresh)
    assert list((tmp_path / "states").iterdir()) == []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"full at batch-000000\.safetensors: make room and start again"):
            write_states(fresh)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["states.json"]
    write_states(fresh, max_batches=2)
    assert len(list((tmp_path / "states").glob("batch-*"))) == 2
    assert json.loads((tmp_path / "states" / "states.json").read_text())["num_batches"] == 2
    batches = reader(stored, f"stored_states={tmp_path / 'states'}")
    num_stored = sum(
        int((batch.position_BN[batch.document_BN >= 0] == 0).sum()) for batch in itertools.islice(batches(), 2)
    )
    assert batches.counts["num_conversations"] == num_stored == len(batches.data) - batches.counts["num_left_out"]


def test_a_manifest_cut_short_leaves_none(stored, tmp_path, monkeypatch) -> None:
    """Half of one could neither be read nor gone on from."""

    def write_half(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("peagle.train.stored.write_bytes", write_half)
    with pytest.raises(OSError, match="No space"):
        write_states(recipe(stored, f"stored_states={tmp_path / 'states'}"))
    assert not (tmp_path / "states" / "states.json").exists()


def test_the_recipe_says_where(stored) -> None:
    with pytest.raises(ValueError, match="stored` needs the folder"):
        Recipe.load(stored / "recipe.yaml", ["states=stored"])
