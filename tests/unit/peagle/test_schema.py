"""YAML files of users: what PyYAML reads, but for a key that stands twice."""

import pytest

from peagle.schema import read_yaml


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: [{b: 1, b: 2}]", "a: &m {b: 1, b: 2}\nc: {<<: *m}"])
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="file.yaml is not YAML: the key [ab] stands twice"):
        read_yaml(text, "file.yaml")


def test_a_merge_may_be_overridden_and_merged_again() -> None:
    text = "a: &a {x: 1}\nb: {c: &c {<<: *a, x: 2}}\nd: {<<: *c, y: 3}\ne: {<<: *a, <<: *c}"
    assert read_yaml(text, "file.yaml")["b"] == {"c": {"x": 2}}
