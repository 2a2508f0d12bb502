"""Our models in open_clip's terms: the configuration that its `local-dir:` reads."""

from typing import Any

from pennyclip.config import ClipText
from pennyclip.model.clip import CLIP

POOLERS = {"mean": "mean_pooler", "cls": "cls_last_hidden_state_pooler"}


def open_clip_config(model: CLIP) -> dict[str, Any]:
    """What open_clip needs to build the same model and feed it the same pixels.

    A transformers text tower is named ".", which open_clip resolves in the working folder: it
    loads where the working folder is the checkpoint.
    """
    config = model.config
    text: dict[str, Any]
    if isinstance(config.text, ClipText):
        text = {
            "context_length": config.text.context_length,
            "vocab_size": config.text.vocab_size,
            "width": config.text.width,
            "heads": config.text.heads,
            "layers": config.text.layers,
        }
    else:
        text = {
            "hf_model_name": ".",
            "hf_tokenizer_name": ".",
            "hf_proj_type": config.text.head,
            "hf_pooler_type": POOLERS[config.text.pool],
            "hf_model_pretrained": False,
            "context_length": config.text.context_length,
        }
    return {
        "model_cfg": {
            "embed_dim": config.embed_dim,
            "quick_gelu": isinstance(config.text, ClipText)
            and config.text.activation == "quick_gelu",
            "vision_cfg": {
                "timm_model_name": config.image.name,
                "timm_model_pretrained": False,
                "timm_pool": "",
                "timm_proj": config.image.head,
                "image_size": config.image.image_size,
            },
            "text_cfg": text,
            "custom_text": True,
        },
        "preprocess_cfg": {
            "mean": [round(v / 255, 8) for v in model.visual.mean.flatten().tolist()],
            "std": [round(v / 255, 8) for v in model.visual.std.flatten().tolist()],
            "interpolation": "bicubic",
            "resize_mode": "shortest",
        },
    }
