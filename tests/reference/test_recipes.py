"""The recipes that start from published weights really build, load and train.

No network: the hub's own cache holds small stand-ins with random values, in the layouts of the real
files; the real sizes are matched without memory for them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from tiny_towers import EMBED, WIDTH, eva_file, shake
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    BertConfig,
    BertForPreTraining,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from pennyclip.config.file import RECIPES, load_recipe, recipe_names
from pennyclip.config.keys import Config, TransformersText
from pennyclip.model.clip import CLIP
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.weights.checkpoint import checkpoints
from pennyclip.weights.load import load_tower
from pennyclip.weights.read import WeightsFile
from pennyclip.weights.statements import Statements

CLIP32, CLIP16 = "openai/clip-vit-base-patch32", "openai/clip-vit-base-patch16"
EVA, VIT = "timm/eva02_base_patch14_224.mim_in22k", "timm/vit_base_patch16_224.augreg_in21k"
BERT, XLMR = "google-bert/bert-base-uncased", "FacebookAI/xlm-roberta-base"
STARTS = {  # recipe -> what its towers start from
    "finetune-clip-b32": (CLIP32, CLIP32),
    "lit": (VIT, BERT),
    "eva02-mim-lamb-flip": (EVA, CLIP16),
    "clipa-b16": (None, None),
    "multilingual-text": (CLIP32, XLMR),
}
HIDDEN = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 1}
HIDDEN |= {"intermediate_size": 4 * WIDTH}
XLMR_SIZES = {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}


def references(config: Config) -> tuple[str | None, str | None]:
    image, text = config.model.image.weights, config.model.text.weights
    text = config.model.text.name if isinstance(config.model.text, TransformersText) else text
    return tuple(given and given.removeprefix("hub:") for given in (image, text))  # type: ignore[return-value]


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_opens_with_what_it_needs(name: str) -> None:
    load_recipe(name)
    comment = (RECIPES / f"{name}.toml").read_text().split("\n\n[")[0]
    assert f"#   pennyclip train {name} --data DATASET --out RUN\n" in comment
    assert "\n# Hardware " in comment
    if name in STARTS:
        for title in ("Hours", "Cost", "Score", "Sources"):
            assert f"\n# {title} " in comment
        for line in ("Hours", "Cost", "Score"):
            assert f"\n# {line:<10} predicted" in comment


def real(name: str) -> dict[str, Tensor]:
    """Keys and shapes of a published file; no values."""
    with torch.device("meta"):
        if name in (CLIP32, CLIP16):
            vision = {"patch_size": int(name[-2:])}
            return CLIPModel(CLIPConfig(vision_config=vision)).state_dict()
        if name == BERT:
            return BertForPreTraining(BertConfig()).state_dict()
        if name == XLMR:
            config = XLMRobertaConfig(vocab_size=250002, **XLMR_SIZES)
            return XLMRobertaForMaskedLM(config).state_dict()
        model, _, tag = name.removeprefix("timm/").partition(".")
        classes = timm.get_pretrained_cfg(f"{model}.{tag}").num_classes
        return timm.create_model(model, num_classes=classes).state_dict()


@pytest.mark.parametrize("name", [name for name in STARTS if STARTS[name][0]])
def test_the_real_sizes_match_wholly(name: str, tmp_path: Path) -> None:
    config = load_recipe(name)
    assert references(config) == STARTS[name]
    image, text = STARTS[name]
    known = {BERT: BertConfig(), XLMR: XLMRobertaConfig(vocab_size=250002, **XLMR_SIZES)}
    if text in known:
        known[text].save_pretrained(tmp_path)
    with torch.device("meta"):
        model = CLIP(config.model, tmp_path if text in known else None)
    assert image is not None
    assert text is not None
    for tower, start in (("image", image), ("text", text)):
        given = getattr(config.model, tower)
        match = load_tower(
            model, tower, WeightsFile(start, tmp_path, None, real(start)), said=Statements(),
            drop_keys=given.drop_keys, new_keys=given.new_keys,
        )  # fmt: skip
        match.check()
        assert match.share == 1.0
        assert match.missing == []
        heads = ("visual.head.", "text.proj.")
        assert all(new.startswith(heads) for new in match.new), match.new


def cached(cache: Path, name: str) -> Path:
    """A folder where huggingface_hub keeps what it has fetched of a model."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = cache / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (folder := home / "snapshots" / commit).mkdir(parents=True)
    return folder


def write_clip(folder: Path) -> None:
    text = HIDDEN | {"vocab_size": 49408, "max_position_embeddings": 77}
    text |= {"bos_token_id": 49406, "eos_token_id": 49407}
    vision = HIDDEN | {"image_size": 64, "patch_size": 16}
    both = CLIPConfig(text_config=text, vision_config=vision, projection_dim=EMBED)
    model = shake(CLIPModel(both))
    model.save_pretrained(folder)
    # OpenAI's files on the hub are pickles.
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    CLIPImageProcessor().save_pretrained(folder)


def write_timm(folder: Path, name: str, classes: int) -> None:
    model = shake(timm.create_model(name, num_classes=classes))
    model.pretrained_cfg["tag"] = "augreg_in21k" if classes else "mim_in22k"
    timm.models.save_for_hf(model, folder, safe_serialization=True)


def write_bert(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", "cat", "the"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    config = BertConfig(vocab_size=len(words), max_position_embeddings=32, **HIDDEN)
    shake(BertForPreTraining(config)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))


