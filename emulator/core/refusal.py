"""Which requests a node can never serve, and why."""

from __future__ import annotations

from emulator.core.messages import Generate, Prefill, Reserve
from emulator.core.run_spec import NodeSpec


def refusal(node: NodeSpec, message: Generate | Prefill | Reserve) -> str:
    """Why `node` can never serve this request; empty when it can."""
    prompt, output = message.prompt_tokens, message.max_tokens
    held = node.tokens_held(prompt, output, hands_over=isinstance(message, Prefill))
    room = node.kv_blocks * node.block_size
    if prompt < 1 or output < 1:
        problem = ": both must be at least 1"
    elif prompt < node.min_prompt_tokens:
        problem = f": the node's step times were measured from {node.min_prompt_tokens} prompt tokens on"
    elif prompt + output > node.max_model_len:
        problem = f" exceed the context of {node.max_model_len} tokens"
    elif held > room:
        problem = f" need KV for {held} tokens, {node.name} has room for {room}"
    else:
        return ""
    return f"prompt of {prompt} and {output} output tokens{problem}"
