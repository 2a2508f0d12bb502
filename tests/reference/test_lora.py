"""LoRA: what peft's adapters compute, what learns, merging, and what is refused."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from tiny_towers import TOWERS
from torch import nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import (
    Adapters,
    ClipText,
    ImageTower,
    Lora,
    Model,
    Optim,
    TransformersText,
    TrunkRates,
)
from pennyclip.evaluation.features import fingerprint
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze, trunk_state
from pennyclip.model.lora import adapt, adapter_state, is_adapter, load_adapters, merged_state
from pennyclip.optim.groups import parameter_groups

TEXT = ClipText(width=16, layers=3, heads=2, context_length=8, vocab_size=50)
BOTH = Adapters(image=Lora(rank=3, alpha=6.0), text=Lora(rank=2))


def clip(name="vit_pico_patch16_64", text=TEXT, folder=None):
    torch.manual_seed(0)
    image = ImageTower(name=name, image_size=64)
    return CLIP(Model(image=image, text=text, embed_dim=8), folder).eval()


@pytest.fixture
def bert(tmp_path):
    transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    ).save_pretrained(tmp_path)
    return TransformersText(name="tiny", context_length=8), tmp_path


def learned(model, seed=1):
    """The model as if its adapters had learned."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def embeddings(model):
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=generator)
    tokens = torch.randint(1, 49, (3, 8), generator=generator)
    lengths = torch.tensor([3, 8, 5])
    tokens[torch.arange(8) >= lengths[:, None]] = 0
    return model.visual(images), model.text(tokens, lengths)


