"""Cloud commands that write down how they were called and answer from a script."""

import json
import os
import pathlib
import sys

# {"log": file, "copies": folder, "answers": [[words that a call must have, [[exit code, text], ...]],
# ...]}; the answers of a matching entry are used in turn, the last one for ever. What is copied to a
# host is kept.
FAKE = """#!{python} -IS
import json, os, pathlib, shutil, sys
script = pathlib.Path({script!r})
told = json.loads(script.read_text())
call = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
with open(told["log"], "a") as log:
    log.write(json.dumps({{"call": call, "stdin": "" if sys.stdin.isatty() else sys.stdin.read()}}) + "\\n")
if "scp" in call:
    source, target = call[call.index("scp") + 1:][:2]
    shutil.copy2(source, os.path.join(told["copies"], target.partition(":")[2]))
for words, answers in told["answers"]:
    if all(any(word in part for part in call) for word in words):
        code, text = answers[0]
        if len(answers) > 1:
            del answers[0]
            script.write_text(json.dumps(told))
        print(text)
        sys.exit(code)
"""


class Cloud:
    """Fakes of these commands at the front of PATH.

    Attributes:
      copies: a folder with the files that were copied to a host.
    """

    def __init__(self, folder: pathlib.Path, *names: str):
        self._script, self._log = folder / "script.json", folder / "log.jsonl"
        self.copies = folder / "copies"
        bin_folder = folder / "bin"
        for path in (bin_folder, self.copies):
            path.mkdir(parents=True)
        for name in names:
            path = bin_folder / name
            path.write_text(FAKE.format(python=sys.executable, script=str(self._script)))
            path.chmod(0o755)
        self.path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        self.answer()

    def answer(self, **by_words) -> None:
        """`answer(describe=[(0, "ACTIVE")])`: what calls with that word print and exit with."""
        answers = [[name.split("__"), given] for name, given in by_words.items()]
        self._script.write_text(json.dumps(
            {"log": str(self._log), "copies": str(self.copies), "answers": answers}))

    def calls(self) -> list[list[str]]:
        return [told["call"] for told in self._told()]

    def inputs(self) -> list[str]:
        return [told["stdin"] for told in self._told()]

    def _told(self) -> list[dict]:
        text = self._log.read_text() if self._log.exists() else ""
        return [json.loads(line) for line in text.splitlines()]


def verb_of(words: list[str]) -> str:
    """Returns the step of launch/tpu_vm.py that a call of gcloud belongs to."""
    words = [word for word in words if word != "alpha"]
    if "failedData" in words[-1]:
        return "reason"
    if "networkEndpoints" in words[-1]:
        return "address"
    if words[4] != "ssh":
        return words[4]
    if "RAY_AUTH_TOKEN" in words[-1]:
        return "token"
    known = "setup", "start", "work", "follow", "stop", "status"
    verbs = (verb for verb in known if f"on_vm.sh {verb}" in words[-1])
    return next(verbs, "status" if "on_vm.sh" in words[-1] else "unpack")
