from hotlap.errors import ConfigError, HotlapError


def test_an_error_reads_as_one_line_with_its_three_parts():
    error = ConfigError(expected="a width that 6 heads divide", found="width 100", do="use 96 or 102")
    assert isinstance(error, HotlapError)
    assert str(error) == "expected a width that 6 heads divide; found width 100; use 96 or 102"
