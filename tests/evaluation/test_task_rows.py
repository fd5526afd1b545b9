"""Rows of local files are told by file, line and field where a task cannot be made of them, and before anything is scored."""

import dataclasses
import json
from pathlib import Path

import pytest

from megahedge.data.meta import tokenizer_digest
from megahedge.evaluation import evaluate as evaluating
from megahedge.evaluation.continuations import ContinuationScorer
from megahedge.evaluation.evaluate import evaluate
from megahedge.evaluation.options import EvaluateOptions
from megahedge.evaluation.tasks import PAPER_METRICS
from megahedge.utils.errors import InputError, RunError
from tests.evaluation.small import byte_tokenizer, write_run
from tests.evaluation.task_rows import write_rows

pytest.importorskip("lm_eval", reason="lm-eval, the extra `eval`, is not installed")

from megahedge.evaluation.lm_eval.data import find_tasks
from megahedge.evaluation.lm_eval.paper_rows import ROW_CHECKS
from megahedge.evaluation.lm_eval.rows import LocalRows, check_file

OWN_TASK = """
task: piqa
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Sound rows of all tasks of the paper."""
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """An export with its tokenizer, made for 64 tokens."""
    root = tmp_path_factory.mktemp("model")
    write_run(root, tokenizer_digest(byte_tokenizer()))
    byte_tokenizer().save_pretrained(root / "hf")
    return str(root / "hf")


def changed(rows: Path, folder: Path, task: str, change: dict) -> Path:
    """A file of a task whose third line has other fields; `...` takes one away."""
    source = next(rows.glob(f"{task}*.jsonl"))
    lines = source.read_text().splitlines()
    row = {name: value for name, value in (json.loads(lines[2]) | change).items() if value is not ...}
    path = folder / source.name
    path.write_text("\n".join([*lines[:2], json.dumps(row), *lines[3:]]))
    return path


PROBLEM = {"question": "What?", "answer": "A", "options": ["a", "b", "c", "d"]}


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("piqa", {"goal": ...}, "goal is missing; text that is not empty is wanted"),
        ("piqa", {"goal": None}, "goal is None"),
        ("piqa", {"goal": 5}, "goal is 5"),
        ("piqa", {"sol2": " "}, "sol2 is ' '"),
        ("piqa", {"label": 7}, "label is 7; one of 0, 1 is wanted"),
        ("piqa", {"label": -1}, "label is -1"),
        ("piqa", {"label": 0.5}, "label is 0.5"),
        ("piqa", {"label": None}, "label is None"),
        ("piqa", {"label": "1"}, "label is '1'"),
        ("boolq", {"label": True}, "label is True"),
        ("boolq", {"passage": ""}, "passage is ''"),
        ("arc_easy", {"answerKey": "Z"}, "answerKey is 'Z'; one of 'A', 'B', 'C', 'D' is wanted"),
        ("arc_challenge", {"choices": []}, "choices.text is missing"),
        ("arc_challenge", {"choices": {"text": ["a", "b"], "label": ["A"]}}, "choices.label is ['A']; a list of 2 names"),
        ("hellaswag", {"endings": []}, "endings is []; a list of two texts or more"),
        ("hellaswag", {"activity_label": ...}, "activity_label is missing"),
        ("hellaswag", {"label": "4"}, "label is '4'"),
        ("social_iqa", {"label": "0"}, "label is '0'"),
        ("social_iqa", {"answerB": None}, "answerB is None"),
        ("winogrande", {"sentence": "no gap"}, "sentence is 'no gap'; text with _ where the option goes"),
        ("winogrande", {"answer": "3"}, "answer is '3'; one of '1', '2' is wanted"),
        ("lambada_openai", {"text": "word"}, "text is 'word'"),
        ("lambada_openai", {"text": "two "}, "text is 'two '"),
        ("logiqa", {"options": ["a", "b"], "label": "c"}, "label is 'c'; one of 'a', 'b' is wanted"),
        ("race", {"problems": "[1"}, "problems is '[1'; a list of problems"),
        ("race", {"problems": str([PROBLEM | {"answer": "E"}])}, "in problems, answer is 'E'"),
        ("race", {"problems": str([PROBLEM | {"options": []}])}, "in problems, options is []; a list of four texts"),
    ],
)
def test_a_row_of_a_task_of_the_paper_is_told_with_its_field(rows, tmp_path, task, change, said):
    path = changed(rows, tmp_path, task, change)
    with pytest.raises(InputError) as caught:
        check_file(path, task, of_paper=True)
    assert str(caught.value).startswith(f"--offline_data: {path}:3 (task {task}) cannot be used: ")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_all_tasks_of_the_paper_are_checked_and_sound_rows_pass(rows):
    assert set(ROW_CHECKS) == set(PAPER_METRICS)
    for task in ROW_CHECKS:
        assert check_file(next(rows.glob(f"{task}*.jsonl")), task, of_paper=True).lines == (1, 2, 3, 4, 5)


