"""The page in Gradio: its controls, and what they call."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI

from decoding.errors import UserError
from decoding.values import check_choice
from serving.web.config import WebConfig
from serving.web.demo import HOTTEST, Ask, Demo
from serving.web.limits import Limits
from serving.web.models import SCHEDULES
from serving.web.page import IDLE, STOPPED, WAITING, empty_html, race_html
from serving.web.visits import Visits

STYLE = Path(__file__).with_name("page.css").read_text()
PROMPT = "Type a prompt"
DEFAULT_TOKENS = 128


def make_app(demo: Demo, cfg: WebConfig) -> FastAPI:
    """Return the web application of a page. Nothing on it comes from another server."""
    page = make_page(demo, cfg, Visits())
    page.queue(max_size=cfg.max_waiting, default_concurrency_limit=1, api_open=False)
    app = FastAPI(openapi_url=None)
    app.add_middleware(Limits, inputs={key: len(one.inputs) for key, one in page.fns.items()})
    return gr.mount_gradio_app(
        app,
        page,
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        theme=gr.themes.Default(primary_hue="teal"),
        css=STYLE,
    )


def make_page(demo: Demo, cfg: WebConfig, visits: Visits) -> gr.Blocks:
    """Return the page: a prompt, the choices, both panes."""
    calls = Calls(demo, visits)
    with gr.Blocks(title="Shallow Draft", analytics_enabled=False, fill_width=True) as page:
        gr.Markdown(f"## Shallow Draft\n{demo.models.about}")
        chosen = _add_choices(demo, cfg)
        prompt, drafter, schedule, *_ = chosen
        with gr.Row():
            run_button = gr.Button("Run", variant="primary")
            stop_button = gr.Button("Stop", variant="stop")
        panes = gr.HTML(empty_html(IDLE))
        # sent with each run; a gr.State would be read only when the run has its turn
        number = gr.Number(0, visible=False)

        apart: dict[str, Any] = {"queue": False, "show_progress": "hidden"}
        # values as they were sent: `Demo.check` names what is wrong with them, Gradio would not
        apart |= {"api_visibility": "private", "preprocess": False}
        drafter.change(calls.offer, drafter, schedule, **apart)
        # in the queue, whose errors are shown, but without waiting for the runs in it
        at_once: dict[str, Any] = {**apart, "queue": True, "concurrency_limit": None}
        pressed = [run_button.click, prompt.submit]
        begun = gr.on(pressed, calls.begin, chosen, [number, panes], **at_once)
        # by default Gradio ignores a run that is begun while another one waits or decodes
        alone: dict[str, Any] = {"concurrency_limit": 1, "trigger_mode": "multiple"}
        alone |= {"api_visibility": "private", "preprocess": False}
        begun.success(calls.run, [number, *chosen], panes, **alone)
        stop_button.click(calls.stop, None, None, **apart)
        page.unload(calls.leave)
    return page


class Calls:
    """What the controls of the page call, for the session of a request."""

    def __init__(self, demo: Demo, visits: Visits) -> None:
        self.demo, self.visits = demo, visits

    def begin(self, request: gr.Request, *chosen: Any) -> tuple[int, str]:
        """Check a visitor's choices; return the number and panes of the run that they begin."""
        with shown_errors():
            self.demo.check(ask_of(*chosen))  # now, not after the visitors before
        return self.visits.begin(str(request.session_hash)), empty_html(WAITING)

    def run(self, request: gr.Request, number: Any, *chosen: Any) -> Iterator[str]:
        """Yield the panes of a run, until its visitor begins another, which has the same panes.

        Nothing is decoded if it was stopped before its turn.
        """
        session, panes = str(request.session_hash), ""
        stop = self.visits.stop_of(session, number)
        try:
            with shown_errors():
                for state in self.demo.answer(ask_of(*chosen), stop):
                    panes = race_html(state)
                    if not self.visits.has_another(session, number):
                        yield panes
            if not panes and not self.visits.has_another(session, number):
                yield empty_html(STOPPED)
        finally:
            stop.set()
            self.visits.end(session, number)

    def offer(self, name: Any) -> gr.Dropdown:
        """Return the schedules that fit a drafter."""
        with shown_errors():
            check_choice("drafter", name, list(self.demo.models.choices))
        fitting = _offered(self.demo, name)
        return gr.Dropdown(fitting, value=fitting[0][1])

    def stop(self, request: gr.Request) -> None:
        """Stop the session's run."""
        self.visits.stop(str(request.session_hash))

    def leave(self, request: gr.Request) -> None:
        """Stop the run of a visitor who has left."""
        self.visits.leave(str(request.session_hash))


def _add_choices(demo: Demo, cfg: WebConfig) -> list[Any]:
    """Add the prompt and the choices to the page, and return them in the order of `Ask`."""
    choices, longest = list(demo.models.choices), cfg.max_new_tokens
    fitting = _offered(demo, choices[0])
    prompt = gr.Textbox(
        label="Prompt",
        placeholder=PROMPT,
        lines=2,
        max_lines=8,
        max_length=cfg.max_prompt_characters,
        autofocus=True,
    )
    with gr.Row():
        drafter = gr.Dropdown(choices, value=choices[0], label="Drafter", min_width=170)
        schedule = gr.Dropdown(fitting, value=fitting[0][1], label="Schedule", min_width=230)
        temperature = gr.Slider(0, HOTTEST, 0, step=0.1, label="Temperature", min_width=215)
        shown = min(DEFAULT_TOKENS, longest)
        tokens = gr.Slider(1, longest, shown, step=1, label="Tokens", min_width=215)
        seed = gr.Number(cfg.seed, label="Seed", precision=0, minimum=0, min_width=90)
    return [prompt, drafter, schedule, temperature, tokens, seed]


@contextmanager
def shown_errors() -> Iterator[None]:
    """Show the visitor the words of a UserError."""
    try:
        yield
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from None


def _offered(demo: Demo, drafter: str) -> list[tuple[str, str]]:
    """Return the words and the name of every schedule that fits a drafter."""
    fitting = demo.models.choices[drafter].schedules
    return [(SCHEDULES[name], name) for name in fitting]


def ask_of(
    prompt: str, drafter: str, schedule: str, temperature: float, tokens: float, seed: float
) -> Ask:
    """Return the choices that Gradio sent, with whole floats as ints; others fail the checks."""
    counts = [
        int(value) if isinstance(value, float) and value.is_integer() else value
        for value in (tokens, seed)
    ]
    return Ask(prompt, drafter, schedule, temperature, *counts)  # type: ignore[arg-type]
