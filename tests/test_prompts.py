"""Prompts: JSONL whose wrong lines are named, and the target's own chat template around them."""

import json

import pytest
from transformers import AutoTokenizer

from peagle.train.data import ChatTemplate, Prompt, cut_loop, distinct_share, read_jsonl


@pytest.fixture(scope="module")
def template(target_dir) -> ChatTemplate:
    return ChatTemplate(AutoTokenizer.from_pretrained(target_dir))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path, *records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def test_every_form_of_a_line(tmp_path, caplog) -> None:
    file = tmp_path / "prompts.jsonl"
    write(
        file,
        {"prompt": "one", "task_id": 7},
        {"turns": ["two", "later"], "category": "c"},
        {"prompt": "three", "answer": "3"},
        {"messages": [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c")]},
        {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]},
    )
    read = read_jsonl(file)
    assert [[one["content"] for one in prompt.messages] for prompt in read] == [
        ["one"],
        ["two"],
        ["three"],
        ["s", "a", "b", "c"],
        ["a", "b", "c"],
    ]
    assert [prompt.answer for prompt in read] == [None, None, "3", None, "d"]
    assert [prompt.category for prompt in read] == ["default", "c", "default", "default", "default"]
    assert "1 later entries of `turns`" in caplog.text


def test_line_ends_that_json_allows_inside_a_string(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}'.encode())
    assert [prompt.messages[0]["content"] for prompt in read_jsonl(file)] == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "Invalid JSON"),
        (b"  ", "Invalid JSON"),
        (b"{", "Invalid JSON"),
        (b'{"prompt": "a"} {"prompt": "b"}', "Invalid JSON"),
        (b'{"prompt": "\xff"}', "invalid unicode"),
        (b'["a"]', "wrong type: expected a mapping, got a list"),
        (b'{"text": "a"}', "needs one of `messages`, `prompt`, `turns`; has none"),
        (b'{"prompt": "a", "turns": ["b"]}', "has ['prompt', 'turns']"),
        (b'{"prompt": " "}', "prompt: String should match"),
        (b'{"prompt": "a", "answer": ""}', "answer: String should match"),
        (b'{"turns": []}', "turns: List should have at least 1 item"),
        (b'{"messages": "a"}', "wrong type at messages: expected a list"),
        (
            b'{"messages": [{"role": "tool", "content": "a"}]}',
            "messages.0.role must be 'system', 'user' or 'assistant'",
        ),
        (b'{"messages": [{"role": "user", "content": null}]}', "messages.0.content: expected a string"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "needs a user's message"),
        (b'{"messages": []}', "needs a user's message"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "good"}\n' + line + b'\n{"prompt": "good"}\n')
    with pytest.raises(ValueError, match="1 of 3 lines are wrong") as caught:
        read_jsonl(file)
    assert f"{file}:2: " in str(caught.value)
    assert message in str(caught.value)


def test_all_wrong_lines_are_reported_at_once(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n' + "{\n" * 12)
    with pytest.raises(ValueError, match="12 of 13 lines are wrong") as caught:
        read_jsonl(file)
    named = str(caught.value).split("\n")[1:]
    assert [line.split(":")[1] for line in named[:10]] == [str(number) for number in range(2, 12)]
    assert named[10:] == ["  and 2 more"]


def test_missing_answers_and_empty_files(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    write(file, {"prompt": "a", "answer": "b"}, {"prompt": "a"}, {"messages": [user("a")]})
    with pytest.raises(ValueError, match=r"2 of 3 lines.*\n.*:2: no answer.*\n.*:3: no answer"):
        read_jsonl(file, need_answers=True)
    file.write_text("")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_jsonl(file)


def test_turns_are_rendered_as_the_template_does(template) -> None:
    tokenizer = template.tokenizer
    conversation = [user("a"), assistant("b"), user("c")]
    whole = tokenizer.apply_chat_template([*conversation, assistant("d 12")], tokenize=False)
    made = template.render(Prompt(tuple(conversation))) + template.answer("d 12")
    assert tokenizer.decode(made) == whole.removesuffix("\n")
    assert template.end_ids == {tokenizer.eos_token_id}
    # Prompts that the target writes itself are joined from these pieces.
    for text in ("Complete this.\n\n```python\ndef f(a: int = 12):\n    ", "Hi", "naïve 東京  42"):
        assert template.before + template.encode(text) + template.after == template.render(
            Prompt(({"role": "user", "content": text},))
        )


def test_the_turns_end_may_differ_from_the_texts_end(target_dir) -> None:
    """Gemma's end of text is another token than its end of turn; the target ends its answers with the latter."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokenizer.eos_token = "<|endoftext|>"
    template = ChatTemplate(tokenizer)
    assert template.end_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert template.end_ids == {template.end_id, tokenizer.eos_token_id}
    assert len(template.end_ids) == 2


def test_messages_that_the_template_refuses_are_named(target_dir) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    template = ChatTemplate(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="f.jsonl:3: .*roles must alternate"):
        template.render(Prompt((user("a"), user("b")), where="f.jsonl:3"))


def test_loops_are_cut_and_told() -> None:
    varied, loop = list(range(100)), [1, 2, 3, 4, 5] * 60
    assert cut_loop(varied) == varied
    cut = cut_loop(varied + loop, ngram=8, max_repeats=20)
    assert 100 < len(cut) < 140
    assert distinct_share(varied) == 1.0
    assert distinct_share(loop) < 0.1