@pytest.mark.parametrize("name", TOWERS)
def test_merged_image_towers_give_the_adapted_ones_embeddings(name):
    plain = clip(name)
    model = copy.deepcopy(plain)
    adapt(model, BOTH, 0)
    for found, expected in zip(embeddings(model), embeddings(plain), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    learned(model)
    check_merged(model, plain)


@pytest.mark.parametrize("family", ["clip", "siglip", "bert"])
def test_merged_text_towers_give_the_adapted_ones_embeddings(family, bert):
    text, folder = bert if family == "bert" else (replace(TEXT, family=family), None)
    plain = clip(text=text, folder=folder)
    model = copy.deepcopy(plain)
    adapt(model, BOTH, 0)
    assert torch.equal(embeddings(model)[1], embeddings(plain)[1])
    learned(model)
    check_merged(model, plain)


def check_merged(model, plain):
    state = merged_state(model)
    assert state.keys() == plain.state_dict().keys()
    adapted, before = embeddings(model), embeddings(plain)
    merged = copy.deepcopy(plain)
    merged.load_state_dict(state)
    for found, expected, old in zip(embeddings(merged), adapted, before, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert (expected - old).abs().max() > 1e-2  # the adapters do something


def test_an_adapted_layer_is_hu_et_al_s_equation_3():
    plain = clip()
    model = copy.deepcopy(plain)
    adapt(model, BOTH, 0)
    learned(model)
    layer = model.visual.trunk.blocks[1].mlp.fc1
    a, b = (m["default"].weight.double() for m in (layer.lora_A, layer.lora_B))
    assert a.shape == (3, 64)
    x = torch.randn(5, 64)
    weight = plain.visual.trunk.blocks[1].mlp.fc1
    expected = weight(x).double() + 6 / 3 * x.double() @ a.T @ b.T
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-5, rtol=0)
    fused = model.text.transformer.resblocks[2].attn
    delta = merged_state(model)["text.transformer.resblocks.2.attn.in_proj_weight"]
    delta = delta - plain.text.transformer.resblocks[2].attn.in_proj_weight
    expected = fused.lora_B["default"].weight @ fused.lora_A["default"].weight  # alpha is the rank
    torch.testing.assert_close(delta, expected, atol=1e-6, rtol=0)


def test_only_adapters_heads_and_the_temperature_change(bert):
    text, folder = bert
    for model in (clip(), clip(text=text, folder=folder)):
        before = copy.deepcopy(model.state_dict())
        adapt(model, BOTH, 0)
        freeze(model, "all", "all")
        learning = {n for n, p in model.named_parameters() if p.requires_grad}
        heads = {"visual.head.proj.weight", "logit_scale"}
        heads |= {n for n in learning if n in ("text.proj.weight", "text.text_projection")}
        assert {n for n in learning if not is_adapter(n)} == heads
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            image = model.visual(torch.zeros(2, 3, 64, 64, dtype=torch.uint8))
            words = model.text(torch.ones(2, 4, dtype=torch.long), torch.tensor([4, 3]))
            (image.square().sum() + model.logit_scale * words.square().sum()).backward()
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
            optimizer.step()
        after = {n.replace(".base_layer", ""): v for n, v in model.state_dict().items()}
        for name, value in before.items():
            assert torch.equal(value, after[name]) == (name not in heads), name


def test_adapters_learn_by_depth_with_their_layers_rate():
    model = clip()
    adapt(model, BOTH, 0)
    freeze(model, 1, "none")
    learning = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n.split(".lora_")[0] for n in learning if is_adapter(n)} == {
        f"visual.trunk.blocks.1.{layer}"
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert model.text.transformer.training is False
    freeze(model, ("*.blocks.*.attn.*",), 2)
    learning = {n for n, p in model.named_parameters() if p.requires_grad and is_adapter(n)}
    assert len([n for n in learning if n.startswith("visual")]) == 2 * 2 * 2
    assert len([n for n in learning if n.startswith("text")]) == 2 * 4 * 2
    freeze(model, "all", "all")
    trunks = {"text": [[f"text.{n}" for n in names] for names in model.text.layers()]}
    config = Optim(lr=1.0, text=TrunkRates(lr=0.5, layer_decay=0.1))
    rates = {
        id(p): group["base_lr"]
        for group in parameter_groups(model.named_parameters(), trunks, config)
        for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        if is_adapter(name) and name.startswith("text"):
            block = int(name.split("resblocks.")[1][0])
            assert rates[id(parameter)] == pytest.approx(0.5 * 0.1 ** (2 - block))


def test_layers_without_adapters_cannot_learn():
    model = clip()
    adapt(model, Adapters(text=Lora(rank=2, targets=("resblocks.0.mlp.c_fc",))), 0)
    freeze(model, "all", 3)
    with pytest.raises(RequestError, match="text_layers = 1: there are no adapters"):
        freeze(model, "all", 1)


def test_targets_are_ends_of_names(bert):
    model = clip(text=bert[0], folder=bert[1])
    notes = adapt(model, Adapters(text=Lora(rank=2, targets=("query", "self.value"))), 0)
    wrapped = {n.split(".lora_")[0] for n, _ in model.named_parameters() if is_adapter(n)}
    assert wrapped == {
        f"text.transformer.encoder.layer.{i}.attention.self.{part}"
        for i in range(3)
        for part in ("query", "value")
    }
    assert "6 layers of the text trunk" in notes[0]
    assert f"{6 * 2 * 2 * 16:,} parameters" in notes[0]
    assert len(notes) == 1


def test_adapters_come_back_exactly():
    plain = clip()
    model = copy.deepcopy(plain)
    adapt(model, BOTH, 0)
    again = copy.deepcopy(model)
    learned(model)
    merged = copy.deepcopy(plain)
    merged.load_state_dict(merged_state(model))
    adapt(merged, BOTH, 0)
    load_adapters(merged, {n: v.clone() for n, v in adapter_state(model).items()})
    for name, value in model.state_dict().items():
        assert torch.equal(value, merged.state_dict()[name]), name
    assert adapter_state(plain) == {}
    other = copy.deepcopy(plain)
    adapt(other, BOTH, 0)
    for name, value in again.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name  # A is drawn by the seed


def test_a_fresh_adapter_does_not_change_what_a_frozen_trunk_is():
    """Features that were stored without adapters are found again, until the adapters learn."""
    model = clip()
    names = [fingerprint(trunk_state(t)) for t in (model.visual, model.text)]
    adapt(model, BOTH, 0)
    assert [fingerprint(trunk_state(t)) for t in (model.visual, model.text)] == names
    learned(model)
    assert not set(names) & {fingerprint(trunk_state(t)) for t in (model.visual, model.text)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Adapters(image=Lora(alpha=2.0)), "lora.image is set and has no rank"),
        (Adapters(image=Lora(rank=0)), "lora.image: expected a rank of at least 1"),
        (Adapters(text=Lora(rank=2, dropout=0.1)), "in_proj_weight"),
        (Adapters(text=Lora(rank=2, targets=("query",))), "no linear layer .* 'query'"),
    ],
)
def test_refused(config, message):
    with pytest.raises(RequestError, match=message):
        adapt(clip(), config, 0)


def test_a_network_of_convolutions_is_refused():
    model = CLIP(Model(image=ImageTower(name="test_efficientnet", image_size=32), text=TEXT))
    with pytest.raises(RequestError, match=r"EfficientNet.* has no linear layers"):
        adapt(model, BOTH, 0)


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RequestError, match=r"pip install 'pennyclip\[lora\]'"):
        adapt(clip(), BOTH, 0)


def test_dropout_reaches_the_adapters_alone():
    model = clip()
    adapt(model, Adapters(image=Lora(rank=2, dropout=0.5)), 0)
    learned(model)
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p == 0.5]
    assert len(dropouts) == 2 * 4
    freeze(model, "all", "none")
    first, second = embeddings(model)[0], embeddings(model)[0]
    assert not torch.equal(first, second)
    freeze(model, "none", "all")
    assert torch.equal(embeddings(model)[0], embeddings(model)[0])
