"""attn_implementation="sparge" in tiny models with random weights, against their eager attention."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import copy
import json
import pickle

import sparge
import sparge.integrations.transformers as integration

SIZES = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
DECODER = dict(SIZES, vocab_size=97, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048)

DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "qwen2": lambda: transformers.Qwen2Config(**DECODER),
    "qwen3": lambda: transformers.Qwen3Config(**DECODER),
    "mistral, window 40": lambda: transformers.MistralConfig(**DECODER, sliding_window=40),
    "gemma2, softcap and windows": lambda: transformers.Gemma2Config(
        **DECODER, sliding_window=24, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=2048),
    "gpt-oss, sinks": lambda: transformers.GptOssConfig(**DECODER, num_local_experts=2, num_experts_per_tok=1, sliding_window=40),
}
# fp32 both times, over two layers: a few hundred additions in another order.
EXACT = 2e-5


@pytest.fixture(autouse=True)
def registered():
    integration.register(target_l1=0)
    yield


def build(config, implementation, model_class=transformers.AutoModelForCausalLM):
    """The same weights for every implementation; larger than the default, so that attention has something to choose."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    model = model_class.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            if "sinks" in name:
                torch.nn.init.normal_(parameter, std=1.0)
    model.set_attn_implementation(implementation)
    return model


def both(config, **kwargs):
    return build(config, "eager", **kwargs), build(config, "sparge", **kwargs)


def tokens(batch, length):
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def assert_close(ours, theirs, limit=EXACT):
    scale = theirs.abs().max()
    assert scale > 0
    assert (ours - theirs).abs().max() <= limit * scale


def assert_routed(model, calls):
    totals = [layer.totals for layer in integration.layers(model).values() if layer.totals.calls]
    assert totals and all(t.calls == calls and t.qk_eligible > 0 for t in totals)


@pytest.mark.parametrize("name", DECODERS)
@torch.inference_mode()
def test_decoder_equals_eager(name):
    theirs, ours = both(DECODERS[name]())
    ids = tokens(2, 150)
    assert_close(ours(ids).logits, theirs(ids).logits)
    assert_routed(ours, 1)
    assert len(integration.layers(ours)) == 2


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.inference_mode()
def test_padding(name, side):
    theirs, ours = both(DECODERS[name]())
    ids = tokens(2, 150)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 70) if side == "left" else slice(80, None)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    kwargs = dict(attention_mask=mask, position_ids=positions)
    real = mask.bool()
    assert_close(ours(ids, **kwargs).logits[real], theirs(ids, **kwargs).logits[real])


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.inference_mode()
def test_generation(name, cache):
    """Chunked prefill and decoding, with caches that grow and caches that are there from the beginning."""
    theirs, ours = both(DECODERS[name]())
    arguments = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, prefill_chunk_size=64, return_dict_in_generate=True,
                     output_logits=True, eos_token_id=None)
    if cache == "static":
        arguments.update(cache_implementation="static", disable_compile=True)
    ids = tokens(1, 150)
    a, b = ours.generate(ids, **arguments), theirs.generate(ids, **arguments)
    assert_close(torch.stack(a.logits), torch.stack(b.logits))
    assert torch.equal(a.sequences, b.sequences)


