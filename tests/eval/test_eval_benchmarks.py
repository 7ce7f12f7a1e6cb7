"""Prompts: reading, exclusions and their counts, and the rendering of turns to token ids."""

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from decoding.errors import UserError
from eval.config import BenchmarkConfig
from eval.measure.benchmarks import load_benchmark, render_turns, spread
from tests.support import tiny_folders as tiny
from training.data.readers import Prompt


def load(
    path: Path,
    limit: int = 0,
    max_length: int = 256,
    max_new_tokens: int = 32,
    **options: str | int,
):
    cfg = BenchmarkConfig(path=str(path), **options)
    return load_benchmark(
        cfg, tiny.tokenizer(), max_length=max_length, max_new_tokens=max_new_tokens, limit=limit
    )


def test_every_prompt_is_accounted_for(tmp_path):
    path = tiny.prompts(tmp_path / "mine.jsonl", count=9)
    found = load(path, limit=2, category="odd")
    assert [prompt.id for prompt in found.prompts] == ["p0", "p2"]
    assert found.name == "mine"
    assert found.counts == {
        "read": 9,
        "other_category": 4,
        "too_long": 0,
        "over_limit": 3,
        "kept": 2,
    }
    left_out = sum(
        found.counts[key] for key in ("other_category", "too_long", "over_limit", "kept")
    )
    assert left_out == found.counts["read"]


def test_bad_records_are_counted(tmp_path):
    path = tiny.prompts(tmp_path / "mine.jsonl", count=300)
    assert "bad_records_skipped" not in load(path).counts, "control"
    path.write_text(path.read_text() + '{"turns": []}\n[]\n')
    counts = load(path, limit=4).counts
    assert (counts["read"], counts["bad_records_skipped"], counts["kept"]) == (300, 2, 4)
    assert "bad_sweep_records_skipped" not in counts, "control: there is no other file"
    more = tiny.prompts(tmp_path / "more.jsonl", count=200)
    more.write_text(more.read_text() + '{"turns": []}\n')
    both = load(path, limit=4, sweep_path=str(more)).counts
    assert both == {**counts, "bad_sweep_records_skipped": 1}


def test_worked_examples_have_a_hash_of_their_text(tmp_path):
    def examples(name: str, answers: list[str]) -> str:
        file = tmp_path / name
        solved = ({"question": f"{n}?", "answer": f"#### {a}"} for n, a in enumerate(answers))
        file.write_text("".join(json.dumps(one) + "\n" for one in solved))
        return str(file)

    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": "And?", "answer": "#### 9"}) + "\n")
    ours = examples("ours.jsonl", ["1", "2", "3"])
    given = {"format": "gsm8k", "render": "text"}
    found = load(path, shots=ours, num_shots=2, **given)
    before = found.prompts[0].turns[0].removesuffix("And?")
    assert found.examples_hash == sha256(before.encode()).hexdigest()
    copied = examples("copied.jsonl", ["1", "2", "4"])  # the third one is not taken
    assert load(path, shots=copied, num_shots=2, **given).examples_hash == found.examples_hash
    others = {
        load(path, shots=examples("theirs.jsonl", ["1", "5"]), num_shots=2, **given).examples_hash,
        load(path, shots=ours, num_shots=3, **given).examples_hash,
        load(path, shots=ours, num_shots=2, template="Q: {turn}", **given).examples_hash,
    }
    assert len(others | {found.examples_hash}) == 4
    assert load(path, **given).examples_hash == "", "a control: no examples"


def test_only_the_first_turn_is_read_by_default(tmp_path):
    path = tiny.prompts(tmp_path / "two.jsonl", turns=2)
    assert {len(prompt.turns) for prompt in load(path).prompts} == {1}
    assert {len(prompt.turns) for prompt in load(path, turns="all").prompts} == {2}


