"""The knobs of the parallelism lab: what cannot be split is refused with the arithmetic in the sentence."""

from __future__ import annotations

import pytest

from mlsyslab import ConfigError, parallelism
from mlsyslab.labs.parallelism.config import (
    PRESETS,
    Config,
    Layout,
    check_layout,
    faults_of,
    layout_of,
    stages,
)
from mlsyslab.labs.parallelism.shapes import MODELS, PUBLISHED, TRAINED, Model


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"strategy": "fsdp+tp", "ranks": 6, "tp": 4},
            r"ranks=6 over tp=4 is 1\.5; the mesh of fsdp\+tp is \(ranks / tp\) x tp",
        ),
        ({"strategy": "tp", "ranks": 3}, r"8 heads and 8 key-value heads over tp=3 ranks are 2\.66667"),
        (
            {"strategy": "pp", "ranks": 16, "microbatches": 16, "batch": 16},
            "pp=16 stages of a model with 8 layers leave 8 stages empty",
        ),
        (
            {"strategy": "pp", "ranks": 4, "microbatches": 2},
            "microbatches=2 over 4 stages leave the pipeline empty: at most 2 of 4",
        ),
        (
            {"strategy": "pp", "ranks": 2, "microbatches": 3},
            r"batch=8 over 1 data-parallel ranks and 3 microbatches is 2\.66667",
        ),
        ({"ranks": 3}, r"batch=8 over 3 data-parallel ranks and 1 microbatches is 2\.66667 sequences"),
        (
            {"strategy": "pp", "ranks": 2, "stage_split": (5, 2)},
            "stage_split=5,2 has 2 stages of 7 layers; it must be 2 stages",
        ),
        ({"strategy": "pp", "ranks": 2, "stage_split": (8,)}, "stage_split=8 has 1 stages"),
        ({"stage_split": (4, 4)}, "no stages to split"),
        ({"nodes": 3, "ranks": 4, "batch": 12}, r"ranks=4 over nodes=3 is 1\.33333"),
        ({"steps": 3, "warmup": 3}, "warmup=3 leaves no steady step"),
        ({"model": "70B"}, "model='70B' is not one of 1M, 4M"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_arithmetic(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config(**{"model": "4M", **change})  # type: ignore[arg-type]  # values of several fields


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_a_config_whose_ranks_are_its_mesh(name: str) -> None:
    config = parallelism.preset(name)
    layout = layout_of(config)
    assert layout.dp * layout.tp * layout.pp == config.ranks
    assert (PRESETS[name].memory_cap_mb > 0) == any(fault.cause == "memory" for fault in faults_of(config))


def test_an_unknown_preset_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="preset 'nonsense' is not one of quick"):
        parallelism.preset("nonsense")


@pytest.mark.parametrize(
    ("layers", "pp", "cut"), [(8, 2, (4, 4)), (8, 3, (3, 3, 2)), (7, 4, (2, 2, 2, 1)), (2, 2, (1, 1))]
)
def test_layers_go_to_stages_as_evenly_as_they_can(layers: int, pp: int, cut: tuple[int, ...]) -> None:
    model = Model(layers=layers, width=64, heads=4, kv_heads=4, ffn=128, vocab=256, seq=16)
    assert stages(model, Layout(pp=pp, microbatches=pp)) == cut


def test_parameters_are_counted_as_the_papers_do() -> None:
    """Llama 2 7B has 6.74, Llama 3 8B 8.03, 70B 70.6 and 405B 405.9 billion parameters (Meta's model cards)."""
    for name, billions in (("7B", 6.738), ("8B", 8.030), ("70B", 70.55), ("405B", 405.85)):
        assert PUBLISHED[name].params / 1e9 == pytest.approx(billions, rel=1e-3)


def test_trained_models_have_the_size_of_their_name() -> None:
    scale = {"M": 1e6, "B": 1e9}
    for name, model in TRAINED.items():
        assert model.params == pytest.approx(float(name[:-1]) * scale[name[-1]], rel=0.3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "says"),
    [(3, 3, r"width=64 over heads=3 is 21\.3333"), (4, 3, r"heads=4 over kv_heads=3 is 1\.33333")],
)
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Model(layers=1, width=64, heads=heads, kv_heads=kv_heads, ffn=128, vocab=256, seq=16)


def test_tensor_parallelism_must_divide_the_feed_forward_and_the_vocabulary() -> None:
    model = Model(layers=1, width=64, heads=8, kv_heads=8, ffn=100, vocab=256, seq=16)
    with pytest.raises(ConfigError, match=r"ffn=100 over tp=8 ranks is 12\.5"):
        check_layout(model, Layout(tp=8))


def test_six_flops_a_weight_and_token_and_attention_on_top() -> None:
    """6 N with N the weights of matrix multiplies; at 4096 tokens attention adds less than a tenth to a 7B model's."""
    model = MODELS["7B"]
    weights = model.params - model.vocab_params
    assert 6 * weights < model.flops_per_token() < 1.1 * 6 * weights
