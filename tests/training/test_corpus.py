"""Test the embedded corpus: a stable split, complete functions and a lossless tokenizer."""

import ast
import json
import textwrap
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from training.data import corpus


def test_the_split_is_stable_across_machines() -> None:
    names = [
        "dataclasses",
        "ipaddress",
        "platform",
        "pprint",
        "socket",
        "argparse",
        "inspect",
        "email.message",
    ]
    assert [name for name in names if corpus.split_of(name) == "held_out"] == names[:5]
    share = sum(corpus.split_of(f"module{number}") == "held_out" for number in range(5000)) / 5000
    assert 0.07 < share < 0.09


@pytest.mark.long
def test_documents_are_programs_of_the_standard_library() -> None:
    train, held_out = corpus.documents("train"), corpus.documents("held_out")
    assert not set(train) & set(held_out)
    assert sum(map(len, train)) > 5_000_000
    assert 0.04 < sum(map(len, held_out)) / sum(map(len, train)) < 0.16
    assert corpus.held_out_text() == "\n".join(held_out)
    names = {module.name for split in ("train", "held_out") for module in corpus._modules(split)}
    assert {"json.decoder", "argparse"} <= names
    assert not names & {
        "html.entities",
        "encodings.cp850",
        "pydoc_data.topics",
        "test.test_json",
        "unittest.test",
    }


@pytest.mark.long
def test_functions_are_valid_python() -> None:
    functions = corpus.functions("held_out")
    assert len(functions) > 500
    for function in functions:
        tree = ast.parse(f"{function.request}\n{textwrap.indent(function.body, '    ')}")
        [definition] = tree.body
        assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
        assert definition.name == function.name.rpartition(".")[2]
        assert (ast.get_docstring(definition) is not None) == bool(function.docstring)
        assert len(function.body) <= corpus.MAX_BODY_CHARACTERS


def test_functions_are_cut_into_signature_docstring_and_body(tmp_path: Path) -> None:
    source = '''
class Queue:
    @property
    def size(
        self,  # rows: all of them
        scale: float = 1.0,
    ) -> int:  # of the queue
        """Return the size."""
        # counted anew

        if scale:
            return len(self)
        return 0

    def one(self): return 1

    def bare(self):
        # why
        x = """
col 0
"""
        return x

    def documented_only(self):
        """Nothing else."""
'''
    (tmp_path / "sample.py").write_text(source)
    module = corpus.Module("sample", source)
    size, *others = corpus._functions_of(module)
    assert not others, (
        "a one-line body, a string at column 0 and a body of a docstring alone are left out"
    )
    assert size.name == "Queue.size"
    assert (
        size.signature
        == "def size(\n    self,  # rows: all of them\n    scale: float = 1.0,\n) -> int:  # of "
        "the queue"
    )
    assert size.docstring == '    """Return the size."""'
    assert size.body == "# counted anew\n\nif scale:\n    return len(self)\nreturn 0"


@pytest.mark.long
def test_chats_alternate_and_some_have_several_turns() -> None:
    chats = corpus.chats("held_out")
    assert {len(chat) for chat in chats} >= {2, 4}
    assert all(
        [turn["role"] for turn in chat] == ["user", "assistant"] * (len(chat) // 2)
        for chat in chats
    )


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return pieces of held-out modules and texts that are hard for tokenizers."""
    pieces = [
        text[start : start + 600]
        for text in corpus.documents("held_out")
        for start in range(0, min(len(text), 2400), 600)
    ]
    return [
        *pieces,
        "",
        " ",
        "   x",
        "x   ",
        "\t\tx\r\n\n\n",
        "привет, 你好 🙂 é e\u0301",
        "\x00\x7f\u2028",
        "1234567890",
        "a" * 300,
    ]


@pytest.mark.long
def test_both_tokenizer_files_agree_and_round_trip(embedded_target: Path, texts: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_target)
    pieces = sentencepiece.SentencePieceProcessor(
        model_file=str(embedded_target / "tokenizer.model")
    )
    assert len(texts) >= 150  # the standard library's modules differ by distribution
    for text in texts:
        ids = pieces.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


def test_tokenizer_names_its_special_tokens(embedded_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_target)
    assert len(tokenizer) == tokenizer.vocab_size == 2048
    assert tokenizer.convert_tokens_to_ids(["<unk>", "<s>", "</s>"]) == [0, 1, 2]
    assert (tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token) == (
        "<unk>",
        "<s>",
        "</s>",
    )
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id
    assert all(
        len(tokenizer.encode(f"<|{role}|>", add_special_tokens=False)) == 1
        for role in ("system", "user", "assistant")
    )


def test_embedded_files_come_from_the_right_split(embedded_target: Path) -> None:
    folder = embedded_target.parent
    modules = [
        json.loads(line)["id"].partition(":")[0]
        for line in (folder / "prompts.jsonl").read_text().splitlines()
    ]
    assert {corpus.split_of(module) for module in modules} == {"held_out"}
    assert len(set(modules)) >= 20
    assert (folder / "chats.json").stat().st_size <= 1_500_000
    assert (folder / "held_out_chats.json").stat().st_size <= 200_000
