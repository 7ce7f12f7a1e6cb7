"""`python -m distill.regenerate`: build training chats from the target's own answers.

A draft token is accepted if the target would choose it, so the target's answers are better training
data than the original ones. Chats are answered turn by turn, in batches that keep their caches
between turns (distill.regenerate.batches). A journal stores every answer, so an interrupted run
resumes with the same batches and writes the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from decoding.models.folder import hash_input, is_gguf
from decoding.models.model_check import check_model
from decoding.models.text.tokenizer import TOKENIZER_FILES, load_tokenizer
from distill.config import RegenerateConfig
from distill.regenerate.batches import answer_all, next_request
from distill.regenerate.checks import chat_files, check, read_dialogues
from distill.regenerate.dialogues import Answer, Key, make_answer
from distill.regenerate.dry_run import dry_run
from distill.regenerate.generate import AnswerGenerator, Request, describe_drafter
from distill.regenerate.resume import Journal, read_journal
from distill.regenerate.server import ServerAnswers
from distill.regenerate.writer import (
    FILE,
    RegeneratedChats,
    collect_chats,
    compute_figures,
    format_chats,
    print_figures,
)
from jobs import ranks
from jobs.config import refuse_parallel
from jobs.files import write_text
from jobs.launch import count_processes, launch
from jobs.run_folder import RunFolder
from training.models.build import find_target_folder

# Files of the target that a run with a server reads.
_TEXT_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)


def run(config: RegenerateConfig) -> Path:
    """Answer the chats, or resume an interrupted run, and return output_dir/chats.json."""
    check(config)
    artefact = Path(config.output_dir) / FILE
    if config.dry_run:
        dry_run(config)
        return artefact
    target_folder = find_target_folder(config.target, dry_run=False, weights=not config.server)
    if not config.server and not is_gguf(target_folder):
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
        advice = f". The answers so far are kept in {self.folder}; run the same command to continue"
        stops = self.generator.settings.stop_token_ids
        self.server = (
            ServerAnswers(config, self.tokenizer, stops, advice) if config.server else None
        )
        target_files = [file for file in map(target_folder.joinpath, _TEXT_FILES) if file.is_file()]
        if not config.server:
            target_files = [target_folder]
        drafter = [one["folder"] for one in describe_drafter(config).values() if "folder" in one]
        self.inputs = list(dict.fromkeys([*target_files, *chat_files(config), *map(Path, drafter)]))
        self.dialogues, self.counts = read_dialogues(config)
        self.served: dict[str, Any] = {}  # address and model of the server, for the manifest

    def run(self) -> None:
        barrier = ranks.RankBarrier()
        known = _by_key(self._read_answers())
        # Refuse input without a request before the run claims its folder.
        if not any(next_request(one, self.tokenizer, self.config) for one in self.dialogues):
            self._collect()
        if self.server is not None:
            self.served = {"server": self.config.server, "server_model": self.server.connect()}
        elif not known:
            self.generator.load()
        if self.rank == 0:
            _refuse_changed(self.run_folder, self.served.get("server_model"))
            self.run_folder.write_manifest(self.inputs, self.served, finished=False)
        with Journal(self.folder / f"rank_{self.rank}.jsonl", make_answer) as journal:
            self._answer(known, journal)
        barrier.wait("the end of its answers")
        if self.rank == 0:
            self._finish()

    def _answer(self, known: dict[Key, Answer], journal: Journal) -> None:
        """Answer this rank's dialogues, with every new answer in the journal."""
        mine = [one for one in self.dialogues if one.chat % self.world_size == self.rank]
        if self.server is not None:
            self.server.answer_all(mine, known, lambda one: journal.append([asdict(one)]))
            return

        def answer(requests: Sequence[Request], continues: bool) -> list[Answer]:
            answers = self.generator(requests, continues)
            journal.append(asdict(one) for one in answers if one.key not in known)
            return answers

        answer_all(mine, known, answer, self.tokenizer, self.config, show=self.rank == 0)

    def _finish(self) -> None:
        """Write the chats with the answers of all ranks, in input order, and the manifest."""
        answers, config, file = self._read_answers(), self.config, self.run_folder.path / FILE
        others = [one for one in self.dialogues if one.chat % self.world_size != self.rank]
        known = _by_key(answers)
        answer_all(others, known, self._refuse_missing, self.tokenizer, config, show=False)
        chats = self._collect()
        write_text(file, format_chats(chats.records))
        metrics = self.served | compute_figures(chats, answers)
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


def _refuse_changed(run_folder: RunFolder, model: str | None) -> None:
    """Raise UserError if an input has changed since the interrupted run started.

    model: the name of the server's model; None without a server.
    """
    before = run_folder.manifest.get("metrics", {"server_model": model}).get("server_model")
    if before != model:
        raise UserError(
            f"the answers in {run_folder.path} come from {_origin(before)}, but this command asks "
            f"{_origin(model)}. Set another output_dir=, or delete the folder to start again"
        )
    for path, digest in run_folder.manifest.get("inputs", {}).items():
        if hash_input(Path(path)) != digest:
            raise UserError(
                f"{path} has changed since the run started, expected the hash in "
                f"{run_folder.path / 'manifest.json'}. Set another output_dir=, or delete the "
                f"folder to start again"
            )


def _origin(model: str | None) -> str:
    return "the loaded target" if model is None else f"a server's model '{model}'"
