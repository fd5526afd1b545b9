"""tools/convert_to_hf.py: what it writes, what it refuses, and that the folder needs nothing of ours."""

import ast
import functools
import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megahedge.config.mixer import MixerConfig
from megahedge.data.meta import tokenizer_digest
from megahedge.evaluation.generation import GenerateOptions, Writer
from megahedge.evaluation.models import open_model, teacher_of
from megahedge.export import code_files, source, to_hf
from megahedge.export.model_card import model_card
from megahedge.export.scan_backends import BACKENDS, choose_backend
from megahedge.export.to_hf import ExportOptions, build_hf_model, export
from megahedge.kernels import registry
from megahedge.models.hf_weights import save_pretrained
from megahedge.utils.cli import parse_options
from megahedge.utils.errors import InputError
from tests.evaluation.small import byte_tokenizer
from tests.export import small as export_small
from tests.export.small import MIXERS, STEP, VOCAB_SIZE, export_of, student, tokens_of, write_run

RECORD_OF = export_small.record_of
REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_folder_holds_all_that_a_hugging_face_folder_holds(folders):
    for name, folder in folders.items():
        found = {path.name for path in folder.iterdir()}
        assert found == {"config.json", "generation_config.json", "model.safetensors", "README.md", *code_files.code_files()} | {
            "tokenizer.json",
            "tokenizer_config.json",
        }
        config = json.loads((folder / "config.json").read_text())
        assert (config["model_type"], config["architectures"]) == ("hedge_mamba", ["HedgeMambaForCausalLM"])
        assert config["rope_position"] == MIXERS[name].rope and config["mixer"] == MIXERS[name].kind
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation["eos_token_id"] == generation["pad_token_id"] == byte_tokenizer().eos_token_id
        assert tokenizer_digest(transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)) == tokenizer_digest(
            byte_tokenizer()
        )


def test_the_teachers_parameters_keep_their_published_names(folders):
    published = set(load_file(folders["tuned"] / "model.safetensors"))
    with torch.device("meta"):
        neox = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4))
    wanted = {name.replace("lm_head.", "embed_out.") for name, _ in neox.named_parameters()}
    assert wanted < published
    assert all(".attention." in name for name in published - wanted)


def test_nothing_in_a_folder_imports_this_package(folders):
    """But torch, transformers, the standard library and each other, by the flat relative imports that transformers understands."""
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    files = {path.name: path.read_text() for path in folders["paper"].glob("*.py")}
    assert len(files) > 5
    for content in files.values():
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in files
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in allowed


def test_the_scan_that_travels_is_the_packages_own(folders):
    """So is all else: line by line but for imports and the line above that says where it is from."""
    origins = set()
    for path in folders["paper"].glob("*.py"):
        head, *copied = path.read_text().splitlines()
        origins.add(head.split()[3])
        own = (REPOSITORY / head.split()[3]).read_text().splitlines()
        differing = [(ours, theirs) for ours, theirs in zip(own, copied, strict=False) if ours != theirs]
        assert all(ours.startswith("from megahedge.") and theirs.startswith("from .") for ours, theirs in differing), path
        added = [line for line in copied[len(own) :] if line]
        assert not added or (path.name == "modeling_hedge_mamba.py" and all(line[0] == "#" or line.startswith("from .") for line in added))
    kernels = {f"megahedge/kernels/{name}.py" for name in ("scan", "chunked", "loop", "reference", "normaliser", "problem", "causal_conv")}
    assert origins >= kernels | {"megahedge/models/mixers/offsets.py", "megahedge/utils/labels.py"}


def test_two_modules_of_one_name_cannot_travel(monkeypatch):
    """One file would take the other's place."""
    source = code_files._source
    more = {"megahedge.export.mixer": "from megahedge.other.labels import X\n", "megahedge.other.labels": ""}
    monkeypatch.setattr(code_files, "_source", lambda module: more.get(module, "") + (source(module) if "other" not in module else ""))
    with pytest.raises(AssertionError, match="would have one name"):
        code_files.code_files()


def test_the_backends_that_travel_are_those_of_torch_in_the_same_order():
    assert list(BACKENDS.items()) == [(name, backend) for name, backend in registry.BACKENDS.items() if name in BACKENDS]
    assert registry.BACKENDS.keys() - BACKENDS.keys() <= {"mamba_ssm", "numba", "triton"}
    with pytest.raises(ValueError, match="no scan backend 'triton'"):
        choose_backend("triton", None)


