"""Towers entered in the middle: prefix and suffix together are the tower, bit for bit."""

from pathlib import Path

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pennyclip.config.keys import Adapters, ClipText, ImageTower, Lora, Model, TransformersText
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze, frozen_layers, trunk_state
from pennyclip.model.lora import adapt

IMAGE = [  # name, pooling, number of layers
    ("test_vit", None, 7),
    ("test_vit", "map", 8),  # pools by attention, a layer of its own
    ("eva02_tiny_patch14_224", None, 13),  # rotary positions, a norm behind the pooling
    ("test_efficientnet", None, 6),
]
TEXT = ["clip", "siglip", "bert", "xlm-roberta"]
LENGTHS = torch.tensor([4, 12, 7])
CONTEXT, VOCABULARY = 16, 60


def image_model(name: str, pool: str | None = None) -> CLIP:
    torch.manual_seed(0)
    size = timm.get_pretrained_cfg(name).input_size[-1]
    image = ImageTower(name=name, image_size=size, pool=pool)
    return CLIP(Model(image=image, text=ClipText(width=16, layers=1, heads=2), embed_dim=8))


def text_model(kind: str, folder: Path) -> CLIP:
    torch.manual_seed(0)
    text: ClipText | TransformersText
    if kind in ("clip", "siglip"):
        text = ClipText(
            family=kind, width=32, layers=3, heads=2, context_length=CONTEXT, vocab_size=VOCABULARY
        )
    else:
        config = transformers.AutoConfig.for_model(
            kind,
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=2 * CONTEXT,
        )
        config.save_pretrained(folder)
        text = TransformersText(name=str(folder), context_length=CONTEXT)
    return CLIP(Model(image=ImageTower(name="test_vit"), text=text, embed_dim=8), folder)


def pictures(model: CLIP) -> Tensor:
    size = model.visual.image_size
    return torch.randint(256, (2, 3, size, size), generator=torch.manual_seed(1)).byte()


def captions() -> Tensor:
    tokens = torch.randint(2, VOCABULARY, (3, 12), generator=torch.manual_seed(1))
    return tokens.where(torch.arange(12) < LENGTHS[:, None], 0)


