"""A causal language model of the Qwen3 architecture in plain torch, small enough to read in one sitting.

Parameters have exactly the names of a Hugging Face checkpoint, so that a state dict of transformers' Qwen3ForCausalLM
loads as it is, and the output equals that model's. A tied head has no tensor of its own, as in a checkpoint.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlbus.errors import ConfigError
from rlbus.files import read_file
from rlbus.workers.torch_lm.adapter import LoraBatch
from rlbus.workers.torch_lm.checkpoint import read_tensors, specs_of
from rlbus.workers.torch_lm.kv import KVPool

# What a config.json may say and still mean the model below; anything else is refused, not approximated.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_scaling": None,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model, as config.json gives it. `eos_token_ids` end a completion."""

    vocab_size: int
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    is_head_tied: bool
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> "ModelConfig":
        """From config.json, and generation_config.json if there is one.

        Raises:
            ConfigError: no such file, or another architecture or setting than this model has; names it.
        """
        raw = _read_json(folder / "config.json")
        if raw.get("model_type") != "qwen3":
            raise ConfigError("model_type", raw.get("model_type"), "the torch engine runs qwen3 models only")
        for name, value in _REQUIRED.items():
            if raw.get(name, value) != value:
                raise ConfigError(name, raw[name], f"the torch engine has {value!r} only")
        generation = folder / "generation_config.json"
        eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
        try:
            return cls(
                vocab_size=int(raw["vocab_size"]),
                hidden=int(raw["hidden_size"]),
                inner=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=int(raw["num_attention_heads"]),
                num_kv_heads=int(raw["num_key_value_heads"]),
                head_dim=int(raw["head_dim"]),
                max_positions=int(raw["max_position_embeddings"]),
                norm_eps=float(raw["rms_norm_eps"]),
                rope_theta=_rope_theta(raw),
                is_head_tied=bool(raw.get("tie_word_embeddings", False)),
                eos_token_ids=_token_ids(raw.get("eos_token_id") if eos is None else eos),
            )
        except KeyError as exc:
            raise ConfigError("config.json", str(folder), f"has no {exc.args[0]}") from exc


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError("model", str(path), f"can't be read ({type(exc).__name__})") from exc
    if not isinstance(raw, dict):
        raise ConfigError("model", str(path), "holds no JSON object")
    return raw


def _rope_theta(raw: dict[str, Any]) -> float:
    """transformers 5 writes it into `rope_parameters`, before that it stood by itself."""
    parameters = raw.get("rope_parameters")
    if parameters is None:
        return float(raw["rope_theta"])
    if parameters.get("rope_type", "default") != "default":
        raise ConfigError("rope_parameters", parameters, "the torch engine has the default rope only")
    return float(parameters["rope_theta"])


