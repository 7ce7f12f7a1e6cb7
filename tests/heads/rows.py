"""The table of trained heads that law 6 (tests/heads/law_6.py) checks; each kind adds a row.

The other laws run over the heads' drafters in tests/decoding/rows.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoding.interfaces import Drafter
from heads.block.drafter import BlockDrafter
from heads.block.kind import KIND as BLOCK
from heads.block.shape import BlockConfig
from heads.eagle.config import EagleOptions, EagleTrainConfig
from heads.eagle.drafter import EagleDrafter
from heads.eagle.kind import FIRST as EAGLE1
from heads.eagle.kind import KIND as EAGLE
from heads.eagle.kind import PARALLEL as P_EAGLE
from heads.eagle.model import EagleConfig
from heads.eagle.parallel import ParallelEagleDrafter
from heads.early_exit.drafter import EarlyExitDrafter
from heads.early_exit.kind import KIND as EARLY_EXIT
from heads.early_exit.model import EarlyExitConfig
from heads.medusa.drafter import MedusaDrafter
from heads.medusa.kind import KIND as MEDUSA
from heads.medusa.model import MedusaConfig
from heads.sdsat.drafter import SdsatDrafter
from heads.sdsat.kind import KIND as SDSAT
from heads.sdsat.model import SdsatConfig
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import HeadConfig
from recurrent_drafting.kind import KIND as RECURRENT
from training.heads.kind import HeadKind


@dataclass(frozen=True)
class HeadRow:
    """A kind of head in one form, with a drafter that samples chains.

    The drafter samples tokens one after another and proposes their distributions
    (`Proposal.q_BNV`).
    """

    name: str
    kind: HeadKind
    shape: Callable[[Any], Any]  # from a target's Hugging Face configuration to the head's shape
    drafter: Callable[[Any], Drafter]  # builds the drafter from a head in memory
    load: Callable[[Path], Drafter]  # builds the same drafter from the head's folder
    ahead: int = 0  # number of tokens that the target adds between a draft's text and the draft


def recurrent(name: str, **fields: Any) -> HeadRow:
    """Return the row of a recurrent head that drafts with one beam."""

    def shape(target: Any) -> HeadConfig:
        sizes = {"exit_dim": 2 * target.hidden_size} | fields
        return HeadConfig(target.vocab_size, target.hidden_size, **sizes)

    return HeadRow(
        name,
        RECURRENT,
        shape,
        drafter=lambda head: RecurrentDrafter(head=head, beam_width=1, children="sampled"),
        load=lambda folder: RecurrentDrafter(folder, beam_width=1, children="sampled"),
    )


def medusa(name: str, **fields: Any) -> HeadRow:
    """Return the row of Medusa heads that draft a chain."""

    def shape(target: Any) -> MedusaConfig:
        return MedusaConfig(target.vocab_size, target.hidden_size, **{"num_heads": 4, **fields})

    return HeadRow(
        name,
        MEDUSA,
        shape,
        drafter=lambda head: MedusaDrafter(heads=head, shape="chain"),
        load=lambda folder: MedusaDrafter(folder, shape="chain"),
    )


def eagle(name: str, kind: HeadKind = EAGLE, **fields: Any) -> HeadRow:
    """Return the row of an EAGLE-3 or EAGLE-1 head that drafts a chain."""

    def shape(target: Any) -> EagleConfig:
        options = EagleTrainConfig(head=EagleOptions(**fields))
        found: EagleConfig = kind.shape(options, target)
        return found

    return HeadRow(
        name,
        kind,
        shape,
        drafter=lambda head: EagleDrafter(head=head, shape="chain"),
        load=lambda folder: EagleDrafter(folder, shape="chain"),
    )


def p_eagle(name: str, **fields: Any) -> HeadRow:
    """Return the row of a P-EAGLE head of four tokens."""
    one_by_one = eagle(name, **fields)

    def shape(target: Any) -> EagleConfig:
        mask: dict[str, Any] = {"parallel": 4, "mask_token_id": target.vocab_size - 1}
        return replace(one_by_one.shape(target), **mask)

    return HeadRow(
        name,
        P_EAGLE,
        shape,
        drafter=lambda head: ParallelEagleDrafter(head=head),
        load=lambda folder: ParallelEagleDrafter(folder),
    )


def block(name: str, **fields: Any) -> HeadRow:
    """Return the row of a block drafter of four tokens, with grouped queries."""

    def shape(target: Any) -> BlockConfig:
        sizes = {"layout": "fill_in", "num_layers": 2, "taps": (1, 3)} | fields
        return BlockConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            target_layers=target.num_hidden_layers,
            block_size=5 if sizes["layout"] == "fill_in" else 4,
            mask_token_id=target.vocab_size - 1,
            num_heads=4,
            num_kv_heads=2,
            head_dim=4,
            intermediate_size=24,
            **sizes,
        )

    return HeadRow(
        name,
        BLOCK,
        shape,
        drafter=lambda head: BlockDrafter(head=head),
        load=lambda folder: BlockDrafter(folder),
    )


def early_exit(name: str, exit_layer: int, **fields: Any) -> HeadRow:
    """Return the row of an early-exit head after `exit_layer` layers."""
    return HeadRow(
        name,
        EARLY_EXIT,
        shape=lambda target: EarlyExitConfig.of_target(target.to_dict(), exit_layer, **fields),
        drafter=lambda head: EarlyExitDrafter(head=head),
        load=EarlyExitDrafter,
    )


def sdsat(name: str, one_forward: bool = False, **fields: Any) -> HeadRow:
    """Return the row of three slots, and of the target's own token before them.

    one_forward: the row of two slots in the verifying forward, which predict no further.
    """
    options: dict[str, Any] = {"one_forward": True, "slots": 2} if one_forward else {}
    return HeadRow(
        name,
        SDSAT,
        shape=lambda target: SdsatConfig.of_target(target.to_dict(), 3, **fields),
        drafter=lambda head: SdsatDrafter(head=head, **options),
        load=lambda folder: SdsatDrafter(folder, **options),
        ahead=int(one_forward),
    )


HEAD_ROWS = [
    recurrent("recurrent"),
    recurrent("recurrent without recurrence", rnn=False),
    recurrent("recurrent projected", exit_dim=24, num_draft_layers=1),
    recurrent("recurrent with a draft vocabulary", draft_vocab_size=20),
    medusa("medusa", num_layers=2),
    medusa("medusa with a shared projection", shared=True, draft_vocab_size=20),
    eagle("eagle3"),
    eagle("eagle3 with a draft vocabulary", draft_vocab_size=20),
    eagle("eagle3 as first published", fc_norm=False, norm_output=False, taps=[3, 1]),
    eagle("eagle3 with a normalized residual", norm_before_residual=True),
    eagle("eagle1", EAGLE1, fc_norm=False, norm_output=False),
    eagle("eagle1 with a bias", EAGLE1, fc_norm=False, norm_output=False, fc_bias=True),
    p_eagle("p_eagle"),
    p_eagle("p_eagle with a draft vocabulary", draft_vocab_size=20, fc_norm=False),
    p_eagle("parallelspec", masks_by_depth=True),
    block("dflash"),
    block("jetspec", in_block_mask="causal"),
    block(
        "dflash2",
        correction="selector",
        rank=6,
        candidates=5,
        conv_taps=2,
        conv_group=4,
    ),
    block(
        "dflash2 with a draft vocabulary",
        correction="selector",
        rank=6,
        candidates=5,
        draft_vocab_size=20,
    ),
    block("fusion per layer", fusion="per_layer"),
    block("fusion both", fusion="both", correction="gru", rank=6, gru_size=5),
    block("domino", layout="anchor_first", correction="gru", rank=6, gru_size=5),
    block("dflash with a draft vocabulary", draft_vocab_size=20),
    block(
        "dspark",
        layout="anchor_first",
        correction="markov",
        rank=6,
        confidence=True,
        temperatures=(0.5, 1.0, 2.0, 1.5),
    ),
    block("dspark with a draft vocabulary", correction="markov", rank=6, draft_vocab_size=20),
    block("specdiff", taps=(0,), denoising_steps=1),
    early_exit("early exit", 2),
    early_exit("early exit with a draft vocabulary", 1, draft_vocab_size=20),
    sdsat("sdsat"),
    sdsat("sdsat with a low-rank change", rank=3),
    sdsat("sdsat in one forward", one_forward=True),
    sdsat("sdsat in one forward with a low-rank change", one_forward=True, rank=3),
]
# The first of the rows whose names begin alike, for the short suite.
FIRST = {row.name.partition(" ")[0]: row for row in reversed(HEAD_ROWS)}.values()
