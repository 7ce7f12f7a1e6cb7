"""Settings of the jobs that measure drafters: `eval.run`, `compare`, `replay` and `analyze`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from jobs.config import JobConfig, TargetConfig, TrackerConfig
from serving.engines.registry import ENGINES


@dataclass
class BenchmarkConfig:
    """Prompts of an evaluation, and how they are selected and rendered."""

    name: str = ""  # name in the tables; empty: the name of the file
    # JSONL of {"turns": [...]}, {"prompt"} or {"question"}, or a ShareGPT file (its first human
    # turns)
    path: str = MISSING
    # published form of the file, whose answers can be checked: mt_bench, spec_bench, speed_bench,
    # gsm8k, mgsm, humaneval, mbpp, hellaswag or alpaca; auto: any form of `path`, without checks
    format: str = "auto"
    # prompt file of the sweep; prompts that are measured are left out; empty: the sweep takes some
    # prompts of `path`
    sweep_path: str = ""
    sweep_format: str = ""  # published form of sweep_path; empty: that of path
    # file of solved problems in the form of `path`; its first num_shots precede each question;
    # embedded:gsm8k_shots: eight problems of this project
    shots: str = ""
    num_shots: int = 0  # worked examples before each question, of `shots`
    # run the code that the target writes for HumanEval and MBPP against their tests, in processes
    # with limits of time, memory and files, without network
    execute: bool = False
    category: str = ""  # keep only the prompts of this category; empty: all
    # JSON file of the prompt ids to keep, in this order: a list, or {"ids": [...]}; empty: all
    ids: str = ""
    # keep only the first N of the selected prompts, as some published tables do; 0: all
    first: int = 0
    # spread the max_prompts prompts over the file, to keep all categories and languages; false: the
    # first ones
    spread: bool = False
    # chat: by the chat template; text: the turn alone (base models); auto: text if there is no
    # template
    render: str = "chat"
    # auto (the tokenizer's own) or the name of a template of this project, such as vicuna
    chat_template: str = "auto"
    strip: bool = False  # remove the white space around a turn
    # text around a turn with render=text or shots, such as "Q: {turn}\nA:"
    template: str = "{turn}"
    # strings that end an answer, such as the frame of a further question; added to stop_strings of
    # eval.run; other jobs ignore them
    stop_strings: list[str] = field(default_factory=list)
    # first | all; all: later turns follow the target's answers to the earlier ones
    turns: str = "first"
    # error | skip (counted): for a prompt that leaves no room for max_new_tokens
    too_long: str = "error"


@dataclass
class EvalConfig(JobConfig):
    """Evaluation of one or several drafters against autoregressive decoding in the same loop."""

    # ours, or other engines that decode the same prompts: vllm, hf, llama_cpp, openvino; a list
    # such as [ours,vllm] compares them. Others run each drafter's model at num_draft_tokens, or 4
    # if that is empty.
    engine: Any = "ours"
    # engine -> Python interpreter that has it; empty: the one that its install script makes
    engine_python: dict[str, str] = field(default_factory=lambda: dict.fromkeys(ENGINES, ""))
    # engine -> its own file or folder of the target, such as a 4-bit GGUF; empty: the target itself
    engine_target: dict[str, str] = field(default_factory=lambda: dict.fromkeys(ENGINES, ""))
    engine_timeout: float = 900.0  # seconds to wait for an engine's start, and for each batch
    target: TargetConfig = field(default_factory=TargetConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    # Model folders (runs/*/drafter: each under its card's name), names in conf/drafter, or
    # mappings: {use: FOLDER or NAME, folder:, name:, stopping:, schedule:, lookup:, verify:,
    # max_draft_tokens:, any_target:, and the drafter's options}, or with _target_. lookup=6
    # proposes the continuation of an earlier occurrence of the last 6 tokens before the drafter is
    # asked.
    drafters: list[Any] = field(default_factory=list)
    draft_model: str = ""  # model folder that an experiment's drafters name as ${draft_model}
    # folder of the prompt files of an experiment's stages, as ${benchmark_folder}
    benchmark_folder: str = ""
    # prompts of an experiment's skip search, other than the benchmark's
    search_prompts: str = "embedded:chats"
    prompt_lookup_control: bool = True  # add the prompt-lookup row if the list does not name it
    # sampling temperatures; 0: greedy
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    top_k: int = 0  # sample from the top_k likeliest tokens; 0: off
    top_p: float = 1.0  # sample from the likeliest tokens that sum to this probability; 1: off
    min_p: float = 0.0  # drop tokens below this share of the highest probability; 0: off
    # penalty on tokens of the prompt and of the answer so far; 1: off
    repetition_penalty: float = 1.0
    # package.module.function that takes the tokenizer and returns a
    # decoding.sampling.logits_processors.Allowed; empty: any token is allowed
    allowed: str = ""
    # strings that end an answer, besides stop tokens
    stop_strings: list[str] = field(default_factory=list)
    # token | block | coupled, or a lossy rule: typical | lossy_lenience:L, which divides the
    # probabilities of the target by L in tests of drafted tokens; verification rule where
    # temperature > 0; a drafter's mapping may override it
    verify: str = "token"
    # rule that ends a draft: fixed, confidence, assisted, adaptive_confidence, entropy, thompson,
    # thompson_published, thompson_calibrated or cost_ratio; null: cost_ratio for chains of sampled
    # tokens, else fixed; a drafter's mapping may override it
    stopping: str | None = None
    # threshold of the rules that have one; null: the default of the rule
    stopping_threshold: float | None = None
    # serial; pearl_virtual, pearl_wall (both also _wo_pre, _wo_post), pearl_plus_virtual or
    # pearl_plus_wall: draft during the verification, on a virtual clock or in two workers; alone:
    # the drafter decodes by itself. A drafter's mapping may override it.
    schedule: str = "serial"
    # draft lengths of the main part; empty: the best length of each drafter in the sweep
    num_draft_tokens: list[int] = field(default_factory=list)
    # draft lengths tried in the sweep
    sweep: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 8])
    # Longest draft under a stopping rule that sets the lengths itself (confidence, assisted,
    # adaptive_confidence, entropy, thompson, thompson_published); given and swept lengths do not
    # apply to it. A drafter's mapping may override it, for the rules by cost too. Targets with
    # recorded steps ignore it.
    max_draft_tokens: int = 16
    # prompts of the sweep, spread over all prompts; the main part measures the others, so the best
    # length is not chosen on its test
    sweep_prompts: int = 8
    batch_sizes: list[int] = field(default_factory=lambda: [1])  # prompts decoded together
    # prompts of the benchmark, including those of the sweep unless it has its own file; 0: all
    max_prompts: int = 64
    # Bound on the seconds of measurement, timing and resumed runs included; 0: all prompts are
    # measured. Prompts are measured in an order shuffled by `seed` until the time is over, each
    # under every condition and by every drafter: at least 2 of the sweep and 5 of the main part.
    max_seconds: float = 0.0
    # processes that share the prompts, on as many GPUs as there are (experimental: untested on
    # several); those of one CPU or GPU slow each other, so that acceptance and answers are right,
    # but speeds are those of a busy machine, which the report says
    shards: int = 1
    samples: int = 1  # generations of each prompt where temperature > 0, each with different noise
    # runs of each generation, for noisy machines: our fastest counts, and the median of engines
    repeats: int = 1
    max_new_tokens: int = 128  # maximum tokens of a generation, which ends earlier at a stop token
    stop_at_eos: bool = True  # false: always generate max_new_tokens, for timing alone
    timing_repeats: int = 3  # timings of each part in a slice; slices are spread over the run
    # prompts whose texts the report shows, with a mark on each token: drafted or the target's own
    show_texts: int = 0
    bootstrap_resamples: int = 2000  # resamples of the 95 % interval of the speedup
    # end with an error, after the report, if an output differs from the target's
    require_lossless: bool = True
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


@dataclass
class CompareConfig(JobConfig):
    """Comparison of any number of evaluated drafters in one report."""

    # finished run folders of eval.run, or globs: runs=[runs/one,"runs/sweep/*/eval.run"]
    runs: list[str] = field(default_factory=list)
    # drafter (its name in the table), run or run folder -> its series, whose points are joined:
    # labels={runs/one: wide, runs/two: wide}
    labels: dict[str, str] | None = None
    # join drafters that share these values instead: bytes_per_step, training_tokens (each within
    # 3 %), or fields of the card, such as shape.hidden_size
    group_by: list[str] = field(default_factory=list)
    prompts: str = "headline"  # prompts that count: headline (those whose text does not loop) | all
    bootstrap_resamples: int = 2000  # resamples of the 95 % interval of one speedup over another
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


@dataclass
class ReplayConfig(JobConfig):
    """Replay of drafters on logged outputs of a target, which is not loaded."""

    OPTIONAL_PATHS: ClassVar[tuple[str, ...]] = ("benchmark.path",)  # logs may hold the prompts

    # logged outputs: tensors as text, JSON lines, chats, responses of vLLM or OpenAI's API, or a
    # run folder of eval.run
    log: str = ""
    # batch file with the requests (custom_id, body) of a log of responses; empty: the log has them
    requests: str = ""
    # the target that wrote the log, of which only the tokenizer is read; or a tokenizer's folder
    target: TargetConfig = field(default_factory=TargetConfig)
    # prompts of the log; an empty path: the log has them
    benchmark: BenchmarkConfig = field(default_factory=lambda: BenchmarkConfig(path=""))
    # drafters that draft from text alone, as in eval.run
    drafters: list[Any] = field(default_factory=list)
    prompt_lookup_control: bool = True  # add the prompt-lookup row if the list does not name it
    # draft lengths; all of a chain's take one pass over the log
    num_draft_tokens: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    # rule that ends a draft, as in eval.run but for cost_ratio and thompson_calibrated, which need
    # a target's costs; null: fixed; a drafter's mapping may override it
    stopping: str | None = None
    # threshold of the rules that have one; null: the default of the rule
    stopping_threshold: float | None = None
    # find the rounds of chains and lookups from the text, in one pass; false: draft them in the
    # decoding loop, as all others
    one_pass: bool = True
    max_outputs: int = 0  # only the first N outputs of the log; 0: all
    # write totals/DRAFTER-LENGTH.txt, the published output file, for each row
    write_totals: bool = False
    bootstrap_resamples: int = 2000  # resamples of the 95 % interval of tau
    # chats on which an experiment trains its drafter
    training_chats: list[str] = field(default_factory=list)
    # further chats, for the held-out loss of that training
    held_out_chats: list[str] = field(default_factory=list)


@dataclass
class AnalyzeConfig(JobConfig):
    """Averages of tokens a round, as published, and what they hide."""

    # run folder of eval.replay or eval.run, or an output file in the published format
    path: str = ""
    # draft length of a published output file, for its acceptance rate; 0: not known
    num_draft_tokens: int = 0
