"""The HTML of a race: two panes, their figures, and what both texts have in common."""

from html import escape

from decoding.interfaces import EXACT, rounds_coarsely
from decoding.rounds.ties import TIE_GAP
from serving.web.race import PaneState, RaceState

IDLE, WAITING, RUNNING, FINISHED, STOPPED = "idle", "waiting", "running", "finished", "stopped"
# what the page says before a text has begun
BEFORE = {
    IDLE: "Type a prompt and run it.",
    WAITING: "Waiting: for the visitors before you, the prompt, or the first timing of a drafter.",
    STOPPED: "Stopped before the first round. Run it again.",
}
LEGEND = (
    '<p class="sd-legend"><span class="sd-accepted">drafted and accepted</span> '
    '<span class="sd-corrected">the target\'s, for a rejected draft</span> '
    "<span>the target's own</span></p>"
)
MOST_DEPTHS = 16  # bars


def empty_html(status: str) -> str:
    """Return empty panes, in a status of `BEFORE`.

    IDLE: before a visitor's first run. WAITING: before a run's first round. STOPPED: it had none.
    """
    return _race_html(RaceState(PaneState(), PaneState(), True), status, BEFORE[status])


def race_html(state: RaceState) -> str:
    """Return both panes with their figures."""
    return _race_html(state, status_of(state), verdict_of(state))


def _race_html(state: RaceState, status: str, verdict: str) -> str:
    plain, drafted = state.plain, state.drafted
    return (
        f'<div class="sd-race" data-status="{status}">'
        f"{_figures(state)}"
        f'<div class="sd-panes">{_pane("Target alone", "plain", plain)}'
        f"{_pane('Target and drafter', 'drafted', drafted)}</div>"
        f'{LEGEND}<p class="sd-verdict" role="status">{escape(verdict)}</p></div>'
    )


def status_of(state: RaceState) -> str:
    """Return whether a run is running, finished or stopped."""
    if state.stopped:
        return STOPPED
    return FINISHED if state.plain.done and state.drafted.done else RUNNING


def verdict_of(state: RaceState) -> str:
    """Return a sentence on what both texts have in common."""
    status, both = status_of(state), min(state.plain.tokens, state.drafted.tokens)
    stopped = "Stopped. " if status == STOPPED else ""
    if not state.compared:
        return f"{stopped}Two samples of one distribution: the texts may differ."
    if state.differs_at is not None:
        return stopped + _difference(state, state.differs_at)
    if status == FINISHED:
        return f"Both texts are equal: the same {both} tokens."
    return f"{stopped}Equal so far: {both} tokens." if both else stopped or "Reading the prompt."


def _difference(state: RaceState, at: int) -> str:
    """Return a sentence on two texts that differ; only a measured gap excuses them."""
    differ, gap = f"The texts differ from token {at + 1} on", state.gap
    if gap is None:
        return f"{differ}."
    if gap < TIE_GAP and state.dtype in EXACT:
        return f"{differ}, where the target's two best tokens nearly tie: {gap:.1e} apart."
    apart = f"where the target's two best tokens are {gap:.1e} apart"
    if rounds_coarsely(state.dtype, state.backend):
        return f"{differ}, {apart}. With {state.dtype}'s rounding, equality is not guaranteed."
    return f"{differ}, {apart}. This is a fault in decoding: please report it."


def _figures(state: RaceState) -> str:
    """Return speedup, block efficiency and acceptance, with a bar for every depth."""
    drafted = state.drafted
    speedup = state.speedup if drafted.tokens else 0.0
    tested, accepted = sum(drafted.tested_by_depth), sum(drafted.accepted_by_depth)
    cells = [
        ("speedup", f"{speedup:.2f}×" if speedup else "–"),
        ("block efficiency", f"{drafted.block_efficiency:.2f}" if drafted.rounds else "–"),
        ("acceptance", f"{accepted / tested:.0%}" if tested else "–"),
    ]
    shown = "".join(
        f'<div class="sd-figure"><b data-figure="{name}">{value}</b><span>{name}</span></div>'
        for name, value in cells
    )
    virtual = (
        '<p class="sd-note">Virtual clock: the drafted pane counts the longer of draft and '
        "verification, as on two machines.</p>"
        if state.virtual
        else ""
    )
    return f'<div class="sd-figures">{shown}{_depths(drafted)}</div>{virtual}'


def _depths(drafted: PaneState) -> str:
    """Return the acceptance rate at each depth as bars."""
    bars = "".join(
        f'<span class="sd-depth" title="depth {depth}: {accepted} of {tested} accepted">'
        f'<i><u style="height:{accepted / tested:.0%}"></u></i><b>{accepted / tested:.0%}</b>'
        f"<em>{depth}</em></span>"
        for depth, (accepted, tested) in enumerate(
            zip(drafted.accepted_by_depth, drafted.tested_by_depth, strict=True), 1
        )
        if depth <= MOST_DEPTHS
    )
    return (
        f'<div class="sd-figure sd-depths"><div>{bars or "–"}</div>'
        f"<span>acceptance by depth</span></div>"
    )


def _pane(title: str, kind: str, pane: PaneState) -> str:
    """Return one pane: its speed, its text with marks, and its counts."""
    words = "".join(
        f'<span class="sd-{word.mark}">{escape(word.text)}</span>' for word in pane.words
    )
    counts = (
        f"{pane.tokens} tokens, {pane.rounds} target forwards, {pane.seconds:.2f} s and "
        f"{pane.prefill_seconds:.2f} s for the prompt"
        if pane.rounds
        else "&nbsp;"
    )
    rate = f"{pane.tokens_per_second:,.0f} tokens/s" if pane.rounds else "–"
    return (
        f'<section class="sd-pane" data-pane="{kind}" data-done="{str(pane.done).lower()}">'
        f'<header><h3>{title}</h3><b data-figure="{kind} rate">{rate}</b></header>'
        f'<div class="sd-text" tabindex="0"><div>{words}</div></div>'
        f"<footer>{counts}</footer></section>"
    )
