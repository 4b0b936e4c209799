"""Training data: parts on disk, packing without loss, what is too long, the same batches after a resume; prompts."""

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from transformers import AutoTokenizer

from peagle.train.cod import chain_lengths
from peagle.train.data import Conversations, PackedBatches, check_data_fits, pack, tokenizer_hash, write_manifest
from peagle.train.prompts import ChatTemplate, Prompt, read_prompts, tokenize_source
from peagle.train.recipe import Recipe


def conversations(count: int = 40) -> Conversations:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 1000, random.integers(2, 9)).tolist() for _ in range(count)]
    answers = [random.integers(0, 1000, random.integers(1, 20)).tolist() for _ in range(count)]
    return Conversations.from_lists(prompts, answers)


def test_missing_and_damaged_data_are_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="no part"):
        Conversations.load(tmp_path)
    good = conversations(3)
    np.savez(tmp_path / "part-00.npz", tokens=good.tokens[:-1], lengths=good.lengths, prompt_lengths=good.lengths)
    with pytest.raises(ValueError, match="part-00.npz is damaged: lengths"):
        Conversations.load(tmp_path)
    whole = good.save_part(tmp_path, "00").read_bytes()
    (tmp_path / "part-00.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="part-00.npz is damaged"):
        Conversations.load(tmp_path)


def test_packing_keeps_every_document_once() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 500)
    groups = list(pack(lengths, 64, np.arange(500), max_open=8))
    assert sorted(itertools.chain(*groups)) == list(range(500))
    assert max(lengths[group].sum() for group in groups) <= 64
    assert len(groups) <= 1.15 * lengths.sum() / 64, "more than 15% of the sequences is padding"


def test_batches_are_whole_documents_with_answers_marked() -> None:
    data = conversations()
    batch = next(PackedBatches(data, num_sequences=3, max_tokens=64, seed=0)())
    known = {tuple(tokens.tolist()): prompt for tokens, prompt in data.documents()}
    rows = batch.tokens_BN, batch.document_BN, batch.position_BN, batch.answer_BN
    for tokens, document, position, answer in zip(*rows, strict=True):
        for number in range(int(document.max()) + 1):
            here = document == number
            whole = tuple(tokens[here].tolist())
            assert position[here].tolist() == list(range(len(whole)))
            assert answer[here].tolist() == [at >= known[whole] for at in range(len(whole))]
        assert not answer[document < 0].any()


def test_workers_share_the_batches_of_one() -> None:
    batches = PackedBatches(conversations(), num_sequences=2, max_tokens=48, seed=3)
    straight = list(itertools.islice(batches(), 12))
    dealt = [list(itertools.islice(batches(4, rank, 2), 4)) for rank in range(2)]
    in_turn = [batch for pair in zip(*dealt, strict=True) for batch in pair]
    assert all(torch.equal(a.tokens_BN, b.tokens_BN) for a, b in zip(straight[4:], in_turn, strict=True))


def test_no_document_is_lost_between_epochs() -> None:
    """40 documents in sequences of one document each, three a batch: epochs end inside a batch."""
    data = conversations()
    batches = PackedBatches(data, num_sequences=3, max_tokens=int(data.lengths.max()), seed=0)
    packed = [batch.document_BN[row].max() + 1 for batch in itertools.islice(batches(), 400) for row in range(3)]
    ends = np.cumsum(packed)
    assert set(range(40, int(ends[-1]), 40)) <= set(ends.tolist()), "an epoch lacks or repeats documents"


def test_no_prompt_is_trained_on_and_held_out() -> None:
    prompts = [[1, number % 50] for number in range(200)]
    data = Conversations.from_lists(prompts, [[7]] * 200)
    trained, held_out = data.hold_out(0.2)
    assert sorted(trained + held_out) == list(range(200))
    assert 16 <= len(held_out) <= 64
    assert not {tuple(prompts[n]) for n in trained} & {tuple(prompts[n]) for n in held_out}
    first = Conversations.from_lists(prompts[:100], [[7]] * 100)
    assert first.hold_out(0.2)[1] == [index for index in held_out if index < 100], "more data moves none"


