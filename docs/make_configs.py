"""Writes docs/configs.md, a row per field, from configs/default.py: python docs/make_configs.py.

The description of a field is the comment above its line, or the one behind it. The allowed values
and the rule for continued runs come from the tables that check a config.
"""

import inspect
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # of `python docs/make_configs.py`

from configs import default
from jaxrl_tis import validate
from jaxrl_tis.record import changes
from jaxrl_tis.rollouts import check

PAGE = pathlib.Path(__file__).with_name("configs.md")
MANY = 12  # names that a cell lists at most
ALLOWED = validate.ALLOWED | {
    "rollout.driver": check.DRIVERS, "rollout.on_gap_exceeded": check.ON_GAP_EXCEEDED,
}
# The fields of these rules have a mark, and those of `change` have none.
MARKS = {"change": "", "free": "¹", "free if sync": "²", "change if sync": "³", "steps": "⁴"}
HEAD = """\
# Configuration

Every field of a run, with its default and meaning. Written by `python docs/make_configs.py` from
`configs/default.py`. To change the page, edit the comments there.

A config file returns these fields with other defaults. The command line changes single fields:

```
python -m jaxrl_tis.main --config=configs/quickstart.py --workdir=WORKDIR --config.optimizer.lr=3e-5
```

A field that does not exist is an error. So is a config that contradicts itself: the command lists every problem and
ends before it compiles anything.

## How to read the tables

The first value of a field is its default. Other values or a limit follow. Further limits depend on several fields.
The error message names them. `preset` means that `correction.preset` sets the value. Fields under *Expert fields* have
defaults that few runs need to change.

A run may change a field when it continues from a checkpoint in the same `WORKDIR`, by the mark of the field:

| mark | rule |
|---|---|
| none | Only with `--change=FIELD`, and not if the checkpoint lacks arrays for it, as for other shapes of the model, `model.param_dtype`, a first critic or reference ([reliability.md](reliability.md#continue-with-changed-fields)). |
| ¹ | Yes. |
| ² | Yes if `rollout.schedule` is `sync` and there is no replay. Else with `--change`. Fields of `engine` also need it with KV eviction. |
| ³ | With `--change` if `rollout.schedule` is `sync` and there is no replay. Else no. |
| ⁴ | Yes while nothing depends on the number of steps: a constant learning rate and no QeRL noise. |
"""


def comments() -> tuple[dict[str, str], dict[str, str], set[str]]:
    """Reads configs/default.py: ({field: description}, {section: description}, expert fields)."""
    fields, sections, experts = {}, {}, set()
    for function, prefixes in (
        (default.get_config, ("",)), (default._optimizer, ("optimizer.", "critic.")),
    ):
        above, is_expert = [], False
        for line in inspect.getsource(function).splitlines():
            code, _, comment = line.strip().partition("  # ")
            if code.startswith("# "):
                is_expert |= code == "# For experts"
                above += [] if code == "# For experts" else [code[2:]]
                continue
            assignment = re.match(r"c\.([\w.]+) = (.*)", code)
            if assignment is None:
                above = above if code else []
                is_expert &= bool(code)
                continue
            name, value = assignment.groups()
            text = " ".join([*above, *([comment] if comment else [])])
            is_section = value in ("ConfigDict()", ) and "." not in name or "_optimizer(" in value
            for prefix in prefixes:
                (sections if is_section else fields)[prefix + name] = text
                experts |= {prefix + name} if is_expert and not is_section else set()
            above = []
    return fields, sections, experts


def values(field: str, value: Any) -> str:
    """Returns the default of a field, and other values or a limit as far as a table has them."""
    default = "preset" if value is None else f"`{value!r}`".replace("'", '"')
    others = [str(name) for name in ALLOWED.get(field, ()) if name not in (None, value)]
    if isinstance(value, bool) or len(others) > MANY:
        others = []
    for limit, names in (("> 0", validate.POSITIVE), (">= 0", validate.NOT_NEGATIVE)):
        if field in names:
            return f"{default}, {limit}"
    return ", ".join([default, *(f"`{name}`" for name in others)])


def continued(field: str) -> str:
    """Returns what `record.changes` allows for a field of a continued run."""
    if field == "steps":
        return "steps"
    if field in changes.ROUNDED + changes.INTERRUPTING:
        return "free if sync"
    if field in changes.QUEUED:
        return "change if sync"
    return "free" if changes.is_within(field, changes.FREE) else "change"


def sentence(text: str) -> str:
    """Returns a description with links, a capital letter and a full stop."""
    text = re.sub(r"docs/(\w+\.md)(#[\w-]+)?", r"[\1](\1\2)", text)
    is_value = re.match(r"[\w-]+:", text)  # it begins with a value of the field
    return (text if is_value else text[0].upper() + text[1:]).removesuffix(".") + "."


def table(rows: Iterable[tuple[str, Any]], descriptions: dict[str, str]) -> str:
    lines = ["| field | values | meaning |", "|---|---|---|"]
    for field, value in rows:
        name = f"`{field}`{MARKS[continued(field)]}"
        cells = name, values(field, value), sentence(descriptions[field])
        escaped = " | ".join(cell.replace("|", r"\|") for cell in cells)
        lines.append(f"| {escaped} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    descriptions, sections, experts = comments()
    config = default.get_config().to_dict()
    rows = {"run": [], **{name: [] for name in sections}}
    for field in descriptions:
        section, _, name = field.rpartition(".")
        if section == "critic" and descriptions[field] == descriptions.get(f"optimizer.{name}"):
            descriptions[field] = f"as optimizer.{name}"
        rows[section or "run"].append((field, config[section][name] if section else config[name]))
    text = HEAD
    for name, fields in rows.items():
        about = sentence(sections.get(name, "The run as a whole."))
        text += f"\n## {name}\n\n{about}\n\n"
        text += table([row for row in fields if row[0] not in experts], descriptions)
        if expert := [row for row in fields if row[0] in experts]:
            text += f"\nExpert fields:\n\n{table(expert, descriptions)}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
