"""The one chat template: every message as `role: content` on a line, then the assistant's turn."""

from __future__ import annotations

from collections.abc import Iterable

TURN = "assistant:"
JINJA = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""The same for Hugging Face's tokenizers."""


def prompt_of(messages: Iterable[tuple[str, str]]) -> str:
    """The prompt of (role, content) pairs."""
    return "".join(f"{role}: {content}\n" for role, content in messages) + TURN
