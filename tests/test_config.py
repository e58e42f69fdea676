"""`ModelConfig` and the presets: every rule refuses what breaks it, by name and value."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from block_recurrent import ModelConfig, preset
from block_recurrent.errors import BlockRecurrentError, ConfigError
from block_recurrent.presets import SIZES, SYSTEMS, preset_lanes

WHOLE = "it must be a whole number of at least 1"
SIZE_FIELDS = [
    "vocab_size",
    "d_model",
    "num_layers",
    "num_heads",
    "head_dim",
    "mlp_dim",
    "window",
    "segment",
    "num_states",
    "memory_size",
    "memory_neighbors",
]
REFUSED = [
    ({"segment": 1000}, "segment 1000 is not a multiple of window 512: .*; try 512"),
    ({"segment": 100}, "segment 100 is not a multiple of window 512: .*; try 512"),
    ({"recurrent_layers": (0,)}, "recurrent_layers has 0: layers are counted from 1 to num_layers = 12"),
    ({"recurrent_layers": (3, 13)}, "recurrent_layers has 13: layers are counted from 1 to num_layers = 12"),
    ({"recurrent_layers": (-1,)}, "recurrent_layers has -1: layers are counted from 1"),
    ({"recurrent_layers": (2.5,)}, "recurrent_layers has 2.5: layers are counted from 1"),
    ({"recurrent_layers": (True,)}, "recurrent_layers has True: layers are counted from 1"),
    ({"recurrent_layers": (3, 3)}, r"recurrent_layers is \[3, 3\]: each layer may be listed only once"),
    ({"recurrent_layers": 10}, r"recurrent_layers is 10: it must be a list of layer numbers, such as \[10\]"),
    ({"recurrent_layers": "10"}, "recurrent_layers is '10': it must be a list of layer numbers"),
    ({"memory_layers": (13,)}, "memory_layers has 13: layers are counted from 1 to num_layers = 12"),
    ({"memory_layers": (9,), "recurrent_layers": (9,)}, "layer 9 is in recurrent_layers and in memory_layers"),
    ({"memory_neighbors": 129, "memory_size": 128}, "memory_neighbors 129 is more than memory_size 128"),
    ({"feedback": True}, "feedback is true, but recurrent_layers is empty"),
    ({"feedback": "yes"}, "feedback is 'yes': it must be true or false"),
    ({"gate": "lstmm"}, r"gate is 'lstmm': it must be one of fixed, lstm \(did you mean 'lstm'\?\)"),
    ({"gate": None}, "gate is None: it must be one of fixed, lstm"),
    (
        {"gate_config": "skipp"},
        r"gate_config is 'skipp': it must be one of dual, single, skip \(did you mean 'skip'\?\)",
    ),
    ({"gate_bias": 1}, "gate_bias is 1: it must be true, false or unset"),
    ({"gate_tanh": "no"}, "gate_tanh is 'no': it must be true, false or unset"),
    ({"dropout": 1.0}, "dropout is 1.0: it must be a number of at least 0 and less than 1"),
    ({"dropout": -0.1}, "dropout is -0.1: it must be a number"),
    ({"dropout": float("nan")}, "dropout is nan: it must be a number"),
    ({"attention_dropout": "0.1"}, "attention_dropout is '0.1': it must be a number"),
    ({"num_layers": "12", "recurrent_layers": (3,)}, "num_layers is '12': it must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_a_broken_rule_is_named_with_its_value(fields, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**fields)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(fields)
    with pytest.raises(ConfigError, match=message):
        ModelConfig().replace(**fields)


@pytest.mark.parametrize("name", SIZE_FIELDS)
@pytest.mark.parametrize("value", [0, -4, 1.5, "8", None, True])
def test_sizes_are_whole_numbers_of_at_least_one(name, value):
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}: {WHOLE}")):
        ModelConfig(**{name: value})


def test_an_unknown_key_names_the_nearest_one():
    with pytest.raises(
        ConfigError, match=r"unknown model key 'd_modle' \(did you mean 'd_model'\?\); the keys are vocab"
    ):
        ModelConfig.from_dict({"d_modle": 3})
    with pytest.raises(ConfigError, match=r"'recurent_layers' \(did you mean 'recurrent_layers'\?\)"):
        ModelConfig().replace(recurent_layers=(3,))
    with pytest.raises(ConfigError, match=r"unknown model key 'xyzzy'; the keys are"):
        preset("slide", "micro", xyzzy=1)
    with pytest.raises(ConfigError, match=r"unknown model key '5'; the keys are"):
        ModelConfig.from_dict({5: 1})


def test_errors_are_value_errors():
    assert issubclass(ConfigError, BlockRecurrentError)
    assert issubclass(BlockRecurrentError, ValueError)


def test_a_config_is_frozen_and_hashable():
    config = ModelConfig(recurrent_layers=[10])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window = 3
    assert hash(config) == hash(ModelConfig(recurrent_layers=(10,)))


def test_layers_are_sorted():
    assert ModelConfig(recurrent_layers=[10, 3]).recurrent_layers == (3, 10)


def test_a_config_goes_through_json_and_back():
    for system in SYSTEMS:
        config = preset(system, "650m", gate_tanh=True)
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unset_gate_settings_follow_the_paper():
    assert (ModelConfig(gate="fixed").has_gate_bias, ModelConfig(gate="fixed").has_gate_tanh) == (True, False)
    assert (ModelConfig(gate="lstm").has_gate_bias, ModelConfig(gate="lstm").has_gate_tanh) == (True, True)
    code = ModelConfig(gate="lstm", gate_bias=False, gate_tanh=False)
    assert (code.has_gate_bias, code.has_gate_tanh) == (False, False)


def test_the_shape_is_what_weights_and_memories_depend_on():
    config = preset("rec-fixed-skip", "micro")
    same = [{"segment": 128}, {"dropout": 0.3}, {"attention_dropout": 0.3}, {"gate_bias": True}, {"gate_tanh": False}]
    other = [{"num_states": 9}, {"window": 32}, {"gate_bias": False}, {"gate_tanh": True}, {"feedback": True}]
    for fields in same:
        assert config.replace(**fields).shape_json() == config.shape_json()
    for fields in other:
        assert config.replace(**fields).shape_json() != config.shape_json()


# --- presets ---


def test_there_are_fifteen_systems_and_nine_sizes():
    assert list(SYSTEMS) == [
        *("xl", "xl-2w", "xl-4w", "xl-plus", "slide", "slide-plus"),
        *("rec-lstm-dual", "rec-lstm-single", "rec-lstm-skip"),
        *("rec-fixed-dual", "rec-fixed-single", "rec-fixed-skip"),
        *("feedback-lstm-single", "feedback-fixed-skip", "memorizing"),
    ]
    assert list(SIZES) == ["micro", "tiny", "small", "40m", "80m", "160m", "325m", "650m", "1.3b"]


# layers, recurrent, D, H, K, F, W, N, S, M, n
SIZE_TABLE = {
    "micro": (3, (2,), 48, 4, 12, 96, 16, 64, 16, 64, 8),
    "tiny": (4, (3,), 128, 4, 32, 512, 64, 512, 64, 4096, 32),
    "small": (8, (7,), 320, 5, 64, 1280, 128, 1024, 128, 16384, 64),
    "40m": (12, (10,), 512, 8, 64, 2048, 512, 4096, 512, 65536, 128),
    "80m": (12, (10,), 512, 8, 128, 4096, 512, 4096, 512, 65536, 128),
    "160m": (12, (10,), 1024, 8, 128, 4096, 512, 4096, 512, 65536, 128),
    "325m": (12, (10,), 1024, 16, 128, 8192, 512, 4096, 512, 65536, 128),
    "650m": (24, (10, 20), 1024, 16, 128, 8192, 512, 4096, 512, 65536, 128),
    "1.3b": (24, (10, 20), 2048, 16, 128, 8192, 512, 4096, 512, 65536, 128),
}


@pytest.mark.parametrize("size", SIZE_TABLE)
def test_sizes_are_those_of_the_table(size):
    c = preset("rec-fixed-skip", size)
    assert SIZE_TABLE[size] == (
        *(c.num_layers, c.recurrent_layers, c.d_model, c.num_heads, c.head_dim, c.mlp_dim),
        *(c.window, c.segment, c.num_states, c.memory_size, c.memory_neighbors),
    )


# layers, N, W at 160m, as in the paper's main table
SYSTEM_TABLE = {
    "xl": (12, 512, 512),
    "xl-2w": (12, 1024, 1024),
    "xl-4w": (12, 2048, 2048),
    "xl-plus": (13, 512, 512),
    "slide": (12, 4096, 512),
    "slide-plus": (13, 4096, 512),
    "rec-lstm-dual": (12, 4096, 512),
    "feedback-fixed-skip": (12, 4096, 512),
    "memorizing": (12, 512, 512),
}


@pytest.mark.parametrize("system", SYSTEM_TABLE)
def test_systems_are_those_of_the_table(system):
    c = preset(system, "160m")
    assert (c.num_layers, c.segment, c.window) == SYSTEM_TABLE[system]
    assert c.recurrent_layers == ((10,) if system.startswith(("rec", "feedback")) else ())
    assert c.memory_layers == ((9,) if system == "memorizing" else ())
    assert c.feedback == system.startswith("feedback")
    assert c.vocab_size == 32000
    assert (c.dropout, c.attention_dropout) == (0.05, 0.05)


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name.startswith(("rec", "feedback"))])
def test_names_of_recurrent_systems_say_what_they_are(system):
    kind, gate, gate_config = system.split("-")
    c = preset(system, "tiny")
    assert (c.feedback, c.gate, c.gate_config) == (kind == "feedback", gate, gate_config)
    assert (c.gate_bias, c.gate_tanh) == (None, None)


def test_plus_adds_a_layer_for_each_recurrent_layer():
    assert preset("slide-plus", "650m").num_layers == 26
    assert preset("xl-plus", "micro").num_layers == 4


def test_the_memory_is_in_layer_three_quarters():
    assert {size: preset("memorizing", size).memory_layers for size in ("micro", "tiny", "small", "40m", "650m")} == {
        "micro": (2,),
        "tiny": (3,),
        "small": (6,),
        "40m": (9,),
        "650m": (18,),
    }


def test_every_system_sees_the_same_number_of_tokens_a_step():
    for size in SIZES:
        tokens = {preset_lanes(system, size) * preset(system, size).segment for system in SYSTEMS}
        assert len(tokens) == 1
    assert preset_lanes("slide", "160m") * 4096 == preset_lanes("xl", "160m") * 512 == 131_072


def test_overrides_and_their_rules():
    assert preset("slide", "micro", vocab_size=257, dropout=0.0).vocab_size == 257
    with pytest.raises(ConfigError, match="segment 65 is not a multiple of window 16"):
        preset("slide", "micro", segment=65)
    with pytest.raises(ConfigError, match="recurrent_layers has 4: layers are counted from 1 to num_layers = 3"):
        preset("rec-fixed-skip", "micro", recurrent_layers=(4,))
    with pytest.raises(ConfigError, match="num_states is 0"):
        preset("rec-fixed-skip", "micro", num_states=0)


def test_unknown_systems_and_sizes_name_the_nearest_one():
    with pytest.raises(ConfigError, match=r"there is no system 'slde' \(did you mean 'slide'\?\); known: xl, xl-2w"):
        preset("slde", "160m")
    with pytest.raises(ConfigError, match=r"there is no size '160mb' \(did you mean '160m'\?\); known: micro, tiny"):
        preset("slide", "160mb")
    with pytest.raises(ConfigError, match="there is no system"):
        preset(["slide"], "160m")
