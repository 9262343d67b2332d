"""Peaks: how fast a GPU computes and reads, against every profile that was measured on one."""

from __future__ import annotations

from emulator.core.cost import Chunk, FittedCost, StepShape
from emulator.core.physics_steps import linear_params
from emulator.lab.catalog_files import load_catalog

MADE_UP = {"article-70b"}
"""Profiles made from an article's statements: they need not be possible, and short prompts under this one are not."""


def test_every_profile_of_the_catalog_that_was_measured_is_below_its_gpus_peak() -> None:
    catalog = load_catalog()
    gpus, models = {gpu.name: gpu for gpu in catalog.gpus}, {model.name: model for model in catalog.models}
    beyond = set()
    for profile in catalog.profiles:
        cost, gpu, model = FittedCost(profile=profile), gpus[profile.gpu], models[profile.model]
        linear = 2 * linear_params(model)
        prefill_s = [(n, cost.step_s(StepShape((Chunk(n, 0),), 0, 0))) for n in (64, 256, 1024, 2048)]
        decode_s = [(n, cost.step_s(StepShape((), n, n))) for n in (1, 16, 64, 256)]
        flops_per_s = max(linear * n / seconds for n, seconds in (*prefill_s, *decode_s))
        bytes_per_s = max(linear / seconds for _, seconds in (*prefill_s, *decode_s))
        if flops_per_s > gpu.bf16_dense_tflops * 1e12 * profile.tp:
            beyond.add(profile.name)
        if bytes_per_s > gpu.memory_gb_per_s * 1e9 * profile.tp:
            beyond.add(profile.name)
    assert beyond <= MADE_UP
