"""What `make lap` installs: without the resolver of pip, so that the list has to be complete."""

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def pins_of_a_lap() -> dict[str, str]:
    part = (ROOT / "constraints.txt").read_text().split("\n# For tests")[0]
    return {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", part, re.M)
    }


def needed(name: str, found: set[str]) -> set[str]:
    """All packages that a package needs here, without its extras."""
    found.add(name)
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            other = canonicalize_name(requirement.name)
            # With CUDA torch needs more, which `make` leaves to pip.
            if other not in found and not other.startswith(("nvidia-", "cuda-", "triton")):
                needed(other, found)
    return found


def test_the_list_is_complete_for_a_lap_and_has_no_test_tools():
    pins = pins_of_a_lap()
    assert needed("hotlap", set()) - {"hotlap"} - pins.keys() == set()
    # To install hotlap itself from its directory; `editables` is asked for by hatchling only then.
    assert {"hatchling", "editables"} <= pins.keys()
    assert not {"pytest", "mypy", "ruff", "matplotlib", "transformers", "triton"} & pins.keys()
