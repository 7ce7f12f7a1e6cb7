"""Upload a drafter folder to the Hugging Face Hub, with a model card that shows measured figures.

    python scripts/push_to_hub.py folder=FOLDER repo=OWNER/NAME [KEY=VALUE ...]

Without push=true it is a dry run: it checks everything and lists what would be uploaded, and
nothing leaves the machine. A folder with secrets, optimizer states or pickles, with weights other
than its card's, or with paths of this machine is refused. The token of the Hub is the one that
huggingface_hub finds (`hf auth login` or HF_TOKEN).
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from omegaconf import MISSING
from safetensors import SafetensorError, safe_open

from decoding.errors import UserError, without_stop
from decoding.models.folder import CARD, read_json
from distill.drafter_folder import MOVED
from eval.report.model_card import FIGURES, README, hashes_of, make_card, without_folders
from eval.statistics.comparison.evaluations import find_runs
from jobs.paths import name_anywhere
from scripts.options import run_with_options

# Files of a model folder; others stay here and are listed.
KINDS = re.compile(
    r".+\.(safetensors|json|jinja|model|md)|merges\.txt|vocab\.txt|LICENSE.*|NOTICE.*", re.ASCII
)
FIGURE = re.compile(rf"{FIGURES}/\d+\.png")  # a plot of the card
TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|rng_state|random_states|scaler|trainer_state|training_args|zero_pp_rank"
    r"|global_step|checkpoint).*|.+\.(pt|pth|bin|ckpt|pkl|pickle|distcp|npz)",
    re.IGNORECASE,
)
STATE_TENSOR = re.compile(r"(^|\.)(exp_avg|exp_avg_sq|momentum_buffer|optimizer|master)(\.|$|_)")
SECRET_FILE = re.compile(
    r"\.env.*|\.netrc|\.git-credentials|\.npmrc|id_(rsa|dsa|ecdsa|ed25519).*|.+\.(pem|key|p12|pfx)"
    r"|.*credentials.*|(hf_|access_)?token(\.txt)?",
    re.IGNORECASE,
)
SECRET_TEXT = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bxox[abpr]-[A-Za-z0-9-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(?:api[_-]?key|secret|password|passwd|auth[_-]?token)\b[\"']?\s*[:=]\s*[\"'][^\"'\s]{8,}",
    re.IGNORECASE,
)
MACHINE_PATH = re.compile(r"(?<![\w.:/<])/(?:[\w.+@~-]+/)+[\w.+@~-]+")


@dataclass
class Options:
    """Options of the upload."""

    folder: str = MISSING  # drafter folder that a training job or scripts/export_head.py wrote
    repo: str = MISSING  # repository on the Hub, OWNER/NAME
    # finished run folders of eval.run, or globs, whose figures and plots the card shows
    runs: list[str] = field(default_factory=list)
    target: str = ""  # name of the target on the Hub; empty: the card's target, if it is one
    # the Hub's identifier of a licence, such as apache-2.0; empty: the one on the card
    license: str = ""
    private: bool = True  # make a new repository private
    out: str = ""  # new folder for what would be uploaded, to look at; empty: none is kept
    push: bool = False  # upload; false: a dry run


@dataclass(frozen=True)
class Plan:
    """Files to upload, as they lie in a staging folder, and those that stay."""

    files: dict[str, int]  # path in the repository -> bytes
    left_out: list[str]

    def __str__(self) -> str:
        """Describe the plan, a line for each file."""
        lines = [f"  {size:>14,}  {name}" for name, size in self.files.items()]
        lines.append(f"  {sum(self.files.values()):>14,}  bytes in {len(self.files)} files")
        return "\n".join(lines + [f"left out: {name}" for name in self.left_out])


def prepare(options: Options, staging: Path) -> Plan:
    """Check a folder, write what would be uploaded into `staging`, and return the plan.

    Weights are linked. Raises UserError for anything that must not be published.
    """
    folder = Path(options.folder).expanduser()
    check_repository(options.repo)
    card = check_folder(folder)
    target = target_on_hub(options.target or str(card["target"]))
    kept, left_out = select_files(folder)
    runs = find_runs(options.runs) if options.runs else []
    made = make_card(folder, runs, target, options.license)
    if made.figures:  # the folder's are those of earlier measurements
        kept = [name for name in kept if not FIGURE.fullmatch(name)]
    for name in kept:
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).symlink_to((folder / name).resolve())
    published = {
        README: rename_target(made.text, str(card["target"]), target),
        CARD: json.dumps(_anywhere({**card, "target": target}), indent=1),
    }
    for name, text in published.items():
        (staging / name).unlink(missing_ok=True)
        (staging / name).write_text(text, encoding="utf-8")
    for name, image in made.figures.items():
        (staging / FIGURES).mkdir(exist_ok=True)
        (staging / name).write_bytes(image)
    names = sorted(str(one.relative_to(staging)) for one in staging.rglob("*") if one.is_file())
    check_contents(staging, names)
    return Plan({name: (staging / name).stat().st_size for name in names}, left_out)


def check_repository(name: str) -> None:
    """Raise UserError for a name that is no OWNER/NAME of the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"repo={name} is no name of the Hub: {without_stop(error)}.") from error
    if name.count("/") != 1:
        raise UserError(f"repo={name} names no owner, expected OWNER/NAME.")


