"""The knobs of the parallelism lab, the layout that they mean, and the presets. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from mlsyslab.contract import ConfigError
from mlsyslab.faults import Fault
from mlsyslab.labs.parallelism.shapes import MODELS, TRAINED, Model
from mlsyslab.options import check_options, option

CAUSES = ("memory", "communication", "bubble", "imbalance", "placement", "healthy", "unknown")
STRATEGIES = ("ddp", "zero1", "fsdp", "tp", "pp", "fsdp+tp")
PRECISIONS = ("fp32", "mixed")
OPTIMIZERS = ("adamw", "momentum", "sgd")
TP_PLANS = ("shared input", "plain", "sharded vocabulary")
STATE_BYTES: Mapping[str, int] = {
    "adamw": 8,
    "momentum": 4,
    "sgd": 0,
}  # of optimizer state, for each fp32 parameter


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is split over dp x tp x pp ranks, and what a step is.

    shard: what the data-parallel ranks share out among them: "none" (DDP), "zero1" (optimizer state) or "fsdp" (parameters,
    gradients and optimizer state). batch: sequences of the whole job in a step. split: layers of each pipeline stage.
    """

    shard: str = "none"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    batch: int = 8
    seq: int = 64
    microbatches: int = 1
    schedule: str = "1f1b"
    precision: str = "fp32"
    optimizer: str = "adamw"
    checkpointing: bool = False
    reshard: bool = True
    bucket_views: bool = True
    tp_plan: str = "shared input"
    keep_logits: bool = False
    split: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Devices that the layout takes."""
        return self.dp * self.tp * self.pp

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward on one rank: the batch over data-parallel ranks and microbatches."""
        return self.batch // self.dp // self.microbatches


def stages(model: Model, layout: Layout) -> tuple[int, ...]:
    """Layers of each pipeline stage: `layout.split`, else as even as they go, earlier stages first."""
    if layout.split:
        return layout.split
    few, more = divmod(model.layers, layout.pp)
    return tuple(few + (stage < more) for stage in range(layout.pp))


