"""One door to all commands: `jaxrl-tis COMMAND`, or `python -m jaxrl_tis COMMAND`.

Each command is also a module that runs by itself, as in `python -m jaxrl_tis.gate`.

Examples:

    python -m jaxrl_tis report runs/first
    python -m jaxrl_tis doctor runs/first
"""

import runpy
import sys

from jaxrl_tis.runtime import cli

COMMANDS = {  # name: (module, the question that it answers)
    "train": ("main", "How do I train with a correction, and continue a run?"),
    "gate": ("gate", "How large is the gap before a run, and which setting causes it?"),
    "doctor": ("doctor", "What went wrong in a run, also of another framework?"),
    "audit": ("audit", "What would each correction do to a batch of any trainer?"),
    "report": ("report", "How did a run go, and where do sampler and learner disagree?"),
    "evaluate": ("evaluate", "How accurate is a checkpoint or a model on held-out data?"),
    "export": ("export", "How do I get a Hugging Face folder from a run?"),
    "score": ("score", "What logits does a model give to tokens?"),
    "sweep": ("sweep", "Which of several corrections is best, over seeds?"),
    "provision": ("provision", "How many samplers, and how far ahead, does a run need?"),
    "serve": ("serve", "How do I query a checkpoint by an OpenAI-style API?"),
    "aot": ("aot", "Does a config fit a TPU slice?"),
}


def help_text() -> str:
    lines = [f"  {name:9} {question}" for name, (_, question) in COMMANDS.items()]
    last = "jaxrl-tis COMMAND --help shows the arguments of a command."
    _, examples = cli.split_examples(__doc__)
    return "\n".join(["usage: jaxrl-tis COMMAND [arguments]", "", *lines, "", last, examples.rstrip()])


def main() -> None:
    """Runs the command that the first argument names, with the others as its arguments."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(help_text())
        sys.exit(0)
    elif name in COMMANDS:
        sys.argv = [f"jaxrl-tis {name}", *arguments]
        runpy.run_module(f"jaxrl_tis.{COMMANDS[name][0]}", run_name="__main__", alter_sys=True)
    else:
        sys.exit(_refused(name))


def _refused(name: str) -> int:
    print(f"{name!r} is no command of jaxrl-tis; there are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
