"""Command lines and YAML files into frozen dataclasses."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys

import pytest

from megahedge.config.options import DataOptions
from megahedge.data.merge import MergeConfig
from megahedge.utils.cli import REFUSED_FILE, Count, field_docs, parse_options, positional, run_main
from megahedge.utils.errors import InputError, RunError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    width: int
    """How wide,
    in cells."""
    budget: Count = 1000
    """Tokens."""
    limit: Count | None = None
    """Tokens at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Sizes):
    rate: float = 0.5
    """A rate."""
    batch: int | str = "auto"
    """A size or auto."""
    paths: tuple[str, ...] = ("a",)
    """Some paths."""
    name: str | None = None
    """A name."""
    quick: bool = False
    """Hurry."""

    def __post_init__(self):
        if self.rate <= 0:
            raise InputError(f"--rate={self.rate} must be positive")


def parse(*words, **keywords):
    return parse_options(Options, list(words), prog="prog", **keywords)


def test_defaults_and_types():
    assert parse("--width", "3") == Options(width=3)
    assert parse("--width=3", "--rate=1e-3", "--quick", "--paths", "x", "y", "--batch", "8", "--name", "n") == Options(
        width=3, rate=1e-3, quick=True, paths=("x", "y"), batch=8, name="n"
    )
    assert parse("--width=3", "--no_quick").quick is False


@pytest.mark.parametrize(("text", "count"), [("1e9", 10**9), ("1B", 10**9), ("300M", 3 * 10**8), ("1_000", 1000), ("1.5K", 1500), ("7", 7)])
def test_counts_as_people_write_them(text, count, tmp_path):
    assert parse("--width=3", "--budget", text).budget == count
    assert parse("--width=3", f"--limit={text}").limit == count
    (tmp_path / "o.yaml").write_text(f"width: 3\nbudget: {text}\n")
    assert parse("--config", str(tmp_path / "o.yaml")).budget == count


def test_later_options_override_a_yaml_file(tmp_path):
    (tmp_path / "o.yaml").write_text("width: 3\nrate: 1e-4\nquick: true\npaths: [x, y]\n")
    assert parse("--config", str(tmp_path / "o.yaml")) == Options(width=3, rate=1e-4, quick=True, paths=("x", "y"))
    assert parse("--config", str(tmp_path / "o.yaml"), "--rate", "2", "--paths", "z", "--no_quick") == Options(
        width=3, rate=2.0, paths=("z",)
    )
    assert parse("--width=3").paths == ("a",)  # a parse leaves nothing behind for the next


def test_the_launchers_local_rank_is_accepted():
    assert parse("--local_rank=1", "--width=3") == Options(width=3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "width"),
        (["--width=3", "--widht=4"], "widht"),
        (["--width=3", "--budge=4"], "budge"),  # no abbreviations: a misspelt option would pass for another
        (["--width=3", "stray"], "stray"),
        (["--width=three"], "three"),
        (["--width=3", "--rate=fast"], "fast"),
        (["--width=3", "--rate=-1"], "--rate=-1.0 must be positive"),
        (["--width=3", "--budget=1.5"], "--budget: '1.5' is not a whole number"),
        (["--width=3", "--limit=0.5"], "--limit: '0.5' is not a whole number"),
        (["--width=3", "--budget=12Q"], "--budget: '12Q' is not a count; write it like 300M"),
        (["--width=3", "--budget=nan"], "nan"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_bad_command_line_is_one_line_that_names_the_fault(words, said):
    with pytest.raises(InputError) as error:
        parse(*words)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["width: 3\nwidht: 4\n", "width: 3\nbudget: [1\n", "width: three\n", "- 1\n- 2\n"])
def test_a_bad_yaml_file_is_one_line(content, tmp_path):
    path = tmp_path / "o.yaml"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        parse("--config", str(path))
    assert "\n" not in str(error.value)


def test_help_texts_come_from_below_the_fields():
    assert field_docs(Options)["width"] == "How wide, in cells."
    assert set(field_docs(Options)) == {field.name for field in dataclasses.fields(Options)}


