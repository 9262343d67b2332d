"""The shipped catalog: complete, consistent with published figures, and strict about what is added to it."""

from __future__ import annotations

import msgspec
import pytest

from emulator.core.catalog import extend, find_gpu, find_model, find_profile, parse_catalog
from emulator.core.errors import ConfigError
from emulator.core.hardware import Catalog
from emulator.lab.catalog_files import load_catalog

CATALOG = load_catalog()

KV_BYTES_PER_TOKEN = {
    "Llama-2-7B": 524288,
    "Llama-2-13B": 819200,
    "Llama-2-70B": 327680,
    "Llama-3.1-8B": 131072,
    "Llama-3.1-70B": 327680,
    "Llama-3.1-405B": 516096,
    "OPT-13B": 819200,
    "OPT-30B": 1376256,
    "OPT-66B": 2359296,
    "OPT-175B": 4718592,
    "Qwen2.5-7B": 57344,
    "Qwen2.5-32B": 262144,
    "Qwen2.5-72B": 327680,
    "Mistral-7B": 131072,
    "Mixtral-8x7B": 131072,
    "DeepSeek-V3": 70272,
}
"""At 2 bytes per element, from each model's config.json (OPT-30B, OPT-175B, Mistral-7B: their papers)."""


def test_every_published_model_has_its_kv_bytes_per_token() -> None:
    assert {model.name: model.kv_bytes_per_token() for model in CATALOG.models} == KV_BYTES_PER_TOKEN


def test_dense_models_have_as_many_parameters_as_their_shapes_say() -> None:
    """Matrices and embeddings alone; norms, biases and OPT's positions are what is left, under 1 %."""
    tied = ("OPT",)
    for model in CATALOG.models:
        if model.moe is not None:
            continue
        attention = model.hidden * (2 * model.heads + 2 * model.kv_heads) * model.head_dim
        mlp = (3 if model.gated_mlp else 2) * model.hidden * model.intermediate
        embeddings = (1 if model.name.startswith(tied) else 2) * model.vocab * model.hidden
        assert model.layers * (attention + mlp) + embeddings == pytest.approx(model.params_b * 1e9, rel=0.01)


def test_the_experts_of_a_mixture_have_as_many_parameters_as_their_shapes_say() -> None:
    for name, moe_layers in (("Mixtral-8x7B", 32), ("DeepSeek-V3", 58)):
        model = find_model(CATALOG, name)
        assert model.moe is not None
        one = 3 * model.hidden * model.moe.expert_intermediate * moe_layers
        unused = model.moe.experts - model.moe.experts_per_token
        assert one * unused == pytest.approx((model.params_b - model.active_params_b) * 1e9, rel=0.01)


def test_batch_limits_follow_memory_as_vllm_sets_them() -> None:
    limits = {gpu.name: (gpu.max_num_batched_tokens, gpu.max_num_seqs) for gpu in CATALOG.gpus}
    assert limits["h100"] == limits["h200"] == (8192, 1024)
    for gpu in CATALOG.gpus:
        if gpu.memory_gb >= 160:
            assert limits[gpu.name] == (16384, 1024)
        elif gpu.name not in ("h100", "h200"):
            assert limits[gpu.name] == (2048, 256)


def test_efficiencies_are_there_only_where_they_were_measured() -> None:
    measured = {gpu.name for gpu in CATALOG.gpus if gpu.mfu_linear is not None}
    assert measured == {"a100-80g", "h100", "h200", "l40s", "b200"}
    for gpu in CATALOG.gpus:
        assert (gpu.efficiency_source is not None) == (gpu.name in measured)


def test_every_profile_is_for_a_known_model_and_gpu() -> None:
    assert len(CATALOG.profiles) == 14 + 9 + 4 + 1
    of = [(profile.model, profile.gpu) for profile in CATALOG.profiles]
    of += [(table.model, table.gpu) for table in CATALOG.tables]
    for model, gpu in of:
        assert find_model(CATALOG, model).name == model
        assert find_gpu(CATALOG, gpu).name == gpu


