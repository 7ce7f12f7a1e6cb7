"""Our chat templates with generation marks, which replace templates that hide the answers.

Each is the published format of its family; golden renders are in the tests. `{% generation %}`
encloses exactly what the model writes: the answer with its end token, and the blank before it if
the prompt ends without one. Only the first turn may be a system turn.
"""

import re

_UNKNOWN = (
    "{% else %}{{ raise_exception('role ' + message['role'] + ' is unknown to this template "
    "or in the wrong place (system comes first)') }}{% endif %}"
)

# FastChat `vicuna_v1.1`: SeparatorStyle.ADD_COLON_TWO with the separators " " and "</s>".
VICUNA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}"
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.{% endif "
    "%}{{ ' ' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and loop.first %}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT:' }}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    + _UNKNOWN
    + "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# Meta `llama/generation.py`: every exchange has its own BOS; the system prompt is inside the first
# user turn.
LLAMA_2 = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else none %}"
    "{% set first_user = 0 if system is none else 1 %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and loop.first %}"
    "{% elif message['role'] == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if system is not none and loop.index0 == first_user %}{{ '<<SYS>>\n' + system + "
    "'\n<</SYS>>\n\n' }}{% endif %}"
    "{{ message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endgeneration %}"
    + _UNKNOWN
    + "{% endfor %}"
)

# Meta `llama_models/llama3`: ChatFormat.
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' or (message['role'] == 'system' and loop.first) %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | "
    "trim + '<|eot_id|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    + _UNKNOWN
    + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
    "endif %}"
)

# ChatML as Qwen writes it, without a default system prompt (Qwen3); the newline after <|im_end|> is
# never generated.
QWEN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' or (message['role'] == 'system' and loop.first) %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    + _UNKNOWN
    + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Mistral 7B Instruct v0.3; the system prompt is before the first user turn, so that later turns do
# not move it.
MISTRAL = (
    "{% set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% set first_user = 1 if system else 0 %}"
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' and loop.first %}"
    "{% elif message['role'] == 'user' %}"
    "{{ '[INST] ' + (system if loop.index0 == first_user else '') + message['content'] + '[/INST]' "
    "}}"
    "{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    + _UNKNOWN
    + "{% endfor %}"
)

TEMPLATES = {
    "vicuna": VICUNA,
    "llama2": LLAMA_2,
    "llama3": LLAMA_3,
    "qwen": QWEN,
    "mistral": MISTRAL,
}

# values of `render`: the form in which a target receives prompts (`chat.choose_rendering`)
RENDERINGS = ("auto", "chat", "text")

# Markers of a family in its own template; the first match counts.
_MARKERS = (
    ("llama3", r"<\|start_header_id\|>"),
    ("qwen", r"<\|im_start\|>"),
    ("llama2", r"<<SYS>>"),
    ("mistral", r"\[INST\]"),
    ("vicuna", r"USER:(.|\n)*ASSISTANT:"),
)


def find_family(chat_template: str) -> str | None:
    """Return the name of our template for the family of `chat_template`, or None."""
    return next((name for name, marker in _MARKERS if re.search(marker, chat_template)), None)
