"""Our towers give what open_clip's and transformers' give with the same weights."""

import re
from functools import partial

import open_clip
import pytest
import timm
import torch
import transformers
from open_clip.hf_model import HFTextEncoder

from pennyclip.config.keys import ClipText, ImageTower, Model, TransformersText
from pennyclip.model.clip import CLIP
from pennyclip.model.text_clip import ClipTextTower
from pennyclip.model.text_transformers import TransformersTextTower

VOCABULARY, CONTEXT, WIDTH, DIM = 300, 20, 32, 24
END = VOCABULARY - 1
TIMM_NAMES = {
    "gelu": "vit_base_patch32_clip_224",
    "quick_gelu": "vit_base_patch32_clip_quickgelu_224",
}
# From OpenAI's and open_clip's names for a ViT to timm's, in this order.
VIT_NAMES = {
    "class_embedding": "cls_token",
    "positional_embedding": "pos_embed",
    "conv1": "patch_embed.proj",
    "ln_pre": "norm_pre",
    "ln_post": "norm",
    "transformer.resblocks": "blocks",
    "ln_": "norm",
    "in_proj_": "qkv.",
    "out_proj": "proj",
    "c_fc": "fc1",
    "c_proj": "fc2",
}
# From transformers' names to open_clip's, in this order.
TRANSFORMERS_NAMES = {
    "text_model.": "",
    "vision_model.": "visual.",
    "embeddings.": "",
    "position_embedding.weight": "positional_embedding",
    "patch_embedding": "conv1",
    "final_layer_norm": "ln_final",
    "pre_layrnorm": "ln_pre",
    "post_layernorm": "ln_post",
    "layer_norm": "ln_",
    "encoder.layers": "transformer.resblocks",
    "self_attn": "attn",
    "fc1": "c_fc",
    "fc2": "c_proj",
    "text_projection.weight": "text_projection",
    "visual_projection.weight": "visual.proj",
}


def rename(key, names):
    for old, new in names.items():
        key = key.replace(old, new)
    return key


@pytest.fixture(params=["gelu", "quick_gelu"])
def activation(request):
    return request.param


@pytest.fixture
def ours(activation, monkeypatch):
    """Our CLIP around timm's CLIP ViT, both scaled down."""
    small = {"embed_dim": WIDTH, "depth": 3, "num_heads": 2, "patch_size": 8}
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, **small))
    text = ClipText(
        width=WIDTH,
        layers=3,
        heads=2,
        context_length=CONTEXT,
        vocab_size=VOCABULARY,
        activation=activation,
    )
    image = ImageTower(name=TIMM_NAMES[activation], image_size=32)
    return CLIP(Model(image=image, text=text, embed_dim=DIM)).eval()


def randomise(model):
    """Weights far from zero, also where initialisation is constant."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if re.search(r"(ln|norm)[^.]*\.weight$", name) else 0.0
            parameter.normal_(centre, 0.3)
    return model.eval()


def load_open_clip(ours, state):
    """Load open_clip's native state into ours, every key accounted for."""
    state = {key: value for key, value in state.items() if key != "attn_mask"}
    head = state.pop("visual.proj").T
    mapped = {"visual.head.proj.weight": head, "logit_scale": state.pop("logit_scale")}
    for key, value in state.items():
        tower, _, rest = key.partition(".")
        if tower == "visual":
            mapped[f"visual.trunk.{rename(rest, VIT_NAMES)}"] = value
        else:
            mapped[f"text.{key}"] = value
    mapped["visual.trunk.pos_embed"] = mapped["visual.trunk.pos_embed"][None]
    mapped["visual.trunk.cls_token"] = mapped["visual.trunk.cls_token"][None, None]
    ours.load_state_dict(mapped, strict=True)


