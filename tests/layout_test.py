"""The house: three circles, who may know whom, two levels of folders, a test for every file.

The trainer is what a run imports. The tools (`TOOLS`) read what it writes. The studies are the folder
experiments/ at the top of the repository; no file of the package imports one.

A part of the package is a file at its top or one of its folders. `MAY_IMPORT` stands in the order of
the house, from the ground up: a part knows none but those above it here, so nothing is circular.
"""

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "jaxrl_tis"
STUDIES = ROOT / "experiments"

MAY_IMPORT = {
    # The ground: processes, files, tables.
    "runtime": (),
    "fields": (),
    "choices": (),
    "record": ("runtime",),
    "data": ("record", "runtime"),
    "environments": ("data",),
    "cli_flags": ("data", "runtime"),
    "sharding": ("fields",),
    "kernels": ("sharding",),
    # Estimators know no model, models no engine, the engine no learner.
    "estimators": ("kernels", "choices"),
    "diagnostics": ("estimators",),
    "models": ("kernels", "runtime", "sharding", "choices"),
    "engine": ("data", "fields", "kernels", "models", "runtime", "sharding", "choices"),
    "endpoint": ("data", "engine", "runtime"),
    "harness": ("data",),
    "rollouts": ("data", "endpoint", "engine", "environments", "fields", "harness", "record",
        "runtime", "sharding", "choices"),
    # The learner knows records of the engine, and none of its programs.
    "learner": ("data", "diagnostics", "engine", "environments", "estimators", "fields", "kernels",
        "models", "record", "rollouts", "runtime", "sharding"),
    # Engines of others: an extra, which `build` imports where a config asks for it.
    "external": ("engine", "learner", "models", "runtime"),
    # A config, checked and made into programs and state.
    "validate": ("data", "engine", "estimators", "learner", "models", "record", "rollouts"),
    "build": ("data", "endpoint", "engine", "environments", "estimators", "external", "harness",
        "learner", "models", "record", "rollouts", "runtime", "sharding", "validate"),
    "resume": ("data", "learner", "record"),
    # Tools.
    "report": ("record", "runtime"),
    "evaluate": ("build", "cli_flags", "data", "engine", "learner", "record", "rollouts",
        "runtime"),
    "export": ("build", "data", "learner", "models", "record", "runtime"),
    "aot": ("build", "cli_flags", "data", "engine", "fields", "learner", "models", "runtime",
        "sharding", "validate"),
    "libtpu_flags": ("aot", "runtime"),
    "doctor": ("estimators", "learner", "record", "rollouts", "runtime"),
    "gate": ("build", "cli_flags", "data", "diagnostics", "engine", "estimators", "external",
        "learner", "models", "rollouts", "runtime", "sharding"),
    "score": ("cli_flags", "models"),
    "provision": ("record", "report", "rollouts", "runtime"),
    "serve": ("build", "cli_flags", "endpoint", "engine", "learner", "runtime"),
    "sweep": ("cli_flags", "record", "report", "runtime", "validate"),
    "audit": ("diagnostics", "doctor", "estimators", "kernels", "report", "runtime"),
    # The run knows everything.
    "train": ("build", "data", "evaluate", "gate", "learner", "record", "report", "resume",
        "rollouts", "runtime", "validate"),
    "main": ("cli_flags", "runtime", "train"),
    "__main__": ("runtime",),  # starts the others by their names
}
# Files without a test of their own name, and the one that tests them.
COVERED = {
    "__main__": "cli_flags_test",
    "aot/__main__": "aot/programs_test",
    "aot/flags": "aot/programs_test",
    "aot/hlo_flops": "aot/hlo_test",
    "aot/hlo_groups": "aot/hlo_test",
    "aot/report": "aot/programs_test",
    "audit/__main__": "audit/measure_test",
    "audit/columns": "audit/dump_test",
    "audit/gap": "audit/measure_test",
    "audit/route_columns": "audit/routes_test",
    "audit/route_faults": "audit/routes_test",
    "audit/route_pairs": "audit/routes_test",
    "audit/verdict": "audit/measure_test",
    "build": "configs_test",
    "data/child": "data/confined_test",
    "doctor/__main__": "doctor/diagnose_test",
    "doctor/case": "doctor/diagnose_test",
    "endpoint/calls": "endpoint/sessions_test",
    "engine/check": "validate_test",
    "engine/endings": "engine/scheduler_test",
    "engine/prefiller": "engine/scheduler_test",
    "engine/programs": "engine/engine_test",
    "engine/protocol": "engine/scheduler_test",
    "engine/request_check": "engine/scheduler_test",
    "engine/block_manager": "engine/scheduler_interruptions_test",
    "engine/state": "engine/engine_test",
    "engine/stop_strings": "engine/scheduler_interruptions_test",
    "environments/protocol": "environments/host_test",
    "estimators/traits": "estimators/methods_test",
    "experiments/frontier": "experiments/horizon_test",
    "experiments/oracle": "runtime/cli_test",
    "external/canary": "external/fleet_test",
    "external/protocol": "external/sglang_test",
    "external/vllm": "external/fleet_test",
    "external/weights": "external/fleet_test",
    "gate/__main__": "gate/report_test",
    "gate/ladder": "gate/report_test",
    "gate/pages": "gate/report_test",
    "harness/protocol": "harness/host_test",
    "kernels/head": "kernels/logprob_test",
    "kernels/logprob_chunked": "kernels/logprob_test",
    "kernels/segment_reference": "kernels/segment_test",
    "learner/check": "validate_test",
    "learner/probe": "learner/routing_test",
    "learner/scoring": "learner/step_test",
    "libtpu_flags": "runtime/cli_test",
    "models/hf_rope": "models/hf_config_test",
    "models/stacking": "models/safetensors_test",
    "report/__main__": "report/page_test",
    "rollouts/bookkeeping": "rollouts/virtual_test",
    "rollouts/live": "rollouts/sessions_test",
    "rollouts/turn_scheduler": "rollouts/episodes_test",
    "serve/__main__": "serve/setup_test",
}


