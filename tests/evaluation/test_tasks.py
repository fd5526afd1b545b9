"""Tasks of lm-eval on our models: the figures of lm-eval's own `hf` model, at any batch size, from local rows; bad input is one line."""

import dataclasses
import json
import math
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from megahedge.data.meta import tokenizer_digest
from megahedge.evaluation.evaluate import evaluate
from megahedge.evaluation.models import open_model
from megahedge.evaluation.options import EvaluateOptions
from megahedge.evaluation.tasks import PAPER_METRICS, Metric, compare_metrics, expand_names
from megahedge.utils.errors import InputError
from megahedge.utils.files import read_json, sha256_file, write_json
from tests.evaluation.small import byte_tokenizer, write_run, write_texts
from tests.evaluation.students import write_student
from tests.evaluation.task_rows import write_rows

pytest.importorskip("lm_eval", reason="lm-eval, the extra `eval`, is not installed")
pytest.importorskip("accelerate", reason="accelerate, which lm-eval's own hf model needs, is not installed")

from megahedge.evaluation.lm_eval import data as task_data
from megahedge.evaluation.lm_eval.data import find_tasks
from megahedge.evaluation.lm_eval.model import TaskModel

REPOSITORY = Path(__file__).resolve().parents[2]
TEACHER = REPOSITORY / "scripts" / "quickstart" / "teacher"

COUNTED_YAML = """
task: count_on
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{next}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    """A run with its export, one without a tokenizer, rows of all tasks, and a task file of a user's own."""
    root = tmp_path_factory.mktemp("tasks")
    write_run(root / "run", tokenizer_digest(byte_tokenizer()))
    byte_tokenizer().save_pretrained(root / "run" / "hf")
    write_run(root / "mute", None)
    write_texts(root / "data", byte_tokenizer())
    write_rows(root / "rows")
    own = root / "own"
    own.mkdir()
    rows = own / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text, "next": "x"}) + "\n" for text in ("one, two", "three, four, five")))
    (own / "count_on.yaml").write_text(COUNTED_YAML.replace("ROWS", str(rows)))
    return {name: str(root / name) for name in ("run", "mute", "data", "rows", "own")} | {"hf": str(root / "run" / "hf"), "root": str(root)}


def options(paths, **changes) -> EvaluateOptions:
    return EvaluateOptions(**{"model": paths["hf"], "tasks": ("paper",), "offline_data": paths["rows"]} | changes)


@pytest.fixture(scope="module")
def paper(paths):
    """The ten tasks on the export, without any way to the network."""
    connect = socket.socket.connect

    def refuse(*_):
        raise AssertionError("something reached for the network")

    socket.socket.connect = refuse
    try:
        return evaluate(options(paths))
    finally:
        socket.socket.connect = connect


def requests_of_paper(offline_data, limit=None) -> list:
    """lm-eval's requests of the ten tasks, all of which ask for log-likelihoods."""
    with find_tasks(list(PAPER_METRICS), None, str(offline_data)).load() as loaded:
        instances = []
        for task in loaded.tasks.values():
            task.set_config(key="num_fewshot", value=0)
            task.build_all_requests(limit=limit)
            instances += task.instances
    return instances


def test_paper_names_ten_tasks_once():
    assert len(PAPER_METRICS) == 10
    assert expand_names(("paper", "piqa", "wikitext", "wikitext")) == (*PAPER_METRICS, "wikitext")