def test_the_card_says_what_the_run_recorded_and_no_more(root, tmp_path):
    run = write_run(tmp_path / "run", student(MIXERS["paper"]), root / "teacher", recipe="paper", lr=2.5e-5)
    lines = [{"kind": "eval", "step": step, "perplexity": 10.0 + step, "loss": 2.0, "tokens": 8000} for step in (0, STEP)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "eval", "st')
    card = (export_of(tmp_path, tmp_path, "run").folder / "README.md").read_text()
    assert "base_model" not in card
    for said in ("| teacher | teacher |", "7 steps, 1,792 tokens, recipe paper, learning rate 2.5e-05", "token perplexity 17.000", "KL "):
        assert said in card
    assert str(tmp_path) not in card and "stage 1" not in card and "None" not in card
    (run / "metrics.jsonl").unlink()
    assert "perplexity" not in (export_of(tmp_path, tmp_path, "run", overwrite=True, verify=False).folder / "README.md").read_text()


def with_damaged(*records):
    """Writers of a run folder's records that no run writes."""

    def damage(run):
        for name, content in records:
            (run / name).write_bytes(content)

    return damage


EVALUATION = b'{"kind": "eval", "step": 7, "perplexity": 17.0, "loss": 2.0, "tokens": 8000}\n'
DAMAGES = {
    "no data": with_damaged(("run.json", b'{"data": [], "options": [], "code": "main"}')),
    "a rate in words": with_damaged(("run.json", b'{"options": {"lr": "small"}}')),
    "not UTF-8": with_damaged(("metrics.jsonl", EVALUATION + b"\xff\xfe\n")),
    "a broken line": with_damaged(("metrics.jsonl", b'{"kind": "eval", {"step": 7}\n' + EVALUATION)),
    "an evaluation of nothing": with_damaged(("metrics.jsonl", b'{"kind": "eval", "step": 7}\n')),
    "a folder": lambda run: (run / "metrics.jsonl").mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_costs_a_row_of_the_card_and_not_the_export(damage, root, tmp_path, caplog):
    run = write_run(tmp_path / "run", student(MIXERS["tuned"], num_layers=1), root / "teacher")
    DAMAGES[damage](run)
    stored = source.StoredModel.open(run)
    assert stored.find_tokenizer()[0] is not None and to_hf._run_dtype(stored) == "fp32"
    with caplog.at_level(logging.WARNING, logger="megahedge"):
        card = model_card(stored, "out", "fp32", None)
    assert "| weights | fp32 |" in card and "perplexity" not in card and "small" not in card
    assert ("leaves a row out" in caplog.text) == (damage != "a folder")


def test_a_precision_that_is_not_known_is_asked_for(root, tmp_path):
    run = write_run(tmp_path / "run", student(MIXERS["tuned"], num_layers=1), root / "teacher", dtype="int4")
    with pytest.raises(InputError, match=r"run.json names a precision that is not known, 'int4'; give --dtype"):
        export(ExportOptions(run=str(run), out=str(tmp_path / "out")))


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (1e6, "fp16", r"--dtype=fp16 cannot hold embedding.weight, whose values reach 1e\+06"),
        (float("nan"), "auto", r"step-00000007 holds NaN or infinity in embedding.weight"),
        (float("-inf"), "bf16", r"step-00000007 holds NaN or infinity in embedding.weight"),
    ],
)
def test_what_is_no_number_in_the_precision_asked_for_is_refused(value, dtype, said, root, tmp_path):
    """Of one token that no prompt of the verification may hold."""
    model = student(MIXERS["tuned"], num_layers=1)
    with torch.no_grad():
        model.embedding.weight[100, 3] = value
    write_run(tmp_path / "run", model, root / "teacher")
    with pytest.raises(InputError, match=said):
        export_of(tmp_path, tmp_path, "run", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


TEACHERS = {
    "a folder elsewhere": ("{elsewhere}/teacher", None, None, "teacher", None),
    "a folder from here on": ("teacher", None, "./teacher", "teacher", None),
    "a folder from the root on": ("{here}/teacher", None, "./teacher", "teacher", None),
    "a folder that has gone": ("runs/gone", None, "./runs/gone", "gone", None),
    "a model of the hub": ("EleutherAI/pythia-14m", "step3000", "EleutherAI/pythia-14m", "EleutherAI/pythia-14m step3000", True),
    "a downloaded one": ("some/downloaded", None, "some/downloaded", "some/downloaded", True),
}
"""Teacher and revision as the run named them; the teacher in config.json, in the card's table, and whether it is a base_model."""


@pytest.mark.parametrize("kind", TEACHERS)
def test_the_teacher_is_named_as_others_can_read_it(kind, root, tmp_path, monkeypatch):
    """On the hub, or as seen from here: no path of this machine, and no folder's name that a stranger would look up on the hub."""
    given, revision, in_config, in_card, on_hub = TEACHERS[kind]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "was_downloaded", lambda name: name == "some/downloaded")
    monkeypatch.setattr(export_small, "record_of", functools.partial(_record_with_teacher, given, revision, root, tmp_path))
    run = write_run(tmp_path / "run", student(MIXERS["tuned"], num_layers=1), None)
    options = ExportOptions(run=str(run), out="out", tokenizer=str(root / "teacher"), verify=False)
    folder = export(options).folder
    config, card = json.loads((folder / "config.json").read_text()), (folder / "README.md").read_text()
    assert (config.get("teacher"), config.get("teacher_revision")) == (in_config, revision)
    assert f"| teacher | {in_card} |" in card
    assert (f"base_model: {given}\n" in card) == ("base_model" in card) == bool(on_hub)
    assert not any(str(place) in text for place in (root, tmp_path) for text in (card, json.dumps(config)))


