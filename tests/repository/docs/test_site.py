"""The generated parts of the manual are complete: public names, commands, keys, records."""

import importlib
import re
import sys
import zlib

import pytest

from tests.repository.public_surface.subjects import PUBLIC_MODULES
from tests.support import ROOT

DOCS = ROOT / "docs"
MODULES = (
    *PUBLIC_MODULES, "lightning_unified.data", "lightning_unified.models.classifier", "lightning_unified.models.compressor",
    "lightning_unified.models.finetune", "lightning_unified.models.gearhead", "lightning_unified.models.grpo", "lightning_unified.models.wordle", "lightning_unified.errors",
)  # fmt: skip


@pytest.fixture
def site(monkeypatch):
    """The modules of docs/_site by name."""
    monkeypatch.setattr(sys, "path", [str(DOCS / "_site"), *sys.path])
    return importlib.import_module


def test_the_api_reference_has_every_public_name():
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("reference/api/*.md"))
    documented = {
        path.rpartition(".")[2] for path in re.findall(r"auto(?:class|function|exception|data):: ([\w.]+)", text)
    }
    public = {name for module in MODULES for name in getattr(importlib.import_module(module), "__all__", ())}

    assert public - documented == set()


def test_every_key_of_the_configuration_has_a_meaning(site):
    configuration = site("configuration")
    choices = [(group, choice) for group in configuration.groups() for choice in configuration.choices(group)]
    keys = [(key, group, choice) for group, choice in choices for key in choice.keys]
    wanted = {"memory.budget", "data.batch_size", "trainer.max_steps", "model.learning_rate"}

    assert wanted <= {key.name for key, *_ in keys}
    assert [key.name for key, *of in keys if not (key.meaning or configuration.meaning_of(key.name, *of))] == []


def test_a_key_gets_its_default_and_meaning(site):
    text = site("configuration").described("memory")

    assert re.search(r"^\| `memory.micro_batch_size` \| `4` \| `4` \| `4` \| `8` \| `4` \| \S", text, re.MULTILINE)
    assert "| `memory.batch_norm` | `refuse` | or micro: accept BatchNorm" in text


def test_every_group_has_a_page(site):
    groups = [group for group in site("configuration").groups() if group]

    assert [group for group in groups if not (DOCS / f"reference/configuration/{group}.md").is_file()] == []


def test_every_argument_of_a_command_is_explained(site):
    text = site("commands").described()
    unexplained = [line for line in text.splitlines() if line.startswith("| `") and line.rstrip(" |").endswith("`")]

    assert "## `python -m lightning_unified plan`" in text
    assert unexplained == []


def test_an_inventory_has_its_names_and_addresses(site, tmp_path):
    inventory = site("inventory")
    source = tmp_path / "inventory.txt"
    source.write_text("# kept by hand\n[torch] https://example.org/\ntorch.nn.Module class generated/$.html#$\n")
    mapping = inventory.written(source, tmp_path)
    body = zlib.decompress((tmp_path / "torch.inv").read_bytes().split(b"zlib.\n", 1)[1]).decode()

    assert mapping == {"torch": ("https://example.org/", str(tmp_path / "torch.inv"))}
    assert body == "torch.nn.Module py:class 1 generated/torch.nn.Module.html#torch.nn.Module -\n"
    with pytest.raises(ValueError, match="line 1"):
        inventory.parsed("torch.nn.Module class")


def test_a_record_says_what_was_decided():
    records = [path for path in DOCS.glob("decisions/**/*.md") if path.name != "index.md"]
    unclear = [path.name for path in records if "\n**Decision.** " not in path.read_text(encoding="utf-8")]
    unshown = [path for path in records if "```{records}" not in (path.parent / "index.md").read_text(encoding="utf-8")]

    assert len(records) > 150
    assert (unclear, unshown) == ([], [])


def test_a_folder_of_the_manual_is_short():
    folders = [DOCS, *(path for path in DOCS.rglob("*") if path.is_dir() and "_build" not in path.parts)]
    long = {
        str(path): count
        for path in folders
        if (count := sum(not entry.name.startswith("__") for entry in path.iterdir())) > 14
    }

    assert long == {}
