"""Generation follows its options and its seed, and reads and writes text for any kind of model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from megahedge.evaluation.generation import GenerateOptions, Writer, writers
from megahedge.utils.errors import InputError

REPOSITORY = Path(__file__).parents[2]
TEACHER = str(REPOSITORY / "scripts" / "quickstart" / "teacher")
PROMPT = "The harbour was"


def options(**changes) -> GenerateOptions:
    return GenerateOptions(**{"model": TEACHER, "prompt": PROMPT, "max_new_tokens": 12} | changes)


def written(prompt=PROMPT, **changes) -> str:
    return Writer(TEACHER, options(**changes)).write(prompt, lambda piece: None)


def test_temperature_zero_takes_the_likeliest_token():
    model = transformers.AutoModelForCausalLM.from_pretrained(TEACHER).eval()
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
    with pytest.raises(InputError, match=r"--prompt has 2045 tokens, .* made for max_position_embeddings=2048"):
        Writer(TEACHER, options()).write("the" + " the" * 2044, lambda piece: None)


def test_who_has_no_teacher_cannot_be_compared_with_it():
    with pytest.raises(InputError, match="does not say who its teacher was; give --teacher"):
        list(writers(options(compare_teacher=True)))
    assert [writer.name for writer in writers(options(teacher=TEACHER))] == [TEACHER, TEACHER]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": -1.0}, "--temperature=-1.0"),
        ({"temperature": float("nan")}, "--temperature=nan"),
        ({"top_p": 0.0}, "--top_p=0.0"),
        ({"max_new_tokens": 0}, "--max_new_tokens=0"),
        ({"top_k": -1}, "--top_k=-1"),
        ({"prompt": ""}, "--prompt=''"),
        ({"prompt": "\udcff"}, "is not valid UTF-8"),
        ({"temperature": 1e-40}, "--temperature=1e-40 is too small"),
    ],
)
def test_bad_options_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        options(**changes)


def test_prompts_are_read_line_by_line():
    command = [sys.executable, str(REPOSITORY / "scripts" / "generate.py"), "--model", TEACHER, "--max_new_tokens", "5"]
    shown = subprocess.run(command, input=f"{PROMPT}\n\nOnce upon\n", capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(PROMPT) and "\nOnce upon" in shown.stdout