def _record_with_teacher(given, revision, root, here, config, _):
    return RECORD_OF(config, None) | {"origin": {"teacher": given.format(elsewhere=root, here=here), "teacher_revision": revision}}


def test_a_teacher_is_found_from_where_the_student_was_made_or_lies(root, tmp_path, monkeypatch):
    """The name is one as seen from a folder above the student, or from here."""
    project = tmp_path / "project"
    shutil.copytree(root / "teacher", project / "models" / "teacher")
    monkeypatch.chdir(project)
    monkeypatch.setattr(export_small, "record_of", functools.partial(_record_with_teacher, "models/teacher", None, root, project))
    run = write_run(project / "runs" / "tuned", student(MIXERS["tuned"], num_layers=1), None)
    folder = export(ExportOptions(run=str(run), out=str(run / "exported"), verify=False)).folder
    elsewhere = shutil.copytree(folder, tmp_path / "out")
    assert all(teacher_of(student).samefile("models/teacher") for student in (run, folder, elsewhere))
    monkeypatch.chdir(tmp_path)
    assert all(teacher_of(student).samefile("project/models/teacher") for student in (run, folder))
    assert source.StoredModel.open(run).find_tokenizer()[0] is not None
    with pytest.raises(InputError, match="give --teacher"):
        teacher_of(elsewhere)


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("auto", torch.bfloat16)])
def test_weights_have_the_precision_asked_for_and_are_verified_in_it(dtype, stored, root, tmp_path):
    run = write_run(tmp_path / "run", student(MIXERS["tuned"]), root / "teacher", dtype="bf16")
    done = export(ExportOptions(run=str(run), out=str(tmp_path / "out"), dtype=dtype))
    assert done.agreement.holds and done.agreement.positions > 500
    assert {tensor.dtype for tensor in load_file(done.folder / "model.safetensors").values()} == {stored}
    assert json.loads((done.folder / "config.json").read_text())["dtype"] == str(stored).removeprefix("torch.")


def test_large_models_are_written_in_several_files(root, tmp_path, monkeypatch):
    def in_small_files(*arguments, **keywords):
        save_pretrained(*arguments, max_file_bytes=100_000, **keywords)

    monkeypatch.setattr(to_hf, "save_pretrained", in_small_files)
    done = export_of(root, tmp_path)
    assert len(list(done.folder.glob("model-*.safetensors"))) > 2 and done.agreement.holds


def test_tied_embeddings_are_written_once(root, tmp_path):
    run = write_run(tmp_path / "run", student(MIXERS["tuned"], tie_word_embeddings=True), root / "teacher")
    done = export(ExportOptions(run=str(run), out=str(tmp_path / "out")))
    assert "embed_out.weight" not in load_file(done.folder / "model.safetensors") and done.agreement.holds


