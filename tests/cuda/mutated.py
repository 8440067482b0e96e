"""In the child process: a module of ours imported with a mistake in it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

import hotlap


def with_mistake(module: str, old: str, new: str, function: str, arguments: dict[str, Any]) -> Any:
    """The result of `function` ("package.module:name") after `old` in the module's source became `new`."""
    assert module not in sys.modules, f"{module} is imported already"
    sys.meta_path.insert(0, _Finder(module, old, new))
    place, _, name = function.partition(":")
    result = getattr(importlib.import_module(place), name)(**arguments)
    assert module in sys.modules, f"{module} was not imported"
    return result


class _Finder:
    def __init__(self, module: str, old: str, new: str) -> None:
        self.module = module
        path = Path(hotlap.__file__).parent.parent / (module.replace(".", "/") + ".py")
        count = path.read_text().count(old)
        assert count == 1, f"NO LONGER FITS: {old!r} stands {count} times in {path.name}"
        self.loader = _Loader(module, str(path), old, new)

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self.module:
            return None
        return importlib.util.spec_from_file_location(name, self.loader.path, loader=self.loader)


class _Loader(SourceFileLoader):
    def __init__(self, module: str, path: str, old: str, new: str) -> None:
        super().__init__(module, path)
        self.old, self.new = old, new

    def get_code(self, _: str) -> Any:
        source = Path(self.path).read_text().replace(self.old, self.new)
        return compile(source, self.path, "exec")
