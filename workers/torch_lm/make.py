"""Makes a tiny random Qwen3 on the spot: a folder that torch, transformers and vLLM load alike. No hub, no download.

`python -m rlbus.workers.torch_lm.make FOLDER` makes one where none is yet.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE

# The scale of Qwen3's own initialisation (initializer_range).
INIT_STD = 0.02
# Of both halves of an adapter: enough to change the tokens of a model of that scale.
ADAPTER_STD = 0.2
MODEL_FILE = "model.safetensors"
# Three special tokens and 256 bytes; a smaller vocabulary gets no tokenizer.
MIN_TOKENIZED_VOCAB = 259


def make_tiny_model(
    folder: Path | str,
    *,
    vocab_size: int = 512,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    max_positions: int = 512,
    is_head_tied: bool = False,
    seed: int = 0,
) -> Path:
    """Write config.json, model.safetensors (float32), generation_config.json and, if `tokenizers` is installed and the
    vocabulary has room for it, a byte-level tokenizer without merges. The same arguments give the same bytes. Returns
    the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "initializer_range": INIT_STD,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": is_head_tied,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    save_file(_weights(config, seed), folder / MODEL_FILE, metadata={"format": "pt"})
    _write_tokenizer(folder, vocab_size, max_positions)
    return folder


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, by its Hugging Face name: matrices normal, norms one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * INIT_STD

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": matrix(q, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, q),
            f"{layer}.self_attn.q_norm.weight": torch.ones(head_dim),
            f"{layer}.self_attn.k_norm.weight": torch.ones(head_dim),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
            f"{layer}.input_layernorm.weight": torch.ones(hidden),
            f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
        }
    weights["model.norm.weight"] = torch.ones(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return weights


def _write_tokenizer(folder: Path, vocab_size: int, max_positions: int) -> None:
    """A byte-level BPE without merges: ids 0 to 2 are special, then the 256 bytes. Ids beyond have no text."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        return  # token ids are enough for the torch engine
    if vocab_size < MIN_TOKENIZED_VOCAB:
        return
    special = ["<s>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "model_max_length": max_positions,
            }
        )
    )


def make_tiny_adapter(folder: Path | str, model: Path | str, *, seed: int, rank: int = 4, alpha: int = 8) -> Path:
    """Write a random LoRA adapter for a model of `make_tiny_model`, on all of its projections, as PEFT would: one that
    changes what is generated, since its B isn't zero. Returns the folder.
    """
    from rlbus.workers.torch_lm.model import CausalLM, ModelConfig

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        projections = CausalLM(ModelConfig.read(Path(model))).projections
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for key, (num_out, num_in) in projections.items():
        for half, shape in (("lora_A", (rank, num_in)), ("lora_B", (num_out, rank))):
            tensors[f"base_model.model.{key}.{half}.weight"] = ADAPTER_STD * torch.randn(shape, generator=generator)
    save_file(tensors, folder / WEIGHTS_FILE)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({key.rpartition(".")[2] for key in projections}),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    return folder


def merge_tiny_adapter(folder: Path | str, model: Path | str, adapter: Path | str) -> Path:
    """Write what a model of `make_tiny_model` is together with an adapter of `make_tiny_adapter`: W + alpha / r * B @ A
    for each projection. Returns the folder.
    """
    folder, model, adapter = Path(folder), Path(model), Path(adapter)
    shutil.copytree(model, folder)
    config = json.loads((adapter / CONFIG_FILE).read_text())
    weights, parts = load_file(model / MODEL_FILE), load_file(adapter / WEIGHTS_FILE)
    for name, a in parts.items():
        key, _, half = name.removeprefix("base_model.model.").rpartition(".lora_")
        if half == "A.weight":
            b = parts[name.replace(".lora_A.", ".lora_B.")]
            weights[f"{key}.weight"] += config["lora_alpha"] / config["r"] * (b @ a)
    save_file(weights, folder / MODEL_FILE, metadata={"format": "pt"})
    return folder


def main() -> int:
    """Entry of the command. A folder that is there is left as it is: engines may have it open."""
    parser = argparse.ArgumentParser(description="Make a tiny random Qwen3, unless the folder is there.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab-size", type=int, default=512)
    args = parser.parse_args()
    if args.folder.exists():
        print(f"{args.folder} is there")
        return 0
    # Renamed when it is whole, so that one which was interrupted isn't taken for a model.
    partial = args.folder.with_name(f".{args.folder.name}.partial")
    make_tiny_model(partial, vocab_size=args.vocab_size)
    partial.rename(args.folder)
    print(f"made {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
