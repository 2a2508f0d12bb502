"""A folder for transformers: a `CLIPModel`, or a `VisionTextDualEncoderModel` where that fits.

    image tower     CLIP's ViT, or a plain ViT (Dosovitskiy et al. 2021)
    text tower      CLIP's causal transformer, or a BERT whose first token is the caption's state

Two towers of CLIP's kind make a `CLIPModel`, any other pair of these a dual encoder. What was
written is loaded again and compared before it is handed over.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pennyclip.base.errors import RequestError, RunError
from pennyclip.commands.export.names import renamed, without_batch
from pennyclip.commands.export.probe import TOLERANCE, captions, deviation, pictures
from pennyclip.commands.export.tokenizer import write_clip_tokenizer
from pennyclip.commands.export.vit import Unlike, ViT, as_vit
from pennyclip.commands.export.written import FOLDER, Source, Written
from pennyclip.config.keys import ClipText, TransformersText
from pennyclip.evaluation.encoder import make_tokenizer
from pennyclip.model.clip import CLIP
from pennyclip.model.image import ImageTower
from pennyclip.model.text_clip import NORM_EPS
from pennyclip.model.text_transformers import TransformersTextTower
from pennyclip.weights.dual_encoder import LINEAR
from pennyclip.weights.layouts import (
    BERT_TEXT,
    TRANSFORMERS_IMAGE,
    TRANSFORMERS_TEXT,
    VIT_IMAGE,
)

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"}
BERTS = ("bert", "roberta", "xlm-roberta")  # their pooler is tanh(first token's state * W + b)


def write(source: Source, folder: Path) -> Written:
    """Write a model, its processor and its tokenizer for transformers.

    Raises:
        RequestError: transformers is not installed, or has no model like this one.
        RunError: what was written gives other embeddings when it is loaded.
    """
    try:
        import transformers
    except ImportError as error:
        raise RequestError(
            "an export for transformers needs the package transformers, which is not installed. "
            "Install it with: pip install 'pennyclip[hf]'"
        ) from error
    model = source.model
    try:
        vision, image_state = _image(model.visual, model.config.embed_dim)
        text, text_state = _text(model)
    except Unlike as reason:
        raise RequestError(
            f"transformers has no model like this one: {reason}. Export it with --to open_clip or "
            "--to onnx."
        ) from reason
    clip = isinstance(vision, transformers.CLIPVisionConfig) and isinstance(
        text, transformers.CLIPTextConfig
    )
    kind = transformers.CLIPModel if clip else transformers.VisionTextDualEncoderModel
    config = kind.config_class(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        projection_dim=model.config.embed_dim,
        architectures=[kind.__name__],
    )
    config.save_pretrained(folder)
    state = image_state | text_state | {"logit_scale": model.logit_scale.detach()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _write_processor(source, folder)
    _check(kind, folder, source)
    processor = "CLIPProcessor" if clip else "VisionTextDualEncoderProcessor"
    call = (
        f"from transformers import {kind.__name__}, {processor}; "
        f"{kind.__name__}.from_pretrained('{FOLDER}'); {processor}.from_pretrained('{FOLDER}')"
    )
    notes = []
    if isinstance(model.config.text, ClipText):
        notes.append(
            "transformers' tokenizer does not repair text (wrong decoding, HTML entities) as "
            "CLIP's own and pennyclip's do: such captions get other tokens."
        )
    else:
        notes.append(
            f"The text pooler's tanh is kept linear by a factor of {LINEAR:g}, which the "
            "projection undoes: keep its weights in float32 or bfloat16 when training on."
        )
    if model.logit_bias is not None:
        notes.append(
            f"transformers adds no bias to the logits, and this model has one "
            f"({model.logit_bias.item():.4f}): its probabilities need it, its rankings don't."
        )
    return Written(f"transformers {kind.__name__}", call, tuple(notes))


def _image(tower: ImageTower, embed_dim: int) -> tuple[Any, dict[str, Tensor]]:
    """transformers' configuration of an image tower, and its tensors with the projection's."""
    from transformers import CLIPVisionConfig, ViTConfig

    state = {f"visual.{name}": value for name, value in tower.state_dict().items()}
    try:
        vit = as_vit(tower, clip=True)
    except Unlike as unlike_clip:
        try:
            vit = as_vit(tower, clip=False)
        except Unlike as unlike_vit:
            raise Unlike(f"{unlike_vit}, and {unlike_clip}") from None
        sizes = _sizes(vit)
        config = ViTConfig(**sizes, pooler_act="linear", qkv_bias=True)
        pooler = {
            "vision_model.pooler.dense.weight": torch.eye(vit.width),
            "vision_model.pooler.dense.bias": torch.zeros(vit.width),
        }
        return config, renamed(state, VIT_IMAGE) | pooler
    config = CLIPVisionConfig(**_sizes(vit), projection_dim=embed_dim)
    return config, renamed(without_batch(state), TRANSFORMERS_IMAGE)


def _sizes(vit: ViT) -> dict[str, Any]:
    return {
        "hidden_size": vit.width,
        "intermediate_size": vit.hidden,
        "num_hidden_layers": vit.layers,
        "num_attention_heads": vit.heads,
        "image_size": vit.image_size,
        "patch_size": vit.patch,
        "layer_norm_eps": vit.eps,
        "hidden_act": ACTIVATIONS[vit.activation],
    }


def _text(model: CLIP) -> tuple[Any, dict[str, Tensor]]:
    """transformers' configuration of a text tower, and its tensors with the projection's."""
    text = model.config.text
    state = {f"text.{name}": value for name, value in model.text.state_dict().items()}
    if isinstance(text, TransformersText):
        assert isinstance(model.text, TransformersTextTower)
        return _bert(text, model.text.encoder_config, state)
    if text.family != "clip" or text.tokenizer is not None:
        what = "SigLIP's text tower" if text.family != "clip" else "a text tower with own tokens"
        raise Unlike(f"it has {what}, where CLIPModel has CLIP's causal transformer and tokenizer")
    from transformers import CLIPTextConfig

    config = CLIPTextConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.width,
        intermediate_size=4 * text.width,
        num_hidden_layers=text.layers,
        num_attention_heads=text.heads,
        max_position_embeddings=text.context_length,
        hidden_act=ACTIVATIONS[text.activation or "gelu"],
        layer_norm_eps=NORM_EPS["clip"],
        projection_dim=model.config.embed_dim,
    )
    return config, renamed(state, TRANSFORMERS_TEXT)


def _bert(
    text: TransformersText, config: Any, state: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """A BERT whose pooler passes the first token's state on."""
    if config.model_type not in BERTS:
        raise Unlike(
            f"its text tower is a '{config.model_type}'; dual encoders can be written with "
            f"{', '.join(BERTS)}"
        )
    if text.pool != "cls":
        raise Unlike(
            f"its text tower pools by '{text.pool}', and transformers' dual encoder takes the "
            "first token (model.text.pool = cls)"
        )
    if text.head != "linear":
        raise Unlike(f"its text head is '{text.head}', transformers' dual encoder's is linear")
    tensors = renamed(state, BERT_TEXT)
    tensors["text_projection.weight"] = tensors["text_projection.weight"] / LINEAR
    width = config.hidden_size
    tensors["text_model.pooler.dense.weight"] = LINEAR * torch.eye(width)
    tensors["text_model.pooler.dense.bias"] = torch.zeros(width)
    return config, tensors


