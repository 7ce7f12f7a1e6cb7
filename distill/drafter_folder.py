"""Folder of a distilled student: its card, README and launch lines for serving engines."""

import json
import shlex
from pathlib import Path
from typing import Any

from decoding.drafters.parallel import MASK_TOKEN, TRAINED_TOKENS
from decoding.models.draft_vocabulary import token_ids
from decoding.models.folder import CARD, read_json
from jobs.paths import name_anywhere
from training import drafter_folder
from training.drafter_folder import Provenance, figures_on_card, tokenizer_on_card, training_on_card
from training.model_card import NOT_RUN, OURS, TRANSFORMERS, front_matter
from training.models.shapes import WIDTHS

# Draft length in generation_config.json and launch lines if no costs were measured. The best one
# depends on the machine, so no length is better known before eval.run measures some.
NUM_DRAFT_TOKENS = 4


def read_pruning(folder: Path) -> dict[str, Any] | None:
    """Return the pruning on the card of a model folder, or None if there is none."""
    card = folder / CARD
    return read_json(card).get("pruning") if card.is_file() else None


def write_card(
    folder: Path, model: Any, origin: Provenance, pruning: dict[str, Any] | None = None
) -> None:
    """Write drafter_card.json, and a README.md in the Hub's form with launch lines.

    pruning: notes on how the student was cut from the target; None if it was not.
    """
    keys = ("num_hidden_layers", *WIDTHS, "vocab_size")
    parallel = parallel_on_card(model.config)
    about = {
        "parameters": model.num_parameters(),
        "shape": {key: getattr(model.config, key) for key in keys},
        "pruning": pruning,
        "draft_vocabulary": vocabulary_on_card(model),
        "parallel_drafting": parallel,
        "num_draft_tokens": draft_length(origin, parallel),
    }
    drafter_folder.write_card(folder, origin, about, format_readme)


def draft_length(origin: Provenance, parallel: dict[str, int] | None = None) -> int:
    """Return the draft length for launch lines: the one with the largest predicted speedup, if any.

    parallel: what `parallel_on_card` returns.
    """
    usual = NUM_DRAFT_TOKENS if parallel is None else parallel["tokens"]
    return usual if origin.draft_tokens is None else origin.draft_tokens


def vocabulary_on_card(model: Any) -> dict[str, Any] | None:
    """Return the size and the token ids of a model's draft vocabulary; None: all tokens."""
    ids = token_ids(model)
    return None if ids is None else {"size": len(ids), "ids": ids.tolist()}


def parallel_on_card(config: Any) -> dict[str, int] | None:
    """Return the draft length and the mask token of a model that drafts in parallel; else None."""
    values = vars(config)
    if MASK_TOKEN not in values:
        return None
    return {"tokens": values[TRAINED_TOKENS], "mask_token": values[MASK_TOKEN]}


def describe_parallel(card: dict[str, Any]) -> str:
    """Return a README paragraph about parallel drafting; "" for other drafters."""
    parallel = card.get("parallel_drafting")
    if not parallel:
        return ""
    return (
        f"It drafts {parallel['tokens']} tokens in one forward, with token "
        f"{parallel['mask_token']} in the place of those to draft "
        f"([PARD](https://arxiv.org/abs/2504.18583)). Shallow Draft and vLLM do so; other engines "
        f"draft token by token.\n\n"
    )


def describe_vocabulary(card: dict[str, Any]) -> str:
    """Return a README paragraph about a draft vocabulary or a copy without it; "" for others."""
    if copied := card.get("copy_of"):
        return (
            f"A copy with an lm_head row for every token, of a drafter that proposes "
            f"{copied['drafted']:,} tokens. In {1 - copied['same_argmax']:.3%} of the states it "
            f"drafts another token, measured on {copied['states']:,} states of text.\n\n"
        )
    vocabulary = card.get("draft_vocabulary")
    if not vocabulary:
        return ""
    return (
        f"It proposes {vocabulary['size']:,} of the target's {card['shape']['vocab_size']:,} "
        f"tokens (`ids` in `drafter_card.json`). Only Shallow Draft loads such a folder.\n\n"
    )


