"""Writes each notebook from the .py file of the same name: python colab/notebooks.py.

Cells begin with "# %% id" or "# %% [markdown] id". Edit the .py files. An empty cell has the source in
SHARED. Every notebook has the install cell."""

import json
import pathlib
import re

FOLDER = pathlib.Path(__file__).parent
REPOSITORY = "jaxrl-tis/jaxrl_tis"  # on GitHub, for the badges
BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    f"(https://colab.research.google.com/github/{REPOSITORY}/blob/main/colab/NAME.ipynb)"
)
CELL = re.compile(r"^# %% (\[markdown\] )?([\w-]+)\n", re.MULTILINE)
# The second cell of every notebook.
INSTALL = '''\
import importlib.util
import os
import pathlib
import subprocess
import sys

# The folder with setup.py, an archive of it, or a git URL; used where jaxrl_tis is not installed.
# "": the folder above, or in Colab the repository that this notebook came from.
SOURCE = ""

SOURCE = SOURCE or ("REPOSITORY" if "google.colab" in sys.modules else "..")
found = importlib.util.find_spec("jaxrl_tis")
if found is None or found.origin is None:  # a plain folder of this name is not the package
    CLONE = pathlib.Path(SOURCE).resolve()
    if "://" in SOURCE or SOURCE.endswith(".git"):
        CLONE = pathlib.Path("jaxrl_tis_clone").resolve()
        if not CLONE.exists():
            subprocess.run(["git", "clone", "--quiet", "--depth=1", SOURCE, str(CLONE)], check=True)
    elif CLONE.is_file():
        archive, CLONE = CLONE, pathlib.Path("jaxrl_tis_clone").resolve()
        CLONE.mkdir(exist_ok=True)
        command = ["tar", "-xf", str(archive), "-C", str(CLONE)]
        if archive.suffix == ".zip":
            command = ["unzip", "-q", str(archive), "-d", str(CLONE)]
        subprocess.run(command, check=True)
        CLONE = next(CLONE.glob("**/setup.py"), CLONE / "setup.py").parent
    if not (CLONE / "setup.py").exists():
        raise FileNotFoundError(f"no setup.py in {CLONE}: set SOURCE above")
    # The jax that is here stays, as it fits the machine. If pip refuses it as too old for setup.py:
    # write an empty pins.txt instead, and restart the runtime afterwards.
    pins = pathlib.Path("pins.txt")
    has_jax = importlib.util.find_spec("jax") is not None
    version = "import jax; print(f'jax=={jax.__version__}')"
    pins.write_text(
        subprocess.run([sys.executable, "-c", version], capture_output=True, text=True).stdout
        if has_jax else ""
    )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(pins), "-e"]
    subprocess.run([*command, str(CLONE)], check=True)
    sys.path.insert(0, str(CLONE))
else:
    CLONE = pathlib.Path(found.origin).parents[1]
os.chdir(CLONE)
'''
# A run of FLAGS in WORKDIR, with plots of SHOWN: {title: (phase, metric)}.
TRAIN = '''\
LOG = pathlib.Path(WORKDIR + ".log")


def draw():
    records = metrics.read(WORKDIR)
    figure, axes = plt.subplots(1, 3, figsize=(11, 2.6), layout="constrained")
    for ax, (title, (phase, name)) in zip(axes, SHOWN.items(), strict=True):
        points = [(r["step"], r[name]) for r in records if r["phase"] == phase and name in r]
        ax.plot(*zip(*points, strict=True) if points else ([], []), ".-", color=plots.COLORS[0])
        ax.set(title=title, xlabel="step", xlim=(0, SETTINGS["steps"]))
    return figure


command = [sys.executable, "-m", "jaxrl_tis.main", *FLAGS, f"--workdir={WORKDIR}"]
LOG.parent.mkdir(exist_ok=True)
with open(LOG, "w") as log:
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
try:
    while process.poll() is None:
        time.sleep(3)
        if pathlib.Path(WORKDIR, metrics.FILE_NAME).exists():
            figure = draw()
            clear_output(wait=True)
            display(figure)
            plt.close(figure)
finally:
    process.terminate()
    process.wait()
assert process.returncode == 0, LOG.read_text()
'''
SHARED = {"train": TRAIN}  # the source of a cell that is empty in the .py file, by its id


def cells(text: str) -> list[tuple[str, str, str]]:
    """Returns [(kind, id, source)] of a .py file in percent format."""
    parts = CELL.split(text)[1:]
    found = []
    for is_markdown, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        body = body.strip("\n")
        if is_markdown:
            body = "\n".join(re.sub("^# ?", "", line) for line in body.splitlines())
        found.append(("markdown" if is_markdown else "code", name, body))
    return found


def notebook(path: pathlib.Path) -> str:
    """Returns the .ipynb of a .py file: a badge under the title, the install cell after it."""
    made, install = [], INSTALL.strip("\n").replace("REPOSITORY", f"https://github.com/{REPOSITORY}")
    for kind, name, body in cells(path.read_text(encoding="utf-8")):
        body = body or SHARED[name].strip("\n")
        if not made:
            title, _, rest = body.partition("\n")
            body = f"{title}\n\n{BADGE.replace('NAME', path.stem)}\n{rest}"
        cell = {"cell_type": kind, "id": name, "metadata": {}, "source": _lines(body)}
        made.append(cell if kind == "markdown" else _code(cell))
        if len(made) == 1:
            made.append(_code({"cell_type": "code", "id": "install", "metadata": {},
                               "source": _lines(install)}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _code(cell: dict) -> dict:
    return cell | {"execution_count": None, "outputs": []}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    for path in sorted(FOLDER.glob("*.py")):
        if path.name != pathlib.Path(__file__).name:
            path.with_suffix(".ipynb").write_text(notebook(path), encoding="utf-8")


if __name__ == "__main__":
    main()
