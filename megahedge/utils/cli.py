"""Command lines made from frozen dataclasses: flat option names, the same word in YAML, on the command line and in code."""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import os
import re
import select
import sys
import textwrap
import types
import typing
from collections.abc import Callable

import jsonargparse
import yaml

from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import DISK_ERRORS, read_yaml_object
from megahedge.utils.launcher import rank_prefix
from megahedge.utils.units import parse_count

Count = typing.NewType("Count", int)
"""A whole number that a user may write as 1e9, 1B or 300M."""


_POSITIONAL = "positional"


def positional():
    """A required field of an options dataclass that is given by its place on the command line, without a name."""
    return dataclasses.field(metadata={_POSITIONAL: True})


_KINDS = {"float": "a finite number", "int": "a whole number", "bool": "yes or no"}


class _Parser(jsonargparse.ArgumentParser):
    """A parser that raises InputError where argparse would print its usage and exit."""

    def error(self, message, ex=None):
        if isinstance(ex, InputError):
            raise ex
        line = " ".join(str(message).split()).removeprefix("argument ")
        missing = re.fullmatch("the following arguments are required: (.+)", line)
        if missing:
            line = " and ".join(self._typed_name(name) for name in missing[1].split(", ")) + " must be given"
        wrong_kind = re.fullmatch(r"""Parser key "(\w+)":? .*?Expected a <class '(\w+)'>.* (?:Got|Given) value: (.+)""", line)
        if wrong_kind:
            name, kind, value = wrong_kind.groups()
            line = f"--{name}={value} is not {_KINDS.get(kind, f'a {kind}')}"
        raise InputError(f"{line} (see --help)")

    def _typed_name(self, name):
        """As --help shows the argument `name`: --option, or PLACE."""
        by_place = any(action.dest == name and not action.option_strings for action in self._actions)
        return name.upper() if by_place else f"--{name}"


def read_options_file(path: str | os.PathLike, option: str) -> dict:
    """A YAML file of options by name, which the user has given as --`option`.  Raises InputError if it is not one."""
    return read_yaml_object(path, f"--{option}={path}", "options by name, such as `seq_len: 1024`")


class _ConfigFile(jsonargparse.ActionConfigFile):
    """`--config`: a YAML file whose keys are options; one value may stand for a list of one."""

    def __call__(self, parser, cfg, values, option_string=None):
        options = read_options_file(values, "config")
        actions = {action.dest: action for action in parser._actions}
        for name, value in options.items():
            if name not in actions:
                close = difflib.get_close_matches(str(name), actions, 1)
                hint = f"; did you mean {close[0]}?" if close else " (see --help)"
                raise InputError(f"--config={values}: {name} is not an option of this command{hint}")
            if actions[name].nargs == "+" and not isinstance(value, list):
                options[name] = [value]
        self.apply_config(parser, cfg, self.dest, yaml.safe_dump(options))


def parse_options(options_type, argv=None, *, prog=None, description=None):
    """Parse a command line into an instance of a frozen dataclass.

    Each field is an option of the same name; the string literal below a field is its help.  Fields without a default are required.
    Fields made by `positional()` are given by place instead, in their order.
    `--config FILE.yaml` supplies values that later options override.  Where the dataclass has a class attribute `presets`, a function
    from the parsed options to values by name, those take the place of the defaults.
    Raises InputError for an unknown option, a missing one or a value of the wrong kind.
    """
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", action=_ConfigFile, help="YAML file of options; options after it on the command line win")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher; not for people")
    helps = field_docs(options_type)
    hints = typing.get_type_hints(options_type)
    for field in dataclasses.fields(options_type):
        _add_option(parser, field, hints[field.name], helps.get(field.name, ""))
    values = parser.parse_args(argv).as_dict()
    presets = getattr(options_type, "presets", None)
    if presets is not None:
        _set_defaults(parser, presets(values))
        values = parser.parse_args(argv).as_dict()
    return options_type(**{field.name: _frozen(values[field.name]) for field in dataclasses.fields(options_type)})