def test_help_shows_every_option_and_ends_well(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{field.name}" in shown for field in dataclasses.fields(Options))
    assert "How wide, in cells." in shown


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a")


@pytest.mark.parametrize(("error", "status"), [(InputError("--a=1 is bad"), 2), (RunError("diverged"), 1), (FULL, 1)])
def test_errors_for_users_are_one_line_and_a_status(error, status, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        run_main(main)
    assert end.value.code == status
    told = "cannot read or write runs/a: No space left on device" if error is FULL else str(error)
    assert capsys.readouterr().err == f"error: {told}\n"


@pytest.mark.parametrize(
    ("world_size", "rank", "before"), [("4", "3", "[rank 3] "), ("4", "x", "[rank 0] "), ("", "3", ""), ("²", "²", ""), ("0", "0", "")]
)
def test_errors_of_one_rank_say_which(world_size, rank, before, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("RANK", rank)

    def main():
        raise InputError("bad")

    with pytest.raises(SystemExit):
        run_main(main)
    assert capsys.readouterr().err == f"{before}error: bad\n"


def test_other_errors_keep_their_traceback_and_success_is_status_0():
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)
    with pytest.raises(SystemExit) as end:
        run_main(lambda: None)
    assert end.value.code == 0


PIPED = """
import socket
from megahedge.utils.cli import run_main
def main():
    {body}
run_main(main)
"""


def piped(tmp_path, body: str) -> subprocess.Popen:
    """A command with that body, whose output is a pipe."""
    script = tmp_path / "script.py"
    script.write_text(PIPED.format(body=body))
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_a_command_without_a_word(tmp_path):
    # a shell starts what runs in the background, these tests perhaps, with Ctrl-C switched off
    switch_on = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
    process = piped(tmp_path, f"{switch_on}; print('here', flush=True); time.sleep(60)")
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=30), process.returncode) == (("", ""), 130)


@pytest.mark.parametrize(
    "body", ["[print('x' * 1000, flush=True) for _ in range(1000)]", "print('y' * 4000)", "print('z'); raise SystemExit"]
)
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(tmp_path, body):
    """`command | head`, met while it prints, or when what is left is flushed."""
    process = piped(tmp_path, body)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(30)) == ("", 141)


def test_another_broken_pipe_keeps_its_traceback(tmp_path):
    process = piped(tmp_path, "ours, theirs = socket.socketpair(); theirs.close(); ours.sendall(b'x')")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "BrokenPipeError" in errors


def test_a_config_file_may_give_one_value_for_a_list(tmp_path):
    (tmp_path / "c.yaml").write_text("data_path: data/a\ntrain_tokens: 1e9\n")
    options = parse_options(DataOptions, ["--config", str(tmp_path / "c.yaml")])
    assert (options.data_path, options.train_tokens) == (("data/a",), 10**9)
    options = parse_options(DataOptions, ["--config", str(tmp_path / "c.yaml"), "--data_path", "data/b", "data/c"])
    assert options.data_path == ("data/b", "data/c")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("seq_length: 3", "seq_length is not an option of this command; did you mean seq_len?"),
        ("- seq_len", "must hold options by name"),
        ("seq_len: [", "cannot be read"),
        (None, "cannot be read: .*No such file"),
        ("seq_len: many", "seq_len"),
    ],
)
def test_a_bad_config_file_is_refused_by_name(tmp_path, content, said):
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=said):
        parse_options(DataOptions, ["--config", str(path)])


def test_missing_options_are_named_as_they_are_typed():
    with pytest.raises(InputError, match=r"^--input and --output_prefix must be given"):
        parse_options(MergeConfig, [])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    source: str = positional()
    """Where from."""
    count: int = positional()
    """How many."""
    quick: bool = True
    """Hurry."""


def test_fields_may_be_given_by_their_place(capsys):
    def parse_places(*words):
        return parse_options(Places, list(words), prog="prog")

    assert parse_places("a", "3") == parse_places("--quick", "a", "3") == Places(source="a", count=3)
    assert parse_places("a", "--no_quick", "3") == Places(source="a", count=3, quick=False)
    for words, said in (
        ([], "^SOURCE and COUNT must be given"),
        (["a"], "^COUNT must be given"),
        (["a", "b"], "'?b'?"),
        (["a", "3", "c"], "c"),
    ):
        with pytest.raises(InputError, match=said):
            parse_places(*words)
    with pytest.raises(SystemExit):
        parse_places("--help")
    assert "SOURCE" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "status", "noted"), [(InputError("wrong"), 2, True), (RunError("bad luck"), 1, False)])
def test_a_refusal_leaves_a_file_where_the_environment_asks_for_it(error, status, noted, tmp_path, monkeypatch):
    def main():
        raise error

    monkeypatch.setenv(REFUSED_FILE, str(tmp_path / "refused"))
    with pytest.raises(SystemExit) as end:
        run_main(main)
    assert (end.value.code, (tmp_path / "refused").is_file()) == (status, noted)
