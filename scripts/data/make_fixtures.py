"""Write tests/fixtures: files of one version that later versions have to resume, load and keep.

    python scripts/data/make_fixtures.py [inventory]

Run it at the version whose files are kept, never to make a test pass. The jobs' own command lines
make everything; all paths are relative, so that a copy works anywhere. `inventory` writes
inventory.json alone.

- target/: a random LLaMA of two layers; chats.json, prompts.jsonl, skips.json
- distill.train/, recurrent_drafting.train/: a run stopped in the middle, and the same run finished
- eval.run/: a finished evaluation
- class_paths/, class_path_of_a_worker/: begun evaluations that name drafters by class paths
- answers.json: what the front door answers; comparison.json: what eval.compare finds
- costs.json: measured costs and what they predict
- inventory.json: law rows, controls, configurations, commands, fields, drafters
"""

import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
# Weights of one thread are the same bit for bit.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.support import snapshots  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<u>{{ message['content'] }}"
    "{% else %}<a>{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% endif %}{% "
    "endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<u>", "<a>"]
LETTERS = [*map(chr, range(ord("a"), ord("z") + 1)), " ", ".", ",", "?"]
WORDS = "red tea sun ice oak sea fox hen jar kit map net".split()
PROMPTS = [f"what is {word}?" for word in ("a map", "red tea", "the sea")]
STOPPED_AT = {"distill.train": 20, "recurrent_drafting.train": 34}
SHARED = ["target.path=target", "target.dtype=float64", "target.device=cpu", "threads=1"]
TRAINING = [
    *SHARED,
    *"data.chats=[chats.json] data.held_out_chats=[] data.max_length=48".split(),
    *"held_out.prompts=prompts.jsonl held_out.max_prompts=3 held_out.max_new_tokens=16".split(),
    *"loop.tokens_per_step=192 loop.micro_batch_tokens=96 loop.checkpoint_every=0".split(),
    *"loop.log_every=4 loop.optimizer.warmup_steps=1".split(),
]
# The last step has to be the best one: what is exported is then made after the stop.
JOBS = {
    "distill.train": [
        *"drafter=shallow drafter.name=tiny".split(),
        *"loop.max_steps=24 loop.eval_every=20 loop.optimizer.lr=5e-3".split(),
    ],
    "recurrent_drafting.train": [
        *"head.warm_start=hidden head.num_draft_layers=1 loss.name=continuations".split(),
        *"loss.predict_n_tokens=3 top_k=2 beam_width=3".split(),
        *"loop.max_steps=40 loop.eval_every=34 loop.optimizer.lr=1.5e-2".split(),
    ],
}
EVALUATION = [
    *SHARED,
    *"benchmark.path=prompts.jsonl temperatures=[0.0,1.0] verify=coupled".split(),
    *"num_draft_tokens=[3] sweep=[] max_new_tokens=14 stop_at_eos=false".split(),
    *"max_draft_tokens=5 timing_repeats=1 bootstrap_resamples=50".split(),
]
DRAFTER, HEAD = (f"{job}/finished/drafter" for job in JOBS)
# As people name them: folders, names in conf/drafter, and ways to use them.
BY_NAME: list[dict[str, Any]] = [
    {"use": DRAFTER, "name": "chain"},
    {"use": DRAFTER, "name": "chain by confidence", "stopping": "confidence", "verify": "token"},
    {"use": HEAD, "name": "head by cost", "beam_width": 4},
    {
        "use": "recurrent",
        "folder": HEAD,
        "name": "head",
        "by_cost": False,
        "verify": "token",
        "beam_width": 3,
    },
]
MODEL = {"folder": DRAFTER, "dtype": "float64"}


def by_path(path: str, name: str, **options: Any) -> dict[str, Any]:
    """Return a drafter named by its class path in an early version."""
    return {"_target_": f"decoding.{path}", **options, "name": name}