def test_what_does_not_fit_is_counted(caplog) -> None:
    data = conversations()
    batches = PackedBatches(data, num_sequences=1, max_tokens=16, seed=0)
    too_long = data.lengths > 16
    assert batches.counts["num_left_out"] == int(too_long.sum()) > 0
    assert batches.counts["num_tokens_left_out"] + batches.counts["num_tokens"] == len(data.tokens)
    assert f"{int(too_long.sum())} are left out" in caplog.text
    with pytest.raises(ValueError, match="max_tokens"):
        PackedBatches(conversations(), num_sequences=1, max_tokens=1, seed=0)


def test_long_conversations_may_be_cut() -> None:
    """Lengths 30 and 12 fit as they are or cut; the third has no answer within 16 tokens."""
    data = Conversations.from_lists([[1] * 4, [2] * 4, [3] * 16], [[5] * 26, [6] * 8, [7] * 9])
    batches = PackedBatches(data, num_sequences=2, max_tokens=16, seed=0, long="cut")
    counts = batches.counts
    assert (counts["num_tokens"], counts["num_left_out"], counts["num_tokens_left_out"]) == (28, 1, 25)
    assert (counts["num_cut"], counts["num_tokens_cut"]) == (1, 14)
    batch = next(batches())
    rows = [tokens[document >= 0].tolist() for tokens, document in zip(batch.tokens_BN, batch.document_BN, strict=True)]
    assert sorted(rows) == [[1] * 4 + [5] * 12, [2] * 4 + [6] * 8]
    assert int(batch.answer_BN.sum()) == 20


def test_a_joined_batch_is_one_document_with_the_same_chains() -> None:
    batch = next(PackedBatches(conversations(), num_sequences=3, max_tokens=96, seed=0)())
    assert set(batch.document_BN.unique().tolist()) >= {-1, 0, 1}, "padding, or a second document, is missing"
    joined, order_N = batch.joined()
    num_real = int((batch.document_BN >= 0).sum())
    assert joined.document_BN.tolist() == [[0] * num_real + [-1] * (3 * 96 - num_real)]
    assert joined.position_BN.tolist() == [list(range(3 * 96))]
    assert sorted(order_N.tolist()) == list(range(3 * 96))
    assert torch.equal(joined.tokens_BN[0], batch.tokens_BN.flatten()[order_N])
    assert torch.equal(joined.index_BN[0], batch.index_BN.flatten()[order_N])
    lengths_BN = chain_lengths(batch.document_BN, batch.answer_BN, 4)
    assert lengths_BN.amax() == 4
    assert torch.equal(chain_lengths(joined.document_BN, joined.answer_BN, 4)[0], lengths_BN.flatten()[order_N])


# Data, tokenizer and target that do not belong together are told apart, each with both names


def data_folder(folder: Path, tokens: list[int], **manifest: object) -> Path:
    Conversations.from_lists([tokens[:2]], [tokens[2:]]).save_part(folder, "00")
    write_manifest(folder, manifest)
    return folder


def test_the_hash_of_a_tokenizer_is_of_its_contents_not_of_how_they_are_written(target_dir, tmp_path) -> None:
    content = json.loads((target_dir / "tokenizer.json").read_text())
    merges = content["model"]["merges"]
    content["model"]["merges"] = [one.split(" ") if isinstance(one, str) else " ".join(one) for one in merges]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"padding": {"strategy": "BatchLongest"}}))
    assert tokenizer_hash(tmp_path) == tokenizer_hash(target_dir)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": None}))
    assert tokenizer_hash(tmp_path) != tokenizer_hash(target_dir)