def test_a_later_turn_follows_the_earlier_answers():
    tokenizer = tiny.tokenizer()
    first = render_turns(["Hi?"], [], tokenizer, "chat")
    second = render_turns(["Hi?", "And?"], ["Yes."], tokenizer, "chat")
    assert tokenizer.decode(second) == "<u>Hi?<a>Yes.</s><u>And?<a>"
    assert second[: len(first)] == first
    with pytest.raises(ValueError, match="1 answers"):
        render_turns(["Hi?", "And?"], [], tokenizer, "chat")


def test_plain_text_is_not_wrapped():
    tokenizer = tiny.tokenizer()
    assert tokenizer.decode(render_turns(["Once"], [], tokenizer, "text")) == "Once"


def test_a_named_chat_template_renders_both_turns(tmp_path, shared_data, llama_tokenizer):
    """Check that a named chat template renders both turns, if the tokenizer has no template.

    Vicuna's published tokenizer has none. Without a named template, the error suggests one.
    """
    words = AutoTokenizer.from_pretrained(llama_tokenizer)
    options = {"max_length": 2048, "max_new_tokens": 32, "limit": 1}
    path = str(shared_data / "eval" / "mt_bench.jsonl")
    found = load_benchmark(
        BenchmarkConfig(path=path, turns="all", chat_template="vicuna"), words, **options
    )
    first, second = found.prompts[0].turns
    ids = render_turns([first, second], ["Aloha."], words, found.render, found.chat_template)
    text = words.decode(ids)
    assert text.startswith("<s>A chat between a curious user") or text.startswith(
        "<s> A chat between a curious user"
    )
    assert f"USER: {first} ASSISTANT: Aloha.</s>" in text and text.endswith(
        f"USER: {second} ASSISTANT:"
    )
    with pytest.raises(
        UserError,
        match=r"benchmark.render=text to leave prompts .*benchmark.chat_template=vicuna\|llama2",
    ):
        load_benchmark(BenchmarkConfig(path=path), words, **options)


@pytest.mark.parametrize(("render", "shown"), [("auto", "text"), ("text", "text")])
def test_a_base_model_gets_unchanged_prompts(tmp_path, llama_tokenizer, capsys, render, shown):
    words = AutoTokenizer.from_pretrained(llama_tokenizer)
    cfg = BenchmarkConfig(path=str(tiny.prompts(tmp_path / "mine.jsonl")), render=render)
    found = load_benchmark(cfg, words, max_length=256, max_new_tokens=32, limit=1)
    assert found.render == shown
    assert ("given as plain text" in capsys.readouterr().out) == (render == "auto")
    assert load(Path(cfg.path), render="auto").render == "chat", (
        "control: the template of the tokenizer"
    )