def test_the_papers_tasks_run_on_local_rows_alone(paper, paths):
    scores = {score.task: score for score in paper.tasks.scores}
    assert list(scores) == list(PAPER_METRICS)
    for task, metric in PAPER_METRICS.items():
        score = scores[task]
        figure = next(found for found in score.metrics if found.name == metric)
        assert (score.scored_rows, score.rows, score.num_fewshot) == (5, 5, 0)
        assert figure.higher_is_better and figure.rows is not None
        assert figure.value == statistics.fmean(figure.rows)
        assert figure.stderr == pytest.approx(statistics.stdev(figure.rows) / math.sqrt(5))
    assert paper.perplexity is None and paper.figures() == {}
    chances = {task: score.chance for task, score in scores.items()}
    assert chances["lambada_openai"] is None
    assert chances["arc_easy"] == chances["hellaswag"] == chances["race"] == chances["logiqa"] == 1 / 4
    assert chances["arc_challenge"] == chances["social_iqa"] == pytest.approx(1 / 3)
    assert chances["piqa"] == chances["boolq"] == chances["winogrande"] == 1 / 2
    rows = Path(paths["rows"]) / "race_made_up.jsonl"
    assert paper.tasks.data["race"] == {"file": str(rows), "sha256": sha256_file(rows)}


def test_run_and_transformers_score_as_the_export(paper, paths):
    expected = {score.task: [metric.value for metric in score.metrics] for score in paper.tasks.scores}
    for changes in ({"model": paths["run"]}, {"implementation": "transformers"}):
        other = evaluate(options(paths, tasks=("piqa", "lambada_openai"), **changes))
        for score in other.tasks.scores:
            assert [metric.value for metric in score.metrics] == pytest.approx(expected[score.task], rel=1e-4)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_requests_score_as_lm_evals_own_model_scores_them(paths, size):
    """All tasks; the model takes 64 tokens, so that many requests are cut.  What may differ is fp32 in two implementations."""
    from lm_eval.models.huggingface import HFLM

    requests = requests_of_paper(paths["rows"])
    model = open_model(paths["hf"])
    ours = TaskModel(model, size, "cpu").loglikelihood(requests)
    theirs = HFLM(pretrained=paths["hf"], device="cpu", dtype="float32", batch_size=3).loglikelihood(requests, disable_tqdm=True)
    assert max(len(model.tokenizer.encode("".join(request.args))) for request in requests) > 65
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)


def test_whole_texts_and_greedy_texts_are_those_of_lm_evals_own_model(paths):
    """Texts shorter and longer than the model's 64 tokens, an empty context among them."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    def ask(kind, *arguments):
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    texts = ["a door", "the red door " * 12, "x", " two  words\n"]
    models = [TaskModel(open_model(paths["hf"]), 2, "cpu"), HFLM(pretrained=paths["hf"], device="cpu", dtype="float32", batch_size=2)]
    rolling = [model.loglikelihood_rolling([ask("loglikelihood_rolling", text) for text in texts]) for model in models]
    assert rolling[0] == pytest.approx(rolling[1], rel=1e-5)  # hundreds of nats of fp32
    pairs = [("", "door"), ("a ", "door"), ("", "<|endoftext|>x"), ("<|endoftext|>a", " b")]
    scores = [model.loglikelihood([ask("loglikelihood", *pair) for pair in pairs], disable_tqdm=True) for model in models]
    assert [value for value, _ in scores[0]] == pytest.approx([value for value, _ in scores[1]], abs=1e-4)
    settings = [{"until": ["e", "\n"], "max_gen_toks": 20}, {"until": ["q"], "max_gen_toks": 7, "do_sample": False, "temperature": 0.0}]
    asked = [ask("generate_until", text, setting) for text in texts for setting in settings]
    written = [model.generate_until(asked, disable_tqdm=True) for model in models]
    assert written[0] == written[1] and any(written[0])


@pytest.mark.slow
def test_scores_of_the_carried_teacher_on_real_rows_are_lm_evals(test_data):
    """Four rows of each of the ten tasks; a vocabulary and merges of real use."""
    from lm_eval.models.huggingface import HFLM

    requests = requests_of_paper(test_data / "eval", limit=4)
    model = open_model(TEACHER)
    one, eight = (TaskModel(model, size, "cpu").loglikelihood(requests) for size in (1, 8))
    theirs = HFLM(pretrained=str(TEACHER), device="cpu", dtype="float32", batch_size=4).loglikelihood(requests, disable_tqdm=True)
    for scores in (one, eight):
        assert [greedy for _, greedy in scores] == [greedy for _, greedy in theirs]
        assert [value for value, _ in scores] == pytest.approx([value for value, _ in theirs], abs=1e-3)  # up to 300 nats in fp32
    assert [value for value, _ in one] == pytest.approx([value for value, _ in eight], abs=1e-4)


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> dict[str, str]:
    """A student's run and export, and its teacher."""
    return write_student(tmp_path_factory.mktemp("students"))


