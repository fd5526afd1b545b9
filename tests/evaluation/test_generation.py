"""Generation follows its options and its seed, and reads and writes text for any kind of model."""

import importlib
import io
import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers

from megahedge.evaluation import generation
from megahedge.evaluation.generation import GenerateOptions, Writer, writers
from megahedge.evaluation.models import open_model
from megahedge.utils.errors import InputError
from tests.evaluation.students import write_student

REPOSITORY = Path(__file__).parents[2]
TEACHER = str(REPOSITORY / "scripts" / "quickstart" / "teacher")
PROMPT = "The harbour was"


def options(**changes) -> GenerateOptions:
    return GenerateOptions(**{"model": TEACHER, "prompt": PROMPT, "max_new_tokens": 12} | changes)


def written(prompt=PROMPT, **changes) -> str:
    return Writer(TEACHER, options(**changes)).write(prompt, lambda piece: None)


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> dict[str, str]:
    """A student's run and export, and its teacher; all made for 64 tokens, of one byte each."""
    return write_student(tmp_path_factory.mktemp("students"))


def test_temperature_zero_takes_the_likeliest_token():
    model = transformers.AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()  # in bf16 some are equally likely
    tokenizer = transformers.AutoTokenizer.from_pretrained(TEACHER)
    tokens = tokenizer(PROMPT, return_tensors="pt").input_ids
    for _ in range(12):
        tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), dim=1)
    assert PROMPT + written(temperature=0.0) == tokenizer.decode(tokens[0])
    assert written(temperature=0.0, seed=1) == written(temperature=0.0, seed=2)


def test_the_seed_decides_what_is_drawn():
    first, again, other = (written(seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_narrow_sampling_is_taking_the_likeliest():
    likeliest = written(temperature=0.0)
    assert written(top_k=1) == written(top_p=1e-6) == likeliest
    assert written(temperature=3.0, top_p=1.0) != likeliest


def test_pieces_add_up_to_the_text():
    pieces = []
    assert Writer(TEACHER, options()).write(PROMPT, pieces.append) == "".join(pieces)
    assert len(pieces) > 3


def test_a_text_without_room_is_refused():
    with pytest.raises(InputError, match=r"the prompt has 2045 tokens, .* made for max_position_embeddings=2048"):
        Writer(TEACHER, options()).write("the" + " the" * 2044, lambda piece: None)


def test_who_has_no_teacher_cannot_be_compared_with_it():
    with pytest.raises(InputError, match="does not say who its teacher was; give --teacher"):
        list(writers(options(compare_teacher=True)))
    assert [writer.name for writer in writers(options(teacher=TEACHER))] == [TEACHER, TEACHER]


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_a_student_writes_what_its_trainer_would(students, kind):
    """Greedy, with the cache of constant size, against the forward pass over all tokens so far."""
    writer = Writer(students[kind], options(model=students[kind], temperature=0.0))
    tokens = writer.tokenizer("ab cd", return_tensors="pt").input_ids
    logits = open_model(students["run"]).logits
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat((tokens, logits(tokens)[:, -1:].argmax(-1)), dim=1)
    assert writer.write("ab cd", lambda piece: None) == writer.tokenizer.decode(tokens[0, 5:], skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_a_student_is_compared_with_the_teacher_that_it_names(students, kind, monkeypatch):
    """A run names the folder that it had, an export the way from where it was made."""
    monkeypatch.chdir(Path(students["run"]).parent)
    compared = list(writers(options(model=students[kind], compare_teacher=True)))
    assert [Path(writer.name).resolve() for writer in compared] == [Path(students[name]) for name in (kind, "teacher")]
    assert [writer.model.config.model_type for writer in compared] == ["hedge_mamba", "gpt_neox"]
    texts = [writer.write("ab cd", lambda piece: None) for writer in compared]
    assert texts[0] != texts[1] and all(texts)


def test_a_teacher_that_has_gone_is_told(students, tmp_path):
    student = shutil.copytree(students["hf"], tmp_path / "hf")
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps(config | {"teacher": str(tmp_path / "gone")}))
    with pytest.raises(InputError, match=r"the teacher of --model=.*hf: .*gone.* give --teacher"):
        list(writers(options(model=str(student), compare_teacher=True)))


def test_who_has_no_tokenizer_is_named(students, tmp_path):
    """The teacher, where it is the teacher."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((Path(students["teacher"]) / file).read_bytes())
    with pytest.raises(InputError, match=f"^--teacher: {tmp_path} has no tokenizer with it"):
        list(writers(options(model=students["hf"], teacher=str(tmp_path))))


def test_a_student_goes_on_beyond_what_it_was_made_for_with_a_warning(students, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megahedge"), "propagate", True)
    writer = Writer(students["hf"], options(model=students["hf"], max_new_tokens=70, temperature=0.0))
    tokens = []
    monkeypatch.setattr(generation._Stream, "put", lambda self, value: tokens.append(value))
    writer.write("ab", lambda piece: None)
    assert len(tokens) - 1 == 70  # the prompt is put first
    assert "made for max_position_embeddings=64: what it makes of more is untested" in caplog.text


@pytest.fixture
def answers(monkeypatch, capsys):
    """A function from the words of a command and lines of input to what scripts/generate.py prints to both streams."""
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    script = importlib.import_module("generate")

    def run(lines: str | bytes, *words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["generate.py", *words])
        raw = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        script.main()
        return tuple(capsys.readouterr())

    return run


def test_prompts_are_read_line_by_line(answers):
    shown, _ = answers(f"{PROMPT}\n\nOnce upon\n", "--model", TEACHER, "--max_new_tokens", "5")
    assert shown.startswith(PROMPT) and "\nOnce upon" in shown


def test_a_prompt_that_cannot_be_answered_does_not_end_the_others(answers, students):
    shown, errors = answers(f"ab\n{'x' * 60}\ncd\n", "--model", students["teacher"], "--max_new_tokens", "5")
    assert shown.startswith("ab") and "\ncd" in shown and "xxx" not in shown
    assert errors.count("error: ") == 1 and "the prompt has 60 tokens, with --max_new_tokens=5 that is 65" in errors


def test_a_prompt_that_is_no_text_does_not_end_the_others(answers, students):
    shown, errors = answers(b"ab\n\xff\xfe x\ncd\n", "--model", students["teacher"], "--max_new_tokens", "5")
    assert shown.startswith("ab") and "\ncd" in shown
    assert errors == "error: the prompt '\\udcff\\udcfe x' is not valid UTF-8\n"


def test_model_and_teacher_answer_one_after_the_other(answers, students):
    shown, _ = answers("", "--model", students["run"], "--compare_teacher", "--prompt", "ab", "--max_new_tokens", "5")
    assert [line for line in shown.splitlines() if line.startswith("--- ")] == [f"--- {students['run']}", f"--- {students['teacher']}"]
    assert shown.count("\nab") == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "fp8"}, "--dtype=fp8 is not known; use one of fp32, bf16"),
        ({"temperature": -1.0}, "--temperature=-1.0"),
        ({"temperature": float("nan")}, "--temperature=nan"),
        ({"top_p": 0.0}, "--top_p=0.0"),
        ({"max_new_tokens": 0}, "--max_new_tokens=0"),
        ({"top_k": -1}, "--top_k=-1"),
        ({"seed": 2**32}, r"--seed=4294967296 must be below 2\*\*32"),
        ({"prompt": ""}, "--prompt=''"),
        ({"prompt": "\udcff"}, "is not valid UTF-8"),
        ({"temperature": 1e-40}, "--temperature=1e-40 is too small"),
    ],
)
def test_bad_options_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        options(**changes)
