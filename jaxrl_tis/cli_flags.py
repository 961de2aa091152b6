"""Commands that take absl flags, and their flag --config.

What a command line names in place of the config's own choice replaces all that belongs to it:

- another `task.name` drops the parameters of the config's task; a split stays where the new task
  has one. Any parameter can be given, `--config.task.params.path=data.jsonl`.
- another `model.path` drops `task.tokenizer` and `task.template_kwargs`: the model brings its own
  tokenizer and template.
"""

import difflib
import functools
import itertools
import pathlib
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags
from ml_collections.config_dict import placeholder

from jaxrl_tis.data import tasks
from jaxrl_tis.runtime import cli

OF_TASK = ("task.params", "warmup.params", "eval.params")  # arguments of a task
# Groups whose names are free.
FREE = (*OF_TASK, "task.template_kwargs", "task.environment_params", "reward.weights")
PACKAGE = __name__.partition(".")[0]
HELP = ("--help", "-help", "--helpshort", "-h", "-?")


def define_config(values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines --config; its value is the locked ConfigDict with all that the command line sets."""
    try:
        holder = config_flags.DEFINE_config_file(
            "config", None, "Config file; fields are overridden by --config.field=value.", values,
            lock_config=True,
        )
    except flags.CantOpenFlagFileError as error:  # it looks at the command line
        sys.exit(_refused(str(error).removeprefix("ERROR:: ")))
    values["config"].parser = _ConfigParser(values["config"].parser)
    return holder


class _TextParser(flags.ArgumentParser):
    """Reads a field of text. None is no text: `validate` says which fields may have it."""

    def parse(self, argument: str | None) -> str | None:
        return None if argument == "None" else argument

    def flag_type(self) -> str:
        return "string"


config_flags.register_flag_parser_for_type(str, _TextParser())


def run(
    main: Callable[..., object], required: Sequence[str] = (), words: Sequence[str] = ()
) -> None:
    """Runs a command whose flags are defined with absl; see jaxrl_tis.runtime.cli.

    Args:
      required: names of flags.
      words: what the arguments without a flag are, each of which must be given; `main` takes them.
    """
    parse = functools.partial(_parse, required, words)
    with cli.piped():  # --help prints before `main` is called
        app.run(lambda argv: cli.run(lambda: main(*argv[1:])), flags_parser=parse)


def parsed(arguments: Sequence[str]) -> ml_collections.ConfigDict:
    """Returns the config of another command line, which has --config and fields of it.

    Raises:
      flags.Error, ValueError: as the command would refuse them.
    """
    values, before = flags.FlagValues(), sys.argv
    holder = define_config(values)
    sys.argv = ["", *arguments]
    try:
        _check_once(_words())
        values(sys.argv)
        return holder.value
    finally:
        sys.argv = before


def _parse(required: Sequence[str], words: Sequence[str], argv: list[str]) -> list[str]:
    if any(word in HELP for word in itertools.takewhile(lambda word: word != "--", argv[1:])):
        print(help_text(sys.modules["__main__"].__doc__ or "", flags.FLAGS, required))
        sys.exit(0)
    try:
        _check_once(_words())
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_refused(str(error)))
    if unset := [f"--{name}" for name in required if flags.FLAGS[name].value in (None, "")]:
        sys.exit(_refused(f"{', '.join(unset)} not given; --help shows every flag"))
    if missing := words[len(rest) - 1 :]:
        sys.exit(_refused(f"{' '.join(missing)} is missing; --help shows the arguments"))
    if len(rest) > 1 + len(words):
        unexpected = " ".join(rest[1 + len(words) :])
        sys.exit(_refused(f"unexpected arguments {unexpected}; a flag is --name=value"))
    if flags.FLAGS["verbosity"].using_default_value:
        # Orbax and JAX tell much on INFO.
        flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
    return rest


def help_text(about: str, values: flags.FlagValues, required: Sequence[str]) -> str:
    """Returns what --help prints: the command's docstring, the flags of this package, and the
    docstring's examples."""
    by_module = values.flags_by_module_dict()
    ours = [module for module in by_module if module.partition(".")[0] == PACKAGE]
    found = [flag for module in (*ours, sys.argv[0]) for flag in by_module.get(module, [])]
    order = sorted(found, key=lambda flag: (flag.name not in required, flag.name))
    text, examples = cli.split_examples(about)
    described = [_described(flag, required) for flag in order]
    return "\n".join([text, "", "flags:", *described, "", examples])


def _described(flag: flags.Flag, required: Sequence[str]) -> str:
    has_default = flag.default not in (None, False, "", [])
    text = (flag.default_as_str or "").strip("'")
    default = f" Default: {text}." if has_default else ""
    needed = " Required." if flag.name in required else ""
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}=..."
    text = f"{flag.help.rstrip('.')}.{default}{needed}"
    return f"  {name}\n{textwrap.indent(textwrap.fill(text, 90), ' ' * 6)}"