def captions():
    """Several lengths, padding behind the end token, and "!" (id 0) inside a caption."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([2, 3, 7, 12, CONTEXT])
    tokens = torch.zeros(len(lengths), CONTEXT, dtype=torch.int64)
    for row, length in enumerate(lengths.tolist()):
        tokens[row, : length - 1] = torch.randint(1, END, (length - 1,), generator=generator)
        tokens[row, length - 1] = END
    tokens[3, 4:6] = 0
    assert (tokens[3, :12] == 0).sum() == 2
    return tokens, lengths


def images(size=32):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (5, 3, size, size), generator=generator, dtype=torch.uint8)


def close(a, b):
    # Relative to the size of the embeddings, which is far from 1 with these weights.
    assert a.shape == b.shape
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def each_caption_alone(tower, tokens, lengths):
    """The tower on one caption at a time, cut at its end token: no padding at all."""
    rows = range(len(tokens))
    return torch.cat([tower(tokens[i : i + 1, : lengths[i]], lengths[i : i + 1]) for i in rows])


@torch.no_grad()
def test_towers_equal_open_clip(ours, activation):
    peer = randomise(
        open_clip.CLIP(
            DIM,
            open_clip.CLIPVisionCfg(
                layers=3, width=WIDTH, head_width=16, patch_size=8, image_size=32
            ),
            open_clip.CLIPTextCfg(
                context_length=CONTEXT, vocab_size=VOCABULARY, width=WIDTH, heads=2, layers=3
            ),
            quick_gelu=activation == "quick_gelu",
        )
    )
    load_open_clip(ours, peer.state_dict())
    close(ours.visual(images()), peer.encode_image(ours.visual.normalize(images())))
    tokens, lengths = captions()
    reference = peer.encode_text(tokens)
    close(ours.text(tokens, lengths), reference)
    close(each_caption_alone(ours.text, tokens, lengths), reference)


@torch.no_grad()
def test_towers_equal_transformers_clip_model(ours, activation):
    shape = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "hidden_act": activation,
        "projection_dim": DIM,
    }
    config = transformers.CLIPConfig(
        text_config={
            **shape,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": 1,
            "eos_token_id": END,
            "pad_token_id": 0,
        },
        vision_config={**shape, "image_size": 32, "patch_size": 8},
        projection_dim=DIM,
    )
    peer = randomise(transformers.CLIPModel(config))
    state = {rename(k, TRANSFORMERS_NAMES): v for k, v in peer.state_dict().items()}
    for tower in ("", "visual."):
        for i in range(3):
            start = f"{tower}transformer.resblocks.{i}.attn."
            for kind in ("weight", "bias"):
                parts = [state.pop(f"{start}{p}_proj.{kind}") for p in "qkv"]
                state[f"{start}in_proj_{kind}"] = torch.cat(parts)
    state["text_projection"] = state["text_projection"].T
    state["visual.proj"] = state["visual.proj"].T
    load_open_clip(ours, state)
    image = peer.get_image_features(pixel_values=ours.visual.normalize(images()))
    close(ours.visual(images()), embedding(image))
    tokens, lengths = captions()
    reference = embedding(peer.get_text_features(input_ids=tokens))
    close(ours.text(tokens, lengths), reference)
    close(each_caption_alone(ours.text, tokens, lengths), reference)


def embedding(output):
    """transformers 5 wraps the embeddings."""
    return output if isinstance(output, torch.Tensor) else output.pooler_output


@pytest.mark.parametrize("head", ["linear", "mlp"])
@torch.no_grad()
def test_transformers_text_tower_equals_open_clips(head, tmp_path):
    transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
    ).save_pretrained(tmp_path)
    peer = randomise(
        HFTextEncoder(
            str(tmp_path), DIM, pooler_type="mean_pooler", proj_type=head, pretrained=False
        )
    )
    config = TransformersText(name="tiny", head=head, context_length=CONTEXT)
    ours = TransformersTextTower(config, DIM, tmp_path).eval()
    missing, unexpected = ours.load_state_dict(peer.state_dict(), strict=False)
    assert not missing
    assert not [key for key in unexpected if "position_ids" not in key]
    tokens, lengths = captions()
    tokens[3, 4:6] = 5  # open_clip's tower takes its padding id for padding anywhere
    reference = peer(tokens)
    close(ours(tokens, lengths), reference)
    close(ours(tokens[:4, :12], lengths[:4]), reference[:4])


def test_a_caption_may_contain_the_padding_id():
    """With id 0 inside, the tower differs from one that would stop there, and ignores the rest."""
    tower = randomise(
        ClipTextTower(
            ClipText(width=WIDTH, layers=2, heads=2, context_length=CONTEXT, vocab_size=VOCABULARY),
            DIM,
        )
    )
    tokens, lengths = captions()
    changed = tokens.clone()
    changed[3, 4] = 7
    assert not torch.allclose(tower(tokens, lengths)[3], tower(changed, lengths)[3], rtol=1e-2)
    behind = tokens.clone()
    behind[3, 12:] = 9
    assert torch.equal(tower(tokens, lengths), tower(behind, lengths))
