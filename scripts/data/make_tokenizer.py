"""Train the embedded target's tokenizer and write its files into assets/target/.

    python scripts/data/make_tokenizer.py

SentencePiece BPE over the training split of the standard library. Text round-trips exactly: no
normalisation, no dummy prefix, runs of spaces are tokens, unknown characters fall back to bytes.
`tokenizer.json` holds the same pieces and merges in the form that `transformers` loads; tests
compare the ids of both. Run it only before the target is trained: another tokenizer makes a trained
model useless, so the script refuses a folder with weights.
"""

import json
import sys
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.usage import show_usage
from training.data import corpus

FOLDER = Path(__file__).resolve().parents[2] / "assets" / "target"
VOCABULARY = 2048
CONTEXT_TOKENS = 1024
SPACE = "\u2581"  # SentencePiece writes a space as this character
SPECIAL = ("<unk>", "<s>", "</s>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# One token per role and none around it: on small models every token of framing costs as much as a
# token of text.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ "
    "'<|system|>' + message['content'] }}{% elif message['role'] == 'user' %}{{ '<|user|>' + "
    "message['content'] }}{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}{% "
    "generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ "
    "raise_exception('role ' + message['role'] + ' is unknown to this template') }}{% endif %}{% "
    "endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main() -> None:
    """Train, convert and write the tokenizer; print its bytes per token on held-out modules."""
    show_usage(__doc__)
    if (FOLDER / "model.safetensors").exists():
        sys.exit(
            f"{FOLDER} holds a trained model, which another tokenizer would make useless. Move its "
            f"weights elsewhere first."
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    train(FOLDER / "tokenizer.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / "tokenizer.model"))
    convert(pieces).save(str(FOLDER / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<unk>",
        "additional_special_tokens": list(ROLES),
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
        "chat_template": CHAT_TEMPLATE,
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    text = corpus.held_out_text()
    print(
        f"{len(text.encode()) / len(pieces.encode(text)):.3f} bytes per token on held-out modules"
    )


def train(path: Path) -> None:
    """Train the SentencePiece model on the training split and write it to `path`."""
    texts = corpus.documents("train") + [
        turn["content"] for chat in corpus.chats("train") for turn in chat
    ]
    with path.open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=writer,
            model_type="bpe",
            vocab_size=VOCABULARY,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=list(ROLES),
            pad_id=-1,
            # a document is one sentence here: longer ones are skipped silently
            max_sentence_length=1 << 20,
            minloglevel=2,
        )


def convert(pieces: sentencepiece.SentencePieceProcessor) -> Tokenizer:
    """Return the tokenizer in the form of `tokenizers`, with all splits of pieces as merges."""
    ids = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    merges: list[tuple[int, int, int, str, str]] = []
    for piece in ids:
        if piece in SPECIAL or piece in ROLES or pieces.is_byte(ids[piece]):
            continue
        splits = [
            (piece[:k], piece[k:])
            for k in range(1, len(piece))
            if piece[:k] in ids and piece[k:] in ids
        ]
        merges.extend((ids[piece], ids[left], ids[right], left, right) for left, right in splits)
    # Learned pieces come in the order in which they were merged; single characters come last and
    # have no splits.
    merges.sort()
    model = models.BPE(
        ids,
        [(left, right) for *_, left, right in merges],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", ids["<s>"])]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *ROLES)]
    )
    return tokenizer


if __name__ == "__main__":
    main()
