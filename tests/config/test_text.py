"""Configs as text: JSON, resolved lines, fingerprints and differences."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.config import CHOICES, ConfigError, check, defaulted, diff, fingerprint, from_json, resolved_text, to_json
from hyjax.config.schema import KEYS

SCALARS = st.one_of(st.booleans(), st.integers(1, 64), st.floats(0.01, 0.5), st.text(max_size=8))
FIELDS = st.dictionaries(
    st.sampled_from(["alpha", "beta_2", "gamma"]), SCALARS | st.tuples(SCALARS, SCALARS), max_size=3
)
SECTIONS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "model": st.fixed_dictionaries(
            {
                "legend": st.dictionaries(st.sampled_from("AGWM-"), FIELDS, max_size=3),
                "streams": st.lists(st.integers(1, 1000), max_size=3).map(tuple),
                "norm_eps": st.floats(1e-12, 1e-2),
                "qk_norm": st.booleans(),
                "width": st.integers(1, 256).map(lambda w: 4 * w),
            }
        ),
        "optimizer": st.fixed_dictionaries({"decay": st.lists(st.sampled_from(["kernel", "bias"])).map(tuple)}),
        "eval": st.fixed_dictionaries({"prompt": st.text()}),
    }
)


@settings(max_examples=100, deadline=None)
@given(SECTIONS)
def test_json_round_trip(sections):
    try:
        whole = check(sections)
    except ConfigError as error:  # a surrogate in a legend's text
        assert "UTF-8" in str(error)
        return
    config = from_json(to_json(whole))
    assert check(config) == whole and resolved_text(config) == resolved_text(whole)  # values, and types
    assert fingerprint(config) == fingerprint(whole)
    assert diff(config, whole) == []


def test_from_json_refuses():
    for text, fragment in [
        ("{", "not JSON"),
        ("[1]", "it can't be"),
        ('{"seed": 1.5}', "seed must be"),
        ('{"model": {"width": null}}', "model.width must be"),
        ('{"seed": NaN}', "seed must be"),
    ]:
        with pytest.raises(ConfigError) as caught:
            from_json(text)
        assert fragment in str(caught.value)


def test_a_config_stored_by_an_older_version_says_which_keys_took_their_default(caplog):
    stored = json.loads(to_json({"seed": 5, "model": {"legend": {"A": {"kv_heads": 2}}}}))
    assert defaulted(stored) == [] and check(from_json(json.dumps(stored)))["seed"] == 5 and not caplog.records
    del stored["train"]["verify"], stored["eval"], stored["model"]["legend"], stored["seed"]
    keys = ["model.legend", "seed", "train.verify", *(key for key in KEYS if key.startswith("eval."))]
    assert defaulted(stored) == sorted(keys)
    for _ in range(2):
        assert from_json(json.dumps(stored)).train.verify is True
    [record] = caplog.records  # once
    assert (
        record.levelname == "WARNING" and "train.verify=True" in record.message and "eval.every=200" in record.message
    )
    with pytest.raises(ConfigError, match=r"train.verfy is not a key of the config; did you mean train.verify\?"):
        from_json('{"train": {"verfy": true}}')


def changed(key, value):
    """A config that differs from the defaults in `key`, legal by itself."""
    special = {
        "data.tokenizer": "letters",
        "train.init_from": "runs/other",
        "model.layout": "GA",
        "model.legend": {"A": {"ffn": None}},
        "model.streams": (5,),
        "data.source": "stdlib",
        "data.glob": "*.py",
        "eval.prompt": "x",
        "optimizer.decay": ("scale",),
        "train.microbatches": 2,
    }
    section, _, name = key.rpartition(".")
    if key in special:
        new = special[key]
    elif key in CHOICES:
        new = CHOICES[key][-1]
    elif isinstance(value, bool):
        new = not value
    else:
        new = value / 2 if isinstance(value, float) and value else value * 2 or 1
    return {section: {name: new}} if section else {name: new}


def test_fingerprint_and_diff_see_every_key():
    others = ("data.path", "data.checksum", "data.mixture", "data.weights", "data.eos")  # legal beside others alone
    keys = {key: value for key, value in KEYS.items() if key not in others}
    seen = {fingerprint({})}
    for key, value in keys.items():
        got = [entry[0] for entry in diff({}, changed(key, value))]
        assert got == ([key] if key != "model.legend" else ["model.legend", "model.legend.A.ffn"])
        seen.add(fingerprint(changed(key, value)))
    assert len(seen) == len(keys) + 1
    assert diff({"model": {"legend": {"A": {"x": 1}}}}, {"model": {"legend": {"A": {"x": 1.0}}}})  # types count


def test_resolved_text():
    lines = resolved_text({"model": {"legend": {"A": {"kv_heads": 2}}}}).splitlines()
    assert lines == sorted(lines) and len(lines) == len(KEYS)
    assert "model.legend.A.kv_heads = 2" in lines and "optimizer.decay = ('kernel',)" in lines
    assert "model.legend = {}" in resolved_text({}).splitlines()
