"""The published formats: by which names of columns or keys each is known, and in which unit it counts time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emulator.core.traffic import TimeUnit, TraceFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A format: names of time, prompt and output, and the unit of time when none is asked for (None: dates).

    `prompt` and `output` have every spelling in use, the first being the usual one. Without `needs_time` a file may
    have lengths alone.
    """

    name: TraceFormat
    time: str
    prompt: tuple[str, ...]
    output: tuple[str, ...]
    unit: TimeUnit | None
    needs_time: bool = True

    @property
    def expects(self) -> str:
        """The format's names, as errors list them."""
        return ",".join((self.time, self.prompt[0], self.output[0]))


TABLES: tuple[Form, ...] = (
    # Azure/AzurePublicDataset: LLM inference traces of 2023 (7 digits, no zone), 2024 (+00:00), 2025 (NumImages)
    Form(
        name="azure",
        time="TIMESTAMP",
        prompt=("ContextTokens",),
        output=("GeneratedTokens",),
        unit=None,
    ),
    # HPMLL/BurstGPT 1 to 3, in seconds; a failed request has 0 response tokens
    Form(
        name="burstgpt",
        time="Timestamp",
        prompt=("Request tokens",),
        output=("Response tokens",),
        unit="s",
    ),
    # microsoft/vidur and microsoft/sarathi-serve; the latter's processed traces are lengths alone
    Form(
        name="vidur",
        time="arrived_at",
        prompt=("num_prefill_tokens",),
        output=("num_decode_tokens",),
        unit="s",
        needs_time=False,
    ),
    # Mutinifni/splitwise-sim
    Form(
        name="splitwise",
        time="arrival_timestamp",
        prompt=("prompt_size",),
        output=("token_size",),
        unit="s",
    ),
)

MOONCAKE = Form(  # kvcache-ai/Mooncake, and what AIPerf, SGLang and Dynamo make of it
    name="mooncake",
    time="timestamp",
    prompt=("input_length",),
    output=("output_length",),
    unit="ms",
    needs_time=False,
)
BAILIAN = Form(  # alibaba-edu/qwen-bailian-usagetraces-anon: Mooncake's keys with chat_id, in seconds
    name="bailian",
    time="timestamp",
    prompt=("input_length",),
    output=("output_length",),
    unit="s",
)
RAGPULSE = Form(  # flashserve/RAGPulse: Mooncake's keys, seconds as text, hash_ids an object; wraps around its week
    name="ragpulse",
    time="timestamp",
    prompt=("input_length",),
    output=("output_length",),
    unit="s",
)
AIBRIX = Form(  # vllm-project/aibrix: the requests of each instant in one line
    name="aibrix",
    time="timestamp",
    prompt=("prompt_length", "Prompt Length"),
    output=("output_length", "Output Length"),
    unit="ms",
)
JSON_LINES: tuple[Form, ...] = (MOONCAKE, BAILIAN, RAGPULSE, AIBRIX)


def known(forms: Sequence[Form] = (*TABLES, *JSON_LINES)) -> str:
    """The formats and their names, for errors."""
    return "; ".join(f"{form.name}: {form.expects}" for form in forms)
