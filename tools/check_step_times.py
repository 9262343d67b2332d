"""Compare the roofline cost model with measured step times.

    python tools/check_step_times.py step_sweep_prefill.csv step_sweep_decode.csv step_times.csv

Each csv holds single steps: a prefill sweep has columns model, system, tp, bs, isl, prefill_ms (bs prompts of isl
tokens in one step), a decode sweep model, system, tp, bs, ctx, decode_step_ms, a list of step times gpu, model, tp,
phase, batch, tokens, ms, kind, source. Errors are modelled/measured - 1 in percent; `mean` and `median` are of the
absolute error, `bias` is the mean with its sign.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from emulator.core.cost import Chunk, RooflineCost, StepShape, cost_model
from emulator.core.hardware import Catalog, Gpu, Model
from emulator.lab.catalog_files import load_catalog

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Measured(NamedTuple):
    """One measured step; `batch` prompts of `tokens` each, or decodes at `tokens` context."""

    gpu: Gpu
    model: Model
    tp: int
    phase: str
    batch: int
    tokens: int
    ms: float
    kind: str

    @property
    def size(self) -> int:
        """Prompt tokens of the step, or its batch."""
        return self.batch * self.tokens if self.phase == "prefill" else self.batch

    @property
    def shape(self) -> StepShape:
        """The step as the cost model sees it."""
        if self.phase == "prefill":
            return StepShape((Chunk(self.tokens, 0),) * self.batch, 0, 0)
        return StepShape((), self.batch, self.batch * self.tokens)


def read(path: Path, catalog: Catalog) -> Iterator[Measured]:
    """Read the steps of one csv whose GPU and model the catalog knows; others are named and left out."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gpu = _gpu(catalog, row.get("gpu") or row["system"])
            model = next(
                (m for m in catalog.models if m.name == row["model"].split("/")[-1].removeprefix("Meta-")), None
            )
            phase = row.get("phase") or ("prefill" if "prefill_ms" in row else "decode")
            tokens = row.get("tokens") or row.get("isl") or row.get("ctx") or "?"
            if gpu is None or model is None or not tokens.isdigit():
                print(f"left out: {', '.join(row.values())}")
                continue
            ms = float(row.get("ms") or row.get("prefill_ms") or row["decode_step_ms"])
            batch = int(row.get("batch") or row["bs"])
            yield Measured(gpu, model, int(row["tp"]), phase, batch, int(tokens), ms, row.get("kind", "kernel-sum"))


def _gpu(catalog: Catalog, text: str) -> Gpu | None:
    """`a100_sxm` and `A100` are the catalog's a100-80g; another size of memory is not."""
    name = text.lower().removesuffix("_sxm")
    return next((g for g in catalog.gpus if name in (g.name, g.name.removesuffix("-80g"))), None)


def error_percent(step: Measured) -> float:
    """Modelled over measured, less 1, in percent."""
    cost = cost_model(cost="roofline", model=step.model, gpu=step.gpu, tp=step.tp)
    assert isinstance(cost, RooflineCost)
    return 100 * (cost.step_s(step.shape) * 1e3 / step.ms - 1)


def table(title: str, steps: Iterable[Measured], key: Callable[[Measured], str]) -> None:
    """Print one line of errors per group."""
    groups: dict[str, list[float]] = {}
    for step in steps:
        groups.setdefault(key(step), []).append(error_percent(step))
    print(f"\n{title}\n{'':44}{'n':>5}{'median':>9}{'mean':>8}{'worst':>8}{'bias':>8}")
    for name, errors in groups.items():
        sizes = [abs(e) for e in errors]
        worst = max(errors, key=abs)
        print(
            f"{name:44}{len(errors):>5}{statistics.median(sizes):>8.1f}%{statistics.mean(sizes):>7.1f}%"
            f"{worst:>+7.1f}%{statistics.mean(errors):>+7.1f}%"
        )


def main() -> None:
    """Print error tables for the csv files given."""
    parser = argparse.ArgumentParser(description="Compare the roofline cost model with measured step times.")
    parser.add_argument("csv", nargs="+", type=Path)
    catalog = load_catalog()
    for path in parser.parse_args().csv:
        print(f"== {path.name}")
        steps = list(read(path, catalog))
        if any(step.kind != "kernel-sum" for step in steps):
            for step in steps:
                what = f"{step.gpu.name:10}{step.model.name:14} tp {step.tp}  {step.phase:8}"
                what += f"{step.batch:>4} x {step.tokens:<6}{step.ms:>8.1f} ms {step.kind:11}"
                print(f"{what}{error_percent(step):>+7.1f}%")
            table("by kind", steps, lambda s: f"{s.kind} {s.gpu.name} {s.phase}")
            continue
        inside = [s for s in steps if s.phase == "decode" or SIZES[0] <= s.size <= 8192]
        span = "prefill of 128 to 8,192 tokens a step" if steps[0].phase == "prefill" else "decode"
        table(f"by GPU ({span})", inside, lambda s: f"{s.gpu.name} {s.phase}")
        table("by GPU, model and tp", inside, lambda s: f"{s.gpu.name} {s.phase} {s.model.name} tp {s.tp}")
        ordered = sorted(steps, key=lambda s: (s.gpu.name, s.size))
        table("by size (tokens or batch)", ordered, lambda s: f"{s.gpu.name} {s.phase} {s.size}")


if __name__ == "__main__":
    main()
