"""Byte flips, forged files and any bytes over every loader: what is damaged is refused in one line. Briefly here; at
length in `make test-slow`."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from block_recurrent.config import ModelConfig
from block_recurrent.errors import BlockRecurrentError
from block_recurrent.run_config import RunConfig, read_toml
from tests.security.forging import FORGERIES
from tests.security.made import flip, fresh_copy
from tests.security.measure import KINDS, LOADERS, flips, forged

BRIEFLY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", KINDS)
def test_no_flip_is_accepted_silently(kind, made, tmp_path):
    copy = fresh_copy(made, tmp_path / "copy")
    found = flips(copy, kind, 25, seed=1)
    assert (found["accepted"], found["tracebacks"]) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_flip_is_accepted_silently_at_length(kind, made, tmp_path):
    copy = fresh_copy(made, tmp_path / "copy")
    found = flips(copy, kind, 1000, seed=2)
    assert (found["accepted"], found["tracebacks"]) == ([], [])


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_file_is_refused_or_used_without_harm(kind, made, tmp_path):
    copy = fresh_copy(made, tmp_path / "copy")
    assert forged(copy, kind, 6, seed=1)["tracebacks"] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_file_is_refused_or_used_without_harm_at_length(kind, made, tmp_path):
    copy = fresh_copy(made, tmp_path / "copy")
    assert forged(copy, kind, 500, seed=2)["tracebacks"] == []


def refused_by_every_loader(folder, raw):
    for name, load in LOADERS:
        path = folder / "one" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
        with pytest.raises(BlockRecurrentError) as error:
            load(path)
        assert "\n" not in str(error.value)
        path.unlink()


@BRIEFLY
@given(st.binary(max_size=300))
def test_any_bytes_are_a_one_line_error_for_every_loader(tmp_path, raw):
    refused_by_every_loader(tmp_path, raw)


@pytest.mark.slow
@settings(BRIEFLY, max_examples=5000)
@given(st.binary(max_size=300) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_one_line_error_for_every_loader_at_length(tmp_path, raw):
    refused_by_every_loader(tmp_path, raw)


@BRIEFLY
@given(st.dictionaries(st.sampled_from(["model", "train", "data", "system", "size", "x"]), values, max_size=4))
def test_any_values_are_a_configuration_or_an_error(values):
    with contextlib.suppress(BlockRecurrentError):
        RunConfig.from_dict(values)


@BRIEFLY
@given(st.dictionaries(st.sampled_from([*ModelConfig.__dataclass_fields__]), values, max_size=4))
def test_any_values_are_a_model_configuration_or_an_error(values):
    with contextlib.suppress(BlockRecurrentError):
        ModelConfig.from_dict(values)


def test_an_untouched_copy_is_accepted(made, tmp_path):
    copy = fresh_copy(made, tmp_path / "copy")
    for kind in KINDS:
        KINDS[kind].load(copy)
    flip(copy / "rec-fixed-skip" / "config.toml", 10, 1)
    with pytest.raises(BlockRecurrentError):
        read_toml(copy / "rec-fixed-skip" / "config.toml", sealed=True)