def test_data_of_another_tokenizer_are_refused(target_dir, tmp_path) -> None:
    own = tokenizer_hash(target_dir)
    check_data_fits(data_folder(tmp_path / "own", [1, 2, 3], tokenizer=own), target_dir)
    check_data_fits(data_folder(tmp_path / "unnamed", [1, 2, 3]), target_dir)
    foreign = data_folder(tmp_path / "foreign", [1, 2, 3], tokenizer="feedfeedfeedfeed")
    with pytest.raises(ValueError, match=f"foreign was made with tokenizer feedfeedfeedfeed .* has tokenizer {own}"):
        check_data_fits(foreign, target_dir)


def test_ids_and_lengths_beyond_the_target_are_refused(target_dir, tmp_path) -> None:
    beyond = data_folder(tmp_path / "beyond", [1, 2, 49152, 3])
    with pytest.raises(ValueError, match=r"beyond holds token id 49152, the target .* has ids 0\.\.49151"):
        check_data_fits(beyond, target_dir)
    long = data_folder(tmp_path / "long", [1] * 8193)
    with pytest.raises(ValueError, match="8193 tokens, .* 8192 positions .*lower batch.max_tokens to 8192"):
        check_data_fits(long, target_dir)
    batches = PackedBatches(Conversations.load(long), num_sequences=1, max_tokens=8192, seed=0, long="cut")
    check_data_fits(long, target_dir, batches)


# ---- prompts: JSONL whose wrong lines are named, and the target's own chat template around them


@pytest.fixture(scope="module")
def template(target_dir) -> ChatTemplate:
    return ChatTemplate(AutoTokenizer.from_pretrained(target_dir))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(folder: Path, *records) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_every_form_of_a_line(tmp_path, caplog) -> None:
    chat = [user("a"), assistant("b"), user("c")]
    forms = [
        ({"prompt": "one", "task_id": 7}, ["one"], None),
        ({"turns": ["two", "later"], "category": "c"}, ["two"], None),
        ({"prompt": "three", "answer": "3"}, ["three"], assistant("3")),
        ({"messages": [{"role": "system", "content": "s"}, *chat]}, ["s", "a", "b", "c"], None),
        ({"messages": [*chat, assistant("d")]}, ["a", "b", "c"], assistant("d")),
    ]
    read = read_prompts(write(tmp_path, *(line for line, *_ in forms)))
    for prompt, (_, said, answer) in zip(read, forms, strict=True):
        assert ([one["content"] for one in prompt.messages], prompt.answer) == (said, answer)
    assert [prompt.category for prompt in read] == ["default", "c", "default", "default", "default"]
    assert "columns that are not read: task_id\n" in caplog.text


def test_sharegpt_alpaca_and_parts_of_text(tmp_path) -> None:
    said = [("system", "s"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), ("human", "e")]
    file = write(
        tmp_path,
        {"conversations": [{"from": name, "value": text} for name, text in said], "prompt": "not this"},
        {"instruction": "Translate.", "input": "Haus", "output": "house"},
        {"instruction": "Say hello.", "input": "", "output": "hello"},
        {"messages": [{"from": "human", "value": "Say hello."}, {"from": "gpt", "value": "hello"}]},
        {"messages": [user([{"type": "text", "text": part} for part in ("Say ", "hello.")]), assistant("hello")]},
    )
    read = read_prompts(file, need_answers=True)
    assert read[0].messages == ({"role": "system", "content": "s"}, user("a"), assistant("b"), user("c"))
    assert [prompt.answer for prompt in read] == [assistant(text) for text in ("d", "house", *["hello"] * 3)]
    assert [prompt.messages[0]["content"] for prompt in read[1:]] == ["Translate.\n\nHaus", *["Say hello."] * 3]
    assert read_prompts(file)[0].messages[-1] == user("e"), "as a prompt, it ends with the user's last message"


def test_a_few_wrong_rows_are_named_and_left_out(tmp_path, caplog) -> None:
    file = write(tmp_path, *[{"prompt": "a"}] * 39, {"prompt": ""})
    assert len(read_prompts(file)) == 39
    assert f"1 of 40 rows are wrong\n  {file}:40: messages.0.content" in caplog.text
    write(tmp_path, *[{"prompt": "a"}] * 18, {"prompt": ""})
    with pytest.raises(ValueError, match="1 of 19 rows are wrong"):
        read_prompts(file)


