"""Memory of a module's generation: its network is found and its shape read."""

import lightning as L
import pytest
import torch

from lightning_unified.cost_model.generation import NetworkShape, generated, generation_before
from lightning_unified.models.gearhead.module import GearHead


def on_meta(build):
    with torch.device("meta"):
        return build()


@pytest.fixture(scope="module")
def gearhead():
    return on_meta(lambda: GearHead(width=32, heads=2, layers=3, feed_forward=64, positions=48))


def language_model(kind="LlamaConfig", auto="AutoModelForCausalLM", **changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    config = getattr(transformers, kind)(**sizes | changes)
    return on_meta(lambda: getattr(transformers, auto).from_config(config))


class Tuned(L.LightningModule):
    """A user's module around a model that generates, with something of its own."""

    def __init__(self, model):
        super().__init__()
        self.model, self.own = model, torch.nn.Linear(64, 10, device="meta")


def test_the_cache_is_that_which_the_network_takes(gearhead):
    found = generated(gearhead, rows=4, prompt=16, new=32)

    assert found.bytes.cache == gearhead.network.new_cache(batch=4, length=48)._store.nbytes
    assert (found.network, found.grows) == ("GearHeadNetwork", False)
    assert found.bytes.logits == 4 * gearhead.config.vocabulary * (4 + 2 * 4)


def test_a_prompt_leaves_room_for_what_is_generated_where_positions_are_counted(gearhead):
    assert generated(gearhead, rows=4, prompt=40, new=32).prompt == 16
    with pytest.raises(ValueError, match="new=48 tokens after a prompt do not fit into 48 learned positions"):
        generated(gearhead, rows=4, prompt=1, new=48)


def test_a_transformers_model_counts_with_its_adapters_and_a_growing_cache():
    module = Tuned(language_model(num_key_value_heads=2, intermediate_size=128))
    found = generated(module, rows=4, prompt=100, new=28, precision="bf16-true")

    shape = NetworkShape(layers=2, kv_heads=2, head_width=16, vocabulary=1, item_bytes=2, grows=True)
    assert found.bytes.cache == shape.cache_bytes(batch=4, length=128)
    parameters = sum(one.numel() for one in module.parameters())
    assert 2 * parameters <= found.bytes.weights <= 2 * parameters + 1000  # buffers of rotary positions
    assert found.bytes.prompt == 4 * 100 * (2 * 64 + 3 * 128) * 2


def test_adapters_around_a_model_count_as_weights_and_change_nothing_else():
    peft = pytest.importorskip("peft")
    alone = generated(language_model(), rows=4, prompt=100, new=28)
    with torch.device("meta"):
        adapted = peft.get_peft_model(language_model(), peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    found = generated(adapted, rows=4, prompt=100, new=28)

    assert found.network == alone.network
    assert found.bytes.weights > alone.bytes.weights
    assert (found.bytes.cache, found.bytes.logits) == (alone.bytes.cache, alone.bytes.logits)


def test_half_the_layers_of_a_hybrid_keep_nothing():
    plain, hybrid = language_model(), language_model()
    hybrid.config.layer_types = ["linear", "full_attention"]

    assert (
        generated(hybrid, rows=1, prompt=9, new=1).bytes.cache < generated(plain, rows=1, prompt=9, new=1).bytes.cache
    )


def test_what_generates_nothing_or_by_an_encoder_is_refused():
    translator = language_model("T5Config", "AutoModelForSeq2SeqLM")

    for module in (torch.nn.Linear(2, 2), translator):
        with pytest.raises(ValueError, match=f"{type(module).__name__} holds no network known to generate"):
            generated(module, rows=1, prompt=1, new=1)


def test_completions_of_a_prompt_share_its_pass_but_not_their_caches():
    module = Tuned(language_model(num_key_value_heads=2, intermediate_size=128))
    one, shared = (generated(module, rows=8, prompts=prompts, prompt=100, new=28, grows=False) for prompts in (8, 2))

    assert shared.bytes.prompt == one.bytes.prompt // 4
    assert shared.bytes.cache == one.bytes.cache
    assert not shared.grows


def test_what_is_generated_before_a_step_is_what_the_module_says_of_the_batch():
    class Samples(Tuned):
        def generations(self, batch):
            return {} if "labels" in batch else {"rows": 8, "prompts": 2, "prompt": 16, "new": 4}

    module = Samples(language_model())

    assert generation_before(module, {"prompt": None}) == generated(
        module, rows=8, prompts=2, prompt=16, new=4, grows=False
    )
    assert generation_before(module, {"labels": None}) is None
    assert generation_before(Tuned(language_model()), {"prompt": None}) is None
