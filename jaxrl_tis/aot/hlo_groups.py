"""Reads the replica groups of a collective in all three notations, and their mesh axes."""

import itertools
import math
import re

import numpy as np

Groups = frozenset[frozenset[int]]


def replica_groups(attributes: str, num_devices: int) -> Groups | None:
    """Returns groups of partition numbers; None for a line without groups.

    Notations: {{0,1},{2,3}}, [2,2]<=[4] or [2,2]<=[2,2]T(1,0) (rows of a transposed count), and
    mesh['a'=2,'b'=2] {'b'} with an optional order device_ids=([4,2]T(1,0)). Connected pairs of a
    permutation make one group.
    """
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](.*?) \{([^}]*)\}", attributes):
        return _of_mesh(*found.groups())
    if found := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        shape, order = found[1].split("<=")
        return _rows(_count(order).reshape(_numbers(shape)))
    listed = r"(replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}"
    if found := re.search(listed, attributes):
        groups = [_numbers(g) for g in re.findall(r"\{([\d,]*)\}", found[2])]
        groups = groups or [tuple(range(num_devices))]
        is_pairs = found[1] == "source_target_pairs"
        return _connected(groups) if is_pairs else frozenset(map(frozenset, groups))
    return None


def mesh_axes(groups: Groups, mesh: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes of groups, without axes of size 1; () if no set of axes matches.

    `mesh` is name -> size, with devices in row-major order. Groups inside one axis, as in the
    stages of an exchange, count as this axis. Between slices the groups name devices of the first
    slice only.
    """
    named = frozenset().union(*groups)
    names = [name for name, size in mesh.items() if size > 1]
    devices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    for count in range(len(names) + 1):
        for axes in itertools.combinations(names, count):
            if {g for g in _along(devices, list(mesh), axes) if g <= named} == groups:
                return axes
    for name in names:
        if all(any(g <= whole for whole in _along(devices, list(mesh), (name,))) for g in groups):
            return (name,)
    return ()


def _along(devices: np.ndarray, names: list[str], axes) -> Groups:
    """Returns the groups of devices that differ only in the given axes."""
    inside = [names.index(a) for a in axes]
    outside = [i for i in range(devices.ndim) if i not in inside]
    size = math.prod(devices.shape[i] for i in inside)
    return _rows(devices.transpose(outside + inside).reshape(-1, size))


def _of_mesh(sizes: str, order: str, axes: str) -> Groups:
    mesh = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", sizes)}
    chosen = re.findall(r"'([^']+)'(?=,|$)", axes)
    if len(chosen) != axes.count("'") // 2:
        raise ValueError(f"replica groups along parts of axes are not understood: {axes!r}")
    listed = re.search(r"device_ids=\((.*)\)", order)
    devices = _count(listed[1]) if listed else np.arange(math.prod(mesh.values()))
    return _along(devices.reshape(tuple(mesh.values())), list(mesh), chosen)


def _count(text: str) -> np.ndarray:
    """Returns 0..n-1 in the order of "[4,2]T(1,0)" (transposed) or of a list "0,2,1,3"."""
    found = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not found:
        return np.array(_numbers(text))
    shape = _numbers(found[1])
    count = np.arange(math.prod(shape)).reshape(shape)
    return count.transpose(_numbers(found[2])).ravel() if found[2] else count.ravel()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _rows(table: np.ndarray) -> Groups:
    return frozenset(frozenset(map(int, row)) for row in table)


def _connected(pairs: list) -> Groups:
    groups: list[set] = []
    for pair in pairs:
        touching = [g for g in groups if g & set(pair)]
        groups = [g for g in groups if not g & set(pair)] + [set(pair).union(*touching)]
    return frozenset(map(frozenset, groups))