TOOLS = {"aot", "audit", "doctor", "export", "gate", "libtpu_flags", "provision", "report", "score",
         "serve", "sweep"}


def sources() -> list[pathlib.Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def studies() -> list[pathlib.Path]:
    return sorted(path for path in STUDIES.glob("*.py") if path.name != "__init__.py")


def place(name: str) -> pathlib.Path:
    """Where a source is, from the name by which tests mirror it."""
    return (ROOT if name.startswith("experiments/") else PACKAGE) / f"{name}.py"


def importing() -> list[pathlib.Path]:
    return sources() + sorted(PACKAGE.glob("*/__init__.py"))


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imported(text: str) -> list[tuple[str, str | None]]:
    """(part of the package, alias of a module of it if it has one) for each import of a source."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(a.name.split(".")[1], a.asname) for a in node.names
                      if a.name.startswith("jaxrl_tis.")]
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "jaxrl_tis":
            _, *parts = node.module.split(".")
            for alias in node.names:
                module = PACKAGE.joinpath(*parts, alias.name)
                is_module = module.is_dir() or module.with_suffix(".py").exists()
                if parts or is_module:
                    found.append((parts[0] if parts else alias.name, alias.asname and is_module or None))
    return found


def roots(text: str) -> set[str]:
    """The first names of what a source imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def forbidden(name: str, text: str) -> list[str]:
    """Parts that a source imports and may not."""
    part = name.split("/")[0]
    known = {other for other, _ in imported(text)} - {part}
    return sorted(known - set(MAY_IMPORT[part]))


def test_every_part_knows_none_but_those_before_it():
    parts = list(MAY_IMPORT)
    assert set(parts) == {name_of(path).split("/")[0] for path in sources()}
    for i, part in enumerate(parts):
        above = sorted(set(MAY_IMPORT[part]) - set(parts[:i]))
        assert not above, f"{part} stands before {above} and may not know them"


def test_the_trainer_imports_no_tool_but_the_gate_and_the_report():
    trainer, edge = set(), {"main"}
    while edge:
        trainer |= edge
        edge = {part for known in edge for part in MAY_IMPORT[known]} - trainer
    assert trainer & TOOLS == {"gate", "report"}
    assert trainer | TOOLS | {"__main__"} == set(MAY_IMPORT)


def test_the_package_imports_no_folder_beside_it():
    """An installed package has none of them."""
    beside = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"jaxrl_tis"}
    assert {"experiments", "configs", "benchmarks"} <= beside
    found = {name_of(path): beside & roots(path.read_text()) for path in importing()}
    assert {name: others for name, others in found.items() if others} == {}
    assert roots("import a.b\ndef f():\n    from c.d import e\n    from c import g") == {"a", "c"}