@pytest.mark.parametrize(("name", "pool", "layers"), IMAGE)
def test_image_prefix_and_suffix_are_the_trunk(name: str, pool: str | None, layers: int) -> None:
    model = image_model(name, pool).eval()
    tower, images = model.visual, pictures(model)
    assert len(tower.layers()) == layers
    with torch.no_grad():
        whole = tower.features(images)
        for n in sorted({1, 2, layers // 2, layers - 1}):
            # What comes from a store has forgotten its memory format.
            state = tower.prefix(images, n).clone(memory_format=torch.contiguous_format)
            assert torch.equal(tower.suffix(state, n), whole), n


@pytest.mark.parametrize("kind", TEXT)
def test_text_prefix_and_suffix_are_the_trunk(kind: str, tmp_path: Path) -> None:
    tower = text_model(kind, tmp_path).text.eval()
    assert tower.enterable
    with torch.no_grad():
        whole = tower.features(captions(), LENGTHS)
        for n in range(1, 5):
            states = tower.prefix(captions(), LENGTHS, n)
            visible = tower.visible(LENGTHS)
            # Behind a caption's end anything may stand.
            states[torch.arange(states.shape[1]) >= visible[:, None]] = 7.0
            assert torch.equal(tower.suffix(states, visible, n), whole), n


def test_only_the_prefix_decides_what_it_computes() -> None:
    """A layer's output is what the whole trunk computes there, not something that cancels out."""
    tower = image_model("test_vit").visual.eval()
    seen: list[Tensor] = []
    tower.trunk.blocks[1].register_forward_hook(lambda *given: seen.append(given[2]))
    images = torch.randint(256, (2, 3, tower.image_size, tower.image_size)).byte()
    with torch.no_grad():
        tower.features(images)
        assert torch.equal(tower.prefix(images, 3), seen[0])


@pytest.mark.parametrize("name", ["convnext_atto", "vit_small_patch16_rope_mixed_224"])
def test_other_trunks_cannot_be_entered(name: str) -> None:
    """Another family; and one in which every block depends on a parameter that learns."""
    with torch.device("meta"):
        model = image_model(name)
    assert not model.visual.enterable


def blocks_of(tower: nn.Module) -> list[nn.Module]:
    if hasattr(tower, "trunk"):
        blocks = list(tower.trunk.blocks)
        return [b for s in blocks for b in s] if isinstance(blocks[0], nn.Sequential) else blocks
    transformer = tower.transformer
    return list(getattr(transformer, "resblocks", None) or transformer.encoder.layer)


def acts(module: nn.Module) -> bool:
    """Whether it makes a difference in which mode a module runs, or might."""
    return any(True for _ in module.parameters()) or getattr(module, "p", 0) > 0


@pytest.mark.parametrize("name", ["test_vit", "eva02_tiny_patch14_224", "test_efficientnet", *TEXT])
def test_a_frozen_prefix_has_no_graph(name: str, tmp_path: Path) -> None:
    """Nothing is kept for it, the graph begins at the first layer that learns, and what is frozen
    neither drops nor gathers statistics."""
    image = name not in TEXT
    model = image_model(name) if image else text_model(name, tmp_path)
    freeze(model, 2 if image else "all", "all" if image else 2)
    tower = model.visual if image else model.text
    blocks = blocks_of(tower)
    frozen = frozen_layers(tower)
    assert 2 <= frozen == len(tower.layers()) - 2

    def forward(n: int | None = None) -> Tensor:
        inputs = (pictures(model),) if image else (captions(), LENGTHS)
        return tower.features(*inputs) if n is None else tower.prefix(*inputs, n)

    saved: list[Tensor] = []
    modes: list[tuple[str, bool]] = []
    graphs: list[bool] = []
    for block in blocks:
        block.register_forward_hook(lambda *given: graphs.append(given[2].requires_grad))
    for label, module in tower.named_modules():
        if not list(module.children()) and acts(module):
            module.register_forward_hook(
                lambda module, *_, label=label: modes.append((label, module.training))
            )
    with saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        assert not forward(frozen).requires_grad
        assert not saved
        assert modes
        assert not [label for label, training in modes if training]
        graphs.clear()
        assert forward().requires_grad
    assert graphs == [False] * (frozen - 1) + [True] * (len(blocks) - frozen + 1)
    assert saved


def test_gradients_from_stored_states() -> None:
    model = image_model("test_vit")
    freeze(model, 3, "none")
    tower, images = model.visual, pictures(model)
    learning = [p for p in tower.trunk.parameters() if p.requires_grad]
    expected = torch.autograd.grad(tower.features(images).square().sum(), learning)
    state = tower.prefix(images, 4)
    found = torch.autograd.grad(tower.suffix(state, 4).square().sum(), learning)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_frozen_layers_are_counted_by_what_learns() -> None:
    model = image_model("test_vit")
    tower = model.visual
    for depth, frozen in (("all", 0), (7, 0), (2, 5), ("none", 7)):
        freeze(model, depth, "all")
        assert frozen_layers(tower) == frozen
    freeze(model, ("trunk.blocks.4.norm1.*", "trunk.blocks.2.attn.qkv.bias"), "all")
    assert frozen_layers(tower) == 3


def test_the_state_of_a_prefix() -> None:
    """With its BatchNorms' statistics, and nothing of what comes behind it."""
    tower = image_model("test_efficientnet").visual
    first = trunk_state(tower, 2)
    assert {name.rpartition(".")[0] for name in first} == {
        "trunk.conv_stem", "trunk.bn1", "trunk.blocks.0.0.conv", "trunk.blocks.0.0.bn1",
    }  # fmt: skip
    assert "trunk.blocks.0.0.bn1.running_var" in first
    assert trunk_state(tower, len(tower.layers())).keys() == trunk_state(tower).keys()
    assert all(name.startswith("trunk.") for name in trunk_state(tower))


def test_adapters_behind_a_prefix_are_no_part_of_it(tmp_path: Path) -> None:
    """A frozen prefix is found again while adapters in later layers learn."""
    model = text_model("clip", tmp_path)
    plain = [trunk_state(model.visual, 5), trunk_state(model.text, 3)]
    adapt(model, Adapters(image=Lora(rank=2), text=Lora(rank=2)), seed=0)
    freeze(model, 2, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    for tower, before in zip((model.visual, model.text), plain, strict=True):
        state = trunk_state(tower, frozen_layers(tower))
        assert state.keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in state.items())
    model.eval()
    with torch.no_grad():
        states = model.text.prefix(captions(), LENGTHS, 3)
        expected = model.text.features(captions(), LENGTHS)
        assert torch.equal(model.text.suffix(states, LENGTHS, 3), expected)