def test_scores_of_a_student_do_not_depend_on_the_batch_size(paths, students):
    """Beside its teacher, as run and as export: the same figures, and log-likelihoods to 1e-4, as the issue has it."""
    asked = options(paths, model=students["hf"], teacher=students["teacher"], limit=2)
    first = evaluate(asked)
    one, run = {"micro_batch_size": 1}, {"micro_batch_size": 8, "model": students["run"]}
    others = [evaluate(dataclasses.replace(asked, **changes)) for changes in (one, run)]
    assert (first.source.kind, first.teacher.source.kind) == ("hedge_mamba", "gpt_neox")
    values = [[metric.value for score in scored.tasks.scores for metric in score.metrics] for scored in (first, first.teacher)]
    assert values[0] != values[1] and all(score.scored_rows == 2 for score in first.tasks.scores)
    for other in others:
        for scored, expected in zip((other, other.teacher), values, strict=True):
            assert [metric.value for score in scored.tasks.scores for metric in score.metrics] == pytest.approx(expected, rel=1e-4)
    requests = requests_of_paper(paths["rows"], limit=2)
    single, eight = (TaskModel(open_model(students["hf"]), size, "cpu").loglikelihood(requests) for size in (1, 8))
    assert [value for value, _ in single] == pytest.approx([value for value, _ in eight], abs=1e-4)
    assert [greedy for _, greedy in single] == [greedy for _, greedy in eight]


def test_a_model_does_not_differ_from_itself_as_its_teacher(paths):
    """Worked examples are drawn anew for each model, from the same seed; perplexity and tasks in one command."""
    evaluation = evaluate(
        options(paths, tasks=("piqa", "lambada_openai"), teacher=paths["run"], num_fewshot=2, data_path=paths["data"], seq_len=32)
    )
    compared = evaluation.record()["against_teacher"]
    assert compared["figures"]["token_perplexity"] == {"value": 0.0, "ratio": 1.0}
    assert compared["tasks"]["piqa"]["acc"]["value"] == compared["tasks"]["piqa"]["acc"]["stderr"] == 0
    assert compared["tasks"]["lambada_openai"]["perplexity"] == {"value": 0.0, "stderr": None, "ratio": 1.0}
    assert all(score.num_fewshot == 2 for score in evaluation.tasks.scores)
    table = evaluation.table()
    assert "ratio 1.0000" in table and "x 1" in table and "+0.0000 ± 0.0000" in table and "lm-eval" in table


def test_the_question_is_not_among_its_own_worked_examples(paths):
    with find_tasks(["piqa"], None, paths["rows"]).load() as loaded:
        task = loaded.tasks["piqa"]
        task.set_config(key="num_fewshot", value=4)
        task.set_fewshot_seed(seed=1)
        task.build_all_requests()
        for instance in task.instances:
            prompt = instance.args[0]
            assert sorted(prompt.count(f"open door {number}\n") for number in range(5)) == [1] * 5