def test_what_the_package_datasets_loads(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of Parquet files stands for a data set of the hub, which the same call loads."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"instruction": f"a{n}", "output": f"b{n}", "score": n, "category": None} for n in range(4)]
    (tmp_path / "set").mkdir()
    for name, part in (("train", rows[:3]), ("test", rows[3:])):
        parquet.write_table(pyarrow.Table.from_pylist(part), tmp_path / "set" / f"{name}.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    source = str(tmp_path / "set")
    assert [prompt.answer for prompt in read_prompts(source)] == [assistant(text) for text in ("b0", "b1", "b2")]
    assert [prompt.where for prompt in read_prompts(f"{source}:test")] == [f"{source}:test row 0"]
    assert len(read_prompts(f"{source}:train[:2]")) == 2
    assert len(read_prompts(tmp_path / "rows.json")) == 4
    with pytest.raises(ValueError, match='set:none: the package datasets cannot load it: Unknown split "none"'):
        read_prompts(f"{source}:none")


def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"org/chats:train\[:9\]: it takes the package datasets .*: pip install"):
        read_prompts("org/chats:train[:9]")
    for source in ("missing.jsonl", "runs/missing.jsonl", "org/chats/x/y"):
        with pytest.raises(FileNotFoundError, match=source):
            read_prompts(source)


def test_line_ends_that_json_allows_inside_a_string(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}'.encode())
    assert [prompt.messages[0]["content"] for prompt in read_prompts(file)] == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"  ", "Invalid JSON"),
        (b'{"prompt": "\xff"}', "invalid unicode"),
        (b"{}", "needs one of messages, conversations, instruction, prompt, turns; has no column"),
        (b'{"prompt": " "}', "messages.0.content: String should match"),
        (b'{"conversations": [{"from": "someone", "value": "a"}]}', "messages.0.role: Input should be 'system'"),
        (b'{"messages": [{"role": "user", "content": null}]}', "messages.0 needs content"),
        (b'{"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}', "did you mean reasoning_content?"),
        (b'{"prompt": "a", "tools": "["}', "tools must be JSON"),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}',
            "messages.0.tool_calls.0.function.arguments must be JSON",
        ),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "needs a user's message"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "good"}\n' + line + b'\n{"prompt": "good"}\n')
    with pytest.raises(ValueError, match="1 of 3 rows are wrong") as caught:
        read_prompts(file)
    assert f"{file}:2: " in str(caught.value)
    assert message in str(caught.value)


def test_missing_answers_and_empty_files(tmp_path) -> None:
    file = write(tmp_path, {"prompt": "a", "answer": "b"}, {"prompt": "a"}, {"messages": [user("a")]})
    with pytest.raises(ValueError, match=r"2 of 3 rows.*\n.*:2: no answer.*\n.*:3: no answer"):
        read_prompts(file, need_answers=True)
    file.write_text("")
    with pytest.raises(ValueError, match="holds no conversations"):
        read_prompts(file)


def test_turns_are_rendered_as_the_template_does(template) -> None:
    tokenizer = template.tokenizer
    conversation = [user("a"), assistant("b"), user("c")]
    whole = tokenizer.apply_chat_template([*conversation, assistant("d 12")], tokenize=False)
    made = template.render(Prompt(tuple(conversation), answer=assistant("d 12")))
    assert tokenizer.decode(made.prompt + made.answer) == whole.removesuffix("\n")
    assert template.end_ids == {tokenizer.eos_token_id}
    # Prompts that the target writes itself are joined from these pieces.
    for text in ("Complete this.\n\n```python\ndef f(a: int = 12):\n    ", "Hi", "naïve 東京  42"):
        assert template.before + template.encode(text) + template.after == template.render(Prompt((user(text),))).prompt


TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
ASKED = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
#: Written as Qwen 2.5 writes turns, and as Llama 3 does, without whitespace around them.
ORDINARY = [None, TURN + "{{ m.content }}<|im_end|>\n" + ASKED, TURN + "{{ m.content | trim }}<|im_end|>" + ASKED]


