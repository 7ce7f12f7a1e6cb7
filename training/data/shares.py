"""Shares with which a mixture starts: the configured ones, or those where another training ended.

Sheared-LLaMA continues the mixture across its two stages: training starts from the final shares of
pruning (arXiv 2310.06694, section 2.2).
"""

import dataclasses
from collections.abc import Mapping

from decoding.errors import UserError
from decoding.models.folder import CARD, read_json
from jobs.paths import resolve
from training.config import DataConfig


def start_from(data: DataConfig, shares: Mapping[str, float]) -> DataConfig:
    """Return the settings with these initial shares; without any, with the configured ones."""
    domains = {
        name: dataclasses.replace(domain, share=shares.get(name, domain.share))
        for name, domain in data.domains.items()
    }
    return dataclasses.replace(data, domains=domains, shares_from="")


def with_initial_shares(data: DataConfig) -> DataConfig:
    """Return the settings with the final shares on the card in data.shares_from, if it is set.

    Raises UserError if the card has no shares, or shares of other domains.
    """
    if not data.shares_from:
        return data
    file = resolve(data.shares_from) / CARD
    shares = read_json(file).get("data", {}).get("shares")
    if not shares:
        raise UserError(
            f"{file} records no shares of domains, which data.shares_from reads. Name a folder "
            f"that distill.prune (mode=l0) or distill.train wrote with data.mixing=loss or "
            f"acceptance, or leave data.shares_from empty"
        )
    if shares.keys() != data.domains.keys():
        raise UserError(
            f"{file} records shares of {', '.join(shares)}, but data.domains are "
            f"{', '.join(data.domains)}. Use the same domains, or leave data.shares_from empty"
        )
    return start_from(data, shares)
