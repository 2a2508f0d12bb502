"""The documentation does what it says: its commands run, its links and file names lead somewhere.

All `sh` and `python` blocks of a page run in order, in one folder that holds what the pages take
for granted: `pictures`, `products.csv`, `tars`, `coco`, `photos.parquet`, `saved`, `classes`, two
JPEGs, and what the README's own blocks leave (`mydata`, `myrun`). Only the length of a training is
cut. What a test cannot do (install, clone, the long scripts) stands in `console` blocks, which are
not run.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pennyclip.cli import COMMANDS, main
from pennyclip.config.file import recipe_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
CONSOLE_LINES = 10  # lines that are not run, over all pages
PAIRS = 48  # 2 or 3 of them for dev and val each
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
SHELL = set("|<>;&$`*(")


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the commands run, as the README's own commands leave it."""
    folder = tmp_path_factory.mktemp("docs")
    clipart = ROOT / "examples/clipart"
    lines = (clipart / "captions.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines[:: len(lines) // PAIRS]]
    (folder / "pictures").mkdir()
    for pair in pairs:
        picture = shutil.copy(clipart / pair["image"], folder / "pictures")
        Path(picture).with_suffix(".txt").write_text(pair["captions"][0], encoding="utf-8")

    jpegs = [clipart / p["image"] for p in pairs if p["image"].endswith(".jpg")]
    for target, source in zip(("apple.jpg", "chair.jpg"), jpegs, strict=False):
        shutil.copy(source, folder / target)
    rows = [f'{clipart / pair["image"]},"a thing, {i}"' for i, pair in enumerate(pairs[:6])]
    (folder / "products.csv").write_text("\n".join(["photo,product", *rows]) + "\n")
    (folder / "tars").mkdir()
    with tarfile.open(folder / "tars/0.tar", "w") as tar:
        for file in sorted((folder / "pictures").iterdir())[:8]:
            tar.add(file, file.name)
    tables(folder, pairs[:16])
    for kind, file in (("apple", "apple.jpg"), ("chair", "chair.jpg")):
        (folder / "classes" / kind).mkdir(parents=True)
        shutil.copy(folder / file, folder / "classes" / kind)

    with pytest.MonkeyPatch.context() as patch:
        run_page(ROOT / "README.md", folder, patch)
    (folder / "quickstart").mkdir()
    (folder / "quickstart/dataset").symlink_to(folder / "mydata")
    (folder / "quickstart/run").symlink_to(folder / "myrun")
    return folder


def tables(folder: Path, pairs: list[dict]) -> None:
    """The same few pictures as COCO's captions, as parquet, and as `datasets` saves them."""
    clipart = ROOT / "examples/clipart"
    (folder / "coco/annotations").mkdir(parents=True)
    (folder / "coco/train2017").mkdir()
    images, annotations = [], []
    for number, pair in enumerate(pairs):
        name = Path(shutil.copy(clipart / pair["image"], folder / "coco/train2017")).name
        images.append({"id": number, "file_name": name})
        annotations.append({"image_id": number, "caption": pair["captions"][0]})
    tree = {"images": images, "annotations": annotations}
    (folder / "coco/annotations/captions_train2017.json").write_text(json.dumps(tree))
    cells = [{"bytes": (clipart / p["image"]).read_bytes(), "path": None} for p in pairs]
    table = pa.table({"image": cells, "caption": [pair["captions"][0] for pair in pairs]})
    pq.write_table(table, folder / "photos.parquet")
    (folder / "saved").mkdir()
    file = folder / "saved/data-00000-of-00001.arrow"
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    state = {"_data_files": [{"filename": file.name}], "_split": "train"}
    (folder / "saved/state.json").write_text(json.dumps(state))


def run_page(page: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    known: dict[str, object] = {}
    for label, text in blocks(page):
        patch.chdir(folder)
        if label == "sh":
            for line in text.strip().splitlines():
                run_line(line)
        elif label == "python":
            exec(compile(text, name(page), "exec"), known)


def run_line(line: str) -> None:
    """Our own commands run in this process, which saves their imports; others in a shell."""
    words = shlex.split(line, comments=True)
    if words[0] == "pennyclip" and not SHELL & set(line):
        assert main([*words[1:], *shortened(words)]) == 0, line
    else:
        shell = ["bash", "-euo", "pipefail", "-c", line]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


def shortened(words: list[str]) -> list[str]:
    """Makes a run of a recipe one of a few updates, where the page does not do so itself."""
    if words[1] != "train" or words[2].startswith("--"):
        return []
    options = {"--batch-size": "16", "--stages.0.epochs": "1"}
    return [word for key, value in options.items() if key not in words for word in (key, value)]


def test_the_readme(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its commands ran; what they leave is there, and finds the picture that is asked for."""
    assert "<svg" in (workspace / "myrun/report.html").read_text(encoding="utf-8")
    assert json.loads((workspace / "mydata/dataset.json").read_text())["counts"]["kept"] >= PAIRS
    query = ["search", str(workspace / "myrun"), "a drawing", "--data", str(workspace / "mydata")]
    capsys.readouterr()
    assert main([*query, "--top", "4", "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)["hits"]
    assert len({hit["origin"] for hit in hits}) == 4
    assert all((workspace / "pictures" / hit["origin"]).is_file() for hit in hits)


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name == "docs"], ids=name)
def test_page(page: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pennyclip.loss

    # What a page adds to the table must not stay in it.
    monkeypatch.setattr(pennyclip.loss, "LOSSES", dict(pennyclip.loss.LOSSES))
    run_page(page, workspace, monkeypatch)
    if page.stem == "extending":
        check_example_loss(pennyclip.loss.LOSSES["text_to_image"])
    elif page.stem == "choose-a-recipe":
        assert (workspace / "both.html").stat().st_size > 10_000
        assert 'precision = "bf16"' in (workspace / "mine/config.toml").read_text()


def check_example_loss(loss: object) -> None:
    """Three rows, the first two of one group: the loss by hand."""
    import torch

    from pennyclip.loss import Features, Loss

    assert isinstance(loss, Loss)
    image, text = torch.eye(3), torch.tensor([[0.6, 0.8, 0.0], [0.0, 1.0, 0.0], [0.8, 0.0, 0.6]])
    value, metrics = loss.compute(
        Features(
            image=image,
            text=text,
            all_image=image,
            all_text=text,
            offset=0,
            scale=torch.tensor(2.0),
            bias=None,
            groups=torch.tensor([5, 5, 6]),
        )
    )
    e = torch.exp
    own = torch.tensor([1.2, 2.0, 1.2])
    rivals = torch.stack([e(own[0]) + 1, e(own[1]) + 1, e(own[2]) + 1 + e(torch.tensor(1.6))])
    torch.testing.assert_close(value, (rivals.log() - own).mean())
    assert float(metrics["accuracy"]) == pytest.approx(2 / 3)


def test_few_commands_are_not_run() -> None:
    labels = [(label, text) for page in PAGES for label, text in blocks(page)]
    console = [text for label, text in labels if label == "console"]
    assert not any(line.startswith("pennyclip") for text in console for line in text.splitlines())
    assert sum(len(text.splitlines()) for text in console) <= CONSOLE_LINES
    assert {label for label, _ in labels} <= {"sh", "python", "console", "csv", ""}
    assert sum(label == "sh" for label, _ in labels) >= 10


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in LINK.findall(text):
        assert "://" not in target, f"{target}: the pages stand by themselves"
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{name(page)}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor[1:] in slugs, f"{name(page)}: {target}{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_file_names_exist(page: Path) -> None:
    """Paths in backticks, from the repository's root or (short) inside src/pennyclip."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    roots = "src|tests|docs|scripts|examples|benchmarks|\\.ci"
    # What a reader would write, and what nobody should.
    invented = {"src/pennyclip/loss/text_to_image.py", "src/pennyclip/config/recipes/NAME.toml"}
    invented |= {"utils.py"}
    for path in re.findall(rf"`((?:{roots})/[\w./-]*)`", text):
        assert (ROOT / path).exists() or path in invented, f"{name(page)}: {path}"
    for path in re.findall(r"`([\w/]+\.py)`", text):
        found = (ROOT / path).exists() or any((ROOT / "src/pennyclip").rglob(path))
        assert found or path in invented, f"{name(page)}: {path}"


def test_the_readme_tree_is_the_tree() -> None:
    """Every package and module at the top of src/pennyclip stands in it, and nothing else."""
    tree = next(text for _, text in blocks(ROOT / "README.md") if "src/pennyclip/\n" in text)
    above, inside = tree.split("src/pennyclip/\n")
    for entry in re.findall(r"^([\w./]+)", above, re.M):
        assert (ROOT / entry).exists(), entry
    named = set(re.findall(r"\b(\w+\.py)\b", inside)) | set(re.findall(r"^  (\w+)/", inside, re.M))
    package = ROOT / "src/pennyclip"
    modules = {p.name for p in package.glob("*.py") if p.name != "__init__.py"}
    packages = {p.parent.name for p in package.glob("*/__init__.py")}
    missing = (modules | packages) - named
    gone = named - modules - packages
    assert not missing, f"add to the README's tree: {sorted(missing)}"
    assert not gone, f"the README's tree names what is not there: {sorted(gone)}"
    for module in modules:
        assert ast.get_docstring(ast.parse((package / module).read_text())), module


def test_recipes_and_commands_are_documented() -> None:
    table = (ROOT / "docs/choose-a-recipe.md").read_text(encoding="utf-8")
    rows = table.split("| recipe |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)`", rows, re.M)) == set(recipe_names())
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    used = set(re.findall(r"pennyclip ((?:(?:eval|bench) )?[a-z]+(?:-[a-z]+)*)\b", text))
    assert set(COMMANDS) <= used, "commands that no page shows"
