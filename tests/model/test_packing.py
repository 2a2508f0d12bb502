"""A caption's embedding and gradients don't depend on the padding, computed or not."""

import pytest
import torch
from transformers import AutoConfig

from pennyclip.config.keys import (
    ActivationCheckpointing,
    ClipText,
    ImageTower,
    Model,
    TransformersText,
)
from pennyclip.model.clip import CLIP
from pennyclip.model.packing import packed, padded
from pennyclip.model.recompute import recompute
from pennyclip.model.text_clip import ClipTextTower
from pennyclip.model.text_transformers import TransformersTextTower


def encoder(kind, pool, folder):
    """A small BERT or RoBERTa as text tower."""
    AutoConfig.for_model(
        kind, vocab_size=99, hidden_size=48, num_hidden_layers=3, num_attention_heads=3,
        intermediate_size=96, max_position_embeddings=32,
    ).save_pretrained(folder)  # fmt: skip
    config = TransformersText(name=str(folder), pool=pool, context_length=24)
    return TransformersTextTower(config, 16, folder).eval()  # no dropout


@pytest.fixture(params=["clip", "bert", "roberta", "xlm-roberta"])
def tower(request, tmp_path):
    torch.manual_seed(0)
    if request.param == "clip":
        config = ClipText(width=48, layers=3, heads=3, context_length=24, vocab_size=99)
        built = ClipTextTower(config, embed_dim=16)
    else:
        built = encoder(request.param, "cls" if request.param == "roberta" else "mean", tmp_path)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return built


def captions(lengths, length):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 99, (len(lengths), length), generator=generator)
    return tokens, torch.tensor(lengths)


def embed(tower, is_packed, tokens, lengths):
    tower.packed = is_packed
    tower.zero_grad()
    out = tower(tokens, lengths)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), {name: p.grad for name, p in tower.named_parameters()}


@pytest.mark.parametrize(
    ("lengths", "length"), [([2, 9, 24, 13], 24), ([5, 5], 5), ([1], 8), ([3, 7, 8, 8, 2], 16)]
)
def test_packed_equals_padded(tower, lengths, length):
    tokens, sizes = captions(lengths, length)
    out, grads = embed(tower, True, tokens, sizes)
    expected, expected_grads = embed(tower, False, tokens, sizes)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
    for name, grad in expected_grads.items():
        error = (grads[name] - grad).abs().max()
        assert error <= 1e-5 * max(1.0, grad.abs().max()), name


def test_the_stream_holds_the_real_tokens_in_order():
    tokens, lengths = captions([2, 4, 1], 4)
    layout = packed(tokens, lengths)
    assert layout.pack(tokens).tolist() == [
        *tokens[0, :2].tolist(),
        *tokens[1].tolist(),
        tokens[2, 0].item(),
    ]
    assert layout.starts.tolist() == [0, 2, 6, 7]
    assert layout.ends.tolist() == [1, 5, 6]
    real = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    assert torch.equal(layout.pad(layout.pack(tokens)), tokens * real)


def test_the_padded_layout_holds_every_place():
    tokens, lengths = captions([2, 4, 1], 4)
    layout = padded(tokens, lengths)
    assert torch.equal(layout.pack(tokens), tokens.flatten())
    assert layout.starts.tolist() == [0, 4, 8, 12]
    assert layout.ends.tolist() == [1, 7, 8]
    assert torch.equal(layout.pad(layout.pack(tokens)), tokens)


def test_norms_and_mlps_see_real_tokens_only(tower):
    tokens, lengths = captions([2, 9, 24, 13], 24)
    seen = []
    clip = isinstance(tower, ClipTextTower)
    blocks = tower.transformer.resblocks if clip else tower.transformer.encoder.layer
    (blocks[0].mlp if clip else blocks[0].intermediate).register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].flatten(0, -2).shape[0])
    )
    embed(tower, True, tokens, lengths)
    embed(tower, False, tokens, lengths)
    assert seen == [2 + 9 + 24 + 13, 4 * 24]


def test_the_padded_tower_can_be_exported(tower):
    """Shapes of the padded path depend on the batch's, never on the lengths."""
    tower.packed = False
    batch, length = torch.export.Dim("batch", min=2), 24
    program = torch.export.export(
        tower.eval(), captions([2, 9], length), dynamic_shapes=({0: batch}, {0: batch})
    )
    tokens, lengths = captions([24, 1, 7], length)
    torch.testing.assert_close(program.module()(tokens, lengths), tower(tokens, lengths))


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_a_layer_computed_again_knows_its_captions(tmp_path, kind):
    """Activation checkpointing runs layers in the backward pass, far from the tower's own code."""
    torch.manual_seed(0)
    text = encoder(kind, "mean", tmp_path)
    config = TransformersText(name=str(tmp_path), context_length=24)
    image = ImageTower(name="test_vit", image_size=160)
    model = CLIP(Model(image=image, text=config, embed_dim=16), tmp_path)
    model.text = text
    tokens, lengths = captions([2, 9, 24, 13], 24)
    out, grads = embed(text, True, tokens, lengths)
    recompute(model, ActivationCheckpointing(text="all"))
    again, same = embed(text, True, tokens, lengths)
    assert torch.equal(out, again)
    assert all(torch.equal(grad, same[name]) for name, grad in grads.items())


def test_a_caption_with_robertas_padding_id_inside(tmp_path):
    """Its own code would give the token behind it an earlier position."""
    torch.manual_seed(0)
    tower = encoder("xlm-roberta", "mean", tmp_path)
    tokens, lengths = captions([9, 9], 16)
    tokens[1] = tokens[0]
    tokens[1, 4] = tower.encoder_config.pad_token_id
    seen = []
    tower.transformer.embeddings.register_forward_hook(lambda m, a, out: seen.append(out))
    for is_packed in (True, False):
        embed(tower, is_packed, tokens, lengths)
    for states in seen:
        others = [i for i in range(9) if i != 4]
        torch.testing.assert_close(states[0, others], states[1, others])
