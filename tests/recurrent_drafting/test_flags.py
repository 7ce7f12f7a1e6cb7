"""The published flags: each sets its key, and an invalid value is refused."""

import pytest

from decoding.errors import UserError
from jobs.job import check_arguments
from recurrent_drafting.cmd.flags import FLAGS, quoted, to_overrides
from recurrent_drafting.generate import JOB
from serving.config import GenerateConfig
from serving.setup import check
from tests.support.configurations import configuration
from tests.support.forks import run_forked
from tests.support.tiers import tiered

PUBLISHED = (
    "hf_tokenizer hf_llm hf_drafter eval_mt_bench max_num_prompts max_prompt_length "
    "max_generation_length beam_width beam_length greedy_search temperature rng_seed batch_size "
    "dtype use_gpu autoregression"
).split()


def config_of(*arguments: str) -> GenerateConfig:
    """Return the configuration that a command line gives."""
    overrides = to_overrides(arguments)
    check_arguments(overrides, JOB, GenerateConfig)
    return configuration(JOB, *overrides)


def test_all_published_flags_exist():
    assert {flag.name for flag in FLAGS} == set(PUBLISHED)


def test_defaults_are_those_of_the_help():
    cfg = config_of()
    assert (cfg.beam_width, cfg.beam_length, cfg.temperature, cfg.seed, cfg.batch_size) == (
        10,
        5,
        1.0,
        123,
        1,
    )
    assert (cfg.max_new_tokens, cfg.max_prompts, cfg.max_prompt_tokens) == (256, 0, 0)
    assert (cfg.target.path, cfg.target.dtype, cfg.target.device) == (
        "embedded:target",
        "float32",
        "auto",
    )
    assert (cfg.drafter, cfg.tokenizer, cfg.prompts) == ({}, "", "")
    check(cfg)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    tiered(
        [
            ("--hf_tokenizer runs/my_tokenizer", "tokenizer", "runs/my_tokenizer"),
            ("--hf_llm /models/vicuna,7b", "target.path", "/models/vicuna,7b"),
            ("--hf_drafter runs/head", "drafter", {"use": "runs/head"}),
            ("--eval_mt_bench", "prompts", "mt_bench"),
            ("--eval_mt_bench=True", "prompts", "mt_bench"),
            ("--eval_mt_bench false", "prompts", ""),
            ("--eval_mt_bench data/question.jsonl", "prompts", "data/question.jsonl"),
            ("--eval_mt_bench questions.txt", "prompts", "questions.txt"),
            ("--eval_mt_bench seed=6", "prompts", "mt_bench"),
            ("--max_num_prompts 7", "max_prompts", 7),
            ("--max_num_prompts -1", "max_prompts", 0),
            ("--max_prompt_length=500", "max_prompt_tokens", 500),
            ("--max_prompt_length=-1", "max_prompt_tokens", 0),
            ("--max_generation_length 2048", "max_new_tokens", 2048),
            ("--beam_width=45", "beam_width", 45),
            ("--beam_length 4", "beam_length", 4),
            ("--beam_length=-1", "beam_length", 5),
            ("--greedy_search", "temperature", 0.0),
            ("--greedy_search=True --temperature=0.7", "temperature", 0.0),
            ("--greedy_search False --temperature=0.7", "temperature", 0.7),
            ("--nogreedy_search --temperature .5", "temperature", 0.5),
            ("--temperature 0.7", "temperature", 0.7),
            ("--rng_seed 5", "seed", 5),
            ("--batch_size=8", "batch_size", 8),
            ("--dtype=bf16", "target.dtype", "bfloat16"),
            ("--dtype fp16", "target.dtype", "float16"),
            ("--use_gpu 3", "target.device", "cuda:3"),
            ("--use_gpu -1", "target.device", "cpu"),
            ("--use_gpu=-1", "target.device", "cpu"),
            ("--autoregression", "drafter", {"use": "none"}),
            ("--autoregression --hf_drafter runs/head", "drafter", {"use": "none"}),
            ("--rng_seed 5 seed=6", "seed", 6),  # an override takes precedence
            ("drafter=runs/head", "drafter", {"use": "runs/head"}),
            (
                "drafter={use:budget_tree,folder:runs/a}",
                "drafter",
                {"use": "budget_tree", "folder": "runs/a"},
            ),
            (
                "drafter.use=recurrent drafter.folder=runs/a",
                "drafter",
                {"use": "recurrent", "folder": "runs/a"},
            ),
            ("--beam_width 1 --beam_width 2", "beam_width", 2),
        ],
        lambda words, key, value: words.startswith("--") and "=" not in words,
    ),
)
def test_a_flag_sets_its_key(words: str, key: str, value: object):
    node: object = config_of(*words.split())
    for name in key.split("."):
        node = vars(node)[name]
    assert node == value


