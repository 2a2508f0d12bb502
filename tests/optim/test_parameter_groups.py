"""Every learning parameter in exactly one group, with the rate and decay that belong to it."""

import pytest
import torch
from torch import nn

from pennyclip.config import ClipText, ImageTower, Model, Optim, PartRates
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze
from pennyclip.optim.groups import parameter_groups

CONFIG = Optim(
    lr=1.0, weight_decay=0.2, image=PartRates(lr=0.5, layer_decay=0.5), text=PartRates(lr=0.25)
)


@pytest.fixture(scope="module")
def model() -> CLIP:
    image = ImageTower(name="vit_tiny_patch16_224", image_size=32)
    return CLIP(Model(image=image, text=ClipText(width=64, layers=2, heads=2), embed_dim=32))


def groups(model: CLIP) -> list[dict]:
    trunks = {
        "image": [[f"visual.{n}" for n in names] for names in model.visual.layers()],
        "text": [[f"text.{n}" for n in names] for names in model.text.layers()],
    }
    return parameter_groups(model.named_parameters(), trunks, CONFIG)


def test_groups_cover_what_learns_exactly_once(model: CLIP) -> None:
    for image_layers, text_layers in (("all", "all"), ("none", "all"), (3, 1), ("none", "none")):
        freeze(model, image_layers, text_layers)
        grouped = [p for g in groups(model) for p in g["params"]]
        learning = [p for p in model.parameters() if p.requires_grad]
        assert len(grouped) == len(set(grouped)) == len(learning)
        assert set(grouped) == set(learning)
    freeze(model, "all", "all")


def test_rates_fall_from_the_output_to_the_input(model: CLIP) -> None:
    depth = len(model.visual.layers())
    rate = {id(p): g["base_lr"] for g in groups(model) for p in g["params"]}
    layers = [
        {rate[id(model.visual.get_parameter(n))] for n in names} for names in model.visual.layers()
    ]
    assert layers == [{0.5 * 0.5 ** (depth - 1 - i)} for i in range(depth)]
    assert rate[id(model.text.token_embedding.weight)] == 0.25
    assert rate[id(model.visual.head.proj.weight)] == 1.0
    assert rate[id(model.logit_scale)] == 1.0


def test_no_weight_decay_on_vectors_and_positions(model: CLIP) -> None:
    decay = {id(p): g["weight_decay"] for g in groups(model) for p in g["params"]}
    trunk = model.visual.trunk
    for parameter in (
        trunk.pos_embed,
        trunk.cls_token,
        trunk.norm.weight,
        trunk.blocks[0].attn.qkv.bias,
        model.text.positional_embedding,
        model.text.ln_final.bias,
        model.logit_scale,
    ):
        assert decay[id(parameter)] == 0.0
    for parameter in (
        trunk.blocks[0].attn.qkv.weight,
        trunk.patch_embed.proj.weight,
        model.text.token_embedding.weight,
        model.text.text_projection,
    ):
        assert decay[id(parameter)] == 0.2


def test_optimizer_state_survives_by_name() -> None:
    from pennyclip.optim.state import read_state, write_state

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    first = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    first.step()
    saved = read_state(first, net)
    second = torch.optim.AdamW([{"params": [net[1].bias]}, {"params": [net[0].weight]}])
    write_state(second, net, saved)
    for name in ("1.bias", "0.weight"):
        parameter = net.get_parameter(name)
        assert torch.equal(second.state[parameter]["exp_avg"], first.state[parameter]["exp_avg"])
        assert second.state[parameter]["step"] == 1