# By the class paths of conf/drafter, each in a form of its own.
BY_CLASS: list[dict[str, Any]] = [
    by_path("chain.ChainDrafter", "chain", **MODEL, stopping="fixed"),
    by_path("chain.ChainDrafter", "chain, copies", **MODEL, lookup=2, verify="token"),
    by_path("with_lookup.ChainWithLookup", "chain with lookup", **MODEL, min_match=2),
    by_path("multi_candidate.MultiCandidate", "candidates", **MODEL, branching=[2, 2]),
    by_path("static_tree.StaticTree", "static", **MODEL, choices=[[0, 0], [1]]),
    by_path("trees.RankedTree", "ranked", **MODEL, draws="picked", max_nodes=6),
    by_path("trees.RankedTree", "by cost", **MODEL, by_cost=True, max_nodes=6),
    by_path("trees.RankedTree", "ranked, copies", **MODEL, lookup=2, max_nodes=6),
    by_path("graph.GraphDrafter", "graph", **MODEL, frontier=2, draws="picked"),
    by_path("ouroboros.Ouroboros", "ouroboros", **MODEL, ngram=3),
    by_path("lookahead.Lookahead", "lookahead", ngram=3, columns=3),
    by_path("prompt_lookup.PromptLookup", "prompt_lookup", max_ngram=3, min_ngram=1),
    by_path("prompt_lookup.SuffixLookup", "suffixes", min_match=2),
    by_path("self_speculation.SelfSpeculation", "itself", skips="skips.json"),
    {
        "_target_": "recurrent_drafting.drafter.RecurrentDrafter",
        "folder": HEAD,
        "dtype": "float64",
        "name": "head",
        "beam_width": 3,
        "draws": "picked",
        "verify": "token",
    },
]
BY_CLASS_OF_A_WORKER: list[dict[str, Any]] = [
    by_path("worker.RemoteChain", "remote", **MODEL, draft_cores=0, schedule="pearl_wall"),
]
SAMPLED = {"num_draft_tokens": 3, "stopping": "fixed", "ignore_eos": True}
ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": {"num_draft_tokens": 3, "stopping": "fixed"},
    "coupled": {**SAMPLED, "temperature": 1.0, "verify": "coupled", "seed": 3},
    "token": {**SAMPLED, "temperature": 0.8, "top_k": 12, "top_p": 0.9, "seed": 4},
    "by cost": {"num_draft_tokens": 6, "stopping": "cost_ratio"},
}
# Of a folder that nobody reads again.
LEFT_OUT = ("checkpoints", ".lock")


