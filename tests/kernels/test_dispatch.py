"""Which implementation serves a call, by what is traced for and what the operator's kernels can serve."""

import logging

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from hyjax.kernels import dispatch

SERVED = {"pallas_tpu": None, "pallas_gpu": None, "splash": None, "cudnn": None}
REFUSED = dict.fromkeys(SERVED, "the head dim is 7")


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(dispatch, "PREFERRED", {"tpu": {"op": "pallas"}})


def traced_for(platform: str, kind: str = "a chip"):
    """A mesh of a device that need not be there, as in compiling ahead of time."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def test_the_device_is_the_active_mesh_s_else_the_default_one():
    assert dispatch.device() == ("cpu", "cpu")
    with traced_for("tpu", "TPU v5 lite"):
        assert dispatch.device() == ("tpu", "TPU v5 lite")
        assert dispatch.by_backend({"cpu": 1, "gpu": 2, "tpu": 3}) == 3


@pytest.mark.parametrize(
    ("platform", "implementation", "interpret", "expected"),
    [
        ("cpu", "auto", False, "xla"),
        ("tpu", "auto", False, "pallas_tpu"),
        ("gpu", "auto", False, "xla"),
        ("tpu", "pallas", False, "pallas_tpu"),
        ("gpu", "pallas", False, "pallas_gpu"),
        ("cpu", "pallas", True, "pallas_tpu"),
        ("gpu", "pallas", True, "pallas_gpu"),
        ("tpu", "splash", False, "splash"),
        ("gpu", "cudnn", False, "cudnn"),
        ("tpu", "xla", False, "xla"),
        ("gpu", "reference", False, "reference"),
    ],
)
def test_a_call_that_all_can_serve(platform, implementation, interpret, expected):
    with traced_for(platform):
        assert dispatch.choose("op", implementation, interpret, SERVED) == expected


@pytest.mark.parametrize(
    ("platform", "implementation", "interpret", "kernels", "message"),
    [
        ("tpu", "pallas", False, REFUSED, "op: implementation='pallas' can't serve this call: the head dim is 7"),
        ("cpu", "pallas", True, REFUSED, "the head dim is 7"),
        ("cpu", "pallas", False, SERVED, "it runs on a TPU or a GPU, not on cpu, and interpret=True runs it here"),
        ("gpu", "splash", False, SERVED, "it runs on TPU, not on gpu"),
        ("tpu", "cudnn", False, SERVED, "it runs on GPU, not on tpu"),
        ("tpu", "splash", False, {"pallas_tpu": None}, "the operator has no such kernel"),
        ("tpu", "pallas", False, "none is worth it", "no Pallas kernel serves this operator: none is worth it"),
        ("tpu", "xla", True, SERVED, "interpret=True modifies implementation='pallas' only, not 'xla'"),
        ("tpu", "auto", True, SERVED, "interpret=True modifies implementation='pallas' only, not 'auto'"),
        ("tpu", "triton", False, SERVED, "'triton' is none of auto, reference, xla, pallas, splash, cudnn"),
    ],
)
def test_refusals(platform, implementation, interpret, kernels, message):
    with traced_for(platform), pytest.raises(ValueError) as refusal:
        dispatch.choose("op", implementation, interpret, kernels)
    assert message in str(refusal.value)


def test_auto_falls_back_to_xla_and_says_why_once(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_logged", set())
    with traced_for("tpu"), caplog.at_level(logging.INFO, "hyjax.kernels"):
        choices = [dispatch.choose("op", "auto", False, REFUSED) for _ in range(2)]
    assert choices == ["xla", "xla"]
    reason = "op: implementation 'auto' is 'xla' on tpu, since 'pallas' can't serve: the head dim is 7"
    assert [record.getMessage() for record in caplog.records] == [reason]
