"""sparge.integrations.transformers.Cache: the same tokens as with transformers' own caches, and nothing copied for them."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import copy
import pickle

import sparge.integrations.transformers as integration
from sparge.integrations._cache import RoomyLayer
from test_transformers import DECODERS, assert_close, build, tokens

# sdpa knows neither softcap nor sinks.
REFERENCE = {name: "eager" if "softcap" in name or "sinks" in name else "sdpa" for name in DECODERS}
ARGUMENTS = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True,
                 output_logits=True)  # fmt: skip


@pytest.fixture(autouse=True)
def registered():
    integration.register(target_l1=0)
    yield


def pair(name="llama"):
    config = DECODERS[name]()
    return build(config, REFERENCE[name]), build(config, "sparge")


def generate(model, ids, cache=None, **arguments):
    return model.generate(ids, past_key_values=cache, **{**ARGUMENTS, **arguments})


def assert_same(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_close(torch.stack(ours.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize(
    "name, with_config", [*((name, True) for name in DECODERS), ("llama", False), ("mistral, window 40", False)]
)
@torch.inference_mode()
def test_generation(name, with_config):
    """Chunked prefill and decoding; with windows, too, whose layers are transformers' own if the cache knows of them."""
    theirs, ours = pair(name)
    cache = integration.Cache(ours.config if with_config else None)
    ids = tokens(1, 150)
    assert_same(generate(ours, ids, cache, prefill_chunk_size=64), generate(theirs, ids, prefill_chunk_size=64))
    assert cache.get_seq_length() == 150 + 12 - 1
    assert any(isinstance(layer, RoomyLayer) for layer in cache.layers) or "window 40" in name


@pytest.mark.parametrize("side", ["left", "right"])
@torch.inference_mode()
def test_padding(side):
    """Several sequences of unequal length. With padding on the right, what stands between prompt and answer is hidden."""
    theirs, ours = pair()
    ids = tokens(3, 90)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 37) if side == "left" else slice(53, None)] = 0
    assert_same(generate(ours, ids, integration.Cache(), attention_mask=mask), generate(theirs, ids, attention_mask=mask))


@torch.inference_mode()
def test_beam_search():
    theirs, ours = pair()
    arguments = dict(num_beams=3, num_return_sequences=2, output_logits=False, output_scores=True)
    found = [generate(ours, tokens(2, 90), cache, **arguments) for cache in (integration.Cache(), None)]
    want = generate(theirs, tokens(2, 90), **arguments)
    for ours in found:
        assert torch.equal(ours.sequences, want.sequences)
        assert_close(ours.sequences_scores, want.sequences_scores)
    assert len(want.sequences.unique(dim=0)) == 4


@pytest.mark.parametrize("how", ["lookup", "assistant"])
@torch.inference_mode()
def test_refused_drafts_leave_no_trace(how):
    """Assisted generation crops the cache when drafts are refused."""
    theirs, ours = pair()
    ids = tokens(1, 30).repeat(1, 3)
    draft = dict(prompt_lookup_num_tokens=4) if how == "lookup" else dict(assistant_model=pair("qwen3")[1])
    cache, crops = integration.Cache(ours.config), []
    original = cache.crop
    cache.crop = lambda tokens_to_remove: (crops.append(tokens_to_remove), original(tokens_to_remove))
    assert_same(generate(ours, ids, cache, **draft), generate(theirs, ids))
    assert min(crops) < 0  # some were refused


@torch.inference_mode()
def test_packed_keys_and_refused_drafts():
    """Enough keys for a layer to decode from packed ones: they are known again, and those of a refused draft are not."""
    theirs, ours = pair()
    integration.configure(ours, precision="int16", target_l1=0)
    ids, draft = tokens(1, 740), torch.randint(1, 97, (1, 8), generator=torch.Generator().manual_seed(5))
    want = theirs(ids).logits[:, 700:]
    cache = integration.Cache(ours.config)
    got = [ours(ids[:, :700], past_key_values=cache).logits[:, 700:]]
    for begin in range(700, 740, 8):
        drafted = ours(torch.cat([ids[:, begin : begin + 1], draft[:, 1:]], 1), past_key_values=cache).logits[:, -1]
        cache.crop(-8)
        got.append(ours(ids[:, begin : begin + 8], past_key_values=cache).logits)
    assert_close(torch.cat(got, 1), want, 2e-2)
    assert (drafted - want[:, -1]).abs().max() > 0.1 * want.abs().max()  # another draft would have been seen
    for layer in integration.layers(ours).values():
        assert layer.totals.decode_ms > 0 and layer.totals.key_blocks_reused > 0