def _token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({value})


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Projection(nn.Linear):
    """A linear layer without a bias that adapters may add to. `key` is its name in the model, once it is in one."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)
        self.key = ""

    def forward(self, x: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """[batch, length, in] to [batch, length, out]."""
        out = functional.linear(x, self.weight)
        return out if lora is None else lora.add(self.key, x, out)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys, and rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Projection(config.hidden, q)
        self.k_proj = Projection(config.hidden, kv)
        self.v_proj = Projection(config.hidden, kv)
        self.o_proj = Projection(q, config.hidden)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], cache: "Cached | None") -> Tensor:
        """[batch, length, hidden] to the same; without a cache causal over the length itself."""
        batch, length, _ = x.shape
        lora = None if cache is None else cache.lora
        q = _rotate(self.q_norm(self.q_proj(x, lora).view(batch, length, -1, self.head_dim)).transpose(1, 2), turn)
        k = _rotate(self.k_norm(self.k_proj(x, lora).view(batch, length, -1, self.head_dim)).transpose(1, 2), turn)
        v = self.v_proj(x, lora).view(batch, length, -1, self.head_dim).transpose(1, 2)
        mask = None
        if cache is not None:
            k, v = cache.pool.extend(self.layer, cache.slots, cache.positions, k, v)
            mask = cache.mask
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1), lora)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden, config.inner)
        self.up_proj = Projection(config.hidden, config.inner)
        self.down_proj = Projection(config.inner, config.hidden)

    def forward(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """[..., hidden] to the same."""
        return self.down_proj(functional.silu(self.gate_proj(x, lora)) * self.up_proj(x, lora), lora)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], cache: "Cached | None") -> Tensor:
        """[batch, length, hidden] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), turn, cache)
        lora = None if cache is None else cache.lora
        return x + self.mlp(self.post_attention_layernorm(x), lora)  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """Embedding, layers and the last norm; `model.` in a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)


@dataclass(frozen=True, slots=True)
class Cached:
    """Where a batch's keys and values are kept: one slot per row, `positions` [batch, length] of the new tokens.

    `mask` [batch, 1, length, seen] says which of the cached positions each new token sees; `lora` which rows have an
    adapter.
    """

    pool: KVPool
    slots: Tensor
    positions: Tensor
    mask: Tensor
    lora: LoraBatch | None = None


class CausalLM(nn.Module):
    """The model with its head. `state_dict()` has the names of the checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        if not config.is_head_tied:
            self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        for key, module in self.named_modules():
            if isinstance(module, Projection):
                module.key = key

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """What adapters may add to: (out, in) sizes by name."""
        found = {key: module for key, module in self.named_modules() if isinstance(module, Projection)}
        return {key: (module.out_features, module.in_features) for key, module in found.items()}

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token logits [batch, length, vocab] for token ids int64 [batch, length]; with gradient, no cache."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self._head(self._hidden(tokens, positions, None))

    @torch.no_grad()
    def step(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, pool: KVPool, lora: LoraBatch | None = None
    ) -> Tensor:
        """Next-token logits [batch, vocab] after the last of `tokens` [batch, length], which stand at `positions` of
        the texts whose earlier part is in `slots` of the pool; theirs is added to it. `lora`: the rows' adapters.
        """
        seen = int(positions.max()) + 1
        pool.reserve(seen)
        mask = torch.arange(seen, device=tokens.device) <= positions[:, None, :, None]
        x = self._hidden(tokens, positions[:, None], Cached(pool, slots, positions, mask, lora))
        return self._head(x[:, -1])

    def new_pool(self, max_slots: int) -> KVPool:
        """An empty cache for this model, for texts of at most `max_positions` tokens."""
        config = self.config
        like = self.model.embed_tokens.weight
        return KVPool(
            config.num_layers, config.num_kv_heads, config.head_dim, max_slots, config.max_positions, like=like
        )

    def _hidden(self, tokens: Tensor, positions: Tensor, cache: Cached | None) -> Tensor:
        x = self.model.embed_tokens(tokens)
        turn = _turn(positions, self.config, x.dtype)
        for layer in self.model.layers:
            x = layer(x, turn, cache)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def _head(self, x: Tensor) -> Tensor:
        weight = self.model.embed_tokens.weight if self.config.is_head_tied else self.lm_head.weight
        return functional.linear(x, weight)


def _turn(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, [..., length, head_dim]."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * (1.0 / config.rope_theta ** (half / config.head_dim))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def load_model(folder: str | Path) -> CausalLM:
    """Read a folder with config.json and safetensors into a float32 model on the CPU, in evaluation mode.

    Raises:
        ConfigError: another architecture. CheckpointError: the files can't be read, or don't have the model's tensors.
    """
    folder = Path(folder)
    config = ModelConfig.read(folder)
    with torch.device("meta"):
        model = CausalLM(config)
    model.to_empty(device="cpu")
    for name, tensor in read_tensors(folder, specs_of(model)).items():
        model.get_parameter(name).data.copy_(tensor)
    return model.eval()
