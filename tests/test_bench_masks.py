"""The mask benchmark: its loops are the definition, and ways that differ are not timed."""

import json

import pytest
import torch

from benchmarks.masks import check, examples, main, pair_loop, row_loop
from peagle.train import masks
from peagle.train.masks import MaskTable


def test_loops_equal_the_dense_mask() -> None:
    (example,) = examples(1, 20, 4, 1.0, "cpu")
    dense = masks.dense(example.rows, example.document_1N)[0]
    assert (torch.from_numpy(row_loop(example, 4)) == dense).all()
    document = example.document_1N[0].tolist()
    numbers = (example.rows.offset_BT * 20 + example.rows.anchor_BT)[0]
    by_pairs = torch.tensor(pair_loop(document, 4, range(80)))
    assert torch.equal(by_pairs[numbers][:, numbers], dense)


def test_ways_that_differ_stop_the_benchmark() -> None:
    made = examples(2, 40, 4, 0.8, "cpu")
    check(made, 4, MaskTable(64, 4))
    with pytest.raises(ValueError, match="example 0: table differ"):
        check(made, 4, MaskTable(64, 2))  # a table of fewer depths misses chains


def test_writes_what_it_measured(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "masks.json"
    monkeypatch.setattr("sys.argv", ["masks", "--examples", "3", "--tokens", "24", "--depths", "3", "--out", str(out)])
    main()
    found = json.loads(out.read_text())
    assert found["num_rows"] == 24 + 19 + 15
    assert set(found["ways"]) == {"pair_loop", "row_loop", "dense", "table", "block"}
    assert found["ways"]["table"]["num_timed"] == 3
    assert found["ways"]["pair_loop"]["scaled"]
    assert "table" in capsys.readouterr().out