@torch.inference_mode()
def test_default_settings_give_the_same_bits_with_either_cache():
    """What is found packed does not depend on where keys lie. (Its error: test_layers.py, and the C++ tests.)"""
    _, ours = pair()
    results = []
    for cache in (integration.Cache(ours.config), transformers.DynamicCache(config=ours.config)):
        integration.configure(ours)
        results.append(generate(ours, tokens(1, 1500), cache, max_new_tokens=24))
        assert all(layer.totals.decode_ms > 0 for layer in integration.layers(ours).values())
    assert torch.equal(torch.stack(results[0].logits), torch.stack(results[1].logits))


@torch.inference_mode()
def test_nothing_is_copied_but_to_double_the_room():
    layer = RoomyLayer()
    whole = torch.randn(2, 2, 3000, 4)
    places = []
    for part in whole.split(1, dim=2):
        keys, values = layer.update(part, 2 * part)
        places.append((keys.data_ptr(), values.data_ptr()))
    assert torch.equal(keys, whole) and torch.equal(values, 2 * whole)
    changes = sum(a != b for a, b in zip(places, places[1:]))
    assert changes <= 4  # 256, 514, 1030, 2062, 4126 tokens
    expected = RoomyLayer(3000)
    places = {expected.update(part, part)[0].data_ptr() for part in whole.split(100, dim=2)}
    assert len(places) == 1 and expected.keys.untyped_storage().nbytes() == whole.untyped_storage().nbytes()


@torch.inference_mode()
def test_whoever_changes_the_batch_gets_other_memory():
    layer = RoomyLayer()
    part = torch.randn(2, 2, 5, 4)
    held = layer.update(part, part)[0]
    layer.reorder_cache(torch.tensor([1, 1]))
    layer.update(part, part)
    assert torch.equal(layer.keys, torch.cat([part[[1, 1]], part], 2))
    layer.batch_select_indices(torch.tensor([0]))
    layer.update(part[:1], part[:1])
    layer.batch_repeat_interleave(2)
    layer.update(part, part)
    assert torch.equal(layer.keys[1], torch.cat([part[1], part[0], part[0], part[1]], 1))
    assert torch.equal(held, part)
    with pytest.raises(ValueError, match=r"cache: \(1, 2, 5, 4\) cannot follow \(2, 2, 20, 4\)"):
        layer.update(part[:1], part[:1])
    layer.reset()
    assert layer.get_seq_length() == 0
    layer.update(part[:1], part[:1])
    assert torch.equal(layer.keys, part[:1])


@torch.inference_mode()
def test_crop_makes_room():
    layer = RoomyLayer()
    part = torch.randn(1, 2, 30, 4)
    place = layer.update(part, part)[0].data_ptr()
    for remove in (7, 30, 3):
        layer.crop(-remove)
        layer.update(part[:, :, :remove], part[:, :, :remove])
        assert layer.keys.data_ptr() == place and layer.get_seq_length() == 30
    assert torch.equal(layer.keys, torch.cat([part[:, :, :27], part[:, :, :3]], 2))


def test_copies_go_on_by_themselves():
    _, ours = pair()
    ids = tokens(1, 80)
    with torch.inference_mode():
        cache = integration.Cache(ours.config)
        ours(ids[:, :50], past_key_values=cache)
        twins = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        ours(ids[:, 20:40], past_key_values=cache)  # another continuation
        want = ours(ids).logits[:, 50:]
    for twin in twins:
        assert twin.layers[0].keys.untyped_storage().nbytes() == 50 * 2 * 16 * 4  # heads, dim, bytes: no room
        with torch.no_grad():  # and tensors of inference mode are not written to outside of it
            assert_close(ours(ids[:, 50:], past_key_values=twin).logits, want)


def test_gradients():
    theirs, ours = pair()
    ids = tokens(1, 40)
    for model in (theirs, ours):
        cache = integration.Cache(model.config)
        model(ids[:, :20], past_key_values=cache)
        model(ids[:, 20:], past_key_values=cache).logits.square().mean().backward()
    a, b = (m.model.layers[0].self_attn.k_proj.weight.grad for m in (ours, theirs))
    assert_close(a, b, 1e-4)


def test_refusals():
    with pytest.raises(ValueError, match="tokens=-1 is negative"):
        integration.Cache(tokens=-1)
