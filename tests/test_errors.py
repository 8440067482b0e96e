import pytest

from hotlap import cli
from hotlap.errors import ConfigError, DeviceError, HotlapError, memory_errors


def test_an_error_reads_as_one_line_with_its_three_parts():
    error = ConfigError(expected="a width that 6 heads divide", found="width 100", do="use 96 or 102")
    assert isinstance(error, HotlapError)
    assert str(error) == "expected a width that 6 heads divide; found width 100; use 96 or 102"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp]\n. can't allocate memory: 9 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."),
        RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_too_little_memory_is_one_line(error):
    with pytest.raises(DeviceError, match="expected enough memory") as caught, memory_errors():
        raise error
    assert "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are():
    for error in (RuntimeError("shapes do not fit"), OSError(28, "No space left on device"), KeyError("a")):
        with pytest.raises(type(error)) as caught, memory_errors():
            raise error
        assert caught.value is error


def test_a_command_without_memory_ends_as_any_mistake(monkeypatch, capsys):
    def dispatch(_words):
        raise MemoryError

    monkeypatch.setattr(cli, "dispatch", dispatch)
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["train"])
    assert capsys.readouterr().err.startswith("hotlap: expected enough memory")