def main() -> None:
    """Write all fixtures, or with the word `inventory` that one alone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    if sys.argv[1:] == ["inventory"]:
        write_inventory()
        return
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        write_inputs()
        for job, more in JOBS.items():
            train(job, [*TRAINING, *more])
        skips()
        evaluate("eval.run", BY_NAME, ["max_prompts=2"])
        for folder, drafters in (
            ("class_paths", BY_CLASS),
            ("class_path_of_a_worker", BY_CLASS_OF_A_WORKER),
        ):
            evaluate(
                folder,
                drafters,
                ["max_prompts=1", "prompt_lookup_control=false", "temperatures=[1.0]"],
            )
            keep_begun(Path(folder))
        compare()
        answer()
        shorten_report(Path("eval.run"))
        Path("eval.run", "metrics.jsonl").unlink()  # a mirror of the rows
        check_relative(Path(name))
        os.chdir(ROOT)
        shutil.rmtree(snapshots.FIXTURES, ignore_errors=True)
        shutil.copytree(name, snapshots.FIXTURES)
    write_inventory()
    sizes = {path: path.stat().st_size for path in snapshots.FIXTURES.rglob("*") if path.is_file()}
    for path, size in sorted(sizes.items(), key=lambda item: -item[1])[:12]:
        print(f"{size:8,} {path.relative_to(snapshots.FIXTURES)}")
    print(f"{sum(sizes.values()):8,} bytes in {len(sizes)} files")


def run(job: str, *arguments: str) -> None:
    """Run a command to its end."""
    status = snapshots.run_command(job, *arguments)
    gc.collect()  # run folders are unlocked with the last object that names them
    if status:
        sys.exit(f"{job} ended with status {status}: {' '.join(arguments)}")


def write_inputs() -> None:
    """Write the target, the chats and the prompts."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate([*SPECIAL, *LETTERS])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<u>", "<a>"],
        chat_template=TEMPLATE,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=12,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # the last layer adds little, so that the first one alone often agrees with both
        model.lm_head.weight.mul_(4.0)
        for part in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
            part.weight.mul_(0.3)
    model.save_pretrained("target")
    tokenizer.save_pretrained("target")
    choose = random.Random(0)
    chats = [
        {
            "id": f"c{n}",
            "conversations": [
                {"from": "human", "value": f"what is {choose.choice(WORDS)}?"},
                {"from": "gpt", "value": f"{' '.join(choose.choices(WORDS, k=4))}."},
            ],
        }
        for n in range(24)
    ]
    Path("chats.json").write_text("[\n" + ",\n".join(map(json.dumps, chats)) + "\n]\n")
    prompts = [
        {"id": f"p{n}", "category": "tiny", "turns": [text]} for n, text in enumerate(PROMPTS)
    ]
    Path("prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def train(job: str, overrides: list[str]) -> None:
    """Run a training to its end, and once more until Ctrl-C in the middle."""
    run(job, *overrides, f"output_dir={job}/finished")
    metrics = json.loads(Path(job, "finished", "manifest.json").read_text())["metrics"]
    if f"loop.max_steps={metrics['best_step']}" not in overrides:
        sys.exit(f"{job}: step {metrics['best_step']} was the best one, expected the last one")
    for name in LEFT_OUT:
        shutil.rmtree(Path(job, "finished", name), ignore_errors=True)
    step = STOPPED_AT[job]
    where = (f"step {step}: held-out", signal.SIGINT)
    status = snapshots.run_until(*where, job, *overrides, f"output_dir={job}/stopped")
    gc.collect()
    found = [path.name for path in Path(job, "stopped", "checkpoints").iterdir()]
    if status != 130 or found != [f"step_{step:06d}"]:
        sys.exit(f"{job} was to stop at step {step}, found status {status} and {found}")


def skips() -> None:
    """Write skips.json by a search for sub-layers to skip."""
    asked = [
        "held_out.prompts=prompts.jsonl",
        "held_out.max_prompts=2",
        "held_out.max_new_tokens=4",
    ]
    run(
        "distill.skip_search",
        *SHARED,
        *asked,
        "data.max_length=48",
        "max_skips=1",
        "output_dir=search",
    )
    shutil.move("search/skips.json", "skips.json")
    shutil.rmtree("search")


def evaluate(folder: str, drafters: list[dict[str, Any]], more: list[str]) -> None:
    """Evaluate with costs that are written first: those measured at toy size mean nothing."""
    given = [*EVALUATION, f"drafters=[{','.join(map(hydra_value, drafters))}]", *more]
    run("eval.run", *given, "output_dir=measured")
    measured = Path("measured", "costs.json")
    costs = json.loads(measured.read_text()) if measured.exists() else {}
    if costs and not Path("costs.json").exists():
        write_costs(costs)
    shutil.rmtree("measured")
    Path(folder).mkdir()
    if costs:
        Path(folder, "costs.json").write_text(
            json.dumps({key: chosen(one) for key, one in costs.items()}, indent=1)
        )
    run("eval.run", *given, f"output_dir={folder}")


def hydra_value(mapping: dict[str, Any]) -> str:
    """Return a mapping as an override writes it."""
    return "{" + ",".join(f"{key}:{json.dumps(value)}" for key, value in mapping.items()) + "}"


def chosen(measured: dict[str, Any]) -> dict[str, Any]:
    """Return costs of this form under which some drafts pay, and not all."""
    by_beams = [[beams, 0.1 + 0.03 * beams] for beams, _ in measured["t_draft_by_beams_ms"]]
    return {
        **measured,
        "t_draft_ms": by_beams[-1][1] if by_beams else 0.12,
        "t_target_ms": [1 + 0.06 * n for n in range(len(measured["t_target_ms"]))],
        "overhead_ms": 0.1,
        "plain_overhead_ms": 0.05,
        "t_draft_by_beams_ms": by_beams,
    }


def write_costs(measured: dict[str, Any]) -> None:
    """Write costs.json: measured costs of a chain and of beams, and what they predict."""
    from decoding.interfaces import RoundCosts
    from jobs.aliases import current_costs

    found = {
        key: {"costs": one, "decisions": snapshots.decisions(RoundCosts.read(current_costs(one)))}
        for key, one in measured.items()
    }
    if not any(one["costs"]["t_draft_by_frontier_ms"] for one in found.values()):
        sys.exit("no drafter has costs by beams")
    Path("costs.json").write_text(json.dumps(found) + "\n")


def keep_begun(run_folder: Path) -> None:
    """Reduce a finished evaluation to its configuration, its costs and a list of its drafts."""
    drafted = snapshots.drafted(run_folder)
    for path in run_folder.iterdir():
        if path.name not in ("config.yaml", "manifest.json", "costs.json"):
            path.unlink()
    reopen(run_folder)
    (run_folder / "drafted.json").write_text(lines(drafted))


def reopen(run_folder: Path) -> None:
    """Mark a finished run as not ended."""
    manifest = json.loads((run_folder / "manifest.json").read_text())
    del manifest["artefacts"]
    begun = {**manifest, "finished": False, "metrics": {}}
    (run_folder / "manifest.json").write_text(json.dumps(begun, indent=1))


def lines(entries: list[dict[str, Any]]) -> str:
    """Return a JSON list with an entry a line."""
    return "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n"


def compare() -> None:
    """Write comparison.json: what eval.compare finds about the evaluation."""
    run(
        "eval.compare",
        "runs=[eval.run]",
        "bootstrap_resamples=50",
        "prompts=all",
        "output_dir=compared",
    )
    Path("comparison.json").write_text(
        lines(snapshots.compared(Path("compared"), Path("eval.run")))
    )
    shutil.rmtree("compared")


def answer() -> None:
    """Write answers.json: what the front door answers, by drafter and settings."""
    from decoding import load
    from decoding.interfaces import RoundCosts
    from jobs.aliases import current_costs

    costs = json.loads(Path("eval.run", "costs.json").read_text())
    by_cost = RoundCosts.read(
        current_costs(next(one for key, one in costs.items() if key.startswith("chain,")))
    )
    found = []
    for drafter in (None, "prompt_lookup", DRAFTER):
        engine = load("target", drafter, dtype="float64")
        for name, settings in ANSWERS.items():
            if name == "by cost" and drafter != DRAFTER:
                continue
            given: dict[str, Any] = {**settings, "max_new_tokens": 16}
            more = {"costs": by_cost} if name == "by cost" else {}
            answers = snapshots.answered(engine, PROMPTS[:2], {**given, **more})
            found.append(
                {"drafter": drafter, "by_cost": bool(more), "settings": given, "answers": answers}
            )
    Path("answers.json").write_text(lines(found))


def shorten_report(run_folder: Path) -> None:
    """Replace the page for people, as large as all the rest, by a line of the right hash."""
    page, manifest_file = run_folder / "report.html", run_folder / "manifest.json"
    page.write_text("<!doctype html><title>left out</title>The page of this run is left out.\n")
    manifest = json.loads(manifest_file.read_text())
    manifest["artefacts"][page.name] = hashlib.sha256(page.read_bytes()).hexdigest()
    manifest_file.write_text(json.dumps(manifest, indent=1))


def check_relative(folder: Path) -> None:
    """Stop where a file names a folder of this machine."""
    odd = [str(folder), str(ROOT), str(Path.home())]
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        for name in odd:
            if name != "/" and name.encode() in content:
                sys.exit(f"{path} names {name}")


def write_inventory() -> None:
    """Write inventory.json: what the tree has."""
    found = snapshots.inventory(snapshots.collect_all(), snapshots.FIXTURES / "eval.run")
    entries = [f" {json.dumps(kind)}: {by_name(value)}" for kind, value in found.items()]
    (snapshots.FIXTURES / "inventory.json").write_text("{\n" + ",\n".join(entries) + "\n}\n")


def by_name(value: Any) -> str:
    """Return JSON with a line for every entry of a list or an object."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in value) + "\n ]"
    return (
        "{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items())
        + "\n }"
    )


if __name__ == "__main__":
    main()