def test_a_file_imports_what_its_part_may():
    found = {name_of(path): forbidden(name_of(path), path.read_text()) for path in importing()}
    assert {name: others for name, others in found.items() if others} == {}


def test_the_learner_knows_no_program_of_the_engine():
    files = {f for path in (PACKAGE / "learner").glob("*.py") for f in modules(path.read_text())}
    assert {f for f in files if f.startswith("engine/")} == {"engine/check", "engine/records"}


def test_no_permission_is_idle():
    used = {part: set() for part in MAY_IMPORT}
    for path in importing():
        part = name_of(path).split("/")[0]
        used[part] |= {other for other, _ in imported(path.read_text())} - {part}
    idle = {part: sorted(set(MAY_IMPORT[part]) - used[part]) for part in MAY_IMPORT}
    assert not {part: names for part, names in idle.items() if names}


def test_a_broken_direction_is_seen():
    for name, text, other in [
        ("estimators/ratios", "from jaxrl_tis.models import transformer", "models"),
        ("kernels/tiles", "def f():\n    from jaxrl_tis.models.quant import dot", "models"),
        ("models/quant", "from jaxrl_tis import engine", "engine"),
        ("rollouts", "import jaxrl_tis.learner", "learner"),
    ]:
        assert forbidden(name, text) == [other]


def test_modules_keep_their_names_where_they_are_imported():
    """But for the adapter, whose classes have the names that its interface gives them."""
    renamed = {name_of(p) for p in sources() if any(a for _, a in imported(p.read_text()))}
    assert renamed == {"engine/jetstream"}


def test_folders_are_two_levels_deep_and_describe_themselves():
    assert all(len(path.relative_to(PACKAGE).parts) <= 2 for path in sources())
    for folder in PACKAGE.iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


@functools.cache
def modules(text: str) -> set[str]:
    """Files of the package, and studies, that a source imports from."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("jaxrl_tis", "experiments")):
            base = node.module.removeprefix("jaxrl_tis").strip(".").split(".")
            found.add("/".join(base))
            found |= {"/".join((*filter(None, base), alias.name)) for alias in node.names}
    names = {*map(name_of, sources()), *(f"experiments/{path.stem}" for path in studies())}
    return found & names


@pytest.mark.all
def test_no_test_keeps_the_flags_of_a_command():
    """Two commands may name a flag alike: tests take the modules that define flags when imported by
    `commands.load`."""
    defines = {
        name_of(path) for path in sources()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("flags.DEFINE")
    }
    assert {"score", "main", "gate/__main__"} <= defines
    at_top = lambda path: "\n".join(
        ast.unparse(node) for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom))
    keeping = {path.stem for path in (ROOT / "tests").rglob("*.py") if modules(at_top(path)) & defines}
    assert keeping == set()


@pytest.mark.all
def test_every_file_has_a_test_of_its_name_or_a_named_one():
    """A named one is at most two imports away from it; a command it starts by its name."""
    tests = ROOT / "tests"
    has_test = lambda name: (tests / f"{name}_test.py").exists()
    tested = [*map(name_of, sources()), *(f"experiments/{path.stem}" for path in studies())]
    assert {name for name in tested if not has_test(name)} == set(COVERED)
    for name, test in COVERED.items():
        text = (tests / f"{test}.py").read_text()
        near = modules(text)
        for _ in range(2):
            near |= {m for n in near for m in modules(place(n).read_text())}
        command = name.removesuffix("/__main__").replace("/", ".")
        assert name in near or command in text, f"{test} does not reach {name}"


def private(text: str) -> set[str]:
    """Private names of others that a source uses: attributes of anything but self, cls and super(), and
    imported names."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            own |= isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
            if node.attr.startswith("_") and not own:
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names if alias.name.startswith("_")}
    return found


def test_benchmarks_call_what_users_call():
    """But for JAX's own attention kernel, which has no public gradient; `_asdict` is a public name."""
    sources = (ROOT / "benchmarks").glob("*.py")
    found = {path.stem: names for path in sources if (names := private(path.read_text()))}
    assert found == {"context": {"_splash_attention_bwd"}, "accelerator_parts": {"_asdict"}}
    text = "self._a; super()._b(); x._c; x.y._d(); from e import _f; g.__name__"
    assert private(text) == {"_c", "_d", "_f"}