def test_figures_that_are_not_finite_are_null_in_json(paths, paper, tmp_path):
    """As the perplexity of LAMBADA is where it overflows: the standard error of a single row is none, and no figure is lost beside it."""
    lambada = next(score for score in paper.tasks.scores if score.task == "lambada_openai")
    overflown = dataclasses.replace(lambada, metrics=tuple(dataclasses.replace(metric, value=math.inf) for metric in lambada.metrics))
    results = dataclasses.replace(paper.tasks, scores=(overflown,))
    evaluation = dataclasses.replace(paper, tasks=results, teacher=dataclasses.replace(paper, tasks=results))
    write_json(tmp_path / "record.json", evaluation.record())
    record = read_json(tmp_path / "record.json")
    assert record["tasks"]["scores"]["lambada_openai"]["metrics"]["perplexity"]["value"] is None
    assert record["against_teacher"]["tasks"]["lambada_openai"]["perplexity"]["value"] is None
    one = evaluate(options(paths, tasks=("piqa",), limit=1))
    assert [metric.stderr for metric in one.tasks.scores[0].metrics] == [None, None]
    assert "nan" not in one.table()


def test_difference_and_its_error_are_over_pairs_of_rows():
    ours = Metric("acc", "none", 0.5, None, True, (1.0, 0.0, 1.0, 0.0))
    theirs = Metric("acc", "none", 0.75, None, True, (1.0, 1.0, 1.0, 0.0))
    difference = compare_metrics(ours, theirs)
    assert (difference.value, difference.ratio) == (-0.25, 0.5 / 0.75)
    assert difference.stderr == pytest.approx(statistics.stdev([0, -1, 0, 0]) / 2)
    assert compare_metrics(ours, Metric("acc", "none", 0.0, None, True)).ratio is None


def test_a_task_file_of_ones_own(paths):
    evaluation = evaluate(options(paths, tasks=("count_on",), include_path=paths["own"], offline_data=None))
    (score,) = evaluation.tasks.scores
    assert (score.task, score.scored_rows, score.metrics[0].name) == ("count_on", 2, "exact_match")
    assert evaluate(options(paths, tasks=("count_on",), include_path=paths["own"])).tasks.scores == evaluation.tasks.scores


