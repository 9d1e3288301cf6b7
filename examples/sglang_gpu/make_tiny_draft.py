"""Make a random EAGLE-3 draft that fits the model of ../vllm_cpu/make_tiny_model.py; it guesses about nothing right.

usage: python make_tiny_draft.py TARGET FOLDER        (the interpreter needs torch and safetensors)
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

AUXILIARY = [0, 1]  # hidden states are taken before these layers of the target, which has two


def make(target: Path, folder: Path) -> None:
    """One decoder layer over the target's embedding and its auxiliary hidden states; the target's whole vocabulary."""
    config = json.loads((target / "config.json").read_text())
    width, head, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    torch.manual_seed(1)

    def weights(*shape):
        return torch.randn(*shape) * 0.02

    tensors = {
        "fc.weight": weights(width, len(AUXILIARY) * width),
        "norm.weight": torch.ones(width),
        "lm_head.weight": weights(config["vocab_size"], width),
        "midlayer.hidden_norm.weight": torch.ones(width),
        "midlayer.input_layernorm.weight": torch.ones(width),
        "midlayer.post_attention_layernorm.weight": torch.ones(width),
        "midlayer.self_attn.q_proj.weight": weights(queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": weights(keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": weights(keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": weights(width, queries),
        "midlayer.mlp.gate_proj.weight": weights(inner, width),
        "midlayer.mlp.up_proj.weight": weights(inner, width),
        "midlayer.mlp.down_proj.weight": weights(width, inner),
    }
    config.update(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=config["vocab_size"],
        num_aux_hidden_states=len(AUXILIARY),
        eagle_config={"eagle_aux_hidden_state_layer_ids": AUXILIARY, "use_aux_hidden_state": True},
        eagle_aux_hidden_state_layer_ids=AUXILIARY,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    make(Path(sys.argv[1]), Path(sys.argv[2]))
