"""Every layout of weights gives the reference implementation's embeddings, and nothing is lost.

All models are the references' own, scaled down, with random weights; no network.
"""

import re
import warnings
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.model import CustomTextCLIP
from tiny_towers import (
    CLIP_MEAN,
    EMBED,
    LENGTH,
    VOCABULARY,
    WIDTH,
    assert_equal_towers,
    assert_same,
    captions,
    config,
    images,
    native,
    pixels,
    shake,
)
from torch import Tensor, nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ClipText, ImageTower, Model
from pennyclip.weights.build import build
from pennyclip.weights.checkpoint import write_model


class Archive(nn.Module):
    """Parameters under given names, for a TorchScript archive like OpenAI's."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        inner: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            head, _, rest = key.partition(".")
            if rest:
                inner.setdefault(head, {})[rest] = value
            else:
                self.register_buffer(head, value)
        for name, tensors in inner.items():
            self.add_module(name, Archive(tensors))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("container", ["torchscript", "plain"])
def test_openai_file(tmp_path: Path, container: str) -> None:
    reference = native()
    state = {key: value.half() for key, value in reference.state_dict().items()}  # as theirs
    reference.load_state_dict(state)
    sizes = {"input_resolution": 64, "context_length": LENGTH, "vocab_size": VOCABULARY}
    state |= {name: torch.tensor(value) for name, value in sizes.items()}
    path = tmp_path / "ViT-pico.pt"
    if container == "plain":
        torch.save(state, path)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.save(torch.jit.script(Archive(state)), path)
    asked = config(path, "vit_pico_patch16_clip_64")
    with torch.no_grad():
        tokens = captions()[0]
        assert_equal_towers(
            path, asked, reference.encode_image(pixels()), reference.encode_text(tokens)
        )
    built, (image, text) = build(asked, seed=0)
    # The file is OpenAI's, so it was trained with QuickGELU and CLIP's own statistics.
    assert built.config.image.name == "vit_pico_patch16_clip_quickgelu_64"
    assert built.config.image.activation == built.config.text.activation == "quick_gelu"
    assert built.config.image.mean == CLIP_MEAN
    assert set(image.dropped.values()) == {
        "belongs to the other tower", "fits only together with both of its towers"
    }  # fmt: skip
    assert {k for k, v in text.dropped.items() if "size" in v} == set(sizes)
    torch.testing.assert_close(built.logit_scale, reference.logit_scale.detach().float())
    assert image.trained.startswith("CLIP")
    assert image.architecture is not None
    assert image.architecture.dtype.startswith("float16")


def test_plain_gelu_for_a_quick_gelu_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ViT-pico.pt"
    torch.save(native().state_dict() | {"input_resolution": torch.tensor(64)}, path)
    with pytest.raises(RequestError, match=r"activation = 'gelu' contradicts.*quick_gelu"):
        build(config(path, "vit_pico_patch16_clip_64", activation="gelu"), seed=0)
    wrong = config(path, "vit_pico_patch16_clip_64", mean=(0.5, 0.5, 0.5))
    with pytest.raises(RequestError, match=r"model\.image\.mean.*0\.48145466"):
        build(wrong, seed=0)


def test_open_clip_native(tmp_path: Path) -> None:
    reference = native(quick_gelu=False)
    path = tmp_path / "epoch_3.pt"
    wrapped = {f"module.{key}": value for key, value in reference.state_dict().items()}
    torch.save({"epoch": 3, "name": "run", "state_dict": wrapped}, path)
    with torch.no_grad():
        image, text = reference.encode_image(pixels()), reference.encode_text(captions()[0])
    assert_equal_towers(path, config(path, "vit_pico_patch16_clip_64"), image, text)


@pytest.mark.parametrize("tower", ["timm", "native"])
def test_open_clip_two_towers(tmp_path: Path, tower: str) -> None:
    name = "vit_pico_patch16_clip_64"
    text_cfg = {
        "context_length": LENGTH, "vocab_size": VOCABULARY, "width": WIDTH, "heads": 1, "layers": 2,
    }  # fmt: skip
    vision = {"timm_model_name": name, "timm_pool": "", "timm_proj": "linear", "image_size": 64}
    if tower == "native":
        vision = {"image_size": 64, "patch_size": 16, "width": WIDTH, "layers": 2}
    reference = shake(CustomTextCLIP(EMBED, vision, text_cfg))
    path = tmp_path / "open_clip_model.pt"
    torch.save(reference.state_dict(), path)
    with torch.no_grad():
        image, text = reference.encode_image(pixels()), reference.encode_text(captions()[0])
    assert_equal_towers(path, config(path, name), image, text)


def clip_model(folder: Path, shard: str = "5GB") -> tuple[Tensor, Tensor]:
    """Save a transformers CLIPModel; returns its embeddings."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    small = {
        "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2,
        "num_attention_heads": 1,
    }  # fmt: skip
    text = small | {
        "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "bos_token_id": 1,
        "eos_token_id": VOCABULARY - 1, "pad_token_id": 0,
    }  # fmt: skip
    vision = small | {"image_size": 64, "patch_size": 16}
    model = shake(
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=EMBED))
    )
    model.save_pretrained(folder, max_shard_size=shard)
    CLIPImageProcessor().save_pretrained(folder)
    with torch.no_grad():
        out = model(input_ids=captions()[0], pixel_values=pixels())
    return out.image_embeds, out.text_embeds


