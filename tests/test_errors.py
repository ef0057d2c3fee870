"""What a user reads, and that all of it arrives."""

from __future__ import annotations

import pickle

import pytest

from shardc.errors import Errors, ShardcError


def test_text_has_place_cause_and_fix() -> None:
    error = ShardcError("12 heads are not divisible by tp=8", where="spec.yaml:7:3", fix="use tp=4")
    assert str(error) == "spec.yaml:7:3: 12 heads are not divisible by tp=8\n  fix: use tp=4"
    assert str(ShardcError("no place, no fix")) == "no place, no fix"
    assert error.errors == (error,)


def test_one_collected_error_is_raised_itself() -> None:
    errors = Errors()
    original = ShardcError("alone", where="a", fix="b")
    with errors.collect():
        raise original
    with pytest.raises(ShardcError) as e:
        errors.raise_any()
    assert e.value is original


def test_several_errors_are_raised_as_one_and_flattened() -> None:
    inner, outer = Errors(), Errors()
    inner.add("one", where="a:1", fix="x")
    inner.add("two", where="b:2")
    with outer.collect():
        inner.raise_any()
    outer.add("three")
    with pytest.raises(ShardcError) as e:
        outer.raise_any()
    assert [x.what for x in e.value.errors] == ["one", "two", "three"]
    assert str(e.value) == "a:1: one\n  fix: x\nb:2: two\nthree"
    assert e.value.where == "a:1"


def test_nothing_found_raises_nothing_and_other_exceptions_pass() -> None:
    errors = Errors()
    with errors.collect():
        pass
    errors.raise_any()
    with pytest.raises(ZeroDivisionError), errors.collect():
        raise ZeroDivisionError


def test_errors_travel_between_processes() -> None:
    errors = Errors()
    errors.add("one", where="a:1", fix="x")
    single = pickle.loads(pickle.dumps(errors.found[0]))
    assert str(single) == "a:1: one\n  fix: x"
    assert single.errors == (single,)
    errors.add("two")
    with pytest.raises(ShardcError) as e:
        errors.raise_any()
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