def check_layout(model: Model, layout: Layout) -> None:
    """Raise ConfigError, with the arithmetic, for a layout that this model cannot take."""
    if model.heads % layout.tp or model.kv_heads % layout.tp:
        raise ConfigError(
            f"{model.heads} heads and {model.kv_heads} key-value heads over tp={layout.tp} ranks are "
            f"{model.heads / layout.tp:g} and {model.kv_heads / layout.tp:g} each; tensor parallelism needs whole heads: "
            "choose a tp that divides both"
        )
    for name, size in (("ffn", model.ffn), ("vocab", model.vocab)):
        if size % layout.tp:
            raise ConfigError(
                f"{name}={size} over tp={layout.tp} ranks is {size / layout.tp:g} each; choose a tp that divides it"
            )
    if layout.pp > model.layers:
        raise ConfigError(
            f"pp={layout.pp} stages of a model with {model.layers} layers leave {layout.pp - model.layers} stages empty; "
            "choose at most as many stages as layers"
        )
    if layout.split and (
        len(layout.split) != layout.pp or sum(layout.split) != model.layers or min(layout.split) < 1
    ):
        raise ConfigError(
            f"stage_split={','.join(map(str, layout.split))} has {len(layout.split)} stages of {sum(layout.split)} layers; "
            f"it must be {layout.pp} stages of at least 1 layer that sum to {model.layers}"
        )
    if layout.pp > 1 and layout.microbatches < layout.pp:
        raise ConfigError(
            f"microbatches={layout.microbatches} over {layout.pp} stages leave the pipeline empty: at most "
            f"{layout.microbatches} of {layout.pp} stages ever work; choose at least as many microbatches as stages"
        )
    if layout.batch % (layout.dp * layout.microbatches):
        raise ConfigError(
            f"batch={layout.batch} over {layout.dp} data-parallel ranks and {layout.microbatches} microbatches is "
            f"{layout.batch / layout.dp / layout.microbatches:g} sequences; choose a batch that divides by "
            f"{layout.dp * layout.microbatches}"
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment: a small GPT, trained for real while it is split over ranks."""

    strategy: str = option("fsdp", "how the work is split", choices=STRATEGIES)
    ranks: int = option(2, "training processes, one per device", low=1, high=64)
    model: str = option("4M", "size of the GPT by its parameters", choices=tuple(TRAINED))
    batch: int = option(8, "sequences of the whole job in a step", low=1, high=65_536, unit="sequences")
    seq: int = option(0, "tokens of a sequence; 0 is the model's own", low=0, high=131_072, unit="tokens")
    checkpointing: bool = option(
        False, "keep each layer's input alone, and compute the rest again in backward"
    )
    precision: str = option(
        "fp32", "mixed keeps float32 weights and computes in bfloat16", choices=PRECISIONS
    )
    optimizer: str = option(
        "adamw",
        "what keeps state beside the weights: 8, 4 or 0 bytes a parameter",
        choices=OPTIMIZERS,
        advanced=True,
    )
    tp: int = option(2, "ranks of the tensor-parallel axis of fsdp+tp", low=1, high=64)
    tp_plan: str = option(
        "shared input",
        "q, k and v reduce the gradient of their input once, or each for itself; or the embedding is split as well",
        choices=TP_PLANS,
        advanced=True,
    )
    microbatches: int = option(4, "parts into which a pipeline cuts the batch", low=1, high=1024)
    schedule: str = option("1f1b", "order of the pipeline's work", choices=("1f1b", "gpipe"))
    stage_split: tuple[int, ...] = option(
        (),
        "layers of each pipeline stage, such as 6,2; empty is as even as it goes",
        low=1,
        high=256,
        advanced=True,
    )
    reshard: bool = option(
        True,
        "FSDP frees a layer's gathered parameters after forward, and gathers them again in backward",
        advanced=True,
    )
    bucket_views: bool = option(
        True, "DDP's gradients are views of its buckets, instead of a second copy", advanced=True
    )
    keep_logits: bool = option(
        False,
        "the last pipeline stage keeps the logits of every microbatch, as torch does unasked",
        advanced=True,
    )
    clip_norm: float = option(
        0.0, "largest norm of the gradient; 0 does not clip", low=0.0, high=1e6, advanced=True
    )
    clip: str = option(
        "global",
        "the norm of the whole gradient, or of each rank's own part, which is wrong",
        choices=("global", "local"),
        advanced=True,
    )
    memory_cap_mb: float = option(
        0.0, "memory that each rank may take for tensors; 0 is no cap", low=0.0, high=1e6, unit="MB"
    )
    nodes: int = option(1, "groups of ranks with a slow link between them", low=1, high=8, advanced=True)
    link_mb_per_s: float = option(
        100.0, "what the link between two nodes carries", low=0.1, high=1e5, unit="MB/s", advanced=True
    )
    tp_across: bool = option(
        False, "the tensor-parallel axis crosses the nodes, instead of staying inside one", advanced=True
    )
    steps: int = option(6, "training steps to record, warm-up included", low=2, high=100_000)
    warmup: int = option(
        2, "first steps, recorded but left out of every figure", low=1, high=1000, unit="steps"
    )
    lr: float = option(1e-3, "learning rate", low=0.0, high=10.0, advanced=True)
    device: str = option(
        "auto",
        "where the model runs; auto is a GPU where there is one",
        choices=("auto", "cpu", "cuda"),
        advanced=True,
    )
    seed: int = option(0, "seed of the weights and of the text", low=0, high=2**31 - 1, advanced=True)

    def __post_init__(self) -> None:
        check_options(self)
        if self.warmup >= self.steps:
            raise ConfigError(
                f"warmup={self.warmup} leaves no steady step of steps={self.steps}; choose warmup below steps"
            )
        if self.strategy == "fsdp+tp" and self.ranks % self.tp:
            raise ConfigError(
                f"ranks={self.ranks} over tp={self.tp} is {self.ranks / self.tp:g}; the mesh of fsdp+tp is "
                "(ranks / tp) x tp: choose a tp that divides ranks"
            )
        if self.nodes > 1 and self.ranks % self.nodes:
            raise ConfigError(
                f"ranks={self.ranks} over nodes={self.nodes} is {self.ranks / self.nodes:g}; choose nodes that divide ranks"
            )
        if self.stage_split and self.strategy != "pp":
            raise ConfigError(
                f"stage_split={','.join(map(str, self.stage_split))} with strategy={self.strategy!r} has no stages to "
                "split; choose strategy='pp' or leave it empty"
            )
        check_layout(self.shape, layout_of(self))

    @property
    def shape(self) -> Model:
        """The model, with this run's sequence length."""
        model = MODELS[self.model]
        return dataclasses.replace(model, seq=self.seq or model.seq)


def layout_of(config: Config) -> Layout:
    """The layout that a config means."""
    axes = {
        "ddp": {"dp": config.ranks},
        "zero1": {"dp": config.ranks, "shard": "zero1"},
        "fsdp": {"dp": config.ranks, "shard": "fsdp"},
        "tp": {"tp": config.ranks},
        "pp": {"pp": config.ranks, "microbatches": config.microbatches},
        "fsdp+tp": {"dp": config.ranks // config.tp, "tp": config.tp, "shard": "fsdp"},
    }[config.strategy]
    return Layout(
        **axes,  # type: ignore[arg-type]  # mypy sees one type for a dict of several
        batch=config.batch,
        seq=config.shape.seq,
        schedule=config.schedule,
        precision=config.precision,
        optimizer=config.optimizer,
        checkpointing=config.checkpointing,
        reshard=config.reshard,
        bucket_views=config.bucket_views,
        tp_plan=config.tp_plan,
        keep_logits=config.keep_logits,
        split=config.stage_split,
    )


def faults_of(config: Config) -> list[Fault]:
    """What a configuration makes bad on purpose, for truth.json."""
    found = []
    if config.memory_cap_mb:
        found.append(Fault(cause="memory", mechanism="the kernel refuses a rank more memory than the cap", magnitude=config.memory_cap_mb, unit="MB"))  # fmt: skip
    if (
        config.strategy == "pp"
        and config.stage_split
        and max(config.stage_split) > min(config.stage_split) + 1
    ):
        found.append(Fault(cause="imbalance", mechanism="one pipeline stage has more layers than another", magnitude=max(config.stage_split), unit="layers"))  # fmt: skip
    if config.nodes > 1:
        cause = "placement" if config.tp_across and config.strategy == "fsdp+tp" else "communication"
        found.append(Fault(cause=cause, mechanism="a token bucket (tbf) on the link between the nodes", magnitude=config.link_mb_per_s, unit="MB/s"))  # fmt: skip
    return found


PRESETS: Mapping[str, Config] = {
    "quick": Config(model="1M", strategy="fsdp", ranks=2, steps=4),
    # A model that almost fits: its state alone is the cap, so DDP fails and shards fit.
    "worked_example": Config(model="17M", strategy="fsdp", ranks=8, batch=8, memory_cap_mb=250.0),
    "too_big": Config(model="17M", strategy="ddp", ranks=2, batch=4, memory_cap_mb=250.0),
    "ddp": Config(model="4M", strategy="ddp", ranks=2),
    "zero1": Config(model="4M", strategy="zero1", ranks=2),
    "sharded": Config(model="4M", strategy="fsdp", ranks=2),
    "tensor": Config(model="4M", strategy="tp", ranks=2),
    "pipeline": Config(model="4M", strategy="pp", ranks=2, microbatches=4),
    "bubble": Config(model="4M", strategy="pp", ranks=2, microbatches=2, batch=16),
    "unbalanced": Config(model="4M", strategy="pp", ranks=2, microbatches=8, stage_split=(6, 2), batch=16),
    "mesh": Config(model="4M", strategy="fsdp+tp", ranks=4, tp=2),
    "slow_axis": Config(
        model="4M",
        strategy="fsdp+tp",
        ranks=4,
        tp=2,
        nodes=2,
        tp_across=True,
        link_mb_per_s=80.0,
        batch=40,
        steps=5,
    ),
}
