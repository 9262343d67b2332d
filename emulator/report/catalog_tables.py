"""The catalog as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from emulator.core.cost import kv_bytes
from emulator.core.hardware import Gpu, Model
from emulator.core.pacing import payload_bits_per_s

_KV_RATES_BPS = (1e9, 10e9, 100e9, 400e9)


def models(known: Iterable[Model]) -> Table:
    """One row a model."""
    table = Table(title="Models", title_justify="left", box=None)
    table.add_column("model")
    for heading in ("params (B)", "layers", "heads", "KV heads", "context", "KV kB/token"):
        table.add_column(heading, justify="right")
    for m in known:
        kv = f"{m.kv_bytes_per_token() / 1e3:.1f}"
        table.add_row(
            m.name, f"{m.params_b:g}", str(m.layers), str(m.heads), str(m.kv_heads), f"{m.context_tokens:,}", kv
        )
    return table


def gpus(known: Iterable[Gpu]) -> Table:
    """One row a GPU."""
    table = Table(title="GPUs", title_justify="left", box=None)
    table.add_column("GPU")
    for heading in ("bf16 TFLOP/s", "fp8", "memory GB", "GB/s", "link GB/s", "TDP W", "USD/h", "roofline"):
        table.add_column(heading, justify="right")
    for g in known:
        roofline = "-" if g.mfu_linear is None or g.mbu is None else f"MFU {g.mfu_linear:g}, MBU {g.mbu:g}"
        price = "-" if g.price_usd_per_h is None else f"{g.price_usd_per_h:.2f}"
        table.add_row(
            g.name,
            f"{g.bf16_dense_tflops:g}",
            "-" if g.fp8_dense_tflops is None else f"{g.fp8_dense_tflops:g}",
            f"{g.memory_gb:g}",
            f"{g.memory_gb_per_s:g}",
            f"{g.link_gb_per_s_per_direction:g}",
            f"{g.tdp_w:g}",
            price,
            roofline,
        )
    return table


def kv_size(model: Model, tokens: int, element_bytes: int) -> Group:
    """The KV of one prompt at so many bytes an element, and the time that some links take for it."""
    size = kv_bytes(model, tokens, element_bytes)
    head = Text(
        f"{model.name}, {tokens:,} tokens: {size:,} bytes of KV ({size / 1e6:,.1f} MB, {size / 2**20:,.1f} MiB)"
    )
    table = Table(box=None)
    table.add_column("link")
    table.add_column("transfer", justify="right")
    for rate in _KV_RATES_BPS:
        seconds = size * 8 / payload_bits_per_s(rate, "line")
        table.add_row(f"{rate / 1e9:g} Gbps", f"{seconds * 1e3:,.2f} ms")
    return Group(head, table)
