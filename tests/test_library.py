"""Compiling the kernels in C: what is kept and found again, which compilers are taken, and doing without."""

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hotlap.kernels.cpu import library
from tests.kernels_here import needs_kernels
from tests.ranks import run_ranks


def asked(tmp_path, **variables: str) -> str:
    """What a process with an empty cache says of its kernels. Unless told to, it does not optimize them."""
    defaults = {"HOTLAP_CACHE": str(tmp_path / "cache"), "CC": quick_compiler(tmp_path / "quick-cc")}
    [answer] = run_ranks(ask, 1, {**defaults, **variables}, with_group=False)
    return answer


def ask(rank: int, world_size: int, variables: dict[str, str]) -> str:
    os.environ.update(variables)
    library._load.cache_clear()  # of the cache of whoever runs the tests
    return str(library.unavailable())


@needs_kernels
def test_what_was_compiled_is_found_again(tmp_path) -> None:
    assert asked(tmp_path) == "None"
    kept = list((tmp_path / "cache" / "native").iterdir())
    assert [path.suffix for path in kept] == [".so"]
    made_at = kept[0].stat().st_mtime_ns
    assert asked(tmp_path) == "None"
    assert kept[0].stat().st_mtime_ns == made_at


def test_without_a_compiler_the_reason_is_told(tmp_path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'no such target' >&2; exit 1\n")
    broken.chmod(0o755)
    assert asked(tmp_path, CC="no-such-compiler") == "no C compiler"
    assert asked(tmp_path, CC=str(broken)) == "the C compiler failed: no such target"
    assert asked(tmp_path, HOTLAP_NATIVE="off") == "HOTLAP_NATIVE=off"
    assert not (tmp_path / "cache").exists()


def quick_compiler(path: Path, others: str = "") -> str:
    """A compiler that is gcc without optimization, but for what it does in other cases."""
    path.write_text(f'#!/bin/sh\ncase "$*" in {others} *) exec cc "$@" -O0;; esac\n')
    path.chmod(0o755)
    return str(path)


def compiler_script(path: Path, of_macros: str) -> str:
    """A compiler that is gcc but for its predefined macros and for options that only gcc has."""
    return quick_compiler(path, f"*-dM*) {of_macros};; *-Q*) exit 1;;")


@needs_kernels
def test_each_kind_of_processor_has_its_own_file(tmp_path) -> None:
    for kind in ("new", "old"):
        compiler = compiler_script(tmp_path / "compiler", f"echo '#define __{kind}__ 1'")
        assert asked(tmp_path, CC=compiler) == "None"
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 2


@needs_kernels
def test_clang_is_refused(tmp_path) -> None:
    compiler = compiler_script(tmp_path / "compiler", "echo '#define __clang__ 1'")
    assert asked(tmp_path, CC=compiler) == "kernels need gcc, found clang"
    assert not (tmp_path / "cache").exists()


@needs_kernels
def test_a_compiler_may_be_called_through_another_program(tmp_path) -> None:
    assert asked(tmp_path, CC=f"env {quick_compiler(tmp_path / 'cc')}") == "None"
    assert asked(tmp_path, CC="env no-such-compiler").startswith("the C compiler failed")
    assert asked(tmp_path, CC="'cc") == "CC is not a command: No closing quotation"


@needs_kernels
def test_a_damaged_file_is_compiled_once_more(tmp_path) -> None:
    assert asked(tmp_path) == "None"
    (kept,) = (tmp_path / "cache" / "native").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])  # loading it would end the process
    assert asked(tmp_path) == "None"
    assert kept.stat().st_size == len(whole)


@needs_kernels
def test_a_cache_that_cannot_be_written_is_a_reason_too(tmp_path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    assert "Not a directory" in asked(tmp_path) or "File exists" in asked(tmp_path)


@pytest.fixture
def made(tmp_path, monkeypatch) -> list[Path]:
    """What `_compiled` has compiled, by a made-up compiler that writes a few bytes with their checksum."""
    calls: list[Path] = []

    def compile_quickly(_compiler: list[str], path: Path) -> None:
        calls.append(path)
        path.unlink(missing_ok=True)
        path.write_bytes(b"library" + hashlib.sha256(b"library").digest())
        path.chmod(0o755)

    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_compiler", lambda: ["cc"])
    monkeypatch.setattr(library, "_fingerprint", lambda _compiler: "kind")
    monkeypatch.setattr(library, "_compile", compile_quickly)
    return calls


def test_what_others_could_have_written_is_compiled_anew(made) -> None:
    kept = library._compiled()
    assert library._compiled() == kept
    assert len(made) == 1
    for mode in (0o775, 0o757):
        kept.chmod(mode)
        library._compiled()
        assert kept.stat().st_mode & 0o777 == 0o755
    assert len(made) == 3
    kept.rename(kept.with_name("elsewhere"))
    kept.symlink_to("elsewhere")
    library._compiled()
    assert not kept.is_symlink()
    assert len(made) == 4


def test_a_directory_of_ours_is_closed_to_others(made) -> None:
    directory = library._compiled().parent
    directory.chmod(0o777)
    library._compiled()
    assert directory.stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_nothing_of_another_user_is_loaded(made) -> None:
    kept = library._compiled()
    os.chown(kept, 12345, -1)
    library._compiled()
    assert (kept.stat().st_uid, len(made)) == (0, 2)
    os.chown(kept.parent, 12345, -1)
    with pytest.raises(library._UnavailableError, match=r"other users can write to .*: set HOTLAP_CACHE"):
        library._compiled()


@needs_kernels
def test_without_a_home_there_is_a_reason_instead_of_kernels(tmp_path) -> None:
    assert "set HOTLAP_CACHE" in asked(tmp_path, HOTLAP_CACHE="~no-such-user/cache")


@needs_kernels
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="options of a compiler for x86-64")
@pytest.mark.parametrize(("option", "most_lanes"), [("-mno-avx512f", 8), ("-mno-avx", 4)])
def test_kernels_agree_with_their_references_on_shorter_vectors(option, most_lanes) -> None:
    environment = {**os.environ, "CC": f"{os.environ.get('CC', 'cc')} {option}", "OMP_NUM_THREADS": "1"}
    lanes = (
        "from hotlap.kernels.cpu.library import needed_library; print(needed_library().hotlap_vector_lanes())"
    )
    names = ("native", "fused_block", "kernels", "chunked_loss", "row_rms")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    found, tested = (
        subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
        for words in (["-c", lanes], tests)
    )
    assert int(found.stdout) <= most_lanes, found.stderr
    assert tested.returncode == 0, tested.stdout[-3000:]


@needs_kernels
def test_the_sources_compile_without_warnings() -> None:
    files = [str(source) for source in library.SOURCES if source.suffix == ".c"]
    warnings = ("-Wall", "-Wextra", "-Wshadow", "-Werror", "-fsyntax-only")
    done = subprocess.run(
        [*library._compiler(), *library.FLAGS, *warnings, *files], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