@pytest.mark.parametrize("chat_template", ORDINARY)
@pytest.mark.parametrize("about", [{}, {"is_whole": False, "is_targets": True}, {"is_targets": True}])
@pytest.mark.parametrize("text", ["d 12", "```python\n    x = 1\n```", "naïve 東京  42", "<|im_end|> m"])
def test_an_ordinary_template_changes_no_token_of_an_answer(target_dir, chat_template, about, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    expected = tokenizer.encode(text) + ([2] if about.get("is_whole", True) else [])
    assert ChatTemplate(tokenizer).render(Prompt((user("a"),), answer=assistant(text), **about)).answer == expected


CHANNEL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
THINK = (
    TURN + "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n" + ASKED
)
BEGUN = THINK.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
NEVER = TURN + "{{ m.content }}<|im_end|>\n" + BEGUN[len(THINK) - len(ASKED) :]
OPEN = TURN + "{{ m.content }}\n" + ASKED
CUT, RAW = {"is_whole": False, "is_targets": True}, {"is_targets": True}
REASONED = {**assistant(""), "reasoning_content": "m"}


@pytest.mark.parametrize(
    ("chat_template", "answer", "about", "written"),
    [
        (CHANNEL, assistant("Hi"), {}, "<|channel|>final<|message|>Hi<|im_end|>"),
        (BEGUN, assistant("Hi"), {}, "\n</think>\n\nHi<|im_end|>"),
        (NEVER, assistant("Hi"), {}, None),
        (THINK, assistant("m</think>Hi"), {}, None),
        (THINK, assistant("</think>"), {}, None),
        (THINK, assistant("m</think>Hi"), RAW, "m</think>Hi<|im_end|>"),
        (ORDINARY[2], assistant(" Hi\n"), RAW, " Hi\n<|im_end|>"),
        (CHANNEL, assistant("<|channel|>"), RAW, "<|channel|>final<|message|><|channel|><|im_end|>"),
        (BEGUN, assistant("m"), CUT, "m"),
        (THINK, REASONED, CUT, "<think>\nm"),
        (BEGUN, REASONED, CUT, "m"),
        (THINK, {**REASONED, "content": "Hi"}, CUT, "<think>\nm\n</think>\n\nHi"),
        (OPEN, assistant("Hi"), {}, "Hi<|im_end|>"),
    ],
)
def test_an_answer_has_what_the_target_writes_around_its_text_and_no_more(
    target_dir: Path, chat_template: str, answer: dict[str, str], about: dict[str, bool], written: str | None
) -> None:
    """A cut answer ends where the target stopped, and text of a service that parses no reasoning stays as it is."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokenizer.chat_template = chat_template
    prompt = Prompt((user("a"),), answer=answer, **about)
    if written is None:
        with pytest.raises(ValueError, match="does not write the answer behind the prompt and end it"):
            ChatTemplate(tokenizer).render(prompt)
    else:
        assert tokenizer.decode(ChatTemplate(tokenizer).render(prompt).answer) == written


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOL_TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content and (loop.last or loop.nextitem.role == 'tool') -%}
<think>{{ message.reasoning_content }}</think>
{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<call>{{ call.function.name }} {{ call.function.arguments.city }}</call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def tokenized(target: Path, folder: Path, *lines: dict[str, Any]) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Prompt and answer of each line, as text, and the totals."""
    folder.mkdir()
    totals = tokenize_source(target, write(folder, *lines), folder / "data")
    tokenizer = AutoTokenizer.from_pretrained(target)
    documents = Conversations.load(folder / "data").documents()
    return [(tokenizer.decode(ids[:begin]), tokenizer.decode(ids[begin:])) for ids, begin in documents], totals


def test_tools_and_reasoning_are_written_by_the_template(target_dir: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(target_dir, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors")))
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(target)
    asked = [user("Rain?"), {"role": "assistant", "content": None, "reasoning_content": "ask", "tool_calls": [CALL]}]
    answered = [*asked, {"role": "tool", "tool_call_id": "call-1", "content": "no"}]
    answered.append({"role": "assistant", "content": "No.", "reasoning_content": "dry", "refusal": None})
    with_tools = [{"messages": messages, "tools": TOOLS} for messages in (asked, answered)]
    without = {"messages": [*answered, user("Sure?"), assistant("Yes.")]}
    found, totals = tokenized(target, tmp_path / "run", *with_tools, without)
    begin = (
        f"<|im_start|>system\n{json.dumps(TOOLS)}<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n"
    )
    call = "<think>ask</think>\n<call>weather Oslo</call><|im_end|>"
    assert found[0] == (begin, call)
    result = "\n<|im_start|>tool\nno<|im_end|>\n<|im_start|>assistant\n"
    assert found[1] == (f"{begin}{call}{result}", "<think>dry</think>\nNo.<|im_end|>")
    assert "dry" not in found[2][0], "as the target will not see it"
    assert found[2][1] == "Yes.<|im_end|>"
    data = Conversations.load(tmp_path / "run" / "data")
    assert totals["num_answer_tokens"] == data.num_answer_tokens
    check_data_fits(tmp_path / "run" / "data", target)
    with pytest.raises(ValueError, match="holds data already"):
        tokenize_source(target, tmp_path / "run" / "lines.jsonl", tmp_path / "run" / "data")


def test_an_answer_of_weight_0_is_not_trained_on(target_dir: Path, tmp_path: Path) -> None:
    conversation = [user("a"), assistant("b"), user("c"), {**assistant("d"), "weight": 0}]
    early = [user("a"), {**assistant("b"), "weight": 0}, user("c"), {**assistant("d"), "weight": 1}]
    found, _ = tokenized(target_dir, tmp_path / "run", {"messages": conversation}, {"messages": early})
    assert [answer for _, answer in found] == ["b<|im_end|>", "d<|im_end|>"]
    assert "b<|im_end|>" in found[1][0]
    with pytest.raises(ValueError, match=r"lines.jsonl:1: no answer: .* of a weight other than 0"):
        tokenized(target_dir, tmp_path / "none", {"messages": [user("a"), {**assistant("b"), "weight": 0}]})


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"messages": [user("a"), {**assistant("b"), "reasoning_content": "c"}]}, "answer.reasoning_content"),
        ({"messages": [{**assistant("b"), "tool_calls": [CALL]}, user("c"), assistant("d")]}, "messages.0.tool_calls"),
        ({"messages": [{**user("a"), "name": "Ann"}, assistant("b")]}, "messages.0.name"),
    ],
)
def test_what_the_template_writes_nothing_of_is_refused(target_dir, tmp_path, changes, lost: str) -> None:
    """SmolLM2's template knows no tools and no reasoning."""
    line = {"messages": [user("a"), assistant("b")]} | changes
    message = rf"lines.jsonl:2: .*chat template writes nothing of {lost}: leave out the line"
    with pytest.raises(ValueError, match=message):
        tokenized(target_dir, tmp_path / "run", {"prompt": "a", "answer": "b"}, line)
    assert not (tmp_path / "run/data").exists()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system') }}", "chat_template: .*no system"),
        ("{{ messages[0].content + 1 }}", r": .* \(roles user\).*; change the messages, or chat_template in"),
        ("always the same", "it writes a message 0 times, expected once"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "it has no eos_token, and .* ends .*: set eos"),
        (None, "it has no chat template, .*: put chat_template.jinja beside it"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(target_dir: Path, template: str | None, message: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokenizer.chat_template, tokenizer.eos_token = template, None
    with pytest.raises(ValueError, match=rf"^tokenizer {tokenizer.name_or_path}.*{message}"):
        ChatTemplate(tokenizer)


def test_the_tiny_recipe_has_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    recipe = Recipe.load("configs/train/tiny.yaml")
    assert recipe.conversations is not None
    assert len(read_prompts(recipe.conversations, need_answers=True)) == 109