def test_a_pretrained_teacher_is_written_as_gpt_neox(tmp_path):
    model = student(MixerConfig())
    run = write_run(tmp_path / "run", model, None)
    byte_tokenizer().save_pretrained(run / "hf")
    done = export(ExportOptions(run=str(run), out=str(tmp_path / "out")))
    assert done.agreement.holds and not list(done.folder.glob("*.py"))
    built, tokenizer = build_hf_model(run)
    assert isinstance(built, transformers.GPTNeoXForCausalLM) and tokenizer is not None
    tokens = tokens_of(9)
    torch.testing.assert_close(built(tokens).logits, model(tokens), rtol=0, atol=1e-5)  # fp32 logits of two implementations


# ---- who reads it -------------------------------------------------------------------------------------------------------------------

_READER = """
import json, sys
sys.modules["megahedge"] = None  # an import of it fails
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

folders, expected, copies = json.loads(sys.argv[1])
for name, folder in folders.items():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")
    assert model.dtype == torch.float32, model.dtype
    tokens = torch.tensor([expected["tokens"]])
    logits = model(tokens).logits[0, -1]
    assert (logits - torch.tensor(expected[name])).abs().max() < 1e-4, name
    text = model.generate(tokens, max_new_tokens=5, do_sample=False)
    assert text.shape[1] > tokens.shape[1]
    if copies:
        model.save_pretrained(f"{copies}/{name}")
        AutoTokenizer.from_pretrained(folder, trust_remote_code=True).save_pretrained(f"{copies}/{name}")
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
assert base(tokens).last_hidden_state.shape[:2] == tokens.shape
print("read", len(folders))
"""


def _read_by_a_stranger(folders, expected, copies, tmp_path):
    """In a process of its own that cannot import this package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    argument = json.dumps([{name: str(folder) for name, folder in folders.items()}, expected, copies and str(copies)])
    command = [sys.executable, "-I", "-c", _READER, argument]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, cwd=tmp_path)
    assert done.returncode == 0 and f"read {len(folders)}" in done.stdout, done.stderr


@torch.no_grad()
@pytest.mark.slow
def test_a_folder_and_a_copy_that_transformers_saves_of_it_load_where_this_package_is_not(folders, loaded, tmp_path):
    tokens = tokens_of(70)
    expected = {name: model(tokens).logits[0, -1].tolist() for name, model in loaded.items()} | {"tokens": tokens[0].tolist()}
    _read_by_a_stranger(folders, expected, tmp_path / "copies", tmp_path)
    copies = {name: tmp_path / "copies" / name for name in folders}
    _read_by_a_stranger(copies, expected, None, tmp_path)


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_an_export_scores_as_its_run(implementation, root, folders):
    tokens = tokens_of(70, batch=2)
    labels = tokens.roll(-1, dims=1)
    for name in ("tuned", "stage1-paper"):
        run, exported = open_model(root / name), open_model(folders[name], implementation)
        with torch.no_grad():
            torch.testing.assert_close(exported.token_losses(tokens, labels), run.token_losses(tokens, labels), rtol=0, atol=1e-4)
        assert (exported.source.kind, exported.vocab_size, exported.max_seq_len) == ("hedge_mamba", VOCAB_SIZE, run.max_seq_len)
        assert exported.source.loaded == run.source.loaded
        assert exported.tokenizer_digest == run.tokenizer_digest


def _cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _with_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


BROKEN_FOLDERS = {
    "weights cut off": (_cut_off, "transformers cannot load .*out: .*"),
    "another width": (
        _with_config(intermediate_size=100),
        r"holds 6 tensors in another shape .*: .*dense_4h_to_h.weight is \[64, 96\], not",
    ),
    "more layers": (_with_config(num_hidden_layers=3), r"lacks \d+ tensors that its config.json asks for: gpt_neox.layers.2"),
    "no number of heads": (_with_config(num_attention_heads=0), "transformers cannot load"),
    "a size in words": (_with_config(hidden_size="wide"), "transformers cannot load"),
}


@pytest.mark.parametrize("implementation", ["megahedge", "transformers"])
@pytest.mark.parametrize("fault", BROKEN_FOLDERS)
def test_a_folder_that_does_not_load_is_one_line(fault, implementation, folders, tmp_path):
    damage, said = BROKEN_FOLDERS[fault]
    damage(shutil.copytree(folders["tuned"], tmp_path / "out"))
    with pytest.raises(InputError, match=said) as caught:
        open_model(tmp_path / "out", implementation)
    assert "\n" not in str(caught.value)


def test_code_of_another_version_in_a_folder_is_told(folders, tmp_path, caplog):
    """`auto` scores with this package's code; whoever scores an older export is to know."""
    folder = shutil.copytree(folders["tuned"], tmp_path / "out")
    with caplog.at_level(logging.WARNING, logger="megahedge"):
        open_model(folder)
        assert "another version" not in caplog.text
        path = folder / "modeling_hedge_mamba.py"
        path.write_text(path.read_text().replace(code_files.code_digest(), "0123456789abcdef"))
        open_model(folder)
    assert f"carries the code of another version (0123456789abcdef); what runs here is this package's ({code_files.code_digest()})" in (
        caplog.text
    )


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_a_model_may_be_built_in_memory_from_a_run(name, root, loaded):
    model, tokenizer = build_hf_model(root / name)
    tokens = tokens_of(70)
    torch.testing.assert_close(model(tokens).logits, loaded[name](tokens).logits, rtol=0, atol=1e-4)
    assert tokenizer_digest(tokenizer) == tokenizer_digest(byte_tokenizer())
    texts = [m.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0) for m in (model, loaded[name])]
    assert torch.equal(*texts)


