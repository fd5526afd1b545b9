"""Hugging Face folders of every age load; what we write loads in transformers; bad folders end in one clear line."""

import concurrent.futures
import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megahedge.models.families import FAMILIES
from megahedge.models.hf_weights import (
    CheckpointReader,
    TokenIds,
    from_pretrained,
    load_config,
    load_pretrained,
    resolve_pretrained,
    save_pretrained,
    weights_digest,
)
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.topology import TensorParallel
from megahedge.utils.errors import InputError
from tests.models.small import random_tokens, randomize, small_config

TOKENS = random_tokens(97)

# vocabulary, hidden size, layers, heads and parameters of the published suite
PYTHIA = {
    "14m": (50304, 128, 6, 4, 14_067_712),
    "70m": (50304, 512, 6, 8, 70_426_624),
    "160m": (50304, 768, 12, 12, 162_322_944),
    "410m": (50304, 1024, 24, 16, 405_334_016),
    "1b": (50304, 2048, 16, 8, 1_011_781_632),
    "1.4b": (50304, 2048, 24, 16, 1_414_647_808),
    "2.8b": (50304, 2560, 32, 32, 2_775_208_960),
    "6.9b": (50432, 4096, 32, 32, 6_857_302_016),
    "12b": (50688, 5120, 36, 40, 11_846_072_320),
}


def published_pythia_config(vocab_size: int, hidden_size: int, num_layers: int, num_heads: int) -> dict:
    """config.json as EleutherAI published it, in the words of 2023."""
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": 4 * hidden_size,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": vocab_size,
    }


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return randomize(LanguageModel(small_config()))


