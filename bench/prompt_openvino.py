"""Prompts of OpenVINO GenAI, for bench/prompt.py: prompt_openvino.py JSON. Prints {"time": [...]} or {"loss": [...]} at the end.

The GGUF file is converted once, by OpenVINO itself; `threshold` is that of XAttention, null computes all attention; with `sparge`
it is ours."""

import json
import os
import shutil
import sys
import time
from pathlib import Path


def converted(asked):
    """The folder of the model as OpenVINO keeps it."""
    import openvino_genai as genai

    model = Path(asked["model"])
    folder = Path(asked["folder"]) / f"{model.stem}-openvino"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        # It writes beside the file that it reads.
        shutil.copyfile(model, folder / model.name)
        genai.LLMPipeline(str(folder / model.name), "CPU", scheduler_config=scheduler(asked, 256), enable_save_ov_model=True)
        os.remove(folder / model.name)
        (folder / "complete").touch()
    return folder


def scheduler(asked, tokens):
    import openvino_genai as genai

    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False  # the same prompt again is to be computed again
    config.max_num_batched_tokens = tokens  # the prompt in one piece, as it does for one user
    config.cache_size = 4  # GB
    if asked["threshold"] is not None:
        config.use_sparse_attention = True
        config.sparse_attention_config = genai.SparseAttentionConfig(
            mode=genai.SparseAttentionMode.XATTENTION, xattention_threshold=asked["threshold"])
    return config


def mean_loss(log_probabilities, count):
    """Of the second half; there is one for each token but the first, foreseen from those before it."""
    return -float(log_probabilities[count // 2 :].mean())


def paged(asked, ids):
    """OpenVINO's own: (tokens, whether they are judged) to seconds or loss."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    threads = {"INFERENCE_NUM_THREADS": asked["threads"]}
    pipe = genai.ContinuousBatchingPipeline(str(converted(asked)), scheduler(asked, ids.size + 1), "CPU", threads)
    numbers = iter(range(1 << 20))

    def read(tokens, judge):
        how = genai.GenerationConfig(max_new_tokens=1, ignore_eos=True, echo=judge, logprobs=int(judge), apply_chat_template=False)
        begin = time.perf_counter()
        handle = pipe.add_request(next(numbers), openvino.Tensor(np.ascontiguousarray(tokens)), how)
        while pipe.has_non_finished_requests():
            pipe.step()
        seconds = time.perf_counter() - begin
        if not judge:
            return seconds
        return mean_loss(np.array(handle.read_all()[0].generated_log_probs[1 : ids.size]), ids.size)

    return read


def with_sparge(asked, ids):
    """The same through studies/openvino_attention.py. Losses come from the model itself: this pipeline tells none."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    sys.path.insert(0, str(Path(__file__).resolve().parent / "studies"))
    import openvino_attention as integration

    folder = converted(asked)
    target = folder.with_name(folder.name + "-sparge")
    if not target.exists():
        integration.convert(folder, target)
    threads = {"INFERENCE_NUM_THREADS": asked["threads"]}
    if asked["verb"] == "loss":
        core = openvino.Core()
        core.add_extension(integration.Attention)
        request = core.compile_model(target / "openvino_model.xml", "CPU", threads).create_infer_request()
    else:
        pipe = genai.LLMPipeline(str(target), "CPU", extensions=[integration.Attention], ATTENTION_BACKEND="SDPA", **threads)

    def read(tokens, judge):
        tokens = np.ascontiguousarray(tokens)
        ones = np.ones_like(tokens)
        if not judge and asked["verb"] == "time":
            inputs = genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(ones))
            begin = time.perf_counter()
            pipe.generate(inputs, genai.GenerationConfig(max_new_tokens=1, ignore_eos=True, apply_chat_template=False))
            return time.perf_counter() - begin
        request.reset_state()
        places = np.arange(tokens.size)[None]
        found = request.infer({"input_ids": tokens, "attention_mask": ones, "position_ids": places, "beam_idx": np.zeros(1, np.int32)})
        logits = next(iter(found.values()))[0]
        said = np.empty(tokens.size - 1)
        for place in range(tokens.size - 1):
            row = logits[place].astype(np.float64)
            said[place] = row[tokens[0, place + 1]] - row.max() - np.log(np.exp(row - row.max()).sum())
        return mean_loss(said, tokens.size)

    return read


def main():
    asked = json.loads(sys.argv[1])
    import numpy as np

    ids = np.array(Path(asked["tokens"]).read_text().split(), np.int64)[None]
    read = (with_sparge if asked["sparge"] else paged)(asked, ids)
    read(ids[:, :16], False)  # as with the others: the first prompt does not wait for files and memory
    print(json.dumps({asked["verb"]: [read(ids, asked["verb"] == "loss") for _ in range(asked["rounds"])]}))


if __name__ == "__main__":
    main()