def test_the_tokenizer_must_be_at_hand_and_the_runs(root, tmp_path):
    run = write_run(tmp_path / "run", student(MIXERS["tuned"]), tmp_path / "moved")
    with pytest.raises(InputError, match="give --tokenizer"):
        export_of(tmp_path, tmp_path, "run")
    byte_tokenizer(reverse=True).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="has digest"):
        export_of(tmp_path, tmp_path, "run", tokenizer=str(tmp_path / "other"))
    export_of(tmp_path, tmp_path, "run", tokenizer=str(root / "teacher"), verify=False)
    assert (run / "run.json").is_file()


def test_a_mamba_is_scored_as_a_run_and_neither_exported_nor_made_to_write(root, tmp_path):
    run = write_run(tmp_path / "run", student(MixerConfig(kind="mamba")), root / "teacher")
    said = "baseline with mixer=mamba, .* score the run itself with scripts/evaluate.py"
    for refused in (
        lambda: export_of(tmp_path, tmp_path, "run"),
        lambda: Writer(run, GenerateOptions(model=str(run), prompt="a")),
    ):
        with pytest.raises(InputError, match=said) as caught:
            refused()
        assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    tokens = tokens_of(9)
    assert open_model(run).token_losses(tokens, tokens).isfinite().all()


def test_the_card_names_a_bypass(folders):
    assert "convolution of 2, bypass |" in (folders["state"] / "README.md").read_text()


def test_script_takes_a_checkpoint_and_says_what_it_has_done(root, tmp_path, monkeypatch, capsys):
    checkpoint = root / "tuned" / "checkpoints" / f"step-{STEP:08d}"
    monkeypatch.setattr(sys, "argv", ["convert_to_hf.py", str(checkpoint), str(tmp_path / "out"), "--dtype", "bf16"])
    runpy.run_path(str(REPOSITORY / "tools" / "convert_to_hf.py"))["main"]()
    said = capsys.readouterr().out
    assert "stage2, step 7: hedge_mamba" in said and "verified: KL" in said and "in fp32" in said
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "RUN and OUT must be given"),
        (["{root}/tuned"], "OUT must be given"),
        (["no/such/run", "{out}"], "no/such/run holds no complete checkpoint"),
        (["{root}/tuned", "{out}", "--dtype", "fp8"], "--dtype=fp8"),
        (["{root}/tuned", "{out}", "more"], "more"),
        (["{root}/tuned", " "], "OUT is empty"),
        (["", "{out}"], "RUN is empty"),
    ],
)
def test_bad_input_is_one_line(arguments, said, root, tmp_path):
    words = [word.format(root=root, out=tmp_path / "out") for word in arguments]
    with pytest.raises(InputError, match=said) as caught:
        export(parse_options(ExportOptions, words, prog="convert_to_hf.py"))
    assert "\n" not in str(caught.value)
