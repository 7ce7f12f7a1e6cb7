"""Requests to an OpenAI-compatible server, and its replies, in the fields of the protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding.errors import UserError
from decoding.sampling import noise
from decoding.values import is_int
from distill.config import RegenerateConfig
from distill.regenerate.generate import Request

PATHS = {"tokens": "/completions", "messages": "/chat/completions"}  # by server_prompts
# Fields that OpenAI's own API lacks.
EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "return_token_ids")


@dataclass(frozen=True)
class Reply:
    """An answer as the server describes it."""

    text: str
    # stop | length, or another reason, for which the answer is not used
    finish: str
    # generated tokens, with or without the stop token; None if the server does not return them
    tokens: list[int] | None
    # number of tokens of the prompt; None if the server does not count them
    prompt_tokens: int | None
    # number of them that were in the server's cache
    cached_tokens: int
    # number of generated tokens; None if the server does not count them
    completion_tokens: int | None


def read_reply(content: Any) -> Reply:
    """Return the first choice of an answer to either kind of request.

    Raises ValueError, KeyError, TypeError or AttributeError for malformed content.
    """
    choice, usage = content["choices"][0], content.get("usage") or {}
    text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
    finish, tokens = choice["finish_reason"], choice.get("token_ids")
    prompt_tokens, completion_tokens = (
        usage.get(f"{part}_tokens") for part in ("prompt", "completion")
    )
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not isinstance(text, str) or not isinstance(finish, str):
        raise ValueError(f"expected a text and a finish_reason, found {str(choice)[:80]}")
    if tokens is not None and not all(is_int(one) and 0 <= one < 2**31 for one in tokens):
        raise ValueError(f"expected token ids, found {str(tokens)[:80]}")
    counted = [count for count in (cached, prompt_tokens, completion_tokens) if count is not None]
    if not all(map(is_int, counted)):
        raise ValueError(f"expected numbers of tokens, found {str(usage)[:80]}")
    return Reply(text, finish, tokens, prompt_tokens, cached, completion_tokens)


class Exchange:
    """Requests for the target's answers, and the tokens and texts of their replies.

    stop_tokens: end-of-text ids of the target.
    """

    def __init__(
        self, config: RegenerateConfig, tokenizer: Any, stop_tokens: Sequence[int]
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.stop_tokens = list(stop_tokens)
        self.path = PATHS[config.server_prompts]

    def body(self, request: Request, model: str, max_new_tokens: int) -> dict[str, Any]:
        """Return the fields of a request.

        All sampling settings are sent, because servers have other defaults: vLLM those of
        generation_config.json, llama.cpp a top_k of 40.
        """
        config = self.config
        by_tokens = config.server_prompts == "tokens"
        fields = {
            "model": model,
            **({"prompt": request.ids} if by_tokens else {"messages": request.messages}),
            "max_tokens": max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": noise.key(config.seed, *request.key) >> 33,  # 31 bits, for every server
        }
        if not config.server_extensions:
            return fields
        values = (config.top_k or -1, config.min_p, 1.0, self.stop_tokens, True)
        return fields | dict(zip(EXTENSIONS, values, strict=True))

    def tokens(self, reply: Reply) -> list[int]:
        """Return the generated tokens of a reply, which end in a stop token if it stopped.

        Without token ids the text is tokenized again.
        """
        tokens = reply.tokens
        if tokens is None:
            tokens = list(self.tokenizer(reply.text, add_special_tokens=False)["input_ids"])
        if reply.finish == "stop" and (not tokens or tokens[-1] not in self.stop_tokens):
            return [*tokens, self.stop_tokens[0]]
        return tokens

    def text(self, reply: Reply, tokens: Sequence[int]) -> str:
        """Return the text of a reply, decoded from its tokens as in a local run.

        Raises UserError if the server decodes the tokens to another text.
        """
        text = reply.text
        if reply.tokens is not None:
            body = tokens[:-1] if reply.finish == "stop" else tokens
            text = str(self.tokenizer.decode(list(body), skip_special_tokens=True))
            self._refuse_other_text(reply.text, text)
        return text if reply.finish == "stop" else text.rstrip("\ufffd")  # an incomplete character

    def check_prompt(self, reply: Reply, request: Request) -> None:
        """Raise UserError if the server read another number of tokens than the target's prompt."""
        if reply.prompt_tokens is None or reply.prompt_tokens == len(request.ids):
            return
        remedy = "Start it so that it adds no tokens to a prompt"
        if self.config.server_prompts == "messages":
            remedy = (
                f"Start it with the chat template of {self.config.target.path}, or set "
                f"server_prompts=tokens"
            )
        raise UserError(
            f"{self.config.server} read a prompt of {reply.prompt_tokens} tokens, expected the "
            f"{len(request.ids)} of the target's own chat template (chat {request.key[0]}). "
            f"{remedy}"
        )

    def _refuse_other_text(self, theirs: str, ours: str) -> None:
        """Raise UserError if the server decodes tokens to another text than the target does.

        Only the characters that are not white space are compared, up to the end of the shorter
        text: servers treat special tokens and incomplete characters in their own ways, and leave
        out the thoughts of a chat.
        """
        if self.config.server_prompts == "messages":
            return
        one, other = ("".join(text.rstrip("\ufffd").split()) for text in (theirs, ours))
        if not (one.startswith(other) or other.startswith(one)):
            raise UserError(
                f"{self.config.server} returned the text {theirs[:40]!r} for tokens that the "
                f"tokenizer of {self.config.target.path} decodes to {ours[:40]!r}. Serve the model "
                f"of target.path there"
            )
