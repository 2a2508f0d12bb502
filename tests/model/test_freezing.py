"""Which parameters learn at each depth, and in which mode the rest runs."""

import pytest
import timm
import torch
import transformers
from torch import nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ClipText, ImageTower, Model, TransformersText
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import evaluating, freeze

TEXT = ClipText(width=16, layers=3, heads=2, context_length=8, vocab_size=50)
WEIGHTS = ("weight", "bias")
MLP = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
# Layers: the input, and one for each block; norms behind the last block belong to it.
TRUNKS = {
    "test_vit": 1 + 6,
    "eva02_tiny_patch14_224": 1 + 12,
    "eva02_base_patch16_clip_224": 1 + 12,
    "vit_base_patch16_siglip_224": 1 + 12 + 1,  # attention pooling is a layer of its own
    "convnext_tiny": 1 + 18,
    "tf_efficientnet_lite0": 1 + 16,
}


def clip(name="test_vit", text=TEXT, folder=None, **image):
    size = timm.get_pretrained_cfg(name).input_size[-1]
    return CLIP(
        Model(image=ImageTower(name=name, image_size=size, **image), text=text, embed_dim=8), folder
    )


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


@pytest.mark.parametrize(("name", "layers"), TRUNKS.items())
def test_layers_hold_each_image_trunk_parameter_once(name, layers):
    with torch.device("meta"):
        tower = clip(name).visual
    found = [parameter for names in tower.layers() for parameter in names]
    assert sorted(found) == sorted(n for n, _ in tower.named_parameters() if "trunk." in n)
    assert len(tower.layers()) == layers
    assert all(tower.layers())


def test_image_layers_go_from_the_input_to_the_last_norm():
    layers = clip().visual.layers()
    assert "trunk.patch_embed.proj.weight" in layers[0]
    assert all(name.startswith("trunk.blocks.0.") for name in layers[1])
    assert "trunk.blocks.5.mlp.fc2.weight" in layers[-1]
    assert any("norm" in name and "blocks" not in name for name in layers[-1])


def test_text_layers_hold_each_trunk_parameter_once():
    tower = clip().text
    found = [parameter for names in tower.layers() for parameter in names]
    assert sorted([*found, "text_projection"]) == sorted(n for n, _ in tower.named_parameters())
    assert len(tower.layers()) == 1 + 3


def test_bert_layers_hold_each_trunk_parameter_once(bert):
    tower = clip(text=bert[0], folder=bert[1]).text
    found = [parameter for names in tower.layers() for parameter in names]
    trunk = [n for n, _ in tower.named_parameters() if not n.startswith("proj")]
    assert sorted(found) == sorted(trunk)
    assert len(tower.layers()) == 1 + 3


def learning(model, start):
    return {n for n, p in model.named_parameters() if n.startswith(start) and p.requires_grad}


HEADS = {"visual.head.proj.weight", "text.text_projection", "logit_scale"}


def test_all_learns_by_default():
    model = clip()
    freeze(model, "all", "all")
    assert learning(model, "") == {name for name, _ in model.named_parameters()}
    assert all(module.training for module in model.modules())


def test_none_leaves_the_heads_and_the_temperature():
    model = clip()
    freeze(model, "none", "none")
    assert learning(model, "") == HEADS
    assert not any(module.training for module in model.visual.trunk.modules())
    assert not any(module.training for module in model.text.transformer.modules())
    assert model.visual.training  # so that its head is, too
    assert model.visual.head.proj.training


def test_the_last_layers_learn():
    model = clip()
    freeze(model, 2, 1)
    image = [f"visual.{n}" for names in model.visual.layers()[-2:] for n in names]
    text = [f"text.{n}" for n in model.text.layers()[-1]]
    assert learning(model, "") == {*image, *text, *HEADS}
    assert all(".blocks.4." in n or ".blocks.5." in n or "norm" in n for n in image)
    assert {n.split(".")[3] for n in text if "resblocks" in n} == {"2"}
    blocks = model.visual.trunk.blocks
    assert [block.training for block in blocks] == [False] * 4 + [True] * 2
    assert [block.training for block in model.text.transformer.resblocks] == [False, False, True]


def test_a_frozen_prefix_runs_without_a_graph():
    model = clip()
    freeze(model, 2, 1)
    graphs = []
    for block in model.visual.trunk.blocks:
        block.register_forward_hook(lambda module, inputs, out: graphs.append(out.requires_grad))
    size = model.visual.image_size
    model.visual(torch.zeros(1, 3, size, size, dtype=torch.uint8))
    assert graphs == [False] * 4 + [True] * 2


def test_unfreezing_later_restores_training_mode():
    model = clip()
    freeze(model, "none", "none")
    freeze(model, "all", 2)
    assert all(module.training for module in model.visual.modules())
    assert learning(model, "visual.") == {n for n, _ in model.named_parameters() if "visual" in n}


def test_patterns_choose_what_learns():
    model = clip()
    freeze(model, ("trunk.blocks.[45].mlp.*", "trunk.norm.*"), ("*.ln_1.*",))
    wanted = {n for n, _ in model.named_parameters() if "norm" in n and "blocks" not in n}
    wanted |= {f"visual.trunk.blocks.{i}.mlp.{n}" for i in (4, 5) for n in MLP}
    wanted |= {f"text.transformer.resblocks.{i}.ln_1.{n}" for i in range(3) for n in WEIGHTS}
    assert learning(model, "") == {*wanted, *HEADS}
    with pytest.raises(RequestError, match=r"image_layers: .*'trunk\.block\.\*'.*trunk\.blocks"):
        freeze(model, ("trunk.block.*",), "all")


def test_more_layers_than_there_are():
    model = clip()
    with pytest.raises(RequestError, match="image_layers = 8: this tower has 7 layers"):
        freeze(model, 8, "all")
    with pytest.raises(RequestError, match="text_layers = -1: this tower has 4 layers"):
        freeze(model, "all", -1)


def norms(module):
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def test_batch_norm_of_frozen_layers_keeps_its_statistics():
    model = clip("test_efficientnet")
    depth = len(model.visual.layers())
    freeze(model, 2, "all")
    frozen = {n for names in model.visual.layers()[: depth - 2] for n in names}
    modes = {
        f"{name}.weight": module.training
        for name, module in model.visual.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    assert any(modes.values())
    assert not all(modes.values())
    assert modes == {name: name not in frozen for name in modes}


def test_pretrained_batch_norm_keeps_its_statistics_while_it_learns():
    model = clip("test_efficientnet", weights="given.safetensors")
    freeze(model, "all", "all")
    assert norms(model.visual)
    assert not any(module.training for module in norms(model.visual))
    assert all(p.requires_grad for p in model.visual.parameters())
    before = {n: b.clone() for n, b in model.visual.named_buffers()}
    size = model.visual.image_size
    model.visual(torch.randint(0, 255, (2, 3, size, size), dtype=torch.uint8))
    assert all(torch.equal(before[n], b) for n, b in model.visual.named_buffers())


def test_dropout_acts_where_layers_learn(bert):
    model = clip(text=bert[0], folder=bert[1])
    freeze(model, "none", 1)
    drops = {n: m for n, m in model.text.named_modules() if isinstance(m, nn.Dropout)}
    training = {name for name, module in drops.items() if module.training}
    assert training == {name for name in drops if ".layer.2." in name}
    assert len(training) >= 2


def test_evaluating_gives_each_module_its_mode_back():
    model = clip("test_efficientnet", weights="given.safetensors")
    freeze(model, 2, "none")
    modes = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    assert True in modes
    assert False in modes
