"""Small models with random weights, saved as checkpoints: what the exports are tried on."""

import json
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import BertConfig

from pennyclip.config.keys import ClipText, ImageTower, Model, TransformersText
from pennyclip.evaluation.encoder import Encoder, load
from pennyclip.weights.build import build, text_folder
from pennyclip.weights.checkpoint import Scores, save

VIT = {"img_size": 64, "patch_size": 16, "embed_dim": 64, "depth": 2, "num_heads": 2}
CLIP_VIT = VIT | {"pre_norm": True, "norm_layer": nn.LayerNorm}
TOWERS = {
    "vit_femto_patch16_clip_64": CLIP_VIT,
    "vit_femto_patch16_clip_quickgelu_64": CLIP_VIT | {"act_layer": "quick_gelu"},
    "vit_femto_patch16_64": VIT,
}
default_cfgs = generate_default_cfgs(
    {
        name: {"input_size": (3, 64, 64), "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25)}
        for name in TOWERS
    }
)
EMBED, CONTEXT = 32, 20
TEXTS = ["a photo of a cat", "!", "Two dogs, running over the grass " * 5]


def _register(name: str) -> None:
    def create(pretrained: bool = False, **given: object) -> nn.Module:
        known = ("num_classes", "global_pool", "img_size", "act_layer")
        model = VisionTransformer(**TOWERS[name] | {k: v for k, v in given.items() if k in known})
        model.pretrained_cfg = model.default_cfg = timm.get_pretrained_cfg(name).to_dict()
        return model

    create.__name__, create.__module__ = name, __name__
    register_model(create)


for tower in TOWERS:
    _register(tower)


def clip_text(**other: object) -> ClipText:
    return ClipText(**{"width": 64, "layers": 2, "heads": 2, "context_length": CONTEXT} | other)  # type: ignore[arg-type]


def clip_shaped(**text: object) -> Model:
    image = ImageTower(name="vit_femto_patch16_clip_64", image_size=64, pool="token")
    return Model(image=image, text=clip_text(**text), embed_dim=EMBED)


def bert(folder: Path, **other: object) -> TransformersText:
    """A small BERT with a tokenizer of whole words."""
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "photo", "of", "cat", "dogs", "the", "!"]
    BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=96, max_position_embeddings=CONTEXT,
    ).save_pretrained(folder)  # fmt: skip
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return TransformersText(  # type: ignore[arg-type]
        name=str(folder), pretrained=False, context_length=CONTEXT, **other
    )


def checkpoint(run: Path, config: Model, step: int = 3) -> Path:
    """Random everywhere: fresh biases are 0 and norms 1, and would hide what is not written."""
    model, _ = build(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not name.startswith("logit"):
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    return save(run, step, Scores(), model, None, {}, text_folder(config), dataset="", keep=1)


def images(size: int = 64, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)


def embeddings(path: Path, size: int = 64) -> tuple[Encoder, Tensor, Tensor]:
    """The checkpoint's own embeddings of `images()` and `TEXTS`."""
    encoder = load(path)
    image, text = encoder.encode_image(images(size)), encoder.encode_text(TEXTS)
    assert image.std() > 0.01  # of something
    assert text.std() > 0.01
    assert abs(image[0] @ image[1]) < 0.99999
    assert abs(text[0] @ text[1]) < 0.999
    return encoder, image, text


def assert_same(ours: Tensor, theirs: Tensor, within: float = 1e-5) -> None:
    torch.testing.assert_close(ours, F.normalize(theirs, dim=-1), atol=within, rtol=0)


@torch.no_grad()
def assert_loads_back(folder: Path, config: Model, image: Tensor, text: Tensor) -> None:
    """A new model whose towers start from the export sees the same as the exported one."""
    from dataclasses import replace

    fresh = replace(
        config,
        image=replace(config.image, weights=str(folder)),
        text=replace(config.text, weights=str(folder)),
    )
    model, matches = build(fresh, seed=9)
    model.eval()
    for match in matches:
        assert match.share == 1.0
        assert not match.new
        assert not match.left_over
    encoder = Encoder(model, load_tokenizer(fresh), None)  # type: ignore[arg-type]
    assert_same(image, encoder.encode_image(images(config.image.image_size)))
    assert_same(text, encoder.encode_text(TEXTS))


def load_tokenizer(config: Model) -> object:
    from pennyclip.evaluation.encoder import make_tokenizer

    return make_tokenizer(config, text_folder(config))