def write_xlmr(folder: Path) -> None:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyzäöü"]
    sizes = XLMR_SIZES | {"max_position_embeddings": 80, "vocab_size": len(pieces)}
    shake(XLMRobertaForMaskedLM(XLMRobertaConfig(**sizes, **HIDDEN))).save_pretrained(folder)
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(folder / "tokenizer.json"))


CLIP_IMAGE = ["--model.image.name", "vit_pico_patch16_clip_64", "--model.image.image-size", "64"]
EVA_IMAGE = ["--model.image.name", "eva02_pico_split_64", "--model.image.image-size", "64"]
PLAIN_IMAGE = ["--model.image.name", "vit_pico_patch16_64", "--model.image.image-size", "64"]
CLIP_TEXT = ["--model.text.width", "64", "--model.text.layers", "2", "--model.text.heads", "1"]
TWO_STAGES = ["--stages.0.samples", "16", "--stages.1.samples", "8", "--micro-batch", "4"]
SCALED_DOWN = {
    "finetune-clip-b32": [*CLIP_IMAGE, *CLIP_TEXT],
    "lit": PLAIN_IMAGE,
    "eva02-mim-lamb-flip": [*EVA_IMAGE, *CLIP_TEXT, *TWO_STAGES],
    "clipa-b16": [*CLIP_IMAGE, *CLIP_TEXT, *TWO_STAGES, "--stages.0.image-size", "32"],
    "multilingual-text": CLIP_IMAGE,
}  # fmt: skip
DRIVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tiny_towers
from pennyclip.cli import main
for arguments in json.loads(sys.argv[2]):
    if code := main(arguments):
        sys.exit(code)
"""


@pytest.fixture(scope="module")
def runs(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every recipe, 2 or 3 updates long, in one process that knows the hub by its cache only."""
    folder = tmp_path_factory.mktemp("recipes")
    (cache := folder / "hub").mkdir()
    write_clip(cached(cache, CLIP32))
    write_clip(cached(cache, CLIP16))
    write_timm(cached(cache, EVA), "eva02_pico_split_64", 0)
    write_timm(cached(cache, VIT), "vit_pico_patch16_64", 21843)
    write_bert(cached(cache, BERT))
    write_xlmr(cached(cache, XLMR))
    eva_file(folder / "eva02_mim.pt", "eva02_pico_split_64", kind="mim")
    write_clip(local := cached(folder, "local"))

    def command(name: str, out: str, *more: str) -> list[str]:
        lengths = [] if "--micro-batch" in SCALED_DOWN[name] else ["--stages.0.samples", "24"]
        if load_recipe(name).stages[0].epochs is not None:
            lengths += ["--stages.0.epochs", "None"]
        return [
            "train", name, "--data", str(small_dataset), "--out", str(folder / out),
            "--batch-size", "8", "--log-every", "1", "--workers", "0", "--model.embed-dim",
            str(EMBED), "--optim.warmup-steps", "1", *lengths, *SCALED_DOWN[name], *more,
        ]  # fmt: skip

    commands = [command(name, name) for name in STARTS]
    files = ["--model.image.weights", str(folder / "eva02_mim.pt")]
    files += ["--model.text.weights", str(local)]
    commands.append(command("eva02-mim-lamb-flip", "from-files", *files))
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    arguments = [str(Path(__file__).parent), json.dumps(commands)]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", [*STARTS, "from-files"])
def test_a_recipe_loads_and_trains(runs: Path, name: str) -> None:
    records = list(read_metrics(runs / name / "metrics.jsonl"))
    starts = next(r for r in records if r["kind"] == "start")["weights"]
    towers = [] if name == "clipa-b16" else ["image tower", "text tower"]
    assert [start["tower"] for start in starts] == towers
    assert all(start["share"] == 1.0 for start in starts)
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert len(losses) == 3
    assert all(0 < loss < 20 for loss in losses)
    if name in ("eva02-mim-lamb-flip", "from-files"):
        assert starts[0]["trained"] == "masked image modelling"
    if name == "finetune-clip-b32":
        assert starts[0]["trained"].startswith("CLIP")


def trained(run: Path) -> dict[str, Tensor]:
    return load_file(checkpoints(run)[-1].path / "model.safetensors")


def test_what_is_frozen_stays_and_what_learns_moves(runs: Path) -> None:
    (clip,) = (runs / "hub").glob("models--openai--clip-vit-base-patch32/snapshots/*")
    start = torch.load(clip / "pytorch_model.bin", weights_only=True)
    first = start["vision_model.encoder.layers.0.mlp.fc1.weight"]
    name = "visual.trunk.blocks.0.mlp.fc1.weight"
    assert torch.equal(trained(runs / "multilingual-text")[name], first)
    learned = trained(runs / "finetune-clip-b32")
    assert not torch.equal(learned[name], first)
    assert (learned[name] - first).abs().max() < 1e-3
    # Both towers come from one file, and so does their temperature.
    scale = start["logit_scale"]
    assert 0 < (learned["logit_scale"] - scale).abs() < 1e-3
    (vit,) = (runs / "hub").glob("models--timm--vit*/snapshots/*/model.safetensors")
    trunk = trained(runs / "lit")["visual.trunk.blocks.0.mlp.fc1.weight"]
    assert torch.equal(trunk, load_file(vit)["blocks.0.mlp.fc1.weight"])
