"""The wheel in an environment of its own, away from the clone: trains, reports, samples; without gcc too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from hotlap import __version__
from tests.trained_run import write_texts

ROOT = Path(__file__).parents[1]
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**kept, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = (
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        ROOT,
    )
    run(sys.executable, *build, cwd=folder)
    (made,) = folder.glob("hotlap-*.whl")
    return made


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel; what Hotlap needs is taken from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    site = next((folder / "env" / "lib").glob("python*/site-packages"))
    # A path of a .pth file is searched, but .pth files in it, such as the one of the clone, are not read.
    (site / "needed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    place = run(python, "-c", "import hotlap; print(hotlap.__file__)", cwd=folder)
    assert Path(place.strip()).is_relative_to(folder)
    return folder / "env" / "bin"


@pytest.mark.parametrize("has_compiler", [True, False])
def test_it_trains_reports_and_samples(bare, tmp_path, has_compiler):
    if has_compiler and shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    path = os.environ["PATH"] if has_compiler else str(bare)
    settings = {"PATH": path, "HOTLAP_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    texts = write_texts(tmp_path / "texts")
    options = ["--size", "pico", "--steps", "4", "--precision", "float32", "--threads", "1", "--name", "lap"]
    out = run(bare / "hotlap", "train", "softcap", "--data", texts, *options, cwd=tmp_path, **settings)
    (kernels,) = [line for line in out.splitlines() if line.startswith("kernels ")]
    assert ("no C compiler" in kernels) is not has_compiler, kernels
    assert ("in C" in kernels) is has_compiler, kernels
    assert "</html>" in (tmp_path / "runs" / "lap" / "report.html").read_text(encoding="utf-8")
    run(bare / "hotlap", "report", "runs/lap", "--out", "again.html", cwd=tmp_path, **settings)
    assert (tmp_path / "again.html").exists()
    said = run(bare / "hotlap", "sample", "runs/lap", "--prompt", "time", cwd=tmp_path, **settings)
    assert "time" in said
    facts = json.loads(run(bare / "hotlap", "doctor", "--json", cwd=tmp_path, **settings))
    assert facts["hotlap"] == __version__
    assert "tensorboard" in facts["extras"]


def test_it_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    assert {name.split("/")[0] for name in names} == {"hotlap", f"hotlap-{__version__}.dist-info"}
    for file in ("kernels/cpu/csrc/kernels.h", "report/page.js", "acceptance/curves.json", "py.typed"):
        assert f"hotlap/{file}" in names
    assert not [name for name in names if "__pycache__" in name]
    assert "Requires-Python: >=3.11" in metadata


@pytest.mark.skipif(UV is None, reason="uv is not installed (pip install uv)")
def test_an_environment_of_uv_has_no_pip_and_doctor_says_uv(wheel, tmp_path):
    settings = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_OFFLINE": "1"}
    run(UV, "venv", "--python", sys.executable, "env", cwd=tmp_path, **settings)
    python = tmp_path / "env" / "bin" / "python"
    run(UV, "pip", "install", "--no-deps", "--python", python, wheel, cwd=tmp_path, **settings)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (site / "needed.pth").write_text(f"{needed_without_pip(tmp_path)}\n")
    facts = json.loads(run(python.parent / "hotlap", "doctor", "--json", cwd=tmp_path))
    commands = [command for command in facts["extras"].values() if command]
    assert all(command.startswith("uv pip install --python env/bin/python ") for command in commands)


def needed_without_pip(folder: Path) -> Path:
    """Links to the packages of the environment that runs the tests, but for pip and the clone's entry."""
    made = folder / "needed"
    made.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.suffix != ".pth" and not path.name.startswith(("pip", "hotlap")):
            (made / path.name).symlink_to(path)
    return made
