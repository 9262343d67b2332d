"""Cost models by what they are of, and errors of them: what comparisons of step times share."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from emulator.core.cost import CostModel, RooflineCost, cost_model
from emulator.core.hardware import (
    FP16_BYTES,
    Catalog,
    CostName,
    FittedProfile,
    Gpu,
    Model,
    StepTable,
    WeightsDtype,
)
from emulator.report.step_errors import Errors


class Models:
    """Cost models by what they are of, each built once."""

    def __init__(self, catalog: Catalog) -> None:
        self._models: dict[str, Model] = {model.name: model for model in catalog.models}
        self._gpus: dict[str, Gpu] = {gpu.name: gpu for gpu in catalog.gpus}
        self._catalog = catalog
        self._rooflines: dict[tuple[str, str, int, WeightsDtype, int], RooflineCost] = {}

    def missing(self, model: str, gpu: str) -> str:
        """What the catalog lacks for a roofline, or nothing."""
        if gpu not in self._gpus:
            return f"{gpu} is not in the catalog"
        if model not in self._models:
            return f"{model} is not in the catalog"
        return "" if self._gpus[gpu].mfu_linear is not None else f"{gpu} has no measured efficiencies"

    def roofline(
        self, model: str, gpu: str, tp: int, weights: WeightsDtype = "fp16", kv_bytes: int = FP16_BYTES
    ) -> RooflineCost:
        """The roofline of a model that is not missing."""
        key = model, gpu, tp, weights, kv_bytes
        if key not in self._rooflines:
            cost = cost_model(
                cost="roofline",
                model=self._models[model],
                gpu=self._gpus[gpu],
                tp=tp,
                weights=weights,
                kv_element_bytes=kv_bytes,
            )
            assert isinstance(cost, RooflineCost)
            self._rooflines[key] = cost
        return self._rooflines[key]

    def profiles(self, model: str, gpu: str, tp: int, begins: str) -> Iterator[tuple[str, CostModel]]:
        """Profiles and tables from a source, by the beginning of their names."""
        of = model, gpu, tp

        def cost(name: CostName, profile: FittedProfile | StepTable) -> CostModel:
            return cost_model(cost=name, model=self._models[model], gpu=self._gpus[gpu], tp=tp, profile=profile)

        for profile in self._catalog.profiles:
            if begins and profile.name.startswith(begins) and (profile.model, profile.gpu, profile.tp) == of:
                yield profile.name, cost("fitted", profile)
        for table in self._catalog.tables:
            if begins and table.name.startswith(begins) and (table.model, table.gpu, table.tp) == of:
                yield table.name, cost("table", table)


def errors(
    name: str,
    model: str,
    found: Sequence[float],
    *,
    in_sample: bool,
    bounds: tuple[float | None, float | None] = (None, None),
) -> Errors:
    """Median, mean and worst of some errors, held against bounds for the median and the worst."""
    sizes = [abs(error) for error in found]
    median = statistics.median(sizes) if sizes else None
    worst = max(found, key=abs) if found else None
    checks = []
    if bounds[0] is not None and median is not None:
        checks.append(median <= bounds[0])
    if bounds[1] is not None and worst is not None:
        checks.append(abs(worst) <= bounds[1])
    return Errors(
        name=name,
        model=model,
        n=len(found),
        in_sample=in_sample,
        median=median,
        mean=statistics.fmean(sizes) if sizes else None,
        worst=worst,
        median_within=bounds[0],
        worst_within=bounds[1],
        within=all(checks) if checks else None,
    )
