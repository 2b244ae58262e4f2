"""No module of the package makes Python objects of bytes that came from elsewhere: no such import, no such call."""

from __future__ import annotations

import ast
from pathlib import Path

import asyncrl

MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {
    "send_pyobj", "recv_pyobj", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
PACKAGE = Path(asyncrl.__file__).parent


def findings(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Attribute | ast.Name) and (node.attr if isinstance(node, ast.Attribute) else node.id) in CALLS:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and (node.arg, ast.unparse(node.value)) in {("allow_pickle", "True"), ("weights_only", "False")}:
            found.append(ast.unparse(node.value))
    return found


def test_no_module_reads_objects_out_of_bytes():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    assert {str(file.relative_to(PACKAGE)): found for file in files if (found := findings(file.read_text()))} == {}


def test_what_would_be_found():
    assert findings("import pickle as p, json") == ["pickle"]
    assert findings("from cloudpickle import loads") == ["cloudpickle"]
    assert findings("dist.broadcast_object_list([1])\nsocket.recv_pyobj()") == ["dist.broadcast_object_list", "socket.recv_pyobj"]
    assert findings("np.load(f, allow_pickle=True)\ntorch.load(f, weights_only=False)") == ["True", "False"]