def test_offline_ends_with_the_tasks(paths):
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    with find_tasks(["piqa"], None, paths["rows"]).load():
        assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"tasks": ("arc_esy",)}, "no task arc_esy; did you mean arc_easy", marks=pytest.mark.slow),  # reads lm-eval's index
        ({"tasks": ("",)}, "empty name"),
        ({"tasks": ("wikitext",)}, "no wikitext.jsonl .* for task wikitext"),
        ({"tasks": ("squadv2",)}, "squadv2 makes its data by Python code"),
        pytest.param({"tasks": ("mmlu_stem",)}, "mmlu_stem is a group", marks=pytest.mark.slow),  # so does this
        pytest.param({"tasks": ("ai2_arc",), "offline_data": "{own}"}, "no arc_challenge.jsonl", marks=pytest.mark.slow),  # and this
        ({"tasks": ("piqa",), "offline_data": "{root}/none"}, "--offline_data=.*none is no folder"),
        (
            {"tasks": ("piqa",), "offline_data": "{root}/bad"},
            r"--offline_data: .*piqa.jsonl:1 \(task piqa\) cannot be used: sol2 is missing",
        ),
        ({"tasks": ("race",), "offline_data": "{root}/bad"}, "race_a.jsonl and race_b.jsonl are several"),
        ({"tasks": ("piqa",), "model": "{mute}"}, "^--model: .*mute.* has no tokenizer with it"),
        ({"tasks": ("piqa",), "teacher": "{mute}"}, "^--teacher: .*mute.* has no tokenizer with it"),
        ({"tasks": ("piqa",), "teacher": "no/such/model"}, "^--teacher: 'no/such/model'"),
        ({"tasks": ("piqa",), "num_fewshot": 5}, "--num_fewshot=5: task piqa has 4 rows for worked examples"),
        ({"include_path": "{root}/none"}, "--include_path=.*none is no folder"),
        ({"limit": 0}, "--limit=0 must be at least 1"),
        ({"num_fewshot": -1}, "--num_fewshot=-1"),
        ({"bootstrap_iters": 1}, "--bootstrap_iters=1 must be at least 2"),
        ({"tasks": ()}, "--offline_data=.* says how to run tasks; name some with --tasks"),
        ({"tasks": (), "offline_data": None, "limit": 5}, "--limit=5 says how to run tasks"),
        ({"context_probe": True}, "--context_probe .* --data_path"),
    ],
)
def test_bad_input_is_one_line(paths, changes, message):
    bad = Path(paths["root"]) / "bad"
    bad.mkdir(exist_ok=True)
    (bad / "piqa.jsonl").write_text('{"goal": "x", "sol1": "a"}\n')
    (bad / "race_a.jsonl").write_text("{}\n")
    (bad / "race_b.jsonl").write_text("{}\n")
    changes = {name: value.format(**paths) if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(InputError, match=message) as caught:
        evaluate(options(paths, **changes))
    assert "\n" not in str(caught.value)


def test_without_lm_eval_the_error_says_how_to_install_it(paths, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(InputError, match=r"pip install -c constraints.txt -e .\[eval\]"):
        evaluate(options(paths))


@pytest.mark.parametrize("changes", [{"model": "no/such/model"}, {"teacher": "no/such/model"}, {"model": "{mute}"}, {"teacher": "{mute}"}])
def test_models_that_cannot_be_asked_are_told_before_rows_are_read(paths, monkeypatch, changes):
    """Ten data sets may have to be downloaded."""

    def load(*_):
        raise AssertionError("rows were read")

    monkeypatch.setattr(task_data.FoundTasks, "load", load)
    with pytest.raises(InputError, match=r"no/such/model|has no tokenizer with it"):
        evaluate(options(paths, **{name: value.format(**paths) for name, value in changes.items()}))


@pytest.mark.parametrize("mark", ["MULTIMODAL", "UNSAFE_CODE"])
def test_tasks_that_need_more_than_text_are_refused(paths, monkeypatch, mark):
    from lm_eval.api.task import ConfigurableTask

    monkeypatch.setattr(ConfigurableTask, mark, True, raising=False)
    with pytest.raises(InputError, match="task piqa shows images or plays sounds, or runs code"):
        evaluate(options(paths, tasks=("piqa",)))


def test_sampling_is_refused(paths):
    from lm_eval.api.instance import Instance

    asked = Instance("generate_until", {}, ("a", {"until": ["x"], "do_sample": True, "temperature": 0.7}), 0, metadata=("poems", 0, 1))
    with pytest.raises(InputError, match="task poems generates with do_sample"):
        TaskModel(open_model(paths["hf"]), 1, "cpu").generate_until([asked])


@pytest.mark.slow
def test_script_prints_the_table_and_writes_json(paths, paper, tmp_path):
    output = tmp_path / "tasks.json"
    words = ["--model", paths["hf"], "--tasks", "paper", "--offline_data", paths["rows"], "--limit", "2", "--output", output]
    command = [sys.executable, str(REPOSITORY / "scripts" / "evaluate.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 of 5" in done.stdout and "mean of 10" in done.stdout and "bootstrapping" not in done.stdout
    record = json.loads(output.read_text())
    assert list(record["tasks"]["scores"]) == list(PAPER_METRICS)
    piqa = record["tasks"]["scores"]["piqa"]
    assert (piqa["version"], piqa["scored_rows"], piqa["rows"], piqa["chance"]) == ("1.0", 2, 5, 0.5)
    assert set(piqa["metrics"]) == {"acc", "acc_norm"} and piqa["data"]["sha256"] == paper.tasks.data["piqa"]["sha256"]
    assert record["tasks"]["lm_eval"] and record["options"]["limit"] == 2 and record["figures"] is None
    assert len(record["model"]["weights_digest"]) == len(record["model"]["tokenizer_digest"]) == 64