GPU_FIGURES = {
    "a100-80g": (312, None, 80, 2039, 300, 400, 1.30),
    "h100": (989, 1978, 80, 3350, 450, 700, 2.95),
    "h200": (989, 1978, 141, 4800, 450, 700, 4.00),
    "l40s": (362, 733, 48, 864, 32, 350, 1.86),
    "a10g": (70, None, 24, 600, 32, 300, 1.006),
    "l4": (121, 242, 24, 300, 32, 72, 0.60),
    "rtx4090": (165, 330, 24, 1008, 32, 450, 0.45),
    "mi300x": (1307, 2615, 192, 5300, 448, 750, 1.80),
    "b200": (2250, 4500, 180, 8000, 900, 1000, 5.00),
    "gb200": (2500, 5000, 186, 8000, 900, 1200, None),
}
"""bf16 and fp8 dense TFLOP/s, memory GB, GB/s, link GB/s, TDP W from vendors' datasheets; a typical USD/h of 2026."""


def test_every_gpu_has_the_figures_of_its_datasheet() -> None:
    assert {
        g.name: (
            g.bf16_dense_tflops,
            g.fp8_dense_tflops,
            g.memory_gb,
            g.memory_gb_per_s,
            g.link_gb_per_s_per_direction,
            g.tdp_w,
            g.price_usd_per_h,
        )
        for g in CATALOG.gpus
    } == GPU_FIGURES


def test_every_entry_says_where_it_comes_from() -> None:
    sources = [model.source for model in CATALOG.models] + [gpu.source for gpu in CATALOG.gpus]
    sources += [profile.source for profile in CATALOG.profiles] + [table.source for table in CATALOG.tables]
    assert all(len(source) > 10 for source in sources)


def test_names_are_found_without_regard_to_case() -> None:
    assert find_model(CATALOG, "llama-2-70b").name == "Llama-2-70B"
    assert find_gpu(CATALOG, "H100").name == "h100"
    assert find_profile(CATALOG, "Article-70B").name == "article-70b"


def test_an_unknown_name_says_what_was_meant_and_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"no model 'Llama-70B' \(did you mean 'Llama-.*-70B'\?\); known: .*OPT-66B"):
        find_model(CATALOG, "Llama-70B")
    with pytest.raises(ConfigError, match=r"no gpu 'h10'.*'h100'.*b200"):
        find_gpu(CATALOG, "h10")
    with pytest.raises(ConfigError, match="no profile 'zzz'; known: distserve-opt-13b-tp1"):
        find_profile(CATALOG, "zzz")
    with pytest.raises(ConfigError, match="known: none"):
        find_gpu(Catalog(), "h100")


def test_a_topology_can_add_entries_but_not_replace_them() -> None:
    h100 = find_gpu(CATALOG, "h100")
    mine = msgspec.structs.replace(h100, name="h100-pcie", memory_gb_per_s=2000.0)
    grown = extend(CATALOG, gpus=(mine,))
    assert find_gpu(grown, "H100-PCIe") == mine
    assert find_gpu(grown, "h100") == h100
    with pytest.raises(ConfigError, match="gpu 'H100' exists already"):
        extend(CATALOG, gpus=(msgspec.structs.replace(h100, name="H100"),))
    with pytest.raises(ConfigError, match="exists already"):
        extend(Catalog(), gpus=(mine, mine))


def test_a_broken_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^mine\.toml: not valid TOML"):
        parse_catalog({"mine.toml": "[[models]"})
    with pytest.raises(
        ConfigError, match=r"mine\.toml: gpus\[0\]: unknown key 'memory' \(did you mean 'memory_gb'\?\)"
    ):
        parse_catalog({"mine.toml": '[[gpus]]\nname = "x"\nmemory = 3'})


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [("mbu", "0.9", "0.0"), ("mbu", "0.9", "1.1"), ("memory_gb", "80.0", "0.0")],
)
def test_a_gpu_that_cannot_be_is_refused(key: str, good: str, bad: str) -> None:
    text = (
        '[[gpus]]\nname = "x"\nsource = "y"\nbf16_dense_tflops = 1.0\nmemory_gb = 80.0\nmemory_gb_per_s = 1.0\n'
        "link_gb_per_s_per_direction = 1.0\ntdp_w = 1.0\nmbu = 0.9\n"
    )
    assert parse_catalog({"x": text}).gpus[0].mbu == 0.9
    with pytest.raises(ConfigError, match=key):
        parse_catalog({"x": text.replace(f"{key} = {good}", f"{key} = {bad}")})
