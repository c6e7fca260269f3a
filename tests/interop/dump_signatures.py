"""What an SDK's public names take. Runs in the peer's environment, and in ours.

Arguments: the package; the prefix of the modules whose names count as its own; the modules to look
into, "" for the package itself. Prints one JSON object ``{module: {name: shape}}``. The shape of a
function is a list of its parameters ``[name, kind, default]``, that of a class ``{member: shape}``
with its constructor as ``"()"``, that of a property ``"property"``, and that of an error
``"error"``.
"""

import importlib
import inspect
import json
import sys


def shape_of(value):
    if isinstance(value, property):
        return "property"
    if not inspect.isclass(value):
        found = inspect.signature(value).parameters.values()
        return [
            [p.name, p.kind.name, None if p.default is p.empty else repr(p.default)] for p in found
        ]
    if issubclass(value, BaseException):
        return "error"
    public = {n: inspect.getattr_static(value, n) for n in dir(value) if not n.startswith("_")}
    members = {
        name: shape_of(member)
        for name, member in public.items()
        if inspect.isfunction(member) or isinstance(member, property)
    }
    return {"()": shape_of(value.__init__), **members}


package, owner, *modules = sys.argv[1:]
result = {}
for module in modules:
    loaded = importlib.import_module(f"{package}.{module}" if module else package)
    result[module] = {
        name: shape_of(value)
        for name, value in vars(loaded).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith(owner)
    }
print("signatures " + json.dumps(result))