def _write_processor(source: Source, folder: Path) -> None:
    """preprocessor_config.json and the tokenizer's files."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPTokenizer

    image, text = source.model.config.image, source.model.config.text
    CLIPImageProcessor(
        size={"shortest_edge": image.image_size},
        crop_size={"height": image.image_size, "width": image.image_size},
        image_mean=list(image.mean or ()),
        image_std=list(image.std or ()),
    ).save_pretrained(folder)
    if isinstance(text, ClipText):
        write_clip_tokenizer(folder)
        tokenizer = CLIPTokenizer.from_pretrained(folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(source.checkpoint)
    tokenizer.model_max_length = text.context_length
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _check(kind: Any, folder: Path, source: Source) -> None:
    """Load what was written and compare its embeddings with the model's own.

    Raises:
        RunError: keys or embeddings differ.
    """
    loaded, info = kind.from_pretrained(folder, output_loading_info=True)
    odd = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if odd:
        import transformers

        raise RunError(
            f"transformers {transformers.__version__} does not know the export's keys "
            f"({', '.join(map(str, odd[:4]))}): it was written for the names of version 5. "
            "Update transformers, or export with --to open_clip."
        )
    model, images = source.model, pictures(source.model)
    tokens, lengths = captions(make_tokenizer(model.config, source.checkpoint))
    real = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    theirs = loaded.eval()(
        input_ids=tokens, attention_mask=real, pixel_values=model.visual.normalize(images)
    )
    worst = max(
        deviation(model.visual(images), theirs.image_embeds),
        deviation(model.text(tokens, lengths), theirs.text_embeds),
    )
    if not worst <= TOLERANCE:
        raise RunError(
            f"the exported model gives other embeddings in transformers: they differ by "
            f"{worst:.1e}, and {TOLERANCE:.0e} is rounding. This is a fault in pennyclip: please "
            "report it with the run's config.toml."
        )
