"""JSON lines between this project and an engine's program. Imports only the standard library.

The program gets one line with its configuration, answers {"ready": ...}, and then answers every
line with a batch by a line with its result. A failure is a line {"error": text}. Whatever the
engine itself prints goes to stderr.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

# Takes the prompts (lists of token ids) and the sampling, returns the fields of a BatchResult.
Decode = Callable[[list[list[int]], dict[str, Any]], dict[str, Any]]


def serve(start: Callable[[dict[str, Any]], tuple[str, Decode]]) -> None:
    """Start an engine and decode batches until the input ends.

    start: takes the fields of an EngineConfig, and returns the engine's version and its decoder.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the replies

    def reply(values: dict[str, Any]) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    try:
        version, decode = start(json.loads(sys.stdin.readline()))
        reply({"ready": version})
        for line in sys.stdin:
            batch = json.loads(line)
            reply(decode(batch["prompts"], batch["sampling"]))
    except Exception as error:
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