def check_folder(folder: Path) -> dict[str, Any]:
    """Return the card of a drafter folder.

    Raises UserError for a folder that is none, untrained weights, and weights other than the
    card's.
    """
    if not (folder / CARD).is_file():
        raise UserError(f"{folder} has no {CARD}, expected a drafter folder of a training job.")
    card = read_json(folder / CARD)
    if not isinstance(card.get("target"), str) or "drafter_hash" not in card:
        raise UserError(f"{folder / CARD} names no target and drafter_hash. Train or export again.")
    if card["drafter_hash"] is None:
        raise UserError(f"{folder} is untrained, as a dry run wrote it: its weights are zero.")
    if card["drafter_hash"] not in hashes_of(folder):
        raise UserError(
            f"{folder} holds other weights, configuration or tokenizer files than its {CARD} "
            f"describes. Restore the files, or train again; a card must describe what it lies with."
        )
    return card


def target_on_hub(name: str) -> str:
    """Return the target's name on the Hub. Raises UserError for a path."""
    try:
        validate_repo_id(name)
        local = Path(name).expanduser().exists() or "/" not in name
    except HFValidationError:
        local = True
    if local:
        raise UserError(
            f"the target is {name!r}, which nobody else can load. Set target=OWNER/NAME, its name "
            f"on the Hub."
        )
    return name


def select_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files of a model folder, and the others with the reason why they stay.

    Raises UserError for secrets, training states and pickles, wherever they are in the folder.
    """
    kept, left_out, refused = [], [], []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if SECRET_FILE.fullmatch(path.name):
            refused.append(f"{name} (a file of secrets)")
        elif TRAINING_STATE.fullmatch(path.name):
            refused.append(f"{name} (a training state or a pickle)")
        elif path.is_dir():
            continue
        elif FIGURE.fullmatch(name):
            kept.append(name)
        elif path.parent != folder or path.name.startswith(".") or not KINDS.fullmatch(path.name):
            left_out.append(f"{name} (not a file of a model)")
        else:
            kept.append(name)
    if refused:
        raise UserError(
            f"{folder} holds what must not be published: {', '.join(refused)}. Move it elsewhere."
        )
    return kept, left_out


def check_contents(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError for files with optimizer states, secrets or paths of this machine.

    A secret is named by its file and line alone.
    """
    for name in names:
        path = folder / name
        if path.suffix == ".safetensors":
            _check_tensors(path, name)
        elif path.suffix in (".json", ".jinja", ".md", ".txt") or not path.suffix:
            text = path.read_text(encoding="utf-8", errors="replace")
            if found := SECRET_TEXT.search(text):
                line = text.count("\n", 0, found.start()) + 1
                raise UserError(
                    f"{name}, line {line}, holds what looks like a secret. Remove it, and revoke "
                    f"it if it was ever shared."
                )
            for match in MACHINE_PATH.finditer(text) if name in (README, CARD) else ():
                if Path(match[0]).exists():
                    line = text.count("\n", 0, match.start()) + 1
                    raise UserError(
                        f"{name}, line {line}, names {match[0]}, a path of this machine. Write "
                        f"what others can load, or remove it."
                    )


def _check_tensors(path: Path, name: str) -> None:
    try:
        with safe_open(path, "pt") as file:
            states = [one for one in file.keys() if STATE_TENSOR.search(one)]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{name} cannot be read: {without_stop(error)}. Copy it again.") from error
    if states:
        raise UserError(
            f"{name} holds {len(states)} tensors of an optimizer, such as {states[0]!r}. Upload "
            f"the drafter folder of a run, not one of its checkpoints."
        )


def rename_target(text: str, before: str, target: str) -> str:
    """Return a README that names the target as the Hub does, in code and in launch lines.

    There the target is named as on its card, or by an absolute path that ends alike, perhaps of
    another machine.
    """
    here = name_anywhere(before)
    names = "|".join(map(re.escape, {here, before}))
    names += rf"|/[^\s\"'`]*/{re.escape(Path(here).name)}"
    parts = re.split(r"(^```.*?^```$)", text.replace(MOVED, ""), flags=re.MULTILINE | re.DOTALL)
    for place, part in enumerate(parts):
        edges = (r"(?<=[\s\"'=])", r"(?=[\s\"'])") if place % 2 else ("(?<=`)", "(?=`)")
        parts[place] = re.sub(f"{edges[0]}(?:{names}){edges[1]}", target, part)
    return "".join(parts)


def _anywhere(value: Any) -> Any:
    """Return a card's value in which absolute paths are cut to their last part."""
    if isinstance(value, dict):
        return {key: _anywhere(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_anywhere(one) for one in value]
    return without_folders(value) if isinstance(value, str) else value


def push(options: Options, staging: Path) -> str:
    """Upload a staging folder and return the address of the commit.

    Raises UserError if the Hub refuses or cannot be reached.
    """
    api = HfApi()
    try:
        api.create_repo(options.repo, private=options.private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=options.repo,
            folder_path=staging,
            commit_message=f"Upload {Path(options.folder).name} with Shallow Draft",
        )
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        words = " ".join(str(error).split())
        raise UserError(
            f"{options.repo} was not uploaded ({words[:300]}). Check the network, the name, and "
            f"the token (hf auth login), and run the command again."
        ) from error
    return str(commit.commit_url)


def run(options: Options) -> str:
    """Check, list and, with push=true, upload; return what was done in one line."""
    out = Path(options.out).expanduser() if options.out else None
    if out and out.exists():
        raise UserError(f"out={out} exists already. Delete it, or name another folder.")
    with tempfile.TemporaryDirectory(prefix="push-to-hub-") as folder:
        staging = Path(folder)
        plan = prepare(options, staging)
        print(f"to {options.repo}:\n{plan}")
        if out:
            shutil.copytree(staging, out)
        if not options.push:
            return "dry run: nothing was uploaded. Add push=true to upload."
        return f"uploaded: {push(options, staging)}"


if __name__ == "__main__":
    run_with_options(run, Options, __doc__)