def test_a_prompt_beyond_the_context_is_refused_or_counted(tmp_path):
    path = tmp_path / "long.jsonl"
    lines = [
        {"id": "short", "category": "", "turns": ["Hi"]},
        {"id": "long", "category": "", "turns": ["x" * 300]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match=r"'long' has 302 tokens.*too_long=skip"):
        load(path)
    found = load(path, too_long="skip")
    assert [prompt.id for prompt in found.prompts] == ["short"]
    assert found.counts["too_long"] == 1
    with pytest.raises(UserError, match="all 2 prompts are too long"):
        load(path, too_long="skip", max_length=8, max_new_tokens=8)


def test_a_long_prompt_beyond_the_limit_is_ignored(tmp_path):
    path = tmp_path / "long.jsonl"
    lines = [
        {"id": "short", "category": "", "turns": ["Hi"]},
        {"id": "long", "category": "", "turns": ["x" * 300]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert load(path, limit=1).counts["over_limit"] == 1


def test_an_unknown_category_names_those_that_exist(tmp_path):
    with pytest.raises(UserError, match="even, odd"):
        load(tiny.prompts(tmp_path / "mine.jsonl"), category="poetry")


@pytest.mark.parametrize("key", ["render", "chat_template", "turns", "too_long"])
def test_unknown_options_name_the_known_ones(tmp_path, key):
    with pytest.raises(UserError, match=f"benchmark.{key}[= ]'x'.*one of"):
        load(tiny.prompts(tmp_path / "mine.jsonl"), **{key: "x"})


def test_a_sharegpt_file_is_a_benchmark_too(tmp_path):
    path = tmp_path / "chats.json"
    chat = {
        "id": "c1",
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
    }
    path.write_text(json.dumps([chat]))
    assert [prompt.turns for prompt in load(path).prompts] == [["Hi"]]


def test_a_template_surrounds_every_turn(tmp_path):
    path = tiny.prompts(tmp_path / "two.jsonl", turns=2)
    plain, framed = (
        load(path, turns="all", render="text"),
        load(path, turns="all", render="text", template="Q: {turn}\nA:"),
    )
    assert [[f"Q: {turn}\nA:" for turn in prompt.turns] for prompt in plain.prompts] == [
        p.turns for p in framed.prompts
    ]
    with pytest.raises(UserError, match="has no place for the turn"):
        load(path, render="text", template="Q:")
    with pytest.raises(UserError, match="needs benchmark.render=text"):
        load(path, template="Q: {turn}")


def test_ids_select_prompts_in_their_order(tmp_path):
    path = tiny.prompts(tmp_path / "mine.jsonl", count=9)
    listed = tmp_path / "ids.json"
    listed.write_text('{"ids": ["p7", "p2"]}')
    assert [prompt.id for prompt in load(path, ids=str(listed)).prompts] == ["p7", "p2"]
    listed.write_text('["p7", "q1"]')
    with pytest.raises(UserError, match="1 of 2 ids are not in .*; the first is 'q1'"):
        load(path, ids=str(listed))
    listed.write_text('[["p7"], "p2"]')
    with pytest.raises(UserError, match=r"1 of 2 ids are not in .*; the first is \['p7'\]"):
        load(path, ids=str(listed))
    listed.write_text("[" * 10**5)
    with pytest.raises(UserError, match="cannot be read .maximum recursion depth"):
        load(path, ids=str(listed))
    listed.write_text("{}")
    with pytest.raises(UserError, match="expected a JSON list of one or more prompt ids"):
        load(path, ids=str(listed))
    with pytest.raises(UserError, match="cannot be read"):
        load(path, ids=str(tmp_path / "nothing.json"))


def prompts_of(categories: list[str]) -> list[Prompt]:
    return [
        Prompt(str(number), category, [f"Question {number}?"])
        for number, category in enumerate(categories)
    ]


@pytest.mark.parametrize("order", ["by category", "in turn"])
def test_prompts_of_the_sweep_are_spread_over_the_file(order):
    """Check that the sweep's prompts cover a file's categories, sorted or alternating.

    MT-bench and MGSM are sorted by category. Controls: the first prompts of a sorted file have one
    category, and equal steps through alternating ones at most four.
    """
    kinds = (
        [kind for kind in "abcdefgh" for _ in range(10)]
        if order == "by category"
        else list("abcdefgh") * 10
    )
    prompts = prompts_of(kinds)
    chosen, others = spread(prompts, 8)
    assert len(chosen) == 8 and sorted(chosen + others, key=lambda one: int(one.id)) == prompts
    assert spread(prompts, 8) == (chosen, others), "the choice is not random"
    seen = len({prompt.category for prompt in chosen})
    assert seen == 8 if order == "by category" else seen >= 4
    middles = [prompts[5 + 10 * step].category for step in range(8)]
    assert order == "by category" or len(set(middles)) <= 4, (
        "control: equal steps take the same few categories"
    )
    if order == "by category":
        assert len({prompt.category for prompt in prompts[:8]}) == 1, (
            "control: the first ones are of one category"
        )


@pytest.mark.parametrize(("count", "of"), [(0, 5), (1, 5), (4, 5), (5, 5), (9, 5), (7, 11), (3, 0)])
def test_spreading_takes_each_prompt_at_most_once(count, of):
    chosen, others = spread(prompts_of(["x"] * of), count)
    assert len(chosen) == min(count, of)
    assert len({prompt.id for prompt in chosen + others}) == of == len(chosen + others)


def test_a_limit_can_spread_prompts_over_the_file(tmp_path):
    """Check that with `spread` a limit keeps prompts of every category, and counts the others.

    Without `spread`, it keeps as many prompts, but of the first category.
    """
    lines = [
        {"id": f"{kind}{n}", "category": kind, "turns": [f"{kind} {n}"]}
        for kind in "abcd"
        for n in range(5)
    ]
    lines[7]["turns"] = ["x" * 300]
    path = tmp_path / "sorted.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    for options, categories in (({"spread": True}, "abcd"), ({}, "a")):
        found = load(path, limit=4, too_long="skip", **options)
        assert {prompt.category for prompt in found.prompts} == {*categories}
        counts = found.counts
        assert (counts["kept"], sum(counts.values()) - counts["read"]) == (4, 20)
    assert len(load(path, too_long="skip", spread=True).prompts) == 19, (
        "without a limit all that fit are kept"
    )


def test_spread_prompts_are_of_every_category_of_a_file_with_large_and_small_ones(tmp_path):
    """Check it on the sizes of Spec-Bench, whose small categories stretches of the file miss."""
    sizes = dict.fromkeys("abcdefgh", 10) | dict.fromkeys("vwxyz", 80)
    kinds = [kind for kind, size in sizes.items() for _ in range(size)]
    evenly, _ = spread(prompts_of(kinds), 16)
    assert len({prompt.category for prompt in evenly}) < 13, "control: equal stretches miss some"
    lines = [{"id": str(n), "category": kind, "turns": ["q"]} for n, kind in enumerate(kinds)]
    path = tmp_path / "uneven.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    chosen = load(path, limit=16, spread=True).prompts
    counts = Counter(prompt.category for prompt in chosen)
    assert len(chosen) == 16 and set(counts) == set(sizes)
    assert {kind for kind, count in counts.items() if count > 1} == {*"vwx"}
    assert [int(prompt.id) for prompt in chosen] == sorted(int(prompt.id) for prompt in chosen)
    for limit in (1, 12, 13, 14, 479, 480, 500):
        assert len(load(path, limit=limit, spread=True).prompts) == min(limit, 480)


def test_white_space_around_a_turn_can_be_removed(tmp_path):
    path = tmp_path / "code.jsonl"
    path.write_text(json.dumps({"id": "one", "category": "", "turns": ["\n\ndef f():\n  x\n"]}))
    printed = {"render": "text", "template": "Q: {turn}\nA:"}
    assert load(path, strip=True, **printed).prompts[0].turns == ["Q: def f():\n  x\nA:"]
    assert load(path, **printed).prompts[0].turns == ["Q: \n\ndef f():\n  x\n\nA:"]


def test_the_sweep_can_use_another_file(tmp_path):
    """Check that the prompts of `sweep_path` are used, except those that are measured.

    All requested prompts of the main file are measured. Prompts are compared by text, not by id.
    """
    path, more = (
        tiny.prompts(tmp_path / "mine.jsonl", count=4),
        tiny.prompts(tmp_path / "more.jsonl", count=9),
    )
    more.write_text(more.read_text().replace('"id": "p', '"id": "q'))
    framed = {"render": "text", "template": "Q: {turn}"}
    found = load(path, sweep_path=str(more), first=3, **framed)
    assert [prompt.id for prompt in found.prompts] == ["p0", "p1", "p2"]
    assert [prompt.id for prompt in found.for_sweep] == [f"q{n}" for n in range(3, 9)]
    assert found.for_sweep[0].turns == ["Q: Question 3, part 0?"]
    assert found.counts["kept"] == 3
    assert load(path).for_sweep == []
    with pytest.raises(UserError, match="holds no prompt besides the 4 that are measured"):
        load(path, sweep_path=str(path))
    with pytest.raises(UserError, match="benchmark.first is -1, expected"):
        load(path, first=-1)