@pytest.fixture
def folder(model, tmp_path):
    """A written folder, in one fp32 file."""
    save_pretrained(model.named_parameters(), model.config, tmp_path / "hf", torch.float32)
    return tmp_path / "hf"


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def replace_by_bin(folder, tensors: dict[str, torch.Tensor], num_files: int = 1, **options) -> None:
    """Put `tensors` as .bin files, as transformers wrote them before safetensors, in the place of the folder's weights."""
    (folder / "model.safetensors").unlink()
    if num_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **options)
        return
    weight_map = {}
    for number in range(num_files):
        file = f"pytorch_model-{number + 1:05d}-of-{num_files:05d}.bin"
        part = dict(list(tensors.items())[number::num_files])
        torch.save(part, folder / file, **options)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def with_old_buffers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The masks and frequencies that old transformers kept in the state."""
    buffers = {}
    for layer in range(2):
        prefix = f"gpt_neox.layers.{layer}.attention"
        buffers[f"{prefix}.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
        buffers[f"{prefix}.masked_bias"] = torch.tensor(-1e9)
        buffers[f"{prefix}.rotary_emb.inv_freq"] = torch.ones(2)
    return {**tensors, **buffers}


@pytest.mark.parametrize(("size", "published"), PYTHIA.items())
def test_published_pythia_configs_give_the_published_parameter_counts(size, published, tmp_path):
    *sizes, count = published
    (tmp_path / "config.json").write_text(json.dumps(published_pythia_config(*sizes)))
    with torch.device("meta"):
        model = LanguageModel(load_config(tmp_path))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes", [{}, {"parallel_residual": False, "rotary_pct": 1.0, "rotary_base": 5000.0}, {"tie_word_embeddings": True}]
)
def test_config_survives_the_way_out_and_back(family, changes):
    config = small_config(family=family, **changes)
    assert FAMILIES[family].model_config(FAMILIES[family].hf_config(config)) == config


def test_both_spellings_of_the_config_mean_the_same():
    published = published_pythia_config(50304, 512, 6, 8)
    config = FAMILIES["gpt_neox"].model_config(published)
    assert FAMILIES["gpt_neox"].model_config(FAMILIES["gpt_neox"].hf_config(config)) == config
    assert (config.rotary_pct, config.rotary_base, config.rotary_dim) == (0.25, 10000.0, 16)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_file_bytes", [10**9, 40_000])
def test_transformers_loads_what_we_write(tied, max_file_bytes, tmp_path):
    model = randomize(LanguageModel(small_config(tie_word_embeddings=tied)))
    save_pretrained(model.named_parameters(), model.config, tmp_path, torch.float32, TokenIds(bos=0, eos=0), max_file_bytes)
    assert (tmp_path / "model.safetensors").exists() == (max_file_bytes == 10**9)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.config.eos_token_id == 0 and theirs.generation_config.eos_token_id == 0
    torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)  # fp32 rounding on logits near 1
    assert torch.equal(from_pretrained(tmp_path)(TOKENS), model(TOKENS))


def test_we_load_what_transformers_writes(folder, model, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert torch.equal(from_pretrained(tmp_path / "theirs")(TOKENS), model(TOKENS))


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("zipped", [True, False])
def test_bin_files_of_old_checkpoints_load(folder, model, num_files, zipped):
    replace_by_bin(folder, with_old_buffers(weights(folder)), num_files, _use_new_zipfile_serialization=zipped)
    assert torch.equal(from_pretrained(folder)(TOKENS), model(TOKENS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_load_exactly(model, dtype, tmp_path):
    save_pretrained(model.named_parameters(), model.config, tmp_path, dtype)
    loaded = from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.to(dtype).float())
    assert from_pretrained(tmp_path, dtype=dtype).final_norm.weight.dtype == dtype
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_tied_model_loads_from_bin_that_repeats_the_matrix(tmp_path):
    model = randomize(LanguageModel(small_config(tie_word_embeddings=True)))
    save_pretrained(model.named_parameters(), model.config, tmp_path, torch.float32)
    tensors = weights(tmp_path)
    replace_by_bin(tmp_path, {**tensors, "embed_out.weight": tensors["gpt_neox.embed_in.weight"]})
    assert torch.equal(from_pretrained(tmp_path)(TOKENS), model(TOKENS))


def test_trained_model_agrees_with_transformers(test_data):
    folder = test_data / "models" / "standin-neox"
    tokens = random_tokens(2048, seq_len=65)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    # logits of a trained model reach 20, where fp32 sums of 128 terms differ by 1e-5
    torch.testing.assert_close(from_pretrained(folder)(tokens), theirs, rtol=1e-5, atol=5e-5)


def test_ranks_read_no_more_than_their_slices(folder, model, monkeypatch):
    """Over all ranks each sharded element is read once; the whole of a sharded tensor never."""
    elements = {}
    original = CheckpointReader.read

    def counting(reader, name, index=None):
        piece = original(reader, name, index)
        elements[name] = elements.get(name, 0) + piece.numel()
        return piece

    monkeypatch.setattr(CheckpointReader, "read", counting)
    for rank in range(4):
        load_pretrained(LanguageModel(model.config, TensorParallel(None, rank, 4)), folder)
    family = FAMILIES[model.config.family]
    for name, parameter in model.named_parameters():
        copies = 1 if parameter.shard_spec.dim is not None else 4
        assert elements[family.hf_name(name)] == copies * parameter.numel(), name


def test_digest_tells_weights_apart(folder, model, tmp_path):
    save_pretrained(model.named_parameters(), model.config, tmp_path / "same", torch.float32)
    assert weights_digest(tmp_path / "same") == weights_digest(folder)
    other = randomize(LanguageModel(model.config), seed=5)
    save_pretrained(other.named_parameters(), model.config, tmp_path / "other", torch.float32)
    assert weights_digest(tmp_path / "other") != weights_digest(folder)


def test_writing_refuses_to_overwrite_or_to_leave_out(folder, model, tmp_path):
    with pytest.raises(InputError, match="holds weights already"):
        save_pretrained(model.named_parameters(), model.config, folder, torch.float32)
    with pytest.raises(ValueError, match=r"not given: lm_head\.weight"):
        save_pretrained(list(model.named_parameters())[:-1], model.config, tmp_path / "part", torch.float32)
    assert not (tmp_path / "part" / "config.json").exists()


def edit_config(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not supported; use one of gpt_neox"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "RoPE scaling .rope_type='linear'. is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported"),
        ({"num_attention_heads": 5}, "num_heads=5 does not divide hidden_size=64"),
    ],
)
def test_config_of_another_model_is_refused(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(InputError, match=message):
        load_config(folder)


def test_config_without_sizes_names_them(folder):
    (folder / "config.json").write_text('{"model_type": "gpt_neox", "vocab_size": 97, "hidden_size": 64}')
    with pytest.raises(InputError, match="lacks num_hidden_layers, num_attention_heads"):
        load_config(folder)


def test_weights_that_do_not_fit_the_config_are_refused(folder):
    tensors = weights(folder)
    tensors.pop("gpt_neox.layers.1.mlp.dense_h_to_4h.bias")
    tensors["gpt_neox.layers.9.extra.weight"] = torch.ones(1)
    tensors["embed_out.weight"] = torch.ones(98, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError) as error:
        from_pretrained(folder)
    text = str(error.value)
    assert "1 missing (gpt_neox.layers.1.mlp.dense_h_to_4h.bias)" in text
    assert "1 unexpected (gpt_neox.layers.9.extra.weight)" in text
    assert "1 of another shape (embed_out.weight is [98, 64], not [97, 64])" in text


def test_quantised_weights_are_refused(folder):
    tensors = weights(folder)
    tensors["embed_out.weight"] = torch.ones(97, 64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"embed_out\.weight is torch\.int8"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "config.json").unlink() or (folder / "hf").mkdir(), "holds no config.json; give .*/hf, the model that"),
        (lambda folder: (folder / "config.json").unlink() or (folder / "run.json").touch(), "it is a run that has written no model"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
        (lambda folder: (folder / "config.json").write_text("[]"), "a JSON object is expected"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100), "model.safetensors is damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]), "is damaged"),
        (lambda folder: replace_by_bin(folder, {}) or (folder / "pytorch_model.bin").write_bytes(b"junk"), "pytorch_model.bin is damaged"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "it has no weight_map"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
            "gone.safetensors, missing",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}'),
            "holds a; it does not",
        ),
    ],
)
def test_damaged_folders_end_in_one_clear_line(folder, damage, message):
    damage(folder)
    with pytest.raises(InputError, match=message) as error:
        from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_pickled_objects_are_refused_without_torchs_advice_to_run_them(folder):
    replace_by_bin(folder, {})
    torch.save({"gpt_neox.embed_in.weight": Path("anything")}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model.bin is damaged, or holds pickled objects .* never loaded") as error:
        from_pretrained(folder)
    assert "weights_only" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("published", "weights"), [("safetensors", "model*.safetensors"), ("bin", "pytorch_model*.bin")])
def test_hub_snapshot_takes_one_kind_of_weights(folder, published, weights, tmp_path, monkeypatch):
    """A stand-in for the hub's client: .bin files are fetched only where the revision has no safetensors."""
    if published == "bin":
        replace_by_bin(folder, {"a": torch.ones(1)})
    asked = []

    def snapshot_download(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns[-1]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert resolve_pretrained("EleutherAI/pythia-14m", revision="step1000") == folder
    assert asked[-1] == ("EleutherAI/pythia-14m", "step1000", weights)


def test_the_ranks_of_a_node_fetch_a_model_one_after_the_other(folder, tmp_path, monkeypatch):
    under_way, most = [], []

    def snapshot_download(name, revision, allow_patterns):
        under_way.append(name)
        time.sleep(0.1)
        most.append(len(under_way))
        under_way.remove(name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with concurrent.futures.ThreadPoolExecutor(4) as ranks:  # a lock is that of an open file, so that threads do as processes
        found = list(ranks.map(resolve_pretrained, 4 * ["EleutherAI/pythia-14m"]))
    assert found == 4 * [folder] and most == [1, 1, 1, 1]


def test_a_cache_that_may_only_be_read_is_read(folder, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("no folder, so that no lock can be made in it")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert resolve_pretrained("EleutherAI/pythia-14m") == folder


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/such/folder/at/all", ", and the Hugging Face hub has no names like it"),
        ("/nowhere", ", and the Hugging Face hub has no names like it"),
        ("someone/some-model", " and could not be had"),
    ],
)
def test_a_name_that_is_neither_folder_nor_model_says_what_is_wanted(name, reason, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no look-up on the network
    with pytest.raises(InputError, match=f"(?is)^'{name}' is no local folder{reason}.* give a folder .* or a hub name"):
        resolve_pretrained(name)


def test_a_file_or_a_revision_of_a_folder_is_refused(folder):
    with pytest.raises(InputError, match="is a file"):
        resolve_pretrained(folder / "config.json")
    with pytest.raises(InputError, match="revision=step3000 goes with a model of the Hugging Face hub"):
        resolve_pretrained(folder, revision="step3000")
    assert resolve_pretrained(folder) == folder
