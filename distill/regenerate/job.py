"""`python -m distill.regenerate`: build training chats from the target's own answers.

A draft token is accepted if the target would choose it, so the target's answers are better training
data than the original ones. Chats are answered turn by turn, in batches that keep their caches
between turns (distill.regenerate.batches). A journal stores every answer, so an interrupted run
resumes with the same batches and writes the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from decoding.errors import UserError
from decoding.models.folder import hash_input
from decoding.models.load import BACKENDS
from decoding.models.model_check import check_model
from decoding.models.text.tokenizer import load_tokenizer
from decoding.values import check_settings
from distill.config import RegenerateConfig
from distill.regenerate.batches import answer_all, next_request, next_requests
from distill.regenerate.dialogues import (
    ON_LENGTH,
    Account,
    Answer,
    Dialogue,
    Key,
    build_dialogues,
    make_answer,
)
from distill.regenerate.generate import SAMPLING, AnswerGenerator, Request, describe_drafter
from distill.regenerate.resume import Journal, read_journal
from distill.regenerate.writer import (
    FILE,
    RegeneratedChats,
    collect_chats,
    compute_figures,
    format_chats,
    list_broken_records,
    print_figures,
)
from jobs import ranks
from jobs.amounts import hours
from jobs.config import refuse_parallel
from jobs.config_checks import refuse
from jobs.files import write_text
from jobs.launch import count_processes, launch
from jobs.paths import resolve
from jobs.run_folder import RunFolder
from training.config import data_rules
from training.data.counts import Counts
from training.data.from_config import data_files, split_chats
from training.models.build import (
    check_context,
    dtype_of,
    find_target_folder,
    target_config,
    target_is_here,
)

# Supported kinds of parallelism: each rank loads the target and answers a part of the chats.
KINDS = ("single", "ddp")


def run(config: RegenerateConfig) -> Path:
    """Answer the chats, or resume an interrupted run, and return output_dir/chats.json."""
    check(config)
    artefact = Path(config.output_dir) / FILE
    if config.dry_run:
        dry_run(config)
        return artefact
    target_folder = find_target_folder(config.target, dry_run=False)
    check_model(target_folder)
    processes = count_processes(config.parallel)
    if processes > 1:
        refuse_parallel(config.target)
    run_folder = RunFolder(config)
    if run_folder.finished(artefact):
        print(f"finished before: {artefact}")
        return artefact
    if processes > 1 and not ranks.is_rank():
        launch(config.job, run_folder.path / "config.yaml", processes)
        return artefact
    Regeneration(config, run_folder, target_folder).run()
    return artefact


def check(config: RegenerateConfig) -> None:
    """Raise UserError for invalid values before the target is loaded."""
    target = target_config(config.target)
    dtype_of(config.target.dtype)
    check_settings(config, SAMPLING)
    data = config.data
    if data.domains:
        raise UserError(
            f"data.domains is {list(data.domains)}, expected none. Run this job once for each "
            f"domain"
        )
    rules = [
        *data_rules(data),
        ("target.backend", config.target.backend in BACKENDS, " or ".join(BACKENDS)),
        ("data.chats", bool(data.chats), "ShareGPT files: data.chats=[FILE]"),
        ("data.texts", not data.texts, "[], because plain text has no requests"),
        ("num_draft_tokens", config.num_draft_tokens >= 1, "1 or more"),
        ("batch_size", config.batch_size >= 1, "1 or more"),
        ("samples", config.samples >= 1, "1 or more"),
        (
            "samples",
            config.samples == 1 or config.temperature > 0,
            "1 at temperature 0, because greedy answers are equal",
        ),
        ("on_length", config.on_length in ON_LENGTH, f"one of {', '.join(ON_LENGTH)}"),
        ("parallel.kind", config.parallel.kind in KINDS, " or ".join(KINDS)),
        (
            "max_new_tokens",
            config.max_new_tokens < data.max_length,
            f"less than data.max_length ({data.max_length}), the limit of requests and answers",
        ),
    ]
    refuse(config, rules)
    describe_drafter(config)
    chat_files(config)
    check_context(config.target, data, target)


class Regeneration:
    """Work of one rank of n, which answers every n-th chat; rank 0 also writes the result."""

    def __init__(
        self, config: RegenerateConfig, run_folder: RunFolder, target_folder: Path
    ) -> None:
        self.config, self.run_folder = config, run_folder
        self.tokenizer = load_tokenizer(target_folder, config.target.trust_remote_code)
        self.rank, self.world_size = ranks.rank(), ranks.world_size()
        self.folder = run_folder.path / "answers"
        costs = self.folder / f"rank_{self.rank}.costs.json"
        self.generator = AnswerGenerator(config, target_folder, self.tokenizer, costs)
        drafter = [one["folder"] for one in describe_drafter(config).values() if "folder" in one]
        inputs = [target_folder, *chat_files(config), *map(Path, drafter)]
        self.inputs = list(dict.fromkeys(inputs))
        self.dialogues, self.counts = read_dialogues(config)

    def run(self) -> None:
        barrier = ranks.RankBarrier()
        known = _by_key(self._read_answers())
        # Refuse input without a request before the run claims its folder.
        if not any(next_request(one, self.tokenizer, self.config) for one in self.dialogues):
            self._collect()
        if not known:
            self.generator.load()
        if self.rank == 0:
            _refuse_changed(self.run_folder)
            self.run_folder.write_manifest(self.inputs, {}, finished=False)
        with Journal(self.folder / f"rank_{self.rank}.jsonl", make_answer) as journal:

            def answer(requests: Sequence[Request], continues: bool) -> list[Answer]:
                answers = self.generator(requests, continues)
                journal.append(asdict(one) for one in answers if one.key not in known)
                return answers

            mine = [one for one in self.dialogues if one.chat % self.world_size == self.rank]
            answer_all(mine, known, answer, self.tokenizer, self.config, show=self.rank == 0)
        barrier.wait("the end of its answers")
        if self.rank == 0:
            self._finish()

    def _finish(self) -> None:
        """Write the chats with the answers of all ranks, in input order, and the manifest."""
        answers, config, file = self._read_answers(), self.config, self.run_folder.path / FILE
        others = [one for one in self.dialogues if one.chat % self.world_size != self.rank]
        known = _by_key(answers)
        answer_all(others, known, self._refuse_missing, self.tokenizer, config, show=False)
        chats = self._collect()
        write_text(file, format_chats(chats.records))
        metrics = compute_figures(chats, answers)
        self.run_folder.write_manifest(self.inputs, metrics, finished=True)
        print_figures(chats, metrics, config.temperature, config.drop_loops)
        print(f"{len(chats.records):,} chats: {file}")

    def _collect(self) -> RegeneratedChats:
        samples, template = self.config.samples, self.config.data.template
        return collect_chats(self.dialogues, self.counts, samples, self.tokenizer, template)

    def _read_answers(self) -> dict[Path, list[Answer]]:
        """Return the answers in the journals of all ranks."""
        files = sorted(self.folder.glob("rank_*.jsonl"))
        return {file: read_journal(file, make_answer) for file in files}

    def _refuse_missing(self, requests: Sequence[Request], continues: bool) -> list[Answer]:
        chat = requests[0].key[0]
        raise UserError(
            f"{self.folder} lacks the answer of rank {chat % self.world_size} to chat {chat}, "
            f"expected the answers of all ranks. Run the same command with output_dir on a shared "
            f"file system"
        )


def _by_key(answers: Mapping[Path, Sequence[Answer]]) -> dict[Key, Answer]:
    return {answer.key: answer for of_rank in answers.values() for answer in of_rank}


def read_dialogues(config: RegenerateConfig) -> tuple[list[Dialogue], Counts]:
    """Return the dialogues of the chats to answer, and the counts of the input records."""
    chats, counts = split_chats(config.data, "train")
    limit = config.data.max_samples
    return build_dialogues(chats, config.samples, limit, config.drop_duplicates), counts


def chat_files(config: RegenerateConfig) -> list[Path]:
    """Return the files of the chats to answer. Raises UserError for a missing one."""
    return data_files(replace(config.data, held_out_chats=[], held_out_texts=[]))


def _refuse_changed(run_folder: RunFolder) -> None:
    """Raise UserError if an input has changed since the interrupted run started."""
    for path, digest in run_folder.manifest.get("inputs", {}).items():
        if hash_input(Path(path)) != digest:
            raise UserError(
                f"{path} has changed since the run started, expected the hash in "
                f"{run_folder.path / 'manifest.json'}. Set another output_dir=, or delete the "
                f"folder to start again"
            )


def dry_run(config: RegenerateConfig) -> None:
    """Print the numbers of requests and tokens, and the maximum time. Writes nothing.

    Without assumed_tokens_per_second, the target is loaded and its speed measured on one batch.
    """
    dialogues, counts = read_dialogues(config)
    if not target_is_here(config.target):
        requests = sum(len(one.requests) for one in dialogues if not one.ended)
        print(
            f"would answer {requests:,} requests of {len(dialogues):,} chats; the number of tokens "
            f"is unknown"
        )
        print(f"note: {config.target.path} does not exist, so its tokenizer is missing")
        return
    folder = resolve(config.target.path)
    tokenizer = load_tokenizer(folder, config.target.trust_remote_code)
    pending = next_requests(dialogues, tokenizer, config)
    account = Account(
        counts.read * config.samples, skipped=list_broken_records(counts, config.samples)
    )
    for dialogue in dialogues:
        if dialogue.ended:
            account.add(dialogue)
    tokens_in = tokens_out = requests = 0
    for dialogue, request in pending:
        later = [message["content"] for turn in dialogue.requests[1:] for message in turn]
        room = config.data.max_length - len(request.ids)
        requests += len(dialogue.requests)
        tokens_in += len(request.ids) + sum(len(tokenizer(text)["input_ids"]) for text in later)
        tokens_out += min(len(dialogue.requests) * config.max_new_tokens, room)
    print(
        f"would answer {requests:,} requests of {len(pending):,} chats (of {account.input:,}, "
        f"including samples)"
    )
    for line in list(account.lines())[1:]:
        print(line)
    print(f"tokens: {tokens_in:,} in (turns of the chats), at most {tokens_out:,} out")
    if not pending:
        return
    pace, how = config.assumed_tokens_per_second, "as assumed"
    if not pace:
        batch = [request for _, request in pending[len(pending) // 2 :][: config.batch_size]]
        pace = AnswerGenerator(config, folder, tokenizer).tokens_per_second(batch)
        how = "measured on one batch"
    print(
        f"at {pace:,.0f} tokens/s ({how}): at most {hours(tokens_out / pace)}, written to "
        f"{config.output_dir}"
    )
