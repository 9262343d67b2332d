"""Which requests a node, or a whole cluster, can never serve, and why."""

from __future__ import annotations

from emulator.core.messages import Generate, Prefill, Reserve
from emulator.core.roles import sends_kv, takes_in_kv
from emulator.core.run_spec import NodeSpec, RunSpec


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


def run_refusal(run: RunSpec, prompt_tokens: int, max_tokens: int) -> str:
    """Why no node and no two nodes of a run can ever serve such a request, as the roomiest say; empty when some can."""
    alone = Generate("", prompt_tokens, max_tokens)
    prefill, reserve = Prefill("", prompt_tokens, max_tokens), Reserve("", prompt_tokens, max_tokens)
    known = {node.name: node for node in run.nodes}
    ways: list[list[tuple[NodeSpec, Generate | Prefill | Reserve]]] = [
        [(node, alone)] for node in _serving_alone(run, max_tokens)
    ]
    ways += [[(known[source], prefill), (known[destination], reserve)] for source, destination in run.kv_pairs]
    ways.sort(key=lambda way: -min(node.kv_blocks * node.block_size for node, _ in way))
    refusals = [next(filter(None, [refusal(node, message) for node, message in way]), "") for way in ways]
    return refusals[0] if refusals and all(refusals) else ""


def _serving_alone(run: RunSpec, max_tokens: int) -> list[NodeSpec]:
    """Nodes that the router may ask to serve a request all by themselves."""
    router = run.router
    if not router.disaggregated:
        return list(run.nodes)
    switching = router.role_switching is not None
    decodes = switching or router.conditional is not None or any(node.role == "mixed" for node in run.nodes)
    prefills = router.first_token == "prefill" and max_tokens == 1
    return [
        node
        for node in run.nodes
        if (decodes and takes_in_kv(node.role, switching=switching))
        or (prefills and sends_kv(node.role, switching=switching))
    ]