# How each launch line was tested, for a drafter's README.
TESTED = {
    "Shallow Draft": "a test of Shallow Draft runs these lines",
    "Hugging Face": "a test of Shallow Draft runs these lines",
    "vLLM": "a test of Shallow Draft runs this line with vLLM 0.32 on a CPU",
    "SGLang": NOT_RUN,
    "TensorRT-LLM": NOT_RUN,
}


def launch_lines(target: str, draft_tokens: int, parallel: bool = False) -> dict[str, str]:
    """Return engine -> a code block that drafts with the working folder, in Markdown.

    target: path or Hub name of the target, valid in any folder. draft_tokens: draft length.
    parallel: whether vLLM drafts all tokens in one forward.
    """
    speculative = {"method": "draft_model", "model": ".", "num_speculative_tokens": draft_tokens}
    vllm = json.dumps(speculative | ({"parallel_drafting": True} if parallel else {}))
    quoted = shlex.quote(target)
    named = json.dumps(target, ensure_ascii=False)
    return {
        "Shallow Draft": f"""```python
from decoding import generate, load

engine = load({named}, ".")
print(generate(engine, "Once upon a time", max_new_tokens=64).text)
```""",
        "Hugging Face": f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained({named})
drafter = AutoModelForCausalLM.from_pretrained(".")  # with its draft length
tokenizer = AutoTokenizer.from_pretrained(".")
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
tokens = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
```""",
        "vLLM": f"```bash\nvllm serve {quoted} --speculative-config '{vllm}'\n```",
        "SGLang": (
            f"```bash\npython -m sglang.launch_server --model-path {quoted} "
            f"--speculative-algorithm STANDALONE --speculative-draft-model-path . "
            f"--speculative-num-steps {draft_tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {draft_tokens + 1}\n```"
        ),
        "TensorRT-LLM": f"""```bash
cat > speculation.yaml <<END
disable_overlap_scheduler: true
speculative_config:
  decoding_type: DraftTarget
  max_draft_len: {draft_tokens}
  speculative_model_dir: .
END
trtllm-serve {quoted} --extra_llm_api_options speculation.yaml
```""",
    }


MOVED = (
    " The path of the target is that on the machine that made this folder. On another machine, "
    "replace it with the target's path there, or with its name on the Hub."
)


_COPY = """Other engines need a copy that drafts from all tokens. In a clone of Shallow Draft, with
the path of this folder for `FOLDER`, this makes one, whose README has the lines that run it:

```bash
python scripts/full_vocabulary.py FOLDER COPY
```"""


def describe_running(card: dict[str, Any]) -> str:
    """Return the README's section on running a drafter."""
    target, parallel = name_anywhere(card["target"]), bool(card.get("parallel_drafting"))
    tested = TESTED | ({"vLLM": NOT_RUN} if parallel else {})
    blocks = [
        f"**{engine}** ({tested[engine]})\n\n{block}"
        for engine, block in launch_lines(target, card["num_draft_tokens"], parallel).items()
    ]
    if card.get("draft_vocabulary"):
        blocks = [blocks[0], _COPY]
    moved = "" if target == card["target"] and not Path(target).is_absolute() else MOVED
    return "\n\n".join((f"Run these lines in this folder, which they name `.`.{moved}", *blocks))


def format_readme(card: dict[str, Any]) -> str:
    """Return the README of a drafter folder, with front matter for the Hugging Face Hub."""
    shape = card["shape"]
    layers = f"{shape['num_hidden_layers']} layer{'s' if shape['num_hidden_layers'] != 1 else ''}"
    library = OURS if card.get("draft_vocabulary") else TRANSFORMERS
    return f"""{front_matter(card, library)}# {card["name"]}

A drafter for `{card["target"]}`: {layers}, width {shape["hidden_size"]}, {card["parameters"] / 1e6:.1f} M parameters,
{training_on_card(card)}. Held-out: {figures_on_card(card)}.
It only proposes tokens. The target verifies all of them, so the output is the target's.

{tokenizer_on_card(card)}{describe_vocabulary(card)}{describe_parallel(card)}## Run it

{describe_running(card)}

`drafter_card.json` lists its target, data and code. Made with Shallow Draft.
"""  # noqa: E501