@pytest.mark.parametrize("container", ["whole", "shards", "pytorch_model.bin"])
def test_transformers_clip(tmp_path: Path, container: str) -> None:
    image, text = clip_model(tmp_path, "100KB" if container == "shards" else "5GB")
    if container == "shards":
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
        assert not (tmp_path / "model.safetensors").exists()
    if container == "pytorch_model.bin":
        from safetensors.torch import load_file

        state = load_file(tmp_path / "model.safetensors")
        # Older transformers wrote these too.
        positions = {
            f"{t}_model.embeddings.position_ids": torch.arange(4) for t in ("text", "vision")
        }
        torch.save(state | positions, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    asked = config(tmp_path, "vit_pico_patch16_clip_64")
    assert_equal_towers(tmp_path, asked, image, text)
    built, matches = build(asked, seed=0)
    assert built.config.image.activation == built.config.text.activation == "quick_gelu"
    assert built.config.image.mean == pytest.approx(CLIP_MEAN)
    derived = {key for match in matches for key in match.derived}
    assert len(derived) == (2 if container == "pytorch_model.bin" else 0)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    clip_model(tmp_path, "100KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(RequestError, match=re.escape(gone.name)):
        build(config(tmp_path, "vit_pico_patch16_clip_64"), seed=0)


def siglip(path: Path, **text: object) -> Model:
    tower = ImageTower(
        name="vit_pico_patch16_siglip_64", image_size=64, head="none", weights=str(path)
    )
    words = ClipText(
        family="siglip", width=WIDTH, layers=2, heads=2, context_length=LENGTH,
        vocab_size=VOCABULARY, weights=str(path), **text,  # type: ignore[arg-type]
    )  # fmt: skip
    return Model(image=tower, text=words, embed_dim=WIDTH)


def test_transformers_siglip(tmp_path: Path) -> None:
    from transformers import SiglipConfig, SiglipModel

    small = {
        "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    text = small | {
        "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "projection_size": WIDTH,
        "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1,
    }  # fmt: skip
    vision = small | {"image_size": 64, "patch_size": 16}
    reference = shake(SiglipModel(SiglipConfig(text_config=text, vision_config=vision)))
    reference.save_pretrained(tmp_path)
    tokens, lengths = captions()
    full = tokens.clone()
    for row, length in enumerate(lengths):
        full[row, length:] = 1
    with torch.no_grad():
        out = reference(input_ids=full, pixel_values=pixels())
        built, matches = build(siglip(tmp_path), seed=0)
        built.eval()
        assert_same(built.visual(images()), out.image_embeds)
        # Trimmed to the longest of a batch: the tower itself fills up to the full length.
        assert_same(
            built.text(tokens[:, :5], lengths.clamp(max=5))[[0, 2]], out.text_embeds[[0, 2]]
        )
        assert_same(built.text(tokens, lengths), out.text_embeds)
    assert built.config.image.activation == built.config.text.activation == "gelu_tanh"
    assert built.config.text.pad_id == 1
    assert all(match.share == 1.0 and not match.new for match in matches)
    assert matches[0].trained.startswith("SigLIP")
    assert matches[1].dropped["logit_bias"].startswith("of the sigmoid loss")
    with pytest.raises(RequestError, match="family = 'clip' contradicts"):
        build(config(tmp_path, "vit_pico_patch16_siglip_64"), seed=0)


def test_open_clip_siglip_on_timm(tmp_path: Path) -> None:
    vision = {
        "timm_model_name": "vit_pico_patch16_siglip_64", "timm_pool": "map", "timm_proj": "none",
        "image_size": 64,
    }  # fmt: skip
    text = {
        "context_length": LENGTH, "vocab_size": VOCABULARY, "width": WIDTH, "heads": 2, "layers": 2,
        "no_causal_mask": True, "proj_bias": True, "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    }  # fmt: skip
    reference = shake(CustomTextCLIP(WIDTH, vision, text, init_logit_bias=-10))
    path = tmp_path / "siglip.pt"
    torch.save(reference.state_dict(), path)
    tokens, lengths = captions()
    full = tokens.clone()
    for row, length in enumerate(lengths):
        full[row, length:] = 1
    with torch.no_grad():
        image, text = reference.encode_image(pixels()), reference.encode_text(full)
    assert_equal_towers(path, siglip(path), image, text)


def test_our_own_checkpoint_folder(tmp_path: Path) -> None:
    """A checkpoint starts another run, and open_clip's `local-dir:` gives the same embeddings."""
    first = tmp_path / "ViT-pico.pt"
    torch.save(native().state_dict() | {"input_resolution": torch.tensor(64)}, first)
    model, _ = build(config(first, "vit_pico_patch16_clip_64"), seed=0)
    (folder := tmp_path / "checkpoint").mkdir()
    write_model(folder, model, None, {"step": 1, "score": None, "dataset": ""})
    again, matches = build(config(folder, "vit_pico_patch16_clip_64"), seed=9)
    assert again.config.image.activation == "quick_gelu"
    assert again.config.text.activation == "quick_gelu"
    assert matches[0].layout == "two towers (open_clip)"
    peer = open_clip.create_model(f"local-dir:{folder}").eval()
    with torch.no_grad():
        assert_same(again.eval().visual(images()), peer.encode_image(pixels()))
        assert_same(again.text(*captions()), peer.encode_text(captions()[0]))
    with pytest.raises(RequestError, match="contradicts"):
        build(config(folder, "vit_pico_patch16_clip_64", activation="gelu"), seed=9)
