# %% [markdown] title
# # What fits on a TPU, without a TPU
#
# This notebook compiles the programs of a config for a TPU slice and shows their memory use. The
# compiler is part of libtpu and runs on any Linux machine. No program runs, and no time is measured.

# %% setup
import json
import subprocess

import jax
import matplotlib.pyplot as plt

from jaxrl_tis.report import plots

plt.rcParams.update(plots.STYLE | {"figure.dpi": 60})
if importlib.util.find_spec("libtpu") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"jax[tpu]=={jax.__version__}"],
                   check=True)

# %% [markdown] settings-text
# ## Settings
#
# `CONFIG` is the config, `TOPOLOGY` the slice, and `SLOTS` the numbers of sequences that decode
# together. `PROGRAMS` may also name `train`, `score`, `prefill` and others. The larger programs take a
# minute each.

# %% settings
CONFIG = "configs/gsm8k_qwen25_0p5b.py:grpo"
TOPOLOGY = "v5e:2x4"
SLOTS = (256, 2048, 16384)
PROGRAMS = ("decode",)
FIT = pathlib.Path("runs/notebook-fit.json")


def compiled(slots):
    """Returns the report of `python -m jaxrl_tis.aot` for a number of slots."""
    command = [sys.executable, "-m", "jaxrl_tis.aot", f"--config={CONFIG}", f"--topology={TOPOLOGY}",
               f"--programs={','.join(PROGRAMS)}", f"--config.engine.slots={slots}", f"--json={FIT}"]
    FIT.parent.mkdir(exist_ok=True)
    FIT.unlink(missing_ok=True)
    done = subprocess.run(command, capture_output=True, text=True)
    assert FIT.exists(), done.stderr
    return json.loads(FIT.read_text())


# %% compile
reports = {slots: compiled(slots) for slots in SLOTS}
first = reports[SLOTS[0]]
print(f"{first['config']} on {first['rented_as']}: {first['chips']} chips of "
      f"{first['hbm_bytes'] / 2**30:.2f} GiB")

# %% [markdown] table-text
# ## What fits
#
# Memory use is the program plus the other arrays that stay on the chip.

# %% table
GIB = 2**30
fits = []
for slots, found in reports.items():
    for name, entry in found["programs"].items():
        memory = entry["memory"]
        use = (memory["peak_bytes"] or 0) + memory["beside_bytes"]
        fits.append((slots, name, use / GIB, entry["fits"]))
        print(f"{slots:6} slots, {name}: {use / GIB:6.2f} GiB, {'fits' if entry['fits'] else 'too much'}")

fit_figure, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
labels = [f"{slots} slots, {name}" for slots, name, _, _ in fits]
colors = [plots.COLORS[2] if fit else plots.COLORS[1] for *_, fit in fits]
ax.barh(labels, [use for _, _, use, _ in fits], color=colors)
ax.axvline(first["hbm_bytes"] / GIB, color="black", linestyle=":", label="memory of a chip")
ax.set(xlabel="GiB a chip", title="Memory of the compiled programs")
ax.invert_yaxis()
ax.legend()
plt.show()

# %% [markdown] next-text
# ## Next
#
# `python -m jaxrl_tis.aot --config=... --fit` searches for the largest slots and micro-batches that fit.
# `docs/tpu_programs.md` has the tables of the shipped configs. `docs/launch.md` shows how to get a machine.