def _set_defaults(parser, values: dict) -> None:
    unknown = [name for name in values if name not in parser.get_defaults()]
    if unknown:
        raise InputError(f"the preset values name unknown options: {', '.join(unknown)}")
    parser.set_defaults(values)


def _frozen(value):
    return tuple(value) if isinstance(value, list) else value


def _add_option(parser, field, hint, help_text):
    if field.metadata.get(_POSITIONAL):
        parser.add_argument(field.name, metavar=field.name.upper(), type=hint, help=help_text)
        return
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    required = default is dataclasses.MISSING
    arguments = {"help": help_text} | ({"required": True} if required else {"default": default})
    if _is_sequence(hint):
        arguments |= {"nargs": "+", "type": typing.get_args(hint)[0]}
        if not required:
            arguments["default"] = list(default)  # the parser merges config files into its defaults in place
    elif hint is bool:
        arguments |= {"action": _Switch}
    else:
        arguments |= {"type": _count_type(hint) or hint}
    parser.add_argument(f"--{field.name}", **arguments)


class _Switch(jsonargparse.ActionYesNo):
    """`--flag` and `--no_flag`."""

    def __init__(self, **kwargs):
        super().__init__(yes_prefix="", no_prefix="no_", **kwargs)


def _is_sequence(hint) -> bool:
    return typing.get_origin(hint) in (tuple, list)


class _CountError(InputError, argparse.ArgumentTypeError):
    """The one kind of error whose text argparse shows; of any other ValueError it says that the value is invalid, and not why."""


class _CountType:
    """The parser of a Count or, with `optional`, of a Count or nothing; its repr is what --help shows."""

    def __init__(self, optional: bool):
        self.optional = optional

    def __call__(self, text):
        if self.optional and text in (None, "", "none", "null"):
            return None
        try:
            return parse_count(text)
        except InputError as error:
            raise _CountError(error) from None

    def __repr__(self):
        return "count | null" if self.optional else "count"


def _count_type(hint) -> _CountType | None:
    if hint is Count:
        return _CountType(optional=False)
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and Count in typing.get_args(hint):
        return _CountType(optional=True)
    return None


@functools.cache
def field_docs(dataclass_type) -> dict[str, str]:
    """The string literal below each field of a dataclass and of its bases, white space folded."""
    docs = {}
    for base in reversed(dataclass_type.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for statement, following in itertools.pairwise(body):
            is_field = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if is_field and is_text and isinstance(following.value.value, str):
                docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


REFUSED_FILE = "MEGAHEDGE_REFUSED_FILE"
INTERRUPTED, READER_GONE = 130, 141
"""Exit statuses that a shell gives a command that SIGINT or SIGPIPE has ended: 128 + the signal's number."""


def run_main(main: Callable[[], int | None]) -> typing.NoReturn:
    """Run an entry point: an InputError becomes one line on stderr and exit status 2, a RunError or a disk that fails exit status 1.

    Ctrl-C, and a reader of the output that has seen enough (`... | head`), end it without a word.
    """
    try:
        try:
            sys.exit(main() or 0)
        finally:
            sys.stdout.flush()  # Python does when it ends, where its errors cannot be caught
    except (InputError, RunError) as error:
        _tell(str(error))
        if isinstance(error, InputError):
            _note_refusal()
            sys.exit(2)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        if not _reader_gone(sys.stdout):
            raise  # some other pipe or socket, whose end is a fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the rest can be flushed to
        sys.exit(READER_GONE)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _tell(f"cannot read or write {error.filename or 'a file'}: {error.strerror}")
        sys.exit(1)


def _note_refusal() -> None:
    """Leave an empty file where the environment asks for it: what starts many ranks learns the status of some of them alone."""
    if file := os.environ.get(REFUSED_FILE):
        with contextlib.suppress(OSError):
            open(file, "a").close()


def _tell(error: str) -> None:
    print(f"{rank_prefix()}error: {error}", file=sys.stderr, flush=True)


def _reader_gone(stream: typing.TextIO) -> bool:
    """Whether nobody reads the pipe that the stream writes to any more."""
    poll = select.poll()
    poll.register(stream, 0)  # errors are always reported
    return any(event & select.POLLERR for _, event in poll.poll(0))