@pytest.mark.slow
def test_published_rows_pass(test_data):
    """36,000 rows of the ten tasks, as they are given away."""
    for task in ROW_CHECKS:
        assert check_file(next((test_data / "eval").glob(f"{task}*.jsonl")), task, of_paper=True).lines


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", " holds no rows; task wikitext reads a JSON object from each line"),
        (b"\n  \n", " holds no rows"),
        (b'{"page": "a"}\n\n{"page": "b', ":3 (task wikitext) cannot be used: it is not JSON (Unterminated string"),
        (b"[]\n", ":1 (task wikitext) cannot be used: a JSON object is wanted, not a list"),
        (b'{"page": "\xff"}', ":1 (task wikitext) cannot be used: it is not JSON ("),
        (b'{"page": NaN}', "NaN is no number of JSON"),
        (b'{"page": "\\ud800"}', ":1 (task wikitext) cannot be used: 'page' holds half a character (a lone surrogate)"),
        (None, " cannot be read: Is a directory"),
    ],
)
def test_a_line_that_is_no_json_object_is_told(tmp_path, content, said):
    path = tmp_path / "wikitext.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        check_file(path, "wikitext", of_paper=False)
    assert str(caught.value).startswith(f"--offline_data: {path}{said}" if said[0] in " :" else "--offline_data: ")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def own_task(folder: Path, *rows: dict, blank_lines: int = 0) -> str:
    """The folder of a user's task under the name of one of the paper's, with fields of its own, and of its rows after a sound one."""
    sound = {"question": "Which?", "choices": ["a", "b"], "answer": 0}
    text = "\n" * blank_lines + "".join(json.dumps(sound | row) + "\n" for row in ({}, *rows))
    (folder / "piqa.jsonl").write_text(text)
    (folder / "piqa.yaml").write_text(OWN_TASK.replace("ROWS", str(folder / "piqa.jsonl")))
    return str(folder)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": None}, "question is missing or null"),
        ({"choices": []}, "its choices are []; a list of texts is wanted"),
        ({"choices": ["a", None]}, "its choices are ['a', None]"),
        ({"answer": 2}, "its right answer is 2, which is none of its 2 choices"),
        ({"answer": -1}, "its right answer is -1"),
        ({"answer": None}, "answer is missing or null"),
    ],
)
def test_a_row_of_any_other_task_is_told_by_what_the_task_makes_of_it(tmp_path, row, said):
    own = own_task(tmp_path, row)
    with pytest.raises(InputError, match="row 2 of task piqa cannot be used: ") as caught, find_tasks(["piqa"], own).load():
        pass
    assert said in str(caught.value)


def test_a_row_of_a_task_of_ones_own_is_told_with_its_line(tmp_path):
    """The task reads rows of the hub by its own account, and a local file instead; blank lines are no rows."""
    own = own_task(tmp_path, {}, {"answer": 9}, blank_lines=4)
    (tmp_path / "piqa.yaml").write_text((tmp_path / "piqa.yaml").read_text().replace("dataset_path: json", "dataset_path: some/where"))
    with pytest.raises(InputError) as caught, find_tasks(["piqa"], own, own).load():
        pass
    assert str(caught.value).startswith(f"{tmp_path}/piqa.jsonl:7 (task piqa) cannot be used: its right answer is 9")


def test_rows_are_told_before_anything_is_scored(model, tmp_path, monkeypatch):
    def measure(*_):
        raise AssertionError("something was scored")

    monkeypatch.setattr(ContinuationScorer, "score", measure)
    monkeypatch.setattr(evaluating, "measure_perplexity", measure)
    with pytest.raises(InputError, match="row 3 of task piqa cannot be used"):
        evaluate(EvaluateOptions(model=model, tasks=("piqa",), include_path=own_task(tmp_path, {}, {"answer": 7})))


def test_a_choice_that_is_longer_than_the_model_is_told_with_its_row(model, tmp_path):
    with pytest.raises(InputError, match=r"^row 2 of task piqa has 101 tokens to score; the model takes 64$"):
        evaluate(EvaluateOptions(model=model, tasks=("piqa",), include_path=own_task(tmp_path, {"choices": ["a", "b" * 100]})))


def test_rows_are_placed_by_line_where_each_is_a_question(tmp_path):
    own = own_task(tmp_path, {}, blank_lines=2)
    (tmp_path / "piqa.yaml").write_text(OWN_TASK.replace("dataset_path: json", "dataset_path: some/where"))
    with find_tasks(["piqa"], own, own).load() as loaded:
        assert loaded.place("piqa", 1) == f"{tmp_path}/piqa.jsonl:4 (task piqa)"
        fewer = dataclasses.replace(loaded, local={"piqa": LocalRows("piqa", tmp_path, (3,))})
        assert fewer.place("piqa", 1) == "row 2 of task piqa"


def test_a_metric_that_overflows_says_what_is_broken(model, tmp_path, monkeypatch):
    """exp of a thousand nats; lm-eval computes it last."""
    own = own_task(tmp_path, {})
    metric = "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]"
    text = OWN_TASK.replace("multiple_choice", "loglikelihood").replace("doc_to_choice: choices", metric).replace(": answer", ": question")
    (tmp_path / "piqa.yaml").write_text(text.replace("ROWS", str(tmp_path / "piqa.jsonl")))
    monkeypatch.setattr(ContinuationScorer, "score", lambda self, requests: [(-1e3, False)] * len(requests))
    with pytest.raises(RunError, match="a metric of the tasks overflows"):
        evaluate(EvaluateOptions(model=model, tasks=("piqa",), include_path=own))
