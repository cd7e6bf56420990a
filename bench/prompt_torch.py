"""Prompts of transformers, for bench/prompt.py: prompt_torch.py JSON. Prints {"time": [...]} or {"loss": [...]} at the end.

The weights are those of the GGUF file, in `dtype`; with `sparge` its attention is ours, else PyTorch's."""

import json
import sys
import time
from pathlib import Path

ROWS = 512  # logits of more tokens at a time would take gigabytes


def main():
    asked = json.loads(sys.argv[1])
    import torch
    import transformers

    if asked["sparge"]:
        import sparge.integrations.transformers  # noqa: F401  # makes the name known
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(asked["threads"])
    file = Path(asked["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[asked["dtype"]],
        attn_implementation="sparge" if asked["sparge"] else "sdpa").eval()
    ids = torch.tensor([[int(word) for word in Path(asked["tokens"]).read_text().split()]])
    count = ids.shape[1]

    @torch.inference_mode()
    def seconds(tokens):
        begin = time.perf_counter()
        model(tokens, logits_to_keep=1)
        return time.perf_counter() - begin

    @torch.inference_mode()
    def loss():
        hidden = model.get_decoder()(ids).last_hidden_state[0]
        total = 0.0
        for begin in range(count // 2, count - 1, ROWS):
            end = min(begin + ROWS, count - 1)
            logits = model.get_output_embeddings()(hidden[begin:end]).float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, begin + 1 : end + 1], reduction="sum").item()
        return total / (count - 1 - count // 2)

    seconds(ids[:, :16])
    figures = [seconds(ids) if asked["verb"] == "time" else loss() for _ in range(asked["rounds"])]
    if asked["sparge"]:
        import sparge.integrations.transformers as integration

        if not any(layer.totals.calls for layer in integration.layers(model).values()):
            sys.exit("sparge computed nothing")
    print(json.dumps({asked["verb"]: figures}))


if __name__ == "__main__":
    main()
