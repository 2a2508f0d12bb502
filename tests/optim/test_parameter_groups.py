"""Every learning parameter in exactly one group, with the rate and decay that belong to it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import (
    ClipText,
    ImageTower,
    Model,
    Optim,
    PartRates,
    PatternRates,
    TrunkRates,
)
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze
from pennyclip.optim import OPTIMIZERS
from pennyclip.optim.groups import parameter_groups

CONFIG = Optim(
    lr=1.0, weight_decay=0.2, image=TrunkRates(lr=0.5, layer_decay=0.5), text=TrunkRates(lr=0.25)
)


@pytest.fixture(scope="module")
def model() -> CLIP:
    image = ImageTower(name="vit_tiny_patch16_224", image_size=32)
    return CLIP(Model(image=image, text=ClipText(width=64, layers=2, heads=2), embed_dim=32))


def groups(model: CLIP, config: Optim = CONFIG) -> list[dict]:
    trunks = {
        "image": [[f"visual.{n}" for n in names] for names in model.visual.layers()],
        "text": [[f"text.{n}" for n in names] for names in model.text.layers()],
    }
    return parameter_groups(model.named_parameters(), trunks, config)


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


def test_the_first_pattern_that_matches_counts(model: CLIP) -> None:
    patterns = (
        PatternRates(match="visual.trunk.patch_embed.*", lr=0.0),
        PatternRates(match="visual.trunk.*.bias", weight_decay=0.3, betas=(0.8, 0.9)),
        PatternRates(match="*.attn.*", weight_decay=0.05),
    )
    found = groups(model, replace(CONFIG, patterns=patterns))
    of = {id(p): g for g in found for p in g["params"]}
    trunk, layers = model.visual.trunk, len(model.visual.layers())
    assert of[id(trunk.patch_embed.proj.bias)]["base_lr"] == 0.0
    bias = of[id(trunk.blocks[0].attn.qkv.bias)]
    assert (bias["base_lr"], bias["betas"]) == (0.5 * 0.5 ** (layers - 2), (0.8, 0.9))
    assert bias["weight_decay"] == 0.0  # none belongs there
    assert of[id(trunk.blocks[0].attn.qkv.weight)]["weight_decay"] == 0.05
    assert of[id(model.text.transformer.resblocks[0].attn.in_proj_weight)]["base_lr"] == 0.25
    assert of[id(model.text.token_embedding.weight)]["betas"] == CONFIG.betas
    assert sorted(id(p) for g in found for p in g["params"]) == sorted(map(id, model.parameters()))


def test_a_pattern_that_matches_nothing_is_refused(model: CLIP) -> None:
    wrong = (PatternRates(match="visual.trunk.patchembed.*", lr=0.1),)
    with pytest.raises(RequestError, match=r"patterns\[0\].*visual\.trunk\.patch_embed"):
        groups(model, replace(CONFIG, patterns=wrong))
    hidden = (PatternRates(match="visual.*", lr=0.1), PatternRates(match="visual.trunk.*", lr=1.0))
    with pytest.raises(RequestError, match=r"patterns\[1\].*no parameter is left"):
        groups(model, replace(CONFIG, patterns=hidden))


def test_temperature_and_heads_have_their_own(model: CLIP) -> None:
    config = replace(
        CONFIG,
        temperature=PartRates(lr=0.1, betas=(0.5, 0.6)),
        heads=PartRates(lr=3.0, warmup_steps=7),
    )
    of = {id(p): g for g in groups(model, config) for p in g["params"]}
    scale, head = of[id(model.logit_scale)], of[id(model.visual.head.proj.weight)]
    assert (scale["part"], scale["base_lr"], scale["betas"]) == ("temperature", 0.1, (0.5, 0.6))
    assert (head["part"], head["base_lr"], head["warmup"]) == ("heads", 3.0, 7)
    assert of[id(model.text.text_projection)] is head


def test_what_is_new_learns_more_slowly(model: CLIP) -> None:
    named = dict(model.named_parameters())
    new = {n for n in named if n.startswith("text.transformer.resblocks.1.")}
    found = parameter_groups(named.items(), {}, Optim(lr=1.0), new, 0.1)
    rate = {id(p): g["base_lr"] for g in found for p in g["params"]}
    assert {rate[id(named[n])] for n in new} == {0.1}
    assert {rate[id(p)] for n, p in named.items() if n not in new} == {1.0}
    assert all(g["lr"] == g["base_lr"] for g in found)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_takes_the_betas_of_a_group(name: str) -> None:
    """One update of a group with other betas equals that of an optimizer with these betas."""

    def moved(default: tuple[float, float], own: tuple[float, float]) -> torch.Tensor:
        config = Optim(lr=0.1, betas=default)
        weight = nn.Parameter(torch.tensor([[3.0, -4.0], [1.0, 2.0]]))
        group = {"params": [weight], "lr": 0.1, "weight_decay": 0.01, "betas": own}
        optimizer = OPTIMIZERS[name]([group], config)
        for factor in (1.0, -0.2, 0.3):
            weight.grad = torch.tensor([[0.1, 0.2], [-0.3, 0.4]]) * factor
            optimizer.step()
        return weight.detach()

    assert torch.equal(moved((0.9, 0.98), (0.5, 0.6)), moved((0.5, 0.6), (0.5, 0.6)))
    assert not torch.equal(moved((0.9, 0.98), (0.5, 0.6)), moved((0.9, 0.98), (0.9, 0.98)))
