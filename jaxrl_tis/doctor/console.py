"""Reads metrics from the console output of a training run of any framework, without colours and bars.

Read are verl's lines `step:1 - name:0.5`, dicts after `step 0:`, `rollout 0:` (slime), `Global step 1:`
(OpenRLHF) or `Step 1:` (SkyRL, over several lines), the bare dicts of transformers' Trainer (TRL),
prime-rl's `Step 1 | Loss 0.5 | ...` and the list under NeMo-RL's `=== Step 1/100 ===`. Values are matched by
patterns; nothing is evaluated.
"""

import bisect
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

from jaxrl_tis.doctor.frameworks import COHORT

COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
RAY = re.compile(r"\([^()]*\bpid=\d+[^()]*\) ?")  # before each line of a process of Ray
NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)(?![\w.])"
WRAPPED = re.compile(rf"(?:[\w.]+\()*({NUMBER})", re.IGNORECASE)  # np.float64(0.5), tensor(0.5, device=...)
COARSE = re.compile(r"[-+]?[01]\.0{2,}|'1'")  # a number that is rounded to 0 or 1, to 4 digits each time
# verl
LINE = re.compile(r"(?<![\w/])step:(\d+) - ")
# Dicts
HEAD = re.compile(r"(?<!\w)(step|rollout|perf|Step|[Gg]lobal step) (\d+): *(\{.*)?$")
BARE = re.compile(r"\{['\"].*\}$")
ENTRY = re.compile(r"""['\"]([^'\"]+)['\"]: *('[^']*'|"[^"]*"|None|[-+\w.(]+)""")
COUNTERS = {"step": "train/step", "rollout": "rollout/step", "perf": "rollout/step"}  # slime's
# prime-rl and NeMo-RL print labels, for these names
PRIME = re.compile(r"\bStep (\d+) \| (.*)")
LABEL = re.compile(rf"([A-Za-z][\w.-]*(?: [A-Za-z][\w.-]*)*):? +({NUMBER}|nan|inf)", re.IGNORECASE)
NEMO, EPOCH = re.compile(r"={5,} Step (\d+)/(\d+) ={5,}"), re.compile(r"={5,} Epoch (\d+)/\d+ ={5,}")
BULLET = re.compile(rf"• ([^:]+): ({NUMBER})", re.IGNORECASE)
LABELS = {
    "Mismatch KL": "mismatch_kl/all/mean", "Turns": COHORT + "num_turns/mean",
    "Max Off-Policy": "off_policy/max", "Max. Off-Policy Level": "off_policy/max",
    "Generation KL Error": "train/gen_kl_error", "Avg Trajectory Age": "train/avg_trajectory_age",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
}


@dataclasses.dataclass
class Printed:
    """A row of printed metrics.

    Attributes:
      line: number of its first line.
      values: name -> number; None is NaN.
      texts: names whose values are no numbers.
      rounded: names whose value was printed as 0.0000 or 1.0000, and may be rounded.
      is_counted: whether no step is printed, and its step is its place among the rows.
    """

    line: int
    values: dict[str, float]
    texts: set[str] = dataclasses.field(default_factory=set)
    rounded: set[str] = dataclasses.field(default_factory=set)
    is_counted: bool = False

    def put(self, name: str, text: str) -> None:
        """Adds the printed value of a name."""
        found = WRAPPED.match(text.strip("'\""))
        if found:
            self.values[name] = float(found[1])
            is_coarse = COARSE.fullmatch(found[1]) or COARSE.fullmatch(text)
            self.rounded |= {name} if is_coarse else set()
        elif text == "None":
            self.values[name] = math.nan
        else:
            self.texts.add(name)


@dataclasses.dataclass
class Block:
    """A dict that is printed over the lines after its head."""

    line: int
    head: str
    step: float
    parts: list[str]

    def takes(self, line: str) -> bool:
        """Adds a line; returns False for one that is no part of the dict."""
        is_part = self.parts or line.lstrip().startswith("{")  # else the head was a text's
        if not is_part or any(p.search(line) for p in (LINE, HEAD, PRIME)):
            return False
        self.parts.append(line.strip())
        return True

    def rows(self) -> list[Printed]:
        """Returns the row of the dict; none of a head without a dict."""
        if not self.parts:
            return []
        return [_of_dict(self.line, " ".join(self.parts), self.head, self.step)]