def _refused(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


class _ConfigParser(flags.ArgumentParser):
    """Loads a config and makes it ready for the command line's fields.

    Raises flags.Error, which absl passes on as it is.
    """

    def __init__(self, inner: flags.ArgumentParser):
        self._inner = inner

    def parse(self, argument: str) -> ml_collections.ConfigDict:
        path = argument.partition(":")[0]
        if not pathlib.Path(path).is_file():
            raise flags.Error(
                f"--config={argument}: there is no file {path!r}; give the path of a config, as in "
                "configs/quickstart.py"
            )
        try:
            config = self._inner.parse(argument)
        except Exception as error:  # the file is the user's code
            raise flags.Error(_error_text(error, path)) from error
        if not isinstance(config, ml_collections.ConfigDict):
            kind = type(config).__name__
            raise flags.Error(f"{path}: get_config() returns a value of type {kind}, not a ConfigDict")
        adapt(config, overrides(_words()))
        return config

    def flag_type(self) -> str:
        return self._inner.flag_type()


def _words() -> list[str]:
    """Returns the command line, with the contents of flag files."""
    return flags.FLAGS.read_flags_from_files(sys.argv, force_gnu=False)


def _check_once(words: Sequence[str]) -> None:
    """Raises flags.Error for a flag or a field that is given twice. absl takes the last one."""
    given = itertools.takewhile(lambda word: word != "--", words[1:])
    names = [match[1] for word in given if (match := re.match(r"--?([a-zA-Z][\w.]*)", word))]
    positive = [name if name in flags.FLAGS else name.removeprefix("no") for name in names]
    if refused := cli.repeated(f"--{name}" for name in positive):
        raise flags.Error(refused)


def _error_text(error: BaseException, path: str) -> str:
    """Says what went wrong, and in which line of the config file."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}"
    if isinstance(error, (TypeError, ValueError)):
        error = error.__context__ or error  # ml_collections wraps it in one with the traceback
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    while isinstance(error, (AttributeError, KeyError)) and error.args:
        error = error.args[0]  # ml_collections wraps one in the other
    return f"{path}:{lines[-1] if lines else 1}: {error}"


def overrides(argv: Sequence[str]) -> dict[str, str]:
    """Finds the fields that a command line sets, as --config.field=text or as two words: {dotted
    field: its text}. Without a text a field is true, and --noconfig.field is false."""
    fields = {}
    for word, following in itertools.pairwise([*argv, "--"]):
        if match := re.fullmatch(r"--?(no)?config\.([^=]+)(?:=(.*))?", word, re.DOTALL):
            is_negated, field, text = match.groups()
            if text is None:
                is_flag = re.match(r"--?[a-zA-Z]|--$", following)
                text = "False" if is_negated else "True" if is_flag else following
            fields[field] = text
    return fields


def adapt(config: ml_collections.ConfigDict, given: Mapping[str, str]) -> None:
    """Makes room in a locked config for what the command line gives; see the top of the file.

    Raises:
      flags.Error: a field does not exist; it names the nearest one.
    """
    task = given.get("task.name", config.task.name)
    if task != config.task.name:
        for field in OF_TASK:
            section = field.partition(".")[0]
            has_split = task in tasks.TASKS and "split" in tasks.parameters(task)
            own = {"split": section} if has_split and section in tasks.SPLITS else {}
            _replace(config[section].params, own)
    if "model.path" in given and given["model.path"] != config.model.path:
        config.task.tokenizer = ""
        _replace(config.task.template_kwargs, {})
    for field in given:
        group, _, name = field.rpartition(".")
        if group in FREE and name.isidentifier():
            section, key = group.split(".")
            params = config[section][key]
            if name not in params:
                _replace(params, {**params, name: placeholder(object)})
        else:
            _check_field(config, field)


def _replace(params: ml_collections.ConfigDict, new: Mapping[str, object]) -> None:
    with params.unlocked():
        for name in set(params) - set(new):
            del params[name]
        for name in set(new) - set(params):
            params[name] = new[name]


def _check_field(config: ml_collections.ConfigDict, field: str) -> None:
    node, path = config, "config"
    for name in field.split("."):
        if not isinstance(node, ml_collections.ConfigDict) or name not in node:
            names = list(node) if isinstance(node, ml_collections.ConfigDict) else []
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names) or 'none'}"
            raise flags.Error(f"{path} has no field {name!r}; {hint}")
        node, path = node[name], f"{path}.{name}"
    if isinstance(node, ml_collections.ConfigDict) and field not in FREE:
        raise flags.Error(f"{path} is a group of fields: set one of {', '.join(node)}")
