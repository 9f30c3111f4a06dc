"""The models of published tables: GPT as Megatron-LM builds it, from layers, widths and heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullbore.cost.model.shape import (
    Activation,
    Attention,
    Experts,
    Head,
    LayerShape,
    Mlp,
    ModelShape,
)

__all__ = ["ELSEWHERE", "GPT", "RECENT", "Gpt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """A GPT of the tables; groups: of keys and values, as many as heads where None."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    groups: int | None = None
    tied: bool = True
    dropout: float = 0.1

    @property
    def shape(self) -> ModelShape:
        """The shape; learned positions, biases, GELU of width 4h, as in GPT-3."""
        attention = Attention(
            heads=self.heads,
            groups=self.groups or self.heads,
            width=self.hidden // self.heads,
            qkv_bias=True,
            out_bias=True,
            rotary=0.0,
        )
        mlp = Mlp(width=4 * self.hidden, gated=False, bias=True, activation="gelu")
        return ModelShape(
            name="gpt",
            hidden=self.hidden,
            layers=(LayerShape(attention=attention, mlp=mlp),) * self.layers,
            vocab=self.vocab,
            vocab_multiple=128,
            head=Head(tied=self.tied),
            positions=self.sequence,
            norm="layer",
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
        )

    def step_flops(self, sequences: int) -> float:
        """72 B s L h² (1 + s/6h + V/12hL): model FLOPs as the papers count them."""
        h, s, layers = self.hidden, self.sequence, self.layers
        inner = 1 + s / (6 * h) + self.vocab / (12 * h * layers)
        return 72.0 * sequences * s * layers * h * h * inner

    def recomputed_flops(self, sequences: int) -> float:
        """96 B s L h² (1 + s/6h + V/16hL): with every layer's forward twice."""
        h, s, layers = self.hidden, self.sequence, self.layers
        inner = 1 + s / (6 * h) + self.vocab / (16 * h * layers)
        return 96.0 * sequences * s * layers * h * h * inner


def _megatron(layers: int, hidden: int, heads: int) -> Gpt:
    """Of Narayanan 2021 and Korthikanti 2022: sequences of 2048, a vocabulary of 51,200."""
    return Gpt(layers=layers, hidden=hidden, heads=heads, vocab=51_200, sequence=2048)


def _zero_bubble(layers: int, hidden: int, heads: int) -> Gpt:
    """Of the zero-bubble paper: its layer counts leave room for both ends (24 - 2, 48 - 2).

    The vocabulary is not printed; 32,000, its tokenizer's kind, gives the names of its models.
    """
    return Gpt(layers=layers, hidden=hidden, heads=heads, vocab=32_000, sequence=1024)


# By the name that the tables give, with the paper where a name says too little.
GPT = {
    "1.7B": _megatron(24, 2304, 24),
    "3.6B": _megatron(30, 3072, 32),
    "7.5B": _megatron(36, 4096, 32),
    "18.4B": _megatron(40, 6144, 48),
    "22B": _megatron(48, 6144, 64),
    "39.1B": _megatron(48, 8192, 64),
    "76.1B": _megatron(60, 10240, 80),
    "145.6B": _megatron(80, 12288, 96),
    "175B": _megatron(96, 12288, 96),
    "310.1B": _megatron(96, 16384, 128),
    "529.6B": _megatron(105, 20480, 128),
    "1008.0B": _megatron(128, 25600, 160),
    "1.5B": _zero_bubble(22, 2304, 24),
    "6.2B": _zero_bubble(30, 4096, 32),
    "14.6B": _zero_bubble(46, 5120, 40),
    "28.3B": _zero_bubble(62, 6144, 48),
    # PipeOffload prints no shape: its own script has 8 groups, a separate head and P·v - 2 layers,
    # and 38 layers of that kind have 10.5 billion parameters at a width of 5120.
    "10.5B": Gpt(
        layers=38, hidden=5120, heads=40, groups=8, vocab=32_000, sequence=4096, tied=False
    ),
}


def _gpt3(layers: int, hidden: int, heads: int) -> ModelShape:
    return Gpt(layers=layers, hidden=hidden, heads=heads, vocab=50_304, sequence=2048).shape


def _decoder(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    width: int,
    vocab: int,
    *,
    activation: Activation = "silu",
) -> ModelShape:
    """Llama's kind: rotary positions, no biases, a head of its own; gated where SiLU."""
    attention = Attention(heads=heads, groups=groups, width=hidden // heads)
    mlp = Mlp(width=width, gated=activation == "silu", activation=activation)
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=(LayerShape(attention=attention, mlp=mlp),) * layers,
        vocab=vocab,
        vocab_multiple=128,
        head=Head(tied=False),
    )


def _nemotron(layers: int, hidden: int, heads: int, groups: int) -> ModelShape:
    return _decoder(
        "nemotron", layers, hidden, heads, groups, 4 * hidden, 256_000, activation="relu2"
    )


RECENT = {
    "GPT3-5B": _gpt3(24, 4096, 32),
    "GPT3-20B": _gpt3(44, 6144, 48),
    "GPT3-175B": _gpt3(96, 12288, 96),
    "Llama2-7B": _decoder("llama", 32, 4096, 32, 32, 11008, 32_000),
    "Llama2-13B": _decoder("llama", 40, 5120, 40, 40, 13824, 32_000),
    "Llama2-70B": _decoder("llama", 80, 8192, 64, 8, 28672, 32_000),
    "Llama3-8B": _decoder("llama", 32, 4096, 32, 8, 14336, 128_256),
    "Llama3-70B": _decoder("llama", 80, 8192, 64, 8, 28672, 128_256),
    "Llama3-405B": _decoder("llama", 126, 16384, 128, 8, 53248, 128_256),
    "Nemotron-8B": _nemotron(32, 4096, 32, 32),
    "Nemotron-22B": _nemotron(40, 6144, 48, 48),
    "Nemotron-340B": _nemotron(96, 18432, 96, 8),
}


def _grok() -> ModelShape:
    """Grok-1, 314B: 8 experts of which 2 are chosen; NVIDIA's recipe has Llama 3's tokenizer."""
    dense = _decoder("grok", 64, 6144, 48, 8, 32_768, 128_256)
    layer = LayerShape(
        attention=Attention(heads=48, groups=8, width=128),
        mlp=Experts(count=8, chosen=2, width=32_768, gated=True, activation="gelu"),
    )
    return replace(dense, layers=(layer,) * 64)


def _glm() -> ModelShape:
    """GLM-130B: GEGLU, with the two factors and the product of SwiGLU; one matrix at both ends."""
    made = _decoder("glm", 70, 12_288, 96, 96, 32_768, 150_528)
    return replace(made, head=Head(tied=True), norm="layer")


# Of elsewhere.csv, by its names; others are configurations in examples/configs.
ELSEWHERE = {
    **{name: GPT[name].shape for name in ("175B", "529.6B")},
    **{name: RECENT[name] for name in ("Llama3-70B", "Llama3-405B", "Nemotron-340B", "GPT3-175B")},
    "Llama3-405B, 50k": replace(RECENT["Llama3-405B"], vocab=50_257),
    "175B, 64k": replace(_megatron(96, 12288, 128), vocab=64_000).shape,
    "BLOOM-176B": Gpt(
        layers=70, hidden=14_336, heads=112, vocab=250_880, sequence=2048, dropout=0.0
    ).shape,
    "GLM-130B": _glm(),
    "grok-1": _grok(),
}