def rows(text: str) -> list[Printed]:
    """Returns the rows in the order in which they were printed; a torn last value is left out."""
    lines = [part for line in text.split("\n") for part in line.split("\r")]
    if not lines[-1].endswith("}"):  # still being written, as no end of line follows
        end = " - " if LINE.search(lines[-1]) else " | " if PRIME.search(lines[-1]) else ","
        lines[-1] = lines[-1].rpartition(end)[0]
    parsed_rows, counted = [], []
    for row in _rows(enumerate(map(_cleaned, lines), start=1)):
        parsed_rows.append(row)
        if row.is_counted:
            counted.append(row)
    epochs = [row.values.get("epoch", math.inf) for row in counted]
    for row, step in zip(counted, _counts(epochs), strict=True):
        row.values["step"] = step
    return parsed_rows


def _cleaned(line):
    if "\x1b" in line:
        line = COLOUR.sub("", line)
    return RAY.sub("", line, count=1).rstrip() if line.startswith("(") else line.rstrip()


def _counts(epochs):
    """Yields places among the rows; where epochs fall, a resumed run prints its rows again."""
    before = []
    for epoch in epochs:
        if before and epoch < before[-1]:
            del before[bisect.bisect_left(before, epoch):]
        before.append(epoch)
        yield len(before)


def _rows(lines: Iterable[tuple[int, str]]) -> Iterator[Printed]:
    epoch, listed = 1, None  # of NeMo-RL
    block: Block | None = None
    for number, line in lines:
        if block:
            is_part = block.takes(line)
            if not is_part or line.endswith("}"):
                yield from block.rows()
                block = None
            if is_part:
                continue
        if "step:" in line and (match := LINE.search(line)):
            yield _of_pairs(number, match[1], line[match.end():])
        elif "{" in line or "tep " in line or "rollout " in line:
            found = _of_line(number, line)
            if isinstance(found, Block):
                block = found
            elif found:
                yield found
            elif match := NEMO.search(line):
                if listed:
                    yield listed
                step = int(match[1]) + (epoch - 1) * int(match[2])  # counted anew in every epoch
                listed = Printed(number, {"step": float(step)})
        elif "= Epoch " in line and (match := EPOCH.search(line)):
            epoch = int(match[1])
        elif listed and "•" in line and (match := BULLET.search(line)) and match[1] in LABELS:
            listed.put(LABELS[match[1]], match[2])
    if block:
        yield from block.rows()
    if listed:
        yield listed


def _of_line(number: int, line: str) -> Printed | Block | None:
    """Returns the row of a line, or the block that it begins; None where it is neither."""
    if match := HEAD.search(line):
        if match[3]:
            return _of_dict(number, match[3], match[1], float(match[2]))
        return Block(number, match[1], float(match[2]), [])
    if match := PRIME.search(line):
        return _of_labels(number, match[1], match[2])
    if "epoch" in line and (match := BARE.search(line)) and not NEMO.search(line):
        row = _of_dict(number, match[0], None, None)
        if not any(name.startswith(("eval_", "train_runtime")) for name in row.values):
            return row
    return None


def _of_pairs(number, step, text):
    row = Printed(number, {"step": float(step)})
    for pair in text.split(" - "):
        name, _, value = pair.rpartition(":")
        if name:
            row.put(name, value)
    return row


def _of_dict(number, text, head, step):
    row = Printed(number, {}, is_counted=head is None)
    for name, value in ENTRY.findall(text):
        row.put(name, value)
    if head is not None:
        row.values.setdefault("step", step)
        if head in COUNTERS:
            row.values.setdefault(COUNTERS[head], step)
    return row


def _of_labels(number, step, text):
    row = Printed(number, {"step": float(step)})
    for part in text.split(" | "):
        found = LABEL.match(part)
        if found and found[1] in LABELS:
            row.put(LABELS[found[1]], found[2])
    return row