@torch.inference_mode()
def test_chunks_see_what_came_before():
    theirs, ours = both(DECODERS["llama"]())
    ids = tokens(1, 300)
    cache = transformers.DynamicCache(config=ours.config)
    logits = [ours(part, past_key_values=cache).logits for part in ids.split(90, dim=1)]
    assert_close(torch.cat(logits, 1), theirs(ids).logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.inference_mode()
def test_keys_stay_packed_in_chunked_prefill(cache):
    """A cache that grows is another tensor in every call; one that is there from the beginning has places that no query
    sees. The layer knows the keys again in both."""
    theirs, ours = both(DECODERS["llama"]())
    integration.configure(ours, precision="int16", target_l1=0)
    ids = tokens(1, 1500)
    kinds = dict(dynamic=transformers.DynamicCache, static=transformers.StaticCache)
    room = dict(max_cache_len=2048) if cache == "static" else {}
    kept = kinds[cache](config=ours.config, **room)
    logits = [ours(part, past_key_values=kept).logits for part in ids.split(400, dim=1)]
    assert_close(torch.cat(logits, 1), theirs(ids).logits, 2e-2)
    for layer in integration.layers(ours).values():
        totals = layer.totals
        assert totals.calls == 4 and totals.key_blocks_reused > 0.4 * totals.key_blocks
        # Of the places that were not filled yet, none was looked at.
        assert totals.qk_eligible == sum(4 * _tiles(400 * i, min(400, 1500 - 400 * i)) for i in range(4))


def _tiles(begin, queries):
    """Causal tiles of one head: of queries that begin at that position."""
    q, k = sparge._core.BLOCK_Q, sparge._core.BLOCK_K
    return sum(-(-(begin + min(first + q, queries)) // k) for first in range(0, queries, q))


@torch.inference_mode()
def test_packed_sequences_are_written_out():
    """Position ids that begin anew mean packed sequences: a mask without a structure of ours."""
    theirs, ours = both(DECODERS["llama"]())
    ids = tokens(1, 150)
    positions = torch.cat([torch.arange(60), torch.arange(90)])[None]
    for model in (theirs, ours):
        model.config.use_cache = False
    assert_close(ours(ids, position_ids=positions).logits, theirs(ids, position_ids=positions).logits)
    assert (ours(ids, position_ids=positions).logits - ours(ids).logits).abs().max() > 0.01


@torch.inference_mode()
def test_bert_with_padding():
    config = transformers.BertConfig(**SIZES, vocab_size=97)
    theirs, ours = both(config, model_class=transformers.AutoModel)
    ids = tokens(2, 200)
    mask = torch.ones_like(ids)
    mask[0, 130:] = 0
    a, b = (m(ids, attention_mask=mask).last_hidden_state[mask.bool()] for m in (ours, theirs))
    assert_close(a, b)
    assert_routed(ours, 1)


@torch.inference_mode()
def test_vit():
    config = transformers.ViTConfig(**SIZES, image_size=64, patch_size=4)
    theirs, ours = both(config, model_class=transformers.AutoModel)
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert_close(ours(pixels).last_hidden_state, theirs(pixels).last_hidden_state)
    assert_routed(ours, 1)


@torch.inference_mode()
def test_whisper():
    config = transformers.WhisperConfig(
        vocab_size=97, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=150, num_mel_bins=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    theirs, ours = both(config, model_class=transformers.AutoModelForSpeechSeq2Seq)
    sound = torch.randn(1, 16, 300, generator=torch.Generator().manual_seed(0))
    ids = tokens(1, 30)
    a, b = (m(input_features=sound, decoder_input_ids=ids).logits for m in (ours, theirs))
    assert_close(a, b)
    names = [name for name, layer in integration.layers(ours).items() if layer.totals.calls]
    assert len(names) == 6  # two of the encoder, two of the decoder, two across


def local_pair():
    """Keys like queries, and tokens that stay the same for a while: every token attends to those around it."""
    pair = both(DECODERS["llama"]())
    for model in pair:
        for layer in model.model.layers:
            queries = layer.self_attn.q_proj.weight
            layer.self_attn.k_proj.weight.data = queries.data[: layer.self_attn.k_proj.weight.shape[0]].clone()
            queries.data *= 3
    return pair


def attend(layer, *inputs, **options):
    """What attention gives in one layer: (tokens, heads, dim)."""
    results = []
    hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: results.append(args[0][0].unflatten(-1, (4, -1))))
    layer.self_attn(*inputs, **options)
    hook.remove()
    return results[0]


@torch.inference_mode()
def test_sparse_really_skips_and_stays_close():
    dense, model = local_pair()
    layers = integration.configure(model, target_l1=0.05, precision="int16")
    ids = (torch.arange(3000) // 40 + 1)[None]
    for _ in range(6):  # enough samples of every head, and then some
        model(ids)
    for layer in layers.values():
        layer.clear_totals()
    calls = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
        for layer in model.model.layers
    ]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert all(layer.totals.sparsity > 0.05 for layer in layers.values())
    mask = torch.full((3000, 3000), -torch.inf).triu(1)[None, None]
    for layer, other, (inputs, options) in zip(model.model.layers, dense.model.layers, calls):
        # From the same input: what a layer makes of the errors of those before it is not bounded. The bound, PV skip
        # included, is one for the mean; a single head of these few samples may be beyond it.
        result, want = attend(layer, *inputs, **options), attend(other, *inputs, **{**options, "attention_mask": mask})
        errors = (result - want).abs().sum((0, 2)) / want.abs().sum((0, 2))
        assert 0 < errors.mean() < 0.0625, errors
    for layer in layers.values():
        (calibration,) = layer.calibrations
        assert any(calibration.head(h).state == "sparse" for h in range(4))
    assert "model.layers.1.self_attn" in integration.summary(model)


@torch.inference_mode()
def test_layers_belong_to_the_model():
    model = build(DECODERS["llama"](), "sparge")
    integration.configure(model, target_l1=0.05, min_keys=0)
    model(tokens(1, 300))
    twin = copy.deepcopy(model)
    twin(tokens(1, 300))
    calls = [layer.totals.calls for layer in integration.layers(model).values()]
    assert calls == [1, 1] and [layer.totals.calls for layer in integration.layers(twin).values()] == [2, 2]
    handles = {layer.handle for m in (model, twin) for layer in integration.layers(m).values()}
    assert len(handles) == 4
    restored = pickle.loads(pickle.dumps(integration.layers(model)["model.layers.0.self_attn"]))
    assert restored.calibrations[0].save() == integration.layers(model)["model.layers.0.self_attn"].calibrations[0].save()


def preset_text(name, **changes):
    measured = dict(sparsity=0.5, work=0.5, l1=0.01, l2=0.01, round_l1=0.01, verified_on=1)
    head = dict(precision="int16", select="floor", theta=0.3, tau=0.9, pv_skip="off", measured=measured)
    layer = dict(q_heads=4, kv_heads=2, qk_dim=16, v_dim=16, causal=True, samples=[], held_out=[],
                 heads=[dict(head, head=h) for h in range(4)])  # fmt: skip
    layer.update(changes)
    bounds = dict(l1=0.05, l2=0.06, round_l1=0.05)
    return json.dumps(dict(format="sparge-preset", version=1, made_by="test", bounds=bounds, predictor="keys", seed=0,
                           layers={name: layer}))  # fmt: skip


@torch.inference_mode()
def test_presets_by_name(tmp_path):
    model = build(DECODERS["llama"](), "sparge")
    path = tmp_path / "preset.json"
    path.write_text(preset_text("model.layers.0.self_attn"))
    integration.configure(model, preset=path)
    with pytest.warns(sparge.LayerWarning, match=r"layer model.layers.1.self_attn: .*; this layer skips nothing"):
        model(tokens(1, 300))
    assert [layer.totals.calls for layer in integration.layers(model).values()] == [1, 1]
    whole = json.loads(preset_text("model.layers.0.self_attn"))
    whole["layers"]["model.layers.1.self_attn"] = whole["layers"]["model.layers.0.self_attn"]
    path.write_text(json.dumps(whole))
    layers = integration.configure(model, preset=path)
    model.generate(tokens(1, 300), max_new_tokens=3, do_sample=False, eos_token_id=None)  # decoding has no use for thresholds
    assert all(layer.totals.calls == 3 and not layer.calibrations for layer in layers.values())
    path.write_text(preset_text("model.layers.0.self_attn", qk_dim=32))
    integration.configure(model, preset=path)
    with pytest.raises(ValueError, match="layer model.layers.0.self_attn: qk_dim=16 is not the 32 of the preset"):
        model(tokens(1, 300))
    with pytest.raises(ValueError, match="configure"):
        integration.register(preset=path)


def test_training_goes_to_the_original():
    theirs, ours = both(DECODERS["llama"]())
    ids = tokens(2, 60)
    for model in (theirs, ours):
        model(ids, labels=ids).loss.backward()
    a, b = (m.model.layers[0].self_attn.q_proj.weight.grad for m in (ours, theirs))
    assert_close(a, b, 1e-4)


@torch.inference_mode()
def test_compiled_model():
    theirs, ours = both(DECODERS["llama"]())
    ids = tokens(1, 150)
    ours(ids)  # layers are made outside of the graph
    compiled = torch.compile(ours, backend="aot_eager")
    assert_close(compiled(ids).logits, theirs(ids).logits)
    assert_routed(ours, 2)


def test_no_attention_in_a_model():
    with pytest.raises(ValueError, match="Linear has no module"):
        integration.configure(torch.nn.Linear(2, 2))


def test_bad_settings_name_the_value():
    with pytest.raises(ValueError, match="target_l1=3"):
        integration.register(target_l1=3)
    assert sparge.__version__