def test_texts_with_hydra_syntax_are_quoted():
    for odd in ("/a b/{it's,x=1}/\\end", "ends\\", "\\'", "a,b"):
        assert config_of("--hf_llm", odd).target.path == odd
        assert config_of("--hf_drafter", odd).drafter == {"use": odd}
    assert quoted("a") == "'a'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--beam_witdh 3", "flag '--beam_witdh' is unknown. The nearest is --beam_width"),
        ("-beam_width 3", "flag '-beam_width' is unknown. The nearest is --beam_width"),
        ("--verify coupled", "'--verify' is a setting, not a flag. Use verify=VALUE"),
        ("--target.path=runs/a", "is a setting, not a flag. Use target.path=runs/a"),
        ("--nobeam_width", "flag '--nobeam_width' is unknown. The nearest is --beam_width"),
        ("--beam_width", "has no value, expected a whole number, such as --beam_width 10"),
        ("--beam_width --greedy_search", "--beam_width has no value"),
        ("--beam_width ten", "--beam_width is 'ten', expected a whole number"),
        ("--dtype float32", r"--dtype is 'float32', expected bf16 \| fp16 \| fp32"),
        ("--greedy_search=maybe", "--greedy_search is 'maybe', expected true or false"),
        ("--hf_llm=", "--hf_llm is '', expected text"),
        (
            "--max_num_prompts 0",
            r"--max_num_prompts is 0, expected 1 or more, or a negative number \(all\)",
        ),
        (
            "--max_prompt_length=0",
            r"--max_prompt_length is 0, .* a negative number \(as long as the context\)",
        ),
    ],
)
def test_invalid_values_of_flags_are_refused(words: str, message: str):
    with pytest.raises(UserError, match=message):
        to_overrides(words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "beam_wdth=3",
            "unknown configuration key 'beam_wdth'; the nearest valid key is 'beam_width'",
        ),
        ("beam_length=0", "beam_length is 0, expected 1"),
        ("children=some", "children 'some' is unknown, expected one of top_k, sampled"),
        ("--batch_size 4", "batch_size is 4, but a chat is one conversation"),
        ("--max_num_prompts 3", "max_prompts is 3, but a chat has no prompts"),
        ("output=answers.jsonl", "output=answers.jsonl has no effect, .* prompts=FILE"),
        (
            "prompts=a.jsonl output=/proc/none/a.jsonl",
            "output=/proc/none/a.jsonl cannot be written",
        ),
        ("max_prompt_tokens=-1", "max_prompt_tokens is -1, expected 0"),
    ],
)
def test_values_without_output_are_refused(words: str, message: str):
    with pytest.raises(UserError, match=message):
        check(config_of(*words.split()))


def test_the_help_lists_every_flag_with_its_differences_and_every_key():
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "160", "HOME": "/nonexistent"}
    done = run_forked("recurrent_drafting.cmd.generate", "--help", environment=environment)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for flag in FLAGS:
        assert f"--{flag.name}" in text
    for words in (
        "counts tokens of the rendered prompt, not characters",
        "both turns of every question, not the first alone",
        "the last batch may have fewer and is not dropped",
        "-1 selects the default",
        "which GPU; negative: the CPU",
        "beam_width=10",
        "drafter={use: NAME}",
        "max_new_tokens=256",
    ):
        assert words in text, words
